"""The reference model: a decoder-only GPT as a list of blocks, each from one tensor to one tensor.

    tokens (B, T) int64 ─Embedding─> (B, T, D) ─Block─> ... ─Block─> (B, T, D) ─Head─> logits (B, T, V)

Pre-norm (RMSNorm), causal attention, GELU MLP of width 4D, no dropout, no biases, untied head. There are no
buffers, so a model built under `torch.device("meta")` is complete after `to_empty` and `initialise_by_name`.

B is the microbatch size, T the tokens of a sequence, D the width, V the vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from adapipe.models.initial import Fill
from adapipe.models.shape import GPTConfig, block_flops, head_flops

_ROTARY_BASE = 10_000.0
_NORM_EPSILON = 1e-5
_WEIGHT_STD = 0.02


class Embedding(nn.Module):
    """Tokens (B, T) int64 to the residual stream (B, T, D), with positions added if they are learned."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.sequence_length = config.sequence_length
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.sequence_length, config.width) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        _check_length(tokens.shape[1], self.sequence_length)
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions.weight[: tokens.shape[1]]

    def cost(self) -> float:
        """A look-up has no matmul: 0 flops per token."""
        return 0.0


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        # Not a buffer: a buffer would be left without values after a build on the meta device.
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.config.heads, self.config.head_width))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D / heads)
        if self.config.positions == "rotary":
            cos, sin = (table[: x.shape[1]] for table in self._rotary_table(q))
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _rotary_table(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (sequence_length, head width / 2) on the device of `q`, in float32 or wider.

        Su et al. 2021 (RoFormer), equation 15: angle = position * base^(-2 i / head width).
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        table = self._rotary
        if table is None or table[0].device != q.device or table[0].dtype != dtype:
            # A table that an evaluation builds must still work in the next training step.
            with torch.inference_mode(False):
                half = torch.arange(0, self.config.head_width, 2, device=q.device, dtype=dtype)
                positions = torch.arange(self.config.sequence_length, device=q.device, dtype=dtype)
                angles = positions[:, None] * _ROTARY_BASE ** (-half / self.config.head_width)
                table = self._rotary = (angles.cos(), angles.sin())
        return table


class MLP(nn.Module):
    """D to 4D, GELU, and back: (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.output = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.gelu(self.expand(x)))
        return out


class Block(nn.Module):
    """One layer: (B, T, D) to (B, T, D).

    The residual stream stays float32 under bf16 autocast: a branch is bf16, its sum with the stream is not.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = nn.RMSNorm(config.width, eps=_NORM_EPSILON)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=_NORM_EPSILON)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x.shape[1], self.config.sequence_length)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x

    def cost(self) -> float:
        """Forward flops per token."""
        return block_flops(self.config)


class Head(nn.Module):
    """The residual stream (B, T, D) to logits (B, T, V)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.width, eps=_NORM_EPSILON)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits

    def cost(self) -> float:
        """Forward flops per token."""
        return head_flops(self.config)


def gpt_blocks(config: GPTConfig) -> list[nn.Module]:
    """The model as [Embedding, Block x layers, Head]. Raises ConfigurationError if the shape cannot work."""
    config.validate()
    return [Embedding(config), *(Block(config) for _ in range(config.layers)), Head(config)]


def language_model_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy summed over all tokens, in nats: logits (B, T, V), targets (B, T) int64, to a scalar.

    Computed in float32 whatever autocast made of the logits (float64 logits stay so). A sum, because the
    division is by the tokens of the whole update.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum")


def fill_gpt_weight(config: GPTConfig) -> Fill:
    """The initial weights of a GPT, for `initialise_by_name`.

    Norms are 1. All else is normal with std 0.02, but 0.02 / sqrt(2 layers) where a branch enters the residual
    stream, so that its variance does not grow with depth (Radford et al. 2019, section 2.3).
    """
    residual_std = _WEIGHT_STD / math.sqrt(2 * config.layers)

    def fill(name: str, weight: Tensor, generator: Generator) -> None:
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith((".attention.output.weight", ".mlp.output.weight")):
            weight.normal_(std=residual_std, generator=generator)
        else:
            weight.normal_(std=_WEIGHT_STD, generator=generator)

    return fill


def _check_length(length: int, longest: int) -> None:
    if length > longest:
        raise ValueError(
            f"the input has {length} tokens per sequence, but the model takes at most {longest}: "
            "shorten the input, or build the model with a larger sequence length"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of the last axis of x (B, heads, T, head width) by their angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
