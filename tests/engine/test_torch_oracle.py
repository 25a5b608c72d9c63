"""torch's own schedules, through the adapter of the benchmarks, compute what the unsplit model computes.

So they are an oracle for AdaPipe's schedules: `torch_gradients` gives what torch's make.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch_peer import SCHEDULES, TorchPipeline, allows

from adapipe.engine.world import World
from tests.engine import reference, toys
from tests.worlds import run_world

# The references add the same float32 numbers in another order.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
STAGES = [1, 2, 3, 4]
MOST = 13  # the largest K that torch is asked about
UPDATES, TRAINED_K = 3, 6  # with 6 microbatches, all updates have as many tokens in spite of padding


def shapes(stages: int) -> list[tuple[str, int]]:
    """(name, K) of the gradients to make: fewer microbatches than stages, a round, more rounds, and no whole rounds."""
    wanted = sorted({1, 2, stages, stages + 1, 2 * stages, 7})
    return [(name, k) for name in SCHEDULES for k in wanted if allows(name, stages, k)]


@dataclass(frozen=True)
class Findings:
    """What one rank found; tensors by the names that they have in the unsplit model."""

    accepted: set[tuple[str, int]]  # (name, K)
    gradients: dict[tuple[str, int], dict[str, torch.Tensor]]  # after one update without an optimizer
    losses: dict[str, list[float | None]]  # of UPDATES updates of TRAINED_K microbatches
    weights: dict[str, dict[str, torch.Tensor]]  # after them


def _part(world: World) -> nn.Sequential:
    """This rank's blocks, named as in the unsplit model."""
    model = copy.deepcopy(toys.blocks())
    return nn.Sequential(OrderedDict((str(block), model[block]) for block in toys.cut(world.size)[world.rank]))


def _peer(
    world: World, name: str, module: nn.Module, microbatches: int, optimizer: torch.optim.Optimizer | None = None
) -> TorchPipeline:
    tokens = sum(toys.count(toys.batches(i)[1]) for i in range(microbatches))
    return TorchPipeline(name, module, world.rank, world.size, microbatches, toys.batches, optimizer, toys.loss, tokens)


def _accepts(world: World, name: str, microbatches: int) -> bool:
    try:
        _peer(world, name, _part(world), microbatches)
    except ValueError:
        return False
    return True


def _gradients(world: World, name: str, microbatches: int) -> dict[str, torch.Tensor]:
    module = _part(world)
    _peer(world, name, module, microbatches).update()
    return {parameter: p.grad for parameter, p in module.named_parameters()}


def _train(world: World, name: str) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    module = _part(world)
    optimizer = toys.adamw(list(module.parameters()))
    (group,) = optimizer.param_groups
    rate = group["lr"]
    peer = _peer(world, name, module, TRAINED_K, optimizer)
    losses = []
    for update in range(UPDATES):
        group["lr"] = rate * toys.rate_factor(update)
        losses.append(peer.update())
    return losses, {parameter: p.detach() for parameter, p in module.named_parameters()}


def _on_rank(world: World) -> Findings:
    trained = {name: _train(world, name) for name in SCHEDULES}
    return Findings(
        {(name, k) for name in SCHEDULES for k in range(1, MOST + 1) if _accepts(world, name, k)},
        {(name, k): _gradients(world, name, k) for name, k in shapes(world.size)},
        {name: losses for name, (losses, _) in trained.items()},
        {name: weights for name, (_, weights) in trained.items()},
    )


@functools.cache
def _found(stages: int) -> list[Findings]:
    """By rank. One world of forked ranks for all that is asked about so many stages."""
    with tempfile.TemporaryDirectory() as folder:
        return run_world(stages, Path(folder), _on_rank)


def torch_gradients(name: str, stages: int, microbatches: int) -> dict[str, torch.Tensor]:
    """Gradients of the loss per token of update 0 (microbatches 0 .. K-1 of the toys) by the parameters' full names,
    as torch's schedule `name` makes them on real ranks. For the shapes of `shapes`."""
    return {
        parameter: gradient
        for of_rank in _found(stages)
        for parameter, gradient in of_rank.gradients[name, microbatches].items()
    }


def unsplit_gradients(microbatches: int) -> dict[str, torch.Tensor]:
    """The same of the unsplit model."""
    expected = reference.unsplit(microbatches, 1, clip=None, optimizer=toys.sgd)
    names = [name for name, _ in nn.Sequential(*toys.blocks()).named_parameters()]
    return dict(zip(names, expected.gradients[0], strict=True))


def adapipe_gradients(stages: int, microbatches: int) -> dict[str, torch.Tensor]:
    """The same of AdaPipe's 1F1B, in one process."""
    made: list[torch.Tensor] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = toys.sgd(parameters)
        at = len(built.param_groups[0]["params"])
        assert at == len(parameters)
        built.register_step_pre_hook(lambda *_: by_parameter.update({id(p): p.grad.clone() for p in parameters}))
        return built

    by_parameter: dict[int, torch.Tensor] = {}
    pipeline = toys.in_process(stages, microbatches=microbatches, optimizer=optimizer)
    pipeline.run(toys.work(1, 1))
    made = [by_parameter[id(p)] for r in pipeline.runtimes for p in r.stage.module.parameters()]
    names = [name for name, _ in nn.Sequential(*toys.blocks()).named_parameters()]
    return dict(zip(names, made, strict=True))
