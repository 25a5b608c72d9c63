"""Timelines: the law of the time per update, and examples that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapipe.errors import ConfigurationError, ScheduleError
from adapipe.schedule.actions import parse_order
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, equal_stages
from adapipe.schedule.laws import time_per_update
from adapipe.schedule.orders import segment_orders
from adapipe.schedule.plan import Candidate, hiding_in_flight, seconds_per_update
from adapipe.schedule.table import segment_table, table_of
from adapipe.schedule.timeline import Timeline, asynchronous_timeline, simulate, synchronous_timeline


def cells(timeline: Timeline, stage: int) -> str:
    """The actions of a stage as LETTER+NUMBER@START-END."""
    table = timeline.table
    parts = zip(table.kinds[stage], table.indices[stage], timeline.starts[stage], timeline.ends[stage], strict=True)
    return " ".join(f"{'FBU'[kind]}{index}@{start:g}-{end:g}" for kind, index, start, end in parts)


def test_two_stages_by_hand():
    timeline = synchronous_timeline(equal_stages(2, 1, 2, 0.5), 2, 1)
    assert cells(timeline, 0) == "F0@0-1 F1@1-2 B0@4-6 B1@7-9 U0@9-9.5"
    assert cells(timeline, 1) == "F0@1-2 B0@2-4 F1@4-5 B1@5-7 U0@9-9.5"


def test_latency_and_bandwidth_by_hand():
    """A message of 10 bytes at 5 bytes/s leaves in 2 s and travels 0.5 s; the next one leaves after it."""
    cost = equal_stages(2, 1, 2, link=LinkCost(0.5, 5.0), message_bytes=10)
    timeline = asynchronous_timeline(cost, 2, 1)
    assert cells(timeline, 0) == "F0@0-1 F1@1-2 B0@9-11 B1@12-14 U0@14-14"
    assert cells(timeline, 1) == "F0@3.5-4.5 B0@4.5-6.5 F1@6.5-7.5 B1@7.5-9.5 U0@9.5-9.5"


def test_a_send_waits_for_a_slot():
    """With 2 send slots the third message waits until the first has left; that takes 10 s each."""
    cost = equal_stages(2, 1, 1, link=LinkCost(0, 1.0), message_bytes=10)
    orders = [parse_order("0F0 0F1 0F2 0F3"), parse_order("1F0 1F1 1F2 1F3")]
    timeline = simulate(table_of(orders), cost, synchronous=False)
    assert cells(timeline, 0) == "F0@0-1 F1@1-2 F2@2-3 F3@11-12"
    assert cells(timeline, 1) == "F0@11-12 F1@21-22 F2@31-32 F3@41-42"


def test_the_norms_of_an_update_go_up_and_down_again():
    """Stage 2 is ready at 3; its norm takes a second per hop to stage 0, and so does the answer."""
    cost = CostModel((StageCost(1, 1, 1),) * 3, (LinkCost(1.0),) * 2)
    timeline = synchronous_timeline(cost, 1, 1)
    assert cells(timeline, 2) == "F0@4-5 B0@5-6 U0@12-13"
    assert cells(timeline, 1) == "F0@2-3 B0@7-8 U0@11-12"
    assert cells(timeline, 0) == "F0@0-1 B0@9-10 U0@10-11"


def test_slow_stages_are_slower_by_their_factor():
    cost = CostModel((StageCost(1, 2, 1, slow=3.0), StageCost(1, 2, 1)), (LinkCost(),))
    assert cells(synchronous_timeline(cost, 1, 1), 0) == "F0@0-3 B0@6-12 U0@12-15"


def test_what_a_stage_waited_for():
    timeline = synchronous_timeline(equal_stages(2, 1, 2, 0.5), 2, 1)
    assert timeline.waits.tolist() == [[0, 0, 2, 1, 0], [1, 0, 0, 0, 2]]


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
@pytest.mark.parametrize("updates", [1, 2, 8])
def test_the_law_of_the_time_per_update(stages: int, microbatches: int, updates: int):
    """K + (P-1)/n for segments of n updates, one after the other."""
    cost = equal_stages(stages, 1 / 3, 2 / 3)
    if updates == 1:
        timeline = synchronous_timeline(cost, microbatches, 3)
        per_update = timeline.update_ends()[0][-1] / 3
    else:
        timeline = asynchronous_timeline(cost, microbatches, updates)
        per_update = timeline.ends.max() / updates
    assert per_update == pytest.approx(time_per_update(stages, microbatches, updates), rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_the_law_without_flushes_and_with_one_after_each(stages: int, microbatches: int):
    cost = equal_stages(stages, 1 / 3, 2 / 3)
    for mode, updates in (("async", math.inf), ("1f1b", 1.0)):
        found = seconds_per_update(Candidate(mode, stages, microbatches), cost)
        assert found == pytest.approx(time_per_update(stages, microbatches, updates), rel=1e-12)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_more_in_flight_hides_latency(stages: int, microbatches: int):
    """A hop of five forwards each way: h = ceil(1 + 2 * 5F / (F+B)) = 5 keeps all stages busy, and less does not."""
    slow = equal_stages(stages, 1, 2, link=LinkCost(5.0))
    held_up = seconds_per_update(Candidate("async", stages, microbatches), slow)
    assert held_up > 1.5 * 3 * microbatches
    assert hiding_in_flight(slow) == 5
    almost, hidden = (seconds_per_update(Candidate("async", stages, microbatches, h), slow) for h in (4, 5))
    assert almost > 1.05 * 3 * microbatches
    assert hidden == pytest.approx(3 * microbatches)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 5),
    updates=st.integers(1, 4),
    first=st.integers(0, 3),
    in_flight=st.integers(1, 4),
)
def test_tables_are_the_orders(stages: int, microbatches: int, updates: int, first: int, in_flight: int):
    table = segment_table(stages, microbatches, updates, first, in_flight)
    expected = table_of(segment_orders(stages, microbatches, updates, first, in_flight))
    assert np.array_equal(table.kinds, expected.kinds)
    assert np.array_equal(table.indices, expected.indices)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 5), microbatches=st.integers(1, 4), synchronous=st.booleans())
def test_every_timeline_is_possible(data: st.DataObject, stages: int, microbatches: int, synchronous: bool):
    """Nothing overlaps on a stage, nothing begins before its message can be there, and all that can begin does."""
    times = st.floats(0.1, 5)
    cost = CostModel(
        tuple(StageCost(data.draw(times), data.draw(times), data.draw(times)) for _ in range(stages)),
        tuple(LinkCost(data.draw(times)) for _ in range(stages - 1)),
        jitter=data.draw(st.sampled_from([0.0, 0.5])),
    )
    in_flight = data.draw(st.integers(1, 3))
    simulated = synchronous_timeline if synchronous else asynchronous_timeline
    timeline = simulated(cost, microbatches, 3, in_flight)
    table, starts, ends = timeline.table, timeline.starts, timeline.ends
    assert (starts[:, 1:] >= ends[:, :-1]).all()
    for s in range(stages):
        for kind, step in ((0, -1), (1, 1)):
            if not 0 <= s + step < stages:
                continue
            rows = [table.kinds[stage] == kind for stage in (s, s + step)]
            link = cost.links[min(s, s + step)]
            assert (starts[s][rows[0]] >= ends[s + step][rows[1]] + link.latency - 1e-9).all()
    free = np.hstack([np.zeros((stages, 1)), ends[:, :-1]])
    assert np.allclose(starts, free + timeline.waits)
    assert (timeline.waits >= 0).all()


def test_orders_that_cannot_go_on_are_refused():
    orders = [parse_order("0F0 0B1 0B0 0F1"), parse_order("1F0 1B0 1F1 1B1")]
    with pytest.raises(ScheduleError, match=r"the orders cannot go on: stages \[0, 1\] wait for each other"):
        simulate(table_of(orders), equal_stages(2, 1, 1), synchronous=False)


def test_a_cost_model_of_another_pipeline_is_refused():
    with pytest.raises(ConfigurationError, match="the cost model is of 3 stages, the pipeline has 2"):
        simulate(segment_table(2, 2, 1), equal_stages(3, 1, 1), synchronous=True)


def test_rows_of_different_lengths():
    timeline = simulate(table_of([parse_order("0F0 0F1"), []]), equal_stages(2, 1, 1), synchronous=False)
    assert timeline.ends[0].tolist() == [1, 2]
    assert np.isnan(timeline.ends[1]).all()
