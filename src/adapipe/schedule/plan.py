"""What to expect of a pipeline before anyone trains on it: speed, staleness and memory of every way to run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from adapipe.errors import ConfigurationError
from adapipe.schedule import laws
from adapipe.schedule.actions import Kind
from adapipe.schedule.cost import CostModel, StageCost
from adapipe.schedule.memory import StageMemory, peak_memory
from adapipe.schedule.synchronous import SYNC_SCHEDULES, pace_of
from adapipe.schedule.timeline import Timeline, asynchronous_timeline, synchronous_timeline

ASYNC = "async"
MODES = (*SYNC_SCHEDULES, ASYNC)
"""Ways to run a pipeline: synchronous schedules, and asynchronously."""

WORTH_A_CHANGE = 0.005
"""Share of the time of an update."""

MOST_MICROBATCHES = 20_000_000
"""Stages times microbatches of an update that can be simulated: a minute or two, and some GB."""


HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run a pipeline. mode: one of MODES. in_flight: microbatches in flight per hop."""

    mode: str
    stages: int
    microbatches: int
    in_flight: int = 1

    @property
    def synchronous(self) -> bool:
        return self.mode != ASYNC

    @property
    def flags(self) -> str:
        """Of `adapipe train`."""
        mode = f"--mode sync --sync-schedule {self.mode}" if self.synchronous else "--mode async"
        flags = f"{mode} --stages {self.stages} --microbatches {self.microbatches}"
        return flags + (f" --in-flight {self.in_flight}" if self.in_flight != 1 else "")

    def timeline(self, cost: CostModel, updates: int) -> Timeline:
        """The first so many updates, without training."""
        if self.synchronous:
            return synchronous_timeline(cost, self.microbatches, updates, self.in_flight, self.mode)
        return asynchronous_timeline(cost, self.microbatches, updates, self.in_flight)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What to expect of a candidate in steady state; lists are by stage.

    bubble: share of the devices' time that is idle, mean over stages. speed_up: over the fastest of `fair_schedules`
    with the same stages, microbatches and in_flight, which is `against`. memory: None if the cost model does not know
    it.
    """

    candidate: Candidate
    seconds_per_update: float
    tokens_per_second: float | None
    speed_up: float
    against: str
    bubble: float
    mean_staleness: list[float]
    most_stale: list[int]
    memory: list[StageMemory] | None
    fits: bool

    @property
    def microbatches_per_second(self) -> float:
        return self.candidate.microbatches / self.seconds_per_update

    @property
    def heaviest(self) -> int:
        """The stage that needs most memory."""
        return int(np.argmax([stage.total for stage in self.memory])) if self.memory else 0


def candidates(
    modes: Sequence[str], stages: Sequence[int], microbatches: Sequence[int], in_flight: Sequence[int]
) -> list[Candidate]:
    """Every combination. Raises ConfigurationError for one that cannot be."""
    for flag, values in (("--stages", stages), ("--microbatches", microbatches), ("--in-flight", in_flight)):
        for value in values:
            if value < 1:
                raise ConfigurationError(f"{flag} {value}: give at least 1")
    if max(stages) * max(microbatches) > MOST_MICROBATCHES:
        raise ConfigurationError(
            f"--stages {max(stages)} with --microbatches {max(microbatches)} is too much to simulate: give a "
            f"product of at most {MOST_MICROBATCHES}"
        )
    for mode in modes:
        if mode not in MODES:
            raise ConfigurationError(f"--modes {mode}: unknown mode, choose of {', '.join(MODES)}")
    return [Candidate(m, p, k, h) for p, k, h, m in product(stages, microbatches, in_flight, modes)]


def fair_schedules(stages: int, microbatches: int, in_flight: int = 1) -> tuple[str, ...]:
    """The synchronous schedules of which no stage holds more microbatches than stage 0 of 1F1B does."""
    most = laws.in_flight_bound(laws.warm_up(0, stages, in_flight))
    return tuple(name for name in ("1f1b", "zb-h1", "gpipe") if name != "gpipe" or microbatches <= most)


def fastest_schedule(cost: CostModel, microbatches: int, in_flight: int = 1) -> tuple[str, dict[str, float]]:
    """The fastest of `fair_schedules` for these costs, and the seconds per update of each. One that is faster by less
    than WORTH_A_CHANGE does not replace an earlier one."""
    steady = replace(cost, jitter=0.0)
    stages = len(cost.stages)
    seconds = {
        name: seconds_per_update(Candidate(name, stages, microbatches, in_flight), steady)
        for name in fair_schedules(stages, microbatches, in_flight)
    }
    best = "1f1b"
    for name, own in seconds.items():
        if own < seconds[best] * (1 - WORTH_A_CHANGE):
            best = name
    return best, seconds


def estimate(
    wanted: Iterable[Candidate], cost_of: Callable[[int], CostModel], device_bytes: float | None
) -> list[Estimate]:
    """What to expect of each candidate. cost_of: number of stages -> its cost model. device_bytes: the memory of a
    device, None for one without limit."""
    seconds: dict[Candidate, float] = {}

    def timed(candidate: Candidate, cost: CostModel) -> float:
        if candidate not in seconds:
            seconds[candidate] = seconds_per_update(candidate, cost)
        return seconds[candidate]

    found = []
    for candidate in wanted:
        cost = cost_of(candidate.stages)
        own = timed(candidate, cost)
        fair = fair_schedules(candidate.stages, candidate.microbatches, candidate.in_flight)
        sync = {name: timed(replace(candidate, mode=name), cost) for name in fair}
        against = min(sync, key=lambda name: sync[name])
        found.append(_estimate(candidate, cost, own, sync[against] / own, against, device_bytes))
    return found


def _estimate(
    candidate: Candidate, cost: CostModel, seconds: float, speed_up: float, against: str, device_bytes: float | None
) -> Estimate:
    stages, microbatches = candidate.stages, candidate.microbatches
    ahead = [0 if candidate.synchronous else laws.warm_up(s, stages, candidate.in_flight) for s in range(stages)]
    busy = sum(_busy_seconds(candidate, stage, own) for stage, own in enumerate(cost.stages))
    memory = None
    if cost.knows_memory:
        schedule = candidate.mode if candidate.synchronous else None
        memory = peak_memory(cost, microbatches, schedule=schedule, in_flight=candidate.in_flight)
    return Estimate(
        candidate,
        seconds_per_update=seconds,
        tokens_per_second=None if cost.tokens is None else cost.tokens * microbatches / seconds,
        speed_up=speed_up,
        against=against,
        bubble=max(0.0, 1 - busy / (stages * seconds)),
        mean_staleness=[laws.mean_staleness(w, microbatches) for w in ahead],
        most_stale=[laws.staleness_bound(w, microbatches) for w in ahead],
        memory=memory,
        fits=memory is None or device_bytes is None or max(stage.total for stage in memory) <= device_bytes,
    )


def _busy_seconds(candidate: Candidate, stage: int, cost: StageCost) -> float:
    """What a stage computes for one update."""
    microbatches, split = candidate.microbatches, 0
    if candidate.synchronous:
        split = pace_of(candidate.mode, stage, candidate.stages, microbatches, candidate.in_flight).splits(microbatches)
    backwards = (microbatches - split) * cost.seconds(Kind.BACKWARD) + split * sum(map(cost.seconds, HALVES))
    return microbatches * cost.seconds(Kind.FORWARD) + backwards + cost.seconds(Kind.UPDATE)


def seconds_per_update(candidate: Candidate, cost: CostModel) -> float:
    """In steady state, from simulated updates; with jitter the mean of more of them."""
    microbatches, in_flight = candidate.microbatches, candidate.in_flight
    least = 20 if cost.jitter else 1
    if candidate.synchronous:
        ends = candidate.timeline(cost, 1 + least).update_ends()[0]
        return float((ends[-1] - ends[0]) / least)
    # The pipeline fills while stage 0 runs ahead, and empties in the same number of microbatches. Where latency rules,
    # the times repeat with the round trips, so the mean is over at least two.
    ahead = laws.warm_up(0, candidate.stages, in_flight)
    edge, measured = -(-(ahead + 1) // microbatches), max(least, -(-2 * (ahead + 1) // microbatches))
    ends = candidate.timeline(cost, 2 * edge + measured).update_ends()[0]
    return float((ends[-1 - edge] - ends[edge - 1]) / (len(ends) - 2 * edge))


def hiding_in_flight(cost: CostModel) -> int:
    """The least number of microbatches in flight per hop with which no stage waits for the links:
    ceil(1 + 2 L / (F+B)) of the slowest hop, L being latency and transmission of one message.

    Whole, because between two stages F(i) and B(i - W) follow each other at fixed times; a hop with one less waits."""
    slowest = max((s.seconds(Kind.FORWARD) + s.seconds(Kind.BACKWARD)) for s in cost.stages)
    hops = [link.latency + cost.message_bytes / link.bandwidth for link in cost.links]
    # What is whole must not be rounded up by an error of the last digit.
    return math.ceil(1 + 2 * max(hops, default=0.0) / slowest - 1e-9)


def recommend(estimates: Sequence[Estimate], device_bytes: float | None) -> tuple[Estimate, str]:
    """The fastest that fits, the lighter one of equals, and the reason. Raises ConfigurationError if none fits."""
    fitting = [e for e in estimates if e.fits]
    if not fitting:
        least = min(estimates, key=lambda e: max(stage.total for stage in e.memory or []))
        assert least.memory is not None
        assert device_bytes is not None
        raise ConfigurationError(
            f"nothing fits into {device_bytes / 1e9:.4g} GB per device: the smallest ({least.candidate.mode}, "
            f"{least.candidate.stages} stages, {least.candidate.microbatches} microbatches) needs "
            f"{least.memory[least.heaviest].total / 1e9:.4g} GB on stage {least.heaviest}; give more stages, smaller "
            "microbatches or larger devices"
        )

    def order(e: Estimate) -> tuple[float, float, float]:
        need = max(stage.total for stage in e.memory) if e.memory else 0
        # Speeds that differ by rounding only are equal.
        return -float(f"{e.microbatches_per_second:.9g}"), max(e.mean_staleness), need

    best = min(fitting, key=order)
    reason = "the most microbatches per second" + (" of those that fit" if len(fitting) < len(estimates) else "")
    if not best.candidate.synchronous and best.speed_up > 1:
        reason += (
            f": {best.speed_up:.2f} times sync ({best.against}) with the same stages. It pays if a stale update is "
            f"worth more than {1 / best.speed_up:.2f} of a fresh one; --mode adaptive finds out"
        )
    return best, reason
