"""The summary of a run: totals by mode, phases, and the end of it, from the lines of its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adapipe.policy.base import Line, is_evaluation


@dataclass(slots=True)
class Phase:
    """A run of updates in one mode. `first_update` counts the updates before it; `seconds` of the training clock."""

    mode: str
    first_update: int
    updates: int
    seconds: float


def phases(lines: Iterable[Line]) -> list[Phase]:
    """The phases of a run, from the update lines of its metrics. Neighbouring phases of one mode count as one."""
    found: list[Phase] = []
    clock = 0.0
    for line in lines:
        if not is_evaluation(line):
            now = clock if line["training_seconds"] is None else line["training_seconds"]
            _add_update(found, line["mode"], line["update"], now - clock)
            clock = now
    return found


def _add_update(found: list[Phase], mode: str, update: int, seconds: float) -> None:
    if not found or found[-1].mode != mode:
        found.append(Phase(mode, update - 1, 0, 0.0))
    found[-1].updates += 1
    found[-1].seconds += seconds


def perplexity(loss: float) -> float:
    """exp(mean loss per token); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class Tally:
    """Adds up the lines of a run."""

    def __init__(self, target_perplexity: float | None) -> None:
        self.target_perplexity = target_perplexity
        self.updates = 0
        self.tokens = 0
        self.seconds = 0.0
        self.held_out_loss: float | None = None
        self.seconds_to_target: float | None = None
        self.evaluation_seconds = 0.0
        self.phases: list[Phase] = []
        self._tokens = {"sync": 0, "async": 0}
        self._seconds = {"sync": 0.0, "async": 0.0}
        self._idle = {"sync": 0.0, "async": 0.0}  # seconds times idle share, mean over stages

    def add(self, line: Line) -> None:
        if is_evaluation(line):
            self.held_out_loss = line["held_out_loss"]
            self.evaluation_seconds += line["evaluation_seconds"]
            found, target = line["held_out_perplexity"], self.target_perplexity
            if None not in (found, target) and found <= target and self.seconds_to_target is None:
                self.seconds_to_target = line["training_seconds"]
            return
        mode, seconds = line["mode"], line["training_seconds"] - self.seconds
        _add_update(self.phases, mode, line["update"], seconds)
        self._tokens[mode] += line["tokens"] - self.tokens
        self._seconds[mode] += seconds
        self._idle[mode] += seconds * sum(line["idle_share"]) / len(line["idle_share"])
        self.updates, self.tokens, self.seconds = line["update"], line["tokens"], line["training_seconds"]

    @property
    def reached_target(self) -> bool:
        return self.seconds_to_target is not None

    def tokens_per_second(self, mode: str) -> float | None:
        return self._tokens[mode] / self._seconds[mode] if self._seconds[mode] > 0 else None

    def idle_share(self, mode: str) -> float | None:
        """The share of the stages' time spent waiting for each other, mean over stages and time."""
        return self._idle[mode] / self._seconds[mode] if self._seconds[mode] > 0 else None

    def summary(self, **more: Any) -> dict[str, Any]:
        """All of it as one flat-named dictionary; what does not exist is None. `more` comes first."""
        loss = self.held_out_loss
        figures: Mapping[str, Any] = {
            "updates": self.updates,
            "tokens": self.tokens,
            "training_seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "held_out_loss": loss,
            "held_out_perplexity": None if loss is None else perplexity(loss),
            "target_perplexity": self.target_perplexity,
            "seconds_to_target": self.seconds_to_target,
            "tokens_per_second": {mode: self.tokens_per_second(mode) for mode in self._tokens},
            "idle_share": {mode: self.idle_share(mode) for mode in self._tokens},
            "switches": max(0, len(self.phases) - 1),
            "phases": [asdict(phase) for phase in self.phases],
        }
        return {**more, **figures}
