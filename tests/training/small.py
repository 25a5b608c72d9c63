"""A small run of the loop: scripted policies, an observer that notes everything, a clock that counts work."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from adapipe.budget import Budget
from adapipe.engine.clock import Clock
from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Stage
from adapipe.engine.transport import Transport
from adapipe.policy import Decision, Director
from adapipe.policy.base import is_evaluation
from adapipe.schedule import Kind
from adapipe.training.learning_rate import learning_rate_schedule
from adapipe.training.loop import Loop, Settings
from adapipe.training.summary import Tally
from tests.engine import toys

Line = dict[str, Any]
RATE = 0.02
"""The peak learning rate of toys.adamw."""


@dataclass
class WorkClock:
    """Time that passes only with work: one second per microbatch trained, `evaluation` per held-out one."""

    evaluation: float = 100.0
    name: str = "counted"
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def spend(self, kind: Kind) -> None:
        pass

    def wait_until(self, instant: float) -> None:
        pass


@dataclass
class Data:
    """Training and held-out microbatches that move the clock. Every one is read twice: inputs, and targets.

    poison: microbatches whose gradient is not finite (their loss is).
    """

    clock: WorkClock = field(default_factory=WorkClock)
    poison: frozenset[int] = frozenset()
    evaluations: list[int] = field(default_factory=list)
    distinct: int | None = None  # so many different microbatches, over and over

    def __call__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.clock.seconds += 0.5
        inputs, targets = toys.batches(microbatch if self.distinct is None else microbatch % self.distinct)
        return inputs, torch.zeros_like(targets) if microbatch in self.poison else targets.clamp(min=1)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.clock.seconds += self.clock.evaluation / 2
        inputs, targets = toys.batches(microbatch if self.distinct else 10_000 + microbatch)
        return inputs, targets.clamp(min=1)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Its gradient is not finite for targets that are all zero."""
    if output.requires_grad and not targets.any():
        output.register_hook(lambda gradient: gradient * math.nan)
    return toys.loss(output, targets)


def pipeline(data: Data, *, stages: int, microbatches: int) -> Pipeline:
    def build(stage: int, transport: Transport, _: Clock) -> Runtime:
        part = toys.cut(stages)[stage]
        module = nn.Sequential(*copy.deepcopy(toys.blocks()[part.start : part.stop]))
        built = Stage(module, stage, stages, loss=loss if stage == stages - 1 else None, optimizer=toys.adamw)
        return Runtime(
            built, transport, data.clock, data, microbatches=microbatches, clip=None, count=toys.count, rank=stage
        )

    return in_process_pipeline(stages, build)


class Script:
    """A policy that answers from a list; its last answer is repeated."""

    def __init__(self, *answers: Decision) -> None:
        self.answers = list(answers)
        self.asked_at: list[int] = []
        self.update = 0

    def observe(self, line: Any) -> None:
        self.update = line["update"]

    def decide(self) -> Decision:
        self.asked_at.append(self.update)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Notes:
    """An observer."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.decisions: list[tuple[int, float, Decision]] = []
        self.progressed: list[dict[str, Any]] = []
        self.events: list[tuple[str, int]] = []

    def line(self, line: Line) -> None:
        self.lines.append(line)
        self.events.append(("evaluation" if is_evaluation(line) else "update", line["update"]))

    def decided(self, update: int, seconds: float, decision: Decision) -> None:
        self.decisions.append((update, seconds, decision))
        self.events.append(("decision", update))

    def progress(self, **state: Any) -> None:
        self.progressed.append(state)


@dataclass
class Run:
    """A run of the loop and what is left of it."""

    pipeline: Pipeline
    notes: Notes
    tally: Tally
    data: Data
    policy: Script

    @property
    def updates(self) -> list[Line]:
        return [line for line in self.notes.lines if not is_evaluation(line)]

    @property
    def evaluations(self) -> list[Line]:
        return [line for line in self.notes.lines if is_evaluation(line)]

    @property
    def evaluated_at(self) -> list[int]:
        return [line["update"] for line in self.evaluations]

    @property
    def modes(self) -> list[str]:
        return [line["mode"] for line in self.updates]


def run(
    answers: Sequence[Decision],
    budget: Budget,
    *,
    data: Data | None = None,
    stages: int = 2,
    microbatches: int = 2,
    evaluate_every: int = 1000,
    held_out: bool = True,
    target_perplexity: float | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    warmup: float = 0.0,
    decay: str = "constant",
) -> Run:
    data = data or Data()
    built = pipeline(data, stages=stages, microbatches=microbatches)
    policy, notes = Script(*answers), Notes()
    settings = Settings(
        budget=budget,
        schedule=learning_rate_schedule(warmup, decay),
        microbatches=microbatches,
        evaluate_every=evaluate_every,
        held_out=data if held_out else None,
        target_perplexity=target_perplexity,
        interrupted=interrupted,
    )
    tally = Loop(built, Director(policy), settings, notes).run()
    return Run(built, notes, tally, data, policy)
