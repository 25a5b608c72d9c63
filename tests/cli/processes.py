"""Commands as users start them, ranks without the seconds that an interpreter takes to start, and pids."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ADAPIPE = (sys.executable, "-m", "adapipe")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")

TINY = ("--layers", "2", "--width", "16", "--heads", "2", "--sequence-length", "16", "--microbatch-size", "1")


def write_corpus(path: Path, words: int = 4000) -> Path:
    """A small text that is easy to learn."""
    chooser = random.Random(0)
    path.write_text(" ".join(chooser.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(words)))
    return path


def environment(**more: str) -> dict[str, str]:
    """Ours and `more`, with the source on the path, one thread per rank, and no traces of a launcher."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    paths = [more.pop("PYTHONPATH", ""), str(ROOT / "src"), inherited.get("PYTHONPATH", "")]
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **more}


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


@contextmanager
def started(command: Sequence[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own. At the end, it and all its descendants are killed."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(ADAPIPE_TEST_MARK=mark, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid, variables in _processes():
            if variables.get("ADAPIPE_TEST_MARK") == mark:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()


def run(command: Sequence[str], folder: Path, *, timeout: float = 100, **variables: str) -> Finished:
    """A command from start to end."""
    with started(command, folder, **variables) as process:
        out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    """All running processes that we may look into, with the variables that they were started with."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                content = (folder / "environ").read_bytes().decode(errors="replace")
                pairs = (pair.partition("=") for pair in content.split("\0"))
                yield int(folder.name), {name: value for name, _, value in pairs}


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """The ranks that a launcher has started: rank -> pid."""
    found = {}
    for pid, variables in _processes():
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid and "RANK" in variables:
                found[int(variables["RANK"])] = pid
    return found


def is_alive(pid: int) -> bool:
    """Does the process exist and run? One that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true result of `condition`. Fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def metrics(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The update lines and the evaluation lines of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "held_out_loss" in line]


def _rank_main(
    function: Callable[..., Any], args: Sequence[Any], rank: int, size: int, port: int, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    sys.exit(function(*args))


def fork_ranks(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[Finished]:
    """`function(*args)` on ranks as torchrun starts them, but forked, and nobody ends a rank whose peer has failed.

    Its result is the exit code. Fails for a rank that does not end in time.
    """
    importlib.import_module("torch._dynamo")  # as every optimizer does; here, the ranks need not, for a second each
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank_main, args=(function, args, rank, size, store.port, folder))
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    texts = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(size)]
    assert None not in codes, f"exit codes {codes} after {timeout} s: {texts}"
    return [Finished(code or 0, out, err) for code, (out, err) in zip(codes, texts, strict=True)]
