"""The shape of the reference GPT, and what follows from it by arithmetic: parameters, flops, bytes. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from adapipe.errors import ConfigurationError

Positions = Literal["rotary", "learned"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `width` is D, `vocabulary` V, `sequence_length` the largest T."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 256
    sequence_length: int = 128
    positions: Positions = "rotary"

    def validate(self) -> None:
        """Raise ConfigurationError, naming the flag, if no model has this shape."""
        for name in ("layers", "width", "heads", "vocabulary", "sequence_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.width % self.heads:
            raise ConfigurationError(f"--heads {self.heads} does not divide --width {self.width}: choose a divisor")
        if self.positions not in get_args(Positions):
            raise ConfigurationError(f"--positions {self.positions} is unknown: choose rotary or learned")
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigurationError(
                f"--positions rotary needs an even width per head, but --width {self.width} / "
                f"--heads {self.heads} is {self.head_width}: change one of them, or use --positions learned"
            )

    @property
    def head_width(self) -> int:
        """D divided by the number of heads."""
        return self.width // self.heads


def block_flops(config: GPTConfig) -> float:
    """Of a forward of a transformer block, per token: 24 D^2 in the linear layers, 4 T D in unmasked attention."""
    return 24.0 * config.width**2 + 4.0 * config.sequence_length * config.width


def head_flops(config: GPTConfig) -> float:
    """Of a forward of the head, per token: 2 D V."""
    return 2.0 * config.width * config.vocabulary


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Of one block of the model. parameters: elements. flops: of a forward, per token. saved_bytes: what autograd keeps
    between the forward and the backward of one microbatch: the block's input included, its output and weights not."""

    parameters: int
    flops: float
    saved_bytes: int


def gpt_figures(config: GPTConfig, microbatch_size: int, sequence_length: int, precision: str) -> list[BlockFigures]:
    """Of [Embedding, Block x layers, Head], for microbatches of so many sequences of so many tokens.

    precision: "fp32", or "bf16" for matrix products in bfloat16 with float32 weights, of which autograd then keeps a
    copy per microbatch. The bytes are those of torch 2.13 on a CPU; fused kernels of other devices keep less.
    """
    if precision not in ("fp32", "bf16"):
        raise ConfigurationError(f"--precision {precision}: unknown precision, choose one of fp32, bf16")
    tokens = microbatch_size * sequence_length
    stream = tokens * config.width
    half = precision == "bf16"
    matmul = 2 if half else 4  # bytes of an element that goes into a matrix product or comes out of one
    copies = 2 if half else 0  # bytes per weight

    # A norm keeps its input, the input scaled, and a number per token; its output is kept by the product that it feeds.
    norm = 2 * 4 * stream + 4 * tokens + matmul * stream
    # q, k and v; the rotated q and k; the mixed values, which leave the rotary variant in another layout, hence twice;
    # a number per head and token.
    rotary = config.positions == "rotary"
    attention = (3 + (2 if rotary else 0) + (2 if rotary else 1)) * matmul * stream + 4 * tokens * config.heads
    mlp = 2 * 4 * matmul * stream  # around the GELU
    weights = 12 * config.width**2
    block = BlockFigures(weights + 2 * config.width, block_flops(config), 2 * norm + attention + mlp + copies * weights)

    learned = 0 if rotary else config.sequence_length
    embedding = BlockFigures((config.vocabulary + learned) * config.width, 0.0, 8 * tokens)
    logits = config.vocabulary * config.width
    # The loss keeps the logarithms of the probabilities, in float32, and the targets.
    loss = 4 * tokens * config.vocabulary + 8 * tokens
    head = BlockFigures(logits + config.width, head_flops(config), norm + copies * logits + loss)
    return [embedding, *[block] * config.layers, head]
