"""The orders of all stages as arrays: what is simulated and drawn, thousands of stages and microbatches included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.orders import (
    Pace,
    check_segment_shape,
    forward_comes_next,
    is_split,
    one_f_one_b,
    weight_comes_next,
)
from adapipe.schedule.synchronous import pace_of

CODES = {kind: code for code, kind in enumerate(Kind)}
"""Kinds as numbers."""

NOTHING = -1
"""The code after the end of a row that is shorter than others."""


@dataclass(frozen=True, slots=True)
class OrderTable:
    """kinds and indices (microbatches or updates): (stages, actions)."""

    kinds: NDArray[np.int8]
    indices: NDArray[np.int64]

    @property
    def stages(self) -> int:
        return int(self.kinds.shape[0])

    def repeated(self, updates: int, microbatches: int) -> OrderTable:
        """This order of one update of so many microbatches, for that many updates in a row."""
        step = np.where(self.kinds == CODES[Kind.UPDATE], 1, microbatches)
        indices = [np.where(self.kinds == NOTHING, NOTHING, self.indices + u * step) for u in range(updates)]
        return OrderTable(np.hstack([self.kinds] * updates), np.hstack(indices)).compact()

    def compact(self) -> OrderTable:
        """The same with what is empty at the ends of the rows."""
        if (self.kinds != NOTHING).all():
            return self
        order = np.argsort(self.kinds == NOTHING, axis=1, kind="stable")
        return OrderTable(np.take_along_axis(self.kinds, order, 1), np.take_along_axis(self.indices, order, 1))


def table_of(orders: Sequence[Sequence[Action]]) -> OrderTable:
    """Any orders as a table."""
    longest = max(map(len, orders), default=0)
    kinds = np.full((len(orders), longest), NOTHING, np.int8)
    indices = np.full((len(orders), longest), NOTHING, np.int64)
    for stage, order in enumerate(orders):
        kinds[stage, : len(order)] = [CODES[action.kind] for action in order]
        indices[stage, : len(order)] = [action.index for action in order]
    return OrderTable(kinds, indices)


@dataclass(frozen=True, slots=True)
class Holding:
    """What every stage holds after an action; all (stages,)."""

    in_flight: NDArray[np.int64]  # microbatches between their forward and the end of their backward
    parked: NDArray[np.int64]  # those of them whose backward is half done
    versions: NDArray[np.int64]  # live weight versions
    gradients: NDArray[np.bool_]  # there are some: they wait for their update, or it has just been made of them


def segment_table(
    stages: int, microbatches: int, updates: int, first_update: int = 0, in_flight: int = 1
) -> OrderTable:
    """`segment_orders` as a table, all stages one action at a time."""
    check_segment_shape(stages, microbatches, updates, first_update, in_flight)
    return _walk(_segment_paces(stages, in_flight), microbatches, updates, first_update, None)


def update_table(name: str, stages: int, microbatches: int, in_flight: int = 1) -> OrderTable:
    """Update 0 as a table; the orders of `adapipe.schedule.sync_schedule`."""
    check_segment_shape(stages, microbatches, 1, 0, in_flight)
    return _walk(_update_paces(name, stages, microbatches, in_flight), microbatches, 1, 0, None)


def visit_segment(
    stages: int, microbatches: int, updates: int, in_flight: int, visit: Callable[[Holding], None]
) -> None:
    """Call `visit` on what the stages hold after each action of a segment."""
    check_segment_shape(stages, microbatches, updates, 0, in_flight)
    _walk(_segment_paces(stages, in_flight), microbatches, updates, 0, visit)


def visit_update(name: str, stages: int, microbatches: int, in_flight: int, visit: Callable[[Holding], None]) -> None:
    """`visit_segment`, of a synchronous update."""
    check_segment_shape(stages, microbatches, 1, 0, in_flight)
    _walk(_update_paces(name, stages, microbatches, in_flight), microbatches, 1, 0, visit)


def _segment_paces(stages: int, in_flight: int) -> list[Pace]:
    return [one_f_one_b(stage, stages, in_flight) for stage in range(stages)]


def _update_paces(name: str, stages: int, microbatches: int, in_flight: int) -> list[Pace]:
    return [pace_of(name, stage, stages, microbatches, in_flight) for stage in range(stages)]


def _walk(
    paces: Sequence[Pace],
    microbatches: int,
    updates: int,
    first_update: int,
    visit: Callable[[Holding], None] | None,
) -> OrderTable:
    """The orders of stages at these paces: the rules of `SegmentOrder`, for all of them at once."""
    stages = len(paces)
    unanswered = np.array([pace.unanswered for pace in paces])
    first, last = np.array([(pace.split_first, pace.split_last) for pace in paces]).T
    some_split = bool((first + last).any())
    end, length = updates * microbatches, updates * ((3 if some_split else 2) * microbatches + 1)
    kinds = np.full((length, stages), NOTHING, np.int8)
    indices = np.full((length, stages), NOTHING, np.int64)
    f, b, u, i, w = (CODES[Kind(letter)] for letter in "FBUIW")
    done = np.zeros((len(CODES), stages), np.int64)  # by kind: how many the stage has done
    forwards, made = done[f], done[u]
    answered = completed = done[b]
    whole = np.maximum(0, end - first - last)
    every = np.arange(stages)
    for position in range(length):
        if some_split:
            answered, completed = done[b] + done[i], done[b] + done[w]
        update = completed == (made + 1) * microbatches
        kind = np.where(forward_comes_next(forwards, answered, end, unanswered), f, b)
        if some_split:
            kind[(kind == b) & is_split(answered, 0, end, first, last)] = i
            kind[weight_comes_next(answered, completed, end, first)] = w
        kind[update] = u
        if some_split:
            running = every[made < updates]
            kind = kind[running]
        else:
            running = every
        kinds[position, running] = kind
        index = done[kind, running]
        if some_split:
            # Backwards and first halves share one count; second halves pass over the whole backwards between.
            index = np.where((kind == b) | (kind == i), answered[running], index)
            index += np.where((kind == w) & (index >= first[running]), whole[running], 0)
        indices[position, running] = index
        done[kind, running] += 1
        if visit is not None:
            if some_split:
                answered, completed = done[b] + done[i], done[b] + done[w]
            # Forward j ran after j - W backwards, so with the version after that many // K updates. Every version
            # since that of the oldest microbatch in flight is held by one. (Of one update there is only one.)
            oldest = np.maximum(0, completed - (unanswered - 1)) // microbatches
            live = np.where(forwards > completed, made - oldest, 0) + 1
            begun = update | (completed > made * microbatches)
            visit(Holding(forwards - completed, answered - completed, live, begun))
    longest = int((kinds != NOTHING).sum(0).max())
    kinds, indices = kinds[:longest], indices[:longest]
    before = np.where(kinds == u, first_update, first_update * microbatches)
    indices = np.where(kinds == NOTHING, NOTHING, indices + before)
    return OrderTable(kinds.T, indices.T)
