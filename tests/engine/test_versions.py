"""Weight versions: a microbatch in flight over an update gets the gradient of the weights that it saw, exactly."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adapipe.engine.stage import Stage
from adapipe.errors import EngineError

WIDTH, LENGTH, BATCH = 8, 6, 4


class Scale(nn.Module):
    """x * w: its backward reads the weight for the input and the input for the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Product(nn.Module):
    """x @ w, which autograd treats differently from Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Convolution(nn.Module):
    """Conv1d over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, whose fast path goes through its parameters by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CausalAttention(nn.Module):
    """A block as GPTs have it: norm, fused projection, scaled_dot_product_attention, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class SharedTwice(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def used_twice() -> nn.Module:
    """One module in three places, at two depths."""
    shared = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared, nn.LayerNorm(WIDTH)), shared)


class PartlyFrozen(nn.Module):
    """A frozen Linear between trainable ones, as under an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "Embedding": lambda: nn.Embedding(11, WIDTH),
    "Conv1d": Convolution,
    "x*w": Scale,
    "x@w": Product,
    "MultiheadAttention": SelfAttention,
    "attention block": CausalAttention,
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "deep": lambda: nn.Sequential(*(CausalAttention() for _ in range(3)), nn.LayerNorm(WIDTH), Scale(), Product()),
    "shared under two names": SharedTwice,
    "module used twice": used_twice,
    "partly frozen": PartlyFrozen,
    "in-place ReLU first": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def middle(module: nn.Module, **options: Any) -> Stage:
    """A stage with neighbours on both sides; it is the second of four, so that three microbatches can be in flight."""
    return Stage(module, 1, 4, optimizer=options.pop("optimizer", adamw), **options)


def build(name: str) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor], int]:
    """The module, inputs and output gradients of five microbatches, and the index of its stage."""
    torch.manual_seed(3)
    module = OPERATIONS[name]()
    index = 0 if name == "Embedding" else 1  # tokens enter on the first stage
    if index == 0:
        inputs = [torch.randint(11, (BATCH, LENGTH)) for _ in range(5)]
    else:
        inputs = [torch.randn(BATCH, LENGTH, WIDTH) for _ in range(5)]
    return module, inputs, [torch.randn(BATCH, LENGTH, WIDTH) for _ in range(5)], index


