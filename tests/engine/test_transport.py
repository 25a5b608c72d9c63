"""Edges between stages: order, stamps, shapes, slots, gathers, on both transports."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from adapipe.engine.clock import WallClock
from adapipe.engine.transport import Direction, TensorSpec, Transport
from adapipe.engine.transport.base import Ring
from adapipe.engine.transport.distributed import DistributedTransport
from adapipe.engine.transport.in_process import Hub
from adapipe.errors import EngineError, StageFailure, TransportError
from adapipe.schedule import sync_schedule
from tests.engine import toys
from tests.worlds import run_world

NOTE = 3
DOWN, UP = Direction.DOWN, Direction.UP

# A script is what one stage does: a generator over its transport. It runs alike on both transports.
Script = Callable[[Transport], Generator[None, None, Any]]


def note(*numbers: float) -> np.ndarray:
    return np.array([*numbers, *[0.0] * (NOTE - len(numbers))])


def in_process(stages: int, script: Script) -> list[Any]:
    """All stages in turn until all are done; the result of each, or what it raised."""
    scripts = dict(enumerate(script(t) for t in Hub([WallClock()] * stages, NOTE).transports()))
    results: dict[int, Any] = {}
    for _ in range(1000):
        for stage, steps in list(scripts.items()):
            try:
                next(steps)
            except StopIteration as stop:
                results[stage] = stop.value
            except EngineError as error:
                results[stage] = error
            if stage in results:
                del scripts[stage]
    assert not scripts, f"stages {list(scripts)} never ended"
    return [results[s] for s in range(stages)]


def _on_ranks(world: Any, scripts: list[Script]) -> list[Any]:
    results = []
    for script in scripts:
        transport = DistributedTransport(world, NOTE)
        try:
            for _ in (steps := _Result(script(transport))):
                pass
            results.append(steps.value)
        except EngineError as error:
            results.append(error)
        # A message may still be on its way to a peer that is slower: keep its sender until all are done.
        dist.barrier(group=world.control)
        del transport
    return results


class _Result:
    """A generator that keeps what it returned."""

    def __init__(self, steps: Generator[None, None, Any]) -> None:
        self._steps = steps

    def __iter__(self) -> Generator[None, None, None]:
        self.value = yield from self._steps


def message(i: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape))).view(shape).to(dtype) * (i + 1)


# -- what both transports do ---------------------------------------------------------------------------------------


def fifo(transport: Transport) -> Generator[None, None, Any]:
    """Messages come in the order of their microbatches, whole, with their notes, both ways at once."""
    first, last = transport.stage == 0, transport.stage == transport.stages - 1
    seen = []
    for i in range(7):
        if first:
            payload, told = message(i), note(i, 0.5)
        else:
            arrived = yield from transport.receive(DOWN, i)
            payload, told = arrived.payload.clone(), arrived.note + note(0, 0, 1)
            if i + 1 < 7:
                transport.post(DOWN, range(i + 1, i + 2))
            transport.release(DOWN, i)
        if not last:
            yield from transport.send(DOWN, i, payload, told)
            arrived = yield from transport.receive(UP, i)
            transport.release(UP, i)
            seen.append((arrived.payload.clone(), arrived.note))
        if not first:
            answer = (payload, told) if last else seen[-1]
            yield from transport.send(UP, i, answer[0] * 10, answer[1])
    return seen


def check_fifo(results: list[Any]) -> None:
    stages = len(results)
    for stage, seen in enumerate(results[:-1]):
        assert len(seen) == 7
        for i, (payload, told) in enumerate(seen):
            assert torch.equal(payload, message(i) * 10 ** (stages - 1 - stage))
            np.testing.assert_array_equal(told, [i, 0.5, stages - 1])


def gathers(transport: Transport) -> Generator[None, None, Any]:
    one = yield from transport.all_gather(np.array([10.0 * transport.stage, np.nan]))
    two = yield from transport.all_gather(np.array([-1.0 - transport.stage]))
    return one, two


def check_gathers(results: list[Any]) -> None:
    stages = len(results)
    for one, two in results:
        np.testing.assert_array_equal(one, [[10.0 * s, np.nan] for s in range(stages)])
        np.testing.assert_array_equal(two, [[-1.0 - s] for s in range(stages)])


# Smaller, larger, another number of dimensions, another dtype, a scalar.
PHASES = [
    ((2, 3), torch.float32),
    ((1, 2), torch.float32),
    ((8, 16), torch.float32),
    ((2, 3, 4), torch.float32),
    ((2, 3, 4), torch.bfloat16),
    ((5,), torch.float64),
    ((), torch.float32),
    ((0, 3), torch.float32),
    ((2, 3), torch.float32),
]


def phases(transport: Transport) -> Generator[None, None, Any]:
    """Shape and dtype change from phase to phase. Between stages s and s+1 the last size is larger by s."""
    seen = []
    for shape, dtype in PHASES:
        yield from transport.all_gather(note())  # a phase begins when every edge is empty
        transport.begin_phase()
        own = (*shape[:-1], shape[-1] + transport.stage) if shape else shape
        for i in range(3):
            if transport.stage > 0:
                arrived = yield from transport.receive(DOWN, i)
                if i < 2:
                    transport.post(DOWN, range(i + 1, i + 2))
                seen.append(arrived.payload.clone())
                transport.release(DOWN, i)
            if transport.stage < transport.stages - 1:
                yield from transport.send(DOWN, i, message(i, own, dtype), note())
                arrived = yield from transport.receive(UP, i)
                assert torch.equal(arrived.payload, message(i, own, dtype))
                transport.release(UP, i)
            if transport.stage > 0:
                yield from transport.send(UP, i, seen[-1], note())
    return seen


def check_phases(results: list[Any]) -> None:
    for stage, seen in enumerate(results[1:]):
        sent = [
            message(i, (*shape[:-1], shape[-1] + stage) if shape else shape, dtype)
            for shape, dtype in PHASES
            for i in range(3)
        ]
        assert len(seen) == len(sent)
        for got, wanted in zip(seen, sent, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


LARGE = (1024, 2048)  # 8 MiB of float32, far above any eager limit


def large(transport: Transport) -> Generator[None, None, Any]:
    """Both directions have large messages on their way at the same time; with two stages both go to the same peer."""
    first = transport.stage == 0
    out, back = (DOWN, UP) if first else (UP, DOWN)
    if not first:
        yield from transport.receive(DOWN, 0)
    yield from transport.send(out, 0, torch.full(LARGE, float(transport.stage)), note())
    if first:
        yield from transport.receive(UP, 0)
    sums = []
    for i in (1, 2, 3):
        transport.release(back, i - 1)
        yield from transport.send(out, i, torch.full(LARGE, float(10 * i + transport.stage)), note())
        arrived = yield from transport.receive(back, i)
        sums.append((arrived.payload.min().item(), arrived.payload.max().item()))
    return sums


def check_large(results: list[Any]) -> None:
    assert results[0] == [(10.0 * i + 1,) * 2 for i in (1, 2, 3)]
    assert results[1] == [(10.0 * i,) * 2 for i in (1, 2, 3)]


def copies(transport: Transport) -> Generator[None, None, Any]:
    """What is sent is what the tensor held then, and the note's numbers of then."""
    if transport.stage == 0:
        payload, told = message(0), note(1, 2, 3)
        yield from transport.send(DOWN, 0, payload, told)
        payload.zero_()
        told[:] = 0
        return None
    arrived = yield from transport.receive(DOWN, 0)
    return arrived.payload.clone(), arrived.note


