"""What the stages tell each other along with activations and gradients, without a message of its own.

Every message carries its sender's bulletin; the receiver keeps the newer entries. So each stage knows the gradient norm
of every other one at most 1 + ceil((P-1)/K) updates late, nobody ever waits for it, and how late it is depends on the
order of actions only: a run repeats exactly, in one process or in several.
"""

from __future__ import annotations

import numpy as np

from adapipe.engine.transport.base import Vector

_NEVER = -1.0


def _parts(vector: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """Views of a vector: (stages, 2) update and squared norm of each stage's gradient; (stages,) the last update that
    each stage skipped; (2,) update and mean loss per token; (1,) set by stage 0: the segment, and the run with it, ends
    before this update. Updates are -1 where there is none."""
    stages = (len(vector) - 3) // 3
    norms = vector[: 2 * stages].reshape(stages, 2)
    return norms, vector[2 * stages : 3 * stages], vector[3 * stages : 3 * stages + 2], vector[3 * stages + 2 :]


class Bulletin:
    """The latest known numbers of all stages."""

    def __init__(self, stages: int) -> None:
        self.vector: Vector = np.full(self.length(stages), _NEVER)
        """All numbers, as they travel."""
        self._norms, self._skipped, self._loss, self._end = _parts(self.vector)

    @staticmethod
    def length(stages: int) -> int:
        """Numbers in the vector that travels."""
        return 3 * stages + 3

    def merge(self, vector: Vector) -> None:
        """Take over what is newer in another stage's vector. The end of the segment is always taken over."""
        norms, skipped, loss, end = _parts(vector)
        newer = norms[:, 0] > self._norms[:, 0]
        self._norms[newer] = norms[newer]
        np.maximum(self._skipped, skipped, out=self._skipped)
        if loss[0] > self._loss[0]:
            self._loss[:] = loss
        np.maximum(self._end, end, out=self._end)

    def post_norm(self, stage: int, update: int, squared_norm: float) -> None:
        self._norms[stage] = (update, squared_norm)

    def post_skipped(self, stage: int, update: int) -> None:
        self._skipped[stage] = update

    def post_loss(self, update: int, loss: float) -> None:
        self._loss[:] = (update, loss)

    def post_end(self, update: int) -> None:
        """The segment ends before `update`, and the run with it."""
        self._end[:] = update

    def squared_norm(self) -> float:
        """Squared global norm from the latest known norms, in stage order. Stages not heard of yet count zero."""
        return float(sum(squared for update, squared in self._norms if update != _NEVER))

    def skipped_since(self, update: int) -> bool:
        """Did any stage, as far as is known here, skip this update or a later one?"""
        return bool((self._skipped >= update).any())

    @property
    def loss(self) -> tuple[int, float] | None:
        """The last known (update, mean loss per token)."""
        return None if self._loss[0] == _NEVER else (int(self._loss[0]), float(self._loss[1]))

    def end_after(self, update: int) -> int | None:
        """The announced end of the segment (exclusive), if it lies beyond `update`, its first one."""
        return int(self._end[0]) if self._end[0] > update else None
