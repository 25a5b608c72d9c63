"""Microbatches by number: any stage computes microbatch i by itself.

Nothing is broadcast, and a resumed run needs no state but the number of the next microbatch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapipe.errors import ConfigurationError


class Sampler:
    """Training microbatches at random places of `tokens` (uint8, 1-d): a pure function of (seed, number)."""

    def __init__(self, tokens: NDArray[np.uint8], sequence_length: int, microbatch_size: int, seed: int) -> None:
        """Raises ConfigurationError if `tokens` cannot hold one sequence, or a number is out of range."""
        _check_sizes(len(tokens), sequence_length, microbatch_size)
        if seed < 0:
            raise ConfigurationError(f"--seed {seed} must not be negative")
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.microbatch_size = microbatch_size
        self.seed = seed

    def __call__(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of microbatch i >= 0, each (microbatch_size, sequence_length) int64 on the CPU.

        The targets are the inputs moved on by one token.
        """
        if microbatch < 0:
            raise ValueError(f"microbatch {microbatch} does not exist: microbatches are numbered from 0")
        generator = np.random.default_rng([self.seed, microbatch])
        starts = generator.integers(len(self.tokens) - self.sequence_length, size=self.microbatch_size)
        return _sequences(self.tokens, starts, self.sequence_length)


class HeldOut:
    """Fixed held-out microbatches of one shape: `held_out[i]` gives (inputs, targets), `len` how many."""

    def __init__(self, tokens: NDArray[np.uint8], starts: NDArray[np.int64], sequence_length: int) -> None:
        """`starts` (microbatches, microbatch size) are the first tokens of the sequences."""
        self._tokens, self._starts, self._sequence_length = tokens, starts, sequence_length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of microbatch i, as the sampler gives them. Raises IndexError if there is none."""
        if not 0 <= operator.index(microbatch) < len(self):
            raise IndexError(f"held-out microbatch {microbatch} does not exist: there are {len(self)}")
        return _sequences(self._tokens, self._starts[microbatch], self._sequence_length)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[microbatch] for microbatch in range(len(self)))

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch: fewer than asked for if the held-out part does not fill one."""
        return int(self._starts.shape[1])

    @property
    def target_tokens(self) -> int:
        """Tokens that are predicted in one pass over all microbatches."""
        return int(self._starts.size) * self._sequence_length


def held_out_microbatches(tokens: NDArray[np.uint8], sequence_length: int, microbatch_size: int, count: int) -> HeldOut:
    """At most `count` microbatches of evenly spaced sequences of `tokens` (uint8, 1-d) that never overlap.

    If the tokens do not fill that many, there are fewer microbatches; if they do not fill one, it is smaller.
    Raises ConfigurationError if they are too short for one sequence, or a number is out of range.
    """
    _check_sizes(len(tokens), sequence_length, microbatch_size)
    if count < 1:
        raise ConfigurationError(f"{count} held-out microbatches measure nothing: use at least 1")
    available = len(tokens) // (sequence_length + 1)
    size = min(microbatch_size, available)
    rows = min(count, available // size)
    starts = np.arange(rows * size, dtype=np.int64) * len(tokens) // (rows * size)
    return HeldOut(tokens, starts.reshape(rows, size), sequence_length)


def _sequences(tokens: NDArray[np.uint8], starts: NDArray[np.int64], sequence_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (len(starts), sequence_length) int64 of the sequences that begin at `starts`."""
    windows = tokens[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64)
    return (
        torch.from_numpy(np.ascontiguousarray(windows[:, :-1])),
        torch.from_numpy(np.ascontiguousarray(windows[:, 1:])),
    )


def _check_sizes(found: int, sequence_length: int, microbatch_size: int) -> None:
    for flag, value in (("--sequence-length", sequence_length), ("--microbatch-size", microbatch_size)):
        if value < 1:
            raise ConfigurationError(f"{flag} {value} must be at least 1")
    if found < sequence_length + 1:
        raise ConfigurationError(
            f"{found} tokens are too few for --sequence-length {sequence_length}, which needs at least "
            f"{sequence_length + 1}: use a larger corpus or shorter sequences"
        )