def check_copies(results: list[Any]) -> None:
    payload, told = results[1]
    assert torch.equal(payload, message(0))
    np.testing.assert_array_equal(told, [1, 2, 3])


def transposed(transport: Transport) -> Generator[None, None, Any]:
    """A payload arrives contiguous, however it left: the next block computes alike on every transport."""
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, message(0).t(), note())
        return None
    arrived = yield from transport.receive(DOWN, 0)
    return arrived.payload.clone(), arrived.payload.is_contiguous()


def check_transposed(results: list[Any]) -> None:
    payload, contiguous = results[1]
    assert torch.equal(payload, message(0).t())
    assert contiguous


# -- what both transports refuse -----------------------------------------------------------------------------------


def wrong_microbatch(transport: Transport) -> Generator[None, None, Any]:
    if transport.stage == 0:
        yield from transport.send(DOWN, 5, message(5), note())
    else:
        yield from transport.receive(DOWN, 4)


def check_wrong_microbatch(results: list[Any]) -> None:
    assert isinstance(results[1], TransportError)
    assert "stage 1 expected the activation of microbatch 4 (phase 0) from stage 0, and got microbatch 5" in str(
        results[1]
    )


def wrong_phase(transport: Transport) -> Generator[None, None, Any]:
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, message(0), note())
    else:
        transport.begin_phase()
        yield from transport.receive(DOWN, 0)


