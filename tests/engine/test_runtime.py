"""The runtime: what it records, how it stops, what it does when something goes wrong."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adapipe.engine.stage import Stage
from adapipe.engine.transport import Direction
from adapipe.errors import AdaPipeError, StageFailure
from adapipe.schedule import Kind
from tests.engine import toys
from tests.engine.reference import version_read
from tests.worlds import run_world

modes = pytest.mark.parametrize("flush_every", [1, 100], ids=["sync", "async"])

# -- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("flush_every", [1, 2, 3, 9])
def test_every_microbatch_uses_the_version_of_the_law(stages: int, microbatches: int, flush_every: int):
    updates, first = 9, 2
    pipeline = toys.in_process(stages, microbatches=microbatches)
    pipeline.run(toys.work(first, 1))
    report = pipeline.run(toys.work(updates, flush_every, first_update=first))
    for s, runtime in enumerate(pipeline.runtimes):
        by_update: dict[int, list[int]] = {}
        for record in runtime.records:
            if record.action.kind is Kind.UPDATE:
                continue
            i = record.action.index
            update = i // microbatches
            start = first + (update - first) // flush_every * flush_every
            version = version_read(s, stages, microbatches, start, i)
            assert record.version_used == version, str(record.action)
            if record.action.kind is Kind.BACKWARD:
                assert record.version_current == update
                by_update.setdefault(update, []).append(update - version)
        stale = list(by_update.values())
        assert report.field("mean_staleness")[s] == pytest.approx([sum(d) / len(d) for d in stale])
        assert report.field("most_stale")[s] == pytest.approx([max(d) for d in stale])


@modes
def test_records_are_one_per_action_in_order_with_sane_times(flush_every: int):
    before = toys.WallClock().now()
    pipeline = toys.in_process(3, microbatches=2)
    report = pipeline.run(toys.work(4, flush_every))
    for s, runtime in enumerate(pipeline.runtimes):
        records = runtime.records
        wanted = [f"{s}{kind}{i}" for kind, n in (("F", 8), ("B", 8), ("U", 4)) for i in range(n)]
        assert sorted(str(r.action) for r in records) == sorted(wanted)
        assert records[0].start >= before
        for record in records:
            assert 0.0 <= record.waited <= record.end - record.start
        assert all(a.end <= b.start for a, b in itertools.pairwise(records))
        # An update's own records end within it, and its waiting is at least theirs.
        ended, waited, seconds = (report.field(name)[s] for name in ("ended", "waited", "seconds"))
        assert (np.diff(ended) > 0).all()
        assert (waited <= seconds).all()
        for u in range(4):
            until = [r for r in records if r.end <= ended[u] and (u == 0 or r.start >= ended[u - 1])]
            assert sum(r.waited for r in until) <= waited[u] + 1e-9
        assert seconds.sum() <= ended[-1] - before


@modes
def test_report_is_the_same_on_every_rank_and_names_every_update(flush_every: int):
    report = toys.in_process(3, microbatches=2).run(toys.work(4, flush_every))
    assert report.updates == 4
    np.testing.assert_array_equal(report.field("update"), [[0, 1, 2, 3]] * 3)
    assert np.isnan(report.field("loss")[:-1]).all()
    assert np.isfinite(report.field("loss")[-1]).all()
    tokens = [sum(toys.count(toys.batches(i)[1]) for i in (2 * u, 2 * u + 1)) for u in range(4)]
    np.testing.assert_array_equal(report.field("tokens"), [[0] * 4, [0] * 4, tokens])
    assert not report.field("skipped").any()


# -- what the caller is asked and told -----------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_on_update_is_called_after_every_update_with_the_last_known_loss(stages: int, flush_every: int):
    calls: list[Any] = []
    pipeline = toys.in_process(stages, microbatches=2)
    report = pipeline.run(toys.work(6, flush_every, on_update=lambda done, loss: calls.append((done, loss))))
    assert [done for done, _ in calls] == [1, 2, 3, 4, 5, 6]
    losses = report.field("loss")[-1]
    behind = 0 if flush_every == 1 or stages == 1 else 1  # asynchronous losses come up with the gradients
    for done, known in calls:
        assert known == (None if done <= behind else (done - 1 - behind, losses[done - 1 - behind]))


def test_rate_factor_is_asked_for_every_update_on_every_stage():
    for flush_every in (1, 5):
        asked: list[int] = []

        def factor(update: int, asked: list[int] = asked) -> float:
            asked.append(update)
            return 1.0

        pipeline = toys.in_process(2, microbatches=2)
        work = toys.work(5, flush_every)
        pipeline.run(type(work)(0, 5, flush_every, factor))
        assert sorted(asked) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


class AfterForwards:
    """Says stop from the n-th question on; stage 0 asks before every forward."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("flush_every", [1, 2, 5])
