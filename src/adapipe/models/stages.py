"""The stages of a model: what its blocks cost, and the module that holds some of them.

stage_module(blocks, range(3, 6)) has the children "3", "4", "5"
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from adapipe.errors import ConfigurationError


def block_costs(blocks: Sequence[nn.Module]) -> list[float]:
    """The cost of each block in forward flops per token: its own `cost()`, or else a count of its parameters.

    Counted is 2 flops per parameter outside nn.Embedding, and 1, so that no block is free.
    """
    return [_block_cost(block) for block in blocks]


def _block_cost(block: nn.Module) -> float:
    own = getattr(block, "cost", None)
    if callable(own) and not isinstance(own, nn.Module):  # a submodule may be called cost
        return float(own())
    parameters = {
        parameter
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return 2.0 * sum(parameter.numel() for parameter in parameters) + 1.0


def stage_module(blocks: Sequence[nn.Module], part: range) -> nn.Sequential:
    """The blocks of one stage, in order, each named by its index in the whole model.

    So a parameter is called "3.attention.qkv.weight" in every cut. Raises ConfigurationError if `part` is
    empty or leaves the model.
    """
    if not part or part.step != 1 or part.start < 0 or part.stop > len(blocks):
        raise ConfigurationError(f"a stage of the blocks {part} is not a slice of a model of {len(blocks)} blocks")
    return nn.Sequential(OrderedDict((str(index), blocks[index]) for index in part))
