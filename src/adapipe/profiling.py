"""A cost model from what a real pipeline did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adapipe.engine.memory import MemoryUse
from adapipe.errors import ConfigurationError
from adapipe.schedule.actions import Kind
from adapipe.schedule.cost import CostModel, LinkCost, StageCost
from adapipe.schedule.table import CODES
from adapipe.schedule.timeline import Timeline

SHORTEST_WAIT = 20e-6
"""Seconds. A stage that waited less may have found the message there, which says nothing about its journey."""


def measured_cost(timeline: Timeline, *, links: bool, message_bytes: int, tokens: int, source: str) -> CostModel:
    """Medians of what the stages of a real run did.

    links: the stages were processes of their own, so that the time from the end of an action to the beginning of the
    one that waited for its message is a journey: latency, transmission at this size, and the reader waking up. Where
    the clocks of two machines differ, the two ways of a link are wrong by as much, and their mean is right.
    """
    stages = [_stage_cost(timeline, s) for s in range(timeline.table.stages)]
    hops = [_hop(timeline, s) if links else 0.0 for s in range(len(stages) - 1)]
    return CostModel(
        tuple(stages),
        tuple(LinkCost(latency) for latency in hops),
        message_bytes=message_bytes,
        tokens=tokens,
        source=source,
    )


def _stage_cost(timeline: Timeline, stage: int) -> StageCost:
    found = {kind: _median(timeline, stage, kind) for kind in Kind}
    forward, backward, update = found[Kind.FORWARD], found[Kind.BACKWARD], found[Kind.UPDATE]
    if forward is None or backward is None or update is None:
        raise ConfigurationError("nothing was measured: give more updates")
    halves = found[Kind.BACKWARD_INPUT], found[Kind.BACKWARD_WEIGHT]
    if stage == 0 and halves == (None, None):
        halves = 0.0, backward  # it has no input gradient to make
    return StageCost(forward, backward, update, backward_input=halves[0], backward_weight=halves[1])


def _median(timeline: Timeline, stage: int, kind: Kind) -> float | None:
    """None if there was no such action."""
    seconds = timeline.ends[stage] - timeline.starts[stage]
    of_kind = seconds[timeline.table.kinds[stage] == CODES[kind]]
    return float(np.median(of_kind)) if len(of_kind) else None


def _hop(timeline: Timeline, stage: int) -> float:
    """Seconds between `stage` and the next one: the mean of both ways."""
    down = _way(timeline, stage, stage + 1, Kind.FORWARD)
    up = _way(timeline, stage + 1, stage, Kind.BACKWARD)
    return max(0.0, (down + up) / 2)


def _way(timeline: Timeline, sender: int, receiver: int, kind: Kind) -> float:
    """Median seconds from the end of an action (of a backward: its first half) to the beginning of the same on the next
    stage, if that one waited."""
    codes = [CODES[k] for k in Kind if (k.answers if kind is Kind.BACKWARD else k is kind)]
    rows = [np.isin(timeline.table.kinds[s], codes) for s in (sender, receiver)]
    sent, began = timeline.ends[sender][rows[0]], timeline.starts[receiver][rows[1]]
    waited = timeline.waits[receiver][rows[1]] > SHORTEST_WAIT
    return float(np.median((began - sent)[waited])) if waited.any() else 0.0


def with_memory(cost: CostModel, memory: Sequence[MemoryUse]) -> CostModel:
    """The cost model with the bytes that the stages were seen to need."""
    stages = tuple(
        replace(
            stage,
            weight_bytes=found.weight_bytes,
            optimizer_bytes=found.optimizer_bytes,
            activation_bytes=found.activation_bytes,
        )
        for stage, found in zip(cost.stages, memory, strict=True)
    )
    return replace(cost, stages=stages)
