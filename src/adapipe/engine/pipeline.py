"""A pipeline as its user sees it: run updates, evaluate. The stages live in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from adapipe.engine.bulletin import Bulletin
from adapipe.engine.clock import Clock, VirtualClock, WallClock
from adapipe.engine.memory import MemoryUse, MeteredStage
from adapipe.engine.runtime import Runtime
from adapipe.engine.transport import Steps, Transport
from adapipe.engine.transport.base import Vector
from adapipe.engine.transport.in_process import Hub
from adapipe.engine.work import Batches, Report, Work
from adapipe.errors import EngineError
from adapipe.schedule import Buffers, SyncSchedule
from adapipe.schedule.cost import CostModel
from adapipe.schedule.table import OrderTable
from adapipe.schedule.timeline import Timeline

T = TypeVar("T")


class Pipeline:
    """The stages that this process runs: all of them, or the one of this rank.

    Calling `run` and `evaluate` is collective: every rank calls them in the same order with the same arguments.
    """

    def __init__(self, runtimes: Sequence[Runtime], hub: Hub | None = None) -> None:
        self.runtimes = list(runtimes)
        self._hub = hub

    @property
    def clock(self) -> Clock:
        """The clock of the first stage of this process."""
        return self.runtimes[0].clock

    @property
    def schedule(self) -> SyncSchedule:
        """Of the synchronous updates to come."""
        return self.runtimes[0].schedule

    @schedule.setter
    def schedule(self, schedule: SyncSchedule) -> None:
        for runtime in self.runtimes:
            runtime.schedule = schedule

    def begin_phase(self) -> None:
        """Agree anew on shapes with the next messages."""
        for runtime in self.runtimes:
            runtime.transport.begin_phase()

    def run(self, work: Work) -> Report:
        """Make updates; may make fewer than asked (see `Work.should_stop`)."""
        return self._drive([runtime.run(work) for runtime in self.runtimes])[0]

    def evaluate(self, batches: Batches, microbatches: int) -> tuple[float, int]:
        """Loss sum and tokens over held-out microbatches 0, 1, ..., with the current weights in evaluation mode."""
        self.begin_phase()
        result = self._drive([runtime.evaluate(batches, microbatches) for runtime in self.runtimes])[0]
        self.begin_phase()
        return result

    def timeline(self) -> Timeline:
        """What all stages did during the updates that their runtimes keep records of."""
        return self._gathered([runtime.share(runtime.kept) for runtime in self.runtimes])

    def last_run(self) -> Timeline:
        """What all stages did in the last `run`."""
        return self._gathered([runtime.share(runtime.records) for runtime in self.runtimes])

    def _gathered(self, shares: Sequence[Steps[Vector]]) -> Timeline:
        gathered = self._drive(shares)[0]
        kinds, indices, came, began, done = np.moveaxis(gathered, -1, 0)
        return Timeline(OrderTable(kinds.astype(np.int8), indices.astype(np.int64)), began, done, waits=began - came)

    def memory(self) -> list[MemoryUse]:
        """What every stage has needed so far. The stages must be metered."""
        rows = []
        for runtime in self.runtimes:
            assert isinstance(runtime.stage, MeteredStage)
            rows.append(runtime.gather(runtime.stage.use.numbers()))
        return [MemoryUse.of(numbers) for numbers in self._drive(rows)[0]]

    def _drive(self, stages: Sequence[Steps[T]]) -> list[T]:
        """Let every stage run as far as it can, in turn, until all are done."""
        results: dict[int, T] = {}
        while len(results) < len(stages):
            before = (self._hub.events if self._hub else 0, len(results))
            for index, steps in enumerate(stages):
                if index in results:
                    continue
                try:
                    next(steps)
                except StopIteration as stop:
                    results[index] = stop.value
            if before == (self._hub.events if self._hub else 0, len(results)):
                waiting = [index for index in range(len(stages)) if index not in results]
                raise EngineError(f"deadlock: stages {waiting} wait for each other")
        return [results[index] for index in range(len(stages))]


def in_process_pipeline(
    stages: int,
    build: Callable[[int, Transport, Clock], Runtime],
    *,
    buffers: Sequence[Buffers] | None = None,
    emulate: CostModel | None = None,
) -> Pipeline:
    """All stages in this thread. build: (stage, its transport, its clock) -> its runtime. buffers: of every stage; None
    for those of 1F1B. emulate: give every stage a
    virtual device with the times of this cost model, instead of real time. Raises ConfigurationError if the model is
    of another number of stages."""
    clocks: list[Clock] = [WallClock() for _ in range(stages)]
    if emulate is not None:
        emulate.require(stages)
        clocks = [VirtualClock(cost, emulate.factors(s)) for s, cost in enumerate(emulate.stages)]
    hub = Hub(clocks, Bulletin.length(stages), buffers, emulate.links if emulate else None)
    return Pipeline([build(t.stage, t, clocks[t.stage]) for t in hub.transports()], hub)
