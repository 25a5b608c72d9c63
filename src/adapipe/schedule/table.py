"""The orders of all stages as arrays: what is simulated and drawn, thousands of stages and microbatches included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.laws import in_flight_bound, warm_up
from adapipe.schedule.orders import check_segment_shape, forward_comes_next

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

    def then(self, other: OrderTable) -> OrderTable:
        """This order, and after it the other one."""
        return OrderTable(np.hstack([self.kinds, other.kinds]), np.hstack([self.indices, other.indices]))


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

    in_flight: NDArray[np.int64]  # microbatches between their forward and their backward
    versions: NDArray[np.int64]  # live weight versions
    gradients: NDArray[np.bool_]  # there are some: they wait for their update, or it has just been made of them


def segment_table(
    stages: int, microbatches: int, updates: int, first_update: int = 0, in_flight: int = 1
) -> OrderTable:
    """`segment_orders` as a table, all stages one action at a time."""
    return walk_segment(stages, microbatches, updates, first_update, in_flight)


def walk_segment(
    stages: int,
    microbatches: int,
    updates: int,
    first_update: int,
    in_flight: int,
    visit: Callable[[Holding], None] | None = None,
) -> OrderTable:
    """`segment_table`, with `visit` called on what the stages hold after each action."""
    check_segment_shape(stages, microbatches, updates, first_update, in_flight)
    ahead = np.array([warm_up(stage, stages, in_flight) for stage in range(stages)])
    limit = np.array([in_flight_bound(w) for w in ahead])
    end, length = updates * microbatches, updates * (2 * microbatches + 1)
    kinds = np.empty((length, stages), np.int8)
    indices = np.empty((length, stages), np.int64)
    done = np.zeros((len(CODES), stages), np.int64)  # by kind: how many the stage has done
    forwards, backwards, made = (done[CODES[kind]] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE))
    every = np.arange(stages)
    for position in range(length):
        update = backwards == (made + 1) * microbatches
        forward = ~update & forward_comes_next(forwards, backwards, end, limit)
        kind = np.where(update, CODES[Kind.UPDATE], np.where(forward, CODES[Kind.FORWARD], CODES[Kind.BACKWARD]))
        kinds[position] = kind
        indices[position] = done[kind, every]
        done[kind, every] += 1
        if visit is not None:
            # Forward j ran after j - W backwards, so with the version after that many // K updates. Every version
            # since that of the oldest microbatch in flight is held by one.
            oldest = np.maximum(0, backwards - ahead) // microbatches
            live = np.where(forwards > backwards, made - oldest, 0) + 1
            visit(Holding(forwards - backwards, live, update | (backwards > made * microbatches)))
    indices += np.where(kinds == CODES[Kind.UPDATE], first_update, first_update * microbatches)
    return OrderTable(kinds.T, indices.T)
