"""One stage per rank: edges are torch.distributed sends and receives.

What forces this shape (gloo and NCCL alike):
- A send completes only once its receive is posted, so receives are posted ahead and sends are retired late, when
  their slot is needed again. Nothing ever waits for a send while it could compute.
- A directed edge is a FIFO: one process group per direction, messages in microbatch order.
- Lengths are not negotiated: a wrong one aborts the process. So shape and dtype are sent ahead of the first message of
  a phase, and a message is one flat buffer, header first.
- On gloo `wait()` returns when the data is here; on NCCL it orders the current stream after the transfer, and
  reading the header on the host then waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from adapipe.engine.transport.base import (
    EXCHANGE_LENGTH,
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
from adapipe.engine.world import World
from adapipe.schedule import Buffers
from adapipe.schedule.buffers import segment_buffers

_STAMP = 2  # phase, microbatch: the numbers before the note


class _Wire:
    """Flat buffers for the messages of one edge: header (stamp and note, float64), then the payload."""

    def __init__(self, spec: TensorSpec, note_length: int, slots: int, device: torch.device) -> None:
        # The payload starts at a multiple of 64 bytes: aligned for any dtype.
        header = -(-8 * (_STAMP + note_length) // 64) * 64
        self.buffers = [torch.empty(header + spec.nbytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._staging = np.empty(_STAMP + note_length)
        self._headers = [buffer[: 8 * (_STAMP + note_length)].view(torch.float64) for buffer in self.buffers]
        self.payloads = [buffer[header:].view(spec.dtype).view(spec.shape) for buffer in self.buffers]

    def write_header(self, slot: int, phase: int, microbatch: int, note: Vector) -> None:
        header = self._staging
        header[0], header[1], header[2:] = phase, microbatch, note
        self._headers[slot].copy_(torch.from_numpy(header))

    def read_header(self, slot: int) -> Vector:
        return np.array(self._headers[slot].cpu().numpy())


class _End:
    """One end of a directed edge: its buffers, and the shape that they are for."""

    def __init__(self, transport: DistributedTransport, direction: Direction, peer: int, slots: int) -> None:
        self._world = transport.world
        self._direction = direction
        self._stage = transport.stage
        self._note_length = transport.note_length
        self._peer = peer
        self._group = self._world.groups[direction]
        self._works: list[Any] = [None] * slots
        self._wire: _Wire | None = None
        self._wire_spec: TensorSpec | None = None
        self.spec: TensorSpec | None = None

    def know(self, spec: TensorSpec) -> None:
        """The shape for this phase. The buffers of an earlier phase serve again if it had the same."""
        self.spec = spec
        if spec != self._wire_spec:
            self._wire = _Wire(spec, self._note_length, len(self._works), self._world.device)
            self._wire_spec = spec


class _Sender(_End):
    """The sending end of one directed edge."""

    def __init__(self, transport: DistributedTransport, direction: Direction) -> None:
        super().__init__(transport, direction, transport.stage + direction.step, transport.buffers.sends)
        self._announcement: tuple[Any, torch.Tensor] | None = None
        self._sent = 0

    def begin_phase(self) -> None:
        """Retire what is on its way; the next message announces its shape."""
        for slot in range(len(self._works)):
            self._retire(slot)
        if self._announcement is not None:
            with self._world.losing(self._peer):
                self._announcement[0].wait()
        self._announcement = None
        self.spec = None

    def _retire(self, slot: int) -> None:
        if self._works[slot] is not None:
            with self._world.losing(self._peer):
                self._works[slot].wait()
            self._works[slot] = None

    def send(self, phase: int, microbatch: int, payload: torch.Tensor, note: Vector) -> None:
        spec = TensorSpec.of(payload)
        if self.spec is None:
            self._agree(spec)
        assert self.spec is not None
        assert self._wire is not None
        check_spec(self.spec, spec, self._direction, self._stage, microbatch)
        slot = self._sent % len(self._works)
        self._sent += 1
        self._retire(slot)
        self._wire.write_header(slot, phase, microbatch, note)
        self._wire.payloads[slot].copy_(payload.detach())
        with self._world.losing(self._peer):
            self._works[slot] = dist.isend(self._wire.buffers[slot], self._peer, group=self._group)

    def _agree(self, spec: TensorSpec) -> None:
        self.know(spec)
        # A gradient looks like the activation that it answers, so only activations are announced.
        if self._direction is Direction.DOWN:
            code = spec.encode().to(self._world.device)
            with self._world.losing(self._peer):
                self._announcement = (dist.isend(code, self._peer, group=self._group), code)


class _Receiver(_End):
    """The receiving end of one directed edge."""

    def __init__(self, transport: DistributedTransport, direction: Direction) -> None:
        slots = receive_slots(direction, transport.buffers)
        super().__init__(transport, direction, transport.stage - direction.step, slots)
        self._ring = Ring(slots, f"{direction.value}s of stage {transport.stage}")

    def begin_phase(self) -> None:
        self._ring.begin_phase()
        self.spec = None

    def post(self, expected: Sequence[int]) -> None:
        if self.spec is None:
            return
        assert self._wire is not None
        for microbatch in self._ring.unposted(expected):
            slot = self._ring.claim(microbatch)
            with self._world.losing(self._peer):
                self._works[slot] = dist.irecv(self._wire.buffers[slot], self._peer, group=self._group)

    def receive(self, phase: int, microbatch: int) -> Message:
        if self.spec is None:
            code = torch.zeros(TensorSpec.CODE_LENGTH, dtype=torch.int64, device=self._world.device)
            with self._world.losing(self._peer):
                dist.recv(code, self._peer, group=self._group)
            self.know(TensorSpec.decode(code))
        assert self._wire is not None
        if not self._ring.posted:
            self.post([microbatch])
        slot = self._ring.take(microbatch)
        with self._world.losing(self._peer):
            self._works[slot].wait()
        self._works[slot] = None
        header = self._wire.read_header(slot)
        check_stamp(int(header[0]), int(header[1]), (phase, microbatch), self._direction, self._stage)
        return Message(self._wire.payloads[slot], header[_STAMP:])

    def release(self, microbatch: int) -> None:
        self._ring.free(microbatch)


class _Exchange:
    """An all-gather along the pipeline, for updates at which stage 0 comes last.

    A stage passes the rows of all stages below it, and its own, upwards as soon as it has them; stage 0 passes the full
    matrix down again. So stage 0 finds everything there when it comes, goes on at once, and what comes down overlaps
    with its optimizer step and next forward.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stage, self._stages = world.rank, world.size
        self._incoming: dict[Direction, tuple[Any, torch.Tensor]] = {}
        self._outgoing: list[tuple[Any, torch.Tensor]] = []  # kept until sent

    def _matrix(self) -> torch.Tensor:
        return torch.zeros(self._stages, EXCHANGE_LENGTH, dtype=torch.float64, device=self._world.device)

    def prepare(self) -> None:
        for direction in Direction:
            sender = self._stage - direction.step
            if 0 <= sender < self._stages:
                matrix = self._matrix()
                with self._world.losing(sender):
                    work = dist.irecv(matrix, sender, group=self._world.exchanges[direction])
                self._incoming[direction] = work, matrix

    def run(self, row: Vector) -> Vector:
        for work, _ in self._outgoing:
            with self._world.losing(None):
                work.wait()
        self._outgoing.clear()
        known = self._receive(Direction.UP) if self._stage < self._stages - 1 else self._matrix()
        known[self._stage] = torch.from_numpy(row)
        if self._stage > 0:
            self._send(Direction.UP, known)
            known = self._receive(Direction.DOWN)
        if self._stage < self._stages - 1:
            self._send(Direction.DOWN, known)
        return np.array(known.cpu().numpy())

    def _receive(self, direction: Direction) -> torch.Tensor:
        work, matrix = self._incoming.pop(direction)
        with self._world.losing(self._stage - direction.step):
            work.wait()
        return matrix

    def _send(self, direction: Direction, matrix: torch.Tensor) -> None:
        receiver = self._stage + direction.step
        with self._world.losing(receiver):
            self._outgoing.append((dist.isend(matrix, receiver, group=self._world.exchanges[direction]), matrix))


