"""Clipping by the global gradient norm: the arithmetic, shared by both modes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Squared 2-norm of all gradients together; not finite if any entry is not."""
    if not gradients:
        return 0.0
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2


def clip_coefficient(squared_global_norm: float, limit: float | None) -> float:
    """What to multiply gradients with so that their global norm is at most `limit` (None: no clipping)."""
    if limit is None:
        return 1.0
    return min(1.0, limit / (math.sqrt(squared_global_norm) + 1e-6))
