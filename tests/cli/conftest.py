"""A small corpus, and protection of this process from what the command does to its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.processes import LAUNCHER_VARIABLES, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    folder = os.getcwd()
    yield
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(threads)
    os.chdir(folder)
