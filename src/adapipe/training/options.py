"""The options of a training run that need neither model nor data: checked in one place, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapipe.budget import Budget
from adapipe.errors import ConfigurationError, ScheduleError
from adapipe.policy import Fixed, Plan, Policy, Slope, parse_plan
from adapipe.schedule import SYNC_SCHEDULES, SyncSchedule, check_synchronous, sync_schedule
from adapipe.schedule.csv_file import read_schedule
from adapipe.schedule.plan import fair_schedules
from adapipe.training.learning_rate import Schedule, learning_rate_schedule

MODES = ("sync", "async", "adaptive")
PRECISIONS = ("fp32", "bf16")
AUTO = "auto"
"""The fastest synchronous schedule for the measured costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `adapipe.train` for the meanings. Raises ConfigurationError, one line naming the flag, for values that cannot
    work."""

    mode: str
    plan: str | None
    microbatches: int
    updates: int | None
    seconds: float | None
    warmup: float
    decay: str
    clip: float | None
    evaluate_every: int
    target_perplexity: float | None
    precision: str
    in_flight: int
    sync_schedule: str

    def __post_init__(self) -> None:
        _choice("mode", self.mode, MODES)
        _choice("precision", self.precision, PRECISIONS)
        if self.microbatches < 1:
            raise ConfigurationError(f"--microbatches {self.microbatches}: an update needs at least 1")
        if self.evaluate_every < 1:
            raise ConfigurationError(f"--evaluate-every {self.evaluate_every}: give at least 1 update")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigurationError(f"--clip {self.clip:g}: give a norm above 0")
        if self.target_perplexity is not None and not self.target_perplexity >= 1:
            raise ConfigurationError(
                f"--target-perplexity {self.target_perplexity:g}: give at least 1, better than which no model can be"
            )
        if self.in_flight < 1:
            raise ConfigurationError(f"--in-flight {self.in_flight}: give at least 1 microbatch per hop")
        if self.sync_schedule not in (AUTO, *SYNC_SCHEDULES) and not self.sync_schedule.endswith(".csv"):
            raise ConfigurationError(
                f"--sync-schedule {self.sync_schedule}: unknown schedule, choose one of {AUTO}, "
                f"{', '.join(SYNC_SCHEDULES)}, or give a file.csv"
            )
        # Making them checks what they are made of.
        _ = self.budget, self.policy(), self.schedule()

    @property
    def name(self) -> str:
        """What the run is called in its summary."""
        return self.mode if self.plan is None else "plan"

    @property
    def needs_held_out(self) -> bool:
        return self.plan is None and self.mode == "adaptive"

    @property
    def budget(self) -> Budget:
        return Budget(self.updates, self.seconds)

    def sync_schedules(self, stages: int) -> dict[str, SyncSchedule]:
        """The synchronous schedules that may run, by name: the one that was asked for, or those that the fastest is
        chosen of. Raises ConfigurationError for one that cannot run."""
        names: tuple[str, ...] = (self.sync_schedule,)
        if self.sync_schedule == AUTO:
            names = fair_schedules(stages, self.microbatches, self.in_flight) if stages > 1 else ("1f1b",)
        elif self.sync_schedule not in SYNC_SCHEDULES:
            return {self.sync_schedule: self._from_file(stages)}
        return {name: sync_schedule(name, stages, self.microbatches, self.in_flight) for name in names}

    def _from_file(self, stages: int) -> SyncSchedule:
        try:
            schedule = read_schedule(Path(self.sync_schedule))
            for flag, wanted, found in (
                ("--stages", stages, schedule.stages),
                ("--microbatches", self.microbatches, schedule.microbatches),
            ):
                if wanted != found:
                    raise ScheduleError(f"schedule file {self.sync_schedule} is for {flag} {found}, not {wanted}")
            check_synchronous(schedule, self.in_flight)
        except ScheduleError as error:
            raise ConfigurationError(f"--sync-schedule: {error}") from None
        return schedule

    def policy(self) -> Policy:
        """A fresh policy."""
        if self.plan is not None:
            return Plan(parse_plan(self.plan))
        if self.mode == "adaptive":
            return Slope(self.budget, warmup=self.warmup)
        return Fixed("sync" if self.mode == "sync" else "async")

    def schedule(self) -> Schedule:
        return learning_rate_schedule(self.warmup, self.decay)


def parse_timeline(text: str) -> range:
    """The updates, counted from 0, in a text such as "100:104" (the end is left out)."""
    first, colon, end = text.partition(":")
    # isascii, because isdigit alone takes superscripts.
    if not (colon and all(part.isascii() and part.isdigit() for part in (first, end)) and int(first) < int(end)):
        raise ConfigurationError(f'--timeline {text!r}: give the first update and the one after the last, as "100:104"')
    return range(int(first), int(end))


def _choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(f"--{flag} {value}: unknown {flag}, choose one of {', '.join(known)}")
