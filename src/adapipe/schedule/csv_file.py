"""Synchronous schedules as CSV, in the cells of torch.distributed.pipelining: a line per stage, an action per cell.

    0F0,0F1,,,0B0,0B1
    1F0,,1I0,1F1,1W0,1I1,1W1

Microbatches count from 0. Empty cells are idle slots: the order is what counts, not when. The update comes last, and is
not written. torch writes such files with `_dump_csv(..., format="compute_only")`.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind, parse_cell
from adapipe.schedule.synchronous import SyncSchedule


def schedule_csv(schedule: SyncSchedule) -> str:
    """The file of a schedule: the inverse of `parse_schedule`."""
    rows = [[str(action) for action in order if action.kind is not Kind.UPDATE] for order in schedule.orders]
    return "".join(",".join(row) + "\n" for row in rows)


def parse_schedule(text: str, name: str) -> SyncSchedule:
    """The schedule in a file's text; K is the number of microbatches in it. Raises ScheduleError naming line and cell
    for what is not one; whether it can run, `adapipe.schedule.check_synchronous` finds out."""
    orders: list[tuple[Action, ...]] = []
    lines = list(csv.reader(io.StringIO(text)))
    while lines and not any(lines[-1]):
        lines.pop()
    for stage, line in enumerate(lines):
        order = [_cell(cell, stage, position) for position, cell in enumerate(line) if cell]
        if not order:
            raise ScheduleError(f"line {stage + 1}: stage {stage} has no action")
        orders.append((*order, Action(stage, Kind.UPDATE, 0)))
    if not orders:
        raise ScheduleError("it holds no cell")
    microbatches = 1 + max(action.index for order in orders for action in order)
    return SyncSchedule(name, microbatches, tuple(orders))


def _cell(text: str, stage: int, position: int) -> Action:
    where = f"line {stage + 1}, cell {position + 1}"
    if re.search(r"SEND|RECV|UNSHARD|RESHARD|OVERLAP|REDUCE", text):
        raise ScheduleError(f"{where}: {text!r} is not computing; leave communication out (torch: compute_only)")
    try:
        action = parse_cell(text)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None
    if action.kind is Kind.UPDATE:
        raise ScheduleError(f"{where}: {text}: leave the update out, it follows at the end")
    if action.stage != stage:
        raise ScheduleError(f"{where}: {text} is of stage {action.stage}, and the line is that of stage {stage}")
    return action


def read_schedule(path: Path) -> SyncSchedule:
    """The schedule in a file. Raises ScheduleError, naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"schedule file {path} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"schedule file {path} is not a text") from None
    try:
        return parse_schedule(text, str(path))
    except ScheduleError as error:
        raise ScheduleError(f"schedule file {path}: {error}") from None
