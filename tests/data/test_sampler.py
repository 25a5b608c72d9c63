from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from adapipe.data import HeldOut, Sampler, held_out_microbatches
from adapipe.errors import ConfigurationError


def numbered(size: int) -> NDArray[np.uint8]:
    """Tokens that tell their own place."""
    assert size <= 256
    return np.arange(size, dtype=np.uint8)


def test_shapes_and_types() -> None:
    inputs, targets = Sampler(numbered(100), sequence_length=7, microbatch_size=3, seed=0)(0)
    for tensor in (inputs, targets):
        assert tensor.shape == (3, 7)
        assert tensor.dtype == torch.int64
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()


@given(size=st.integers(2, 256), seed=st.integers(0, 2**64), microbatch=st.integers(0, 2**40), data=st.data())
def test_targets_are_the_inputs_moved_on_by_one(size: int, seed: int, microbatch: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, size - 1))
    inputs, targets = Sampler(numbered(size), length, 4, seed)(microbatch)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(length))


def test_a_microbatch_depends_on_seed_and_number_alone() -> None:
    forwards = Sampler(numbered(200), 5, 4, seed=3)
    backwards = Sampler(numbered(200), 5, 4, seed=3)
    first = {i: forwards(i) for i in range(20)}
    np.random.seed(0)
    torch.manual_seed(0)
    second = {i: backwards(i) for i in reversed(range(20))}
    for i in range(20):
        assert torch.equal(first[i][0], second[i][0])
        assert torch.equal(first[i][1], second[i][1])


def test_every_seed_and_every_number_gives_another_microbatch() -> None:
    drawn = {tuple(Sampler(numbered(250), 3, 8, seed)(i)[0][:, 0].tolist()) for seed in range(20) for i in range(20)}
    assert len(drawn) == 400


def test_the_microbatches_of_a_seed_never_change() -> None:
    """A resumed run must see what the run before it would have seen."""
    inputs, _ = Sampler(numbered(250), sequence_length=2, microbatch_size=4, seed=1)(5)
    assert inputs[:, 0].tolist() == [204, 95, 91, 227]


def test_every_start_is_reached_and_none_is_favoured() -> None:
    sampler = Sampler(numbered(10), sequence_length=7, microbatch_size=30, seed=0)
    starts = torch.cat([sampler(i)[0][:, 0] for i in range(100)])
    counts = torch.bincount(starts)
    assert len(counts) == 3  # 0, 1, 2: the last one ends with the last token
    assert counts.min() > 900


def test_the_shortest_corpus_has_one_sequence() -> None:
    inputs, targets = Sampler(numbered(5), sequence_length=4, microbatch_size=2, seed=0)(9)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 2
    assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_high_bytes_stay_positive() -> None:
    inputs, targets = Sampler(np.full(10, 255, dtype=np.uint8), 4, 2, seed=0)(0)
    assert inputs.unique().tolist() == targets.unique().tolist() == [255]


def test_a_microbatch_may_be_changed_without_harm() -> None:
    tokens = numbered(50)
    tokens.flags.writeable = False  # as a corpus is
    sampler = Sampler(tokens, 4, 2, seed=0)
    inputs, targets = sampler(0)
    expected = targets.clone()
    inputs.zero_()
    assert torch.equal(targets, expected)
    assert torch.equal(sampler(0)[1], expected)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="microbatch -1 does not exist: microbatches are numbered from 0"):
        Sampler(numbered(10), 4, 2, seed=0)(-1)


@pytest.mark.parametrize(
    ("length", "size", "seed", "message"),
    [
        (0, 1, 0, "--sequence-length 0 must be at least 1"),
        (1, 0, 0, "--microbatch-size 0 must be at least 1"),
        (1, 1, -1, "--seed -1 must not be negative"),
        (
            10,
            1,
            0,
            "10 tokens are too few for --sequence-length 10, which needs at least 11: "
            "use a larger corpus or shorter sequences",
        ),
    ],
)
def test_a_sampler_that_cannot_work_is_refused(length: int, size: int, seed: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Sampler(numbered(10), length, size, seed)
    assert str(error.value) == message


@given(data=st.data(), length=st.integers(1, 12), size=st.integers(1, 6), count=st.integers(1, 8))
def test_held_out_sequences_never_overlap(data: st.DataObject, length: int, size: int, count: int) -> None:
    found = data.draw(st.integers(length + 1, 256))
    held_out = held_out_microbatches(numbered(found), length, size, count)
    available = found // (length + 1)

    assert 1 <= len(held_out) <= count
    assert held_out.microbatch_size == min(size, available)
    used = len(held_out) * held_out.microbatch_size
    assert used <= available
    if len(held_out) < count:
        assert available - used < size  # only a remainder is left out
    assert held_out.target_tokens == used * length

    seen: list[int] = []
    for inputs, targets in held_out:
        assert inputs.shape == targets.shape == (held_out.microbatch_size, length)
        assert torch.equal(targets, inputs + 1)
        seen += [token for row in inputs for token in row.tolist()] + targets[:, -1].tolist()
    assert len(set(seen)) == len(seen) == used * (length + 1)


@given(found=st.integers(20, 256), size=st.integers(1, 3), count=st.integers(1, 3))
def test_held_out_sequences_are_evenly_spaced(found: int, size: int, count: int) -> None:
    held_out = held_out_microbatches(numbered(found), 1, size, count)
    starts = torch.cat([inputs[:, 0] for inputs, _ in held_out])
    assert starts[0] == 0
    ends = torch.cat([starts[1:], torch.tensor([found])])
    assert set((ends - starts).tolist()) <= {found // len(starts), found // len(starts) + 1}


def test_held_out_is_the_same_every_time() -> None:
    first, second = (held_out_microbatches(numbered(200), 9, 4, 3) for _ in range(2))
    assert len(first) == len(second) == 3
    for i in (2, 0, 1, 0):
        assert torch.equal(first[i][0], second[i][0])
        assert torch.equal(first[i][1], second[i][1])
    assert len(list(first)) == 3


def test_too_little_for_one_microbatch_gives_a_smaller_one() -> None:
    held_out = held_out_microbatches(numbered(15), sequence_length=4, microbatch_size=8, count=2)
    assert len(held_out) == 1
    assert held_out[0][0].shape == (3, 4)


def test_a_remainder_is_left_out() -> None:
    held_out = held_out_microbatches(numbered(55), sequence_length=4, microbatch_size=4, count=9)
    assert [inputs.shape for inputs, _ in held_out] == [(4, 4), (4, 4)]  # 11 sequences would fit


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_held_out_has_no_other_microbatches(index: int) -> None:
    held_out: HeldOut = held_out_microbatches(numbered(200), 9, 4, 3)
    with pytest.raises(IndexError, match=f"held-out microbatch {index} does not exist: there are 3"):
        held_out[index]


@pytest.mark.parametrize(
    ("length", "size", "count", "message"),
    [
        (10, 1, 1, "10 tokens are too few for --sequence-length 10"),
        (0, 1, 1, "--sequence-length 0 must be at least 1"),
        (1, 0, 1, "--microbatch-size 0 must be at least 1"),
        (1, 1, 0, "0 held-out microbatches measure nothing: use at least 1"),
    ],
)
def test_held_out_microbatches_that_cannot_work_are_refused(length: int, size: int, count: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        held_out_microbatches(numbered(10), length, size, count)
