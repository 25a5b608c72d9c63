"""The exceptions of AdaPipe. Every message says what was wrong, where, and what to do."""

from __future__ import annotations


class AdaPipeError(Exception):
    """Base of all errors that AdaPipe raises on purpose."""


class ConfigurationError(AdaPipeError):
    """The user's input cannot work: one line that says what, where, and what to do (exit code 2)."""


class ScheduleError(AdaPipeError):
    """A list of orders is wrong, or cannot be parsed. The message holds the grid with the failing cell marked."""


class EngineError(AdaPipeError):
    """A law of the engine was broken (a slot in use, a version changed in flight): a bug, never the user's input."""


class TransportError(EngineError):
    """The two ends of an edge disagree about what crosses it."""


class StageFailure(AdaPipeError):
    """Something failed inside one action of one stage. `__cause__` is the original exception.

    Attributes: rank, stage, cell (the action as a compact cell, or None outside the schedule), what (one line).
    """

    def __init__(self, what: str, *, rank: int, stage: int, cell: str | None, microbatch: int | None) -> None:
        place = f"rank {rank}, stage {stage}"
        if cell is not None:
            place += f", action {cell}"
        if microbatch is not None:
            place += f", microbatch {microbatch}"
        super().__init__(f"{place}: {what}")
        self.rank, self.stage, self.cell, self.microbatch, self.what = rank, stage, cell, microbatch, what


class PeerFailure(AdaPipeError):
    """Another rank of the pipeline is gone.

    `reported` is true when that rank (or another survivor) has already said why: then nothing more needs printing.
    """

    def __init__(self, message: str, *, reported: bool) -> None:
        super().__init__(message)
        self.reported = reported