def fresh(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[Any, list[torch.Tensor | None]]:
    """(input gradient, weight gradients) of a new copy of the module, as it is now."""
    module = copy.deepcopy(module)
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    module(x.clone() if x.is_floating_point() else x).backward(gradient)
    return x.grad, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_in_flight_over_updates_is_that_of_the_old_weights(name: str):
    """Microbatch 0 stays in flight over two updates, made by 1 and 2; 3 over one of them."""
    module, inputs, gradients, index = build(name)
    stage = Stage(module, index, 4, optimizer=adamw, check_versions=True)
    expected_zero = fresh(module, inputs[0], gradients[0])
    stage.forward(0, inputs[0].clone(), versioned=True)
    stage.forward(1, inputs[1].clone(), versioned=True)
    stage.backward(1, gradients[1], 1.0)
    before = [p.detach().clone() for p in module.parameters() if p.requires_grad]
    stage.update(1.0, 1.0)
    assert any(not torch.equal(b, p) for b, p in zip(before, stage.versions.parameters, strict=False))
    expected_two, expected_three = (fresh(module, inputs[i], gradients[i]) for i in (2, 3))
    stage.forward(2, inputs[2].clone(), versioned=True)
    stage.forward(3, inputs[3].clone(), versioned=True)
    got_two = stage.backward(2, gradients[2], 1.0)
    _assert_gradients(module, got_two, expected_two, version=1)
    stage.update(1.0, 0.5)
    got_three = stage.backward(3, gradients[3], 1.0)
    _assert_gradients(module, got_three, expected_three, version=1)
    stage.skip_update(1.0)  # drops the gradients
    got_zero = stage.backward(0, gradients[0], 1.0)
    _assert_gradients(module, got_zero, expected_zero, version=0)
    assert stage.versions.live == 1


def _assert_gradients(module: nn.Module, got: Any, expected: Any, version: int) -> None:
    input_gradient, used = got
    assert used == version
    if expected[0] is not None:
        assert torch.equal(input_gradient, expected[0])
    for (name, parameter), gradient in zip(module.named_parameters(), expected[1], strict=True):
        assert (parameter.grad is None) == (gradient is None), name
        assert gradient is None or torch.equal(parameter.grad, gradient), name


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_two_versions_add_up_in_one_buffer(name: str):
    module, inputs, gradients, index = build(name)
    stage = Stage(module, index, 4, optimizer=adamw, check_versions=True)
    old = fresh(module, inputs[0], gradients[0])[1]
    stage.forward(0, inputs[0].clone(), versioned=True)
    stage.forward(1, inputs[1].clone(), versioned=True)
    stage.backward(1, gradients[1], 1.0)
    stage.update(1.0, 1.0)
    new = fresh(module, inputs[2], gradients[2])[1]
    stage.forward(2, inputs[2].clone(), versioned=True)
    stage.backward(0, gradients[0], 1.0)
    buffers = [g.data_ptr() for g in stage.versions.gradients()]
    stage.backward(2, gradients[2], 1.0)
    assert [g.data_ptr() for g in stage.versions.gradients()] == buffers
    for parameter, a, b in zip(module.parameters(), old, new, strict=True):
        if a is not None:
            assert torch.equal(parameter.grad, a + b)


def test_shared_parameter_stays_shared():
    module, inputs, gradients, index = build("shared under two names")
    stage = Stage(module, index, 4, optimizer=adamw)
    assert len(stage.versions.parameters) == 3  # one weight, two biases
    stage.forward(0, inputs[0], versioned=True)
    stage.forward(1, inputs[1], versioned=True)
    stage.backward(1, gradients[1], 1.0)
    stage.update(1.0, 1.0)
    assert module.one.weight is module.two.weight
    assert set(map(id, stage.versions.parameters)) == set(map(id, module.parameters()))


def test_stage_without_trainable_parameters():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    stage = middle(module)
    inputs, gradient = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    expected, _ = fresh(module, inputs, gradient)
    for versioned in (True, False):
        stage.forward(0, inputs, versioned=versioned)
        received, _ = stage.backward(0, gradient, 1.0)
        assert torch.equal(received, expected)
        assert stage.squared_norm() == 0.0
        stage.update(1.0, 0.5)
    assert stage.optimizer is None
    assert stage.versions.number == 2
    assert all(map(torch.equal, before.values(), module.state_dict().values()))


def test_frozen_first_stage_needs_no_gradient():
    stage = Stage(nn.Linear(WIDTH, WIDTH).requires_grad_(False), 0, 2, optimizer=adamw)
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=True)
    assert stage.backward(0, torch.randn(BATCH, WIDTH), 1.0) == (None, 0)


class Unused(nn.Module):
    """Two weights, of which microbatches use one; an input that may not matter."""

    def __init__(self, ignore_input: bool = False) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self._ignore_input = ignore_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used.expand(x.shape) if self._ignore_input else x * self.used


@pytest.mark.parametrize("versioned", [True, False])
def test_unused_parameter_does_not_move(versioned: bool):
    """A gradient of zeros instead of none would let the weight decay of AdamW shrink it."""
    module = Unused()
    stage = middle(module)
    for microbatch in range(3):
        stage.forward(microbatch, torch.randn(BATCH, WIDTH), versioned=versioned)
        stage.backward(microbatch, torch.randn(BATCH, WIDTH), 1.0)
        assert module.unused.grad is None
        stage.update(1.0, 0.5)
    assert torch.equal(module.unused, torch.ones(WIDTH))
    assert not torch.equal(module.used, torch.ones(WIDTH))


@pytest.mark.parametrize("versioned", [True, False])
def test_unused_input_gets_zeros(versioned: bool):
    stage = middle(Unused(ignore_input=True))
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=versioned)
    gradient, _ = stage.backward(0, torch.randn(BATCH, WIDTH), 1.0)
    assert torch.equal(gradient, torch.zeros(BATCH, WIDTH))


# -- who copies, and who frees -------------------------------------------------------------------------------------


def pointers(stage: Stage) -> list[int]:
    return [p.data_ptr() for p in stage.versions.parameters]


def one(stage: Stage, microbatch: int, *, versioned: bool) -> None:
    stage.forward(microbatch, torch.ones(BATCH, WIDTH), versioned=versioned)
    stage.backward(microbatch, torch.ones(BATCH, WIDTH), 1.0)


