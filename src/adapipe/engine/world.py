"""The ranks of a pipeline: who they are, how they are connected, and how they learn of each other's failures.

One rank is one stage. Process groups keep traffic apart: activations, gradients, exchanges both ways, and gathers.
The first failure of a run is written to the ranks' shared store, so that every other rank knows whom to blame.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from adapipe.engine.transport.base import Direction
from adapipe.errors import ConfigurationError, PeerFailure

_FAILURE_KEY = "adapipe/failure"
_SURVIVOR_KEY = "adapipe/survivor/"
_GREETING = 4242
REPORT_SECONDS = 3.0
"""How long a rank that lost a peer waits for the peer's own account of it."""


def launched_world_size() -> int | None:
    """The number of ranks: of the process group that the caller has made, or as torchrun (or another launcher that sets
    its variables) started them. None without either."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE")
    if size is None or "RANK" not in os.environ:
        return None
    if not size.isdigit() or int(size) < 1:
        raise ConfigurationError(f"the environment variable WORLD_SIZE is {size!r}, not a number of ranks")
    return int(size)


class World:
    """This process as one rank of several. Make it with `join`; `close` it at the end."""

    def __init__(self, device: torch.device, owns_process_group: bool) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._store: Any = _get_default_store()
        self._owns_process_group = owns_process_group
        self.groups = {direction: dist.new_group() for direction in Direction}
        self.exchanges = {direction: dist.new_group() for direction in Direction}
        self.control = dist.new_group()
        self._greet()

    @classmethod
    def join(
        cls,
        device: torch.device,
        *,
        init_method: str | None = None,
        rank: int = -1,
        size: int = -1,
        timeout: float = 1800.0,
    ) -> World:
        """Join the other ranks and open every edge. Uses the environment that torchrun sets unless given a rendezvous.

        timeout: seconds after which a communication that does not complete counts as failed.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        owns = not dist.is_initialized()
        if owns:
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        elif dist.get_backend() != backend:
            raise ConfigurationError(
                f"torch.distributed runs on {dist.get_backend()}, but {device.type} stages need {backend}: "
                "initialise it with that backend, or leave it to adapipe"
            )
        return cls(device, owns)

    def _greet(self) -> None:
        """Send one number over every edge in a fixed order: connections are made lazily, and must be made before the
        schedule starts, or ranks that make them in different orders wait for each other."""
        edges = [*self.groups.items(), *self.exchanges.items()]
        for direction, group in edges:
            for sender in range(self.size):
                receiver = sender + direction.step
                if not 0 <= receiver < self.size or self.rank not in (sender, receiver):
                    continue
                number = torch.tensor([_GREETING + sender], device=self.device)
                if self.rank == sender:
                    with self.losing(receiver):
                        dist.send(number, receiver, group=group)
                else:
                    number.zero_()
                    with self.losing(sender):
                        dist.recv(number, sender, group=group)
                    if int(number) != _GREETING + sender:
                        raise ConfigurationError(
                            f"rank {self.rank} got {int(number)} as greeting from rank {sender}: "
                            "the ranks do not run the same program"
                        )
        with self.losing(None):
            dist.barrier(group=self.control)

    def report_failure(self, message: str) -> bool:
        """Write down why this rank failed. True if it is the first of the run to do so."""
        try:
            stored = self._store.compare_set(_FAILURE_KEY, "", message)
        except Exception:  # the store is gone with the rank that held it
            return True
        return bool(stored.decode() == message)

    def reported_failure(self, seconds: float = 0.0) -> str | None:
        """The first failure of the run, waiting up to `seconds` for one to be written."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self._store.check([_FAILURE_KEY]):
                    return str(self._store.get(_FAILURE_KEY).decode())
            except Exception:  # the store is gone with the rank that held it
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    @contextmanager
    def losing(self, peer: int | None) -> Iterator[None]:
        """Turn a broken connection to `peer` (None: any of them) into a PeerFailure that names the culprit."""
        try:
            yield
        except RuntimeError as error:
            self._store_quietly(f"{_SURVIVOR_KEY}{self.rank}")
            earlier = self.reported_failure(REPORT_SECONDS)
            if earlier is not None:
                raise PeerFailure(f"rank {self.rank} stops: {earlier}", reported=True) from None
            message = (
                f"rank {self.rank} (stage {self.rank}) lost {self._name_lost(peer)}, which ended without a message: "
                "killed, out of memory, or cut off from the network"
            )
            first = self.report_failure(message)
            raise PeerFailure(message, reported=not first) from error

    def _store_quietly(self, key: str) -> None:
        with contextlib.suppress(Exception):  # the store is gone with the rank that held it
            self._store.set(key, "1")

    def _name_lost(self, peer: int | None) -> str:
        """The peer, or after a broken gather the ranks that have not said that they survived it."""
        lost = [peer] if peer is not None else []
        with contextlib.suppress(Exception):
            if peer is None:
                lost = [rank for rank in range(self.size) if not self._store.check([f"{_SURVIVOR_KEY}{rank}"])]
        if not lost:
            return "another rank"
        return " and ".join(f"rank {rank} (stage {rank})" for rank in lost)

    def close(self) -> None:
        """Part in peace. The process group stays until the process ends: one made anew in the same store would find the
        old one's addresses there."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Let the groups go while Python still runs. A thread of theirs that outlives it, and then frees the tensors of
        the last gather, aborts the process."""
        groups = [*self.groups.values(), *self.exchanges.values(), self.control]
        self.groups, self.exchanges, self.control, self._store = {}, {}, None, None
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)
            if self._owns_process_group:
                dist.destroy_process_group()
        del groups
        gc.collect()  # of pipelines that have ended

    def abandon(self) -> None:
        """Part in failure: close the connections, so that ranks that wait for this one do not wait for its end."""
        for group in (*self.groups.values(), *self.exchanges.values(), self.control):
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
