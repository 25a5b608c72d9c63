"""Throughput of two stages as real processes: synchronous, asynchronous, torch's Schedule1F1B, and the compute bound.

    python benchmarks/throughput.py [--repeats 24] [--updates 10]

All arms run on the same two stages in the same two processes, one thread each, in turn within every repeat. An arm's
time in a repeat is the mean of its updates without the first and the last, which fill and drain the pipeline. Ratios
are taken within a repeat, whose arms run within seconds of each other, and their median over the repeats is the figure:
what else the machine does hits both sides alike. Wall clock.

    sync    AdaPipe, a flush after every update (1F1B)
    async   AdaPipe, one flush at the end of the repeat
    torch   torch.distributed.pipelining.Schedule1F1B and the same optimizer
    bound   what the slower stage needs for its K forwards, K backwards and the update, without any communication,
            while both processes compute

The last line is JSON: sync_vs_torch_1f1b and async_vs_sync are ratios of tokens/s, async_vs_bound is the share of the
bound's tokens/s that the asynchronous pipeline reaches.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import RankArm, adamw, corpus_batches, run_ranks, stage_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from adapipe.data.sampler import Sampler
from adapipe.engine.world import World
from adapipe.models.gpt import language_model_loss
from adapipe.models.shape import GPTConfig

STAGES, LAYERS, WIDTH, SEQUENCE, MICROBATCH, K = 2, 4, 256, 128, 2, 4
ARMS = ("sync", "torch", "async", "bound")


class Laps:
    """Seconds between one lap and the next."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now


class AdaPipeArm:
    """One of our two modes. Like all arms, a call makes `updates` updates and returns the seconds of each."""

    def __init__(self, world: World, module: nn.Module, batches: Sampler, synchronous: bool) -> None:
        self._arm = RankArm(world, module, batches, K)
        self._rank = world.rank
        self._synchronous = synchronous

    def __call__(self, updates: int) -> list[float]:
        report = self._arm.run(updates, synchronous=self._synchronous)
        return [float(seconds) for seconds in report.field("seconds")[self._rank]]


class TorchArm:
    """torch's own 1F1B on the same stage."""

    def __init__(self, world: World, module: nn.Module, batches: Sampler) -> None:
        self._rank = world.rank
        self._batches = batches
        self._optimizer = adamw(list(module.parameters()))
        stage = PipelineStage(module, world.rank, STAGES, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, K, loss_fn=self._loss)
        self._done = 0

    @staticmethod
    def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return language_model_loss(output, target) / target.numel()

    def __call__(self, updates: int) -> list[float]:
        clock = Laps()
        for update in range(self._done, self._done + updates):
            data = [self._batches(update * K + k) for k in range(K)]
            if self._rank == 0:
                self._schedule.step(torch.cat([inputs for inputs, _ in data]))
            else:
                self._schedule.step(target=torch.cat([targets for _, targets in data]))
            self._optimizer.step()
            self._optimizer.zero_grad()
            clock.lap()
        self._done += updates
        return clock.laps


class BoundArm:
    """The stage's own work without communication: nothing that a pipeline could leave out."""

    def __init__(self, world: World, module: nn.Module, batches: Sampler) -> None:
        self._first = world.rank == 0
        self._module = module
        self._batches = batches
        self._optimizer = adamw(list(module.parameters()))
        self._boundary = torch.randn(MICROBATCH, SEQUENCE, WIDTH)

    def __call__(self, updates: int) -> list[float]:
        clock = Laps()
        for update in range(updates):
            for k in range(K):
                inputs, targets = self._batches(update * K + k)
                if self._first:
                    torch.autograd.backward(self._module(inputs), self._boundary)
                else:
                    received = self._boundary.detach().requires_grad_()
                    torch.autograd.backward(language_model_loss(self._module(received), targets) / targets.numel())
            self._optimizer.step()
            self._optimizer.zero_grad()
            clock.lap()
        return clock.laps


def measure(rank: int, folder: Path, repeats: int, updates: int) -> None:
    """One rank: seconds per update of every arm in every repeat, written to `folder`."""
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), init_method=f"file://{folder / 'rendezvous'}", rank=rank, size=STAGES)
    config = GPTConfig(layers=LAYERS, width=WIDTH, heads=4, sequence_length=SEQUENCE)
    module = stage_of(config, STAGES, rank)
    batches = corpus_batches(config, MICROBATCH)
    arms: dict[str, Callable[[int], list[float]]] = {
        "sync": AdaPipeArm(world, copy.deepcopy(module), batches, synchronous=True),
        "torch": TorchArm(world, copy.deepcopy(module), batches),
        "async": AdaPipeArm(world, copy.deepcopy(module), batches, synchronous=False),
        "bound": BoundArm(world, copy.deepcopy(module), batches),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(-1, repeats):  # the first one warms up
        for name in ARMS if repeat % 2 else reversed(ARMS):
            dist.barrier(group=world.control)
            laps = arms[name](updates)
            if repeat >= 0:
                seconds[name].append(statistics.mean(laps[1:-1]))
        if rank == 0 and repeat >= 0:
            figures = ", ".join(f"{name} {1e3 * seconds[name][-1]:.1f} ms" for name in ARMS)
            print(f"repeat {repeat + 1}: {figures}", flush=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(seconds))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--updates", type=int, default=10, help="updates per arm and repeat")
    options = parser.parse_args()
    if options.repeats < 1 or options.updates < 3:
        parser.error("give at least 1 repeat of 3 updates")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(measure, STAGES, folder, options.repeats, options.updates)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(STAGES)]
    times = {arm: [max(pair) for pair in zip(*(rank[arm] for rank in ranks), strict=True)] for arm in ARMS}
    tokens = K * MICROBATCH * SEQUENCE
    print(
        f"\nP = {STAGES}, {LAYERS} layers of width {WIDTH}, K = {K}, microbatch {MICROBATCH} x {SEQUENCE}; wall clock"
    )
    for arm in ARMS:
        median = statistics.median(times[arm])
        print(f"  {arm:<6} {1e3 * median:7.1f} ms per update {tokens / median:9,.0f} tokens/s")
    print("the law's ceiling for async over sync is 1.25")
    ratios = {
        "sync_vs_torch_1f1b": ("torch", "sync"),
        "async_vs_sync": ("sync", "async"),
        "async_vs_bound": ("bound", "async"),
    }
    figures = {}
    for name, (slower, faster) in ratios.items():
        pairs = sorted(a / b for a, b in zip(times[slower], times[faster], strict=True))
        figures[name] = round(statistics.median(pairs), 3)
        quarter = len(pairs) // 4
        print(
            f"  {name}: {figures[name]} (half of the repeats within {pairs[quarter]:.3f} .. {pairs[-1 - quarter]:.3f})"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
