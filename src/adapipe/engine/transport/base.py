"""The transport interface: directed edges between neighbouring stages, each a FIFO in microbatch order.

    stage s ── activations (down) ──> stage s+1
    stage s <── gradients (up) ────── stage s+1

Every message carries the phase and the number of its microbatch, which the receiver checks, and a note: a short vector
of numbers that travels with the data (see `adapipe.engine.bulletin`). Shape and dtype are agreed with the first message
of a phase and checked at both ends.

Methods that may have to wait are generators: they yield as long as they cannot go on, and return their result. A
transport that blocks in the operating system never yields; the in-process one yields so that the other stages of the
same thread can run. Callers use `yield from`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from adapipe.errors import EngineError, TransportError
from adapipe.schedule import Buffers

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that may have to wait for other stages: yields while it waits, returns a T."""

Vector = NDArray[np.float64]

EXCHANGE_LENGTH = 2
"""Numbers that every stage gives to an exchange."""


class Direction(Enum):
    """Which way a message goes."""

    DOWN = "activation"
    UP = "gradient"

    @property
    def step(self) -> int:
        """From the sending stage to the receiving one."""
        return 1 if self is Direction.DOWN else -1


_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of what crosses an edge during a phase."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    CODE_LENGTH = 16

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        if tensor.dtype not in _DTYPES:
            raise TransportError(
                f"a tensor of {tensor.dtype} cannot cross between stages: a stage must return a floating-point tensor"
            )
        if tensor.dim() > cls.CODE_LENGTH - 2:
            raise TransportError(f"a tensor of {tensor.dim()} dimensions cannot cross between stages")
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def encode(self) -> torch.Tensor:
        """As (CODE_LENGTH,) int64: dtype, number of dimensions, sizes, zeros."""
        code = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(code + [0] * (self.CODE_LENGTH - len(code)), dtype=torch.int64)

    @classmethod
    def decode(cls, code: torch.Tensor) -> TensorSpec:
        dtype, dimensions, *sizes = code.tolist()
        return cls(tuple(sizes[:dimensions]), _DTYPES[dtype])

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Message:
    """What arrived. `payload` stays valid until `release`; `note` is the reader's to keep."""

    payload: torch.Tensor
    note: Vector


class Ring:
    """Which microbatch holds which of a fixed number of slots. A slot in use is never handed out again.

    Receives are posted (`claim`) in the order in which messages arrive; a slot may be freed in any order.
    """

    def __init__(self, slots: int, name: str) -> None:
        self.slots = slots
        self._name = name
        self._free = list(reversed(range(slots)))
        self._slot_of: dict[int, int] = {}
        self._posted: deque[int] = deque()  # those whose message has not been taken

    def begin_phase(self) -> None:
        """Microbatches may be numbered anew. Raises EngineError while a slot is in use."""
        if self._slot_of:
            raise EngineError(f"{self._name}: a phase begins while they are in use")

    def unposted(self, expected: Sequence[int]) -> Sequence[int]:
        """Of the microbatches that come next on the edge, those whose receive has not been posted."""
        posted = len(self._posted)
        if list(self._posted) != list(expected[:posted]):
            raise EngineError(f"{self._name}: microbatches {list(self._posted)} are expected, not {list(expected)}")
        return expected[posted:]

    def claim(self, microbatch: int) -> int:
        """A slot for the next message. Raises EngineError if all are in use."""
        if not self._free:
            raise EngineError(
                f"{self._name}: no slot is free for microbatch {microbatch}, microbatches {list(self._slot_of)} hold "
                f"them; the order has more in flight than the ring has slots ({self.slots})"
            )
        if microbatch in self._slot_of:
            raise EngineError(f"{self._name}: microbatch {microbatch} holds a slot already")
        self._slot_of[microbatch] = self._free.pop()
        self._posted.append(microbatch)
        return self._slot_of[microbatch]

    @property
    def posted(self) -> bool:
        """Is a receive posted whose message has not been taken?"""
        return bool(self._posted)

    def take(self, microbatch: int) -> int:
        """The slot of this microbatch, whose message is the next one on the edge."""
        if not self._posted or self._posted[0] != microbatch:
            raise EngineError(f"{self._name}: microbatch {microbatch} is not the next one of {list(self._posted)}")
        return self._slot_of[self._posted.popleft()]

    def free(self, microbatch: int) -> None:
        if microbatch not in self._slot_of:
            raise EngineError(f"{self._name}: microbatch {microbatch} holds no slot")
        self._free.append(self._slot_of.pop(microbatch))


def receive_slots(direction: Direction, buffers: Buffers) -> int:
    """Slots of the receiving ring."""
    return buffers.gradients if direction is Direction.UP else buffers.activations


def check_spec(agreed: TensorSpec, actual: TensorSpec, direction: Direction, stage: int, microbatch: int) -> None:
    """Raise TransportError unless what `stage` sends is what was agreed for this phase."""
    if actual != agreed:
        raise TransportError(
            f"the {direction.value} of microbatch {microbatch} that stage {stage} sends to stage "
            f"{stage + direction.step} is {actual}, but this phase began with {agreed}: give every microbatch of a "
            "phase the same shape and dtype (pad shorter ones and leave the padding out of the loss)"
        )


def check_stamp(phase: int, microbatch: int, expected: tuple[int, int], direction: Direction, stage: int) -> None:
    """Raise TransportError unless a message that `stage` received is the one that its order expects next."""
    if (phase, microbatch) != expected:
        raise TransportError(
            f"stage {stage} expected the {direction.value} of microbatch {expected[1]} (phase {expected[0]}) from "
            f"stage {stage - direction.step}, and got microbatch {microbatch} (phase {phase}): "
            "the stages run different orders or different configurations"
        )


class Transport(Protocol):
    """One stage's end of all its edges."""

    stage: int
    stages: int
    note_length: int

    def begin_phase(self) -> None:
        """Every edge is empty now; shapes may change. All stages call it at the same points."""

    def send(self, direction: Direction, microbatch: int, payload: torch.Tensor, note: Vector) -> Steps[None]:
        """Send a copy of `payload`. Returns once it is on its way; waits while its buffers for sends are full."""

    def post(self, direction: Direction, expected: Sequence[int]) -> None:
        """Make ready to receive these while computing: the microbatches that come next on the edge, of which some may
        be posted already. Does nothing where the shape is not known yet."""

    def receive(self, direction: Direction, microbatch: int) -> Steps[Message]:
        """Wait for this microbatch, which must be the next one on the edge."""

    def release(self, direction: Direction, microbatch: int) -> None:
        """The payload of this microbatch is no longer needed."""

    def prepare_exchange(self) -> None:
        """An `exchange` comes next: make ready to receive for it while computing."""

    def exchange(self, row: Vector) -> Steps[Vector]:
        """As `all_gather`, for EXCHANGE_LENGTH numbers at a synchronous update, where stage 0 comes last: it must not
        have to wait for the others, which have come long before."""

    def all_gather(self, row: Vector) -> Steps[Vector]:
        """Every stage gives a vector of the same length n; all get the (stages, n) matrix, in stage order."""
