"""Actions: what a stage does, one at a time, and their compact cells (`0F3`, `1B2`, `1U0`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from adapipe.errors import ScheduleError


class Kind(Enum):
    """What an action does. The value is the letter in a cell.

    A backward is whole, B, or split in two: I makes the gradient of the stage's input and passes it on, W those of its
    weights, later.
    """

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def answers(self) -> bool:
        """Does it take the gradient of a microbatch from the next stage, and pass one on? (B and I)"""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)

    @property
    def completes(self) -> bool:
        """Does it end the work on a microbatch and free what it kept? (B and W)"""
        return self in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage.

    `index` is the number of a microbatch, or of an update (U), both counted from 0 over the whole run.
    """

    stage: int
    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.index}"


# Numbers without leading zeros, so that every action has exactly one spelling.
_CELL = re.compile(r"(0|[1-9][0-9]*)([FBIWU])(0|[1-9][0-9]*)", re.ASCII)


def parse_cell(text: str) -> Action:
    """The action that a cell such as `0F3` spells. Raises ScheduleError for anything else, spaces included."""
    match = _CELL.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action: expected STAGE, then F, B, I, W or U, then a number, as in 0F3 or 1U0"
        )
    stage, letter, index = match.groups()
    return Action(int(stage), Kind(letter), int(index))


def parse_order(text: str) -> list[Action]:
    """The order of one stage from cells separated by white space. Raises ScheduleError at the first wrong cell."""
    order: list[Action] = []
    for position, cell in enumerate(text.split()):
        try:
            action = parse_cell(cell)
        except ScheduleError as error:
            raise ScheduleError(f"cell {position}: {error}") from None
        if order and action.stage != order[0].stage:
            raise ScheduleError(
                f"cell {position}: {cell} is of stage {action.stage}, but the order began with {order[0]}"
            )
        order.append(action)
    return order


def format_order(order: Iterable[Action]) -> str:
    """The order as cells separated by spaces: the inverse of `parse_order`."""
    return " ".join(map(str, order))
