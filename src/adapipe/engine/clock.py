"""Time as the engine sees it. The runtime asks a clock and nothing else, so that time can also be modelled."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes backwards."""

    name: str

    def now(self) -> float: ...


class WallClock:
    """Real time."""

    name = "wall"

    def now(self) -> float:
        return time.perf_counter()
