"""Synchronous schedules: how the K microbatches of one update go through the pipeline. P = 3, K = 4, F = I = W:

    gpipe   all forwards, then all backwards                              0F0 0F1 0F2 0F3             0B0 ...

    1f1b    a backward as soon as its gradient can be there; stage s holds at most P-s microbatches

        stage 0   F0 F1 F2          B0--- F3 B1--- B2--- B3---
        stage 1      F0 F1    B0--- F2 B1--- F3 B2---    B3---
        stage 2         F0 B0--- F1 B1--- F2 B2--- F3 B3---

    zb-h1   1f1b with split backwards: the gradient that the stage before waits for, I, comes first, and stage s puts
            off W by s microbatches, to fill what would be idle at the end

        stage 0   F0 F1 F2    B0--- F3 B1--- B2--- B3---
        stage 1      F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Stage 0 has no input gradient to make, so its backwards are whole. The bubble of 1f1b and gpipe is (P-1)(F+B) per
update. Where F = I = W, that of zb-h1 is (P-1)(F+I-W) for K >= P, and (P-1)(F+I) - (K-1)W for a smaller K. No stage of
zb-h1 holds more than P microbatches, as many as stage 0 of 1f1b. With h microbatches in flight per hop, read
1 + h(P-1-s) for P-s and h*s for s.

ZB-H1: Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism, 2023 (arXiv 2401.10241), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action
from adapipe.schedule.laws import warm_up
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
        return Pace(pace.unanswered, warm_up(0, stages, in_flight) - warm_up(stage, stages, in_flight))
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
