"""`adapipe train`: the reference model, trained through a pipeline."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from adapipe.cli.checked import Checked, local_device
from adapipe.cli.config import TrainConfig, parse_config, to_toml, write_toml
from adapipe.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from adapipe.cli.interrupt import LAUNCHER_VARIABLE, Interrupt, end_with_launcher
from adapipe.engine.world import launched_world_size
from adapipe.errors import ConfigurationError, PeerFailure, StageFailure
from adapipe.models.gpt import fill_gpt_weight, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.run import train


def train_command(arguments: Sequence[str]) -> int:
    """Parse, check, and train: here, or on local ranks that run the same command."""
    try:
        checked = Checked(parse_config(list(arguments)))
    except ConfigurationError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"adapipe train: {error}", file=sys.stderr)
        return BAD_INPUT
    if launched_world_size() is None and checked.config.stages > 1:
        return _launch(checked.config)
    return _train_here(checked)


def _launch(config: TrainConfig) -> int:
    """Start one local rank per stage with this very configuration."""
    from adapipe.cli.launch import launch_ranks

    with tempfile.TemporaryDirectory(prefix="adapipe-") as folder:
        path = Path(folder) / "config.toml"
        write_toml(path, config)
        return launch_ranks(config.stages, ["train", "--config", str(path)])


def _train_here(checked: Checked) -> int:
    """Be one rank, or the whole pipeline of one stage."""
    config, options = checked.config, checked.options
    device = local_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    end_with_launcher()
    interrupt = Interrupt()

    def materialise(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        initialise_by_name(module, config.seed, fill_gpt_weight(checked.model))

    try:
        train(
            checked.blocks,
            loss=language_model_loss,
            batches=checked.sampler,
            optimizer=checked.optimizer,
            mode=options.mode,
            plan=options.plan,
            stages=config.stages,
            microbatches=options.microbatches,
            updates=options.updates,
            seconds=options.seconds,
            warmup=options.warmup,
            decay=options.decay,
            clip=options.clip,
            held_out=checked.held_out,
            evaluate_every=options.evaluate_every,
            target_perplexity=options.target_perplexity,
            materialise=materialise,
            precision=options.precision,
            device=device,
            seed=config.seed,
            out=config.out,
            overwrite=config.overwrite,
            config=to_toml(config),
            interrupted=interrupt.requested,
        )
    except ConfigurationError as error:
        print(f"adapipe train: {error}", file=sys.stderr)
        return BAD_INPUT
    except PeerFailure as error:
        _fail(None if error.reported else f"adapipe train failed: {error}", None)
    except StageFailure as error:
        _fail(f"adapipe train failed: {error}", error.__cause__ or error)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        _fail(f"adapipe train failed: rank {rank}: {type(error).__name__}: {error}", error)
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a reader of our output may have gone away
            print(f"{'interrupted; ' if interrupt.requested() else ''}run written to {config.out}", flush=True)
    # Under our own launcher all ranks end well, and it knows about the interrupt itself.
    return INTERRUPTED if interrupt.requested() and LAUNCHER_VARIABLE not in os.environ else 0


def _fail(message: str | None, error: BaseException | None) -> NoReturn:
    """Say what happened, once, with the original traceback, and end this rank without waiting for its peers."""
    if message is not None:
        lines = [] if error is None else traceback.format_exception(error)
        sys.stderr.write("".join([*lines, message, "\n"]))
    sys.stderr.flush()
    os._exit(FAILED)
