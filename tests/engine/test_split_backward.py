"""A backward in two halves equals a whole one, for every shape of graph; and breaking the split is noticed."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from adapipe.engine import split_backward
from adapipe.engine.split_backward import SplitBackward
from adapipe.engine.stage import Stage
from adapipe.errors import AdaPipeError, EngineError
from adapipe.models.gpt import gpt_blocks
from adapipe.models.shape import GPTConfig

WIDTH, BATCH, MICROBATCHES = 8, 3, 3

# -- shapes --------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A function of the input and of named weights."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) / WIDTH**0.5 for shape in shapes])
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights, **self.parts)


class TwoOutputs(torch.autograd.Function):
    """x * w and x + w, the second of which may be left unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, product: torch.Tensor, total: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return product * w + total, (product * x + total).sum(0)


class Power(torch.autograd.Function):
    """w * x ** exponent, with arguments that are no tensors, and no gradient for the shift."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, shift: Any, exponent: int, name: str, nothing: None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.exponent = exponent
        return w * x**exponent + shift.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        n = ctx.exponent
        return gradient * w * n * x ** (n - 1), (gradient * x**n).sum(0), None, None, None, None


class Unanswered(torch.autograd.Function):
    """The identity, whose backward gives no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def chain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(), *modules, nn.Tanh(), linear())


def same_module_twice() -> nn.Module:
    one = linear()
    return nn.Sequential(one, nn.Tanh(), linear(), nn.Tanh(), one)


def tied() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH))
    model[2].weight = model[0].weight
    return model


def unused() -> nn.Module:
    return chain(Apply(lambda x, w, unused_part: x * w, (WIDTH,), unused_part=linear()))


def frozen(*names: str) -> nn.Module:
    model = chain(nn.LayerNorm(WIDTH))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names and "all" not in names)
    return model


