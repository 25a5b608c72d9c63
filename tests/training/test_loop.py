"""The training loop: when it evaluates, decides and stops, at which learning rates, and on which clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adapipe.budget import Budget
from adapipe.engine.work import Work
from adapipe.policy import Decision
from adapipe.policy.director import RECOVERY_UPDATES
from adapipe.training.learning_rate import FLOOR, learning_rate_schedule
from adapipe.training.loop import FIRST_RUN
from tests.engine import toys
from tests.training.small import RATE, Data, Run, WorkClock, pipeline, run

# On the counted clock a stage can make an update in no time; its idle share is then not a number.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

SYNC, ASYNC = Decision("sync"), Decision("async")
BOTH = [SYNC, ASYNC]


# -- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", BOTH)
@pytest.mark.parametrize(
    ("updates", "every", "at"),
    [
        (10, 4, [0, 4, 8, 10]),
        (8, 4, [0, 4, 8]),
        (3, 4, [0, 3]),
        (1, 1, [0, 1]),
        (3, 1, [0, 1, 2, 3]),
        (5, 1000, [0, 5]),
    ],
)
def test_it_evaluates_at_0_every_so_many_updates_and_at_the_end(
    decision: Decision, updates: int, every: int, at: list[int]
) -> None:
    assert run([decision], Budget(updates=updates), evaluate_every=every).evaluated_at == at


def test_it_evaluates_where_a_decision_that_wants_it_ends() -> None:
    answers = [Decision("sync", 3, evaluate=True), Decision("async", 2), Decision("sync", 4, evaluate=True), SYNC]
    done = run(answers, Budget(updates=12), evaluate_every=7)
    assert done.evaluated_at == [0, 3, 7, 9, 12]


def test_no_state_is_evaluated_twice() -> None:
    """Where an interval, the end of a decision, and the end of the run fall together."""
    answers = [Decision("sync", 4, evaluate=True), Decision("async", 4, evaluate=True)]
    done = run(answers, Budget(updates=8), evaluate_every=4)
    assert done.evaluated_at == [0, 4, 8]


def test_a_policy_is_asked_with_the_evaluation_at_hand() -> None:
    done = run([Decision("sync", 2, evaluate=True), Decision("async", 2, evaluate=True), SYNC], Budget(updates=6))
    assert done.notes.events == [
        ("decision", 0),
        ("evaluation", 0),
        *[("update", 1), ("update", 2), ("evaluation", 2), ("decision", 2)],
        *[("update", 3), ("update", 4), ("evaluation", 4), ("decision", 4)],
        *[("update", 5), ("update", 6), ("evaluation", 6)],
    ]


def test_without_held_out_data_nothing_is_evaluated() -> None:
    done = run([Decision("sync", 2, evaluate=True), ASYNC], Budget(updates=6), held_out=False, evaluate_every=2)
    assert done.evaluations == []
    assert done.tally.held_out_loss is None
    assert len(done.updates) == 6


@pytest.mark.parametrize("decision", BOTH)
def test_evaluation_reads_the_weights_after_the_last_update(decision: Decision) -> None:
    done = run([decision], Budget(updates=5))
    whole = torch.nn.Sequential(*(runtime.stage.module for runtime in done.pipeline.runtimes)).eval()
    with torch.no_grad():
        total = sum(float(toys.loss(whole(done.data[i][0]), done.data[i][1])) for i in range(2))
    tokens = sum(toys.count(done.data[i][1]) for i in range(2))
    last = done.evaluations[-1]
    assert last["held_out_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert last["held_out_perplexity"] == math.exp(last["held_out_loss"])
    assert last["mode"] == decision.mode


def test_evaluating_more_often_does_not_change_a_synchronous_run() -> None:
    often, rarely = (run([SYNC], Budget(updates=9), evaluate_every=every) for every in (1, 1000))
    assert [line["loss"] for line in often.updates] == [line["loss"] for line in rarely.updates]
    assert_same_weights(toys.weights(often.pipeline), toys.weights(rarely.pipeline))


# -- the training clock ----------------------------------------------------------------------------------------------


def test_evaluation_is_kept_out_of_the_training_clock() -> None:
    done = run([SYNC], Budget(updates=6), evaluate_every=2, stages=3, microbatches=2)
    assert done.tally.seconds == 6 * 2 * 1.0
    assert done.tally.evaluation_seconds == 4 * 2 * 100.0
    assert [line["training_seconds"] for line in done.evaluations] == [0.0, 4.0, 8.0, 12.0]
    assert [line["evaluation_seconds"] for line in done.evaluations] == [200.0] * 4


@pytest.mark.parametrize("answers", [[SYNC], [ASYNC], [Decision("sync", 3), Decision("async", 5), SYNC]])
def test_the_lines_account_for_every_second_and_token(answers: list[Decision]) -> None:
    done = run(answers, Budget(updates=12), evaluate_every=5, microbatches=3)
    seconds = [line["training_seconds"] for line in done.updates]
    assert seconds == sorted(seconds)
    assert seconds[-1] == 12 * 3 * 1.0 == sum(phase.seconds for phase in done.tally.phases)
    counted = [sum(toys.count(Data()(3 * u + k)[1]) for k in range(3)) for u in range(12)]
    assert [line["tokens"] for line in done.updates] == [sum(counted[: u + 1]) for u in range(12)]
    assert [line["update"] for line in done.updates] == list(range(1, 13))
    for line in done.updates:
        for name in ("clip_norm", "staleness", "idle_share"):
            assert len(line[name]) == 2
        assert all(0.0 <= share <= 1.0 for share in line["idle_share"])


# -- budgets and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", BOTH)
@pytest.mark.parametrize("updates", [1, 2, 7, 31])
def test_a_budget_in_updates_is_met_exactly(decision: Decision, updates: int) -> None:
    done = run([decision], Budget(updates=updates))
    assert len(done.updates) == done.tally.updates == updates


def test_a_long_run_writes_its_lines_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """To do so it flushes, which shows as an update without staleness."""
    monkeypatch.setattr("adapipe.training.loop.LONGEST_RUN", 20)
    done = run([ASYNC], Budget(updates=50), microbatches=1, held_out=False)
    fresh = [line["update"] for line in done.updates if line["staleness"] == [0.0, 0.0]]
    assert fresh == [1, 21, 41]
    assert len(done.updates) == 50


def test_a_decision_is_not_overrun_by_a_run_between_evaluations() -> None:
    done = run([Decision("sync", 3), Decision("async", 4), Decision("sync", 1), ASYNC], Budget(updates=10))
    assert done.modes == ["sync"] * 3 + ["async"] * 4 + ["sync"] + ["async"] * 2
    assert [at for at, _, _ in done.notes.decisions] == done.policy.asked_at == [0, 3, 7, 8]
    assert [seconds for _, seconds, _ in done.notes.decisions] == [0.0, 6.0, 14.0, 16.0]


@pytest.mark.parametrize("answers", [[SYNC], [ASYNC], [Decision("sync", 4), Decision("async", 7), SYNC]])
@pytest.mark.parametrize("seconds", [1.0, 9.0, 40.0, 41.5])
def test_a_budget_in_seconds_is_met_within_an_update(answers: list[Decision], seconds: float) -> None:
    done = run(answers, Budget(seconds=seconds), evaluate_every=6)
    each = 2.0
    assert seconds - each < done.tally.seconds <= seconds + 2 * each
    assert done.evaluated_at[-1] == done.tally.updates


def test_a_budget_in_seconds_holds_though_updates_become_slower() -> None:
    """The estimate is wrong by a factor of 50, so the run has to end in the middle of a stretch."""

    class Slowing(Data):
        def __call__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.clock.seconds += 25.0 if microbatch > 40 else 0.0
            return super().__call__(microbatch)

    for decision in BOTH:
        done = run([decision], Budget(seconds=300.0), data=Slowing(), held_out=False)
        slow = 2 * 51.0
        assert 300.0 - slow < done.tally.seconds <= 300.0 + 2 * slow


def test_the_target_ends_the_run_at_the_first_evaluation_that_reaches_it() -> None:
    def go(target: float | None) -> Run:
        return run([SYNC], Budget(updates=20), data=Data(distinct=2), evaluate_every=1, target_perplexity=target)

    curve = [line["held_out_perplexity"] for line in go(None).evaluations]
    reaching = next(n for n, value in enumerate(curve) if value < 0.7 * curve[0])
    assert 1 < reaching < len(curve) - 1
    assert all(value > curve[reaching] for value in curve[:reaching])
    done = go(curve[reaching])
    assert done.evaluated_at == list(range(reaching + 1))
    assert done.tally.seconds_to_target == done.tally.seconds == 2.0 * reaching
    unreachable = go(1.0)
    assert unreachable.tally.updates == 20
    assert unreachable.tally.seconds_to_target is None


def test_a_target_that_is_reached_before_training_trains_nothing() -> None:
    done = run([SYNC], Budget(updates=60), target_perplexity=1e6)
    assert done.updates == []
    assert done.evaluated_at == [0]
    assert done.tally.seconds_to_target == 0.0


@pytest.mark.parametrize("decision", BOTH)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_an_interrupted_run_ends_with_the_update_in_progress(decision: Decision, stages: int) -> None:
    """Asked for in the middle of update 5 (microbatches 20..23), as a signal would."""
    loads: list[int] = []

    class Watched(Data):
        def __call__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            loads.append(microbatch)
            return super().__call__(microbatch)

    done = run(
        [decision], Budget(updates=50), data=Watched(), stages=stages, microbatches=4, interrupted=lambda: 21 in loads
    )
    assert len(done.updates) == 6
    assert done.evaluated_at == [0, 6]
    assert {runtime.stage.in_flight for runtime in done.pipeline.runtimes} == {0}


@pytest.mark.parametrize("decision", BOTH)
def test_an_interruption_between_updates_costs_at_most_one_more(decision: Decision) -> None:
    seen: list[int] = []

    class Watched(Data):
        def __call__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(microbatch)
            return super().__call__(microbatch)

    done = run([decision], Budget(updates=50), data=Watched(), stages=1, interrupted=lambda: max(seen, default=0) >= 9)
    assert len(done.updates) in (5, 6)


# -- learning rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("answers", [[SYNC], [ASYNC], [Decision("sync", 7), Decision("async", 5), SYNC]])
def test_learning_rates_follow_the_share_of_the_updates(decay: str, answers: list[Decision]) -> None:
    done = run(answers, Budget(updates=20), warmup=0.2, decay=decay, evaluate_every=6)
    schedule = learning_rate_schedule(0.2, decay)
    expected = [RATE * schedule((u + 1) / 20) for u in range(20)]
    assert [line["learning_rate"] for line in done.updates] == pytest.approx(expected)
    assert expected[0] == pytest.approx(RATE * 0.25)
    assert done.updates[-1]["learning_rate"] == pytest.approx(RATE * (1.0 if decay == "constant" else FLOOR))
    for runtime in done.pipeline.runtimes:
        assert runtime.stage.learning_rate == done.updates[-1]["learning_rate"]


@pytest.mark.parametrize("answers", [[SYNC], [ASYNC], [Decision("sync", 17), Decision("async", 12), SYNC]])
def test_learning_rates_follow_the_share_of_the_seconds(answers: list[Decision]) -> None:
    done = run(answers, Budget(seconds=80.0), stages=1, warmup=0.5, decay="linear")
    schedule = learning_rate_schedule(0.5, "linear")
    rates = [line["learning_rate"] for line in done.updates]
    expected = [RATE * schedule(min(1.0, 2.0 * (u + 1) / 80.0)) for u in range(len(rates))]
    assert rates[FIRST_RUN:] == pytest.approx(expected[FIRST_RUN:])


def test_no_update_is_made_for_nothing_while_the_speed_is_unknown() -> None:
    """A learning rate of 0 spends the data and the time of an update, and moves no weight."""
    done = run([SYNC], Budget(seconds=80.0), warmup=0.5)
    assert all(line["learning_rate"] > 0 for line in done.updates)


def test_switches_leave_the_learning_rate_alone() -> None:
    mixed = [Decision("sync", 3), Decision("async", 4), Decision("sync", 2), ASYNC]
    rates = [
        [line["learning_rate"] for line in run(answers, Budget(updates=15), warmup=0.3, decay="cosine").updates]
        for answers in (mixed, [SYNC])
    ]
    assert rates[0] == rates[1]


# -- switching -------------------------------------------------------------------------------------------------------


def assert_same_weights(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_switching_keeps_optimizer_state_and_data_order(stages: int) -> None:
    """The loop is the engine's runs one after the other, bit for bit."""
    answers = [Decision("sync", 3), Decision("async", 4), Decision("sync", 2), ASYNC]
    done = run(answers, Budget(updates=15), stages=stages, microbatches=2, warmup=0.3, decay="cosine")
    engine = pipeline(Data(), stages=stages, microbatches=2)
    schedule = learning_rate_schedule(0.3, "cosine")
    losses: list[float] = []
    for first, updates, flush_every in ((0, 3, 1), (3, 4, 4), (7, 2, 1), (9, 6, 6)):
        engine.begin_phase()
        report = engine.run(Work(first, updates, flush_every, lambda update: schedule((update + 1) / 15)))
        losses.extend(report.field("loss")[-1])
    assert [line["loss"] for line in done.updates] == losses
    assert_same_weights(toys.weights(done.pipeline), toys.weights(engine))


