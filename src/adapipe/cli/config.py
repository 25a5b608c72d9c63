"""The configuration of `adapipe train`: one flat dataclass, read from flags and TOML, written back as TOML."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from adapipe.errors import ConfigurationError

T = TypeVar("T")

DEFAULT_UPDATES = 1500


def choices(*names: str) -> Any:
    """Shown in --help. Checked by us, so that flags and files give the same message."""
    return tyro.conf.arg(metavar="{" + ",".join(names) + "}")


@dataclass(frozen=True)
class RunOptions:
    """How to train."""

    config: Path | None = None
    """TOML file with any of these options, named with underscores; flags on the command line win."""
    mode: Annotated[str, choices("sync", "async", "adaptive")] = "adaptive"
    """sync: the pipeline runs empty at every update. async: it never does, and gradients are stale. adaptive:
    measures both and runs the one that makes more progress per second."""
    plan: str | None = None
    """Phases of given lengths instead of a mode, such as "sync:200,async:600"."""
    microbatches: int = 4
    """Microbatches per update."""
    in_flight: int = 1
    """Microbatches in flight per hop between a stage and the last one. 1 is 1F1B; more hides the latency of slow
    links, at the price of memory and, in async, of staleness."""
    sync_schedule: str = "auto"
    """Order of a synchronous update: gpipe, 1f1b, zb-h1, a CSV file, or auto, the fastest for the measured costs."""
    updates: int | None = None
    """Budget in updates; 1500 if no budget is given."""
    seconds: float | None = None
    """Budget in seconds of training clock (evaluation does not count), instead of updates."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup: float = 0.05
    """Share of the budget over which the learning rate rises."""
    decay: Annotated[str, choices("cosine", "linear", "constant")] = "cosine"
    """Shape of the learning rate after the warm-up; cosine and linear end at a tenth of the peak."""
    clip: float = 1.0
    """Limit of the global gradient norm; 0 for no clipping."""
    data: Path | None = None
    """Text file, or folder of files, read as bytes. Default: the source of Python's standard library."""
    evaluate_every: int = 50
    """Updates between evaluations on the held-out tenth of the data."""
    evaluation_microbatches: int = 16
    """Held-out microbatches per evaluation, the same ones every time."""
    target_perplexity: float | None = None
    """Stop when the held-out perplexity is this low."""
    out: Path | None = None
    """Folder for the run. Default: runs/DATE-TIME."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    measure_memory: bool = False
    """Count the bytes of the live tensors of every stage after every action, and note the peaks in the summary.
    Slow."""
    timeline: str | None = None
    """Draw these updates as timeline.png, such as "100:104": every action of every stage."""


@dataclass(frozen=True)
class ModelOptions:
    """The model, its microbatches and its stages."""

    stages: int = 2
    """Stages of the pipeline, one process each."""
    microbatch_size: int = 4
    """Sequences per microbatch."""
    sequence_length: int = 128
    """Tokens per sequence."""
    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide the width."""
    positions: Annotated[str, choices("rotary", "learned")] = "rotary"
    """How the model knows positions."""
    max_positions: int | None = None
    """Positions that the model has room for. Default: the sequence length."""
    optimizer: Annotated[str, choices("adamw", "sgd")] = "adamw"
    """adamw: betas 0.9 and 0.95, weight decay 0.1. sgd: momentum 0.9."""
    precision: Annotated[str, choices("fp32", "bf16")] = "fp32"
    """bf16: matrix products in bfloat16, weights in float32."""
    device: Annotated[str, choices("cpu", "cuda")] = "cpu"
    """Where the stages run; cuda takes one GPU per stage."""
    seed: int = 0
    """Of the weights, of the order of the data, and of an emulation's jitter."""


@dataclass(frozen=True)
class CostOptions:
    """Devices and links that are modelled: a cost file, or equal stages."""

    cost: Path | None = None
    """Cost model (TOML), as `adapipe profile` writes it, or typed by hand."""
    forward_ms: float | None = None
    """Without a cost file: milliseconds of a forward of one microbatch, on every stage. Default: 10."""
    backward_ms: float | None = None
    """Milliseconds of a backward. Default: twice a forward."""
    update_ms: float | None = None
    """Milliseconds of an update. Default: 0."""
    latency_ms: float | None = None
    """Milliseconds that a message is on its way to the next stage. Default: 0."""
    bandwidth_gbit: float | None = None
    """Gigabits per second of every link, each way. Default: no limit."""
    jitter: float | None = None
    """Standard deviation of the logarithm of a random factor on every action. Default: 0."""


@dataclass(frozen=True)
class TrainConfig(CostOptions, ModelOptions, RunOptions):
    """Train a language model through a pipeline of stages.

    Starts its own processes on this machine, one per stage. Under torchrun it uses the ranks that it is given: one
    stage per rank, several machines included. With --emulate all stages run in this process, on modelled devices.
    """

    emulate: bool = False
    """Run all stages in this process, each on a virtual device: what is learned is exact, time is modelled by the
    options above."""

    @property
    def budget_updates(self) -> int | None:
        """The budget in updates: the one given, or the default if there is no other."""
        return DEFAULT_UPDATES if self.updates is None and self.seconds is None else self.updates


def parse_config(arguments: list[str]) -> TrainConfig:
    """The configuration from a command line. Exits for --help; raises ConfigurationError for a bad file."""
    defaults = TrainConfig()
    path = _config_path(arguments)
    if path is not None:
        defaults = read_toml(path)
        # A budget on the command line replaces the other kind of budget in the file.
        given = {argument.split("=")[0] for argument in arguments}
        if "--seconds" in given and "--updates" not in given:
            defaults = replace(defaults, updates=None)
        if "--updates" in given and "--seconds" not in given:
            defaults = replace(defaults, seconds=None)
    return tyro.cli(TrainConfig, prog="adapipe train", args=arguments, default=defaults)


def parse_flags(kind: type[T], command: str, arguments: Sequence[str]) -> T:
    """The options of a command without a configuration file. Exits for --help and for flags that do not exist."""
    return tyro.cli(kind, prog=command, args=list(arguments))


def _config_path(arguments: list[str]) -> Path | None:
    """The value of the last --config: it is needed before the flags can be parsed on top of the file."""
    path = None
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            path = Path(arguments[index + 1])
        elif argument.startswith("--config="):
            path = Path(argument.removeprefix("--config="))
    return path


def read_toml(path: Path) -> TrainConfig:
    """The configuration in a TOML file; options that it does not name keep their defaults."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read ({error.strerror}): check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} is not TOML: {error}") from None
    hints = typing.get_type_hints(TrainConfig)
    known = {field.name for field in fields(TrainConfig)} - {"config"}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise ConfigurationError(f"--config {path}: there is no option {name}; {advice}")
        parsed[name] = _convert(path, name, value, hints[name])
    return replace(TrainConfig(), **parsed)


def _convert(path: Path, name: str, value: Any, hint: Any) -> Any:
    """A TOML value as the type of its option."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ConfigurationError(f"--config {path}: {name} = {value!r} must be of type {wanted}")
    return value


def to_toml(config: TrainConfig) -> str:
    """The whole configuration, for `read_toml`. Options without a value are comments: TOML has no null."""
    lines = ["# Run it again: adapipe train --config THIS_FILE --out ANOTHER_FOLDER"]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name != "config":
            lines.append(f"# {field.name} is not set" if value is None else f"{field.name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def write_toml(path: Path, config: TrainConfig) -> None:
    path.write_text(to_toml(config), encoding="utf-8", errors="surrogateescape")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML basic string as long as nothing is escaped as a surrogate pair.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
