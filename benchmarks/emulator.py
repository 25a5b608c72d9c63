"""The emulator against reality, and what it costs.

    python benchmarks/emulator.py [--repeats 8] [--updates 10] [--part accuracy|cost|latency]

accuracy  Two real processes, one thread each, K in {1, 2, 4, 8}, synchronous and asynchronous; **wall clock**. In
          every repeat a profile is taken (K = 4, half of it synchronous, half asynchronous) and all eight arms run, one
          after the other. An arm's time is the mean of its updates without the first and the last. The error is that of
          the time that the profile of the same repeat predicts; its median over the repeats counts. Beside it stands
          the noise: how far the time of the arm itself is from its median, in the median over the repeats.
cost      **CPU time** of emulating P = 8, K = 8 in one process over training the unsplit model on the same
          microbatches.
latency   **Virtual clock**: an emulated pipeline with links of five forwards, asynchronous throughput over that of
          links without latency, and staleness, by microbatches in flight per hop.

The last line is JSON: median_error and worst_error over the eight arms, the two cost ratios, and the share of the
throughput that the least sufficient number in flight recovers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RankArm, adamw, corpus_batches, run_ranks, stage_of
from torch import nn

from adapipe.engine.clock import Clock
from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Stage
from adapipe.engine.transport import Transport
from adapipe.engine.work import Work
from adapipe.engine.world import World
from adapipe.models.gpt import language_model_loss
from adapipe.models.shape import GPTConfig
from adapipe.profiling import measured_cost
from adapipe.run import count_tokens
from adapipe.schedule.buffers import segment_buffers
from adapipe.schedule.cost import CostModel, LinkCost, cost_toml, equal_stages, read_cost
from adapipe.schedule.plan import Candidate, hiding_in_flight, seconds_per_update

REAL = GPTConfig(layers=4, width=256, heads=4, sequence_length=128)
REAL_MICROBATCH, RANKS, PROFILE_K = 2, 2, 4
MODES = {"sync": "1f1b", "async": "async"}
ARMS = [(microbatches, mode) for microbatches in (1, 2, 4, 8) for mode in ("sync", "async")]

DEEP = GPTConfig(layers=12, width=128, heads=4, sequence_length=128)
DEEP_MICROBATCH, DEEP_STAGES, DEEP_K = 4, 8, 8


# -- accuracy ------------------------------------------------------------------------------------------------------


def measure(rank: int, folder: Path, repeats: int, updates: int) -> None:
    """One rank: a profile and the seconds of every arm in every repeat, written to `folder`."""
    torch.set_num_threads(1)
    world = World.join(torch.device("cpu"), init_method=f"file://{folder / 'rendezvous'}", rank=rank, size=RANKS)
    batches = corpus_batches(REAL, REAL_MICROBATCH)
    arms = {k: RankArm(world, stage_of(REAL, RANKS, rank), batches, k) for k in (1, 2, 4, 8)}
    profiled = RankArm(world, stage_of(REAL, RANKS, rank), batches, PROFILE_K)
    found: list[dict[str, float]] = []
    for repeat in range(-1, repeats):  # the first one warms up
        dist.barrier(group=world.control)
        profile = _profile(profiled, updates)
        seconds = {}
        for microbatches, mode in ARMS if repeat % 2 else reversed(ARMS):
            dist.barrier(group=world.control)
            report = arms[microbatches].run(updates, synchronous=mode == "sync")
            seconds[f"{mode} {microbatches}"] = float(report.field("seconds")[:, 1:-1].mean(1).max())
        if repeat >= 0:
            found.append(seconds)
        if rank == 0 and repeat >= 0:
            (folder / f"profile{repeat}.toml").write_text(cost_toml(profile))
            print(f"repeat {repeat + 1}: " + ", ".join(f"{arm} {1e3 * s:.1f} ms" for arm, s in seconds.items()))
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(found))
    world.close()


def _profile(arm: RankArm, updates: int) -> CostModel:
    """As `adapipe profile` takes it: half synchronous, half asynchronous."""
    arm.runtime.kept.clear()
    arm.runtime.keep = range(arm.done, arm.done + updates)
    arm.run(updates // 2, synchronous=True)
    arm.run(updates - updates // 2, synchronous=False)
    tokens = REAL_MICROBATCH * REAL.sequence_length
    timeline = arm.pipeline.timeline()
    return measured_cost(timeline, links=True, message_bytes=4 * tokens * REAL.width, tokens=tokens, source="measured")


def accuracy(repeats: int, updates: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(measure, RANKS, folder, repeats, updates)
        measured = json.loads((folder / "seconds.json").read_text())
        profiles = [read_cost(folder / f"profile{repeat}.toml") for repeat in range(repeats)]
    print(f"\naccuracy: P = {RANKS} real processes, {REAL.layers} layers of width {REAL.width}; wall clock")
    last = profiles[-1]
    for number, stage in enumerate(last.stages):
        figures = ", ".join(f"{what} {1e3 * getattr(stage, what):.2f} ms" for what in ("forward", "backward", "update"))
        print(f"  the last profile, stage {number}: {figures}; hop {1e3 * last.links[0].latency:.2f} ms")
    errors = []
    for microbatches, mode in ARMS:
        arm = f"{mode} {microbatches}"
        real = [seconds[arm] for seconds in measured]
        predicted = [seconds_per_update(Candidate(MODES[mode], RANKS, microbatches), profile) for profile in profiles]
        error = statistics.median(p / r - 1 for p, r in zip(predicted, real, strict=True))
        middle = statistics.median(real)
        noise = statistics.median(abs(r / middle - 1) for r in real)
        errors.append(abs(error))
        print(f"  {mode:<5} K = {microbatches}: {1e3 * middle:7.1f} ms, predicted {error:+.1%}, noise {noise:.1%}")
    return {"median_error": round(statistics.median(errors), 4), "worst_error": round(max(errors), 4)}


# -- cost ----------------------------------------------------------------------------------------------------------


def _emulated(
    config: GPTConfig, cost: CostModel, microbatch_size: int, microbatches: int, in_flight: int = 1
) -> Pipeline:
    stages = len(cost.stages)
    batches = corpus_batches(config, microbatch_size)

    def build(index: int, transport: Transport, clock: Clock) -> Runtime:
        loss = language_model_loss if index == stages - 1 else None
        stage = Stage(stage_of(config, stages, index), index, stages, loss=loss, optimizer=adamw)
        return Runtime(
            stage,
            transport,
            clock,
            batches,
            microbatches=microbatches,
            clip=1.0,
            count=count_tokens,
            rank=0,
            in_flight=in_flight,
        )

    return in_process_pipeline(stages, build, buffers=segment_buffers(stages, in_flight), emulate=cost)


class Unsplit:
    """The whole model in a plain loop, on the same microbatches."""

    def __init__(self) -> None:
        self._model = stage_of(DEEP, 1, 0)
        self._optimizer = adamw(list(self._model.parameters()))
        self._batches = corpus_batches(DEEP, DEEP_MICROBATCH)

    def run(self, first: int, updates: int) -> None:
        for update in range(first, first + updates):
            for i in range(update * DEEP_K, (update + 1) * DEEP_K):
                inputs, targets = self._batches(i)
                tokens = DEEP_K * targets.numel()
                loss = language_model_loss(self._model(inputs), targets) / tokens
                torch.autograd.backward(loss)
                loss.item()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()


def cost(repeats: int, updates: int) -> dict[str, float]:
    torch.set_num_threads(1)
    virtual = equal_stages(DEEP_STAGES, 0.01, 0.02)
    unsplit = Unsplit()
    pipelines = {mode: _emulated(DEEP, virtual, DEEP_MICROBATCH, DEEP_K) for mode in ("sync", "async")}
    ratios: dict[str, list[float]] = {mode: [] for mode in pipelines}
    for repeat in range(-1, repeats):
        first = (repeat + 1) * updates
        seconds: dict[str, float] = {}
        for arm in ("sync", "unsplit", "async") if repeat % 2 else ("async", "unsplit", "sync"):
            start = time.process_time()
            if arm == "unsplit":
                unsplit.run(first, updates)
            else:
                pipelines[arm].run(Work(first, updates, 1 if arm == "sync" else updates, lambda update: 1.0))
            seconds[arm] = time.process_time() - start
        if repeat >= 0:
            for mode in ratios:
                ratios[mode].append(seconds[mode] / seconds["unsplit"])
            print(f"repeat {repeat + 1}: " + ", ".join(f"{arm} {s:.2f} s" for arm, s in seconds.items()), flush=True)
    print(f"\ncost: emulating P = {DEEP_STAGES}, K = {DEEP_K}, {DEEP.layers} layers of width {DEEP.width}; CPU time")
    for mode, found in ratios.items():
        print(
            f"  {mode:<5} {statistics.median(found):.3f} of the unsplit model's ({min(found):.3f} .. {max(found):.3f})"
        )
    return {f"{mode}_cost_ratio": round(statistics.median(found), 3) for mode, found in ratios.items()}


# -- latency -------------------------------------------------------------------------------------------------------


def latency() -> dict[str, float]:
    """A small model through four stages, four microbatches per update."""
    torch.set_num_threads(1)
    config, stages, microbatches = GPTConfig(layers=4, width=32, heads=2, sequence_length=32), 4, 4
    forward, backward = 0.01, 0.02
    slow = equal_stages(stages, forward, backward, link=LinkCost(5 * forward))
    enough = hiding_in_flight(slow)

    def run(virtual: CostModel, in_flight: int) -> tuple[float, float, float]:
        updates = 12 + 6 * in_flight
        edge = updates // 3
        report = _emulated(config, virtual, 1, microbatches, in_flight).run(Work(0, updates, updates, lambda u: 1.0))
        ended = report.field("ended")[0]
        staleness = report.field("mean_staleness")[0, edge:-edge].mean()
        return (
            (updates - 2 * edge) / float(ended[-edge] - ended[edge]),
            float(staleness),
            float(report.field("loss")[-1, -1]),
        )

    free, staleness, _ = run(equal_stages(stages, forward, backward), 1)
    print(f"\nlatency: P = {stages}, K = {microbatches}, asynchronous, links of five forwards; virtual clock")
    print(f"  no latency, 1 in flight: throughput 1.00, staleness of stage 0: {staleness:.2f} updates")
    share = 0.0
    for in_flight in range(1, enough + 1):
        speed, staleness, _ = run(slow, in_flight)
        share = speed / free
        print(f"  {in_flight} in flight per hop: throughput {share:.2f}, staleness of stage 0: {staleness:.2f} updates")
    return {"latency_hidden": round(share, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--updates", type=int, default=10, help="updates per arm and repeat")
    parser.add_argument("--part", choices=("accuracy", "cost", "latency"), help="only this part")
    options = parser.parse_args()
    if options.repeats < 1 or options.updates < 4:
        parser.error("give at least 1 repeat of 4 updates")
    parts: dict[str, Any] = {
        "accuracy": lambda: accuracy(options.repeats, options.updates),
        "cost": lambda: cost(max(1, options.repeats // 2), max(4, options.updates // 2)),
        "latency": latency,
    }
    figures: dict[str, float] = {}
    for name, part in parts.items():
        if options.part in (None, name):
            figures |= part()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
