"""Throughput of two stages as real processes: our schedules, torch's, asynchronous, and the compute bound.

    python benchmarks/throughput.py [--microbatches 2,4,8] [--repeats 15] [--updates 6]

All arms run on the same two stages in the same two processes, one thread each, in turn within every repeat. An arm's
time in a repeat is the median of its updates without the first and the last, which fill and drain the pipeline. Ratios
are taken within a repeat, whose arms run within seconds of each other, and their median over the repeats is the figure:
what else the machine does hits both sides alike. Wall clock. For every K of --microbatches:

    gpipe, 1f1b, zb-h1         AdaPipe, synchronous: a flush after every update
    torch gpipe, 1f1b, zb-h1   torch.distributed.pipelining's GPipe, 1F1B and InterleavedZeroBubble, the same optimizer,
                               and clipping by the global norm as torchtitan does it
    async                      AdaPipe, one flush at the end of the repeat
    bound                      what the slower stage needs for its K forwards, K backwards and the update, without any
                               communication, while both processes compute

The last line is JSON with ratios of tokens/s, for K = 4: gpipe_vs_torch_k4, 1f1b_vs_torch_k4, zb-h1_vs_torch_k4,
async_vs_1f1b_k4, async_vs_best_sync_k4, async_vs_bound_k4. The best synchronous arm is that of the fastest median.
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
from torch_peer import TorchPipeline, allows

from adapipe.data.sampler import Sampler
from adapipe.engine.world import World
from adapipe.models.gpt import language_model_loss
from adapipe.models.shape import GPTConfig
from adapipe.schedule import SYNC_SCHEDULES

STAGES, LAYERS, WIDTH, SEQUENCE, MICROBATCH, CLIP = 2, 4, 256, 128, 2, 1.0
ARMS = (*SYNC_SCHEDULES, *(f"torch {name}" for name in SYNC_SCHEDULES), "async", "bound")


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
    """AdaPipe: a synchronous schedule, or None for asynchronous. Like all arms, a call makes `updates` updates and
    returns the seconds of each."""

    def __init__(
        self, world: World, module: nn.Module, batches: Sampler, schedule: str | None, microbatches: int
    ) -> None:
        self._arm = RankArm(world, module, batches, microbatches, schedule or "1f1b", CLIP)
        self._rank = world.rank
        self._synchronous = schedule is not None

    def __call__(self, updates: int) -> list[float]:
        report = self._arm.run(updates, synchronous=self._synchronous)
        return [float(seconds) for seconds in report.field("seconds")[self._rank]]


class TorchArm:
    """A schedule of torch's own on the same stage."""

    def __init__(self, world: World, module: nn.Module, batches: Sampler, name: str, microbatches: int) -> None:
        tokens = microbatches * MICROBATCH * SEQUENCE
        optimizer = adamw(list(module.parameters()))
        self._peer = TorchPipeline(
            name, module, world.rank, STAGES, microbatches, batches, optimizer, language_model_loss, tokens, CLIP
        )

    def __call__(self, updates: int) -> list[float]:
        clock = Laps()
        for _ in range(updates):
            self._peer.update()
            clock.lap()
        return clock.laps


class BoundArm:
    """The stage's own work without communication: nothing that a pipeline could leave out."""

    def __init__(self, world: World, module: nn.Module, batches: Sampler, microbatches: int) -> None:
        self._first = world.rank == 0
        self._microbatches = microbatches
        self._module = module
        self._batches = batches
        self._optimizer = adamw(list(module.parameters()))
        self._boundary = torch.randn(MICROBATCH, SEQUENCE, WIDTH)

    def __call__(self, updates: int) -> list[float]:
        clock = Laps()
        for update in range(updates):
            for k in range(self._microbatches):
                inputs, targets = self._batches(update * self._microbatches + k)
                if self._first:
                    torch.autograd.backward(self._module(inputs), self._boundary)
                else:
                    received = self._boundary.detach().requires_grad_()
                    torch.autograd.backward(language_model_loss(self._module(received), targets) / targets.numel())
            self._optimizer.step()
            self._optimizer.zero_grad()
            clock.lap()
        return clock.laps


