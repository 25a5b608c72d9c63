"""The budget: two kinds, one arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.budget import Budget
from adapipe.errors import ConfigurationError

positive = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either --updates or --seconds"),
        ({"updates": 3, "seconds": 3.0}, "not both"),
        ({"updates": 0}, "--updates 0"),
        ({"updates": -4}, "--updates -4"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"seconds": -1.5}, "--seconds -1.5"),
        ({"seconds": math.inf}, "--seconds inf"),
        ({"seconds": math.nan}, "--seconds nan"),
    ],
)
def test_what_is_no_budget_is_refused_by_its_flag(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Budget(**arguments)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_budget_in_updates() -> None:
    budget = Budget(updates=8)
    assert [budget.fraction(done, 1e9) for done in (0, 2, 8, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert [budget.spent(done, 1e9) for done in (0, 7, 8, 9)] == [False, False, True, True]
    assert [budget.updates_left(done, 0.0, math.inf) for done in (0, 7, 8, 9)] == [8, 1, 0, 0]


def test_a_budget_in_seconds() -> None:
    budget = Budget(seconds=8.0)
    assert [budget.fraction(10**9, seconds) for seconds in (0.0, 2.0, 8.0, 9.0)] == [0.0, 0.25, 1.0, 1.0]
    assert [budget.spent(10**9, seconds) for seconds in (0.0, 7.9, 8.0, 9.0)] == [False, False, True, True]
    assert [budget.updates_left(10**9, seconds, 0.5) for seconds in (0.0, 7.0, 8.0, 9.0)] == [16, 2, 0, 0]


def test_time_left_is_never_too_short_for_an_update() -> None:
    assert Budget(seconds=1.0).updates_left(0, 0.999, 60.0) == 1


@given(total=st.integers(1, 10**6), done=st.integers(0, 10**6), seconds=st.floats(0, 1e6), each=positive)
def test_updates_run_out_when_spent(total: int, done: int, seconds: float, each: float) -> None:
    budget = Budget(updates=total)
    left = budget.updates_left(done, seconds, each)
    assert budget.spent(done, seconds) == (left == 0)
    assert left == max(0, total - done)
    assert not budget.spent(done, seconds) or budget.fraction(done, seconds) == 1.0


@given(total=positive, done=st.integers(0, 10**6), seconds=st.floats(0, 1e6), each=positive)
def test_seconds_run_out_when_spent(total: float, done: int, seconds: float, each: float) -> None:
    budget = Budget(seconds=total)
    left = budget.updates_left(done, seconds, each)
    assert budget.spent(done, seconds) == (left == 0)
    if left > 1:
        assert abs(left - (total - seconds) / each) <= 0.5 + 1e-6


@given(total=positive, first=st.floats(0, 1e7), second=st.floats(0, 1e7))
def test_the_fraction_grows_from_0_to_1(total: float, first: float, second: float) -> None:
    early, late = sorted((first, second))
    for budget, of in (
        (Budget(seconds=total), lambda used: (0, used)),
        (Budget(updates=math.ceil(total)), lambda used: (used, 0.0)),
    ):
        assert budget.fraction(*of(0)) == 0.0
        assert budget.fraction(*of(early)) <= budget.fraction(*of(late)) <= 1.0
