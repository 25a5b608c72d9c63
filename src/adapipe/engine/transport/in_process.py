"""All stages in one thread: edges are queues, and waiting is yielding to the other stages.

Messages carry the time at which they arrive, which a virtual clock waits for: when they leave and how long they take is
what the links say. With wall clocks the links take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from adapipe.engine.clock import Clock
from adapipe.engine.transport.base import (
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
from adapipe.schedule import Buffers
from adapipe.schedule.buffers import segment_buffers
from adapipe.schedule.cost import LinkCost, gather_times


class _Edge:
    """One directed edge: the messages on it with their times of arrival, and the shape agreed for this phase."""

    def __init__(self, link: LinkCost, send_slots: int) -> None:
        self.link = link
        self.send_slots = send_slots
        self.queue: deque[tuple[int, int, torch.Tensor, Vector, float]] = deque()
        self.spec: TensorSpec | None = None
        self.left: deque[float] = deque([0.0], maxlen=send_slots)  # when the last messages had left their sender

    def carry(self, now: float, nbytes: int) -> float:
        """Send a message at time `now`, or when the one before it has left. Returns when it arrives."""
        self.left.append(max(now, self.left[-1]) + nbytes / self.link.bandwidth)
        return self.left[-1] + self.link.latency


def _as_received(payload: torch.Tensor) -> torch.Tensor:
    """What arrives after a journey over a wire: a contiguous copy."""
    return payload.detach().clone(memory_format=torch.contiguous_format)


class Hub:
    """What the stages of one in-process pipeline share. `events` grows whenever anything happens.

    clocks: of each stage. buffers: of each stage; None for those of 1F1B. links: between each two neighbours; None for
    links that take no time.
    """

    def __init__(
        self,
        clocks: Sequence[Clock],
        note_length: int,
        buffers: Sequence[Buffers] | None = None,
        links: Sequence[LinkCost] | None = None,
    ) -> None:
        self.clocks = clocks
        self.stages = len(clocks)
        self.note_length = note_length
        self.buffers = segment_buffers(self.stages) if buffers is None else buffers
        self.events = 0
        self.links = tuple(links) if links is not None else (LinkCost(),) * (self.stages - 1)
        self.edges: dict[tuple[Direction, int], _Edge] = {}  # by direction and sender
        for stage, link in enumerate(self.links):
            self.edges[Direction.DOWN, stage] = _Edge(link, self.buffers[stage].sends)
            self.edges[Direction.UP, stage + 1] = _Edge(link, self.buffers[stage + 1].sends)
        self.gathered: dict[int, list[tuple[Vector, float] | None]] = {}  # by round: the rows that have come in, when
        self.readers: dict[int, int] = {}  # by round: how many stages have read it

    def transports(self) -> list[InProcessTransport]:
        """One end for every stage."""
        return [InProcessTransport(self, stage) for stage in range(self.stages)]


class InProcessTransport:
    """One stage's end of the queues of a `Hub`."""

    def __init__(self, hub: Hub, stage: int) -> None:
        self._hub = hub
        self._clock = hub.clocks[stage]
        self.stage = stage
        self.stages = hub.stages
        self.note_length = hub.note_length
        self._phase = 0
        self._round = 0
        self._rings = {
            direction: Ring(receive_slots(direction, hub.buffers[stage]), f"{direction.value}s of stage {stage}")
            for direction in Direction
        }

    def begin_phase(self) -> None:
        self._phase += 1
        for direction, ring in self._rings.items():
            ring.begin_phase()
            edge = self._hub.edges.get((direction, self.stage))  # the outgoing one: its sender begins it anew
            if edge is None:
                continue
            if edge.queue:
                raise EngineError(f"stage {self.stage} begins a phase while its {direction.value}s are on their way")
            edge.spec = None

    def send(self, direction: Direction, microbatch: int, payload: torch.Tensor, note: Vector) -> Steps[None]:
        edge = self._hub.edges[direction, self.stage]
        spec = TensorSpec.of(payload)
        if edge.spec is None:
            edge.spec = spec
        check_spec(edge.spec, spec, direction, self.stage, microbatch)
        # As many as there are slots, and those that the receiver has posted receives for.
        receiver = self._hub.buffers[self.stage + direction.step]
        while len(edge.queue) >= edge.send_slots + receiver.ahead:
            yield
        if len(edge.left) == edge.send_slots:
            self._clock.wait_until(edge.left[0])
        arrives = edge.carry(self._clock.now(), spec.nbytes)
        edge.queue.append((self._phase, microbatch, _as_received(payload), note.copy(), arrives))
        self._hub.events += 1

    def post(self, direction: Direction, expected: Sequence[int]) -> None:
        ring = self._rings[direction]
        for microbatch in ring.unposted(expected):
            ring.claim(microbatch)

    def receive(self, direction: Direction, microbatch: int) -> Steps[Message]:
        ring = self._rings[direction]
        if not ring.posted:
            ring.claim(microbatch)
        ring.take(microbatch)
        queue = self._hub.edges[direction, self.stage - direction.step].queue
        while not queue:
            yield
        phase, number, payload, note, arrives = queue.popleft()
        self._hub.events += 1
        check_stamp(phase, number, (self._phase, microbatch), direction, self.stage)
        self._clock.wait_until(arrives)
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
        rows[self.stage] = row.copy(), self._clock.now()
        hub.events += 1
        while any(other is None for other in rows):
            yield
        hub.readers[current] = hub.readers.get(current, 0) + 1
        if hub.readers[current] == self.stages:
            del hub.gathered[current], hub.readers[current]
        known = [other for other in rows if other is not None]
        latencies = [link.latency for link in hub.links]
        self._clock.wait_until(gather_times([entered for _, entered in known], latencies)[self.stage])
        return np.stack([other for other, _ in known])
