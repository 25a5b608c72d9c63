"""`train`: any list of blocks through a pipeline, in any mode. The front door of the library."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adapipe.engine.bulletin import Bulletin
from adapipe.engine.clock import Clock, WallClock
from adapipe.engine.memory import MemoryUse, MeteredStage
from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.stage import Loss, OptimizerFactory, Stage
from adapipe.engine.transport import Transport
from adapipe.engine.transport.distributed import DistributedTransport
from adapipe.engine.work import Batches
from adapipe.engine.world import World, launched_world_size
from adapipe.errors import ConfigurationError, PeerFailure
from adapipe.models.partition import partition
from adapipe.models.stages import block_costs, stage_module
from adapipe.policy import Decision, Director
from adapipe.policy.base import is_evaluation
from adapipe.reports.folder import RunFolder
from adapipe.reports.progress import Progress, make_progress
from adapipe.schedule import check_segment, check_synchronous, laws
from adapipe.schedule.buffers import enough_for, segment_buffers
from adapipe.schedule.cost import CostModel
from adapipe.schedule.plan import fastest_schedule
from adapipe.schedule.timeline import Timeline
from adapipe.training.loop import HeldOut, Loop, Settings
from adapipe.training.options import Options
from adapipe.training.schedule_choice import ScheduleChoice, because
from adapipe.training.summary import Tally

IGNORED_TARGET = -100
"""Targets with this value are not counted as tokens: the `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run ended with.

    summary: as in summary.json, the same on every rank apart from `evaluation_seconds`. modules: the trained stages of
    this process, whose parameters carry the names of the whole model, "INDEX OF BLOCK.NAME IN BLOCK". timeline: of the
    updates that were asked for; None if none were, or if the run ended before them. memory: of every stage, if it was
    measured.
    """

    summary: dict[str, Any]
    modules: list[nn.Module]
    timeline: Timeline | None
    memory: list[MemoryUse] | None


def count_tokens(targets: Any) -> int:
    """Tokens that the loss sums over: the elements of `targets`, in integer ones without padding (IGNORED_TARGET)."""
    if not isinstance(targets, torch.Tensor):
        raise ConfigurationError(
            f"targets are {type(targets).__name__}, not a tensor: give `count`, a function from targets to their number"
        )
    if targets.is_floating_point():
        return targets.numel()
    return int((targets != IGNORED_TARGET).sum())


def train(
    blocks: Sequence[nn.Module],
    *,
    loss: Loss,
    batches: Batches,
    optimizer: OptimizerFactory,
    mode: str = "adaptive",
    plan: str | None = None,
    stages: int | None = None,
    microbatches: int = 4,
    updates: int | None = None,
    seconds: float | None = None,
    warmup: float = 0.05,
    decay: str = "cosine",
    clip: float | None = 1.0,
    held_out: HeldOut | None = None,
    evaluate_every: int = 50,
    target_perplexity: float | None = None,
    count: Callable[[Any], int] = count_tokens,
    costs: Sequence[float] | None = None,
    materialise: Callable[[nn.Module], None] | None = None,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    in_flight: int = 1,
    sync_schedule: str = "auto",
    trial_updates: int = 4,
    emulate: CostModel | None = None,
    timeline: range | None = None,
    measure_memory: bool = False,
    check_versions: bool = False,
    seed: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    config: str | None = None,
    progress: bool = True,
    interrupted: Callable[[], bool] = lambda: False,
) -> Result:
    """Train `blocks`, applied one after the other, as a pipeline.

    Under torchrun every rank is one stage; every rank calls this with the same arguments. Without it, all stages run in
    this process, one after the other: good for trying things out.

    blocks: modules from one tensor to one tensor. They may lie on the meta device; then `materialise` fills the
        stage that this rank keeps. loss: (output, targets) -> scalar, **summed** over tokens.
    batches: number of a microbatch -> (inputs, targets). optimizer: parameters of a stage -> torch.optim optimizer.
    mode: "sync", "async" or "adaptive"; plan: instead of it, phases such as "sync:200,async:600".
    stages: P; under torchrun it is the number of ranks. microbatches: K, accumulated into one update.
    updates or seconds: the budget; seconds are of the training clock, which leaves evaluation out.
    warmup: share of the budget over which the learning rate rises to the optimizer's own; decay: "cosine", "linear" or
        "constant" for the rest. clip: limit of the global gradient norm, None for none.
    held_out: list of microbatches to evaluate on; needed by "adaptive". evaluate_every: updates between evaluations.
    target_perplexity: stop when exp(held-out loss per token) is this low.
    count: targets -> number of tokens that the loss sums over. costs: of every block, to balance the stages by.
    in_flight: microbatches in flight per hop between a stage and the last one. 1 is 1F1B; more hides the latency of
        slow links, at the price of memory and, in async, of staleness.
    sync_schedule: how the microbatches of a synchronous update go through the pipeline: "gpipe", "1f1b", "zb-h1", a CSV
        file, or "auto", the fastest of them for the costs that the first synchronous updates show (`trial_updates` of
        each). What is learned does not depend on it.
    emulate: run all stages in this process on virtual devices that take the times of this cost model: the numbers are
        those of a real run, the clock of budgets, policy, metrics and pictures is virtual.
    timeline: updates (from 0) to draw as timeline.png into `out`: every action of every stage.
    measure_memory: count the bytes of the live tensors of every stage after every action (slow).
    check_versions: verify at every backward that nothing wrote to the weights it needs (slow; for debugging).
    seed: only noted in the summary. out: folder to write the run to. config: text for its config.toml.
    interrupted: asked on stage 0 while it trains; once true, the run ends with the update in progress.

    Raises ConfigurationError for arguments that cannot work, StageFailure when a stage fails, PeerFailure when
    another rank does.
    """
    options = Options(
        mode=mode,
        plan=plan,
        microbatches=microbatches,
        updates=updates,
        seconds=seconds,
        warmup=warmup,
        decay=decay,
        clip=clip,
        evaluate_every=evaluate_every,
        target_perplexity=target_perplexity,
        precision=precision,
        in_flight=in_flight,
        sync_schedule=sync_schedule,
    )
    if held_out is not None and len(held_out) == 0:
        raise ConfigurationError("held_out is empty: give at least one microbatch, or None")
    if options.needs_held_out and held_out is None:
        raise ConfigurationError('mode "adaptive" compares held-out losses: give `held_out` microbatches')
    if target_perplexity is not None and held_out is None:
        raise ConfigurationError("target_perplexity is of the held-out loss: give `held_out` microbatches")
    if costs is not None and len(costs) != len(blocks):
        raise ConfigurationError(f"costs are {len(costs)} for {len(blocks)} blocks: give one for each")
    size = number_of_stages(stages)
    if emulate is not None:
        if launched_world_size() not in (None, 1):
            raise ConfigurationError("an emulated run has all its stages in one process: start it without torchrun")
        emulate.require(size)
    if timeline is not None and not (0 <= timeline.start < timeline.stop and timeline.step == 1):
        raise ConfigurationError(f"timeline {timeline} names no updates: give a range such as range(100, 104)")
    parts = partition(block_costs(blocks) if costs is None else costs, size)
    _refuse_shared_parameters(blocks, parts)
    if any(isinstance(module, DistributedDataParallel) for block in blocks for module in block.modules()):
        raise ConfigurationError("blocks wrapped in DistributedDataParallel are not supported: pass the bare modules")
    schedules = options.sync_schedules(size)
    chosen = None
    if emulate is not None and len(schedules) > 1:  # the costs are known
        fastest, modelled = fastest_schedule(emulate, microbatches, in_flight)
        schedules, chosen = {fastest: schedules[fastest]}, because(fastest, modelled)
    needs = [check_synchronous(schedule, in_flight)[1] for schedule in schedules.values()]
    buffers = enough_for(segment_buffers(size, in_flight), *needs)
    choice = ScheduleChoice(
        schedules, in_flight=in_flight, measured=trial_updates, links=launched_world_size() not in (None, 1)
    )
    for segment in (1, 2 + laws.staleness_bound(laws.warm_up(0, size, in_flight), microbatches)):
        check_segment(size, microbatches, segment, in_flight=in_flight)

    device = torch.device(device)
    world = World.join(device) if launched_world_size() not in (None, 1) else None
    rank = world.rank if world else 0
    try:

        def build(index: int, transport: Transport, clock: Clock) -> Runtime:
            module = stage_module(blocks, parts[index])
            if materialise is not None:
                materialise(module)
            stage = (MeteredStage if measure_memory else Stage)(
                module.to(device),
                index,
                size,
                loss=loss if index == size - 1 else None,
                optimizer=optimizer,
                device=device,
                autocast=torch.bfloat16 if precision == "bf16" else None,
                check_versions=check_versions,
            )
            return Runtime(
                stage,
                transport,
                clock,
                batches,
                microbatches=microbatches,
                clip=clip,
                count=count,
                rank=rank,
                in_flight=in_flight,
                schedule=choice.schedule,
                keep=timeline or range(0),
            )

        if world is None:
            pipeline = in_process_pipeline(size, build, buffers=buffers, emulate=emulate)
        else:
            transport = DistributedTransport(world, Bulletin.length(size), buffers[world.rank])
            pipeline = Pipeline([build(world.rank, transport, WallClock())])
        folder = None
        if out is not None and rank == 0:
            folder = RunFolder(Path(out), overwrite=overwrite, config=config, cost=emulate)
        observer = _Observer(folder, make_progress(progress and rank == 0), virtual=emulate is not None)
        settings = Settings(
            budget=options.budget,
            schedule=options.schedule(),
            microbatches=microbatches,
            evaluate_every=evaluate_every,
            held_out=held_out,
            target_perplexity=target_perplexity,
            interrupted=interrupted,
            choice=choice,
        )
        observer.start(
            f"{options.name}: {_count(size, 'stage')} (blocks {_spans(parts)}), "
            f"{_count(microbatches, 'microbatch', 'es')} per update"
            + (f"; emulated: times are virtual ({emulate.source})" if emulate else "")
        )
        if chosen is not None:
            observer.message(chosen)
        try:
            tally = Loop(pipeline, Director(options.policy()), settings, observer).run()
        finally:
            observer.stop()
        memory = pipeline.memory() if measure_memory else None
        summary = tally.summary(
            mode=options.name,
            stages=size,
            microbatches=microbatches,
            in_flight=in_flight,
            sync_schedule=pipeline.schedule.name,
            seed=seed,
            clock=pipeline.clock.name,
        )
        if memory is not None:
            summary["peak_memory"] = [asdict(use.peak) for use in memory]
        drawn = pipeline.timeline() if timeline is not None and tally.updates > timeline.start else None
        if folder is not None:
            folder.finish(summary, drawn)
    except PeerFailure:
        assert world is not None
        world.abandon()
        raise
    except BaseException as error:
        if world is not None:
            world.report_failure(str(error) or f"rank {rank}: {type(error).__name__}")
            world.abandon()
        raise
    if world is not None:
        world.close()
    return Result(summary, [runtime.stage.module for runtime in pipeline.runtimes], drawn, memory)


def number_of_stages(stages: int | None) -> int:
    """P, from the argument and the ranks that a launcher has started."""
    launched = launched_world_size()
    if launched is not None and stages is not None and stages != launched:
        raise ConfigurationError(
            f"--stages {stages}, but the launcher started {launched} ranks: every rank is one stage, so start {stages} "
            f"ranks (torchrun --nproc-per-node) or give --stages {launched}"
        )
    return launched or (1 if stages is None else stages)


def _refuse_shared_parameters(blocks: Sequence[nn.Module], parts: Sequence[range]) -> None:
    """Tied weights on two stages would drift apart silently."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for block in part:
            for name, parameter in blocks[block].named_parameters():
                first = owner.setdefault(id(parameter), (stage, f"{block}.{name}"))
                if first[0] != stage:
                    raise ConfigurationError(
                        f"{block}.{name} on stage {stage} is the same parameter as {first[1]} on stage {first[0]}: "
                        "weights tied across stages are not supported; untie them, or use fewer stages"
                    )


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _spans(parts: Sequence[range]) -> str:
    return " | ".join(f"{part.start}-{part.stop - 1}" if len(part) > 1 else str(part.start) for part in parts)


class _Observer:
    """Passes what happens on to the folder and the display."""

    def __init__(self, folder: RunFolder | None, progress: Progress, *, virtual: bool) -> None:
        self._virtual = virtual
        self._started = time.monotonic()
        self._folder = folder
        self._progress = progress
        self._mode: str | None = None

    def start(self, header: str) -> None:
        self._started = time.monotonic()
        self._progress.start(header)

    def stop(self) -> None:
        self._progress.stop()

    def line(self, line: dict[str, Any]) -> None:
        if self._folder is not None:
            self._folder.line(line)
        if is_evaluation(line):
            self._progress.evaluation(
                update=line["update"],
                mode=line["mode"],
                perplexity=line["held_out_perplexity"],
                training_seconds=line["training_seconds"],
            )
        elif line["skipped_stages"]:
            self._progress.message(
                f"update {line['update']}: stages {line['skipped_stages']} skipped it, their gradient was not finite"
            )

    def message(self, text: str) -> None:
        self._progress.message(text)

    def decided(self, update: int, seconds: float, decision: Decision) -> None:
        if self._folder is not None:
            self._folder.decided(update, seconds, decision)
        if decision.mode != self._mode:
            self._mode = decision.mode
            self._progress.message(f"update {update}: {decision.mode} ({decision.reason})")

    def progress(
        self, *, update: int, fraction: float, seconds: float, mode: str, loss: float | None, tally: Tally
    ) -> None:
        # Who watches an emulated run waits in real time.
        spent = time.monotonic() - self._started if self._virtual else seconds
        self._progress.update(
            update=update,
            fraction=fraction,
            mode=mode,
            loss=loss,
            tokens_per_second=tally.tokens_per_second(mode),
            idle_share=tally.idle_share(mode),
            seconds_left=spent * (1 - fraction) / fraction if spent > 1 and fraction > 0 else None,
        )
