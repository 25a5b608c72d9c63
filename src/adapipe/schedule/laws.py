"""The laws that every segment obeys (P stages, K microbatches per update, s = 0..P-1, n updates between flushes).

A stage runs W forwards ahead of its backwards, its warm-up, so it holds at most 1 + W microbatches in flight. One
parameter sets it: with h microbatches in flight per hop between a stage and the last one, W = h * (P-1-s). h = 1 is
1F1B, the least that keeps equal stages busy when messages take no time. A hop that takes L each way is hidden by
h = ceil(1 + 2L / (F+B)).

Checked by simulation in the checker, and at run time by the runtime.
"""

from __future__ import annotations


def warm_up(stage: int, stages: int, in_flight: int = 1) -> int:
    """W, the forwards that stage s runs ahead: h * (P-1-s) with h = `in_flight` per hop."""
    return in_flight * (stages - 1 - stage)


def in_flight_bound(warm_up: int) -> int:
    """The most microbatches between their forward and their backward on a stage: 1 + W."""
    return 1 + warm_up


def staleness_bound(warm_up: int, microbatches: int) -> int:
    """The most updates that a stage makes between reading the weights for F(i) and applying the gradient of i.

    ceil(W/K). In steady state every microbatch has this staleness or one less, and the mean is W/K.
    In a segment of one update it is 0.
    """
    return -(-warm_up // microbatches)


def mean_staleness(warm_up: int, microbatches: int) -> float:
    """Mean staleness of a stage in steady state, in updates: W/K."""
    return warm_up / microbatches


def version_bound(warm_up: int, microbatches: int) -> int:
    """The most weight versions that a stage holds at once: 1 + ceil(W/K)."""
    return 1 + staleness_bound(warm_up, microbatches)


def receives_ahead(in_flight: int) -> int:
    """Receives that a stage keeps posted on an edge before it needs them: as many as can be on their way."""
    return in_flight


def activation_slots(warm_up: int, in_flight: int) -> int:
    """Slots of the receiving ring of a stage for activations. One holds its slot from the posted receive to its
    backward."""
    return in_flight_bound(warm_up) + receives_ahead(in_flight)


def gradient_slots(in_flight: int) -> int:
    """Slots of the receiving ring for gradients: one that is being used, and those posted ahead."""
    return 1 + receives_ahead(in_flight)


def send_slots(in_flight: int) -> int:
    """Messages on their way per directed edge. The next send waits until the first of them has left."""
    return 1 + receives_ahead(in_flight)


def time_per_update(stages: int, microbatches: int, updates: float) -> float:
    """Time per update of equal stages without communication, in units of one F+B of one stage: K + (P-1)/n."""
    return microbatches + (stages - 1) / updates
