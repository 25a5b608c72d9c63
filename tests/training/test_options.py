"""Options: checked in one place, each message one line that names the flag."""

from __future__ import annotations

import math
from typing import Any

import pytest

from adapipe.budget import Budget
from adapipe.errors import ConfigurationError
from adapipe.policy import Fixed, Plan, Slope
from adapipe.training.options import Options

GOOD: dict[str, Any] = {
    "mode": "sync",
    "plan": None,
    "microbatches": 4,
    "updates": 10,
    "seconds": None,
    "warmup": 0.1,
    "decay": "cosine",
    "clip": 1.0,
    "evaluate_every": 50,
    "target_perplexity": None,
    "precision": "fp32",
    "in_flight": 1,
    "sync_schedule": "auto",
}


def options(**changes: Any) -> Options:
    return Options(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "asinc"}, "--mode asinc: unknown mode, choose one of sync, async, adaptive"),
        ({"in_flight": 0}, "--in-flight 0: give at least 1 microbatch per hop"),
        ({"sync_schedule": "zb"}, "--sync-schedule zb: unknown schedule, choose one of auto, gpipe, 1f1b, zb-h1, or"),
        ({"precision": "fp16"}, "--precision fp16: unknown precision, choose one of fp32, bf16"),
        ({"plan": "sync:x"}, "--plan: 'sync:x'"),
        ({"plan": ""}, "--plan: ''"),
        ({"microbatches": 0}, "--microbatches 0"),
        ({"microbatches": -2}, "--microbatches -2"),
        ({"updates": 0}, "--updates 0"),
        ({"updates": None}, "--updates or --seconds"),
        ({"seconds": 3.0}, "--updates or --seconds"),
        ({"updates": None, "seconds": -3.0}, "--seconds -3"),
        ({"warmup": 1.0}, "--warmup 1"),
        ({"warmup": -0.5}, "--warmup -0.5"),
        ({"decay": "step"}, "--decay step"),
        ({"clip": 0.0}, "--clip 0"),
        ({"clip": -1.0}, "--clip -1"),
        ({"clip": math.inf}, "--clip inf"),
        ({"clip": math.nan}, "--clip nan"),
        ({"evaluate_every": 0}, "--evaluate-every 0"),
        ({"target_perplexity": 0.99}, "--target-perplexity 0.99: give at least 1"),
        ({"target_perplexity": math.nan}, "--target-perplexity nan"),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "async", "adaptive"])
def test_what_cannot_work_is_refused_in_every_mode(mode: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        options(**{"mode": mode, **changes})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": None},
        {"target_perplexity": 1.0},
        {"target_perplexity": 20.0},
        {"warmup": 0.0},
        {"evaluate_every": 10**9},
        {"microbatches": 1},
        {"updates": 1},
        {"updates": None, "seconds": 0.001},
        {"precision": "bf16"},
    ],
)
def test_what_works_is_let_through(changes: dict[str, Any]) -> None:
    options(**changes)


@pytest.mark.parametrize(("mode", "kind"), [("sync", Fixed), ("async", Fixed), ("adaptive", Slope)])
def test_the_mode_chooses_the_policy(mode: str, kind: type) -> None:
    chosen = options(mode=mode)
    assert isinstance(chosen.policy(), kind)
    assert chosen.name == mode
    assert chosen.needs_held_out == (mode == "adaptive")
    assert options(mode="async").policy().decide().mode == "async"
    assert options(mode="sync").policy().decide().mode == "sync"


def test_a_plan_comes_before_the_mode() -> None:
    chosen = options(mode="adaptive", plan="async:3,sync:4")
    policy = chosen.policy()
    assert isinstance(policy, Plan)
    assert [(d.mode, d.updates) for d in (policy.decide(), policy.decide())] == [("async", 3), ("sync", 4)]
    assert chosen.name == "plan"
    assert not chosen.needs_held_out


def test_every_policy_is_a_fresh_one() -> None:
    chosen = options(plan="async:3,sync:4")
    chosen.policy().decide()
    assert chosen.policy().decide().mode == "async"


def test_budget_and_schedule() -> None:
    assert options().budget == Budget(updates=10)
    assert options(updates=None, seconds=2.0).budget == Budget(seconds=2.0)
    assert options(warmup=0.5).schedule()(0.25) == 0.5
    assert options(decay="constant").schedule()(0.9) == 1.0
