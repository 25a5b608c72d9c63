"""The budget of a run: a number of updates, or seconds of training clock."""

from __future__ import annotations

from dataclasses import dataclass

from adapipe.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of the two. Seconds are of the training clock, which stands still during evaluation."""

    updates: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.updates is None) == (self.seconds is None):
            raise ConfigurationError("give a budget: either --updates or --seconds, and not both")
        if self.updates is not None and self.updates < 1:
            raise ConfigurationError(f"--updates {self.updates}: an empty budget, give at least 1")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ConfigurationError(f"--seconds {self.seconds:g}: not a budget, give a number above 0")

    def fraction(self, updates: float, seconds: float) -> float:
        """The share of the budget, 0..1, used up after so many updates and seconds."""
        used = updates / self.updates if self.updates is not None else seconds / (self.seconds or 1.0)
        return min(1.0, used)

    def updates_left(self, updates: int, seconds: float, seconds_per_update: float) -> int:
        """Updates that still fit, at least 0; for a budget in seconds an estimate."""
        if self.updates is not None:
            return max(0, self.updates - updates)
        left = (self.seconds or 0.0) - seconds
        return 0 if left <= 0 else max(1, round(left / seconds_per_update))

    def spent(self, updates: int, seconds: float) -> bool:
        return self.fraction(updates, seconds) >= 1.0
