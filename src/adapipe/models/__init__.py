"""Models as lists of blocks: the reference GPT, initial weights by name, and the cut into stages."""

from adapipe.models.gpt import GPTConfig, fill_gpt_weight, gpt_blocks, language_model_loss
from adapipe.models.initial import Fill, initialise_by_name
from adapipe.models.partition import block_costs, check_partition, partition, stage_module

__all__ = [
    "Fill",
    "GPTConfig",
    "block_costs",
    "check_partition",
    "fill_gpt_weight",
    "gpt_blocks",
    "initialise_by_name",
    "language_model_loss",
    "partition",
    "stage_module",
]
