"""`adapipe plan`: what to expect of a pipeline, without training."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from adapipe.cli.config import CostOptions, choices, parse_flags
from adapipe.cli.cost import cost_of, given_flags, link_of
from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.errors import ConfigurationError
from adapipe.models.costs import gpt_cost
from adapipe.models.shape import GPTConfig
from adapipe.schedule import sync_schedule
from adapipe.schedule.cost import CostModel, read_cost
from adapipe.schedule.csv_file import schedule_csv
from adapipe.schedule.plan import (
    ASYNC,
    Candidate,
    Estimate,
    candidates,
    estimate,
    hiding_in_flight,
    recommend,
    seconds_per_update,
)

if TYPE_CHECKING:
    from rich.table import Table

WORTH_SAYING = 1.05
"""Times as fast."""

MOST_ROWS = 12
"""Stages in the table of one plan; those between the first and the last ones are left out."""


@dataclass(frozen=True)
class PlanConfig(CostOptions):
    """Say what to expect of a pipeline: time per update, idle time, staleness and memory, for every combination of
    stages, microbatches, modes (synchronous schedules, async) and microbatches in flight. Nothing is trained; all times
    are modelled.

    The costs come from a cost file (--cost), from equal stages (--forward-ms), or from the shape of a model (--layers,
    --width, ... with --tflops).
    """

    stages: str | None = None
    """Numbers of stages, such as "2,4,8". Default: that of the cost file, or 2,4,8."""
    microbatches: str = "8"
    """Numbers of microbatches per update, such as "4,8,16"."""
    modes: str = "1f1b,zb-h1,async"
    """Ways to run it: gpipe, 1f1b, zb-h1 (synchronous schedules), async."""
    in_flight: str = "1"
    """Microbatches in flight per hop, such as "1,2". More hides the latency of slow links."""
    layers: int | None = None
    """Describe a model: its transformer blocks."""
    width: int = 1024
    """Width of the residual stream."""
    heads: int = 16
    """Attention heads; must divide the width."""
    vocabulary: int = 256
    """Tokens in the vocabulary."""
    sequence_length: int = 1024
    """Tokens per sequence."""
    microbatch_size: int = 1
    """Sequences per microbatch."""
    precision: Annotated[str, choices("fp32", "bf16")] = "fp32"
    """bf16: matrix products in bfloat16, weights in float32."""
    optimizer: Annotated[str, choices("adamw", "sgd")] = "adamw"
    """What the optimizer keeps: adamw two numbers per weight, sgd (momentum) one."""
    tflops: float | None = None
    """What a device does on this model, in 10^12 floating-point operations per second."""
    memory_gb: float | None = None
    """Memory of a device in 10^9 bytes; plans that need more are marked. Needs a model, or a cost file with bytes."""
    picture: Path = Path("plan.png")
    """Where to draw the timeline of the recommended plan."""
    json: Path | None = None
    """Where to write all figures."""
    csv: Path | None = None
    """Where to write the orders of the recommended synchronous plan: a file for --sync-schedule of a training."""


def plan_command(arguments: Sequence[str]) -> int:
    """Parse, estimate, print, draw."""
    config = parse_flags(PlanConfig, "adapipe plan", arguments)
    try:
        _plan(config)
    except ConfigurationError as error:
        print(f"adapipe plan: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _plan(config: PlanConfig) -> None:
    device_bytes = None if config.memory_gb is None else config.memory_gb * 1e9
    if config.memory_gb is not None and not config.memory_gb > 0:
        raise ConfigurationError(f"--memory-gb {config.memory_gb:g}: give a number above 0")
    costs = _costs(config)
    default = str(len(read_cost(config.cost).stages)) if config.cost is not None else "2,4,8"
    wanted = candidates(
        [mode.strip() for mode in config.modes.split(",")],
        _numbers("--stages", config.stages or default),
        _numbers("--microbatches", config.microbatches),
        _numbers("--in-flight", config.in_flight),
    )
    for candidate in wanted:
        _check_messages(costs(candidate.stages))
    estimates = estimate(wanted, costs, device_bytes)
    if device_bytes is not None and any(e.memory is None for e in estimates):
        raise ConfigurationError("--memory-gb: the costs say nothing of memory; describe a model, or profile one")
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(f"costs: {costs(wanted[0].stages).source}; all times are modelled (virtual clock)", markup=False)
    console.print(_overview(estimates, device_bytes))
    if config.json is not None:
        _write_json(config.json, estimates)
    best, reason = recommend(estimates, device_bytes)
    c = best.candidate
    console.print(f"recommended: {c.flags}\nbecause: {reason}", markup=False, soft_wrap=True)
    hiding = hiding_in_flight(costs(c.stages))
    if hiding > c.in_flight:
        gain = best.seconds_per_update / seconds_per_update(replace(c, in_flight=hiding), costs(c.stages))
        if gain >= WORTH_SAYING:
            console.print(
                f"messages are slow: --in-flight {hiding} would hide them and be {gain:.2f} times as fast, at the "
                f"price of memory{'' if c.synchronous else f' and {hiding / c.in_flight:g} times the staleness'}",
                markup=False,
                soft_wrap=True,
            )
    console.print(_stages(best))
    _draw(best, costs(c.stages), config.picture)
    console.print(f"timeline drawn to {config.picture}", markup=False, soft_wrap=True)
    if config.csv is not None:
        _write_csv(config.csv, c)


def _check_messages(cost: CostModel) -> None:
    """A bandwidth alone would have no effect."""
    if not cost.message_bytes and any(math.isfinite(link.bandwidth) for link in cost.links):
        raise ConfigurationError(
            "the links have a bandwidth (--bandwidth-gbit), but the size of a message is not known: describe a model "
            "with --layers, or give message_bytes in a cost file"
        )


def _costs(config: PlanConfig) -> Callable[[int], CostModel]:
    """Number of stages -> cost model."""
    if config.layers is None:
        if config.tflops is not None:
            raise ConfigurationError("--tflops is for a model: describe it with --layers, --width, ...")
        return lambda stages: cost_of(config, stages)
    for flag in given_flags(config):
        if flag in ("--cost", "--forward-ms", "--backward-ms"):
            raise ConfigurationError(f"{flag} gives the times of the stages, and so does --layers: give one of them")
    if config.tflops is None:
        raise ConfigurationError("--layers describes a model: give --tflops too, what a device does on it")
    shape = GPTConfig(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        vocabulary=config.vocabulary,
        sequence_length=config.sequence_length,
    )
    link, tflops = link_of(config), config.tflops
    return lambda stages: gpt_cost(
        shape,
        stages,
        microbatch_size=config.microbatch_size,
        sequence_length=config.sequence_length,
        precision=config.precision,
        optimizer=config.optimizer,
        flops_per_second=tflops * 1e12,
        update=(config.update_ms or 0.0) / 1e3,
        link=link,
        jitter=config.jitter or 0.0,
    )


def _numbers(flag: str, text: str) -> list[int]:
    """The whole numbers in a text such as "2,4,8", each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigurationError(f'{flag} {text!r}: give whole numbers separated by commas, such as "2,4,8"') from None


