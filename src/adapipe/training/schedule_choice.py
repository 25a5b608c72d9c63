"""Which synchronous schedule runs: the one that was asked for, or the fastest for the costs that are measured.

All schedules learn the same, but for rounding, so trying them costs nothing but their difference in time: the first
synchronous updates run 1f1b, for the times of F, B and U, the next ones zb-h1, for those of I and W. Then the cost
model says which is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapipe.profiling import measured_cost
from adapipe.schedule import SyncSchedule
from adapipe.schedule.plan import fastest_schedule
from adapipe.schedule.timeline import Timeline, joined

WARM_UP = 2
"""Updates of each trial that are not measured."""


@dataclass(slots=True)
class _Trial:
    name: str
    updates: int
    measured: bool


class ScheduleChoice:
    """What to run, and until when.

    schedules: those to choose from by name; with one of them there is nothing to measure. measured: updates to measure
    each with. links: messages take time.
    """

    def __init__(
        self, schedules: Mapping[str, SyncSchedule], *, in_flight: int = 1, measured: int = 4, links: bool = False
    ) -> None:
        self._schedules = schedules
        self._in_flight = in_flight
        self._links = links
        self._timelines: list[Timeline] = []
        self._trials = [
            _Trial(name, updates, kept)
            for name in ("1f1b", "zb-h1")
            for updates, kept in ((WARM_UP, False), (measured, True))
        ]
        self.schedule = next(iter(schedules.values()))
        self.reason: str | None = None
        """Why this one, once that is known; None where there was nothing to choose."""
        if len(schedules) == 1:
            self._trials.clear()
        else:
            self.schedule = schedules["1f1b"]

    @property
    def updates_left(self) -> int | None:
        """Synchronous updates until `observe` must be told; None once all is decided."""
        return self._trials[0].updates if self._trials else None

    @property
    def measuring(self) -> bool:
        """Does `observe` need the timeline of the updates that come now?"""
        return bool(self._trials) and self._trials[0].measured

    def observe(self, updates: int, timeline: Timeline | None) -> None:
        """So many synchronous updates have run, and, if `measuring`, what all stages did in them."""
        trial = self._trials[0]
        trial.updates -= updates
        if timeline is not None:
            self._timelines.append(timeline)
        if trial.updates > 0:
            return
        del self._trials[0]
        if self._trials:
            self.schedule = self._schedules[self._trials[0].name]
            return
        timeline = joined(self._timelines)
        cost = measured_cost(timeline, links=self._links, message_bytes=0, tokens=1, source="measured")
        best, seconds = fastest_schedule(cost, self.schedule.microbatches, self._in_flight)
        self.schedule = self._schedules[best]
        self.reason = because(best, seconds)
        self._timelines.clear()


def because(best: str, seconds: Mapping[str, float]) -> str:
    """Why this schedule, in a few words."""
    times = ", ".join(f"{name} {1e3 * own:.4g} ms" for name, own in seconds.items())
    return f"synchronous schedule {best}: the fastest for the measured costs (modelled per update: {times})"
