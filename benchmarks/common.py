"""What the benchmarks share: the model, real ranks, and a pipeline of AdaPipe as one of their arms."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adapipe.data.corpus import load_corpus
from adapipe.data.sampler import Sampler
from adapipe.engine.bulletin import Bulletin
from adapipe.engine.clock import WallClock
from adapipe.engine.pipeline import Pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Stage
from adapipe.engine.transport.distributed import DistributedTransport
from adapipe.engine.work import Report, Work
from adapipe.engine.world import World
from adapipe.models.gpt import fill_gpt_weight, gpt_blocks, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig
from adapipe.models.stages import block_costs, stage_module
from adapipe.run import count_tokens
from adapipe.schedule import check_synchronous, sync_schedule
from adapipe.schedule.buffers import enough_for, segment_buffers


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def stage_of(config: GPTConfig, stages: int, stage: int) -> nn.Sequential:
    """One stage of the reference GPT, with its initial weights."""
    blocks = gpt_blocks(config)
    module = stage_module(blocks, partition(block_costs(blocks), stages)[stage])
    initialise_by_name(module, 0, fill_gpt_weight(config))
    return module


def corpus_batches(config: GPTConfig, microbatch_size: int) -> Sampler:
    return Sampler(load_corpus().train, config.sequence_length, microbatch_size, seed=0)


class RankArm:
    """The stage of this rank in a pipeline of AdaPipe: real processes, wall clock."""

    def __init__(
        self,
        world: World,
        module: nn.Module,
        batches: Sampler,
        microbatches: int,
        schedule: str = "1f1b",
        clip: float | None = None,
    ) -> None:
        last = world.rank == world.size - 1
        stage = Stage(module, world.rank, world.size, loss=language_model_loss if last else None, optimizer=adamw)
        orders = sync_schedule(schedule, world.size, microbatches)
        buffers = enough_for(segment_buffers(world.size), check_synchronous(orders)[1])[world.rank]
        transport = DistributedTransport(world, Bulletin.length(world.size), buffers)
        self.runtime = Runtime(
            stage,
            transport,
            WallClock(),
            batches,
            microbatches=microbatches,
            clip=clip,
            count=count_tokens,
            rank=world.rank,
            schedule=orders,
        )
        self.pipeline = Pipeline([self.runtime])
        self.pipeline.begin_phase()
        self.done = 0

    def run(self, updates: int, *, synchronous: bool) -> Report:
        """So many more updates, with a flush after each or one at the end."""
        report = self.pipeline.run(Work(self.done, updates, 1 if synchronous else updates, lambda update: 1.0))
        self.done += updates
        return report


def run_ranks(target: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run `target(rank, *arguments)` in one process per rank. Raises SystemExit if one fails."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in processes]}")
