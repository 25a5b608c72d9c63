"""Real ranks for tests: forked processes that meet through a file, about a second per world."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _rank_main(function: Callable[..., Any], rank: int, size: int, folder: Path, args: tuple[Any, ...]) -> None:
    from adapipe.engine.world import World

    torch.set_num_threads(1)
    try:
        world = World.join(torch.device("cpu"), init_method=f"file://{folder / 'rendezvous'}", rank=rank, size=size)
        result = function(world, *args)
        world.close()
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        raise


def run_world(size: int, folder: Path, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(world, *args)` on `size` ranks; their results in rank order. Fails with the first rank's traceback."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank_main, args=(function, rank, size, folder, args), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout)
    stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
    errors = [f"rank {r}:\n{(folder / f'error{r}').read_text()}" for r in range(size) if (folder / f"error{r}").exists()]
    if errors:
        raise AssertionError("\n".join(errors))
    assert not stuck, f"ranks {stuck} did not end within {timeout} seconds"
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(size)]
