"""The contract of a policy.

A policy sees nothing but the lines of `metrics.jsonl`, in order, and answers with the next phase. It is deterministic,
so the decisions of a recorded run can be replayed from its file, and every rank can decide for itself: all see the same
lines (but for `evaluation_seconds`, which no policy may use).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Mode = Literal["sync", "async"]

Line = Mapping[str, Any]
"""A line of metrics.jsonl: an update, or an evaluation (which has `held_out_loss`)."""


def is_evaluation(line: Line) -> bool:
    return "held_out_loss" in line


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs next.

    updates: until the policy is asked again; None means to the end of the run.
    evaluate: measure the held-out loss when they are done.
    reason: one sentence for people. numbers: what the decision was made of.
    """

    mode: Mode
    updates: int | None = None
    evaluate: bool = False
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses phases."""

    def observe(self, line: Line) -> None:
        """The next line of the run's metrics."""

    def decide(self) -> Decision:
        """What to run next. Asked at the start, and whenever a decision has run out."""
