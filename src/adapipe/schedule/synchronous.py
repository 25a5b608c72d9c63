"""Synchronous schedules: how the K microbatches of one update go through the pipeline. P = 3, K = 6, F = I = W:

    gpipe   all forwards, then all backwards                              0F0 ... 0F5 0B0 ... 0B5

    1f1b    a backward as soon as its gradient can be there; stage s holds at most P-s microbatches

        stage 0   F0 F1 F2             B0--- F3 B1--- F4 B2--- F5 B3---    B4---    B5---
        stage 1      F0 F1       B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4---    B5---
        stage 2         F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---

    zb-h1   1f1b with split backwards: I, the gradient that the stage before waits for, comes first, and W fills what
            would be idle at the end. Stage s splits the first s and the last P-s backwards

        stage 0   F0 F1 F2       B0--- F3 B1--- F4 B2--- F5 B3--- B4--- B5---
        stage 1      F0 F1    I0 F2 B1--- F3 B2--- F4 B3--- F5 I4 W0 I5 W4 W5
        stage 2         F0 I0 F1 I1 F2 B2--- F3 B3--- F4 B4--- F5 I5 W0 W1 W5

Stage 0 has no input gradient to make, so its backwards are whole. The bubble of 1f1b and gpipe is (P-1)(F+B) per
update. Where F = I = W, that of zb-h1 is (P-1)(F+I-W) for K >= P, and (P-1)(F+I) - (K-1)W for a smaller K. No stage of
zb-h1 holds more than P microbatches, as many as stage 0 of 1f1b. With h microbatches in flight per hop, read
1 + h(P-1-s) for P-s and h*s for s.

ZB-H1: Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241), section 2.3. There all
backwards are split. But the bubble is made at the beginning, where the first I let the stages before start sooner, and
at the end; between, what a stage splits off is not missed by anyone, and the halves together take longer than the
whole. The first s are parked until the end, so gradients are summed in another order than in 1f1b.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action
from adapipe.schedule.orders import Pace, SegmentOrder, one_f_one_b

SYNC_SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def pace_of(name: str, stage: int, stages: int, microbatches: int, in_flight: int = 1) -> Pace:
    """The pace of a stage in a synchronous schedule. Raises ScheduleError for a name that is not one."""
    if name == "gpipe":
        return Pace(microbatches)
    pace = one_f_one_b(stage, stages, in_flight)
    if name == "1f1b" or (name == "zb-h1" and stage == 0):
        return pace
    if name == "zb-h1":
        return replace(pace, split_first=in_flight * stage, split_last=pace.unanswered)
    raise ScheduleError(f"there is no synchronous schedule {name!r}: there are {', '.join(SYNC_SCHEDULES)}")


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """The orders of all stages for update 0, each with the update at its end. name: one of SYNC_SCHEDULES, or a
    file."""

    name: str
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.orders)


def sync_schedule(name: str, stages: int, microbatches: int, in_flight: int = 1) -> SyncSchedule:
    """A schedule by its name. Raises ScheduleError for one that does not exist."""
    paces = [pace_of(name, stage, stages, microbatches, in_flight) for stage in range(stages)]
    orders = (
        tuple(SegmentOrder(stage, stages, microbatches, 0, 1, in_flight, pace)) for stage, pace in enumerate(paces)
    )
    return SyncSchedule(name, microbatches, tuple(orders))
