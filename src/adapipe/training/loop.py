"""The training loop: ask the policy, run a stretch of updates, write the lines, evaluate, until the budget is spent.

Every rank runs this loop on the same numbers and so takes the same way through it. What differs by rank is only which
observer gets the lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from adapipe.budget import Budget
from adapipe.engine.pipeline import Pipeline
from adapipe.engine.work import Report, Row, Work
from adapipe.errors import ConfigurationError
from adapipe.policy import Decision, Director
from adapipe.training.learning_rate import Schedule
from adapipe.training.schedule_choice import ScheduleChoice
from adapipe.training.summary import Tally, perplexity

LONGEST_RUN = 500
"""Updates after which a mode is interrupted to write its lines, however rarely it evaluates."""

FIRST_RUN = 5
"""Updates to find out how long one takes, where the budget is in seconds."""


def _finite(value: float) -> float | None:
    """For a line: JSON has no NaN, and a replay must see what the policy saw."""
    return float(value) if math.isfinite(value) else None


class Observer(Protocol):
    """Gets what happens, as it happens."""

    def line(self, line: dict[str, Any]) -> None:
        """A line for metrics.jsonl."""

    def decided(self, update: int, seconds: float, decision: Decision) -> None:
        """The policy has decided, after so many updates and seconds of training clock."""

    def message(self, text: str) -> None:
        """Something to know that is neither a line nor a decision."""

    def progress(
        self, *, update: int, fraction: float, seconds: float, mode: str, loss: float | None, tally: Tally
    ) -> None:
        """Stage 0 has made an update (only on the rank that runs stage 0)."""


class HeldOut(Protocol):
    """What evaluation runs on: microbatches of (inputs, targets), the same every time."""

    def __len__(self) -> int: ...

    def __getitem__(self, microbatch: int, /) -> tuple[torch.Tensor, Any]: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop needs to know.

    choice: of the synchronous schedule; None: the pipeline keeps the one it has.
    evaluate_every: updates between evaluations.
    interrupted: asked on stage 0; once true the run ends after the update in progress.
    """

    budget: Budget
    schedule: Schedule
    microbatches: int
    evaluate_every: int
    held_out: HeldOut | None
    target_perplexity: float | None
    interrupted: Callable[[], bool]
    choice: ScheduleChoice | None = None


