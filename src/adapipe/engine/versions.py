"""Weight versions: which weights a microbatch in flight was computed with, and who may change them.

A version is a set of leaf tensors for `torch.func.functional_call`. Leaves alias the parameters' storage but not their
version counter, so an optimizer step would silently change a version in flight. Hence the rule that this module exists
for: **only the store steps the optimizer**, and when a microbatch in flight holds the current weights, the parameters
move to fresh storage first (copy on write). If none does, as always in synchronous segments, the step is in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from adapipe.errors import EngineError


@dataclass(slots=True, eq=False)
class Version:
    """The weights after `number` updates, as leaves by parameter name. Microbatches in flight hold it."""

    number: int
    leaves: dict[str, torch.Tensor]
    holders: int = 0
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)  # copies, only when checking


class VersionStore:
    """Owns the trainable parameters of one stage.

    check: keep a copy of every version in flight and verify at its backward that nobody wrote to it (slow; for tests).
    """

    def __init__(self, module: nn.Module, *, check: bool = False) -> None:
        # A parameter of two modules gets one leaf under both names, or functional_call would split it. A module in two
        # places gets one name: under two, functional_call would leave the leaf in it, and the parameter in the version.
        self._named = {
            f"{place}.{name}" if place else name: parameter
            for place, part in module.named_modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        }
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(self._named.values()))
        self.number = 0
        self._check = check
        self._current: Version | None = None
        self._held: list[Version] = []

    @property
    def held(self) -> tuple[Version, ...]:
        """The versions that microbatches in flight hold."""
        return tuple(self._held)

    @property
    def live(self) -> int:
        """Sets of weights in memory: the current one and those that microbatches in flight hold."""
        return len(self._held) + (0 if self._current in self._held else 1)

    def acquire(self) -> Version:
        """The current weights, for a forward whose backward may come after the next update."""
        if self._current is None:
            leaf = {p: p.data.requires_grad_() for p in self.parameters}
            self._current = Version(self.number, {name: leaf[p] for name, p in self._named.items()})
            if self._check:
                self._current.snapshot = {n: t.detach().clone() for n, t in self._current.leaves.items()}
        version = self._current
        if version.holders == 0:
            self._held.append(version)
        version.holders += 1
        return version

    def release(self, version: Version) -> None:
        """A microbatch that held this version has gone backward. The last one frees it."""
        for name, copy in version.snapshot.items():
            if not torch.equal(copy, version.leaves[name]):
                raise EngineError(f"version {version.number} of {name} was changed while a microbatch held it")
        version.holders -= 1
        if version.holders == 0:
            self._held.remove(version)

    def lend_gradients(self, version: Version) -> None:
        """Before a backward: let the version's leaves accumulate into the one gradient buffer per parameter."""
        for name, parameter in self._named.items():
            version.leaves[name].grad = parameter.grad

    def take_gradients(self, version: Version) -> None:
        """After a backward: the buffers belong to the parameters again."""
        for name, parameter in self._named.items():
            leaf = version.leaves[name]
            if leaf.grad is not None:
                parameter.grad = leaf.grad
                leaf.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """The accumulated gradients of the parameters that have one."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the next version: the only place that writes parameters."""
        if self._current is not None and self._current.holders > 0:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        optimizer.step()
        self._current = None
        self.advance()

    def advance(self) -> None:
        """Count an update and drop its gradients. Called by `step`; alone, it is an update that was skipped, after
        which the weights are still those of the current version, and still shared with it."""
        for parameter in self.parameters:
            parameter.grad = None
        self.number += 1
