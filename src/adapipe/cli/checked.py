"""Everything that can be known to be wrong with a configuration before a process starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

from adapipe.cli.config import TrainConfig
from adapipe.cli.cost import cost_of, given_flags
from adapipe.data.corpus import load_corpus
from adapipe.data.sampler import Sampler, held_out_microbatches
from adapipe.engine.world import launched_world_size
from adapipe.errors import ConfigurationError
from adapipe.models.gpt import gpt_blocks
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig
from adapipe.models.stages import block_costs
from adapipe.reports.folder import make_folder
from adapipe.run import number_of_stages
from adapipe.schedule.cost import CostModel
from adapipe.training.options import Options, parse_timeline

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, rate: torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
}


class Checked:
    """A configuration that can work, and what was made on the way to know it.

    Raises ConfigurationError, one line, for one that cannot.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.options = Options(
            mode=config.mode,
            plan=config.plan,
            microbatches=config.microbatches,
            updates=config.budget_updates,
            seconds=config.seconds,
            warmup=config.warmup,
            decay=config.decay,
            clip=_clip(config.clip),
            evaluate_every=config.evaluate_every,
            target_perplexity=config.target_perplexity,
            precision=config.precision,
            in_flight=config.in_flight,
            sync_schedule=config.sync_schedule,
        )
        if config.stages < 1:
            raise ConfigurationError(f"--stages {config.stages}: a pipeline has at least 1")
        number_of_stages(config.stages)
        self.options.sync_schedules(config.stages)
        self.model = _model(config)
        with torch.device("meta"):
            self.blocks = gpt_blocks(self.model)
        partition(block_costs(self.blocks), config.stages)
        if not 0 < config.learning_rate < float("inf"):
            raise ConfigurationError(f"--learning-rate {config.learning_rate:g}: give a number above 0")
        if config.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"--optimizer {config.optimizer}: unknown optimizer, choose one of {', '.join(OPTIMIZERS)}"
            )
        if config.evaluation_microbatches < 1:
            raise ConfigurationError(f"--evaluation-microbatches {config.evaluation_microbatches}: give at least 1")
        try:
            corpus = load_corpus(config.data)
        except ConfigurationError as error:
            raise ConfigurationError(f"--data: {error}") from None
        corpus.require(config.sequence_length)
        self.sampler = Sampler(corpus.train, config.sequence_length, config.microbatch_size, config.seed)
        self.held_out = held_out_microbatches(
            corpus.held_out, config.sequence_length, config.microbatch_size, config.evaluation_microbatches
        )
        self.timeline = parse_timeline(config.timeline) if config.timeline is not None else None
        self.emulate = self._emulation(config)
        _check_device(config)
        self.config = config

    def _emulation(self, config: TrainConfig) -> CostModel | None:
        """The cost model of an emulated run."""
        if not config.emulate:
            for flag in given_flags(config):
                raise ConfigurationError(f"{flag} is for modelled devices: give --emulate with it")
            return None
        if launched_world_size() not in (None, 1):
            raise ConfigurationError("--emulate runs all stages in one process: start it without torchrun")
        if config.device != "cpu":
            raise ConfigurationError(f"--emulate runs all stages on the CPU: leave out --device {config.device}")
        tokens = config.microbatch_size * config.sequence_length
        cost = cost_of(config, config.stages, message_bytes=4 * tokens * config.width, tokens=tokens)
        return cost if config.cost is not None else replace(cost, seed=config.seed)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.config.optimizer](parameters, self.config.learning_rate)


def make_out(config: TrainConfig) -> Path:
    """The folder of the run, made by rank 0 only. Raises ConfigurationError if it cannot be used."""
    out = config.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    if os.environ.get("RANK", "0") == "0":
        make_folder(out, config.overwrite)
    return out


def _clip(limit: float) -> float | None:
    if limit < 0 or limit != limit:
        raise ConfigurationError(f"--clip {limit:g}: give a norm above 0, or 0 for no clipping")
    return limit if limit > 0 else None


def _model(config: TrainConfig) -> GPTConfig:
    positions = config.sequence_length if config.max_positions is None else config.max_positions
    if config.max_positions is not None and config.max_positions < 1:
        raise ConfigurationError(f"--max-positions {config.max_positions} must be at least 1")
    model = GPTConfig(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        sequence_length=positions,
        positions=config.positions,  # type: ignore[arg-type]  # validate() checks it
    )
    model.validate()
    if config.sequence_length > positions:
        raise ConfigurationError(
            f"--sequence-length {config.sequence_length} is longer than --max-positions {positions}: "
            "shorten the sequences, or give the model more positions"
        )
    return model


def local_device(name: str) -> torch.device:
    """The device of this rank: the CPU, or the GPU with the number of its local rank."""
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _check_device(config: TrainConfig) -> None:
    if config.device == "cpu":
        return
    if config.device != "cuda":
        raise ConfigurationError(f"--device {config.device}: unknown device, choose cpu or cuda")
    here = config.stages if launched_world_size() is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count()
    if found < here:
        raise ConfigurationError(
            f"--device cuda: {here} stages on this machine need as many GPUs, and it shows {found}"
        )
