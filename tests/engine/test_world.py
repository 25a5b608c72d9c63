"""What the other ranks learn when one of them fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from adapipe.engine.world import World, launched_world_size
from adapipe.errors import AdaPipeError
from tests.engine import toys
from tests.engine.test_runtime import Failing
from tests.worlds import Outcome, start_world

SECONDS = 12.0  # a failure must end all ranks within 15


def _broken_model(world: World, culprit: int, backward: bool) -> list[nn.Module]:
    model = toys.blocks()
    block = toys.cut(world.size)[culprit].start
    model[block] = Failing(model[block], 5, backward)
    return model


def _raise_and_report(world: World, culprit: int, flush_every: int, backward: bool) -> None:
    """As the command does it: the rank that fails says why before it ends."""
    pipeline = toys.distributed(world, microbatches=2, model=_broken_model(world, culprit, backward))
    try:
        pipeline.run(toys.work(1000, flush_every))
    except AdaPipeError as error:
        world.report_failure(str(error))
        raise


def _kill_self_in_loader(world: World, culprit: int, flush_every: int) -> None:
    """Only the first and the last stage load data."""

    def data(i: int) -> Any:
        if world.rank == culprit and i == 9:
            time.sleep(0.2)  # the others are waiting by now
            os.kill(os.getpid(), signal.SIGKILL)
        return toys.batches(i)

    toys.distributed(world, microbatches=2, data=data).run(toys.work(1000, flush_every))


def _kill_self_in_forward(world: World, culprit: int, flush_every: int) -> None:
    pipeline = toys.distributed(world, microbatches=2)
    forward, seen = pipeline.runtimes[0].stage.forward, []

    def deadly(*args: Any, **options: Any) -> Any:
        seen.append(None)
        if world.rank == culprit and len(seen) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **options)

    pipeline.runtimes[0].stage.forward = deadly
    pipeline.run(toys.work(1000, flush_every))


def _kill_self_in_update(world: World, culprit: int, flush_every: int) -> None:
    """In synchronous mode the others are at their gather by then, which is no edge to anyone in particular."""
    pipeline = toys.distributed(world, microbatches=2)
    squared_norm, seen = pipeline.runtimes[0].stage.squared_norm, []

    def deadly() -> float:
        seen.append(None)
        if world.rank == culprit and len(seen) == 3:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_norm()

    pipeline.runtimes[0].stage.squared_norm = deadly
    pipeline.run(toys.work(1000, flush_every))


def survivors(outcomes: list[Outcome], culprit: int) -> list[Outcome]:
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]
    for outcome in others:
        assert outcome.error == "PeerFailure", outcome.trace
        assert outcome.exit_code == 1
    assert max(outcome.seconds for outcome in outcomes) < SECONDS
    return others


@pytest.mark.parametrize(
    ("size", "culprit", "flush_every", "backward"),
    [(2, 1, 1, True), (3, 1, 100, True), (4, 0, 100, False)],
)
def test_other_ranks_repeat_what_the_culprit_reported(
    size: int, culprit: int, flush_every: int, backward: bool, tmp_path: Path
):
    outcomes = start_world(size, tmp_path, _raise_and_report, culprit, flush_every, backward, timeout=SECONDS)
    own = outcomes[culprit]
    cell = f"{culprit}{'B' if backward else 'F'}5"
    assert own.error == "StageFailure"
    assert own.message == (
        f"rank {culprit}, stage {culprit}, action {cell}, microbatch 5: ValueError: the block is broken"
    )
    assert 'raise ValueError("the block is broken")' in own.trace
    for outcome in survivors(outcomes, culprit):
        assert outcome.reported is True
        assert own.message in outcome.message


@pytest.mark.parametrize(
    ("size", "culprit", "flush_every", "function"),
    [
        (2, 0, 1, _kill_self_in_forward),
        (3, 2, 100, _kill_self_in_loader),
        (4, 3, 100, _kill_self_in_forward),
        (3, 0, 1, _kill_self_in_update),
    ],
)
def test_survivors_name_the_rank_that_was_killed(
    size: int, culprit: int, flush_every: int, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("adapipe.engine.world.REPORT_SECONDS", 1.0)  # nobody will report
    outcomes = start_world(size, tmp_path, function, culprit, flush_every, timeout=SECONDS)
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    others = survivors(outcomes, culprit)
    for outcome in others:
        assert f"lost rank {culprit} (stage {culprit}), which ended without a message" in outcome.message
    # Exactly one of them speaks for all.
    assert sorted(outcome.reported for outcome in others) == [False] + [True] * (size - 2)


def _report_twice(world: World) -> tuple[bool, str | None]:
    first = world.report_failure(f"rank {world.rank} failed")
    return first, world.reported_failure(5.0)


def test_only_the_first_failure_is_kept(tmp_path: Path):
    outcomes = start_world(3, tmp_path, _report_twice, timeout=SECONDS)
    firsts = [outcome.result[0] for outcome in outcomes]
    assert sorted(firsts) == [False, False, True]
    assert {outcome.result[1] for outcome in outcomes} == {f"rank {firsts.index(True)} failed"}


def test_world_size_of_a_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_world_size() is None
    monkeypatch.setenv("RANK", "1")
    assert launched_world_size() == 4
