"""Real ranks for tests: forked processes that meet through a file, a second or less per world."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    result: Any = None  # what it returned
    error: str = ""  # the class of what it raised
    message: str = ""
    reported: bool | None = None  # of a PeerFailure
    trace: str = ""
    exit_code: int | None = None  # negative: the signal that killed it; None: it had to be stopped
    seconds: float = float("inf")  # from the start of the world to its end


def _rank_main(function: Callable[..., Any], rank: int, size: int, folder: Path, args: tuple[Any, ...]) -> None:
    from adapipe.engine.world import World

    torch.set_num_threads(1)
    try:
        world = World.join(torch.device("cpu"), init_method=f"file://{folder / 'rendezvous'}", rank=rank, size=size)
        ending = {"result": function(world, *args)}
        world.close()
    except BaseException as error:
        ending = {
            "error": type(error).__name__,
            "message": str(error),
            "reported": getattr(error, "reported", None),
            "trace": traceback.format_exc(),
        }
    (folder / f"ending{rank}").write_bytes(pickle.dumps(ending))
    sys.exit("error" in ending)


def start_world(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Outcome]:
    """`function(world, *args)` on `size` ranks; how each ended, in rank order. Ranks that do not end are stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank_main, args=(function, rank, size, folder, args), daemon=True)
        for rank in range(size)
    ]
    start = time.monotonic()
    for process in ranks:
        process.start()
    ended: dict[int, dict[str, Any]] = {}
    while len(ended) < size and time.monotonic() - start < timeout:
        time.sleep(0.02)
        for rank, process in enumerate(ranks):
            if rank not in ended and not process.is_alive():
                ended[rank] = {"exit_code": process.exitcode, "seconds": time.monotonic() - start}
    for process in ranks:
        process.kill()
        process.join()
    for rank, ending in ended.items():
        path = folder / f"ending{rank}"
        if path.exists():
            ending.update(pickle.loads(path.read_bytes()))
    return [Outcome(**ended.get(rank, {})) for rank in range(size)]


def run_world(size: int, folder: Path, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(world, *args)` on `size` ranks; their results in rank order. Fails with the ranks' tracebacks."""
    outcomes = start_world(size, folder, function, *args, timeout=timeout)
    errors = [f"rank {rank}:\n{outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not errors, "\n".join(errors)
    exit_codes = [outcome.exit_code for outcome in outcomes]
    assert exit_codes == [0] * size, f"exit codes {exit_codes} (None: did not end within {timeout} seconds)"
    return [outcome.result for outcome in outcomes]
