import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind, format_order, parse_cell, parse_order

numbers = st.integers(0, 10**6)
kinds = st.sampled_from(Kind)


@given(st.builds(Action, numbers, kinds, numbers))
def test_a_cell_spells_one_action(action: Action) -> None:
    assert parse_cell(str(action)) == action


@given(st.text(alphabet="0123456789FBIWUfb -+.\n\t", max_size=6))
def test_an_action_has_one_spelling(text: str) -> None:
    try:
        action = parse_cell(text)
    except ScheduleError:
        return
    assert str(action) == text


@given(numbers, st.lists(st.tuples(kinds, numbers)))
def test_an_order_survives_format_and_parse(stage: int, actions: list[tuple[Kind, int]]) -> None:
    order = [Action(stage, kind, index) for kind, index in actions]
    assert parse_order(format_order(order)) == order


def test_cells_of_every_kind() -> None:
    assert str(Action(0, Kind.FORWARD, 3)) == "0F3"
    assert str(Action(11, Kind.BACKWARD, 20)) == "11B20"
    assert str(Action(1, Kind.UPDATE, 0)) == "1U0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "0F",
        "F3",
        "03",
        "0f3",
        "0X3",
        "0i3",
        "00F3",
        "01F3",
        "0F03",
        "-1F3",
        "0F-1",
        "0F+1",
        "0F1.0",
        "0F1_0",
        " 0F3",
        "0F3 ",
        "0 F3",
        "0F3\n",
        "0F3,",
        "0F3B3",
        "\u0663F3",  # digits of other scripts: int() would take them
        "0F\uff13",  # a full-width digit
        "0\uff263",  # a full-width letter
    ],
)
def test_anything_else_is_not_a_cell(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"is not an action: expected STAGE, then F, B, I, W or U, then a number"
    ) as error:
        parse_cell(text)
    assert str(error.value).startswith(repr(text))


def test_an_order_takes_any_white_space() -> None:
    order = [Action(2, Kind.FORWARD, 0), Action(2, Kind.BACKWARD, 0), Action(2, Kind.UPDATE, 0)]
    assert parse_order(" 2F0\t2B0\n 2U0\n") == order
    assert parse_order("") == parse_order(" \n") == []


def test_a_wrong_cell_is_named_with_its_position() -> None:
    with pytest.raises(ScheduleError, match=r"^cell 2: '0X1' is not an action"):
        parse_order("0F0 0B0 0X1 0B1")


def test_an_order_is_of_one_stage() -> None:
    with pytest.raises(ScheduleError, match=r"^cell 1: 1B0 is of stage 1, but the order began with 0F0$"):
        parse_order("0F0 1B0 0U0")