def check_wrong_phase(results: list[Any]) -> None:
    assert isinstance(results[1], TransportError)
    assert "microbatch 0 (phase 1) from stage 0, and got microbatch 0 (phase 0)" in str(results[1])


def wrong_shape(transport: Transport) -> Generator[None, None, Any]:
    """The sender notices, before anything of the wrong length is on its way."""
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, message(0), note())
        yield from transport.send(DOWN, 1, message(1, (4, 3)), note())
    else:
        yield from transport.receive(DOWN, 0)


def check_wrong_shape(results: list[Any]) -> None:
    assert isinstance(results[0], TransportError)
    assert "the activation of microbatch 1 that stage 0 sends to stage 1 is (4, 3) float32" in str(results[0])
    assert "this phase began with (2, 3) float32" in str(results[0])
    assert "pad" in str(results[0])
    assert results[1] is None


def wrong_gradient(transport: Transport) -> Generator[None, None, Any]:
    """A gradient must look like the activation that it answers."""
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, message(0), note())
        yield from transport.send(DOWN, 1, message(1), note())
        yield from transport.receive(UP, 0)
    else:
        yield from transport.receive(DOWN, 0)
        yield from transport.receive(DOWN, 1)
        yield from transport.send(UP, 0, message(0), note())
        yield from transport.send(UP, 1, message(1).bfloat16(), note())


def check_wrong_gradient(results: list[Any]) -> None:
    assert isinstance(results[1], TransportError)
    assert "the gradient of microbatch 1 that stage 1 sends to stage 0 is (2, 3) bfloat16" in str(results[1])


def integers(transport: Transport) -> Generator[None, None, Any]:
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, torch.arange(3), note())


def check_integers(results: list[Any]) -> None:
    assert isinstance(results[0], TransportError)
    assert "torch.int64 cannot cross between stages: a stage must return a floating-point tensor" in str(results[0])


def slot_in_use(transport: Transport) -> Generator[None, None, Any]:
    """Stage 1 of 2 has two slots for activations: while both are in use there is none for a third."""
    if transport.stage == 0:
        for i in range(2):
            yield from transport.send(DOWN, i, message(i), note())
        return None
    kept = yield from transport.receive(DOWN, 0)
    yield from transport.receive(DOWN, 1)
    try:
        transport.post(DOWN, range(2, 3))
    except EngineError as error:
        return kept.payload.clone(), str(error)


def check_slot_in_use(results: list[Any]) -> None:
    kept, error = results[1]
    assert torch.equal(kept, message(0))
    assert "activations of stage 1: no slot is free for microbatch 2, microbatches [0, 1] hold them" in error


def phase_in_use(transport: Transport) -> Generator[None, None, Any]:
    if transport.stage == 0:
        yield from transport.send(DOWN, 0, message(0), note())
    else:
        yield from transport.receive(DOWN, 0)
        transport.begin_phase()


def check_phase_in_use(results: list[Any]) -> None:
    assert isinstance(results[1], EngineError)
    assert str(results[1]) == "activations of stage 1: a phase begins while they are in use"


PAIRS = [
    (copies, check_copies),
    (transposed, check_transposed),
    (large, check_large),
    (wrong_microbatch, check_wrong_microbatch),
    (wrong_shape, check_wrong_shape),
    (wrong_gradient, check_wrong_gradient),
    (integers, check_integers),
    (slot_in_use, check_slot_in_use),
    (phase_in_use, check_phase_in_use),
    (wrong_phase, check_wrong_phase),
]
CHAINS = [(fifo, check_fifo), (gathers, check_gathers), (phases, check_phases)]
CASES = [(2, *pair) for pair in PAIRS] + [(stages, *chain) for stages in (2, 3) for chain in CHAINS]


