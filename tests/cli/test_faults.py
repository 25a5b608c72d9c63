"""What fails ends every rank within seconds and says who, where and why, once. Interrupts end cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adapipe
from tests.cli.processes import (
    ADAPIPE,
    TINY,
    TORCHRUN,
    Finished,
    fork_ranks,
    is_alive,
    ranks_of,
    run,
    started,
    wait_until,
)

SECONDS_TO_END = 15


# -- the library, on ranks that nobody else ends -----------------------------------------------------------------------


class _FailsForward(nn.Linear):
    """Fails at its 30th training microbatch."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 30:
            raise ZeroDivisionError("injected")
        return super().forward(x)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        context.fails = fails
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.fails:
            raise ZeroDivisionError("injected")
        return gradient, None


class _FailsBackward(nn.Linear):
    """Fails in the backward of its 30th training microbatch."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return _Failing.apply(super().forward(x), self.calls == 30)


def _train(
    mode: str,
    *,
    first: type[nn.Linear] = nn.Linear,
    last: type[nn.Linear] = nn.Linear,
    loads: Callable[[int], None] = lambda i: None,
    scale: Callable[[int], float] = lambda i: 1.0,
    held_out: Any = None,
) -> None:
    torch.manual_seed(0)

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        loads(i)
        x = scale(i) * torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        return x, torch.zeros(4, dtype=torch.long)

    adapipe.train(
        [first(8, 8), nn.ReLU(), last(8, 3)],
        loss=nn.CrossEntropyLoss(reduction="sum"),
        batches=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        mode=mode,
        updates=100_000,
        held_out=held_out or [batch(0)],
        costs=[1.0, 0.0, 1.0],
    )


def _fail_forward(mode: str) -> None:
    _train(mode, last=_FailsForward)


def _fail_backward(mode: str) -> None:
    _train(mode, first=_FailsBackward)


def _refuse_30(i: int) -> None:
    if i == 29 and os.environ.get("RANK") == "0":
        raise FileNotFoundError("injected")


def _fail_loading(mode: str) -> None:
    _train(mode, loads=_refuse_30)


def _diverge(mode: str) -> None:
    _train(mode, scale=lambda i: float("nan") if i == 29 else 1.0)


class _HeldOut(list[Any]):
    evaluations = 0

    def __getitem__(self, i: Any) -> Any:
        if i == 0:
            self.evaluations += 1
        if self.evaluations == 2 and os.environ["RANK"] == "0":
            raise FileNotFoundError("injected")
        return super().__getitem__(i)


def _fail_evaluation(mode: str) -> None:
    _train(mode, held_out=_HeldOut([(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))]))


def _exit_silently(mode: str) -> None:
    def leave(i: int) -> None:
        if i == 29 and os.environ["RANK"] == "1":
            os._exit(0)

    _train(mode, loads=leave)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("function", "place", "cause"),
    [
        (_fail_forward, "rank 1, stage 1, action 1F29, microbatch 29: ", "ZeroDivisionError: injected"),
        (_fail_backward, "rank 0, stage 0, action 0B29, microbatch 29: ", "ZeroDivisionError: injected"),
        (_fail_loading, "rank 0, stage 0, action 0F29, microbatch 29: ", "FileNotFoundError: injected"),
        (_diverge, "rank 1, stage 1, action 1F29, microbatch 29: ", "the loss is nan"),
        (_fail_evaluation, "rank 0, stage 0, action 0F0, microbatch 0: ", "FileNotFoundError: injected"),
    ],
    ids=["forward", "backward", "loader", "nan", "evaluation"],
)
def test_a_failure_in_a_stage(
    tmp_path: Path, mode: str, function: Callable[[str], None], place: str, cause: str
) -> None:
    ranks = fork_ranks(2, tmp_path, function, mode, timeout=SECONDS_TO_END + 15)
    culprit, other = ranks if place.startswith("rank 0") else ranks[::-1]
    assert culprit.code == other.code == 1
    last = culprit.err.splitlines()[-1]
    assert "StageFailure: " + place in last
    assert cause in last
    assert "Traceback" in culprit.err
    if "injected" in cause:
        assert culprit.err.count("in _refuse_30\n" if function is _fail_loading else "injected") >= 1
        assert Path(__file__).name in culprit.err
    last = other.err.splitlines()[-1]
    assert f"PeerFailure: rank {1 - int(place[5])} stops: {place}" in last
    assert cause in last


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_that_leaves_without_a_word(tmp_path: Path, mode: str) -> None:
    start = time.monotonic()
    stays, leaves = fork_ranks(2, tmp_path, _exit_silently, mode, timeout=SECONDS_TO_END + 15)
    assert time.monotonic() - start < SECONDS_TO_END + 5
    assert (stays.code, leaves.code) == (1, 0)
    assert "PeerFailure: rank 0 (stage 0) lost rank 1 (stage 1), which ended without a message" in stays.err


def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
from torch import nn
import adapipe

class Block(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += self.training
        if self.calls == 30:
            raise ZeroDivisionError("injected")
        return super().forward(x)

def batch(i):
    return torch.ones(4, 8), torch.zeros(4, dtype=torch.long)

adapipe.train(
    [nn.Linear(8, 8), Block(8, 8)],
    loss=nn.CrossEntropyLoss(reduction="sum"),
    batches=batch,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    mode="async",
    updates=100_000,
)
"""
    )
    finished = run([*TORCHRUN, "2", str(script)], tmp_path)
    assert finished.code == 1
    place = "rank 1, stage 1, action 1F29, microbatch 29: ZeroDivisionError: injected"
    assert finished.err.count("StageFailure: " + place) == 1
    assert 'script.py", line 11, in forward' in finished.err


