"""The options of a training run that need neither model nor data: checked in one place, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from adapipe.budget import Budget
from adapipe.errors import ConfigurationError
from adapipe.policy import Fixed, Plan, Policy, Slope, parse_plan
from adapipe.training.learning_rate import Schedule, learning_rate_schedule

MODES = ("sync", "async", "adaptive")
PRECISIONS = ("fp32", "bf16")


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
