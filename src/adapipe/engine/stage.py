"""A stage: one slice of the model, its weight versions and its optimizer. Forward, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adapipe.engine.clipping import squared_norm
from adapipe.engine.split_backward import Recomputes, SplitBackward
from adapipe.engine.versions import Version, VersionStore
from adapipe.errors import AdaPipeError, EngineError

Loss = Callable[[torch.Tensor, Any], torch.Tensor]
"""(output of the last stage, targets) -> scalar: the sum of the loss over the tokens of the microbatch."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""The trainable parameters of one stage -> any torch.optim optimizer for them."""


class _Enter(torch.autograd.Function):
    """The received activation as a non-leaf without a copy, so that a stage may begin with an in-place operation."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@dataclass(slots=True)
class _InFlight:
    """A microbatch between its forward and the end of its backward."""

    received: torch.Tensor | None  # the leaf that collects the input's gradient; None on stage 0
    output: torch.Tensor  # the activation, or on the last stage the loss
    number: int  # version of the weights that its forward used
    version: Version | None  # None: the module's own weights
    rest: Callable[[], None] | None = None  # of a split backward whose first half has run: the second half


def _from_loss(entry: _InFlight, gradient: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The gradient that came, or on the last stage that of the loss."""
    return torch.full_like(entry.output, scale) if gradient is None else gradient


