"""How much memory each stage needs at its peak, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapipe.errors import ConfigurationError
from adapipe.schedule import laws
from adapipe.schedule.buffers import Buffers, enough_for, segment_buffers, update_buffers
from adapipe.schedule.cost import CostModel
from adapipe.schedule.table import Holding, visit_segment, visit_update


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of the tensors of one stage at one moment.

    weights: the current ones. versions: others that microbatches in flight still need. activations: what microbatches
    in flight keep for their backward. messages: buffers of the transport that hold nothing of that.
    """

    weights: int
    versions: int
    gradients: int
    optimizer: int
    activations: int
    messages: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.versions + self.gradients + self.optimizer + self.activations + self.messages


def peak_memory(cost: CostModel, microbatches: int, *, schedule: str | None, in_flight: int = 1) -> list[StageMemory]:
    """The moment of the largest total, of every stage, while updates of K = `microbatches` are made.

    schedule: one of `adapipe.schedule.SYNC_SCHEDULES`; None for asynchronous updates. The transport has room for both.
    Raises ConfigurationError if the cost model does not know the bytes of its stages.
    """
    if not cost.knows_memory:
        raise ConfigurationError("the cost model does not say how many bytes its stages need: profile again")
    stages = len(cost.stages)
    weights = np.array([stage.weight_bytes for stage in cost.stages])
    optimizer = np.array([stage.optimizer_bytes for stage in cost.stages])
    activations = np.array([stage.activation_bytes for stage in cost.stages])
    every = np.arange(stages)
    parts = np.zeros((6, stages), np.int64)  # at the peak of the rest
    most = np.zeros((2, stages), np.int64)  # microbatches in flight, and parked

    def measure(holding: Holding) -> None:
        # An activation that arrived is kept where it arrived: those slots of its ring count as activations.
        received = np.where(every > 0, holding.in_flight, 0)
        now = np.array(
            [
                weights,
                (holding.versions - 1) * weights,
                np.where(holding.gradients, weights, 0),
                optimizer,
                holding.in_flight * activations,
                -received * cost.message_bytes,
            ]
        )
        higher = now.sum(0) > parts.sum(0)
        parts[:, higher] = now[:, higher]
        np.maximum(most, [holding.in_flight, holding.parked], out=most)

    buffers = segment_buffers(stages, in_flight)
    if schedule is None:
        # It takes one warm-up until the pipeline is full, and another until every microbatch in it holds its own
        # version.
        stale = laws.staleness_bound(laws.warm_up(0, stages, in_flight), microbatches)
        visit_segment(stages, microbatches, 2 + 2 * stale, in_flight, measure)
    else:
        visit_update(schedule, stages, microbatches, in_flight, measure)
        needed = [update_buffers(int(f), int(p), microbatches, in_flight) for f, p in most.T]
        buffers = enough_for(buffers, needed)
    parts[-1] += [_room(buffers[s], s, stages) * cost.message_bytes for s in range(stages)]
    return [StageMemory(*(int(value) for value in column)) for column in parts.T]


def _room(buffers: Buffers, stage: int, stages: int) -> int:
    """Messages that the transport of a stage has room for: receiving rings and send slots."""
    below, above = stage < stages - 1, stage > 0
    return above * buffers.activations + below * buffers.gradients + (below + above) * buffers.sends