# -- the command -------------------------------------------------------------------------------------------------------

ENDLESS = [*TINY, "--mode", "async", "--updates", "1000000", "--evaluate-every", "10", "--out", "run"]


Training = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def training(corpus: Path, tmp_path: Path) -> Training:
    """`adapipe train`, started and in the middle of training."""

    @contextmanager
    def start(stages: int = 2) -> Iterator[subprocess.Popen[str]]:
        command = [*ADAPIPE, "train", *ENDLESS, "--data", str(corpus), "--stages", str(stages)]
        with started(command, tmp_path) as launcher:
            file = tmp_path / "run" / "metrics.jsonl"
            wait_until(
                lambda: launcher.poll() is not None or (file.exists() and file.read_text().count("\n") > 20),
                60,
                "first updates",
            )
            assert launcher.poll() is None
            yield launcher

    return start


def _ranks(launcher: subprocess.Popen[str]) -> dict[int, int]:
    ranks = ranks_of(launcher)
    assert sorted(ranks) == [0, 1]
    return ranks


def _ended(launcher: subprocess.Popen[str], ranks: dict[int, int]) -> Finished:
    """How a launcher ends, which it and its ranks must do in time."""
    deadline = time.monotonic() + SECONDS_TO_END
    out, err = launcher.communicate(timeout=SECONDS_TO_END)
    wait_until(lambda: not any(map(is_alive, ranks.values())), deadline - time.monotonic(), "the ranks have ended")
    return Finished(launcher.returncode, out, err)


def test_an_exception_in_a_block(corpus: Path, tmp_path: Path) -> None:
    """A hook of the interpreter makes a block of the reference model fail on rank 1."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import os

if os.environ.get("RANK") == "1":
    from adapipe.models.gpt import Head

    original, calls = Head.forward, 0

    def broken(self, x):
        global calls
        calls += self.training
        if calls == 30:
            raise ZeroDivisionError("injected")
        return original(self, x)

    Head.forward = broken
"""
    )
    command = [*ADAPIPE, "train", *ENDLESS, "--data", str(corpus), "--stages", "2"]
    finished = run(command, tmp_path, PYTHONPATH=str(tmp_path))
    assert finished.code == 1
    place = "rank 1, stage 1, action 1F29, microbatch 29: ZeroDivisionError: injected"
    assert finished.err.splitlines()[-1] == f"adapipe train failed: {place}"
    assert finished.err.count("adapipe train failed") == 1
    assert finished.err.count("Traceback") == 1
    assert re.search(r'sitecustomize.py", line \d+, in broken', finished.err)
    assert "run written" not in finished.out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(training: Training, rank: int) -> None:
    with training() as launcher:
        ranks = _ranks(launcher)
        os.kill(ranks[rank], signal.SIGKILL)
        finished = _ended(launcher, ranks)
    assert finished.code == 1
    assert f"rank {rank} (stage {rank}) was killed (SIGKILL)" in finished.err
    assert "Traceback" not in finished.err
    assert "run written" not in finished.out


def test_a_terminated_launcher(training: Training) -> None:
    with training() as launcher:
        ranks = _ranks(launcher)
        launcher.terminate()
        finished = _ended(launcher, ranks)
    assert finished.code not in (0, None)
    assert "Traceback" not in finished.err
    assert "run written" not in finished.out  # it has no summary


def test_a_killed_launcher_leaves_no_ranks(training: Training) -> None:
    with training() as launcher:
        ranks = _ranks(launcher)
        launcher.kill()
        wait_until(lambda: not any(map(is_alive, ranks.values())), SECONDS_TO_END, "the ranks have ended")


@pytest.mark.parametrize("stages", [1, 2])
def test_an_interrupt(training: Training, tmp_path: Path, stages: int) -> None:
    with training(stages) as launcher:
        ranks = _ranks(launcher) if stages > 1 else {}
        os.killpg(launcher.pid, signal.SIGINT)
        finished = _ended(launcher, ranks)
    assert finished.err == ""
    out = tmp_path / "run"
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert 0 < summary["updates"] < 1_000_000
    assert sum("loss" in line for line in lines) == summary["updates"]
    assert lines[-1]["held_out_loss"] == summary["held_out_loss"]
    assert lines[-1]["update"] == summary["updates"]
    png = (out / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert b"IEND" in png[-12:]
    assert finished.code == 130
    assert finished.out.splitlines()[-1] == "interrupted; run written to run"


def test_an_interrupt_while_ranks_start(corpus: Path, tmp_path: Path) -> None:
    command = [*ADAPIPE, "train", *ENDLESS, "--data", str(corpus), "--stages", "2"]
    with started(command, tmp_path) as launcher:
        ranks = wait_until(lambda: len(found := ranks_of(launcher)) == 2 and found, 60, "ranks have started")
        time.sleep(0.5)
        os.killpg(launcher.pid, signal.SIGINT)
        finished = _ended(launcher, ranks)
    assert finished.code == 130
    assert "Traceback" not in finished.err
    assert ("run written" in finished.out) == (tmp_path / "run" / "summary.json").exists()
