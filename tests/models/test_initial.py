from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from adapipe.models.gpt import fill_gpt_weight, gpt_blocks
from adapipe.models.initial import initialise_by_name, name_seed
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig
from adapipe.models.stages import block_costs, stage_module

CONFIG = GPTConfig(layers=4, width=64, heads=4, sequence_length=16, positions="learned")


def weights(stages: int, seed: int = 0, config: GPTConfig = CONFIG) -> dict[str, Tensor]:
    """All weights of a fresh model that is cut into stages, each stage initialised alone, the last one first."""
    found: dict[str, Tensor] = {}
    blocks = gpt_blocks(config)
    for part in reversed(partition(block_costs(blocks), stages)):
        stage = stage_module(blocks, part)
        initialise_by_name(stage, seed, fill_gpt_weight(config))
        found.update(stage.state_dict())
    return found


def normal(name: str, weight: Tensor, generator: Generator) -> None:
    weight.normal_(generator=generator)


@pytest.mark.parametrize("stages", range(1, 5))
def test_every_cut_starts_from_the_same_weights(stages: int) -> None:
    torch.manual_seed(stages)  # torch's global state has no say
    whole, cut = weights(1), weights(stages)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_another_seed_gives_other_weights() -> None:
    first, second = weights(2, seed=0), weights(2, seed=1)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {name for name in first if name.endswith("norm.weight")}


def test_no_two_parameters_are_alike() -> None:
    """One stream for all names would give blocks of one shape the same weights."""
    found = weights(1)
    assert not torch.equal(found["1.attention.qkv.weight"], found["2.attention.qkv.weight"])
    assert not torch.equal(found["1.attention.output.weight"], found["1.mlp.output.weight"][:, :64])


def test_the_spread_of_each_kind_of_weight() -> None:
    residual = 0.02 / math.sqrt(2 * CONFIG.layers)
    for name, weight in weights(1).items():
        if name.endswith("norm.weight"):
            assert (weight == 1).all(), name
            continue
        expected = residual if name.endswith(("attention.output.weight", "mlp.output.weight")) else 0.02
        slack = 5 * expected / math.sqrt(2 * weight.numel())  # five standard errors of a standard deviation
        assert weight.std().item() == pytest.approx(expected, abs=slack), name
        assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel()), name


def test_names_are_those_of_the_whole_model() -> None:
    assert {name for name in weights(3) if name.startswith(("0.", "2.", "5."))} == {
        "0.tokens.weight",
        "0.positions.weight",
        "2.attention_norm.weight",
        "2.attention.qkv.weight",
        "2.attention.output.weight",
        "2.mlp_norm.weight",
        "2.mlp.expand.weight",
        "2.mlp.output.weight",
        "5.norm.weight",
        "5.logits.weight",
    }


def test_the_same_values_for_every_dtype() -> None:
    single, half = nn.Linear(40, 30), nn.Linear(40, 30).bfloat16()
    initialise_by_name(single, 3, normal)
    initialise_by_name(half, 3, normal)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(single.weight.bfloat16(), half.weight)


def test_the_same_values_for_every_memory_layout() -> None:
    plain, transposed = nn.Linear(40, 30), nn.Linear(40, 30)
    transposed.weight = nn.Parameter(torch.empty(40, 30).t())
    initialise_by_name(plain, 3, normal)
    initialise_by_name(transposed, 3, normal)
    assert torch.equal(plain.weight, transposed.weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_values_on_every_device() -> None:
    here, there = nn.Linear(40, 30), nn.Linear(40, 30, device="cuda")
    initialise_by_name(here, 3, normal)
    initialise_by_name(there, 3, normal)
    assert torch.equal(here.weight, there.weight.cpu())


def test_the_fill_sees_name_and_shape_and_leaves_a_trainable_parameter() -> None:
    seen = []

    def fill(name: str, weight: Tensor, generator: Generator) -> None:
        assert weight.dtype == torch.float32
        assert generator.initial_seed() == name_seed(7, name)
        seen.append((name, tuple(weight.shape)))
        weight.zero_()

    linear = nn.Linear(3, 2)
    parameter = linear.weight
    initialise_by_name(linear, 7, fill)
    assert seen == [("weight", (2, 3)), ("bias", (2,))]
    assert linear.weight is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_name_seeds_are_stable_and_63_bits() -> None:
    # The first 8 bytes of `printf 0/weight | sha256sum`, without the last bit.
    assert name_seed(0, "weight") == 0x3F9E49316F8672F7 >> 1
    assert all(0 <= name_seed(seed, "a") < 2**63 for seed in range(1000))


def test_a_meta_parameter_is_refused() -> None:
    with torch.device("meta"):
        linear = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter weight is on the meta device: call to_empty\(device=...\) first"):
        initialise_by_name(linear, 0, normal)
