"""The cost model of a model that nobody has run yet, from its shape and the speed of a device. Needs no torch."""

from __future__ import annotations

from adapipe.errors import ConfigurationError
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig, gpt_figures
from adapipe.schedule.cost import CostModel, LinkCost, StageCost

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4}
"""State per parameter: two moments, or one, in float32."""


def gpt_cost(
    config: GPTConfig,
    stages: int,
    *,
    microbatch_size: int,
    sequence_length: int,
    precision: str,
    optimizer: str,
    flops_per_second: float,
    update: float = 0.0,
    link: LinkCost | None = None,
    jitter: float = 0.0,
) -> CostModel:
    """The reference GPT on equal devices that each do `flops_per_second` on it; a backward is twice a forward.

    update: seconds of an optimizer step, on every stage. Weights, gradients and the activations between stages are
    float32. Raises ConfigurationError for a shape, a number of stages or a speed that cannot be.
    """
    config.validate()
    if not 0 < flops_per_second < float("inf"):
        raise ConfigurationError(f"{flops_per_second:g} flops per second: give a speed above 0")
    if optimizer not in OPTIMIZER_BYTES:
        raise ConfigurationError(
            f"--optimizer {optimizer}: unknown optimizer, choose one of {', '.join(OPTIMIZER_BYTES)}"
        )
    if microbatch_size < 1:
        raise ConfigurationError(f"--microbatch-size {microbatch_size}: give at least 1 sequence")
    figures = gpt_figures(config, microbatch_size, sequence_length, precision)
    tokens = microbatch_size * sequence_length
    message = 4 * tokens * config.width
    costs = []
    parts = partition([block.flops for block in figures], stages)
    for stage, part in enumerate(parts):
        blocks = [figures[i] for i in part]
        forward = sum(block.flops for block in blocks) * tokens / flops_per_second
        parameters = sum(block.parameters for block in blocks)
        # The stage's output is kept for its backward; on the last stage it is the loss, a number.
        output = message if stage < stages - 1 else 0
        costs.append(
            StageCost(
                forward=forward,
                backward=2 * forward,
                update=update,
                weight_bytes=4 * parameters,
                optimizer_bytes=OPTIMIZER_BYTES[optimizer] * parameters,
                activation_bytes=sum(block.saved_bytes for block in blocks) + output,
            )
        )
    return CostModel(
        tuple(costs),
        (link or LinkCost(),) * (stages - 1),
        message_bytes=message,
        tokens=tokens,
        jitter=jitter,
        source=f"{config.layers} layers of width {config.width} at {flops_per_second / 1e12:g} TFLOP/s",
    )
