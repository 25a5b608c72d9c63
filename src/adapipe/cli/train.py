"""`adapipe train`: the reference model, trained through a pipeline."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

from adapipe.cli.config import TrainConfig, parse_config, to_toml
from adapipe.data.corpus import Corpus, load_corpus
from adapipe.data.sampler import Sampler, held_out_microbatches
from adapipe.engine.world import launched_world_size
from adapipe.errors import ConfigurationError, PeerFailure, StageFailure
from adapipe.models.gpt import GPTConfig, fill_gpt_weight, gpt_blocks, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.models.partition import block_costs, partition
from adapipe.reports.folder import check_folder
from adapipe.run import local_device, number_of_stages, train
from adapipe.training.options import Options

_BAD_INPUT = 2
_INTERRUPTED = 130


def train_command(arguments: Sequence[str]) -> int:
    """Parse, check, and train: here, or on local ranks that run the same command."""
    try:
        config = parse_config(list(arguments))
        checked = _Checked(config)
    except ConfigurationError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"adapipe train: {error}", file=sys.stderr)
        return _BAD_INPUT
    if launched_world_size() is None and config.stages > 1:
        return _launch(checked.config)
    return _train_here(checked)


class _Checked:
    """A configuration that can work, and what was made on the way to know it. Raises ConfigurationError."""

    def __init__(self, config: TrainConfig) -> None:
        self.options = Options(
            mode=config.mode,
            plan=config.plan,
            microbatches=config.microbatches,
            updates=config.budget_updates,
            seconds=config.seconds,
            warmup=config.warmup,
            decay=config.decay,
            clip=config.clip,
            evaluate_every=config.evaluate_every,
            target_perplexity=config.target_perplexity,
            precision=config.precision,
        )
        if config.stages < 1:
            raise ConfigurationError(f"--stages {config.stages}: a pipeline has at least 1")
        number_of_stages(config.stages)
        self.model = GPTConfig(
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            sequence_length=config.sequence_length if config.max_positions is None else config.max_positions,
            positions=config.positions,  # type: ignore[arg-type]  # validate() checks it
        )
        self.model.validate()
        if config.sequence_length > self.model.sequence_length:
            raise ConfigurationError(
                f"--sequence-length {config.sequence_length} is longer than --max-positions {config.max_positions}: "
                "shorten the sequences, or give the model more positions"
            )
        with torch.device("meta"):
            self.blocks = gpt_blocks(self.model)
        partition(block_costs(self.blocks), config.stages)
        if not 0 < config.learning_rate < float("inf"):
            raise ConfigurationError(f"--learning-rate {config.learning_rate:g}: give a number above 0")
        if config.optimizer not in _OPTIMIZERS:
            raise ConfigurationError(
                f"--optimizer {config.optimizer}: unknown optimizer, choose one of {', '.join(_OPTIMIZERS)}"
            )
        if config.evaluation_microbatches < 1:
            raise ConfigurationError(f"--evaluation-microbatches {config.evaluation_microbatches}: give at least 1")
        self.corpus: Corpus = load_corpus(config.data)
        self.corpus.require(config.sequence_length)
        self.sampler = Sampler(self.corpus.train, config.sequence_length, config.microbatch_size, config.seed)
        self.held_out = held_out_microbatches(
            self.corpus.held_out, config.sequence_length, config.microbatch_size, config.evaluation_microbatches
        )
        local_device(config.device)
        out = config.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
        check_folder(out, config.overwrite)
        self.config = replace(config, out=out)


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, rate: torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
}


def _launch(config: TrainConfig) -> int:
    """Start one local rank per stage with this very configuration."""
    from adapipe.cli.launch import launch_ranks

    with tempfile.TemporaryDirectory(prefix="adapipe-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config))
        code = launch_ranks(config.stages, ["train", "--config", str(path)])
    if code in (0, _INTERRUPTED):
        print(f"{'interrupted; ' if code else ''}run written to {config.out}")
    return code


def _train_here(checked: _Checked) -> int:
    """Be one rank, or the whole pipeline of one stage."""
    config = checked.config
    device = local_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    interrupt = _Interrupt()

    def materialise(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        initialise_by_name(module, config.seed, fill_gpt_weight(checked.model))

    options = checked.options
    try:
        train(
            checked.blocks,
            loss=language_model_loss,
            batches=checked.sampler,
            optimizer=lambda parameters: _OPTIMIZERS[config.optimizer](parameters, config.learning_rate),
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
        return _BAD_INPUT
    except PeerFailure as error:
        _fail(None if error.reported else f"adapipe train failed: {error}", error)
    except StageFailure as error:
        _fail(f"adapipe train failed: {error}", error.__cause__ or error)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        _fail(f"adapipe train failed: rank {rank}: {type(error).__name__}: {error}", error)
    return 0


def _fail(message: str | None, error: BaseException) -> NoReturn:
    """Say what happened, once, with the original traceback, and end this rank without waiting for its peers."""
    if message is not None:
        lines = traceback.format_exception(error) if not isinstance(error, PeerFailure) else []
        sys.stderr.write("".join([*lines, message, "\n"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class _Interrupt:
    """Ctrl-C: the first one ends the run after the update in progress, a second one ends the process."""

    _SAME_PRESS_SECONDS = 0.5  # a terminal and a launcher may both deliver one key press

    def __init__(self) -> None:
        self._since: float | None = None
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since > self._SAME_PRESS_SECONDS:
            os._exit(130)
        self._since = self._since or now

    def requested(self) -> bool:
        return self._since is not None
