"""What blocks cost, and the modules that hold some of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adapipe.errors import ConfigurationError
from adapipe.models.gpt import gpt_blocks
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig
from adapipe.models.stages import block_costs, stage_module


def test_the_costs_of_the_reference_model_are_its_own() -> None:
    config = GPTConfig(layers=2, width=8, heads=2, vocabulary=10, sequence_length=16)
    layer = 24 * 8 * 8 + 4 * 16 * 8
    assert block_costs(gpt_blocks(config)) == [0, layer, layer, 2 * 8 * 10]


def test_other_modules_are_counted_without_their_embeddings() -> None:
    tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    tied[0].weight = tied[1].weight
    twice = nn.ModuleList([nn.Linear(2, 3)] * 2)
    blocks = [nn.Embedding(10, 4), nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 5)), nn.ReLU(), tied, twice]
    assert block_costs(blocks) == [1, 2 * 25 + 1, 1, 2 * 40 + 1, 2 * 9 + 1]


def test_a_submodule_called_cost_is_not_a_cost() -> None:
    block = nn.Module()
    block.cost = nn.Linear(2, 3)
    assert block_costs([block]) == [2 * 9 + 1]


def test_a_stage_names_its_blocks_by_their_place_in_the_model() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(6)]
    stage = stage_module(blocks, range(3, 5))
    assert [name for name, _ in stage.named_children()] == ["3", "4"]
    assert list(stage) == blocks[3:5]
    assert list(stage.state_dict()) == ["3.weight", "3.bias", "4.weight", "4.bias"]


class Trace(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.tensor([self.index])])


@given(blocks=st.integers(1, 12), data=st.data())
def test_the_stages_run_each_block_once_and_in_order(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    modules = [Trace(index) for index in range(blocks)]
    x = torch.empty(0, dtype=torch.int64)
    for part in partition(block_costs(modules), stages):
        x = stage_module(modules, part)(x)
    assert x.tolist() == list(range(blocks))


@pytest.mark.parametrize("part", [range(0, 3), range(-1, 1), range(1, 1), range(1, 0, -1)], ids=str)
def test_a_stage_outside_the_model_is_refused(part: range) -> None:
    with pytest.raises(ConfigurationError, match="is not a slice of a model of 2 blocks"):
        stage_module([nn.ReLU(), nn.ReLU()], part)
