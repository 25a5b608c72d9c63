"""The slope policy in made-up worlds where the better mode is known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.budget import Budget
from adapipe.policy import Decision, Slope
from adapipe.policy.slope import MIN_WINDOW
from tests.policy.simulator import Simulation, World, simulate


def gains(sync: float, async_: float) -> Callable[[str, float], float]:
    return lambda mode, used: sync if mode == "sync" else async_


ASYNC_WINS = World(gain=gains(sync=0.004, async_=0.005))
SYNC_WINS = World(gain=gains(sync=0.005, async_=0.001))
BUDGETS = [Budget(updates=2000), Budget(seconds=2000.0)]


def verdicts(run: Simulation) -> list[tuple[int, Decision]]:
    """The decisions that came out of a comparison."""
    return [(at, decision) for at, decision in run.decisions if decision.numbers]


@pytest.mark.parametrize("budget", BUDGETS)
def test_where_async_learns_more_per_second_it_ends_there(budget: Budget) -> None:
    run = simulate(Slope(budget, warmup=0.05), budget, ASYNC_WINS)
    assert run.share("async", since=0.12) > 0.75
    assert run.share("async") > 0.6
    assert all(decision.mode == "async" for _, decision in verdicts(run))
    assert run.modes[-1] == "async"


@pytest.mark.parametrize("budget", BUDGETS)
def test_where_sync_learns_more_per_second_it_stays(budget: Budget) -> None:
    run = simulate(Slope(budget, warmup=0.05), budget, SYNC_WINS)
    assert run.share("sync") > 0.8
    assert all(decision.mode == "sync" for _, decision in verdicts(run))
    assert run.modes[-1] == "sync"


def test_it_compares_seconds_and_not_updates() -> None:
    """Sync gains more per update here, but async makes so many more updates that it gains more per second."""
    world = World(gain=gains(sync=0.003, async_=0.004), seconds={"sync": 2.0, "async": 1.0})
    budget = Budget(updates=2000)
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    assert run.modes[-1] == "async"
    _, first = verdicts(run)[0]
    assert first.numbers == pytest.approx({"rate_sync": 0.003, "rate_async": 0.004})
    assert "async gains more held-out loss per second (4.00e-03 against 3.00e-03)" in first.reason


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("before", ["sync", "async"])
def test_it_follows_when_the_answer_changes(budget: Budget, before: str) -> None:
    after = "async" if before == "sync" else "sync"
    world = World(gain=lambda mode, used: 0.005 if mode == (before if used < 0.25 else after) else 0.002)
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    modes = [decision.mode for _, decision in verdicts(run)]
    assert modes[0] == before
    assert modes[-1] == after
    assert run.modes[-1] == after


def test_equal_modes_keep_the_one_that_runs() -> None:
    """One stage: both modes are the same, and the curve flattens, so the mode measured later looks worse."""
    world = World(gain=lambda mode, used: 0.005 * (1 - 0.9 * used), seconds={"sync": 1.0, "async": 1.0})
    budget = Budget(updates=2000)
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    assert {decision.mode for _, decision in verdicts(run)} == {"sync"}
    assert run.share("sync") > 0.8


@pytest.mark.parametrize(("world", "winner"), [(ASYNC_WINS, "async"), (SYNC_WINS, "sync")])
def test_stays_double_while_the_winner_stays_the_same(world: World, winner: str) -> None:
    budget = Budget(updates=4000)
    found = verdicts(simulate(Slope(budget, warmup=0.05, window=0.02), budget, world))
    assert {decision.mode for _, decision in found} == {winner}
    stays = [decision.updates or 0 for _, decision in found]
    assert len(stays) >= 3
    assert stays == [stays[0] * 2**n for n in range(len(stays))]


@pytest.mark.parametrize(("world", "winner"), [(ASYNC_WINS, "async"), (SYNC_WINS, "sync")])
def test_in_seconds_stays_grow_too(world: World, winner: str) -> None:
    """Their lengths in updates are estimates, as good as the two modes are alike in speed."""
    budget = Budget(seconds=4000.0)
    found = verdicts(simulate(Slope(budget, warmup=0.05, window=0.02), budget, world))
    assert {decision.mode for _, decision in found} == {winner}
    stays = [decision.updates or 0 for _, decision in found]
    assert len(stays) >= 3
    for earlier, later in pairwise(stays):
        assert 1.25 < later / earlier / 1.25 < 2.0


def test_a_change_of_winner_starts_over_with_the_shortest_stay() -> None:
    budget = Budget(updates=4000)
    world = World(gain=lambda mode, used: 0.005 if mode == ("sync" if used < 0.25 else "async") else 0.002)
    run = simulate(Slope(budget, warmup=0.05, window=0.02, dwell=3.0), budget, world)
    first = next(decision for _, decision in verdicts(run) if decision.mode == "async")
    assert first.updates == 3 * 0.02 * 4000


def test_the_parts_of_a_trial() -> None:
    """Warm-up, a window of sync, settling in async, a window of async, the verdict; each ends at an evaluation."""
    budget = Budget(updates=1000)
    run = simulate(Slope(budget, warmup=0.1, window=0.05, settle=0.4, dwell=2.0), budget, ASYNC_WINS)
    trial = [(at, decision.mode, decision.updates) for at, decision in run.decisions if at >= 100][:5]
    assert trial == [
        (100, "sync", 50),
        (150, "async", 20),
        (170, "async", 50),
        (220, "async", 100),
        (320, "async", 50),
    ]
    evaluated = {line["update"] for line in run.lines if "held_out_loss" in line}
    assert {0, 100, 150, 170, 220, 320, 370} <= evaluated


def test_updates_just_after_a_switch_are_left_out() -> None:
    """Every switch has a shock that is over when the settling is; only a rule that skips it finds async better."""

    class Shocked:
        since = 0
        mode = "sync"

        def __call__(self, mode: str, used: float) -> float:
            self.since = self.since + 1 if mode == self.mode else 1
            self.mode = mode
            return -0.05 if mode == "async" and self.since <= 20 else (0.004 if mode == "sync" else 0.006)

    budget = Budget(updates=1000)
    settled = simulate(Slope(budget, warmup=0.1, settle=0.4), budget, World(gain=Shocked()))
    assert verdicts(settled)[0][1].mode == "async"
    rash = simulate(Slope(budget, warmup=0.1, settle=0.02), budget, World(gain=Shocked()))
    assert verdicts(rash)[0][1].mode == "sync"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
def test_the_warm_up_is_synchronous(budget: Budget, warmup: float) -> None:
    run = simulate(Slope(budget, warmup=warmup), budget, ASYNC_WINS)
    used = [budget.fraction(line["update"], line["training_seconds"]) for line in run.updates]
    modes = [line["mode"] for line, share in zip(run.updates, used, strict=True) if share <= warmup]
    assert set(modes) <= {"sync"}
    asynchronous = [share for line, share in zip(run.updates, used, strict=True) if line["mode"] == "async"]
    assert warmup < min(asynchronous) < warmup + 0.1


@pytest.mark.parametrize("warmup", [0.01, 0.05, 0.5])
def test_the_warm_up_is_as_long_as_it_was_set(warmup: float) -> None:
    budget = Budget(updates=2000)
    run = simulate(Slope(budget, warmup=warmup), budget, ASYNC_WINS)
    lengths = [decision.updates or 0 for _, decision in run.decisions if "warm-up" in decision.reason]
    assert sum(lengths) == warmup * 2000


def test_a_measurement_starts_at_a_reading() -> None:
    """If the one at the end of the warm-up was lost, another comes first."""
    budget = Budget(updates=1000)
    world = World(gain=ASYNC_WINS.gain, lost=lambda mode, update: update == 50)
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    assert [(at, decision.updates) for at, decision in run.decisions if at in range(50, 101)] == [(50, 20), (70, 50)]


@pytest.mark.parametrize("initial_evaluation", [True, False])
def test_without_a_warm_up_it_asks_for_a_reading_first_unless_there_is_one(initial_evaluation: bool) -> None:
    budget = Budget(updates=1000)
    run = simulate(Slope(budget, warmup=0.0), budget, ASYNC_WINS, initial_evaluation=initial_evaluation)
    # The policy is asked before the run has evaluated anything.
    assert [(at, decision.mode, decision.updates) for at, decision in run.decisions[:3]] == [
        (0, "sync", 20),
        (20, "sync", 50),
        (70, "async", 20),
    ]
    assert run.modes[-1] == "async"


@pytest.mark.parametrize("initial_evaluation", [True, False])
def test_an_evaluation_before_training_changes_nothing_after_a_warm_up(initial_evaluation: bool) -> None:
    budget = Budget(updates=1000)
    run = simulate(Slope(budget, warmup=0.05), budget, ASYNC_WINS, initial_evaluation=initial_evaluation)
    other = simulate(Slope(budget, warmup=0.05), budget, ASYNC_WINS)
    assert run.decisions == other.decisions


@pytest.mark.parametrize("budget", BUDGETS)
def test_async_that_loses_the_held_out_loss_loses(budget: Budget) -> None:
    world = World(gain=ASYNC_WINS.gain, lost=lambda mode, update: mode == "async")
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    assert {decision.mode for _, decision in verdicts(run)} == {"sync"}
    assert all(decision.numbers["rate_async"] == float("-inf") for _, decision in verdicts(run))
    assert run.modes[-1] == "sync"


def test_async_that_loses_the_held_out_loss_late_is_left() -> None:
    budget = Budget(updates=2000)
    world = World(gain=ASYNC_WINS.gain, lost=lambda mode, update: mode == "async" and update > 600)
    run = simulate(Slope(budget, warmup=0.05), budget, world)
    assert verdicts(run)[0][1].mode == "async"
    assert verdicts(run)[-1][1].mode == "sync"
    assert run.modes[-1] == "sync"


def test_no_reading_at_all_stays_synchronous() -> None:
    budget = Budget(updates=2000)
    run = simulate(Slope(budget, warmup=0.05), budget, World(gain=ASYNC_WINS.gain, lost=lambda mode, update: True))
    assert {decision.mode for _, decision in verdicts(run)} == {"sync"}
    assert run.modes[-1] == "sync"


@pytest.mark.parametrize("updates", [1, 2, 10, 60])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
def test_a_budget_too_small_for_a_trial_is_synchronous(updates: int, warmup: float) -> None:
    for budget in (Budget(updates=updates), Budget(seconds=1.25 * updates)):
        run = simulate(Slope(budget, warmup=warmup), budget, ASYNC_WINS)
        assert run.modes == ["sync"] * updates


def test_a_short_run_measures_over_the_shortest_window() -> None:
    budget = Budget(updates=200)
    run = simulate(Slope(budget, warmup=0.05), budget, ASYNC_WINS)
    measured = {decision.updates for _, decision in run.decisions if decision.reason.startswith("measuring")}
    assert measured == {MIN_WINDOW}
    assert run.modes[-1] == "async"


@pytest.mark.parametrize("budget", [Budget(updates=130), Budget(seconds=150.0)])
def test_every_decision_but_the_last_ends_at_an_evaluation_and_has_a_reason(budget: Budget) -> None:
    run = simulate(Slope(budget, warmup=0.05), budget, ASYNC_WINS)
    *asked, (_, last) = run.decisions
    assert all(decision.evaluate and decision.updates is not None for _, decision in asked)
    assert (last.mode, last.updates) == ("async", None)
    assert last.reason == "too little of the budget is left for a trial: async to the end"
    assert all(decision.reason and "\n" not in decision.reason for _, decision in run.decisions)


@given(
    size=st.integers(1, 700),
    in_seconds=st.booleans(),
    warmup=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99]),
    window=st.floats(0.001, 1.0),
    speed=st.floats(0.01, 100.0),
    ratio=st.floats(0.2, 5.0),
    gain=st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0)),
    lost=st.sets(st.integers(0, 700), max_size=20),
    initial_evaluation=st.booleans(),
)
def test_it_ends_in_every_world(
    size: int,
    in_seconds: bool,
    warmup: float,
    window: float,
    speed: float,
    ratio: float,
    gain: tuple[float, float],
    lost: set[int],
    initial_evaluation: bool,
) -> None:
    """Always an answer, never less than an update (the simulator checks it), and sync up to the warm-up's end."""
    world = World(
        gain=gains(*gain),
        seconds={"sync": speed, "async": speed * ratio},
        lost=lambda mode, update: update in lost,
    )
    budget = Budget(seconds=size * speed) if in_seconds else Budget(updates=size)
    policy = Slope(budget, warmup=warmup, window=window)
    run = simulate(policy, budget, world, initial_evaluation=initial_evaluation)
    assert budget.spent(run.updates[-1]["update"], run.updates[-1]["training_seconds"])
    if "async" in run.modes:
        assert run.modes.index("async") / size > warmup - 1e-6
