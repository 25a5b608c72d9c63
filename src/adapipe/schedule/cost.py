"""The cost model: what every action and every message takes. It turns orders into a timeline.

A stage does one action at a time. An action starts when the stage is free and its message has arrived, and lasts what
the model says. A message leaves when its action ends; the link sends one message after the other at its bandwidth, and
each arrives one latency after it has left. At a synchronous update the norms of all stages go up the pipeline and down
again, a latency per hop.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from adapipe.errors import ConfigurationError
from adapipe.schedule.actions import Kind

FORMAT = 1
"""Of the file. A reader refuses others."""

_MEMORY = ("weight_bytes", "optimizer_bytes", "activation_bytes")


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage needs: seconds, by how much it is slower than that, and bytes if they are known (all three)."""

    forward: float  # of one microbatch
    backward: float  # of one microbatch
    update: float = 0.0  # norm, clipping and optimizer step
    backward_input: float | None = None  # of a backward split in two: the gradient of the stage's input
    backward_weight: float | None = None  # and of its weights
    slow: float = 1.0  # multiplies all of them
    weight_bytes: int | None = None  # parameters; gradients take as much again, and every further version
    optimizer_bytes: int | None = None
    activation_bytes: int | None = None  # kept by one microbatch between its forward and its backward

    def seconds(self, kind: Kind) -> float:
        """What an action of this kind lasts, without jitter. Halves of a backward that are not known are its half."""
        seconds = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.UPDATE: self.update,
            Kind.BACKWARD_INPUT: self.backward / 2 if self.backward_input is None else self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward / 2 if self.backward_weight is None else self.backward_weight,
        }
        return self.slow * seconds[kind]


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Between two neighbouring stages, the same both ways; the ways do not disturb each other."""

    latency: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes per second


@dataclass(frozen=True, slots=True)
class CostModel:
    """Of a pipeline of len(stages) stages.

    message_bytes: size of an activation, and of a gradient, of one microbatch. tokens: of one microbatch, if known.
    jitter: standard deviation of the logarithm of a random factor (of mean 1) on every action; seed: of that.
    source: where the figures come from.

    Raises ConfigurationError, one line naming the entry, for figures that cannot be.
    """

    stages: tuple[StageCost, ...]
    links: tuple[LinkCost, ...]
    message_bytes: int = 0
    tokens: int | None = None
    jitter: float = 0.0
    seed: int = 0
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigurationError("there is no stage: give at least one")
        if len(self.links) != len(self.stages) - 1:
            raise ConfigurationError(
                f"there are {len(self.stages)} stages and {len(self.links)} links: give {len(self.stages) - 1}, one "
                "between each two neighbours"
            )
        for number, stage in enumerate(self.stages):
            self._check_stage(f"stage {number}", stage)
        # A stage may take no time (an embedding), but not all of them.
        if not any(stage.forward + stage.backward for stage in self.stages):
            raise ConfigurationError("forward and backward are 0 on every stage: give times above 0")
        for number, link in enumerate(self.links):
            _not_negative(f"link {number}: latency", link.latency)
            if not link.bandwidth > 0:
                raise ConfigurationError(f"link {number}: bandwidth = {link.bandwidth:g}: give a number above 0")
        for name in ("message_bytes", "jitter", "seed"):
            _not_negative(name, getattr(self, name))
        if self.tokens is not None and self.tokens < 1:
            raise ConfigurationError(f"tokens = {self.tokens}: a microbatch has at least 1")

    @staticmethod
    def _check_stage(where: str, stage: StageCost) -> None:
        if not 0 < stage.slow < math.inf:
            raise ConfigurationError(f"{where}: slow = {stage.slow:g}: give a number above 0")
        for name in ("forward", "backward", "update", "backward_input", "backward_weight", *_MEMORY):
            if getattr(stage, name) is not None:
                _not_negative(f"{where}: {name}", getattr(stage, name))
        known = [name for name in _MEMORY if getattr(stage, name) is not None]
        if known and len(known) < len(_MEMORY):
            raise ConfigurationError(f"{where}: {', '.join(known)} given alone: give all of {', '.join(_MEMORY)}")

    @property
    def knows_memory(self) -> bool:
        """Does it say how many bytes every stage needs?"""
        return all(stage.weight_bytes is not None for stage in self.stages)

    def require(self, stages: int) -> None:
        """Raise ConfigurationError unless this is a model of so many stages."""
        if stages != len(self.stages):
            raise ConfigurationError(
                f"the cost model is of {len(self.stages)} stages, the pipeline has {stages}: give --stages "
                f"{len(self.stages)}, or another cost model"
            )

    def factors(self, stage: int) -> Iterator[float]:
        """The random factors of the actions of a stage, one after the other; 1 without jitter."""
        if self.jitter == 0.0:
            while True:
                yield 1.0
        generator = np.random.default_rng([self.seed, stage])
        while True:
            yield from np.exp(generator.normal(-(self.jitter**2) / 2, self.jitter, size=1024)).tolist()


def equal_stages(
    stages: int,
    forward: float,
    backward: float,
    update: float = 0.0,
    *,
    link: LinkCost | None = None,
    message_bytes: int = 0,
    tokens: int | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> CostModel:
    """The same figures (seconds) for every stage and every link."""
    if stages < 1:
        raise ConfigurationError(f"a pipeline of {stages} stages does not exist: give at least 1")
    return CostModel(
        (StageCost(forward, backward, update),) * stages,
        (link or LinkCost(),) * (stages - 1),
        message_bytes=message_bytes,
        tokens=tokens,
        jitter=jitter,
        seed=seed,
        source=f"equal stages, {1e3 * forward:g} ms forward, {1e3 * backward:g} backward, {1e3 * update:g} update",
    )


def gather_times(entered: Sequence[float], latencies: Sequence[float]) -> list[float]:
    """When each stage knows the numbers of all stages, which went up the pipeline and down again, if stage s gives its
    own at entered[s] and the hop between s and s+1 takes latencies[s]."""
    up = list(entered)
    for stage in reversed(range(len(latencies))):
        up[stage] = max(up[stage], up[stage + 1] + latencies[stage])
    down = up[:1]
    for latency in latencies:
        down.append(down[-1] + latency)
    return down


def read_cost(path: Path) -> CostModel:
    """A cost model from its TOML file. Raises ConfigurationError, one line naming the file and the entry."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cost file {path} cannot be read ({error.strerror}): check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cost file {path} is not TOML: {error}") from None
    data.setdefault("source", str(path))
    try:
        return _from_entries(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"cost file {path}: {error}") from None


