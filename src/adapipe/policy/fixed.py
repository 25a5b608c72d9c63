"""Policies that decide nothing: one mode throughout, or a plan made beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from adapipe.errors import ConfigurationError
from adapipe.policy.base import Decision, Line, Mode

_MODES: tuple[Mode, ...] = ("sync", "async")


class Fixed:
    """One mode for the whole run."""

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode

    def observe(self, line: Line) -> None:
        pass

    def decide(self) -> Decision:
        return Decision(self._mode, reason="the mode is fixed")


class Plan:
    """Phases of given lengths, one after the other; the last mode goes on if the budget is longer."""

    def __init__(self, phases: Sequence[tuple[Mode, int]]) -> None:
        self._phases = list(phases)
        self._next = 0

    def observe(self, line: Line) -> None:
        pass

    def decide(self) -> Decision:
        if self._next < len(self._phases):
            mode, updates = self._phases[self._next]
            self._next += 1
            return Decision(mode, updates, reason=f"phase {self._next} of the plan")
        return Decision(self._phases[-1][0], reason="the plan is over, its last mode goes on")


def parse_plan(text: str) -> list[tuple[Mode, int]]:
    """`sync:200,async:600` as [(mode, updates), ...]. Raises ConfigurationError."""
    phases: list[tuple[Mode, int]] = []
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        mode = next((known for known in _MODES if known == name), None)
        if mode is None or not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ConfigurationError(
                f"--plan: {part.strip()!r} is not a phase: write MODE:UPDATES with sync or async and a number "
                'of updates of at least 1, as in --plan "sync:200,async:600"'
            )
        phases.append((mode, int(number)))
    return phases
