"""Memory stays flat: as many versions and microbatches in flight as the laws allow, and no more over time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from adapipe.schedule import Kind
from tests.engine import toys


def tensors() -> tuple[int, int]:
    """Live tensors that Python can see, and the bytes of their distinct storages."""
    gc.collect()
    live = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live}
    return len(live), sum(storages.values())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_asynchronous_memory_is_flat_over_300_updates(microbatches: int):
    counted: dict[int, tuple[int, int]] = {}

    def count(done: int, loss: Any) -> None:
        if done in (20, 21, 22, 23, 100, 200, 299, 300):
            counted[done] = tensors()

    pipeline = toys.in_process(4, microbatches=microbatches, clip=1.0, optimizer=toys.sgd, check_versions=False)
    before = tensors()
    pipeline.run(toys.work(300, 300, on_update=count))
    after = tensors()
    # Stage 0 counts whenever it has made an update; the other stages may be a few actions further or behind.
    start = [counted[done] for done in (20, 21, 22, 23)]
    for done in (100, 200):
        assert counted[done][0] <= max(number for number, _ in start)
        assert counted[done][1] <= max(size for _, size in start)
    assert max(counted.values()) > before
    # What is left after a flush: one momentum buffer per parameter.
    parameters = sum(len(r.stage.versions.parameters) for r in pipeline.runtimes)
    assert after[0] - before[0] == parameters

    pipeline.run(toys.work(20, 20, first_update=300))
    assert tensors() == after


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize("flush_every", [1, 2, 3, 12])
def test_peaks_are_those_of_the_laws(stages: int, microbatches: int, flush_every: int):
    """Live versions <= 1 + ceil((P-1-s)/K) and microbatches in flight <= P - s; both are reached in long segments."""
    pipeline = toys.in_process(stages, microbatches=microbatches)
    pipeline.run(toys.work(12, flush_every))
    for s, runtime in enumerate(pipeline.runtimes):
        in_flight: dict[int, int] = {}  # microbatch -> the version that it holds
        most_in_flight = most_versions = 0
        for record in runtime.records:
            if record.action.kind is Kind.FORWARD:
                in_flight[record.action.index] = record.version_used
            elif record.action.kind is Kind.BACKWARD:
                assert record.version_used == in_flight.pop(record.action.index)
            most_in_flight = max(most_in_flight, len(in_flight))
            most_versions = max(most_versions, len({*in_flight.values(), record.version_current}))
        assert not in_flight
        assert runtime.stage.in_flight == 0
        assert runtime.stage.versions.live == 1
        assert most_in_flight == min(stages - s, flush_every * microbatches)
        assert runtime.most_versions == most_versions
        bound = 1 + -(-(stages - 1 - s) // microbatches)
        assert most_versions <= bound
        if flush_every == 1:
            assert most_versions == 1
        if flush_every == 12:
            assert most_versions == bound


@pytest.mark.parametrize("flush_every", [1, 5])
def test_records_do_not_pile_up_over_runs(flush_every: int):
    pipeline = toys.in_process(3, microbatches=2)
    for first in (0, 5, 10):
        pipeline.run(toys.work(5, flush_every, first_update=first))
        for runtime in pipeline.runtimes:
            assert len(runtime.records) == 5 * (2 + 2 + 1)
            assert runtime.records[-1].action.index == first + 4


@pytest.mark.parametrize("flush_every", [1, 5])
def test_data_and_loss_of_past_updates_are_dropped(flush_every: int):
    """The last stage loads the targets of a whole update ahead: none may stay behind."""
    pipeline = toys.in_process(3, microbatches=4)
    pipeline.run(toys.work(5, flush_every))
    last = pipeline.runtimes[-1]
    assert not last._targets
    assert not last._tokens
    assert not last._losses
