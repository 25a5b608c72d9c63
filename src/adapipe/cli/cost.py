"""The cost model that a command line asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

from adapipe.cli.config import CostOptions
from adapipe.errors import ConfigurationError
from adapipe.schedule.cost import CostModel, LinkCost, equal_stages, read_cost

T = TypeVar("T")

FORWARD_MS = 10.0
"""Of a forward, where nothing is said."""


def given_flags(options: CostOptions) -> list[str]:
    """The cost options that were given, as flags."""
    return [f"--{f.name.replace('_', '-')}" for f in fields(CostOptions) if getattr(options, f.name) is not None]


def link_of(options: CostOptions) -> LinkCost | None:
    """The links that the flags describe; None if they say nothing."""
    if options.latency_ms is None and options.bandwidth_gbit is None:
        return None
    bandwidth = math.inf if options.bandwidth_gbit is None else options.bandwidth_gbit * 1e9 / 8
    return _checked(options, lambda: LinkCost((options.latency_ms or 0.0) / 1e3, bandwidth))


def cost_of(
    options: CostOptions, stages: int | None, *, message_bytes: int = 0, tokens: int | None = None
) -> CostModel:
    """The model in the cost file, with the links and the jitter that flags name; without a file, equal stages.

    stages: None takes as many as the file has. message_bytes and tokens (of a microbatch) fill in what is not given.
    Raises ConfigurationError naming the flag.
    """
    link = link_of(options)
    if options.cost is None:
        forward = FORWARD_MS if options.forward_ms is None else options.forward_ms
        backward = 2 * forward if options.backward_ms is None else options.backward_ms
        return _checked(
            options,
            lambda: equal_stages(
                1 if stages is None else stages,
                forward / 1e3,
                backward / 1e3,
                (options.update_ms or 0.0) / 1e3,
                link=link,
                message_bytes=message_bytes,
                tokens=tokens,
                jitter=options.jitter or 0.0,
            ),
        )
    for flag in ("--forward-ms", "--backward-ms", "--update-ms"):
        if flag in given_flags(options):
            raise ConfigurationError(f"{flag} describes equal stages, and so does --cost {options.cost}: give one")
    cost = read_cost(options.cost)
    if stages is not None and stages != len(cost.stages):
        raise ConfigurationError(
            f"--stages {stages}, but the cost file {options.cost} is of {len(cost.stages)} stages: give --stages "
            f"{len(cost.stages)}, or profile again"
        )
    links = cost.links if link is None else (link,) * (len(cost.stages) - 1)
    return _checked(
        options,
        lambda: replace(
            cost,
            links=links,
            jitter=cost.jitter if options.jitter is None else options.jitter,
            message_bytes=cost.message_bytes or message_bytes,
            tokens=cost.tokens or tokens,
        ),
    )


def _checked(options: CostOptions, make: Callable[[], T]) -> T:
    """What `make` makes, or an error that says which flags it comes from."""
    try:
        return make()
    except ConfigurationError as error:
        flags = ", ".join(given_flags(options)) or "--stages"
        raise ConfigurationError(f"{flags}: {error}") from None
