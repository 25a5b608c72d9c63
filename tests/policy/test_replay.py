"""Replay: a recorded run gives exactly the decisions that were made, from its lines alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adapipe
from adapipe.budget import Budget
from adapipe.policy import Decision, Fixed, Plan, Policy, Slope, replay
from adapipe.policy.base import is_evaluation
from adapipe.policy.director import RECOVERY_UPDATES
from adapipe.reports.metrics import read_metrics
from tests.engine import toys
from tests.policy.simulator import World, simulate

HELD_OUT = [toys.batches(10_000 + i) for i in range(3)]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@given(
    size=st.integers(1, 900),
    in_seconds=st.booleans(),
    warmup=st.sampled_from([0.0, 0.05, 0.5]),
    gain=st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1)),
    lost=st.sets(st.integers(0, 900), max_size=30),
    initial_evaluation=st.booleans(),
)
def test_the_slope_policy_in_made_up_worlds(
    size: int,
    in_seconds: bool,
    warmup: float,
    gain: tuple[float, float],
    lost: set[int],
    initial_evaluation: bool,
) -> None:
    budget = Budget(seconds=1.25 * size) if in_seconds else Budget(updates=size)
    world = World(gain=lambda mode, used: gain[mode == "async"] * (1 - used), lost=lambda mode, update: update in lost)
    run = simulate(Slope(budget, warmup=warmup), budget, world, initial_evaluation=initial_evaluation)
    recorded = [json.loads(json.dumps(line)) for line in run.lines]
    assert replay(Slope(budget, warmup=warmup), recorded) == run.decisions


def test_a_run_cut_short_replays_what_was_decided_by_then() -> None:
    budget = Budget(updates=2000)
    run = simulate(
        Slope(budget, warmup=0.05), budget, World(gain=lambda mode, used: 0.01 if mode == "async" else 0.005)
    )
    cut = next(n for n, line in enumerate(run.lines) if line["update"] == 700)
    decided = [(at, decision) for at, decision in run.decisions if at < 700]
    assert replay(Slope(budget, warmup=0.05), run.lines[: cut + 1]) == decided


def test_an_empty_record_replays_the_first_decision() -> None:
    assert replay(Plan([("async", 4)]), []) == [(0, Decision("async", 4, reason="phase 1 of the plan"))]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_recovery_replays(lag: int) -> None:
    """However many updates the run still made before it had flushed."""
    world = World(gain=lambda mode, used: 0.01, skips=frozenset({30, 90}), lag=lag)
    run = simulate(Fixed("async"), Budget(updates=150), world)
    assert replay(Fixed("async"), run.lines) == run.decisions


def train(out: Path, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A real run in this process: its metrics and its decisions, as recorded."""
    arguments: dict[str, Any] = {
        "loss": toys.loss,
        "batches": toys.batches,
        "optimizer": toys.sgd,
        "stages": 2,
        "microbatches": 2,
        "progress": False,
        **options,
    }
    adapipe.train(toys.blocks(), out=out, **arguments)
    return read_metrics(out / "metrics.jsonl"), read_metrics(out / "decisions.jsonl")


def assert_replays(make: Callable[[], Policy], lines: list[dict[str, Any]], decided: list[dict[str, Any]]) -> None:
    """Mode, length, reason and numbers of every decision, and when it was made, bit for bit."""
    again = []
    for at, decision in replay(make(), lines):
        numbers = {name: value if math.isfinite(value) else None for name, value in decision.numbers.items()}
        again.append({"update": at, **asdict(decision), "numbers": numbers})
    for record in decided:
        del record["training_seconds"]
    assert decided == again


def test_a_real_adaptive_run_in_updates(tmp_path: Path) -> None:
    lines, decided = train(tmp_path, mode="adaptive", updates=200, held_out=HELD_OUT, evaluate_every=15)
    assert any(record["numbers"] for record in decided)
    assert {line["mode"] for line in lines} == {"sync", "async"}
    assert_replays(lambda: Slope(Budget(updates=200), warmup=0.05), lines, decided)


def test_a_real_adaptive_run_in_seconds(tmp_path: Path) -> None:
    lines, decided = train(tmp_path, mode="adaptive", seconds=0.8, warmup=0.1, held_out=HELD_OUT, evaluate_every=1000)
    assert len(decided) > 4
    assert_replays(lambda: Slope(Budget(seconds=0.8), warmup=0.1), lines, decided)


def test_a_real_run_whose_held_out_loss_was_lost_for_a_while(tmp_path: Path) -> None:
    """In the file it is null; the policy must have seen the same."""

    class HeldOut:
        """Not finite at the evaluation that ends the measurement of sync."""

        reads = 0

        def __len__(self) -> int:
            return 1

        def __getitem__(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = HELD_OUT[microbatch]
            self.reads += 1  # two per evaluation: inputs on stage 0, targets on stage 1
            return (inputs * math.nan if (self.reads - 1) // 2 == 3 else inputs), targets

    lines, decided = train(tmp_path, mode="adaptive", updates=200, held_out=HeldOut(), evaluate_every=1000)
    evaluations = [line for line in lines if is_evaluation(line)]
    assert [n for n, line in enumerate(evaluations) if line["held_out_loss"] is None] == [3]
    assert_replays(lambda: Slope(Budget(updates=200), warmup=0.05), lines, decided)


def test_a_real_run_with_a_gradient_that_was_not_finite(tmp_path: Path) -> None:
    def batches(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = toys.batches(microbatch)
        return inputs, torch.zeros_like(targets) if microbatch == 13 else targets.clamp(min=1)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if output.requires_grad and not targets.any():
            output.register_hook(lambda gradient: gradient * math.nan)
        return toys.loss(output, targets)

    lines, decided = train(tmp_path, mode="async", updates=50, batches=batches, loss=loss, microbatches=1)
    skipped = [line["update"] for line in lines if line["skipped_stages"]]
    assert skipped
    assert [line["mode"] for line in lines].count("sync") == RECOVERY_UPDATES
    assert_replays(lambda: Fixed("async"), lines, decided)


def test_a_real_run_that_reached_its_target(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "plan": "sync:10,async:10,sync:10",
        "updates": 30,
        "batches": lambda microbatch: toys.batches(microbatch % 4),
        "held_out": [toys.batches(i) for i in range(4)],
        "evaluate_every": 10,
    }
    lines, _ = train(tmp_path / "whole", **options)
    before, after, *_ = [line["held_out_perplexity"] for line in lines if is_evaluation(line)]
    assert after < before
    lines, decided = train(tmp_path / "short", target_perplexity=after, **options)
    assert lines[-1]["update"] == 10
    assert_replays(lambda: Plan([("sync", 10), ("async", 10), ("sync", 10)]), lines, decided)
