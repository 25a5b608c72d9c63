"""Orders: which action a stage does next.

A segment is n updates between two flushes, each of K microbatches, on P stages. Stage s runs

    warm-up:   min(W, n*K) forwards     W = P-1-s, or more (see `adapipe.schedule.laws`)
    steady:    F, B, F, B, ...          U after every K-th B
    cool-down: the remaining B          U after every K-th B

n = 1 is synchronous 1F1B; a long n is asynchronous 1F1B with local accumulation. Other ways through a synchronous
update are in `adapipe.schedule.synchronous`. P = 3, K = 2, n = 2:

    stage 0   0F0 0F1 0F2 0B0 0F3 0B1 0U0 0B2 0B3 0U1
    stage 1   1F0 1F1 1B0 1F2 1B1 1U0 1F3 1B2 1B3 1U1
    stage 2   2F0 2B0 2F1 2B1 2U0 2F2 2B2 2F3 2B3 2U1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.laws import in_flight_bound, warm_up


@dataclass(frozen=True, slots=True)
class Pace:
    """How far the parts of a stage's work may be apart; `weight_comes_next`, `forward_comes_next` and `is_split` say
    what it means.

    unanswered: microbatches between their forward and their backward (its first half), at most. split_first,
    split_last: so many backwards at the beginning and at the end of a segment of one update are split; at most
    `split_first` microbatches are parked between the two halves while others follow.
    """

    unanswered: int
    split_first: int = 0
    split_last: int = 0

    def splits(self, microbatches: int) -> int:
        """How many backwards of an update are split."""
        return min(microbatches, self.split_first + self.split_last)


def one_f_one_b(stage: int, stages: int, in_flight: int = 1) -> Pace:
    """1F1B, with `in_flight` microbatches in flight per hop."""
    return Pace(in_flight_bound(warm_up(stage, stages, in_flight)))


def weight_comes_next(answered: Any, completed: Any, end: Any, split_first: Any) -> Any:
    """The first rule of an order: the second half of a backward if more are parked than may be, or if nothing else is
    left to do. Of one stage (int), or of many at once (arrays)."""
    return (completed < answered) & ((answered - completed > split_first) | (answered == end))


def forward_comes_next(forwards: Any, answered: Any, end: Any, unanswered: Any) -> Any:
    """The second: a forward while there is one left and the limit allows it. Else comes a backward, or its first
    half."""
    return (forwards < end) & (forwards - answered < unanswered)


def is_split(answered: Any, start: Any, end: Any, split_first: Any, split_last: Any) -> Any:
    """The third: is the backward of microbatch `answered`, of those from `start` to `end`, split?"""
    return (answered < start + split_first) | (answered >= end - split_last)


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
        self,
        stage: int,
        stages: int,
        microbatches: int,
        first_update: int,
        updates: int,
        in_flight: int = 1,
        pace: Pace | None = None,
    ) -> None:
        check_segment_shape(stages, microbatches, updates, first_update, in_flight)
        if not 0 <= stage < stages:
            raise ScheduleError(f"stage {stage} does not exist in a pipeline of {stages} stages")
        self.stage = stage
        self.microbatches = microbatches
        self.end_update = first_update + updates
        self._pace = pace or one_f_one_b(stage, stages, in_flight)
        self._first_microbatch = first_update * microbatches
        # Forwards, backwards or their first halves, backwards or their second halves: how many have come, and so, of
        # the first two, the next microbatch.
        self._forwards = self._answered = self._completed = self._first_microbatch
        self._parked: deque[int] = deque()

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

    def following(self, direction: Kind, after: int | None, count: int) -> Sequence[int]:
        """The next `count` microbatches that the stage takes from an edge, forwards or backwards, after this one (None:
        from the first)."""
        start = self._first_microbatch if after is None else after + 1
        return range(start, min(start + count, self.end_microbatch))

    def __iter__(self) -> Iterator[Action]:
        stage, start, pace = self.stage, self._first_microbatch, self._pace
        while self._completed < (end := self.end_microbatch):
            if weight_comes_next(self._answered, self._completed, end, pace.split_first):
                self._completed += 1
                yield Action(stage, Kind.BACKWARD_WEIGHT, self._parked.popleft())
            elif forward_comes_next(self._forwards, self._answered, end, pace.unanswered):
                self._forwards += 1
                yield Action(stage, Kind.FORWARD, self._forwards - 1)
                continue
            elif is_split(self._answered, start, end, pace.split_first, pace.split_last):
                self._parked.append(self._answered)
                self._answered += 1
                yield Action(stage, Kind.BACKWARD_INPUT, self._answered - 1)
                continue
            else:
                self._answered += 1
                self._completed += 1
                yield Action(stage, Kind.BACKWARD, self._answered - 1)
            if self._completed % self.microbatches == 0:
                yield Action(stage, Kind.UPDATE, self._completed // self.microbatches - 1)


class UpdateOrder:
    """The order of one stage for one synchronous update, from its row for update 0. The same face as `SegmentOrder`."""

    def __init__(self, row: Sequence[Action], microbatches: int, update: int) -> None:
        self._row = row
        self._first_microbatch = update * microbatches
        self._update = update
        self.end_update = update + 1
        self._taken = {
            Kind.FORWARD: [a.index + self._first_microbatch for a in row if a.kind is Kind.FORWARD],
            Kind.BACKWARD: [a.index + self._first_microbatch for a in row if a.kind.answers],
        }

    def end_at(self, end_update: int) -> None:
        """Only where it ends anyway. Raises ScheduleError for another update."""
        if end_update != self.end_update:
            raise ScheduleError(f"update {self._update} is synchronous and cannot end at {end_update}")

    def following(self, direction: Kind, after: int | None, count: int) -> Sequence[int]:
        """As `SegmentOrder.following`."""
        taken = self._taken[direction]
        start = 0 if after is None else taken.index(after) + 1
        return taken[start : start + count]

    def __iter__(self) -> Iterator[Action]:
        for action in self._row:
            first = self._update if action.kind is Kind.UPDATE else self._first_microbatch
            yield Action(action.stage, action.kind, action.index + first)


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