def _from_entries(data: dict[str, Any]) -> CostModel:
    found = data.pop("format", None)
    if found != FORMAT:
        raise ConfigurationError(f"format = {found!r}: this version reads format = {FORMAT}")
    tables = {name: data.pop(name, []) for name in ("stage", "link")}
    for name, entries in tables.items():
        if not isinstance(entries, list):
            raise ConfigurationError(f"{name} must be a list of tables: write [[{name}]]")
    stages = tuple(StageCost(**_entries(StageCost, e, f"stage {i}")) for i, e in enumerate(tables["stage"]))
    links = tuple(LinkCost(**_entries(LinkCost, e, f"link {i}")) for i, e in enumerate(tables["link"]))
    return CostModel(stages, links, **_entries(CostModel, data, "the top level"))


def _entries(kind: type, entry: Any, where: str) -> dict[str, Any]:
    """The entries of a table, checked: each the name of a field, with a value of its type."""
    types = {field.name: str(field.type) for field in fields(kind) if field.name not in ("stages", "links")}
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not a table")
    for name, value in entry.items():
        if name not in types:
            raise ConfigurationError(f"{where}: there is no entry {name}; there are {', '.join(types)}")
        wanted: tuple[type, ...] = (str,) if "str" in types[name] else (int,)
        if "float" in types[name]:
            wanted = (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            what = {str: "a text", int: "a whole number"}.get(wanted[-1], "a number")
            raise ConfigurationError(f"{where}: {name} = {value!r} must be {what}")
    for name in ("forward", "backward"):
        if name in types and name not in entry:
            raise ConfigurationError(f"{where}: {name} is missing")
    return dict(entry)


def cost_toml(cost: CostModel) -> str:
    """The TOML file of a cost model, for `read_cost`."""
    lines = ["# A cost model. Times in seconds, sizes in bytes, bandwidth in bytes per second.", f"format = {FORMAT}"]
    lines += _lines(cost)
    for kind, entries in (("stage", cost.stages), ("link", cost.links)):
        for entry in entries:
            lines += ["", f"[[{kind}]]", *_lines(entry)]
    return "\n".join(lines) + "\n"


def _lines(entry: CostModel | StageCost | LinkCost) -> list[str]:
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    return [f"{k} = {_toml(v)}" for k, v in values.items() if v is not None and not isinstance(v, tuple)]


def _toml(value: float | str) -> str:
    # A JSON string is a TOML basic string where every character is ASCII.
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} = {value:g}: give a number that is not negative")