class Counted(nn.Module):
    """Counts its forwards."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return torch.tanh(self.linear(x))


class Checkpointed(nn.Module):
    def __init__(self, *inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cell(x[:, None])[0][:, 0]


def hooked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return torch.tanh(y)


def unused_total(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return TwoOutputs.apply(x, w)[0]


W, SQUARE = (WIDTH,), (WIDTH, WIDTH)
SHAPES: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: chain(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)),
    "residual": lambda: Apply(lambda x, a, b: x + b(torch.relu(a(x))), a=linear(), b=linear()),
    "weight used twice": lambda: Apply(lambda x, w: torch.tanh(x @ w) @ w.T, SQUARE),
    "module used twice": lambda: Apply(lambda x, a, b: a(torch.tanh(b(torch.tanh(a(x))))), a=linear(), b=linear()),
    "module in two places": same_module_twice,
    "tied weights": tied,
    "weight used twice in one place": lambda: Apply(lambda x, w: (x * w) * w + w, W),
    "unused weights": unused,
    "chunks": lambda: Apply(
        lambda x, a, b: b(torch.mul(*a(x).chunk(2, -1))), a=nn.Linear(WIDTH, 2 * WIDTH), b=linear()
    ),
    "split and unbind": lambda: Apply(
        lambda x, a: sum(part * (k + 1) for k, part in enumerate(a(x).view(BATCH, 2, WIDTH).unbind(1))),
        a=nn.Linear(WIDTH, 2 * WIDTH),
    ),
    "chunks of a weight": lambda: Apply(lambda x, w: torch.tanh(x * w.chunk(2)[0]) * w.chunk(2)[1], (2 * WIDTH,)),
    "two outputs": lambda: Apply(lambda x, w: torch.mul(*TwoOutputs.apply(torch.tanh(x), w)), W),
    "var_mean": lambda: Apply(lambda x, a: torch.add(*torch.var_mean(a(x), 1, keepdim=True)) * x, a=linear()),
    "recurrent": Recurrent,
    "input unused": lambda: Apply(lambda x, w: w.expand(BATCH, WIDTH) * 2, W),
    "an output unused": lambda: Apply(unused_total, W),
    "no gradient comes back": lambda: Apply(lambda x, w, a: x + Unanswered.apply(a(x) * w), W, a=linear()),
    "gradient of a part only": lambda: Apply(lambda x, a: a(x).detach() + x * 2, a=linear()),
    "arguments that are no tensors": lambda: Apply(
        lambda x, w: Power.apply(torch.tanh(x), w, torch.ones(WIDTH), 3, "cube", None), W
    ),
    "some frozen": lambda: frozen("0.weight", "1.bias"),
    "all frozen": lambda: frozen("all"),
    "every block checkpointed": lambda: nn.Sequential(*(Checkpointed(Counted(), linear()) for _ in range(3))),
    "one block checkpointed": lambda: nn.Sequential(linear(), Checkpointed(Counted(), linear()), nn.Tanh(), linear()),
    "the stage checkpointed": lambda: Checkpointed(Counted(), linear(), Counted()),
    "dropout": lambda: chain(nn.Dropout(0.5), linear(), nn.Dropout(0.5)),
    "in place at first": lambda: Apply(lambda x, a: a(x.mul_(2).relu_()), a=linear()),
    "in place in the middle": lambda: Apply(lambda x, a, b: b(a(x).relu_()), a=linear(), b=linear()),
    "weight norm": lambda: nn.Sequential(weight_norm(linear()), nn.Tanh(), weight_norm(linear())),
    "a hook": lambda: chain(Apply(hooked, SQUARE)),
    "identity": nn.Identity,
}

# -- comparing -----------------------------------------------------------------------------------------------------

Gradients = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


def loss(output: torch.Tensor, targets: Any) -> torch.Tensor:
    return (output**2).sum()


def stage_of(module: nn.Module, index: int = 1) -> Stage:
    """Stage `index` of 3."""
    return Stage(
        module,
        index,
        3,
        loss=loss if index == 2 else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
        check_versions=True,
    )


def run(stage: Stage, script: str, inputs: torch.Tensor, gradients: torch.Tensor, *, versioned: bool) -> Gradients:
    """Cells such as F0 or I2, a U for an update. What comes out: the gradients of the inputs, and of the weights."""
    torch.manual_seed(7)
    found: list[torch.Tensor | None] = [None] * MICROBATCHES
    for cell in script.split():
        kind, i = cell[0], int(cell[1:] or 0)
        gradient = None if stage.last else gradients[i].clone()
        if kind == "F":
            stage.forward(i, inputs[i].clone(), versioned=versioned)
        elif kind == "B":
            found[i] = stage.backward(i, gradient, 0.5)[0]
        elif kind == "I":
            found[i] = stage.backward_input(i, gradient, 0.5)[0]
        elif kind == "W":
            stage.backward_weight(i)
        elif kind == "U":
            for parameter in stage.versions.parameters:  # as an optimizer step, but the gradients stay
                parameter.data = parameter.data * 1.5
            stage.versions._current = None
    assert stage.in_flight == 0
    return [g if g is None else g.clone() for g in found], [p.grad for p in stage.module.parameters()]


WHOLE = "F0 F1 B0 F2 B1 B2"
HALVES = "F0 F1 I0 F2 I1 W0 I2 W1 W2"


def compare(
    shape: str,
    *,
    index: int = 1,
    versioned: bool = False,
    whole: str = WHOLE,
    halves: str = HALVES,
    breaking: Callable[[nn.Module], Any] = lambda module: None,
) -> None:
    """Raise AssertionError unless a backward in halves gives the gradients of a whole one, to the bit."""
    torch.manual_seed(0)
    module = SHAPES[shape]()
    inputs, gradients = torch.randn(2, MICROBATCHES, BATCH, WIDTH)
    expected = run(stage_of(copy.deepcopy(module), index), whole, inputs, gradients, versioned=versioned)
    stage = stage_of(module, index)
    breaking(module)
    Counted.calls = 0
    found = run(stage, halves, inputs, gradients, versioned=versioned)
    for of_whole, of_halves in zip(expected, found, strict=True):
        for one, other in zip(of_whole, of_halves, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other), (one - other).abs().max()
    checkpointed = [m for m in module.modules() if isinstance(m, Counted)]
    assert Counted.calls == 2 * MICROBATCHES * len(checkpointed), "recomputed more often than once"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("index", [1, 2], ids=["middle", "last"])
def test_two_halves_are_a_whole(shape: str, index: int):
    compare(shape, index=index)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_stage_0_the_first_half_is_empty(shape: str):
    if shape in ("in place at first", "identity", "all frozen"):
        pytest.skip("needs an input that requires a gradient")
    compare(shape, index=0)


def test_on_stage_0_nothing_happens_before_the_second_half():
    stage = stage_of(linear(), 0)
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=False)
    assert stage.backward_input(0, torch.ones(BATCH, WIDTH), 1.0) == (None, 0)
    assert stage.module.weight.grad is None
    stage.backward_weight(0)
    assert stage.module.weight.grad is not None


@pytest.mark.parametrize("shape", [s for s in SHAPES if "checkpointed" not in s])
def test_on_the_leaves_of_a_version(shape: str):
    """The weights change between F and I, and between I and W."""
    if shape == "weight norm":
        pytest.skip("parametrised modules cannot be versioned by copy")
    compare(shape, versioned=True, whole="F0 F1 U B0 F2 U B1 B2", halves="F0 F1 U I0 F2 I1 U W0 I2 W1 W2")


def test_under_autocast():
    torch.manual_seed(0)
    module = chain(nn.LayerNorm(WIDTH))
    x, g = torch.randn(2, BATCH, WIDTH)
    found = []
    for halves in (False, True):
        stage = Stage(copy.deepcopy(module), 1, 3, optimizer=torch.optim.SGD, autocast=torch.bfloat16)
        output = stage.forward(0, x, versioned=False)
        if halves:
            gradient, _ = stage.backward_input(0, g.to(output.dtype), 1.0)
            stage.backward_weight(0)
        else:
            gradient, _ = stage.backward(0, g.to(output.dtype), 1.0)
        found.append([gradient, *(p.grad for p in stage.module.parameters())])
    assert all(map(torch.equal, *found))


def test_the_reference_model():
    torch.manual_seed(0)
    module = nn.Sequential(*gpt_blocks(GPTConfig(layers=3, width=16, heads=2, sequence_length=8))[1:3])
    x, g = torch.randn(2, 2, 8, 16)
    found = []
    for kinds in ("B", "IW"):
        stage = stage_of(copy.deepcopy(module))
        stage.forward(0, x, versioned=False)
        gradient, _ = stage.backward(0, g, 1.0) if kinds == "B" else stage.backward_input(0, g, 1.0)
        if kinds == "IW":
            stage.backward_weight(0)
        found.append([gradient, *(p.grad for p in stage.module.parameters())])
    assert all(map(torch.equal, *found))


# -- what it costs -------------------------------------------------------------------------------------------------


class OnThePath(torch.autograd.Function):
    """The identity, counting its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        OnThePath.backwards += 1
        return gradient


