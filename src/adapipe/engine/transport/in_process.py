"""All stages in one thread: edges are queues, and waiting is yielding to the other stages."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from adapipe.engine.transport.base import (
    SEND_SLOTS,
    Direction,
    Message,
    Ring,
    Steps,
    TensorSpec,
    Vector,
    check_spec,
    check_stamp,
    receive_slots,
)
from adapipe.errors import EngineError


class _Edge:
    """One directed edge: the messages on it and the shape agreed for this phase."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, int, torch.Tensor, Vector]] = deque()
        self.spec: TensorSpec | None = None


def _as_received(payload: torch.Tensor) -> torch.Tensor:
    """What arrives after a journey over a wire: a contiguous copy."""
    return payload.detach().clone(memory_format=torch.contiguous_format)


class Hub:
    """What the stages of one in-process pipeline share. `events` grows whenever anything happens."""

    def __init__(self, stages: int, note_length: int) -> None:
        self.stages = stages
        self.note_length = note_length
        self.events = 0
        self.edges = {(direction, stage): _Edge() for direction in Direction for stage in range(stages)}
        self.gathered: dict[int, list[Vector | None]] = {}  # by round: the rows that have come in
        self.readers: dict[int, int] = {}  # by round: how many stages have read it

    def transports(self) -> list[InProcessTransport]:
        """One end for every stage."""
        return [InProcessTransport(self, stage) for stage in range(self.stages)]


class InProcessTransport:
    """One stage's end of the queues of a `Hub`."""

    def __init__(self, hub: Hub, stage: int) -> None:
        self._hub = hub
        self.stage = stage
        self.stages = hub.stages
        self.note_length = hub.note_length
        self._phase = 0
        self._round = 0
        self._rings = {
            direction: Ring(receive_slots(direction, stage, hub.stages), f"{direction.value}s of stage {stage}")
            for direction in Direction
        }

    def begin_phase(self) -> None:
        self._phase += 1
        for direction, ring in self._rings.items():
            edge = self._hub.edges[direction, self.stage]  # the outgoing one: its sender begins it anew
            if edge.queue or ring.used:
                raise EngineError(f"stage {self.stage} begins a phase while its {direction.value}s are on their way")
            edge.spec = None

    def send(self, direction: Direction, microbatch: int, payload: torch.Tensor, note: Vector) -> Steps[None]:
        edge = self._hub.edges[direction, self.stage]
        spec = TensorSpec.of(payload)
        if edge.spec is None:
            edge.spec = spec
        check_spec(edge.spec, spec, direction, self.stage, microbatch)
        while len(edge.queue) > SEND_SLOTS:  # one more than the slots: the receiver has posted one receive
            yield
        edge.queue.append((self._phase, microbatch, _as_received(payload), note.copy()))
        self._hub.events += 1

    def post(self, direction: Direction, microbatch: int) -> None:
        self._rings[direction].claim(microbatch)

    def receive(self, direction: Direction, microbatch: int) -> Steps[Message]:
        if self._rings[direction].slot_of(microbatch) is None:
            self.post(direction, microbatch)
        queue = self._hub.edges[direction, self.stage - direction.step].queue
        while not queue:
            yield
        phase, number, payload, note = queue.popleft()
        self._hub.events += 1
        check_stamp(phase, number, (self._phase, microbatch), direction, self.stage)
        return Message(payload, note)

    def release(self, direction: Direction, microbatch: int) -> None:
        self._rings[direction].free(microbatch)

    def prepare_exchange(self) -> None:
        pass

    def exchange(self, row: Vector) -> Steps[Vector]:
        return (yield from self.all_gather(row))

    def all_gather(self, row: Vector) -> Steps[Vector]:
        hub, current = self._hub, self._round
        self._round += 1
        rows = hub.gathered.setdefault(current, [None] * self.stages)
        rows[self.stage] = row.copy()
        hub.events += 1
        while any(other is None for other in rows):
            yield
        hub.readers[current] = hub.readers.get(current, 0) + 1
        if hub.readers[current] == self.stages:
            del hub.gathered[current], hub.readers[current]
        return np.stack([other for other in rows if other is not None])
