"""Figures of the reference GPT by arithmetic: those of the real modules."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from adapipe.errors import ConfigurationError
from adapipe.models.costs import gpt_cost
from adapipe.models.gpt import gpt_blocks, language_model_loss
from adapipe.models.shape import GPTConfig, gpt_figures
from adapipe.models.stages import block_costs
from adapipe.schedule.cost import LinkCost

ROTARY = GPTConfig(layers=2, width=32, heads=4, vocabulary=50, sequence_length=16)
CONFIGS = [ROTARY, replace(ROTARY, positions="learned"), replace(ROTARY, heads=2, width=48, vocabulary=7)]


def test_planning_does_not_import_torch():
    """It takes seconds."""
    code = "import sys, adapipe.cli.plan, adapipe.cli.main, adapipe.reports.timeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_and_flops_are_those_of_the_modules(config: GPTConfig):
    blocks = gpt_blocks(config)
    figures = gpt_figures(config, 2, config.sequence_length, "fp32")
    assert [f.parameters for f in figures] == [sum(p.numel() for p in block.parameters()) for block in blocks]
    assert [f.flops for f in figures] == block_costs(blocks)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("length", [8, 16])
def test_saved_bytes_are_what_autograd_saves(config: GPTConfig, precision: str, length: int):
    tokens = torch.randint(config.vocabulary, (3, length), generator=torch.Generator().manual_seed(0))
    figures = gpt_figures(config, 3, length, precision)
    value = tokens
    for number, (block, expected) in enumerate(zip(gpt_blocks(config), figures, strict=True)):
        # A rotary table is kept as well, once for all microbatches; the first call makes it.
        own = {p.untyped_storage().data_ptr() for p in block.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = block(value)
            if number == len(figures) - 1:
                output = language_model_loss(output, tokens)
        found = sum(nbytes for pointer, nbytes in saved.items() if pointer not in own)
        table = 0
        if config.positions == "rotary" and 0 < number < len(figures) - 1:
            table = 4 * config.sequence_length * config.head_width
        scalar = 4 if number == len(figures) - 1 else 0  # the number of targets
        assert found - table - scalar == expected.saved_bytes
        value = output.detach().requires_grad_()


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigurationError, match="--precision fp16"):
        gpt_figures(ROTARY, 1, 8, "fp16")


def test_the_costs_of_a_cut_model():
    cost = gpt_cost(
        ROTARY,
        2,
        microbatch_size=3,
        sequence_length=16,
        precision="fp32",
        optimizer="sgd",
        flops_per_second=1e9,
        update=0.5,
        link=LinkCost(0.1, 1e6),
    )
    figures = gpt_figures(ROTARY, 3, 16, "fp32")
    first, last = cost.stages
    flops = figures[1].flops * 48
    assert first.forward == pytest.approx(flops / 1e9)
    assert last.forward == pytest.approx((flops + figures[3].flops * 48) / 1e9)
    assert (first.backward, first.update) == (2 * first.forward, 0.5)
    parameters = figures[0].parameters + figures[1].parameters
    assert (first.weight_bytes, first.optimizer_bytes) == (4 * parameters, 4 * parameters)
    assert cost.message_bytes == 4 * 48 * 32
    assert first.activation_bytes == figures[0].saved_bytes + figures[1].saved_bytes + cost.message_bytes
    assert last.activation_bytes == figures[2].saved_bytes + figures[3].saved_bytes
    assert (cost.tokens, cost.links) == (48, (LinkCost(0.1, 1e6),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": 5}, "5 stages need at least 5 blocks, but the model has 4"),
        ({"flops_per_second": 0.0}, "0 flops per second"),
        ({"flops_per_second": -1.0}, "-1 flops per second"),
        ({"flops_per_second": float("nan")}, "nan flops per second"),
        ({"optimizer": "adam"}, "--optimizer adam: unknown optimizer"),
        ({"microbatch_size": 0}, "--microbatch-size 0: give at least 1"),
        ({"update": -1.0}, "update = -1"),
    ],
)
def test_costs_that_cannot_be_are_refused(changes: dict[str, object], says: str):
    given = {
        "stages": 2,
        "microbatch_size": 1,
        "sequence_length": 16,
        "precision": "fp32",
        "optimizer": "adamw",
        "flops_per_second": 1e9,
    }
    with pytest.raises(ConfigurationError, match=says):
        gpt_cost(ROTARY, **(given | changes))  # type: ignore[arg-type]