@pytest.mark.parametrize("versioned", [True, False])
def test_update_is_in_place_when_no_microbatch_holds_the_weights(versioned: bool):
    stage = middle(nn.Linear(WIDTH, WIDTH))
    start = pointers(stage)
    for microbatch in range(3):
        one(stage, microbatch, versioned=versioned)
        stage.update(1.0, 1.0)
        assert pointers(stage) == start


def test_update_copies_once_when_a_microbatch_holds_the_weights():
    stage = middle(nn.Linear(WIDTH, WIDTH))
    start = pointers(stage)
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=True)
    one(stage, 1, versioned=True)
    stage.update(1.0, 1.0)
    moved = pointers(stage)
    assert not set(moved) & set(start)
    one(stage, 2, versioned=True)
    stage.update(1.0, 1.0)  # microbatch 0 still holds the first version, but none the current one
    assert pointers(stage) == moved


def test_last_holder_frees_the_version():
    stage = middle(nn.Linear(WIDTH, WIDTH))
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=True)
    stage.forward(1, torch.ones(BATCH, WIDTH), versioned=True)
    one(stage, 2, versioned=True)
    old = weakref.ref(stage._in_flight[0].version.leaves["weight"])
    stage.update(1.0, 1.0)
    assert stage.versions.live == 2
    stage.backward(0, torch.ones(BATCH, WIDTH), 1.0)
    gc.collect()
    assert old() is not None  # microbatch 1 still holds it
    stage.backward(1, torch.ones(BATCH, WIDTH), 1.0)
    assert stage.versions.live == 1
    gc.collect()
    assert old() is None


def test_check_catches_a_write_to_a_version_in_flight():
    module = nn.Linear(WIDTH, WIDTH)
    stage = middle(module, check_versions=True)
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=True)
    with torch.no_grad():
        module.bias.add_(1.0)
    with pytest.raises(EngineError, match="version 0 of bias was changed while a microbatch held it"):
        stage.backward(0, torch.ones(BATCH, WIDTH), 1.0)


def test_skipped_update_counts_and_drops_its_gradients():
    module = nn.Linear(WIDTH, WIDTH)
    before = copy.deepcopy(module.state_dict())
    stage = middle(module, check_versions=True)
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=True)
    one(stage, 1, versioned=True)
    stage.skip_update(1.0)
    assert stage.versions.number == 1
    assert stage.versions.gradients() == []
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    expected = fresh(module, torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH))
    got = stage.backward(0, torch.ones(BATCH, WIDTH), 1.0)
    _assert_gradients(module, got, expected, version=0)


def test_a_step_after_a_skip_leaves_the_version_in_flight_alone():
    """After a skip, the old version and the parameters are still the same storage."""
    module = nn.Linear(WIDTH, WIDTH)
    stage = middle(module, check_versions=True)
    expected = fresh(module, torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH))
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=True)
    one(stage, 1, versioned=True)
    stage.skip_update(1.0)
    one(stage, 2, versioned=True)
    stage.update(1.0, 1.0)
    got = stage.backward(0, torch.ones(BATCH, WIDTH), 1.0)
    _assert_gradients(module, got, expected, version=0)


def test_rates_are_the_base_rates_times_the_factor():
    """The factor does not pile up over updates."""
    seen: list[float] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": 0.1}]
        built = torch.optim.SGD(groups)
        built.register_step_pre_hook(lambda o, *_: seen.extend(g["lr"] for g in o.param_groups))
        return built

    stage = middle(nn.Linear(WIDTH, WIDTH), optimizer=optimizer)
    for microbatch, factor in enumerate((0.5, 1.0, 0.25)):
        one(stage, microbatch, versioned=False)
        stage.update(factor, 1.0)
    assert seen == pytest.approx([0.25, 0.05, 0.5, 0.1, 0.125, 0.025])


def test_a_microbatch_goes_forward_once_and_backward_after_it():
    stage = middle(nn.Linear(WIDTH, WIDTH))
    stage.forward(0, torch.ones(BATCH, WIDTH), versioned=False)
    with pytest.raises(EngineError, match="microbatch 0 is already in flight"):
        stage.forward(0, torch.ones(BATCH, WIDTH), versioned=False)
    with pytest.raises(EngineError, match="microbatch 1 has not gone forward"):
        stage.backward(1, torch.ones(BATCH, WIDTH), 1.0)
