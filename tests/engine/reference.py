"""One-process references, written without the engine: the unsplit model, and a replay of the version law."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.engine import toys


@dataclass
class Trajectory:
    """What a run did, update by update."""

    losses: list[float] = field(default_factory=list)
    squared_norms: list[list[float]] = field(default_factory=list)  # by update, by stage
    clip_norms: list[list[float]] = field(default_factory=list)  # by update, by stage
    ages: list[list[list[int]]] = field(default_factory=list)  # of the norms: by update, at stage, of stage
    gradients: list[list[torch.Tensor]] = field(default_factory=list)  # by update, after clipping
    weights: list[torch.Tensor] = field(default_factory=list)


def unsplit(
    microbatches: int, updates: int, *, clip: float | None, optimizer: Any, model: list[nn.Module] | None = None
) -> Trajectory:
    """K microbatches per update through the whole model: gradients, clip_grad_norm_, step."""
    whole = nn.Sequential(*copy.deepcopy(model or toys.blocks()))
    parameters = list(whole.parameters())
    steps = optimizer(parameters)
    rates = [group["lr"] for group in steps.param_groups]
    result = Trajectory()
    for update in range(updates):
        data = [toys.batches(update * microbatches + k) for k in range(microbatches)]
        tokens = sum(int((targets != -100).sum()) for _, targets in data)
        steps.zero_grad()
        total = 0.0
        for inputs, targets in data:
            loss = toys.loss(whole(inputs), targets)
            (loss / tokens).backward()
            total += loss.item()
        result.losses.append(total / tokens)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip is not None else float("inf"))
        result.clip_norms.append([norm.item()])
        result.gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        for group, rate in zip(steps.param_groups, rates, strict=True):
            group["lr"] = rate * toys.rate_factor(update)
        steps.step()
    result.weights = [p.detach().clone() for p in parameters]
    return result


def run_ahead(stage: int, stages: int, in_flight: int) -> int:
    """W: the forwards that a stage is ahead of its backwards, with `in_flight` microbatches in flight per hop."""
    return in_flight * (stages - 1 - stage)


def version_read(
    stage: int, stages: int, microbatches: int, first_update: int, microbatch: int, in_flight: int = 1
) -> int:
    """Updates in the weights that F(microbatch) of `stage` reads, in a segment that starts at `first_update`.

    A stage is W forwards ahead of its backwards, so when the j-th forward of the segment runs, j - W backwards are
    done, and every K of them made one update.
    """
    ahead = run_ahead(stage, stages, in_flight)
    return first_update + max(0, microbatch - first_update * microbatches - ahead) // microbatches


def newest_norm(
    stage: int,
    of: int,
    stages: int,
    microbatches: int,
    first_update: int,
    updates: int,
    update: int,
    in_flight: int = 1,
) -> int:
    """The newest update of stage `of` whose norm `stage` knows when it makes `update`; -1 for none.

    From below, it came with the gradient of the update's last microbatch, which `of` sent just before making that
    same update. From above, it came with the newest activation: F(j) left stage `of` after max(0, j - W) of its
    backwards. Stages in between hand on what they know with the same microbatch.
    """
    if of == stage:
        return update
    if of > stage:
        return update - 1
    last_backward = (update + 1 - first_update) * microbatches - 1
    newest_forward = min(updates * microbatches, last_backward + 1 + run_ahead(stage, stages, in_flight)) - 1
    return first_update + max(0, newest_forward - run_ahead(of, stages, in_flight)) // microbatches - 1


def replay(
    stages: int,
    microbatches: int,
    segments: list[int],
    *,
    clip: float | None,
    optimizer: Any,
    in_flight: int = 1,
) -> Trajectory:
    """Every microbatch through the stages, each at the version that the law gives it, in one autograd graph.

    segments: the numbers of updates between flushes.
    """
    model = toys.blocks()
    parts = [nn.Sequential(*model[part.start : part.stop]) for part in toys.cut(stages)]
    optimizers = [optimizer(list(part.parameters())) for part in parts]
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    history = [[{n: p.detach().clone() for n, p in part.named_parameters()}] for part in parts]
    result = Trajectory()
    start = 0
    for length in segments:
        for update in range(start, start + length):
            numbers = range(update * microbatches, (update + 1) * microbatches)
            tokens = sum(int((toys.batches(i)[1] != -100).sum()) for i in numbers)
            total = 0.0
            for part in parts:
                for parameter in part.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            for i in numbers:
                value, targets = toys.batches(i)
                used = []
                for s, part in enumerate(parts):
                    version = history[s][version_read(s, stages, microbatches, start, i, in_flight)]
                    used.append({name: w.clone().requires_grad_() for name, w in version.items()})
                    value = torch.func.functional_call(part, used[s], (value,))
                loss = toys.loss(value, targets)
                total += loss.item()
                leaves = [leaf for version in used for leaf in version.values()]
                parameters = [p for part in parts for p in part.parameters()]
                for p, gradient in zip(parameters, torch.autograd.grad(loss / tokens, leaves), strict=True):
                    p.grad += gradient
            result.losses.append(total / tokens)
            own = [sum(float((p.grad.double() ** 2).sum()) for p in part.parameters()) for part in parts]
            result.squared_norms.append(own)
            known = [
                [
                    update if length == 1 else newest_norm(s, t, stages, microbatches, start, length, update, in_flight)
                    for t in range(stages)
                ]
                for s in range(stages)
            ]
            result.ages.append([[update - k for k in row if k >= 0] for row in known])
            norms = [sum(result.squared_norms[k][t] for t, k in enumerate(row) if k >= 0) ** 0.5 for row in known]
            result.clip_norms.append(norms)
            for s, part in enumerate(parts):
                coefficient = 1.0 if clip is None else min(1.0, clip / (norms[s] + 1e-6))
                for p in part.parameters():
                    p.grad *= coefficient
                optimizers[s].param_groups[0]["lr"] = rates[s] * toys.rate_factor(update)
                optimizers[s].step()
                history[s].append({n: p.detach().clone() for n, p in part.named_parameters()})
        start += length
    result.weights = [w for versions in history for w in versions[-1].values()]
    return result
