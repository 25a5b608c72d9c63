"""Emulated pipelines: the numbers of real ranks to the bit, the times of the laws and of the tensor-free timelines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Stage
from adapipe.errors import ConfigurationError
from adapipe.schedule import Kind
from adapipe.schedule.buffers import segment_buffers
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, equal_stages
from adapipe.schedule.laws import time_per_update, warm_up
from adapipe.schedule.timeline import asynchronous_timeline, synchronous_timeline
from tests.engine import toys
from tests.worlds import run_world

MESSAGE_BYTES = toys.BATCH * toys.WIDTH * 4

# -- exact numbers -------------------------------------------------------------------------------------------------

PLANS = {"sync": [(50, 1)], "async": [(50, 50)], "mixed": [(12, 1), (20, 20), (3, 1), (9, 4), (6, 6)]}
CELLS = [(plan, in_flight) for plan in PLANS for in_flight in (1, 3)]


def _uneven(stages: int) -> CostModel:
    """Costs that have nothing to do with the real ones."""
    return CostModel(
        tuple(StageCost(1 + s % 2, 3 - s % 3, 0.5 * s) for s in range(stages)),
        tuple(LinkCost(0.7 * s, 100.0) for s in range(stages - 1)),
        jitter=0.3,
    )


def _follow(pipeline: Pipeline, plan: str) -> list[np.ndarray]:
    """Losses, norms of the gradients and norms clipped by, of all stages and updates."""
    numbers, done = [], 0
    for updates, flush_every in PLANS[plan]:
        report = pipeline.run(toys.work(updates, flush_every, first_update=done))
        assert report.updates == updates
        numbers += [report.field(name) for name in ("loss", "squared_norm", "clip_norm")]
        done += updates
    assert done == 50
    return numbers


def _on_ranks(world: Any) -> list[Any]:
    results = []
    for plan, in_flight in CELLS:
        pipeline = toys.distributed(world, microbatches=2, clip=0.2, in_flight=in_flight)
        results.append((_follow(pipeline, plan), [w.numpy() for w in toys.weights(pipeline)]))
    return results


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_emulated_and_real_runs_agree_to_the_bit(stages: int, tmp_path: Any):
    ranks = run_world(stages, tmp_path / "world", _on_ranks)
    for cell, (plan, in_flight) in enumerate(CELLS):
        pipeline = toys.in_process(stages, microbatches=2, clip=0.2, in_flight=in_flight, emulate=_uneven(stages))
        emulated = _follow(pipeline, plan)
        for rank in ranks:
            for real, expected in zip(rank[cell][0], emulated, strict=True):
                np.testing.assert_array_equal(real, expected)
        weights = [w for rank in ranks for w in rank[cell][1]]
        for real, expected in zip(weights, toys.weights(pipeline), strict=True):
            np.testing.assert_array_equal(real, expected.numpy())


# -- modelled time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_times_are_those_of_the_timeline(stages: int, in_flight: int, jitter: float):
    """Of every action, with unequal stages and links, slow ones, limited bandwidth, jitter; to the bit."""
    for microbatches, latency, bandwidth in itertools.product((1, 2, 5), (0.0, 0.7), (np.inf, 100.0)):
        cost = CostModel(
            tuple(StageCost(1 + 0.1 * s, 2 - 0.2 * s, 0.3 * s, slow=1 + s % 2) for s in range(stages)),
            tuple(LinkCost(latency * (s + 1), bandwidth) for s in range(stages - 1)),
            message_bytes=MESSAGE_BYTES,
            jitter=jitter,
        )
        for flush_every, simulated in ((1, synchronous_timeline), (6, asynchronous_timeline)):
            pipeline = toys.in_process(
                stages, microbatches=microbatches, in_flight=in_flight, emulate=cost, keep=range(6)
            )
            pipeline.run(toys.work(6, flush_every))
            measured, expected = pipeline.timeline(), simulated(cost, microbatches, 6, in_flight)
            for name in ("kinds", "indices"):
                np.testing.assert_array_equal(getattr(measured.table, name), getattr(expected.table, name))
            for name in ("starts", "ends", "waits"):
                np.testing.assert_array_equal(getattr(measured, name), getattr(expected, name))


def _deep(stages: int, microbatches: int, cost: CostModel, in_flight: int = 1) -> Pipeline:
    """As many stages as wanted, each a linear layer of two numbers."""
    torch.manual_seed(0)

    def build(index: int, transport: Any, clock: Any) -> Runtime:
        stage = Stage(
            nn.Linear(2, 2),
            index,
            stages,
            loss=(lambda output, targets: (output - targets).square().sum()) if index == stages - 1 else None,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        )
        return Runtime(
            stage,
            transport,
            clock,
            lambda i: (torch.ones(1, 2), torch.zeros(1, 2)),
            microbatches=microbatches,
            clip=None,
            count=torch.numel,
            rank=0,
            in_flight=in_flight,
        )

    return in_process_pipeline(stages, build, buffers=segment_buffers(stages, in_flight), emulate=cost)


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
@pytest.mark.parametrize("flush_every", [1, 2, 8, None])
def test_the_laws_of_time_and_staleness(stages: int, microbatches: int, flush_every: int | None):
    """Equal stages: K + (P-1)/n per update, and as stale as the law says."""
    updates = flush_every * 2 if flush_every else 4 + 2 * -(-stages // microbatches)
    pipeline = _deep(stages, microbatches, equal_stages(stages, 1 / 3, 2 / 3))
    report = pipeline.run(toys.work(updates, flush_every or updates))
    ended = report.field("ended")[0]
    if flush_every:
        per_update = ended[-1] / updates
    else:  # the pipeline fills before, and empties after
        edge = 1 + stages // microbatches
        per_update = (ended[-1 - edge] - ended[edge]) / (updates - 1 - 2 * edge)
    assert per_update == pytest.approx(time_per_update(stages, microbatches, flush_every or np.inf), rel=1e-12)

    for s, runtime in enumerate(pipeline.runtimes):
        ahead = stages - 1 - s
        stale = {
            r.action.index: r.action.index // microbatches - r.version_used
            for r in runtime.records
            if r.action.kind is Kind.BACKWARD
        }
        for i, staleness in stale.items():
            j = i % (microbatches * (flush_every or updates))  # since the last flush
            assert staleness == j // microbatches - max(0, j - ahead) // microbatches
        if not flush_every:
            steady = [stale[i] for i in range(ahead - ahead % -microbatches, updates * microbatches)]
            assert set(steady) <= {ahead // microbatches, -(-ahead // microbatches)}
            whole = steady[: len(steady) - len(steady) % microbatches]
            assert sum(whole) / len(whole) == pytest.approx(ahead / microbatches)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_more_in_flight_buys_speed_with_staleness(stages: int, microbatches: int):
    """Five forwards of latency per hop. h = 5 recovers the throughput of links without latency."""

    def run(latency: float, in_flight: int) -> tuple[float, float]:
        cost = equal_stages(stages, 1, 2, link=LinkCost(latency))
        updates = 4 * (1 + in_flight * stages)
        report = _deep(stages, microbatches, cost, in_flight).run(toys.work(updates, updates))
        ended, quarter = report.field("ended")[0], updates // 4
        speed = (updates - 2 * quarter) / (ended[-quarter] - ended[quarter])
        return speed, report.field("mean_staleness")[0, quarter:-quarter].mean()

    (free, little), (slow, same), (hidden, more) = run(0, 1), run(5, 1), run(5, 5)
    assert slow < 0.6 * free
    assert hidden >= 0.9 * free
    assert little == same == pytest.approx((stages - 1) / microbatches)
    assert more == pytest.approx(5 * (stages - 1) / microbatches)


def test_evaluation_takes_virtual_time_of_its_own():
    """Three stages of one second: the last held-out microbatch of four is through after six, as is the answer."""
    pipeline = toys.in_process(3, microbatches=1, emulate=equal_stages(3, 1, 2))
    pipeline.evaluate(toys.batches, 4)
    assert [r.clock.now() for r in pipeline.runtimes] == [6, 6, 6]
    assert pipeline.clock.name == "virtual"


def test_jitter_and_slow_stages_take_time_and_change_no_number():
    even, uneven = equal_stages(3, 1, 2), _uneven(3)
    reports = [toys.in_process(3, microbatches=2, emulate=cost).run(toys.work(5, 5)) for cost in (even, uneven)]
    np.testing.assert_array_equal(reports[0].field("loss"), reports[1].field("loss"))
    assert reports[0].field("ended")[0, -1] < reports[1].field("ended")[0, -1]
    again = toys.in_process(3, microbatches=2, emulate=uneven).run(toys.work(5, 5))
    np.testing.assert_array_equal(again.rows, reports[1].rows)


def test_a_cost_model_of_another_pipeline_is_refused():
    with pytest.raises(ConfigurationError, match="the cost model is of 3 stages, the pipeline has 2"):
        toys.in_process(2, microbatches=1, emulate=equal_stages(3, 1, 2))


# -- more in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_a_run_can_be_ended_with_receives_posted_ahead(stages: int, microbatches: int, in_flight: int):
    """Whenever it is stopped, all stages end with the same update, soon after, and can go on."""
    for stop_at in range(1, 12, 2):
        asked = iter(range(10_000))
        pipeline = toys.in_process(stages, microbatches=microbatches, in_flight=in_flight)
        report = pipeline.run(toys.work(30, 30, should_stop=lambda asked=asked, n=stop_at: next(asked) >= n))
        assert report.stopped
        # It is asked before every forward; the first to say yes is that of microbatch stop_at.
        expected = -(-(stop_at + in_flight) // microbatches)
        assert report.updates == min(30, expected)
        assert all(r.stage.versions.number == report.updates for r in pipeline.runtimes)
        assert pipeline.run(toys.work(3, 3, first_update=report.updates)).updates == 3


def _stop_on_ranks(world: Any) -> list[int]:
    made = []
    for stop_at in (1, 4, 9):
        asked = iter(range(10_000))
        pipeline = toys.distributed(world, microbatches=2, in_flight=4)
        report = pipeline.run(toys.work(30, 30, should_stop=lambda asked=asked, n=stop_at: next(asked) >= n))
        made += [report.updates, pipeline.run(toys.work(3, 1, first_update=report.updates)).updates]
    return made


def test_real_ranks_can_be_ended_with_receives_posted_ahead(tmp_path: Any):
    assert run_world(3, tmp_path / "world", _stop_on_ranks) == [[3, 3, 4, 3, 7, 3]] * 3


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_as_many_in_flight_as_allowed(stages: int, in_flight: int):
    pipeline = toys.in_process(stages, microbatches=2, in_flight=in_flight)
    pipeline.run(toys.work(20, 20))
    for s, runtime in enumerate(pipeline.runtimes):
        ahead = warm_up(s, stages, in_flight)
        in_flight_now = most = 0
        for record in runtime.records:
            in_flight_now += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}[record.action.kind]
            most = max(most, in_flight_now)
        assert most == 1 + ahead
        assert runtime.most_versions == 1 + -(-ahead // 2)
