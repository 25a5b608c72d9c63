from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adapipe.errors import ConfigurationError
from adapipe.models.gpt import Attention, Block, fill_gpt_weight, gpt_blocks, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig
from adapipe.models.stages import block_costs, stage_module

CONFIG = GPTConfig(layers=3, width=16, heads=2, vocabulary=31, sequence_length=12)
LEARNED = replace(CONFIG, positions="learned")


def build(config: GPTConfig = CONFIG, seed: int = 0) -> nn.Sequential:
    blocks = gpt_blocks(config)
    model = stage_module(blocks, range(len(blocks)))
    initialise_by_name(model, seed, fill_gpt_weight(config))
    return model


def sharpen(model: nn.Module) -> nn.Module:
    """Larger weights, so that attention is far from uniform and every effect is far above rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


def some_tokens(config: GPTConfig = CONFIG, batch: int = 2, length: int | None = None) -> Tensor:
    shape = (batch, length or config.sequence_length)
    return torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_each_block_takes_one_tensor_and_gives_one(config: GPTConfig, length: int) -> None:
    embedding, *layers, head = build(config)
    x = embedding(some_tokens(length=length))
    assert len(layers) == 3
    for layer in layers:
        assert x.shape == (2, length, 16)
        x = layer(x)
    assert head(x).shape == (2, length, 31)


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_a_later_token_never_changes_earlier_logits(config: GPTConfig) -> None:
    model = sharpen(build(config))
    tokens = some_tokens()
    logits = model(tokens)
    for position in range(config.sequence_length):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocabulary
        difference = (model(changed) - logits).abs().amax(dim=(0, 2))
        assert (difference[:position] == 0).all()
        assert difference[position:].min() > 1e-4  # and the model does look back


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_the_order_of_earlier_tokens_matters(config: GPTConfig) -> None:
    """Without positions, one layer of attention at the last token sees a set, not a sequence."""
    one_layer = replace(config, layers=1)
    model = sharpen(build(one_layer))
    tokens = torch.arange(12)[None]
    swapped = tokens.clone()
    swapped[:, [2, 7]] = tokens[:, [7, 2]]
    assert (model(swapped) - model(tokens))[:, -1].abs().max() > 1e-3


def test_rotary_scores_depend_on_the_distance_only() -> None:
    """The same tokens further along the sequence attend to each other as before: the logits do not change."""
    attention = Attention(CONFIG)
    x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    q = torch.zeros(1, 2, 1, 8)
    cos, sin = attention._rotary_table(q)
    assert cos.shape == sin.shape == (12, 4)
    attention._rotary = (cos.roll(-5, 0), sin.roll(-5, 0))  # position 0 is now position 5
    moved = attention(x)
    attention._rotary = (cos, sin)
    torch.testing.assert_close(moved, attention(x))
    attention._rotary = (torch.ones_like(cos), torch.zeros_like(sin))  # no positions at all
    assert (attention(x) - moved).abs().max() > 1e-4


def test_rotary_table_holds_the_published_angles() -> None:
    cos, sin = Attention(CONFIG)._rotary_table(torch.zeros(1, dtype=torch.float64))
    angles = [[position * 10_000 ** (-2 * i / 8) for i in range(4)] for position in range(12)]
    expected = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(cos, expected.cos())
    torch.testing.assert_close(sin, expected.sin())


def test_the_rotary_table_is_no_state() -> None:
    model = build()
    before = set(model.state_dict())
    model(some_tokens())
    assert set(model.state_dict()) == before == {name for name, _ in model.named_parameters()}
    assert list(model.buffers()) == []


def test_training_works_after_an_evaluation_in_inference_mode() -> None:
    model = build()
    with torch.inference_mode():
        model(some_tokens())
    language_model_loss(model(some_tokens()), some_tokens()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_model_follows_its_weights_to_another_dtype() -> None:
    model = build()
    single = model(some_tokens())
    double = model.double()(some_tokens())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single)


def test_the_weights_can_come_from_outside() -> None:
    """The engine runs a stage through functional_call with the leaves of a version."""
    model, other = build(seed=0), build(seed=1)
    called = torch.func.functional_call(model, dict(other.named_parameters()), (some_tokens(),))
    torch.testing.assert_close(called, other(some_tokens()), rtol=0, atol=0)


def test_residual_stream_is_float32_under_autocast() -> None:
    model = build()
    branch_dtypes = set()
    for layer in model:
        if isinstance(layer, Block):
            layer.mlp.register_forward_hook(lambda module, args, out: branch_dtypes.add(out.dtype))
    x = some_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in model[:-1]:
            x = layer(x)
            assert x.dtype == torch.float32
        loss = language_model_loss(model[-1](x), some_tokens())
    assert branch_dtypes == {torch.bfloat16}  # autocast did reach the branches
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_loss_is_a_sum_over_tokens() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])
    loss = language_model_loss(logits, targets)
    by_hand = -sum(F.log_softmax(logits[b, t], dim=-1)[targets[b, t]] for b in range(2) for t in range(5))
    assert loss.shape == ()
    torch.testing.assert_close(loss, by_hand)
    parts = language_model_loss(logits[:1], targets[:1]) + language_model_loss(logits[1:], targets[1:])
    torch.testing.assert_close(loss, parts)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_computed_in_float32_or_wider(dtype: torch.dtype, wide: torch.dtype) -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    loss = language_model_loss(logits, targets)
    assert loss.dtype == wide
    torch.testing.assert_close(loss, language_model_loss(logits.to(wide), targets), rtol=0, atol=0)


def test_the_initial_loss_is_that_of_a_uniform_guess() -> None:
    tokens = some_tokens(batch=16)
    loss = language_model_loss(build()(tokens), tokens) / tokens.numel()
    assert loss.item() == pytest.approx(torch.tensor(31.0).log().item(), abs=0.05)


def test_the_model_learns() -> None:
    model = build()
    tokens = some_tokens(batch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = language_model_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_in_a_row_equal_the_whole(config: GPTConfig, stages: int) -> None:
    whole = build(config)
    tokens = some_tokens()
    loss = language_model_loss(whole(tokens), tokens)
    loss.backward()

    blocks = gpt_blocks(config)
    parts = [stage_module(blocks, part) for part in partition(block_costs(blocks), stages)]
    x = tokens
    for part in parts:
        initialise_by_name(part, 0, fill_gpt_weight(config))
        x = part(x)
    staged = language_model_loss(x, tokens)
    staged.backward()

    assert torch.equal(staged, loss)
    gradients = {name: p.grad for part in parts for name, p in part.named_parameters()}
    assert gradients.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_a_build_on_the_meta_device_is_complete_after_initialisation(config: GPTConfig) -> None:
    with torch.device("meta"):
        blocks = gpt_blocks(config)
    model = stage_module(blocks, range(len(blocks))).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # nothing may survive from the empty storage
    initialise_by_name(model, 0, fill_gpt_weight(config))
    normal = build(config)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), normal.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(model(some_tokens()), normal(some_tokens()))


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_cost_is_the_count_of_torch_for_a_sequence_of_full_length(config: GPTConfig) -> None:
    model = build(config)
    x = some_tokens(config, batch=1)
    for block, cost in zip(model, block_costs(list(model)), strict=True):
        # The fused attention of the CPU is unknown to the counter; the plain one consists of matmuls.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            x = block(x)
        assert counter.get_total_flops() == cost * config.sequence_length


def test_a_used_model_can_be_copied() -> None:
    model = build()
    model(some_tokens())
    assert torch.equal(copy.deepcopy(model)(some_tokens()), model(some_tokens()))


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rotary", "learned"])
def test_too_long_an_input_is_refused_by_every_stage_that_cares(config: GPTConfig) -> None:
    embedding, layer, *_ = gpt_blocks(config)
    message = "the input has 13 tokens per sequence, but the model takes at most 12: shorten the input"
    with pytest.raises(ValueError, match=message):
        embedding(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, 13, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "--heads 3 does not divide --width 16: choose a divisor"),
        ({"layers": 0}, "--layers 0 must be at least 1"),
        ({"width": -4}, "--width -4 must be at least 1"),
        ({"heads": 0}, "--heads 0 must be at least 1"),
        ({"vocabulary": 0}, "--vocabulary 0 must be at least 1"),
        ({"sequence_length": 0}, "--sequence-length 0 must be at least 1"),
        ({"positions": "sinus"}, "--positions sinus is unknown: choose rotary or learned"),
        (
            {"heads": 16},
            "--positions rotary needs an even width per head, but --width 16 / --heads 16 is 1: "
            "change one of them, or use --positions learned",
        ),
    ],
)
def test_a_shape_that_cannot_work_is_refused(change: dict[str, object], message: str) -> None:
    config = replace(CONFIG, **change)
    with pytest.raises(ConfigurationError) as error:
        config.validate()
    assert str(error.value) == message
    with pytest.raises(ConfigurationError):
        gpt_blocks(config)


def test_learned_positions_allow_an_odd_width_per_head() -> None:
    config = replace(LEARNED, width=15, heads=5)
    assert build(config)(some_tokens()).shape == (2, 12, 31)
