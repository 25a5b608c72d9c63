"""Buffers: how many messages a stage has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapipe.schedule import laws


@dataclass(frozen=True, slots=True)
class Buffers:
    """activations, gradients: slots of the receiving rings; a message holds its slot from the posted receive until its
    microbatch is complete. sends: messages on their way per directed edge. ahead: receives posted before they are
    needed."""

    activations: int
    gradients: int
    sends: int
    ahead: int


def segment_buffers(stages: int, in_flight: int = 1) -> list[Buffers]:
    """What 1F1B needs, in both modes, by stage."""
    return [
        Buffers(
            activations=laws.activation_slots(laws.warm_up(stage, stages, in_flight), in_flight),
            gradients=laws.gradient_slots(in_flight),
            sends=laws.send_slots(in_flight),
            ahead=laws.receives_ahead(in_flight),
        )
        for stage in range(stages)
    ]


def update_buffers(peak_in_flight: int, peak_parked: int, microbatches: int, in_flight: int = 1) -> Buffers:
    """What a synchronous update of K = `microbatches` needs on a stage that has so many microbatches in flight and, of
    these, parked between the halves of their backward."""
    ahead = laws.receives_ahead(in_flight)
    return Buffers(
        activations=min(microbatches, peak_in_flight + ahead),
        gradients=min(microbatches, peak_parked + laws.gradient_slots(in_flight)),
        sends=laws.send_slots(in_flight),
        ahead=ahead,
    )


def enough_for(*needs: Sequence[Buffers]) -> list[Buffers]:
    """The most of each, by stage."""
    return [
        Buffers(
            activations=max(b.activations for b in of_stage),
            gradients=max(b.gradients for b in of_stage),
            sends=max(b.sends for b in of_stage),
            ahead=max(b.ahead for b in of_stage),
        )
        for of_stage in zip(*needs, strict=True)
    ]
