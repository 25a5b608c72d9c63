"""Policies that decide nothing: one mode, or a plan."""

from __future__ import annotations

import pytest

from adapipe.budget import Budget
from adapipe.errors import ConfigurationError
from adapipe.policy import Fixed, Plan, parse_plan
from adapipe.policy.base import Mode
from tests.policy.simulator import World, simulate

FLAT = World(gain=lambda mode, used: 0.01)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fixed_is_one_decision_for_the_whole_run(mode: Mode) -> None:
    run = simulate(Fixed(mode), Budget(updates=30), FLAT)
    assert run.modes == [mode] * 30
    assert [(at, decision.mode, decision.updates) for at, decision in run.decisions] == [(0, mode, None)]


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("sync:1", [("sync", 1)]),
        ("sync:200,async:600", [("sync", 200), ("async", 600)]),
        (" async:3 , sync:2,sync:4", [("async", 3), ("sync", 2), ("sync", 4)]),
        ("sync:007", [("sync", 7)]),
    ],
)
def test_a_plan_is_read(text: str, phases: list[tuple[str, int]]) -> None:
    assert parse_plan(text) == phases


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("", "''"),
        ("sync", "'sync'"),
        ("sync:", "'sync:'"),
        ("sync:0", "'sync:0'"),
        ("sync:-3", "'sync:-3'"),
        ("sync:+3", "'sync:+3'"),
        ("sync:1.5", "'sync:1.5'"),
        ("sync:1_000", "'sync:1_000'"),
        ("sync:²", "'sync:²'"),
        ("sync:३", "'sync:३'"),
        ("sync: 3", "'sync: 3'"),
        ("sync :3", "'sync :3'"),
        ("sync:3:4", "'sync:3:4'"),
        ("Sync:3", "'Sync:3'"),
        ("adaptive:3", "'adaptive:3'"),
        ("sync:3,", "''"),
        ("sync:3,,async:3", "''"),
        ("sync:3,asinc:4,async:5", "'asinc:4'"),
        ("sync:3;async:4", "'sync:3;async:4'"),
    ],
)
def test_what_is_no_plan_is_refused_by_its_phase(text: str, culprit: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_plan(text)
    message = str(refused.value)
    assert message.startswith(f"--plan: {culprit} is not a phase")
    assert "sync:200,async:600" in message
    assert "\n" not in message


def test_a_plan_runs_phase_by_phase_and_its_last_mode_goes_on() -> None:
    run = simulate(Plan([("sync", 3), ("async", 4), ("sync", 1), ("async", 2)]), Budget(updates=15), FLAT)
    assert run.modes == ["sync"] * 3 + ["async"] * 4 + ["sync"] + ["async"] * 7
    assert [(at, decision.mode, decision.updates) for at, decision in run.decisions] == [
        (0, "sync", 3),
        (3, "async", 4),
        (7, "sync", 1),
        (8, "async", 2),
        (10, "async", None),
    ]


def test_a_plan_longer_than_the_budget_is_cut() -> None:
    run = simulate(Plan([("sync", 3), ("async", 400), ("sync", 5)]), Budget(updates=10), FLAT)
    assert run.modes == ["sync"] * 3 + ["async"] * 7


def test_a_plan_does_not_keep_the_list_it_was_given() -> None:
    phases: list[tuple[Mode, int]] = [("sync", 1), ("async", 2)]
    plan = Plan(phases)
    phases.clear()
    assert [plan.decide().mode for _ in range(3)] == ["sync", "async", "async"]