def test_a_mode_that_goes_on_is_not_flushed_at_a_new_decision_without_need() -> None:
    """Two synchronous decisions in a row are one synchronous run."""
    two = run([Decision("sync", 4), SYNC], Budget(updates=9))
    one = run([SYNC], Budget(updates=9))
    assert_same_weights(toys.weights(two.pipeline), toys.weights(one.pipeline))
    assert len(two.tally.phases) == 1


def test_lines_say_how_stale_each_mode_is() -> None:
    done = run([Decision("sync", 3), Decision("async", 6), SYNC], Budget(updates=12), stages=3, microbatches=1)
    stale = [line["staleness"] for line in done.updates]
    assert stale[:3] == stale[9:] == [[0.0, 0.0, 0.0]] * 3
    assert stale[3:9] == [[0, 0, 0], [1, 1, 0], [2, 1, 0], [2, 1, 0], [2, 1, 0], [2, 1, 0]]
    accumulating = run([ASYNC], Budget(updates=4), microbatches=2)
    assert [line["staleness"] for line in accumulating.updates] == [[0, 0], [0.5, 0], [0.5, 0], [0.5, 0]]


def test_shapes_are_agreed_anew_when_the_mode_changes() -> None:
    class Growing(Data):
        def __call__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = super().__call__(microbatch)
            return (inputs, targets) if microbatch < 6 else (inputs.repeat(2, 1), targets.repeat(2))

    done = run([Decision("sync", 3), ASYNC], Budget(updates=8), data=Growing(), held_out=False)
    assert len(done.updates) == 8


