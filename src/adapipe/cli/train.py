"""`adapipe train`: the reference model, trained through a pipeline."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapipe.cli.checked import Checked, make_out
from adapipe.cli.config import TrainConfig, parse_config, to_toml, write_toml
from adapipe.cli.exit_codes import BAD_INPUT, INTERRUPTED
from adapipe.cli.failures import guarded
from adapipe.cli.interrupt import LAUNCHER_VARIABLE, Interrupt
from adapipe.cli.rank import be_a_rank, train_checked
from adapipe.engine.world import launched_world_size
from adapipe.errors import ConfigurationError


def train_command(arguments: Sequence[str]) -> int:
    """Parse, check, and train: here, or on local ranks that run the same command."""
    try:
        checked = Checked(parse_config(list(arguments)))
        config = replace(checked.config, out=make_out(checked.config))
    except ConfigurationError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"adapipe train: {error}", file=sys.stderr)
        return BAD_INPUT
    if launched_world_size() is None and config.stages > 1 and checked.emulate is None:
        return _launch(config)
    return _train_here(checked, config)


def _launch(config: TrainConfig) -> int:
    """Start one local rank per stage with this very configuration."""
    from adapipe.cli.launch import launch_ranks

    with tempfile.TemporaryDirectory(prefix="adapipe-") as folder:
        path = Path(folder) / "config.toml"
        write_toml(path, config)
        return launch_ranks(config.stages, ["train", "--config", str(path)])


def _train_here(checked: Checked, config: TrainConfig) -> int:
    """Be one rank, or the whole pipeline."""
    be_a_rank(config.device)
    interrupt = Interrupt()

    def run() -> None:
        result = train_checked(
            checked,
            timeline=checked.timeline,
            measure_memory=config.measure_memory,
            out=config.out,
            overwrite=config.overwrite,
            config=to_toml(config),
            interrupted=interrupt.requested,
        )
        if checked.timeline is not None and result.timeline is None and os.environ.get("RANK", "0") == "0":
            print(f"no timeline: the run ended before update {checked.timeline.start}")

    code = guarded("adapipe train", run)
    if code:
        return code
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a reader of our output may have gone away
            print(f"{'interrupted; ' if interrupt.requested() else ''}run written to {config.out}", flush=True)
    # Under our own launcher all ranks end well, and it knows about the interrupt itself.
    return INTERRUPTED if interrupt.requested() and LAUNCHER_VARIABLE not in os.environ else 0