class Loop:
    """One training run."""

    def __init__(self, pipeline: Pipeline, director: Director, settings: Settings, observer: Observer) -> None:
        self._pipeline = pipeline
        self._director = director
        self._settings = settings
        self._observer = observer
        self._seconds_per_update: dict[str, float] = {}
        self._last_evaluation: int | None = None
        self.tally = Tally(settings.target_perplexity)

    def run(self) -> Tally:
        tally, budget = self.tally, self._settings.budget
        decision = self._decide()
        self._evaluate(decision.mode)
        stopped = tally.reached_target
        while not stopped:
            report = self._train(decision)
            if self._evaluation_due(decision):
                self._evaluate(decision.mode)
            stopped = report.stopped or tally.reached_target or budget.spent(tally.updates, tally.seconds)
            if not stopped:
                decision = self._decide()
        self._evaluate(decision.mode)
        return tally

    def _decide(self) -> Decision:
        before = self._director.decision.mode
        fresh = self._director.due
        decision = self._director.decide()
        if fresh:
            self._observer.decided(self.tally.updates, self.tally.seconds, decision)
        if decision.mode != before:
            self._pipeline.begin_phase()
        return decision

    def _train(self, decision: Decision) -> Report:
        """One uninterrupted stretch of updates: to the next evaluation, decision, or the end of the budget."""
        tally, settings, mode = self.tally, self._settings, decision.mode
        estimate = self._seconds_per_update.get(mode) or next(iter(self._seconds_per_update.values()), None)
        limits = [LONGEST_RUN, settings.evaluate_every - tally.updates % settings.evaluate_every]
        if self._director.updates_left is not None:
            limits.append(self._director.updates_left)
        if estimate is not None or settings.budget.updates is not None:
            limits.append(settings.budget.updates_left(tally.updates, tally.seconds, estimate or math.inf))
        else:
            limits.append(FIRST_RUN)
        choice = settings.choice if mode == "sync" else None
        if choice is not None:
            self._pipeline.schedule = choice.schedule
            limits += [choice.updates_left] if choice.updates_left is not None else []
        updates = min(limits)
        # Before the first update has been timed, any guess is good enough that is not a learning rate of 0.
        guess = (settings.budget.seconds or 0.0) / 1000
        rate_factor = self._rates(tally.updates, tally.seconds, estimate or guess)
        clock = self._pipeline.clock
        started = clock.now()

        def should_stop() -> bool:
            used = tally.seconds + clock.now() - started
            return settings.interrupted() or (settings.budget.seconds is not None and used >= settings.budget.seconds)

        def on_update(done: int, loss: tuple[int, float] | None) -> None:
            used = tally.seconds + clock.now() - started
            fraction = settings.budget.fraction(done, used)
            self._observer.progress(
                update=done,
                fraction=fraction,
                seconds=used,
                mode=mode,
                loss=loss[1] if loss else None,
                tally=tally,
            )

        report = self._pipeline.run(
            Work(
                first_update=tally.updates,
                updates=updates,
                flush_every=1 if mode == "sync" else updates,
                rate_factor=rate_factor,
                should_stop=should_stop,
                on_update=on_update,
            )
        )
        seconds = float(report.field("seconds")[0].sum())
        self._seconds_per_update[mode] = seconds / report.updates
        self._write(report, mode)
        if choice is not None and choice.updates_left is not None:
            choice.observe(report.updates, self._pipeline.last_run() if choice.measuring else None)
            if choice.reason is not None:
                self._observer.message(f"update {self.tally.updates}: {choice.reason}")
        return report

    def _rates(self, first: int, seconds: float, seconds_per_update: float) -> Callable[[int], float]:
        """Learning-rate factor by update, the same on every stage: by the budget used when the update will be done."""
        settings = self._settings

        def factor(update: int) -> float:
            ahead = update + 1 - first
            return settings.schedule(settings.budget.fraction(update + 1, seconds + ahead * seconds_per_update))

        return factor

    def _write(self, report: Report, mode: str) -> None:
        """One line per update."""
        fields = {name: report.field(name) for name in Row._fields}
        # A stage without parameters has no learning rate, and reports NaN.
        rates = np.fmax.reduce(fields["learning_rate"], axis=0)
        for k in range(report.updates):
            update = int(fields["update"][0, k])
            skipped = [s for s, flag in enumerate(fields["skipped"][:, k]) if flag]
            norm = math.sqrt(fields["squared_norm"][:, k].sum())
            waited, spent = fields["waited"][:, k], fields["seconds"][:, k]
            line = {
                "update": update + 1,
                "mode": mode,
                "microbatches": self._settings.microbatches,
                "tokens": self.tally.tokens + int(fields["tokens"][-1, k]),
                "training_seconds": self.tally.seconds + float(spent[0]),
                "loss": float(fields["loss"][-1, k]),
                "gradient_norm": _finite(norm),
                "clip_norm": [_finite(value) for value in fields["clip_norm"][:, k]],
                "learning_rate": _finite(rates[k]),
                "staleness": fields["mean_staleness"][:, k].tolist(),
                "idle_share": np.divide(waited, spent, out=np.zeros_like(waited), where=spent > 0).tolist(),
                "skipped_stages": skipped,
                "flushed": mode == "sync" or k == report.updates - 1,
            }
            self._emit(line)

    def _evaluation_due(self, decision: Decision) -> bool:
        ended = decision.evaluate and self._director.due
        return ended or self.tally.updates % self._settings.evaluate_every == 0

    def _evaluate(self, mode: str) -> None:
        """Measure the held-out loss, unless this state has been measured. The training clock stands still."""
        held_out = self._settings.held_out
        if held_out is None or self._last_evaluation == self.tally.updates:
            return
        started = self._pipeline.clock.now()
        total, tokens = self._pipeline.evaluate(held_out.__getitem__, len(held_out))
        if tokens < 1:
            raise ConfigurationError("held_out holds no token to evaluate on: give microbatches with some")
        loss = total / tokens
        self._last_evaluation = self.tally.updates
        self._emit(
            {
                "update": self.tally.updates,
                "mode": mode,
                "training_seconds": self.tally.seconds,
                "held_out_loss": _finite(loss),
                "held_out_perplexity": _finite(perplexity(loss)),
                "evaluation_seconds": self._pipeline.clock.now() - started,
            }
        )

    def _emit(self, line: dict[str, Any]) -> None:
        self.tally.add(line)
        self._director.observe(line)
        self._observer.line(line)
