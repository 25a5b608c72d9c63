"""The grid of all orders, with one cell marked: what an error shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action


def format_grid(orders: Sequence[Sequence[Action]], mark: tuple[int, int] | None = None, reach: int = 12) -> str:
    """One line per stage, one column per position, the cell at `mark` = (stage, position) as `>0B2<`.

    With a mark, only `reach` cells on each side of its column are shown, and `...` stands for the rest.

        stage 0  0F0  0F1 >0B1<
        stage 1  1F0  1B0  1F1
    """
    if mark is None:
        start, stop = 0, max(map(len, orders), default=0)
    else:
        start, stop = max(0, mark[1] - reach), mark[1] + reach + 1
    rows = [[str(action) for action in order[start:stop]] for order in orders]
    width = max((len(cell) for row in rows for cell in row), default=0) + 2
    digits = len(str(len(orders) - 1))
    lines = []
    for stage, (order, row) in enumerate(zip(orders, rows, strict=True)):
        cells = [f">{c}<" if (stage, start + k) == mark else f" {c} " for k, c in enumerate(row)]
        line = f"stage {stage:>{digits}} "
        if start > 0:
            line += "... " if order else "    "
        line += "".join(f"{cell:<{width}}" for cell in cells)
        if len(order) > stop:
            line += " ..."
        lines.append(line.rstrip())
    return "\n".join(lines)


def fail(orders: Sequence[Sequence[Action]], stage: int, position: int, reason: str) -> NoReturn:
    """Raise ScheduleError for one cell."""
    grid = format_grid(orders, (stage, position))
    raise ScheduleError(f"stage {stage}, position {position}, {orders[stage][position]}: {reason}\n{grid}")