def test_should_stop_ends_all_stages_after_the_update_in_progress(stages: int, microbatches: int, flush_every: int):
    updates = 5
    for moment in range(updates * microbatches + 1):
        pipeline = toys.in_process(stages, microbatches=microbatches)
        work = toys.work(updates, flush_every, should_stop=AfterForwards(moment))
        report = pipeline.run(work)
        made = min(updates, moment // microbatches + 1)
        assert report.updates == made, f"stopping at forward {moment}"
        for runtime in pipeline.runtimes:
            assert runtime.stage.versions.number == made
            assert runtime.stage.in_flight == 0
            assert runtime.stage.versions.live == 1
        # The next work goes on where this one ended, and is not ended by the old announcement.
        assert pipeline.run(toys.work(2, flush_every, first_update=made)).updates == 2


def test_a_stopped_run_made_the_same_updates_as_a_shorter_one():
    stopped, shorter = toys.in_process(3, microbatches=2), toys.in_process(3, microbatches=2)
    stopped.run(toys.work(9, 9, should_stop=AfterForwards(7)))
    report = shorter.run(toys.work(4, 4))
    assert report.updates == 4
    assert all(map(torch.equal, toys.weights(stopped), toys.weights(shorter)))


def _stop_everywhere(world: Any) -> list[int]:
    """Every stopping moment of a segment of four updates, each followed by two more updates."""
    made = []
    for microbatches, flush_every in itertools.product((1, 2, 3), (1, 4)):
        for moment in range(4 * microbatches + 1):
            pipeline = toys.distributed(world, microbatches=microbatches)
            # Only stage 0 asks, so only it may say stop.
            stop = AfterForwards(moment) if world.rank == 0 else _never_asked
            made.append(pipeline.run(toys.work(4, flush_every, should_stop=stop)).updates)
            made.append(pipeline.run(toys.work(2, flush_every, first_update=made[-1])).updates)
    return made


def _never_asked() -> bool:
    raise AssertionError("should_stop is asked on stage 0 only")


def test_should_stop_on_real_ranks(tmp_path: Any):
    expected = [
        count
        for microbatches, _ in itertools.product((1, 2, 3), (1, 4))
        for moment in range(4 * microbatches + 1)
        for count in (min(4, moment // microbatches + 1), 2)
    ]
    assert run_world(3, tmp_path / "world", _stop_everywhere) == [expected] * 3


# -- gradients that are not finite ---------------------------------------------------------------------------------


class _Spoil(torch.autograd.Function):
    """Identity whose backward puts an infinity into the gradient of the input, or of the weight only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        spoilt = torch.tensor(float("inf"))
        if ctx.where == "weight":
            return gradient, spoilt, None
        return gradient + spoilt, torch.tensor(0.0), None


class Spoiler(nn.Module):
    """A block that spoils the backward of its `at`-th training forward (counted from 0)."""

    def __init__(self, block: nn.Module, at: int, where: str) -> None:
        super().__init__()
        self.block = block
        self.weight = nn.Parameter(torch.tensor(0.0))
        self.at, self.where, self.seen = at, where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        self.seen += self.training
        return _Spoil.apply(x, self.weight, self.where) if self.seen - 1 == self.at else x


def spoilt(block: int, at: int, where: str) -> list[nn.Module]:
    model = toys.blocks()
    model[block] = Spoiler(model[block], at, where)
    return model


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("where", ["weight", "input"])
def test_synchronous_skips_on_all_stages_and_goes_on(stages: int, block: int, where: str):
    microbatches, bad = 2, 2  # microbatch 5 belongs to update 2
    pipeline = toys.in_process(stages, microbatches=microbatches, clip=0.5, model=spoilt(block, 5, where))
    after: list[list[torch.Tensor]] = []
    for update in range(5):
        report = pipeline.run(toys.work(1, 1, first_update=update))
        assert report.updates == 1
        assert (report.field("skipped") == float(update == bad)).all()
        assert np.isfinite(report.field("loss")[-1]).all()
        after.append(toys.weights(pipeline))
    for update in range(1, 5):
        moved = [not torch.equal(a, b) for a, b in zip(after[update - 1], after[update], strict=True)]
        assert any(moved) == (update != bad)
    assert all(torch.isfinite(w).all() for w in after[-1])

    whole_run = toys.in_process(stages, microbatches=microbatches, clip=0.5, model=spoilt(block, 5, where))
    report = whole_run.run(toys.work(5, 1))
    np.testing.assert_array_equal(report.field("skipped"), [[0, 0, 1, 0, 0]] * stages)
    assert all(map(torch.equal, toys.weights(whole_run), after[-1]))


def test_the_norms_of_a_skipped_update_are_forgotten():
    """Asynchronous clipping starts from the norms of the last synchronous update that was made."""
    pipeline = toys.in_process(3, microbatches=1, clip=0.5, model=spoilt(1, 2, "weight"))
    synchronous = pipeline.run(toys.work(3, 1))
    assert synchronous.field("skipped")[:, 2].all()
    asynchronous = pipeline.run(toys.work(4, 4, first_update=3))
    own = asynchronous.field("squared_norm")[2, 0]
    others = synchronous.field("squared_norm")[:2, 1].sum()
    assert asynchronous.field("clip_norm")[2, 0] == pytest.approx((own + others) ** 0.5)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("where", ["weight", "input"])
def test_asynchronous_skips_where_it_happened_and_ends_early(stages: int, microbatches: int, block: int, where: str):
    update = 3
    pipeline = toys.in_process(
        stages, microbatches=microbatches, clip=0.5, model=spoilt(block, update * microbatches, where)
    )
    report = pipeline.run(toys.work(50, 50))
    culprit = next(s for s, part in enumerate(toys.cut(stages)) if block in part)
    # The stages above share an infinite input gradient; the stages below know nothing of it.
    first = culprit if where == "weight" else 0
    expected = np.zeros((stages, report.updates))
    expected[first : culprit + 1, update] = 1
    np.testing.assert_array_equal(report.field("skipped"), expected)
    assert update < report.updates <= update + 1 + stages + -(-(stages - 1) // microbatches)
    for runtime in pipeline.runtimes:
        assert runtime.stage.versions.number == report.updates
        assert runtime.stage.in_flight == 0
    assert all(torch.isfinite(w).all() for w in toys.weights(pipeline))
    following = pipeline.run(toys.work(6, 6, first_update=report.updates))
    assert following.updates == 6
    assert not following.field("skipped").any()


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_skip_at_any_time_leaves_versions_in_flight_alone(stages: int, microbatches: int, block: int):
    """The weights after a skipped update are those before it, in the same storage: the next step must not write there
    while a microbatch holds them. The stages check their versions at every backward."""
    for bad in range(0, 8 * microbatches, microbatches):
        model = spoilt(block, bad, "weight")
        report = toys.in_process(stages, microbatches=microbatches, model=model).run(toys.work(8, 8))
        assert report.field("skipped").sum() == 1


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("update", [3, 4, 5])
def test_a_skip_late_in_a_segment_ends_the_run_too(stages: int, update: int):
    """Segments of three updates: a skip in the second one ends the run, even if stage 0 hears of it in the third."""
    model = spoilt(3, 2 * update, "weight")
    report = toys.in_process(stages, microbatches=2, model=model).run(toys.work(30, 3))
    assert report.field("skipped")[-1, update] == 1
    assert report.updates <= 9


# -- failures ------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A block that fails in the forward or backward of one training forward."""

    def __init__(self, block: nn.Module, at: int, backward: bool) -> None:
        super().__init__()
        self.block, self.at, self.backward, self.seen = block, at, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        self.seen += 1
        if self.seen - 1 == self.at:
            if not self.backward:
                raise ValueError("the block is broken")
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("the block is broken")


@modes
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_failing_block(flush_every: int, backward: bool, stages: int):
    model = toys.blocks()
    model[1] = Failing(model[1], 3, backward)
    pipeline = toys.in_process(stages, microbatches=2, model=model)
    with pytest.raises(StageFailure) as caught:
        pipeline.run(toys.work(5, flush_every))
    stage = next(s for s, part in enumerate(toys.cut(stages)) if 1 in part)
    cell = f"{stage}{'B' if backward else 'F'}3"
    assert f"rank {stage}, stage {stage}, action {cell}, microbatch 3: " in str(caught.value)
    assert "ValueError: the block is broken" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    failure = caught.value
    assert (failure.rank, failure.stage, failure.cell, failure.microbatch) == (stage, stage, cell, 3)


def failing_loader(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    if i == 5:
        raise OSError("the disk is gone")
    return toys.batches(i)


@modes
@pytest.mark.parametrize("stages", [1, 3])
def test_failing_loader(flush_every: int, stages: int):
    pipeline = toys.in_process(stages, microbatches=2, data=failing_loader)
    with pytest.raises(
        StageFailure, match=r"action \dF\d.*loading microbatch 5 failed: OSError: the disk is gone"
    ) as c:
        pipeline.run(toys.work(5, flush_every))
    assert "the disk is gone" in str(c.value)
    causes = [c.value.__cause__, c.value.__cause__.__cause__]
    assert any(isinstance(cause, OSError) for cause in causes)


@modes
def test_targets_without_tokens(flush_every: int):
    def padded(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = toys.batches(i)
        return inputs, torch.full_like(targets, -100) if i in (4, 5) else targets

    pipeline = toys.in_process(2, microbatches=2, data=padded)
    with pytest.raises(StageFailure, match=r"stage 1, action 1F4.*the 2 microbatches of update 2 hold no token"):
        pipeline.run(toys.work(5, flush_every))
    # One empty microbatch in an update that has others is fine.
    pipeline = toys.in_process(2, microbatches=4, data=padded)
    assert np.isfinite(pipeline.run(toys.work(2, flush_every)).field("loss")[-1]).all()


@modes
def test_loss_that_is_not_finite(flush_every: int):
    def poisoned(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = toys.batches(i)
        return (inputs * float("nan") if i == 3 else inputs), targets

    pipeline = toys.in_process(3, microbatches=2, data=poisoned)
    with pytest.raises(StageFailure) as caught:
        pipeline.run(toys.work(5, flush_every))
    assert "rank 2, stage 2, action 2F3, microbatch 3: the loss is nan: the run has diverged" in str(caught.value)


def with_loss(loss: Callable[..., Any]) -> Any:
    pipeline = toys.in_process(2, microbatches=1)
    pipeline.runtimes[-1].stage._loss = loss
    return pipeline


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda output, targets: output.sum(dim=1), r"it is shape \(3,\)"),
        (lambda output, targets: 1.5, "it is float"),
    ],
)
def test_loss_that_is_not_a_scalar_tensor(loss: Callable[..., Any], what: str):
    with pytest.raises(StageFailure, match="1F0.*the loss must be a scalar tensor, summed over tokens; " + what):
        with_loss(loss).run(toys.work(1, 1))


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def test_stage_that_returns_a_tuple():
    model = toys.blocks()
    model[1] = nn.Sequential(model[1], Pair())
    message = "0F0.*the stage returned tuple; between stages every block takes and returns one tensor"
    with pytest.raises(StageFailure, match=message):
        toys.in_process(2, microbatches=1, model=model).run(toys.work(1, 1))


def test_failing_evaluation():
    pipeline = toys.in_process(3, microbatches=1)
    with pytest.raises(StageFailure, match="rank 0, stage 0, action 0F5, microbatch 5: evaluation failed: OSError"):
        pipeline.evaluate(failing_loader, 8)


# -- precision -----------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("stages", [2, 4])
def test_bfloat16_follows_the_unsplit_model(flush_every: int, stages: int):
    """Under autocast: losses within 1 % of the unsplit model under autocast; what crosses an edge is bfloat16."""
    pipeline = toys.in_process(stages, microbatches=3, clip=0.5, optimizer=toys.sgd)
    for runtime in pipeline.runtimes:
        runtime.stage._autocast = torch.bfloat16
    updates = 5 if flush_every == 1 else 1  # one asynchronous update reads no stale weights
    report = pipeline.run(toys.work(updates, flush_every))
    spec = pipeline.runtimes[0].transport._hub.edges[Direction.DOWN, 0].spec
    assert spec.dtype == torch.bfloat16

    whole = nn.Sequential(*copy.deepcopy(toys.blocks()))
    optimizer = toys.sgd(list(whole.parameters()))
    losses = []
    for update in range(updates):
        data = [toys.batches(3 * update + k) for k in range(3)]
        tokens = sum(toys.count(targets) for _, targets in data)
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in data:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = toys.loss(whole(inputs), targets)
            (loss / tokens).backward()
            total += loss.item()
        losses.append(total / tokens)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 * toys.rate_factor(update)
        optimizer.step()
    np.testing.assert_allclose(report.field("loss")[-1], losses, rtol=1e-2)
    assert all(w.dtype == torch.float32 for w in toys.weights(pipeline))
    for actual, wanted in zip(toys.weights(pipeline), whole.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted.detach(), rtol=0, atol=2e-2)


def test_float16_is_refused():
    with pytest.raises(AdaPipeError, match=r"float16 needs loss scaling.*use bfloat16 or float32"):
        Stage(nn.Linear(2, 2), 0, 2, optimizer=toys.adamw, autocast=torch.float16)


def test_squared_norm_of_large_gradients_is_finite():
    """Gradients of 1e25 are finite although their squares overflow float32: no reason to skip the update."""
    stage = Stage(nn.Linear(1, 1, bias=False), 0, 2, optimizer=toys.sgd)
    stage.versions.parameters[0].grad = torch.full((1, 1), 1e25)
    assert math.isfinite(stage.squared_norm())
