"""Time as the engine sees it. The runtime asks a clock and nothing else, so that time can also be modelled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from adapipe.schedule import Kind
from adapipe.schedule.cost import StageCost


class Clock(Protocol):
    """The time of one stage: seconds since an arbitrary start. Never goes backwards.

    The runtime says what it does (`spend`), the transport when a message arrives (`wait_until`). Real time passes by
    itself; modelled time passes only there.
    """

    name: str

    def now(self) -> float: ...

    def spend(self, kind: Kind) -> None:
        """An action of this kind has just been computed."""

    def wait_until(self, instant: float) -> None:
        """Nothing happens on this stage before `instant`, a time of the same clock as the other stages'."""


class WallClock:
    """Real time."""

    name = "wall"

    def now(self) -> float:
        return time.perf_counter()

    def spend(self, kind: Kind) -> None:
        pass

    def wait_until(self, instant: float) -> None:
        pass


class VirtualClock:
    """The time of a device that does not exist: an action lasts what the cost model says.

    factors: multiplies the seconds of one action after the other (jitter).
    """

    name = "virtual"

    def __init__(self, cost: StageCost, factors: Iterator[float]) -> None:
        self._seconds = {kind: cost.seconds(kind) for kind in Kind}
        self._factors = factors
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def spend(self, kind: Kind) -> None:
        self._now += self._seconds[kind] * next(self._factors)

    def wait_until(self, instant: float) -> None:
        self._now = max(self._now, instant)