def _name(case: tuple[int, Script, Any]) -> str:
    return f"{case[1].__name__}-{case[0]}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_in_process(case: tuple[int, Script, Any]):
    stages, script, check = case
    check(in_process(stages, script))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of every case on real ranks: one world per number of stages."""
    results: dict[str, list[Any]] = {}
    for stages in (2, 3):
        cases = [case for case in CASES if case[0] == stages]
        folder: Path = tmp_path_factory.mktemp(f"world{stages}")
        by_rank = run_world(stages, folder, _on_ranks, [script for _, script, _ in cases])
        results |= {_name(case): [of_rank[n] for of_rank in by_rank] for n, case in enumerate(cases)}
    return results


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_distributed(case: tuple[int, Script, Any], ranks: dict[str, list[Any]]):
    case[2](ranks[_name(case)])


# -- parts ---------------------------------------------------------------------------------------------------------


def test_in_process_send_waits_while_the_edge_is_full():
    """Unbounded queues would let stage 0 run ahead where real ranks cannot."""
    sender, receiver = Hub([WallClock()] * 2, NOTE).transports()
    for i in range(3):
        assert list(sender.send(DOWN, i, message(i), note())) == []
    fourth = sender.send(DOWN, 3, message(3), note())
    assert next(fourth, "sent") is None
    assert list(receiver.receive(DOWN, 0)) == []
    assert next(fourth, "sent") == "sent"


def test_ring():
    ring = Ring(2, "ring")
    first, second = ring.claim(7), ring.claim(9)
    assert {first, second} == {0, 1}
    with pytest.raises(EngineError, match=r"no slot is free for microbatch 8, microbatches \[7, 9\] hold them"):
        ring.claim(8)
    assert list(ring.unposted([7, 9, 8])) == [8]
    with pytest.raises(EngineError, match=r"microbatches \[7, 9\] are expected, not \[9, 8\]"):
        ring.unposted([9, 8])
    with pytest.raises(EngineError, match=r"microbatch 9 is not the next one of \[7, 9\]"):
        ring.take(9)
    assert (ring.take(7), ring.take(9), ring.posted) == (first, second, False)
    with pytest.raises(EngineError, match="microbatch 8 holds no slot"):
        ring.free(8)
    ring.free(9)
    with pytest.raises(EngineError, match="microbatch 7 holds a slot already"):
        ring.claim(7)
    assert ring.claim(8) == second
    with pytest.raises(EngineError, match="ring: a phase begins while they are in use"):
        ring.begin_phase()
    ring.take(8)
    ring.free(8)
    ring.free(7)
    ring.begin_phase()
    assert list(ring.unposted(range(2))) == [0, 1]


@pytest.mark.parametrize(("shape", "dtype"), PHASES)
def test_spec_survives_the_wire(shape: tuple[int, ...], dtype: torch.dtype):
    spec = TensorSpec.of(torch.empty(shape, dtype=dtype))
    assert TensorSpec.decode(spec.encode()) == spec
    assert spec.nbytes == torch.empty(shape, dtype=dtype).nbytes


def test_spec_refuses_too_many_dimensions():
    with pytest.raises(TransportError, match="15 dimensions"):
        TensorSpec.of(torch.empty([1] * 15))


# -- through the pipeline ------------------------------------------------------------------------------------------


def test_stages_that_wait_for_each_other_are_a_deadlock_not_a_hang():
    """Stage 1 runs another K than stage 0: its update waits for a gather that stage 0 is not at."""
    pipeline = toys.in_process(2, microbatches=4)
    pipeline.runtimes[1].microbatches = 2
    pipeline.runtimes[1].schedule = sync_schedule("1f1b", 2, 2)
    with pytest.raises(EngineError, match=r"deadlock: stages \[0, 1\] wait for each other"):
        pipeline.run(toys.work(1, 1))


def test_shape_change_within_a_phase_is_refused_and_between_phases_fine():
    def shorter(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = toys.batches(i)
        return (inputs, targets) if i < 6 else (inputs[:2], targets[:2])

    pipeline = toys.in_process(2, microbatches=2, data=shorter)
    pipeline.run(toys.work(3, 3))
    with pytest.raises(StageFailure) as caught:
        pipeline.run(toys.work(1, 1, first_update=3))
    assert isinstance(caught.value.__cause__, TransportError)
    assert "rank 0, stage 0, action 0F6, microbatch 6: the activation of microbatch 6" in str(caught.value)

    pipeline = toys.in_process(2, microbatches=2, data=shorter)
    pipeline.run(toys.work(3, 3))
    pipeline.begin_phase()
    assert pipeline.run(toys.work(2, 2, first_update=3)).updates == 2


def test_evaluation_may_have_another_shape():
    pipeline = toys.in_process(3, microbatches=2)
    pipeline.run(toys.work(2, 2))
    inputs = torch.randn(7, toys.WIDTH)
    _, tokens = pipeline.evaluate(lambda i: (inputs, torch.zeros(7, dtype=torch.int64)), 2)
    assert tokens == 14
    pipeline.run(toys.work(2, 2, first_update=2))
