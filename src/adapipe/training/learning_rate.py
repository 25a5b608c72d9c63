"""The learning-rate schedule: one function of the share of the budget used, the same in every mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from adapipe.errors import ConfigurationError

Decay = Literal["cosine", "linear", "constant"]

FLOOR = 0.1
"""What a decay ends at, as a share of the peak learning rate."""

Schedule = Callable[[float], float]
"""Share of the budget used, 0..1 -> what to multiply the peak learning rate with."""


def learning_rate_schedule(warmup: float, decay: str) -> Schedule:
    """Linear warm-up over the first `warmup` of the budget, then `decay` from 1 to FLOOR at the end of the budget."""
    if not 0.0 <= warmup < 1.0:
        raise ConfigurationError(f"--warmup {warmup:g} is not a share of the budget: give 0 or more and less than 1")
    shapes: dict[str, Schedule] = {
        "cosine": lambda x: FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * x)),
        "linear": lambda x: 1 - (1 - FLOOR) * x,
        "constant": lambda x: 1.0,
    }
    if decay not in shapes:
        raise ConfigurationError(f"--decay {decay}: unknown decay, choose one of {', '.join(shapes)}")
    shape = shapes[decay]

    def factor(fraction: float) -> float:
        if fraction < warmup:
            return fraction / warmup
        return shape((fraction - warmup) / (1.0 - warmup))

    return factor
