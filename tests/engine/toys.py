"""Small models and pipelines that the engine's tests share, and the one-process references they are compared with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from adapipe.engine.bulletin import Bulletin
from adapipe.engine.clock import Clock, WallClock
from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Stage
from adapipe.engine.transport import Transport
from adapipe.engine.transport.distributed import DistributedTransport
from adapipe.engine.work import Work
from adapipe.engine.world import World
from adapipe.schedule import Buffers, check_synchronous, sync_schedule
from adapipe.schedule.buffers import enough_for, segment_buffers
from adapipe.schedule.cost import CostModel

WIDTH, CLASSES, BATCH = 8, 5, 3

# These models are far too small for more than one thread.
torch.set_num_threads(1)


def blocks(seed: int = 0) -> list[nn.Module]:
    """Four blocks with the operations that treat weight versions differently: Linear, norms, elementwise scales."""
    torch.manual_seed(seed)
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
    ]


def batches(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Microbatch i; every third one has a padded target, so that tokens per microbatch differ."""
    generator = torch.Generator().manual_seed(1000 + i)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    if i % 3 == 0:
        targets[0] = -100
    return inputs, targets


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, targets, reduction="sum", ignore_index=-100)


def count(targets: torch.Tensor) -> int:
    return int((targets != -100).sum())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rate_factor(update: int) -> float:
    """A schedule that differs at every update, so that a stage that is off by one is noticed."""
    return 1.0 / (1.0 + 0.1 * update)


def cut(stages: int) -> list[range]:
    """Four blocks over `stages` stages."""
    bounds = [round(4 * s / stages) for s in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def runtime(
    stage: int,
    transport: Transport,
    clock: Clock | None = None,
    *,
    microbatches: int,
    clip: float | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    model: list[nn.Module] | None = None,
    data: Any = batches,
    check_versions: bool = True,
    in_flight: int = 1,
    schedule: str = "1f1b",
    keep: range = range(0),
) -> Runtime:
    part = cut(transport.stages)[stage]
    module = nn.Sequential(*copy.deepcopy((model or blocks())[part.start : part.stop]))
    last = stage == transport.stages - 1
    built = Stage(
        module,
        stage,
        transport.stages,
        loss=loss if last else None,
        optimizer=optimizer,
        check_versions=check_versions,
    )
    return Runtime(
        built,
        transport,
        clock or WallClock(),
        data,
        microbatches=microbatches,
        clip=clip,
        count=count,
        rank=stage,
        in_flight=in_flight,
        schedule=sync_schedule(schedule, transport.stages, microbatches, in_flight),
        keep=keep,
    )


def buffers(stages: int, microbatches: int, in_flight: int, schedule: str) -> list[Buffers]:
    """For both modes."""
    _, needed = check_synchronous(sync_schedule(schedule, stages, microbatches, in_flight), in_flight)
    return enough_for(segment_buffers(stages, in_flight), needed)


def in_process(
    stages: int,
    *,
    microbatches: int,
    in_flight: int = 1,
    schedule: str = "1f1b",
    emulate: CostModel | None = None,
    **options: Any,
) -> Pipeline:
    def build(stage: int, transport: Transport, clock: Clock) -> Runtime:
        return runtime(
            stage, transport, clock, microbatches=microbatches, in_flight=in_flight, schedule=schedule, **options
        )

    enough = buffers(stages, microbatches, in_flight, schedule)
    return in_process_pipeline(stages, build, buffers=enough, emulate=emulate)


def distributed(
    world: World, *, microbatches: int, in_flight: int = 1, schedule: str = "1f1b", **options: Any
) -> Pipeline:
    enough = buffers(world.size, microbatches, in_flight, schedule)[world.rank]
    transport = DistributedTransport(world, Bulletin.length(world.size), enough)
    return Pipeline(
        [runtime(world.rank, transport, microbatches=microbatches, in_flight=in_flight, schedule=schedule, **options)]
    )


def work(updates: int, flush_every: int, first_update: int = 0, **options: Any) -> Work:
    return Work(first_update, updates, flush_every, rate_factor, **options)


def weights(pipeline: Pipeline) -> list[torch.Tensor]:
    """The weights of the stages of this process, in model order."""
    return [p.detach().clone() for r in pipeline.runtimes for p in r.stage.module.parameters()]