class DistributedTransport:
    """The edges of the stage that this rank is."""

    def __init__(self, world: World, note_length: int, buffers: Buffers | None = None) -> None:
        self.world = world
        self.stage = world.rank
        self.stages = world.size
        self.note_length = note_length
        self.buffers = segment_buffers(world.size)[world.rank] if buffers is None else buffers
        self._phase = 0
        self._exchange = _Exchange(world)
        self._senders: dict[Direction, _Sender] = {}
        self._receivers: dict[Direction, _Receiver] = {}
        for direction in Direction:
            if 0 <= self.stage + direction.step < self.stages:
                self._senders[direction] = _Sender(self, direction)
            if 0 <= self.stage - direction.step < self.stages:
                self._receivers[direction] = _Receiver(self, direction)

    def begin_phase(self) -> None:
        self._phase += 1
        for sender in self._senders.values():
            sender.begin_phase()
        for receiver in self._receivers.values():
            receiver.begin_phase()

    def send(self, direction: Direction, microbatch: int, payload: torch.Tensor, note: Vector) -> Steps[None]:
        self._senders[direction].send(self._phase, microbatch, payload, note)
        if direction is Direction.DOWN and self._receivers[Direction.UP].spec is None:
            self._receivers[Direction.UP].know(TensorSpec.of(payload))
        return
        yield  # a generator that never waits here: torch.distributed blocks by itself

    def post(self, direction: Direction, expected: Sequence[int]) -> None:
        self._receivers[direction].post(expected)

    def receive(self, direction: Direction, microbatch: int) -> Steps[Message]:
        return self._receivers[direction].receive(self._phase, microbatch)
        yield

    def release(self, direction: Direction, microbatch: int) -> None:
        self._receivers[direction].release(microbatch)

    def prepare_exchange(self) -> None:
        self._exchange.prepare()

    def exchange(self, row: Vector) -> Steps[Vector]:
        return self._exchange.run(row)
        yield

    def all_gather(self, row: Vector) -> Steps[Vector]:
        mine = torch.from_numpy(row).to(self.world.device)
        rows = [torch.empty_like(mine) for _ in range(self.stages)]
        with self.world.losing(None):
            dist.all_gather(rows, mine, group=self.world.control)
        return np.stack([other.cpu().numpy() for other in rows])
        yield
