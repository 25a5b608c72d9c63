"""What a runtime is asked to do, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from adapipe.schedule import Action


class Batches(Protocol):
    """Microbatches by number: any stage can compute any of them, so no data is ever sent between stages."""

    def __call__(self, microbatch: int, /) -> tuple[torch.Tensor, Any]:
        """(inputs for stage 0, targets for the loss)."""


class Record(NamedTuple):
    """One action as it happened, in the clock's seconds.

    It came to its turn at `start`, waited for its input until `began`, computed until `done`, and had sent its output
    at `end`. An update that waits for the norms of the other stages in the middle is noted as if it waited first.
    """

    action: Action
    start: float
    began: float
    done: float
    end: float
    version_used: int  # number of updates in the weights that the action's forward read
    version_current: int  # number of updates that the stage had made

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other stages."""
        return (self.began - self.start) + (self.end - self.done)


@dataclass(frozen=True, slots=True)
class Work:
    """Updates to make, all in one mode.

    flush_every: updates per segment; 1 is synchronous, `updates` (or more) flushes only at the end.
    rate_factor: update number -> what to multiply the learning rates with; the same function on every stage.
    should_stop: asked on stage 0 before every forward; once it says yes, the run ends with the update it is at.
    on_update: called on stage 0 after each of its updates with (updates done, last known (update, loss)).
    """

    first_update: int
    updates: int
    flush_every: int
    rate_factor: Callable[[int], float]
    should_stop: Callable[[], bool] = lambda: False
    on_update: Callable[[int, tuple[int, float] | None], None] = lambda done, loss: None


class Row(NamedTuple):
    """What one stage reports about one update; all numbers, so that rows travel as one matrix."""

    update: float
    loss: float  # mean per token, on the last stage; NaN on others
    tokens: float  # tokens of the update, on the last stage; 0 on others
    squared_norm: float  # of the stage's own gradients, before clipping
    clip_norm: float  # the global norm that this stage clipped by; NaN if it skipped the update
    learning_rate: float  # of its first parameter group; NaN without an optimizer
    skipped: float  # 1 if the stage skipped the update
    mean_staleness: float
    most_stale: float
    seconds: float  # since the stage's previous update ended
    waited: float  # the part of them spent waiting for other stages
    ended: float  # clock


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of updates did. `field(name)` is a (stages, updates) matrix. stopped: `should_stop` said so."""

    rows: NDArray[np.float64]  # (stages, updates, len(Row))
    stopped: bool

    @property
    def updates(self) -> int:
        return int(self.rows.shape[1])

    def field(self, name: str) -> NDArray[np.float64]:
        return self.rows[:, :, Row._fields.index(name)]
