"""The director: asks a policy when a decision has run out, and returns to sync after a non-finite gradient.

The training loop and the replay of a recorded run both go through it, so they ask at the same points.
"""

from __future__ import annotations

from collections.abc import Iterable

from adapipe.policy.base import Decision, Line, Policy, is_evaluation

RECOVERY_UPDATES = 20
"""Synchronous updates after an asynchronous one that a stage skipped because its gradient was not finite."""


class Director:
    """Feeds a policy and keeps the decision in force."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._update = 0
        self._end: int | None = 0  # the update at which the decision in force runs out; None: never
        self._flushed = True
        self._skipped: list[int] = []  # stages whose last asynchronous update was skipped
        self.decision = Decision("sync")
        self.decisions: list[tuple[int, Decision]] = []
        """All decisions so far, with the number of updates done when they were made."""

    def observe(self, line: Line) -> None:
        """The next line of the metrics."""
        self._policy.observe(line)
        if not is_evaluation(line):
            self._update = line["update"]
            self._flushed = line["flushed"]
            if line["mode"] == "async":
                self._skipped = self._skipped + line["skipped_stages"]

    @property
    def due(self) -> bool:
        """Is a new decision needed before the next update?"""
        if self._skipped:
            return self._flushed  # the pipeline first runs empty
        return self._end is not None and self._update >= self._end

    def decide(self) -> Decision:
        """The decision for the next update: the one in force, or a new one."""
        if not self.due:
            return self.decision
        if self._skipped:
            stages = ", ".join(map(str, sorted(set(self._skipped))))
            self.decision = Decision(
                "sync",
                RECOVERY_UPDATES,
                reason=f"stage {stages} met a gradient that is not finite and skipped it: back to sync",
            )
            self._skipped = []
        else:
            self.decision = self._policy.decide()
        length = self.decision.updates
        self._end = None if length is None else self._update + length
        self.decisions.append((self._update, self.decision))
        return self.decision

    @property
    def updates_left(self) -> int | None:
        """Updates until the decision in force runs out; None: it does not."""
        return None if self._end is None else self._end - self._update


def replay(policy: Policy, lines: Iterable[Line]) -> list[tuple[int, Decision]]:
    """The decisions that `policy` makes when it sees a recorded run, each with the number of updates done before it."""
    director = Director(policy)
    director.decide()
    for line in lines:
        if not is_evaluation(line):
            director.decide()
        director.observe(line)
    return director.decisions