def _overview(estimates: Sequence[Estimate], device_bytes: float | None) -> Table:
    """A row per candidate."""
    table = _table(
        "mode", "stages", "microbatches", "in flight", "time/update", "tokens/s", "vs best sync", "bubble",
        "staleness mean", "most", "peak memory", "",
    )  # fmt: skip
    for e in estimates:
        c = e.candidate
        table.add_row(
            c.mode,
            str(c.stages),
            str(c.microbatches),
            f"{c.in_flight}",
            _seconds(e.seconds_per_update),
            "-" if e.tokens_per_second is None else f"{e.tokens_per_second:,.0f}",
            f"{e.speed_up:.2f}x",
            f"{e.bubble:.0%}",
            f"{max(e.mean_staleness):.2f}",
            str(max(e.most_stale)),
            "-" if e.memory is None else f"{_bytes(e.memory[e.heaviest].total)} (stage {e.heaviest})",
            "" if device_bytes is None or e.fits else "does not fit",
        )
    return table


def _stages(best: Estimate) -> Table:
    """A row per stage of one candidate."""
    table = _table("stage", "staleness mean", "most", "weights", "versions", "gradients", "optimizer", "activations",
                   "messages", "total")  # fmt: skip
    stages = best.candidate.stages
    for stage in range(stages):
        if stages > MOST_ROWS and MOST_ROWS // 2 <= stage < stages - MOST_ROWS // 2:
            if stage == MOST_ROWS // 2:
                table.add_row(*["..."] * 10)
            continue
        m = best.memory[stage] if best.memory else None
        parts = (m.weights, m.versions, m.gradients, m.optimizer, m.activations, m.messages, m.total) if m else ()
        table.add_row(
            str(stage),
            f"{best.mean_staleness[stage]:.2f}",
            str(best.most_stale[stage]),
            *([_bytes(part) for part in parts] or ["-"] * 7),
        )
    return table


def _table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("mode", "") else "right")
    return table


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.3g} s"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _draw(best: Estimate, cost: CostModel, path: Path) -> None:
    """A few updates of the recommended plan, and of the same in the other mode."""
    from adapipe.reports.timeline import Panel, draw_timeline

    c = best.candidate
    updates = 3 if c.microbatches <= 32 else 2
    panels = []
    for mode in (c.mode if c.synchronous else best.against, ASYNC):
        timeline = replace(c, mode=mode).timeline(cost, updates)
        name = mode if mode == ASYNC else f"sync, {mode}"
        title = f"{name}: {updates} updates of {c.microbatches} microbatches on {c.stages} stages"
        panels.append(Panel(title, timeline.table.kinds, timeline.table.indices, timeline.starts, timeline.ends))
    try:
        draw_timeline(panels, path, clock="virtual")
    except OSError as error:
        raise ConfigurationError(f"--picture {path} cannot be written ({error.strerror}): give another path") from None


def _write_csv(path: Path, candidate: Candidate) -> None:
    if not candidate.synchronous:
        raise ConfigurationError("--csv: the recommended plan is asynchronous; give --modes with synchronous schedules")
    c = candidate
    try:
        path.write_text(schedule_csv(sync_schedule(c.mode, c.stages, c.microbatches, c.in_flight)))
    except OSError as error:
        raise ConfigurationError(f"--csv {path} cannot be written ({error.strerror}): give another path") from None
    print(f"orders written to {path}")


def _write_json(path: Path, estimates: Sequence[Estimate]) -> None:
    try:
        path.write_text(json.dumps([asdict(e) for e in estimates], indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(f"--json {path} cannot be written ({error.strerror}): give another path") from None
