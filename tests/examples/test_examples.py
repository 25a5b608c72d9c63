"""The examples do what they say, as their users start them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, TORCHRUN, run

OWN_MODEL = ROOT / "examples" / "own_model.py"


@pytest.mark.parametrize(
    ("command", "stages"), [((sys.executable,), 1), ((*TORCHRUN, "2"), 2)], ids=["python", "torchrun"]
)
def test_own_model_learns(tmp_path: Path, command: tuple[str, ...], stages: int) -> None:
    finished = run([*command, str(OWN_MODEL)], tmp_path)
    assert finished.code == 0, finished
    # Every rank knows it and prints it; two that print at once may share a line.
    losses = [float(loss) for loss in re.findall(r"held-out loss (\d+\.\d{3})", finished.out)]
    assert len(losses) == stages
    assert len(set(losses)) == 1
    assert losses[0] < 0.3
    assert f"{stages} stage" in finished.out
    assert list(tmp_path.iterdir()) == []


def test_own_model_is_short() -> None:
    lines = OWN_MODEL.read_text().splitlines()
    assert len(lines) < 40
    start = lines.index("result = adapipe.train(")
    assert lines.index(")") - start + 1 <= 14
