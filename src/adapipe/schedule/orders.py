"""Orders: which action a stage does next.

A segment is n updates between two flushes, each of K microbatches, on P stages. Stage s runs

    warm-up:   min(W, n*K) forwards     W = P-1-s, or more (see `adapipe.schedule.laws`)
    steady:    F, B, F, B, ...          U after every K-th B
    cool-down: the remaining B          U after every K-th B

n = 1 is synchronous 1F1B; a long n is asynchronous 1F1B with local accumulation. P = 3, K = 2, n = 2:

    stage 0   0F0 0F1 0F2 0B0 0F3 0B1 0U0 0B2 0B3 0U1
    stage 1   1F0 1F1 1B0 1F2 1B1 1U0 1F3 1B2 1B3 1U1
    stage 2   2F0 2B0 2F1 2B1 2U0 2F2 2B2 2F3 2B3 2U1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.laws import in_flight_bound, warm_up


def forward_comes_next(forwards: Any, backwards: Any, end: Any, limit: Any) -> Any:
    """The rule of every order: a forward while there is one left and the limit of microbatches in flight allows it,
    else a backward. Of one stage (int), or of many at once (arrays)."""
    return (forwards < end) & (forwards - backwards < limit)


def check_segment_shape(stages: int, microbatches: int, updates: int, first_update: int, in_flight: int) -> None:
    """Raise ScheduleError for a segment that cannot exist."""
    for name, value, least in (
        ("stages", stages, 1),
        ("microbatches per update", microbatches, 1),
        ("updates", updates, 1),
        ("first update", first_update, 0),
        ("microbatches in flight per hop", in_flight, 1),
    ):
        if value < least:
            raise ScheduleError(f"{name} must be at least {least}, got {value}")


class SegmentOrder:
    """The order of one stage for one segment, produced while it runs, so that the segment can be ended early.

    Iterating gives the actions. `end_update` (exclusive) may be lowered by `end_at` between two actions, as long as
    every forward already given belongs to an update that stays; all stages that end at the same update stay in step.
    """

    def __init__(
        self, stage: int, stages: int, microbatches: int, first_update: int, updates: int, in_flight: int = 1
    ) -> None:
        check_segment_shape(stages, microbatches, updates, first_update, in_flight)
        if not 0 <= stage < stages:
            raise ScheduleError(f"stage {stage} does not exist in a pipeline of {stages} stages")
        self.stage = stage
        self.microbatches = microbatches
        self.end_update = first_update + updates
        # Forwards whose backward is still to come.
        self.in_flight_limit = in_flight_bound(warm_up(stage, stages, in_flight))
        self._first_microbatch = first_update * microbatches
        self._forwards = self._backwards = self._first_microbatch  # the next microbatch of each kind

    @property
    def end_microbatch(self) -> int:
        """One past the last microbatch of the segment."""
        return self.end_update * self.microbatches

    def end_at(self, end_update: int) -> None:
        """End the segment before update `end_update`. Raises ScheduleError if a forward beyond it was given, or if
        nothing would be left of the segment."""
        if end_update * self.microbatches <= self._first_microbatch:
            raise ScheduleError(
                f"a segment that begins with update {self._first_microbatch // self.microbatches} cannot end before "
                f"update {end_update}"
            )
        if end_update > self.end_update:
            raise ScheduleError(f"a segment that ends at update {self.end_update} cannot end at {end_update}")
        if self._forwards > end_update * self.microbatches:
            raise ScheduleError(
                f"the segment cannot end at update {end_update}: stage {self.stage} has already run the forward "
                f"of microbatch {self._forwards - 1}"
            )
        self.end_update = end_update

    def __iter__(self) -> Iterator[Action]:
        while self._backwards < self.end_microbatch:
            if forward_comes_next(self._forwards, self._backwards, self.end_microbatch, self.in_flight_limit):
                self._forwards += 1
                yield Action(self.stage, Kind.FORWARD, self._forwards - 1)
            else:
                self._backwards += 1
                yield Action(self.stage, Kind.BACKWARD, self._backwards - 1)
                if self._backwards % self.microbatches == 0:
                    yield Action(self.stage, Kind.UPDATE, self._backwards // self.microbatches - 1)


def segment_order(
    stage: int, stages: int, microbatches: int, updates: int, first_update: int = 0, in_flight: int = 1
) -> Iterator[Action]:
    """The actions of `stage` for a segment of `updates` updates of `microbatches` microbatches on `stages` stages."""
    return iter(SegmentOrder(stage, stages, microbatches, first_update, updates, in_flight))


def segment_orders(
    stages: int, microbatches: int, updates: int, first_update: int = 0, in_flight: int = 1
) -> list[list[Action]]:
    """The orders of all stages, stage 0 first."""
    return [list(segment_order(s, stages, microbatches, updates, first_update, in_flight)) for s in range(stages)]


def evaluation_order(stage: int, microbatches: int) -> Iterator[Action]:
    """Forwards only: what a stage does to evaluate `microbatches` held-out microbatches."""
    return (Action(stage, Kind.FORWARD, i) for i in range(microbatches))
