"""The meter: rates of progress from held-out losses at flushes and the training clock."""

from __future__ import annotations

from dataclasses import dataclass

from adapipe.policy.base import Line, is_evaluation


@dataclass(frozen=True, slots=True)
class Reading:
    """A held-out loss (mean per token) and when it was measured."""

    update: int
    seconds: float
    loss: float


def rate(first: Reading, last: Reading) -> float:
    """Held-out loss gained per second of training clock between two readings; negative if it got worse."""
    return (first.loss - last.loss) / max(last.seconds - first.seconds, 1e-9)


class Meter:
    """Keeps what a policy needs of the lines it has seen."""

    def __init__(self) -> None:
        self.update = 0
        self.seconds = 0.0
        self.reading: Reading | None = None
        self._window = (0, 0.0)  # update and seconds when the mode last changed
        self._mode: str | None = None

    def observe(self, line: Line) -> None:
        if is_evaluation(line):
            if line["held_out_loss"] is not None:  # null: it was not finite
                self.reading = Reading(line["update"], line["training_seconds"], line["held_out_loss"])
            return
        if line["mode"] != self._mode:
            self._mode, self._window = line["mode"], (self.update, self.seconds)
        self.update, self.seconds = line["update"], line["training_seconds"]

    def fresh_reading(self, mode: str) -> Reading | None:
        """The last reading, if it was taken after the last update and that was in `mode`."""
        current = self.reading is not None and self.reading.update == self.update and self._mode in (mode, None)
        return self.reading if current else None

    @property
    def seconds_per_update(self) -> float | None:
        """In the mode that runs now; None before its first update."""
        updates = self.update - self._window[0]
        return (self.seconds - self._window[1]) / updates if updates > 0 else None
