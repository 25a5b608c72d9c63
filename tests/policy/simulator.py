"""A made-up training run for policies: turns decisions into the lines that a real run would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adapipe.budget import Budget
from adapipe.policy import Decision, Director, Policy
from adapipe.policy.base import is_evaluation

Line = dict[str, Any]


@dataclass(frozen=True)
class World:
    """How fast each mode is, and how much it learns.

    seconds: of an update, by mode. gain: (mode, share of the budget used) -> held-out loss gained per second.
    lost: (mode, updates done) -> is the held-out loss of this evaluation not finite?
    skips: updates (from 1) at which a stage skips a gradient that is not finite. lag: updates that are still made
    before the run has flushed after it.
    """

    gain: Callable[[str, float], float]
    seconds: dict[str, float] = field(default_factory=lambda: {"sync": 1.25, "async": 1.0})
    lost: Callable[[str, int], bool] = lambda mode, update: False
    skips: frozenset[int] = frozenset()
    lag: int = 0


@dataclass
class Simulation:
    """What came of it."""

    lines: list[Line] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    @property
    def updates(self) -> list[Line]:
        return [line for line in self.lines if not is_evaluation(line)]

    @property
    def modes(self) -> list[str]:
        return [line["mode"] for line in self.updates]

    def share(self, mode: str, since: float = 0.0) -> float:
        """The share of updates in `mode`, of those after the share `since` of them."""
        late = self.modes[round(since * len(self.modes)) :]
        return late.count(mode) / len(late)


def simulate(policy: Policy, budget: Budget, world: World, *, initial_evaluation: bool = True) -> Simulation:
    """Run `policy` through `world` until the budget is spent, asked at the points where a real run asks it."""
    director, run = Director(policy), Simulation()
    update, clock, loss, evaluated = 0, 0.0, 5.0, -1

    def emit(line: Line) -> None:
        director.observe(line)
        run.lines.append(line)

    def evaluate(mode: str) -> None:
        nonlocal evaluated
        if evaluated != update:
            evaluated = update
            seen = None if world.lost(mode, update) else loss
            emit({"update": update, "mode": mode, "training_seconds": clock, "held_out_loss": seen})

    decision = director.decide()
    if initial_evaluation:
        evaluate(decision.mode)
    while not budget.spent(update, clock):
        assert decision.updates is None or decision.updates >= 1
        rest: int | None = None  # updates still to come after a skipped one
        while not budget.spent(update, clock) and rest != 0:
            if rest is None and director.due:
                break
            mode = decision.mode
            seconds = world.seconds[mode]
            loss -= world.gain(mode, budget.fraction(update, clock)) * seconds
            update, clock = update + 1, clock + seconds
            skipped = [1] if update in world.skips else []
            if skipped and mode == "async" and rest is None:
                rest = world.lag + 1
            rest = None if rest is None else rest - 1
            flushed = mode == "sync" or rest == 0
            line = {"update": update, "mode": mode, "training_seconds": clock, "skipped_stages": skipped}
            emit({**line, "flushed": flushed})
        if decision.evaluate and director.due:
            evaluate(decision.mode)
        if not budget.spent(update, clock):
            decision = director.decide()
    evaluate(decision.mode)
    run.decisions = director.decisions
    return run