def _whole(output: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """A backward in one go."""
    return lambda: torch.autograd.backward(output, gradient) if output.requires_grad else None


def _input_gradient(received: torch.Tensor | None) -> torch.Tensor | None:
    """None on stage 0; zeros where the input was not used."""
    if received is None:
        return None
    return torch.zeros_like(received) if received.grad is None else received.grad


class Stage:
    """Stage `index` of `stages`: a module from one tensor to one tensor.

    loss: only on the last stage. optimizer: None for a stage without trainable parameters.
    autocast: None for float32, or torch.bfloat16.
    check_versions: verify at every backward that its weight version is unchanged (slow; for tests).
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerFactory,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
        check_versions: bool = False,
    ) -> None:
        if autocast is torch.float16:
            raise AdaPipeError(
                "float16 needs loss scaling, which does not survive stale gradients: use bfloat16 or float32"
            )
        self.module = module
        self.index = index
        self.stages = stages
        self.device = torch.device(device)
        self.versions = VersionStore(module, check=check_versions)
        self.optimizer = optimizer(self.versions.parameters) if self.versions.parameters else None
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self._loss = loss
        self._autocast = autocast
        self._in_flight: dict[int, _InFlight] = {}
        self._recomputes = False  # blocks recompute their activations: backwards are not split

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def in_flight(self) -> int:
        """Microbatches between their forward and the end of their backward."""
        return len(self._in_flight)

    @property
    def parked(self) -> list[int]:
        """Microbatches whose input gradient has been made, and whose weight gradients have not."""
        return [microbatch for microbatch, entry in self._in_flight.items() if entry.rest is not None]

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def forward(self, microbatch: int, inputs: torch.Tensor, targets: Any = None, *, versioned: bool) -> torch.Tensor:
        """Run the stage on `inputs`. Returns the activation for the next stage, or on the last stage the loss summed
        over tokens (scalar); both detached.

        versioned: keep the weights of this forward for its backward, even if an update comes in between.
        """
        if microbatch in self._in_flight:
            raise EngineError(f"microbatch {microbatch} is already in flight")
        received = None if self.first else inputs.detach().requires_grad_()
        entered = inputs if received is None else _Enter.apply(received)  # type: ignore[no-untyped-call]
        version = self.versions.acquire() if versioned else None
        with self._precision():
            if version is None:
                output = self.module(entered)
            else:
                output = torch.func.functional_call(self.module, version.leaves, (entered,), tie_weights=False)
            output = self._checked(output) if self._loss is None else self._summed(output, targets)
        self._in_flight[microbatch] = _InFlight(received, output, self.versions.number, version)
        return output.detach()

    def _checked(self, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise AdaPipeError(
                f"the stage returned {type(output).__name__}; between stages every block takes and returns one tensor"
            )
        return output

    def _summed(self, output: torch.Tensor, targets: Any) -> torch.Tensor:
        assert self._loss is not None
        loss = self._loss(output, targets)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise AdaPipeError(f"the loss must be a scalar tensor, summed over tokens; it is {what}")
        return loss

    def backward(self, microbatch: int, gradient: torch.Tensor | None, scale: float) -> tuple[torch.Tensor | None, int]:
        """Accumulate this microbatch's weight gradients.

        gradient: of the activation, from the next stage; None on the last stage, which starts from its loss times
        `scale` (one over the tokens of the whole update). Returns the gradient of the stage's input (None on stage 0;
        zeros where the input was not used) and the number of the weight version that the forward used.
        """
        entry = self._gone_forward(microbatch)
        self._accumulate(entry, _whole(entry.output, _from_loss(entry, gradient, scale)))
        self._finish(microbatch)
        return _input_gradient(entry.received), entry.number

    def backward_input(
        self, microbatch: int, gradient: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor | None, int]:
        """The first half of `backward`, with its arguments and results: it makes the gradient of the stage's input.
        `backward_weight` must follow, and `gradient` stay as it is until then.

        On stage 0, which needs no gradient of its input, it does nothing. On a stage whose blocks recompute their
        activations it does everything, and the second half nothing: see `adapipe.engine.split_backward`.
        """
        entry = self._gone_forward(microbatch)
        gradient = _from_loss(entry, gradient, scale)
        whole = _whole(entry.output, gradient)
        if entry.received is None:
            entry.rest = whole
            return None, entry.number
        entry.rest = lambda: None
        if entry.output.requires_grad and not self._recomputes:
            split = SplitBackward(entry.output, gradient, entry.received)
            try:
                entry.received.grad = split.input()
                entry.rest = split.weight
            except Recomputes:
                self._recomputes = True
        if self._recomputes:
            self._accumulate(entry, whole)
        return _input_gradient(entry.received), entry.number

    def backward_weight(self, microbatch: int) -> None:
        """The second half: accumulate this microbatch's weight gradients."""
        entry = self._in_flight.get(microbatch)
        if entry is None or entry.rest is None:
            raise EngineError(f"the input gradient of microbatch {microbatch} has not been made")
        self._accumulate(entry, entry.rest)
        self._finish(microbatch)

    def _gone_forward(self, microbatch: int) -> _InFlight:
        entry = self._in_flight.get(microbatch)
        if entry is None:
            raise EngineError(f"microbatch {microbatch} has not gone forward")
        if entry.rest is not None:
            raise EngineError(f"the input gradient of microbatch {microbatch} has been made before")
        return entry

    def _accumulate(self, entry: _InFlight, run: Callable[[], None]) -> None:
        """Run (a part of) a backward, whose gradients go to the parameters' buffers."""
        if entry.version is not None:
            self.versions.lend_gradients(entry.version)
        run()
        if entry.version is not None:
            self.versions.take_gradients(entry.version)

    def _finish(self, microbatch: int) -> None:
        entry = self._in_flight.pop(microbatch)
        if entry.version is not None:
            self.versions.release(entry.version)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group at the last update; NaN without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else math.nan

    def squared_norm(self) -> float:
        """Squared norm of the gradients accumulated so far."""
        return squared_norm(self.versions.gradients())

    def update(self, rate_factor: float, coefficient: float) -> None:
        """One optimizer step with every group's learning rate times `rate_factor`, gradients times `coefficient`.

        Raises EngineError while weight gradients are still to be made."""
        if self.parked:
            raise EngineError(f"an update while the weight gradients of microbatches {self.parked} are not made")
        if self.optimizer is None:
            self.versions.advance()
            return
        gradients = self.versions.gradients()
        if coefficient != 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)
        self._set_rates(rate_factor)
        self.versions.step(self.optimizer)

    def skip_update(self, rate_factor: float) -> None:
        """Count an update without making it: its gradients are dropped."""
        self._set_rates(rate_factor)
        self.versions.advance()

    def _set_rates(self, factor: float) -> None:
        if self.optimizer is not None:
            for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = rate * factor

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: Any = None) -> torch.Tensor:
        """As `forward`, with the current weights, in evaluation mode, and nothing kept."""
        with self._precision():
            output = self.module(inputs)
            return self._checked(output) if self._loss is None else self._summed(output, targets)
