"""What a run leaves behind as numbers: metrics.jsonl, one JSON object per line, and whole JSON files.

metrics.jsonl has two kinds of line, told apart by `held_out_loss`. training_seconds are of the
training clock, which stands still during evaluation; losses are in nats per token; staleness is in updates.

One line after every update:

    update            int           updates done so far, from 1
    mode              str           "sync" or "async"
    microbatches      int           K of this update
    tokens            int           trained on so far
    training_seconds  float         so far
    loss              float         mean per token over the update
    gradient_norm     float | null  global norm before clipping
    clip_norm         [float]       the global norm that each stage clipped by: in async its own is exact, the others'
                                    are the latest known
    learning_rate     float
    staleness         [float]       mean over the update, one per stage
    idle_share        [float]       0..1, one per stage
    skipped_stages    [int]         stages that skipped this update because their gradient was not finite
    flushed           bool          the pipeline ran empty after this update: in sync always, else where a segment ends

One line after every evaluation:

    update               int    updates done so far; 0 is before training
    mode                 str    the mode that led here
    training_seconds     float  so far
    held_out_loss        float  mean per token
    held_out_perplexity  float  exp(held_out_loss)
    evaluation_seconds   float  what this evaluation took, outside the training clock

A number that is not finite is written as null: JSON has no NaN, and a strict reader would refuse the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from adapipe.errors import AdaPipeError

Record = dict[str, Any]


class MetricsWriter:
    """Appends records to a metrics.jsonl, each handed to the system before `write` returns.

    A crash of the process loses at most the line being written, and `read_metrics` ignores such a remnant. A
    writer that opens a file with a remnant removes it, so that what follows does not run into it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by close()
        _drop_remnant(self._file)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Raises AdaPipeError when the record holds something that JSON cannot."""
        line = _dumps(record, what=f"a line of {self.path}") + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a metrics.jsonl, in order.

    A last line without its newline is what a crash leaves, and is ignored when it does not parse. Any other line
    that is not a JSON object raises AdaPipeError with its number.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AdaPipeError(f"cannot read {path}: {error.strerror}") from error
    *complete, remnant = content.split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(complete, start=1):
        try:
            records.append(_parse_line(line))
        except ValueError as error:
            raise AdaPipeError(
                f"{path}, line {number}: not a metrics record ({error}); remove or repair the line"
            ) from error
    with contextlib.suppress(ValueError):
        records.append(_parse_line(remnant))
    return records


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` as indented strict JSON, whole or not at all: readers see the old file or the new one.

    NaN and infinities become null. Raises AdaPipeError, and leaves the old file, when `data` holds something
    that JSON cannot.
    """
    path = Path(path)
    text = _dumps(data, what=str(path), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _dumps(data: Any, *, what: str, indent: int | None = None) -> str:
    try:
        return json.dumps(_strict(data), allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise AdaPipeError(f"cannot write {what} as JSON: {error}") from error


def _strict(value: Any) -> Any:
    """The same data in the types of JSON: numpy's as Python's, tuples as lists, what is not finite as None."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def _parse_line(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object was expected, not {type(record).__name__}")
    return record


def _drop_remnant(file: BinaryIO) -> None:
    """Cut what follows the last newline of a file opened for appending, or complete it if it is a record."""
    file.seek(0)
    content = file.read()
    remnant = content[content.rfind(b"\n") + 1 :]
    if not remnant:
        return
    try:
        _parse_line(remnant)
    except ValueError:
        file.truncate(len(content) - len(remnant))
    else:
        file.write(b"\n")
        file.flush()