def test_the_second_half_does_not_run_the_path_again():
    stage = stage_of(Apply(lambda x, a, b: b(OnThePath.apply(torch.tanh(a(x)))), a=linear(), b=linear()))
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=False)
    OnThePath.backwards = 0
    stage.backward_input(0, torch.ones(BATCH, WIDTH), 1.0)
    assert OnThePath.backwards == 1
    stage.backward_weight(0)
    assert OnThePath.backwards == 1


def test_the_graph_is_freed_with_the_second_half():
    kept: list[weakref.ref[torch.Tensor]] = []

    def note(x: torch.Tensor, a: nn.Module) -> torch.Tensor:
        y = torch.tanh(a(x))
        kept.append(weakref.ref(y))
        return y * y

    stage = stage_of(Apply(note, a=linear()))
    gc.disable()
    try:
        for _ in range(3):
            stage.forward(0, torch.randn(BATCH, WIDTH), versioned=False)
            stage.backward_input(0, torch.ones(BATCH, WIDTH), 1.0)
            stage.backward_weight(0)
        assert [tensor() for tensor in kept] == [None] * 3
    finally:
        gc.enable()


# -- errors --------------------------------------------------------------------------------------------------------


def test_halves_out_of_order_are_refused():
    stage = stage_of(linear())
    gradient = torch.ones(BATCH, WIDTH)
    with pytest.raises(EngineError, match="microbatch 4 has not gone forward"):
        stage.backward_input(4, gradient, 1.0)
    stage.forward(4, torch.randn(BATCH, WIDTH), versioned=False)
    with pytest.raises(EngineError, match="the input gradient of microbatch 4 has not been made"):
        stage.backward_weight(4)
    stage.backward_input(4, gradient, 1.0)
    for again in (stage.backward_input, stage.backward):
        with pytest.raises(EngineError, match="the input gradient of microbatch 4 has been made before"):
            again(4, gradient, 1.0)
    with pytest.raises(EngineError, match=r"the weight gradients of microbatches \[4\] are not made"):
        stage.update(1.0, 1.0)
    stage.backward_weight(4)
    stage.update(1.0, 1.0)


