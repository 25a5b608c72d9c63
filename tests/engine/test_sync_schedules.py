"""Every synchronous schedule learns what the unsplit model learns, on every transport, and what torch's learns."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_peer import SCHEDULES, TorchPipeline, allows

from adapipe.engine.world import World
from adapipe.schedule import SYNC_SCHEDULES
from adapipe.schedule.cost import CostModel, LinkCost, StageCost
from adapipe.schedule.plan import Candidate, seconds_per_update
from tests.engine import reference, toys
from tests.worlds import run_world

UPDATES = 5
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
GRID = [(p, k) for p in (1, 2, 3, 4) for k in sorted({1, 2, p, 2 * p, 7})]


def recorded(optimizer: Any, steps: list[list[torch.Tensor]]) -> Any:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = optimizer(parameters)
        built.register_step_pre_hook(lambda *_: steps.append([p.grad.clone() for p in parameters]))
        return built

    return build


def close(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **TOLERANCE)


@pytest.mark.parametrize("schedule", SYNC_SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize("clip", [None, 0.2], ids=["free", "clipped"])
def test_a_schedule_equals_the_unsplit_model(stages: int, microbatches: int, schedule: str, clip: float | None):
    expected = reference.unsplit(microbatches, UPDATES, clip=clip, optimizer=toys.adamw)
    by_stage: list[list[list[torch.Tensor]]] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        by_stage.append([])
        return recorded(toys.adamw, by_stage[-1])(parameters)

    pipeline = toys.in_process(
        stages, microbatches=microbatches, schedule=schedule, clip=clip, optimizer=optimizer, keep=range(UPDATES)
    )
    report = pipeline.run(toys.work(UPDATES, 1))
    close(report.field("loss")[-1], np.array(expected.losses))
    close(toys.weights(pipeline), expected.weights)
    for update, gradients in enumerate(expected.gradients):
        close([gradient for of_stage in by_stage for gradient in of_stage[update]], gradients)
    # What was to run has run.
    letters = {record.action.kind.value for runtime in pipeline.runtimes for record in runtime.kept}
    assert letters == ({*"FBUIW"} if schedule == "zb-h1" and stages > 1 else {*"FBU"})


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_gpipe_and_1f1b_agree_to_the_bit(stages: int, microbatches: int):
    """zb-h1 sums gradients in another order."""
    found = []
    for schedule in ("gpipe", "1f1b"):
        pipeline = toys.in_process(stages, microbatches=microbatches, schedule=schedule)
        report = pipeline.run(toys.work(UPDATES, 1))
        found.append([torch.from_numpy(report.field("loss")[-1].copy()), *toys.weights(pipeline)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def _on_ranks(world: World, microbatches: list[int]) -> dict[Any, Any]:
    """By schedule and K: losses, and the weights of this rank."""
    found = {}
    for schedule in SYNC_SCHEDULES:
        for k in microbatches:
            pipeline = toys.distributed(world, microbatches=k, schedule=schedule)
            report = pipeline.run(toys.work(UPDATES, 1))
            pipeline.begin_phase()
            found[schedule, k] = report.field("loss")[-1], toys.weights(pipeline)
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_real_ranks_agree_with_one_process_to_the_bit(stages: int, tmp_path: Any):
    """So they equal the unsplit model too."""
    microbatches = sorted({1, 2, stages, 2 * stages, 7})
    ranks = run_world(stages, tmp_path, _on_ranks, microbatches)
    for schedule in SYNC_SCHEDULES:
        for k in microbatches:
            pipeline = toys.in_process(stages, microbatches=k, schedule=schedule)
            losses = pipeline.run(toys.work(UPDATES, 1)).field("loss")[-1]
            assert all(np.array_equal(rank[schedule, k][0], losses) for rank in ranks)
            weights = [weight for rank in ranks for weight in rank[schedule, k][1]]
            assert all(map(torch.equal, weights, toys.weights(pipeline)))


# -- torch ---------------------------------------------------------------------------------------------------------


def _even(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = toys.batches(i)
    return inputs, targets.clamp(min=0)  # no padding: every microbatch has as many tokens


def _torch_and_ours(
    world: World, shapes: list[tuple[str, int]], clip: float | None
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The gradients of this rank after one update: torch's, and ours."""
    found = []
    for name, k in shapes:
        part = toys.cut(world.size)[world.rank]
        module = nn.Sequential(*copy.deepcopy(toys.blocks()[part.start : part.stop]))
        peer = TorchPipeline(name, module, world.rank, world.size, k, _even, None, toys.loss, k * toys.BATCH, clip)
        peer.update()
        steps: list[list[torch.Tensor]] = []
        ours = toys.distributed(
            world, microbatches=k, schedule=name, data=_even, optimizer=recorded(toys.sgd, steps), clip=clip
        )
        ours.run(toys.work(1, 1))
        ours.begin_phase()
        found.append(([p.grad for p in module.parameters()], steps[0]))
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("clip", [None, 0.2], ids=["free", "clipped"])
def test_gradients_equal_those_of_torchs_schedules(stages: int, clip: float | None, tmp_path: Any):
    shapes = [(name, k) for name in SCHEDULES for k in sorted({1, 2, stages, 2 * stages, 7}) if allows(name, stages, k)]
    assert {name for name, _ in shapes} == set(SCHEDULES)
    for of_rank in run_world(stages, tmp_path, _torch_and_ours, shapes, clip):
        for theirs, ours in of_rank:
            close(ours, theirs)