# -- gradients that are not finite -----------------------------------------------------------------------------------


def skipped(done: Run) -> dict[int, list[int]]:
    return {line["update"]: line["skipped_stages"] for line in done.updates if line["skipped_stages"]}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_async_goes_back_to_sync_after_a_gradient_that_is_not_finite(stages: int) -> None:
    data = Data(poison=frozenset({20}))
    done = run([ASYNC], Budget(updates=60), data=data, stages=stages, microbatches=2)
    assert skipped(done) == {11: list(range(stages))}
    switch = done.modes.index("sync")
    assert 11 <= switch <= 11 + 1 + math.ceil((stages - 1) / 2)
    assert done.modes == ["async"] * switch + ["sync"] * RECOVERY_UPDATES + ["async"] * (60 - switch - RECOVERY_UPDATES)
    assert [(at, decision.mode) for at, _, decision in done.notes.decisions] == [
        (0, "async"),
        (switch, "sync"),
        (switch + RECOVERY_UPDATES, "async"),
    ]
    assert "stage " + ", ".join(map(str, range(stages))) in done.notes.decisions[1][2].reason
    assert all(math.isfinite(line["loss"]) for line in done.updates)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in toys.weights(done.pipeline))


def test_a_synchronous_update_is_skipped_everywhere_and_sync_goes_on() -> None:
    done = run([SYNC], Budget(updates=20), data=Data(poison=frozenset({9})), stages=3, microbatches=2)
    assert skipped(done) == {5: [0, 1, 2]}
    assert done.modes == ["sync"] * 20
    assert len(done.notes.decisions) == 1
    assert done.updates[4]["gradient_norm"] is None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in toys.weights(done.pipeline))


def test_recovery_is_cut_by_the_budget() -> None:
    done = run([ASYNC], Budget(updates=20), data=Data(poison=frozenset({20})))
    assert len(done.updates) == 20
    assert done.modes[-1] == "sync"


# -- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Budget(updates=12), Budget(seconds=24.0)])
def test_progress_is_reported_after_every_update(budget: Budget) -> None:
    done = run([Decision("sync", 5), ASYNC], budget, evaluate_every=4)
    states: list[dict[str, Any]] = done.notes.progressed
    assert [state["update"] for state in states] == [line["update"] for line in done.updates]
    assert [state["mode"] for state in states] == done.modes
    fractions = [state["fraction"] for state in states]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0, abs=1 / 12)
    seconds = [state["seconds"] for state in states]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= done.tally.seconds
    assert all(state["loss"] is not None for state in states[1:])
    assert all(state["tally"] is done.tally for state in states)


def test_the_clock_of_the_pipeline_is_the_clock_of_the_loop() -> None:
    clock = WorkClock(evaluation=0.5)
    done = run([SYNC], Budget(updates=2), data=Data(clock=clock))
    assert done.pipeline.clock is clock
    assert clock.seconds == done.tally.seconds + done.tally.evaluation_seconds
