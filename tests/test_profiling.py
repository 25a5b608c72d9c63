"""Cost models from what pipelines did: a simulated pipeline gives back the costs that it was simulated with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapipe.engine.memory import MemoryUse
from adapipe.errors import ConfigurationError
from adapipe.profiling import measured_cost, with_memory
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, equal_stages
from adapipe.schedule.memory import StageMemory
from adapipe.schedule.table import OrderTable
from adapipe.schedule.timeline import Timeline, asynchronous_timeline, synchronous_timeline

COST = CostModel(
    (StageCost(0.01, 0.03, 0.002), StageCost(0.02, 0.03, 0.001), StageCost(0.01, 0.02, 0.003)),
    (LinkCost(0.004), LinkCost(0.002)),
)


def measured(timeline: Timeline, *, links: bool = True) -> CostModel:
    return measured_cost(timeline, links=links, message_bytes=64, tokens=8, source="test")


@pytest.mark.parametrize("simulated", [synchronous_timeline, asynchronous_timeline])
def test_costs_come_back(simulated: type):
    found = measured(simulated(COST, 4, 6))
    for stage, expected in zip(found.stages, COST.stages, strict=True):
        for name in ("forward", "backward", "update"):
            assert getattr(stage, name) == pytest.approx(getattr(expected, name))
    assert [link.latency for link in found.links] == pytest.approx([0.004, 0.002])
    assert (found.message_bytes, found.tokens, found.source) == (64, 8, "test")


def test_medians_leave_outliers_out():
    jittered = replace(COST, jitter=0.02, seed=1)
    timeline = synchronous_timeline(jittered, 4, 40)
    found = measured(timeline)
    assert found.stages[0].forward == pytest.approx(0.01, rel=0.01)
    assert found.links[0].latency == pytest.approx(0.004, rel=0.01)


def test_clocks_that_differ_cancel_out():
    """Stage 1 counts from another moment than its neighbours, as on another machine."""
    timeline = synchronous_timeline(COST, 4, 6)
    shift = np.array([[0.0], [1000.0], [0.0]])
    shifted = replace(timeline, starts=timeline.starts + shift, ends=timeline.ends + shift)
    assert [link.latency for link in measured(shifted).links] == pytest.approx([0.004, 0.002])


def test_without_links():
    found = measured(synchronous_timeline(COST, 4, 2), links=False)
    assert found.links == (LinkCost(), LinkCost())


def test_links_that_nobody_waited_for_take_no_time():
    timeline = synchronous_timeline(COST, 4, 2)
    busy = replace(timeline, waits=np.zeros_like(timeline.waits))
    assert measured(busy).links == (LinkCost(), LinkCost())


def test_nothing_measured_is_refused():
    nothing = np.zeros((2, 0))
    table = OrderTable(nothing.astype(np.int8), nothing.astype(np.int64))
    with pytest.raises(ConfigurationError, match="nothing was measured: give more updates"):
        measured(Timeline(table, nothing, nothing, nothing))


def test_memory_is_added():
    peak = StageMemory(1, 2, 3, 4, 5)
    cost = with_memory(equal_stages(2, 1, 2), [MemoryUse(peak, 10, 20, 30), MemoryUse(peak, 11, 21, 31)])
    assert [(s.weight_bytes, s.optimizer_bytes, s.activation_bytes) for s in cost.stages] == [
        (10, 20, 30),
        (11, 21, 31),
    ]
