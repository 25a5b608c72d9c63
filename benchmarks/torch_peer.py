"""torch's own schedules on the stages of AdaPipe: an oracle for tests, and the peer to be as fast as."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from adapipe.engine.stage import Loss
from adapipe.engine.work import Batches

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zb-h1": ScheduleInterleavedZeroBubble}
"""By the names that they have here."""


def allows(name: str, stages: int, microbatches: int) -> bool:
    """Does torch run this schedule in that shape? 1F1B wants K >= P, zero bubble whole rounds of P microbatches."""
    if name == "1f1b":
        return microbatches >= stages
    return name != "zb-h1" or microbatches % max(1, microbatches // stages) == 0


class TorchPipeline:
    """The stage of this rank in a pipeline that torch runs.

    batches and loss as AdaPipe takes them; microbatches of an update are of equal shape, for torch cuts them from one
    tensor. tokens: of an update; gradients are those of the sum of losses over it. optimizer: None to keep gradients.
    clip: limit of the global norm, for which the squares of the stages' norms are all-reduced.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        rank: int,
        stages: int,
        microbatches: int,
        batches: Batches,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss,
        tokens: int,
        clip: float | None = None,
    ) -> None:
        self._first, self._last = rank == 0, rank == stages - 1
        self._microbatches = microbatches
        self._batches = batches
        self._optimizer = optimizer
        self._parameters = list(module.parameters())
        self._clip = clip
        stage = PipelineStage(module, rank, stages, torch.device("cpu"))
        self._schedule = SCHEDULES[name](
            [stage] if name == "zb-h1" else stage,
            microbatches,
            loss_fn=lambda output, targets: loss(output, targets) / tokens,
            scale_grads=False,
        )
        self._done = 0

    def update(self) -> float | None:
        """One update; its mean loss per token on the last rank, None on others."""
        first = self._done * self._microbatches
        data = [self._batches(i) for i in range(first, first + self._microbatches)]
        self._done += 1
        inputs = [torch.cat([inputs for inputs, _ in data])] if self._first else []
        losses: list[torch.Tensor] = []
        if self._last:
            self._schedule.step(*inputs, target=torch.cat([targets for _, targets in data]), losses=losses)
        else:
            self._schedule.step(*inputs)
        if self._clip is not None:
            squared = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]) ** 2
            dist.all_reduce(squared)
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, squared.sqrt())
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return sum(loss.item() for loss in losses) if self._last else None
