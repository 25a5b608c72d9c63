"""The director: when a policy is asked, and the return to sync after a gradient that is not finite."""

from __future__ import annotations

from typing import Any

import pytest

from adapipe.budget import Budget
from adapipe.policy import Decision, Director, Plan, Slope
from adapipe.policy.director import RECOVERY_UPDATES
from tests.policy.simulator import World, simulate


class Script:
    """A policy that answers from a list and notes what it sees."""

    def __init__(self, *answers: Decision) -> None:
        self.answers = list(answers)
        self.seen: list[dict[str, Any]] = []
        self.asked_at: list[int] = []

    def observe(self, line: Any) -> None:
        self.seen.append(line)

    def decide(self) -> Decision:
        self.asked_at.append(len(self.seen))
        return self.answers.pop(0)


def update(number: int, mode: str, skipped: list[int] | None = None) -> dict[str, Any]:
    return {
        "update": number,
        "mode": mode,
        "training_seconds": 1.0 * number,
        "skipped_stages": skipped or [],
        "flushed": True,
    }


def evaluation(number: int) -> dict[str, Any]:
    return {"update": number, "mode": "sync", "training_seconds": 1.0 * number, "held_out_loss": 2.0}


def test_a_policy_is_asked_when_its_decision_has_run_out_and_not_before() -> None:
    policy = Script(Decision("sync", 2), Decision("async", 1), Decision("async"))
    director = Director(policy)
    assert director.due
    assert director.decide() == Decision("sync", 2)
    assert (director.due, director.updates_left) == (False, 2)
    director.observe(evaluation(0))
    assert (director.due, director.updates_left) == (False, 2)
    director.observe(update(1, "sync"))
    assert director.decide() == Decision("sync", 2)
    assert (director.due, director.updates_left) == (False, 1)
    director.observe(update(2, "sync"))
    assert (director.due, director.updates_left) == (True, 0)
    director.observe(evaluation(2))
    assert director.decide() == Decision("async", 1)
    director.observe(update(3, "async"))
    assert director.decide() == Decision("async")
    assert (director.due, director.updates_left) == (False, None)
    director.observe(update(4, "async"))
    assert not director.due
    assert policy.asked_at == [0, 4, 5]
    assert [at for at, _ in director.decisions] == [0, 2, 3]


def test_a_policy_sees_every_line_in_order() -> None:
    policy = Script(Decision("sync"))
    director = Director(policy)
    lines = [evaluation(0), update(1, "sync"), update(2, "async", [1]), evaluation(2)]
    for line in lines:
        director.observe(line)
    assert policy.seen == lines


def test_a_skipped_asynchronous_update_is_followed_by_sync_then_by_the_policy() -> None:
    policy = Script(Decision("async"), Decision("async", 3))
    director = Director(policy)
    director.decide()
    director.observe(update(1, "async", [2]))
    director.observe(update(2, "async", [0, 2]))
    assert director.due
    recovery = director.decide()
    assert (recovery.mode, recovery.updates) == ("sync", RECOVERY_UPDATES)
    assert "stage 0, 2" in recovery.reason
    assert policy.asked_at == [0]
    for number in range(3, 3 + RECOVERY_UPDATES):
        assert director.decide() is recovery
        director.observe(update(number, "sync"))
    assert director.decide() == Decision("async", 3)
    assert director.updates_left == 3


def test_a_skip_comes_before_the_end_of_a_decision() -> None:
    policy = Script(Decision("async", 1), Decision("async"))
    director = Director(policy)
    director.decide()
    director.observe(update(1, "async", [1]))
    assert director.decide().updates == RECOVERY_UPDATES
    assert policy.asked_at == [0]


def test_a_skipped_synchronous_update_is_no_reason_to_change() -> None:
    policy = Script(Decision("sync", 3))
    director = Director(policy)
    decision = director.decide()
    director.observe(update(1, "sync", [0, 1]))
    assert not director.due
    assert director.decide() is decision
    assert director.updates_left == 2


def test_a_skip_during_recovery_does_not_prolong_it() -> None:
    policy = Script(Decision("async"), Decision("async"))
    director = Director(policy)
    director.decide()
    director.observe(update(1, "async", [1]))
    director.decide()
    for number in range(2, 2 + RECOVERY_UPDATES):
        assert director.updates_left == RECOVERY_UPDATES - (number - 2)
        director.observe(update(number, "sync", [0, 1]))
    assert director.decide().mode == "async"


def test_every_skip_has_its_own_recovery() -> None:
    run = simulate(
        Plan([("sync", 5), ("async", 20), ("async", 20)]),
        Budget(updates=100),
        World(gain=lambda mode, used: 0.01, skips=frozenset({3, 10, 40}), lag=2),
    )
    recovery = ["sync"] * RECOVERY_UPDATES
    assert run.modes == ["sync"] * 5 + ["async"] * 7 + recovery + ["async"] * 10 + recovery + ["async"] * 38


def test_a_recovery_is_not_taken_for_a_measurement_of_async() -> None:
    """A gradient is skipped while the policy settles in async; the rate it then measures must be async's alone."""
    budget = Budget(updates=1000)
    gain = {"sync": 0.004, "async": 0.006}
    run = simulate(
        Slope(budget, warmup=0.1), budget, World(gain=lambda mode, used: gain[mode], skips=frozenset({160}), lag=1)
    )
    numbers = next(decision.numbers for _, decision in run.decisions if decision.numbers)
    assert numbers == pytest.approx({"rate_sync": 0.004, "rate_async": 0.006})


def test_a_measurement_that_a_recovery_cut_short_counts_against_async() -> None:
    budget = Budget(updates=1000)
    gain = {"sync": 0.004, "async": 0.006}
    run = simulate(
        Slope(budget, warmup=0.1), budget, World(gain=lambda mode, used: gain[mode], skips=frozenset({190}), lag=1)
    )
    at, verdict = next((at, decision) for at, decision in run.decisions if decision.numbers)
    assert (at, verdict.mode) == (191 + RECOVERY_UPDATES, "sync")
    assert verdict.numbers["rate_async"] == float("-inf")
