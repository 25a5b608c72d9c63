"""Both modes compute what they should: the unsplit model, the version law, and the same on every transport."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine import reference, toys
from tests.worlds import run_world

# The references add the same float32 numbers in another order.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
CLIP = 0.2  # far below the norms of these models, so that every update is clipped

GRID = [(p, k) for p in (1, 2, 3, 4) for k in sorted({1, 2, p - 1, p, 2 * p, 7}) if k >= 1]
grid = pytest.mark.parametrize(("stages", "microbatches"), GRID)
clipped = pytest.mark.parametrize("clip", [None, CLIP], ids=["free", "clipped"])
optimizers = pytest.mark.parametrize("optimizer", [toys.adamw, toys.sgd])


def close(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **TOLERANCE)


def recording(optimizer: Any, stages: list[list[list[torch.Tensor]]]) -> Any:
    """The optimizer, noting the gradients of every step: one list of steps per stage, in order of construction."""

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        steps: list[list[torch.Tensor]] = []
        stages.append(steps)
        built = optimizer(parameters)
        built.register_step_pre_hook(lambda *_: steps.append([p.grad.clone() for p in parameters]))
        return built

    return build


# -- synchronous ---------------------------------------------------------------------------------------------------


@grid
@clipped
@optimizers
def test_synchronous_equals_the_unsplit_model(stages: int, microbatches: int, clip: float | None, optimizer: Any):
    updates = 5
    expected = reference.unsplit(microbatches, updates, clip=clip, optimizer=optimizer)
    steps: list[list[list[torch.Tensor]]] = []
    pipeline = toys.in_process(stages, microbatches=microbatches, clip=clip, optimizer=recording(optimizer, steps))
    report = pipeline.run(toys.work(updates, 1))
    close(report.field("loss")[-1], np.array(expected.losses))
    norms = np.array(expected.clip_norms)[:, 0]
    assert clip is None or (norms > clip).all(), "this clip is not active"
    for stage in range(stages):
        close(report.field("clip_norm")[stage], norms)
    close(report.field("squared_norm").sum(axis=0), norms**2)
    close(toys.weights(pipeline), expected.weights)
    assert [len(of_stage) for of_stage in steps] == [updates] * stages
    for update, gradients in enumerate(expected.gradients):
        close([gradient for of_stage in steps for gradient in of_stage[update]], gradients)


@pytest.mark.parametrize("flush_every", [1, 6])
def test_a_limit_above_the_norms_changes_nothing(flush_every: int):
    """Clipping shortens long gradients; it never lengthens short ones."""
    free, limited = (toys.in_process(3, microbatches=2, clip=c, optimizer=toys.sgd) for c in (None, 1e3))
    for pipeline in (free, limited):
        pipeline.run(toys.work(6, flush_every))
    assert all(map(torch.equal, toys.weights(free), toys.weights(limited)))


def versioned_always(pipeline: Any) -> Any:
    """Make every forward keep its weight version, as asynchronous segments do."""
    for runtime in pipeline.runtimes:
        runtime.stage.forward = functools.partial(_versioned_forward, runtime.stage.forward)
    return pipeline


def _versioned_forward(forward: Any, *args: Any, versioned: bool) -> Any:
    return forward(*args, versioned=True)


@grid
@clipped
def test_asynchronous_with_a_flush_after_every_update_is_synchronous_to_the_bit(
    stages: int, microbatches: int, clip: float | None
):
    at_once = toys.in_process(stages, microbatches=microbatches, clip=clip)
    one_by_one = toys.in_process(stages, microbatches=microbatches, clip=clip)
    versioned = versioned_always(toys.in_process(stages, microbatches=microbatches, clip=clip))
    acquired = [_count_calls(r.stage.versions, "acquire") for r in versioned.runtimes]
    needless = [_count_calls(r.stage.versions, "acquire") for r in at_once.runtimes + one_by_one.runtimes]
    reports = [at_once.run(toys.work(5, 1)), versioned.run(toys.work(5, 1))]
    # A segment of one update in asynchronous mode: many updates between flushes allowed, one asked for.
    single = [one_by_one.run(toys.work(1, 100, first_update=u)) for u in range(5)]
    assert [len(calls) for calls in acquired] == [5 * microbatches] * stages
    assert not any(needless)  # synchronous segments call the module directly
    for name in ("loss", "clip_norm", "squared_norm"):
        rows = reports[0].field(name)
        np.testing.assert_array_equal(reports[1].field(name), rows)
        np.testing.assert_array_equal(np.concatenate([r.field(name) for r in single], axis=1), rows)
    for other in (versioned, one_by_one):
        assert all(map(torch.equal, toys.weights(at_once), toys.weights(other)))


def _count_calls(thing: Any, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(thing, name)

    def counted(*args: Any) -> Any:
        calls.append(None)
        return method(*args)

    setattr(thing, name, counted)
    return calls


# -- asynchronous --------------------------------------------------------------------------------------------------


def replayed(report: Any, pipeline: Any, expected: reference.Trajectory) -> int:
    """A run did what the replay says. Returns how many updates old a norm was at most."""
    close(report.field("loss")[-1], np.array(expected.losses))
    close(report.field("squared_norm").T, np.array(expected.squared_norms))
    close(report.field("clip_norm").T, np.array(expected.clip_norms))
    close(toys.weights(pipeline), expected.weights)
    return max(age for update in expected.ages for known in update for age in known)


@grid
@clipped
@pytest.mark.parametrize("segments", [[9], [3, 3, 3, 1]], ids=["one-segment", "flush-every-3"])
def test_asynchronous_equals_a_replay_of_the_version_law(
    stages: int, microbatches: int, clip: float | None, segments: list[int]
):
    optimizer = toys.adamw if len(segments) == 1 else toys.sgd
    expected = reference.replay(stages, microbatches, segments, clip=clip, optimizer=optimizer)
    pipeline = toys.in_process(stages, microbatches=microbatches, clip=clip, optimizer=optimizer)
    report = pipeline.run(toys.work(sum(segments), segments[0]))
    assert replayed(report, pipeline, expected) <= 1 + -(-(stages - 1) // microbatches)
    if clip is not None:
        assert (report.field("clip_norm")[:, 1:] > clip).all(), "this clip is not active"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("segments", [[12], [3, 3, 3]], ids=["one-segment", "flush-every-3"])
def test_more_in_flight_equals_a_replay_with_more_delay(
    stages: int, microbatches: int, in_flight: int, segments: list[int]
):
    """Losses, norms and weights; what stages know of each other's norms is older in proportion."""
    expected = reference.replay(stages, microbatches, segments, clip=CLIP, optimizer=toys.adamw, in_flight=in_flight)
    pipeline = toys.in_process(stages, microbatches=microbatches, clip=CLIP, in_flight=in_flight)
    report = pipeline.run(toys.work(sum(segments), segments[0]))
    assert replayed(report, pipeline, expected) <= 1 + -(-in_flight * (stages - 1) // microbatches)


@pytest.mark.parametrize("in_flight", [2, 5])
def test_more_in_flight_changes_nothing_in_synchronous_updates(in_flight: int):
    plain, ahead = (toys.in_process(3, microbatches=7, clip=CLIP, in_flight=h) for h in (1, in_flight))
    reports = [pipeline.run(toys.work(5, 1)) for pipeline in (plain, ahead)]
    np.testing.assert_array_equal(reports[0].field("loss"), reports[1].field("loss"))
    assert all(map(torch.equal, toys.weights(plain), toys.weights(ahead)))


def test_asynchronous_differs_from_synchronous():
    """The replay would prove little if stale weights made no difference."""
    losses = [toys.in_process(4, microbatches=1).run(toys.work(9, n)).field("loss")[-1] for n in (1, 9)]
    assert np.abs(losses[0] - losses[1]).max() > 1e-3


# -- transports ----------------------------------------------------------------------------------------------------

PLANS = {"sync": [(5, 1)], "async": [(6, 6)], "mixed": [(3, 1), (5, 5), (4, 2), (2, 1)]}


def _cells(stages: int) -> list[tuple[str, int, float | None]]:
    """Plans, K, clip: each plan clipped at one K and free at another."""
    return [(plan, k, clip) for plan in PLANS for k, clip in ((1, CLIP), (2, None), (stages + 1, CLIP))]


def _held_out(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return toys.batches(10_000 + i)


def _follow(pipeline: Any, plan: str) -> tuple[list[np.ndarray], list[tuple[float, int]]]:
    numbers, evaluations, done = [], [], 0
    for updates, flush_every in PLANS[plan]:
        report = pipeline.run(toys.work(updates, flush_every, first_update=done))
        numbers += [report.field(name) for name in ("update", "loss", "squared_norm", "clip_norm", "mean_staleness")]
        evaluations.append(pipeline.evaluate(_held_out, 3))
        done += updates
    return numbers, evaluations


def _run_cells(world: Any) -> list[Any]:
    results = []
    for plan, k, clip in _cells(world.size):
        for _ in range(2 if plan == "mixed" else 1):
            pipeline = toys.distributed(world, microbatches=k, clip=clip)
            results.append((*_follow(pipeline, plan), [w.numpy() for w in toys.weights(pipeline)]))
    return results


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_in_process_and_distributed_agree_to_the_bit(stages: int, tmp_path: Any):
    ranks = run_world(stages, tmp_path / "world", _run_cells)
    position = 0
    for plan, k, clip in _cells(stages):
        pipeline = toys.in_process(stages, microbatches=k, clip=clip)
        numbers, evaluations = _follow(pipeline, plan)
        expected_weights = [w.numpy() for w in toys.weights(pipeline)]
        for _ in range(2 if plan == "mixed" else 1):  # the second is a rerun
            results = [rank[position] for rank in ranks]
            position += 1
            for rank_numbers, rank_evaluations, _ in results:  # the same on every rank
                for actual, expected in zip(rank_numbers, numbers, strict=True):
                    np.testing.assert_array_equal(actual, expected)
                assert rank_evaluations == evaluations
            weights = [w for _, _, part in results for w in part]
            for actual, expected in zip(weights, expected_weights, strict=True):
                np.testing.assert_array_equal(actual, expected)


# -- evaluation ----------------------------------------------------------------------------------------------------


def _noisy_blocks() -> list[nn.Module]:
    """Blocks whose training and evaluation modes differ."""
    blocks = toys.blocks()
    blocks[0] = nn.Sequential(blocks[0], nn.Dropout(0.5))
    blocks[2] = nn.Sequential(blocks[2], nn.BatchNorm1d(toys.WIDTH))
    return blocks


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("flush_every", [1, 4])
def test_evaluation_equals_the_unsplit_model_in_evaluation_mode(stages: int, flush_every: int):
    pipeline = toys.in_process(stages, microbatches=2, model=_noisy_blocks())
    pipeline.run(toys.work(4, flush_every))
    whole = nn.Sequential(*(block for r in pipeline.runtimes for block in copy.deepcopy(r.stage.module))).eval()
    with torch.no_grad():
        expected = sum(toys.loss(whole(inputs), targets).item() for inputs, targets in map(_held_out, range(5)))
    loss, tokens = pipeline.evaluate(_held_out, 5)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert tokens == sum(int((_held_out(i)[1] != -100).sum()) for i in range(5))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("flush_every", [1, 3])
def test_evaluation_leaves_training_alone(stages: int, flush_every: int):
    """Batch norm statistics, weights, losses: all as in a run that was never evaluated."""
    model = toys.blocks()
    model[2] = nn.Sequential(model[2], nn.BatchNorm1d(toys.WIDTH))
    disturbed, calm = (toys.in_process(stages, microbatches=2, clip=CLIP, model=model) for _ in range(2))
    for first in (0, 3, 6):
        reports = [p.run(toys.work(3, flush_every, first_update=first)) for p in (disturbed, calm)]
        np.testing.assert_array_equal(reports[0].field("loss"), reports[1].field("loss"))
        before = [t.clone() for r in disturbed.runtimes for t in r.stage.module.state_dict().values()]
        disturbed.evaluate(_held_out, 3)
        after = [t for r in disturbed.runtimes for t in r.stage.module.state_dict().values()]
        assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, toys.weights(disturbed), toys.weights(calm)))


@pytest.mark.parametrize("held_out", [0, 1])
def test_few_held_out_microbatches(held_out: int):
    loss, tokens = toys.in_process(3, microbatches=2).evaluate(_held_out, held_out)
    assert (loss > 0, tokens > 0) == (held_out > 0,) * 2
