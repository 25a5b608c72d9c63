"""How much memory each stage needs at its peak, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapipe.errors import ConfigurationError
from adapipe.schedule import laws
from adapipe.schedule.cost import CostModel
from adapipe.schedule.table import Holding, walk_segment


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


def peak_memory(cost: CostModel, microbatches: int, *, synchronous: bool, in_flight: int = 1) -> list[StageMemory]:
    """The moment of the largest total, of every stage, while updates of K = `microbatches` are made.

    Raises ConfigurationError if the cost model does not know the bytes of its stages.
    """
    if not cost.knows_memory:
        raise ConfigurationError("the cost model does not say how many bytes its stages need: profile again")
    stages = len(cost.stages)
    weights = np.array([stage.weight_bytes for stage in cost.stages])
    optimizer = np.array([stage.optimizer_bytes for stage in cost.stages])
    activations = np.array([stage.activation_bytes for stage in cost.stages])
    buffers = np.array([_message_buffers(s, stages, in_flight) for s in range(stages)])
    peak = np.zeros((6, stages), np.int64)

    def measure(holding: Holding) -> None:
        # An activation that arrived is kept where it arrived: those slots of its ring count as activations.
        received = np.where(np.arange(stages) > 0, holding.in_flight, 0)
        now = np.array(
            [
                weights,
                (holding.versions - 1) * weights,
                np.where(holding.gradients, weights, 0),
                optimizer,
                holding.in_flight * activations,
                (buffers - received) * cost.message_bytes,
            ]
        )
        higher = now.sum(0) > peak.sum(0)
        peak[:, higher] = now[:, higher]

    # It takes one warm-up until the pipeline is full, and another until every microbatch in it holds its own version.
    stale = laws.staleness_bound(laws.warm_up(0, stages, in_flight), microbatches)
    updates = 1 if synchronous else 2 + 2 * stale
    walk_segment(stages, microbatches, updates, 0, in_flight, measure)
    return [StageMemory(*(int(value) for value in column)) for column in peak.T]


def _message_buffers(stage: int, stages: int, in_flight: int) -> int:
    """Messages that the transport of a stage has room for: receiving rings and send slots."""
    below, above = stage < stages - 1, stage > 0
    receiving = above * laws.activation_slots(laws.warm_up(stage, stages, in_flight), in_flight)
    return receiving + below * laws.gradient_slots(in_flight) + (below + above) * laws.send_slots(in_flight)
