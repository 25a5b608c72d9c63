"""`adapipe profile`: measure the stages of a model on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from adapipe.cli.checked import Checked
from adapipe.cli.config import ModelOptions, TrainConfig, parse_flags
from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.cli.failures import guarded
from adapipe.cli.rank import be_a_rank, train_checked
from adapipe.engine.world import launched_world_size
from adapipe.errors import ConfigurationError
from adapipe.profiling import measured_cost, with_memory
from adapipe.schedule.cost import StageCost, cost_toml
from adapipe.training import schedule_choice

_WARM_UP = schedule_choice.WARM_UP


def _trial(config: ProfileConfig) -> int:
    """Updates to measure each synchronous schedule with."""
    return config.updates // 4


@dataclass(frozen=True)
class ProfileConfig(ModelOptions):
    """Measure the stages of a model on this machine: median times of a forward, a backward and an update, the hops
    between stages, and the bytes that each needs. Writes a cost file for `adapipe plan` and `adapipe train --emulate`.

    With as many cores as stages, or under torchrun, the stages run as processes of their own, as in training, and hops
    are measured. Otherwise they run in turn in this process, and the links take no time.
    """

    microbatches: int = 4
    """Microbatches per update while measuring."""
    updates: int = 20
    """Updates to measure, half of them synchronous (one half of those 1f1b, one zb-h1), half asynchronous."""
    out: Path = Path("cost.toml")
    """Where to write the cost file."""
    overwrite: bool = False
    """Replace the file."""


def profile_command(arguments: Sequence[str]) -> int:
    """Parse, check and measure: here, or on local ranks that run the same command."""
    config = parse_flags(ProfileConfig, "adapipe profile", arguments)
    try:
        checked = _checked(config)
    except ConfigurationError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"adapipe profile: {error}", file=sys.stderr)
        return BAD_INPUT
    if launched_world_size() is None and 1 < config.stages <= cores():
        from adapipe.cli.launch import launch_ranks

        return launch_ranks(config.stages, ["profile", *arguments])
    be_a_rank(config.device)
    return guarded("adapipe profile", lambda: _profile(config, checked))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _checked(config: ProfileConfig) -> Checked:
    """The configuration as that of a short training run. Raises ConfigurationError if it cannot work."""
    if config.updates < 4:
        raise ConfigurationError(f"--updates {config.updates}: give at least 4, one of each kind and one to spare")
    if config.out.exists() and not config.overwrite:
        raise ConfigurationError(f"--out {config.out} exists: give another file, or --overwrite to replace it")
    if not os.access(config.out.parent, os.W_OK):
        raise ConfigurationError(f"--out {config.out}: its folder does not exist or cannot be written to")
    synchronous, asynchronous = 2 * (_WARM_UP + _trial(config)), _WARM_UP + config.updates - 2 * _trial(config)
    model = {field.name: getattr(config, field.name) for field in fields(ModelOptions)}
    return Checked(
        TrainConfig(
            **model,
            microbatches=config.microbatches,
            plan=f"sync:{synchronous},async:{asynchronous}",
            updates=synchronous + asynchronous,
        )
    )


def _profile(config: ProfileConfig, checked: Checked) -> None:
    """Run the pipeline twice: to count bytes, and for the times."""
    links = launched_world_size() not in (None, 1)
    metered = train_checked(checked, measure_memory=True, progress=False)
    assert metered.memory is not None
    timed = train_checked(
        checked,
        timeline=range(_WARM_UP, checked.options.budget.updates or 0),
        trial_updates=_trial(config),
        progress=False,
    )
    assert timed.timeline is not None
    tokens = config.microbatch_size * config.sequence_length
    cost = measured_cost(
        timed.timeline,
        links=links,
        message_bytes=4 * tokens * config.width,
        tokens=tokens,
        source=f"measured: {config.layers} layers of width {config.width}, {config.stages} stages"
        + (" as processes of their own" if links else " in turn in one process"),
    )
    cost = with_memory(cost, metered.memory)
    if os.environ.get("RANK", "0") == "0":
        config.out.write_text(cost_toml(cost))
        for number, stage in enumerate(cost.stages):
            hop = f", hop {1e3 * cost.links[number].latency:.3g} ms" if links and number < len(cost.links) else ""
            print(
                f"stage {number}: forward {1e3 * stage.forward:.4g} ms, backward {1e3 * stage.backward:.4g} ms "
                f"(halves {_halves(stage)}), "
                f"update {1e3 * stage.update:.4g} ms, {stage.activation_bytes} bytes kept per microbatch{hop}"
            )
        print(f"cost file written to {config.out}", flush=True)


def _halves(stage: StageCost) -> str:
    halves = stage.backward_input, stage.backward_weight
    return " and ".join("-" if half is None else f"{1e3 * half:.4g}" for half in halves)
