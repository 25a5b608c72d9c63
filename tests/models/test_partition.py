from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.errors import ConfigurationError
from adapipe.models.partition import check_partition, partition

any_costs = st.lists(
    st.one_of(st.integers(0, 6), st.floats(0, 1e6), st.sampled_from([0.1, 0.2, 0.3])), min_size=1, max_size=9
)


def all_cuts(blocks: int, stages: int) -> Iterator[list[range]]:
    for inner in combinations(range(1, blocks), stages - 1):
        yield [range(start, end) for start, end in pairwise((0, *inner, blocks))]


def rank(costs: list[float], parts: list[range]) -> tuple[Fraction, Fraction, list[int]]:
    """What `partition` minimises, computed exactly: the largest stage, the squares, the earliest cuts."""
    stage_costs = [sum((Fraction(costs[block]) for block in part), Fraction(0)) for part in parts]
    return max(stage_costs), sum((cost**2 for cost in stage_costs), Fraction(0)), [part.start for part in parts]


@given(costs=any_costs, data=st.data())
def test_no_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    parts = partition(costs, stages)
    assert parts == min(all_cuts(len(costs), stages), key=lambda cut: rank(costs, cut))
    check_partition(parts, len(costs))
    assert len(parts) == stages


@given(costs=any_costs, data=st.data(), power=st.integers(-1000, 900))
def test_the_unit_of_the_costs_does_not_matter(costs: list[float], data: st.DataObject, power: int) -> None:
    whole = [round(cost) for cost in costs]  # a subnormal cost would lose bits in the scaling
    stages = data.draw(st.integers(1, len(costs)))
    assert partition([cost * 2.0**power for cost in whole], stages) == partition(whole, stages)


def sizes(costs: list[float], stages: int) -> list[int]:
    return [len(part) for part in partition(costs, stages)]


def test_equal_layers_split_evenly() -> None:
    assert sizes([1] * 8, 4) == [2, 2, 2, 2]
    assert sizes([0.1] * 6, 3) == [2, 2, 2]  # 0.1 + 0.1 is not 0.3 - 0.1 in floating point


def test_ties_leave_the_larger_stages_to_the_end() -> None:
    """The first stages hold the most microbatches in flight."""
    assert sizes([1] * 5, 2) == [2, 3]
    assert sizes([1] * 7, 3) == [2, 2, 3]


def test_the_even_cut_wins_among_cuts_with_the_same_largest_stage() -> None:
    assert sizes([9, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]


def test_the_largest_stage_comes_before_evenness() -> None:
    """6 2 3 has the smaller sum of squares, 49 against 51, but the largest stage sets the pace."""
    assert sizes([1, 5, 2, 3], 3) == [1, 1, 2]


def test_evenness_is_judged_over_all_stages() -> None:
    """1 5 5 is the best cut of what follows the 6, but behind a stage of 6 the better one is 6 2 3."""
    assert sizes([6, 1, 5, 2, 3], 4) == [1, 2, 1, 1]


def test_as_many_stages_as_blocks() -> None:
    assert partition([0, 5, 0], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_blocks_without_cost_still_fill_a_stage() -> None:
    assert sizes([0, 0, 0, 0], 4) == [1, 1, 1, 1]
    assert sizes([0, 0, 0, 0], 1) == [4]


def test_a_long_model_takes_no_time() -> None:
    assert sizes([1.0 + 0.1 * (i % 3) for i in range(120)], 8) == [15] * 8


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1] * 6, 8, "8 stages need at least 8 blocks, but the model has 6: use fewer stages or more layers"),
        ([1], 0, "0 stages cannot hold a model: use at least 1 stage"),
        ([1], -2, "-2 stages cannot hold a model: use at least 1 stage"),
        ([], 1, "1 stages need at least 1 blocks, but the model has 0: use fewer stages or more layers"),
        ([1, -0.5], 1, "block 1 has cost -0.5: costs must be finite and not negative"),
        ([float("nan"), 1], 1, "block 0 has cost nan: costs must be finite and not negative"),
        ([1, 1, float("inf")], 2, "block 2 has cost inf: costs must be finite and not negative"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        partition(costs, stages)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [range(0, 2)],
        [range(0, 3), range(3, 5)],
        [range(1, 4)],
        [range(0, 2), range(1, 4)],
        [range(0, 1), range(2, 4)],
        [range(2, 4), range(0, 2)],
        [range(0, 2), range(2, 2), range(2, 4)],
        [range(0, 4, 2)],
    ],
    ids=str,
)
def test_stages_that_are_not_the_whole_model_are_refused(parts: list[range]) -> None:
    check_partition([range(0, 1), range(1, 4)], 4)
    with pytest.raises(ConfigurationError, match="give every block to exactly one stage, in order"):
        check_partition(parts, 4)