def measure(rank: int, folder: Path, microbatches: list[int], repeats: int, updates: int) -> None:
    """One rank: seconds per update of every arm in every repeat, by K, written to `folder`."""
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), init_method=f"file://{folder / 'rendezvous'}", rank=rank, size=STAGES)
    config = GPTConfig(layers=LAYERS, width=WIDTH, heads=4, sequence_length=SEQUENCE)
    module = stage_of(config, STAGES, rank)
    batches = corpus_batches(config, MICROBATCH)
    seconds: dict[int, dict[str, list[float]]] = {}
    for k in microbatches:
        arms: dict[str, Callable[[int], list[float]]] = {}
        for name in SYNC_SCHEDULES:
            arms[name] = AdaPipeArm(world, copy.deepcopy(module), batches, name, k)
            arms[f"torch {name}"] = TorchArm(world, copy.deepcopy(module), batches, name, k)
        arms["async"] = AdaPipeArm(world, copy.deepcopy(module), batches, None, k)
        arms["bound"] = BoundArm(world, copy.deepcopy(module), batches, k)
        found = seconds[k] = {name: [] for name in ARMS}
        for repeat in range(-1, repeats):  # the first one warms up
            for name in ARMS if repeat % 2 else reversed(ARMS):
                dist.barrier(group=world.control)
                laps = arms[name](updates)
                if repeat >= 0:
                    found[name].append(statistics.median(laps[1:-1]))
            if rank == 0 and repeat >= 0:
                figures = ", ".join(f"{name} {1e3 * found[name][-1]:.1f}" for name in ARMS)
                print(f"K = {k}, repeat {repeat + 1}, ms: {figures}", flush=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(seconds))
    world.close()


def report(microbatches: int, times: dict[str, list[float]]) -> dict[str, float]:
    """Print a table of one K. times: seconds per update of the slower rank, by arm and repeat. Returns the ratios."""
    tokens = microbatches * MICROBATCH * SEQUENCE
    ceiling = 1 + (STAGES - 1) / microbatches
    print(f"\nK = {microbatches} (the law's ceiling for async over 1f1b is {ceiling:.4g}); wall clock")
    medians = {arm: statistics.median(times[arm]) for arm in ARMS}
    for arm, median in medians.items():
        print(f"  {arm:<12} {1e3 * median:7.1f} ms per update {tokens / median:9,.0f} tokens/s")
    best = min(SYNC_SCHEDULES, key=lambda name: medians[name])
    print(f"  the best synchronous schedule here is {best}")
    ratios = {f"{name}_vs_torch": (f"torch {name}", name) for name in SYNC_SCHEDULES}
    ratios |= {"async_vs_1f1b": ("1f1b", "async"), "async_vs_best_sync": (best, "async")}
    ratios |= {"async_vs_bound": ("bound", "async")}
    figures = {}
    for name, (slower, faster) in ratios.items():
        pairs = sorted(a / b for a, b in zip(times[slower], times[faster], strict=True))
        figures[f"{name}_k{microbatches}"] = round(statistics.median(pairs), 3)
        quarter = len(pairs) // 4
        spread = f"half of the repeats within {pairs[quarter]:.3f} .. {pairs[-1 - quarter]:.3f}"
        print(f"  {name}: {figures[f'{name}_k{microbatches}']} ({spread})")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", default="2,4,8", help="numbers of microbatches per update")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--updates", type=int, default=6, help="updates per arm and repeat")
    options = parser.parse_args()
    microbatches = [int(k) for k in options.microbatches.split(",")]
    if options.repeats < 1 or options.updates < 3:
        parser.error("give at least 1 repeat of 3 updates")
    if not all(allows(name, STAGES, k) for name in SYNC_SCHEDULES for k in microbatches):
        parser.error(f"torch does not run all schedules on {STAGES} stages with --microbatches {options.microbatches}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(measure, STAGES, folder, microbatches, options.repeats, options.updates)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(STAGES)]
    print(f"\nP = {STAGES}, {LAYERS} layers of width {WIDTH}, microbatch {MICROBATCH} x {SEQUENCE}")
    figures: dict[str, float] = {}
    for k in microbatches:
        of_ranks = [rank[str(k)] for rank in ranks]
        figures |= report(
            k, {arm: [max(pair) for pair in zip(*(r[arm] for r in of_ranks), strict=True)] for arm in ARMS}
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