def test_reentrant_checkpoints_are_refused():
    stage = stage_of(Checkpointed(linear(), reentrant=True))
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=False)
    with pytest.raises(AdaPipeError, match="give it use_reentrant=False, or choose --sync-schedule 1f1b"):
        stage.backward_input(0, torch.ones(BATCH, WIDTH), 1.0)


def test_an_error_in_a_backward_is_not_taken_for_a_recomputation():
    class Fails(OnThePath):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no gradient today")

    stage = stage_of(Apply(lambda x, a: Fails.apply(a(x)), a=linear()))
    stage.forward(0, torch.randn(BATCH, WIDTH), versioned=False)
    with pytest.raises(RuntimeError, match="no gradient today"):
        stage.backward_input(0, torch.ones(BATCH, WIDTH), 1.0)


# -- mutations: a broken split is noticed --------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def counts_each_use(patch: Patch, module: nn.Module) -> None:
    """Every join makes the whole gradient of a weight that it shares with others."""
    patch.setattr(split_backward, "Counter", lambda leaves: dict.fromkeys(leaves, 1))


def wants_every_weight(patch: Patch, module: nn.Module) -> None:
    """Asks for the gradients of the module's parameters, not of the leaves that the graph has."""

    def weight(self: Any) -> None:
        torch.autograd.grad(self._output, list(module.parameters()), self._gradient)

    patch.setattr(SplitBackward, "weight", weight)


def first_output_only(patch: Patch, module: nn.Module) -> None:
    patch.setattr(split_backward, "GradientEdge", lambda node, number: GradientEdge(node, 0))


def wants_every_gradient(patch: Patch, module: nn.Module) -> None:
    """Does not expect that no gradient arrives."""
    grad = torch.autograd.grad
    patch.setattr(torch.autograd, "grad", lambda *a, **options: grad(*a, **{**options, "allow_unused": False}))


def wants_tensors_only(patch: Patch, module: nn.Module) -> None:
    """Takes every argument of a function for one with a history."""
    walk = split_backward._walk

    def walked(root: Any) -> Any:
        edges, order = walk(root)
        return {node: list(node.next_functions) for node in edges}, order

    patch.setattr(split_backward, "_walk", walked)


def recomputes(patch: Patch, module: nn.Module) -> None:
    patch.setattr(split_backward, "disable_saved_tensors_hooks", contextlib.nullcontext)


def computes_again(patch: Patch, module: nn.Module) -> None:
    """The second half is that of another forward, with other draws."""

    def weight(self: Any) -> None:
        with torch.enable_grad():
            output = module(self._received.detach())
        torch.autograd.backward(output, self._gradient)

    patch.setattr(SplitBackward, "weight", weight)


def forgets_the_version(patch: Patch, module: nn.Module) -> None:
    """Leaves the gradients on the leaves of the version."""
    patch.setattr(Stage, "_accumulate", lambda self, entry, run: run())


def trains_what_is_frozen(patch: Patch, module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_()


@pytest.mark.parametrize(
    ("shape", "mutation"),
    [
        ("weight used twice", counts_each_use),
        ("module used twice", counts_each_use),
        ("module in two places", counts_each_use),
        ("tied weights", counts_each_use),
        ("unused weights", wants_every_weight),
        ("two outputs", first_output_only),
        ("no gradient comes back", wants_every_gradient),
        ("arguments that are no tensors", wants_tensors_only),
        ("some frozen", wants_every_weight),
        ("some frozen", trains_what_is_frozen),
        ("every block checkpointed", recomputes),
        ("one block checkpointed", recomputes),
        ("the stage checkpointed", recomputes),
        ("dropout", computes_again),
        ("chain", forgets_the_version),
    ],
)
def test_a_broken_split_is_noticed(shape: str, mutation: Any, monkeypatch: Patch):
    versioned = mutation is forgets_the_version
    compare(shape, versioned=versioned)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        compare(shape, versioned=versioned, breaking=lambda module: mutation(monkeypatch, module))