# -- time and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 2, 9])
def test_the_bubbles_are_exact(stages: int, more: int):
    """Equal stages, I = W = F: on the emulator's clock, and as planned."""
    f = i = w = 1.0
    microbatches = stages + more
    cost = CostModel((StageCost(f, i + w, 0.0, i, w),) * stages, (LinkCost(),) * (stages - 1))
    busy = microbatches * (f + i + w)
    for schedule, bubble in (
        ("gpipe", (stages - 1) * (f + i + w)),
        ("1f1b", (stages - 1) * (f + i + w)),
        ("zb-h1", (stages - 1) * (f + i - w) - min(0, more) * w),
    ):
        assert seconds_per_update(Candidate(schedule, stages, microbatches), cost) == busy + bubble
        if stages <= 4:  # as many blocks as the toy has
            pipeline = toys.in_process(stages, microbatches=microbatches, schedule=schedule, emulate=cost)
            report = pipeline.run(toys.work(3, 1))
            assert report.field("seconds")[0].tolist() == [busy + bubble] * 3


def _noted_in_flight(stage: Any) -> list[int]:
    """After every forward of the stage, how many microbatches it holds."""
    seen: list[int] = []
    forward = stage.forward

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = forward(*arguments, **options)
        seen.append(stage.in_flight)
        return output

    stage.forward = noted
    return seen


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_live_microbatches_of_zb_h1_do_not_exceed_those_of_1f1b(stages: int):
    """As they run, until their weight gradients are made."""
    most = {}
    for schedule in ("1f1b", "zb-h1"):
        pipeline = toys.in_process(stages, microbatches=2 * stages, schedule=schedule)
        seen = [_noted_in_flight(runtime.stage) for runtime in pipeline.runtimes]
        pipeline.run(toys.work(2, 1))
        most[schedule] = [max(numbers) for numbers in seen]
    assert most["1f1b"] == [stages - s for s in range(stages)]
    assert max(most["zb-h1"]) == max(most["1f1b"]) == stages


@pytest.mark.parametrize("schedule", SYNC_SCHEDULES)
def test_memory_is_flat_over_200_updates(schedule: str):
    pipeline = toys.in_process(3, microbatches=4, schedule=schedule)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    pipeline.run(toys.work(5, 1))
    counts = [live()]
    for _ in range(4):
        pipeline.run(toys.work(50, 1, first_update=pipeline.runtimes[0].stage.versions.number))
        counts.append(live())
    assert counts == counts[:1] * 5
