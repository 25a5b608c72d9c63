"""The learning-rate schedule: a warm-up, a decay, and nothing that jumps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.errors import ConfigurationError
from adapipe.training.learning_rate import FLOOR, learning_rate_schedule

DECAYS = ["cosine", "linear", "constant"]
warmups = st.floats(0.0, 0.99)
shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize("decay", DECAYS)
def test_the_warm_up_is_a_straight_line_to_1(decay: str) -> None:
    schedule = learning_rate_schedule(0.2, decay)
    assert [schedule(share) for share in (0.0, 0.05, 0.1, 0.15)] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert schedule(0.2) == 1.0


@pytest.mark.parametrize("decay", DECAYS)
def test_without_a_warm_up_it_starts_at_1(decay: str) -> None:
    assert learning_rate_schedule(0.0, decay)(0.0) == 1.0


@pytest.mark.parametrize(
    ("decay", "quarter", "half", "end"),
    [
        ("cosine", FLOOR + (1 - FLOOR) * (2 + math.sqrt(2)) / 4, (1 + FLOOR) / 2, FLOOR),
        ("linear", 1 - (1 - FLOOR) / 4, (1 + FLOOR) / 2, FLOOR),
        ("constant", 1.0, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("warmup", [0.0, 0.2])
def test_the_shapes(decay: str, quarter: float, half: float, end: float, warmup: float) -> None:
    schedule = learning_rate_schedule(warmup, decay)
    points = [warmup + (1 - warmup) * share for share in (0.25, 0.5, 1.0)]
    assert [schedule(point) for point in points] == pytest.approx([quarter, half, end])


@given(warmup=warmups, decay=st.sampled_from(DECAYS), share=shares)
def test_after_the_warm_up_it_stays_between_1_and_the_floor(warmup: float, decay: str, share: float) -> None:
    factor = learning_rate_schedule(warmup, decay)(share)
    assert (0.0 if share < warmup else FLOOR - 1e-9) <= factor <= 1.0


@given(warmup=warmups, decay=st.sampled_from(DECAYS), first=shares, second=shares)
def test_it_rises_and_then_never_rises(warmup: float, decay: str, first: float, second: float) -> None:
    schedule = learning_rate_schedule(warmup, decay)
    early, late = sorted((first, second))
    if late < warmup:
        assert schedule(early) <= schedule(late)
    elif early >= warmup:
        assert schedule(early) >= schedule(late) - 1e-9


@given(warmup=st.floats(0.01, 0.99), decay=st.sampled_from(DECAYS), share=st.floats(0.0, 1.0 - 1e-6))
def test_it_never_jumps(warmup: float, decay: str, share: float) -> None:
    schedule = learning_rate_schedule(warmup, decay)
    steepest = max(1 / warmup, 0.5 * math.pi / (1 - warmup))
    assert abs(schedule(share + 1e-6) - schedule(share)) <= 1.001e-6 * steepest + 1e-12


@pytest.mark.parametrize("warmup", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_a_warm_up_that_is_no_share_is_refused(warmup: float) -> None:
    with pytest.raises(ConfigurationError, match=f"--warmup {warmup:g} is not a share"):
        learning_rate_schedule(warmup, "cosine")


def test_an_unknown_decay_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"--decay exponential: .* cosine, linear, constant"):
        learning_rate_schedule(0.1, "exponential")
