"""Initial weights from the seed and a parameter's name alone, so that every cut of a model starts equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

Fill = Callable[[str, Tensor, Generator], None]
"""Fills a float32 CPU tensor in place, given the parameter's name and its own generator."""


def initialise_by_name(module: nn.Module, seed: int, fill: Fill) -> None:
    """Fill every parameter of `module` through `fill(full_name, tensor, generator)`.

    The names must be those of the whole model, as `stage_module` gives them. Each parameter has a CPU
    generator of its own, seeded by (seed, name), and is filled in float32 on the CPU before it is copied:
    neither the cut, the order, the device nor the dtype changes the values (the dtype only rounds them).
    Raises ValueError for a parameter on the meta device.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"parameter {name} is on the meta device: call to_empty(device=...) first")
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            fill(name, values, Generator(device="cpu").manual_seed(name_seed(seed, name)))
            parameter.copy_(values)


def name_seed(seed: int, name: str) -> int:
    """63 bits of sha256 of "seed/name"."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
