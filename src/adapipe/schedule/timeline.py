"""Timelines: when every action of every stage runs under a cost model, without tensors.

The same machine as the emulator, which runs the real stages and so is exact in what it learns; this one knows nothing
but orders. Both give the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from adapipe.errors import ScheduleError
from adapipe.schedule import laws
from adapipe.schedule.actions import Kind
from adapipe.schedule.cost import CostModel, gather_times
from adapipe.schedule.table import CODES, NOTHING, OrderTable, segment_table, update_table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """starts and ends: (stages, actions) seconds of computing; NaN where the table has nothing. waits: seconds that the
    stage had waited for the action's input, free to compute it."""

    table: OrderTable
    starts: Floats
    ends: Floats
    waits: Floats

    def update_ends(self) -> Floats:
        """(stages, updates): when each stage ended each of its updates, in order."""
        updates = self.table.kinds == CODES[Kind.UPDATE]
        ends: Floats = self.ends[updates].reshape(self.table.stages, -1)
        return ends


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """One after the other, of the same stages. Rows may have gaps, where kinds are NOTHING and times NaN."""
    table = OrderTable(np.hstack([t.table.kinds for t in timelines]), np.hstack([t.table.indices for t in timelines]))
    return Timeline(table, *(np.hstack([getattr(t, name) for t in timelines]) for name in ("starts", "ends", "waits")))


def simulate(
    table: OrderTable, cost: CostModel, *, synchronous: bool, send_slots: int = laws.send_slots(1)
) -> Timeline:
    """Run the orders of all stages as early as they can run.

    synchronous: at every update the stages exchange their norms before they make it. send_slots: messages on their way
    per directed edge. All stages that can do their next
    action do it at once, so the work in Python grows with the longest order, not with the number of stages.

    Raises ScheduleError if the orders cannot run to their end.
    """
    cost.require(table.stages)
    stages, every = table.stages, np.arange(table.stages)
    messages = _Messages(table, cost, send_slots)
    lasts = _durations(table, cost)
    times = np.full((3, *lasts.shape), np.nan)
    # By cell, which is position * stages + stage: flat arrays are twice as fast to pick from.
    starts, ends, waits = times.reshape(3, -1)
    updates, lasts = np.equal(table.kinds.T, CODES[Kind.UPDATE]).ravel(), lasts.ravel()
    lengths = (table.kinds != NOTHING).sum(1)
    position = np.zeros(stages, np.int64)
    now = np.zeros(stages)
    latencies = [link.latency for link in cost.links]
    while True:
        stage = every[position < lengths]
        if not len(stage):
            break
        cell = position.take(stage) * stages + stage
        ready = messages.arrival(cell)
        if synchronous:
            exchange = updates.take(cell)
            if exchange.all() and len(stage) == stages:
                ready = np.array(gather_times(now.tolist(), latencies))
            else:
                ready[exchange] = np.nan
        can = ~np.isnan(ready)
        if not can.all():
            stage, cell, ready = stage[can], cell[can], ready[can]
            if not len(stage):
                waiting = every[position < lengths].tolist()
                raise ScheduleError(f"the orders cannot go on: stages {waiting} wait for each other")
        free = now.take(stage)
        start = np.maximum(free, ready)
        end = start + lasts.take(cell)
        starts[cell], ends[cell], waits[cell] = start, end, start - free
        now[stage] = messages.send(cell, end)
        position[stage] += 1
    return Timeline(table, *(time.T for time in times))


class _Messages:
    """The messages between the stages, and when they arrive.

    A number for every message: its direction, sender and microbatch. One more stands for what needs no message, and
    arrives at 0; another for what sends none.
    """

    def __init__(self, table: OrderTable, cost: CostModel, send_slots: int) -> None:
        stages, width = table.stages, int(table.indices.max(initial=0)) + 1
        count = 2 * stages * width
        kinds, indices = table.kinds.T, table.indices.T
        stage = np.arange(stages)
        forward = kinds == CODES[Kind.FORWARD]
        backward = np.isin(kinds, [CODES[kind] for kind in Kind if kind.answers])
        down, up = stage * width + indices, (stages + stage) * width + indices  # by the action that sends it
        needed = np.full(kinds.shape, count, np.int32)
        sent = np.full(kinds.shape, count + 1, np.int32)
        for mask, own, step, needs, sends in (
            (forward, down, -1, stage > 0, stage < stages - 1),
            (backward, up, 1, stage < stages - 1, stage > 0),
        ):
            np.copyto(needed, own + step * width, where=mask & needs)
            np.copyto(sent, own, where=mask & sends)
        self._needs, self._sends = needed.ravel(), sent.ravel()
        self._arrives = np.full(count + 2, np.nan)
        self._arrives[count] = 0.0
        # By edge, which is direction and sender: a forward of s goes over link s, a backward over link s - 1.
        latencies = [link.latency for link in cost.links]
        takes = [cost.message_bytes / link.bandwidth for link in cost.links]
        self._width, self._none = width, 2 * stages
        self._latency = np.array([*latencies, 0, 0, *latencies, 0])
        self._takes = np.array([*takes, 0, 0, *takes, 0])
        self._instant = not self._takes.any()  # then nothing ever waits for a slot
        self._left = np.zeros((send_slots, 2 * stages + 1))  # when the last messages had left, the oldest first

    def arrival(self, cell: Ints) -> Floats:
        """When what each action needs is there: 0 for what needs nothing, NaN if it has not been sent."""
        return self._arrives.take(self._needs.take(cell))

    def send(self, cell: Ints, now: Floats) -> Floats:
        """Send at time `now` what these actions have made. Returns when the stages can go on: one whose send slots are
        all in use waits."""
        message = self._sends.take(cell)
        edge = np.minimum(message // self._width, self._none)
        if self._instant:
            self._arrives[message] = now + self._latency.take(edge)
        else:
            sends = edge < self._none
            left = self._left[:, edge]
            now = np.where(sends, np.maximum(now, left[0]), now)
            leaves = np.maximum(now, left[-1]) + self._takes[edge]
            self._left[:-1, edge] = left[1:]
            self._left[-1, edge] = leaves
            self._arrives[message] = leaves + self._latency[edge]
        return now


def _durations(table: OrderTable, cost: CostModel) -> Floats:
    """(actions, stages): seconds of every action, jitter included."""
    seconds = np.array([[stage.seconds(kind) for stage in cost.stages] for kind in CODES])
    lasts: Floats = seconds[table.kinds.T, np.arange(table.stages)]
    if cost.jitter:
        length = table.kinds.shape[1]
        lasts *= np.array([list(islice(cost.factors(s), length)) for s in range(table.stages)]).T
    return lasts


def synchronous_timeline(
    cost: CostModel, microbatches: int, updates: int, in_flight: int = 1, schedule: str = "1f1b"
) -> Timeline:
    """So many updates, a flush after each. schedule: one of `adapipe.schedule.SYNC_SCHEDULES`."""
    table = update_table(schedule, len(cost.stages), microbatches, in_flight)
    return simulate(
        table.repeated(updates, microbatches), cost, synchronous=True, send_slots=laws.send_slots(in_flight)
    )


def asynchronous_timeline(cost: CostModel, microbatches: int, updates: int, in_flight: int = 1) -> Timeline:
    """So many updates, a flush at the end."""
    table = segment_table(len(cost.stages), microbatches, updates, 0, in_flight)
    return simulate(table, cost, synchronous=False, send_slots=laws.send_slots(in_flight))
