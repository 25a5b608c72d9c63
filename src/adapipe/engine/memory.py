"""What a stage needs: the bytes of its live tensors, counted while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from adapipe.engine.stage import Stage
from adapipe.engine.transport.base import Vector
from adapipe.schedule.memory import StageMemory

Storages = dict[int, int]
"""Bytes by address. Storages, because tensors share them."""


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a stage was seen to need. peak: the moment of the largest total. weight_bytes and optimizer_bytes: at the
    end. activation_bytes: the most that one microbatch in flight kept."""

    peak: StageMemory
    weight_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    def numbers(self) -> Vector:
        """As they travel."""
        return np.array([*astuple(self.peak), self.weight_bytes, self.optimizer_bytes, self.activation_bytes], float)

    @classmethod
    def of(cls, numbers: Vector) -> MemoryUse:
        *peak, weights, optimizer, activations = (int(number) for number in numbers)
        return cls(StageMemory(*peak), weights, optimizer, activations)


class MeteredStage(Stage):
    """A stage that counts its live bytes after every forward, backward, optimizer step and update. Slow; it keeps no
    tensor alive."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept: dict[int, Storages] = {}  # by microbatch in flight: what its backward needs
        self._activation_bytes = 0
        self._peak = self._measure()
        if self.optimizer is not None:
            # When the weights have moved to make room for versions in flight, and the gradients are still there.
            self.optimizer.register_step_post_hook(lambda *_: self._note())

    @property
    def use(self) -> MemoryUse:
        """So far."""
        now = self._measure()
        return MemoryUse(self._peak, now.weights, now.optimizer, self._activation_bytes)

    def forward(self, microbatch: int, inputs: torch.Tensor, targets: Any = None, *, versioned: bool) -> torch.Tensor:
        saved: Storages = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.update(_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = super().forward(microbatch, inputs, targets, versioned=versioned)
        entry = self._in_flight[microbatch]
        saved.update(_storages(t for t in (entry.received, entry.output) if t is not None))
        for address in (*self._weights(), *self._versions()):
            saved.pop(address, None)
        self._kept[microbatch] = saved
        self._activation_bytes = max(self._activation_bytes, sum(saved.values()))
        self._note()
        return output

    def backward(self, microbatch: int, *arguments: Any) -> tuple[torch.Tensor | None, int]:
        result = super().backward(microbatch, *arguments)
        del self._kept[microbatch]
        self._note()
        return result

    def backward_input(self, microbatch: int, *arguments: Any) -> tuple[torch.Tensor | None, int]:
        result = super().backward_input(microbatch, *arguments)
        self._note()
        return result

    def backward_weight(self, microbatch: int) -> None:
        super().backward_weight(microbatch)
        del self._kept[microbatch]
        self._note()

    def update(self, rate_factor: float, coefficient: float) -> None:
        super().update(rate_factor, coefficient)
        self._note()

    def _weights(self) -> Storages:
        return _storages([*self.module.parameters(), *self.module.buffers()])

    def _versions(self) -> Storages:
        return _storages(leaf for version in self.versions.held for leaf in version.leaves.values())

    def _measure(self) -> StageMemory:
        weights = self._weights()
        versions = {address: size for address, size in self._versions().items() if address not in weights}
        activations = {address: size for kept in self._kept.values() for address, size in kept.items()}
        state = self.optimizer.state.values() if self.optimizer else ()
        optimizer = _storages(t for values in state for t in values.values() if isinstance(t, torch.Tensor))
        return StageMemory(
            weights=sum(weights.values()),
            versions=sum(versions.values()),
            gradients=sum(_storages(self.versions.gradients()).values()),
            optimizer=sum(optimizer.values()),
            activations=sum(activations.values()),
        )

    def _note(self) -> None:
        now = self._measure()
        if now.total > self._peak.total:
            self._peak = now
