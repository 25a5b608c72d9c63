"""The laws that every segment obeys (P stages, K microbatches per update, s = 0..P-1, n updates between flushes).

Checked by simulation in the checker, and at run time by the runtime.
"""

from __future__ import annotations


def staleness_bound(stage: int, stages: int, microbatches: int) -> int:
    """The most updates that a stage makes between reading the weights for F(i) and applying the gradient of i.

    ceil((P-1-s) / K). In steady state every microbatch has this staleness or one less, and the mean is (P-1-s)/K.
    In a segment of one update it is 0.
    """
    return -(-(stages - 1 - stage) // microbatches)


def mean_staleness(stage: int, stages: int, microbatches: int) -> float:
    """Mean staleness of stage s in steady state, in updates: (P-1-s)/K."""
    return (stages - 1 - stage) / microbatches


def version_bound(stage: int, stages: int, microbatches: int) -> int:
    """The most weight versions that a stage holds at once: 1 + ceil((P-1-s)/K)."""
    return 1 + staleness_bound(stage, stages, microbatches)


def in_flight_bound(stage: int, stages: int) -> int:
    """The most microbatches between their forward and their backward on a stage: P - s."""
    return stages - stage


def time_per_update(stages: int, microbatches: int, updates: int) -> float:
    """Time per update of equal stages, in units of one F+B of one stage: K + (P-1)/n."""
    return microbatches + (stages - 1) / updates
