"""`adapipe train` through real processes, in every mode: what it prints, writes, and learns."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapipe.cli.main import main
from tests.cli.processes import ADAPIPE, TINY, TORCHRUN, Finished, fork_ranks, metrics, run

UPDATES = 300
EVALUATE_EVERY = 50
SHORT = ("--microbatches", "2", "--evaluation-microbatches", "4", "--evaluate-every", str(EVALUATE_EVERY))

Number = (int, float)
SUMMARY: dict[str, Any] = {
    "mode": str,
    "stages": int,
    "microbatches": int,
    "updates": int,
    "tokens": int,
    "seed": int,
    "clock": str,
    "training_seconds": float,
    "held_out_loss": float,
    "held_out_perplexity": float,
    "target_perplexity": (float, type(None)),
    "seconds_to_target": (float, type(None)),
    "tokens_per_second": dict,
    "idle_share": dict,
    "switches": int,
    "phases": list,
}
UPDATE_LINE: dict[str, Any] = {
    "update": int,
    "mode": str,
    "microbatches": int,
    "tokens": int,
    "training_seconds": float,
    "loss": float,
    "gradient_norm": float,
    "learning_rate": float,
    "staleness": list,
    "idle_share": list,
}
EVALUATION_LINE: dict[str, Any] = {
    "update": int,
    "mode": str,
    "training_seconds": Number,
    "held_out_loss": float,
    "held_out_perplexity": float,
}


class Run:
    """A finished run and the folder that it has written."""

    def __init__(self, finished: Finished, out: Path) -> None:
        self.finished = finished
        self.out = out
        assert finished.code == 0, finished
        self.summary = json.loads((out / "summary.json").read_text())
        self.updates, self.evaluations = metrics(out)


@pytest.fixture(scope="module")
def train(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run a command that ends in `train`, with a tiny model and more flags."""

    def command(before: tuple[str, ...], *flags: str) -> Run:
        folder = tmp_path_factory.mktemp("train")
        options = [*TINY, "--data", str(corpus), *SHORT, "--out", "run"]
        return Run(run([*before, "train", *options, *flags], folder), folder / "run")

    return command


@pytest.fixture(scope="module")
def runs(train: Callable[..., Run]) -> Callable[[str], Run]:
    """The run of a mode, made once."""
    made: dict[str, Run] = {}

    def get(mode: str) -> Run:
        if mode not in made:
            flags = ["--mode", mode, "--stages", "2", "--updates", str(UPDATES)]
            made[mode] = train(ADAPIPE, *flags)
        return made[mode]

    return get


def check_types(record: dict[str, Any], types: dict[str, Any]) -> None:
    for name, wanted in types.items():
        assert name in record
        assert isinstance(record[name], wanted), (name, record[name])
        assert not isinstance(record[name], bool), name


def check_run(made: Run, *, mode: str, stages: int, updates: int) -> None:
    """Everything in the folder is there, of the right type, and consistent."""
    names = {file.name for file in made.out.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "curves.png"}
    summary = made.summary
    check_types(summary, SUMMARY)
    assert (summary["mode"], summary["stages"], summary["clock"]) == (mode, stages, "wall")
    assert summary["updates"] == updates
    assert summary["tokens"] == updates * summary["microbatches"] * 16
    assert summary["held_out_perplexity"] == pytest.approx(math.exp(summary["held_out_loss"]))

    phases = summary["phases"]
    assert sum(phase["updates"] for phase in phases) == updates
    assert sum(phase["seconds"] for phase in phases) == pytest.approx(summary["training_seconds"])
    assert summary["switches"] == len(phases) - 1
    first = 0
    for phase in phases:
        assert set(phase) == {"mode", "first_update", "updates", "seconds"}
        assert phase["first_update"] == first
        assert phase["seconds"] > 0
        first += phase["updates"]
    used = {phase["mode"] for phase in phases}
    for name in ("tokens_per_second", "idle_share"):
        assert set(summary[name]) == {"sync", "async"}
        for which, value in summary[name].items():
            assert (value is not None) == (which in used)
    assert all(0 <= summary["idle_share"][which] <= 1 for which in used)
    assert all(summary["tokens_per_second"][which] > 0 for which in used)

    assert [line["update"] for line in made.updates] == list(range(1, updates + 1))
    clock = 0.0
    for line in made.updates:
        check_types(line, UPDATE_LINE)
        assert line["mode"] in ("sync", "async")
        assert line["training_seconds"] > clock
        clock = line["training_seconds"]
        assert len(line["staleness"]) == len(line["idle_share"]) == stages
        assert all(0 <= share <= 1 for share in line["idle_share"])
        if line["mode"] == "sync":
            assert line["staleness"] == [0.0] * stages
        assert line["staleness"][-1] == 0.0
    assert clock == summary["training_seconds"]
    for line in made.evaluations:
        check_types(line, EVALUATION_LINE)
    evaluated = [line["update"] for line in made.evaluations]
    assert evaluated == sorted(set(evaluated))
    assert {0, updates, *range(EVALUATE_EVERY, updates, EVALUATE_EVERY)} <= set(evaluated)
    assert made.evaluations[-1]["held_out_loss"] == summary["held_out_loss"]

    png = (made.out / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (1200, 675)


@pytest.mark.parametrize("mode", ["sync", "async", "adaptive"])
class TestModes:
    def test_the_folder_is_complete(self, runs: Callable[[str], Run], mode: str) -> None:
        check_run(runs(mode), mode=mode, stages=2, updates=UPDATES)

    def test_it_learns(self, runs: Callable[[str], Run], mode: str) -> None:
        made = runs(mode)
        assert made.evaluations[0]["held_out_perplexity"] > 200  # bytes at random: 256
        assert made.summary["held_out_perplexity"] < 10

    def test_phases(self, runs: Callable[[str], Run], mode: str) -> None:
        used = [phase["mode"] for phase in runs(mode).summary["phases"]]
        if mode == "adaptive":
            assert used[0] == "sync"
            assert "async" in used
        else:
            assert used == [mode]

    def test_only_asynchronous_gradients_are_stale(self, runs: Callable[[str], Run], mode: str) -> None:
        stale = {line["staleness"][0] > 0 for line in runs(mode).updates if line["mode"] == "async"}
        assert (True in stale) == (mode != "sync")

    def test_output_of_a_file_is_plain(self, runs: Callable[[str], Run], mode: str) -> None:
        finished = runs(mode).finished
        assert "\x1b" not in finished.out
        assert "\r" not in finished.out
        assert finished.err == ""
        lines = finished.out.splitlines()
        assert "2 stages" in lines[0]
        assert lines[-1] == "run written to run"
        last = f"{runs(mode).summary['held_out_perplexity']:.2f}"
        assert any(line.startswith("evaluation") and last in line for line in lines)


def test_two_stages_learn_what_one_learns(runs: Callable[[str], Run], corpus: Path, tmp_path: Path) -> None:
    two = runs("sync")
    options = [*TINY, "--data", str(corpus), *SHORT, "--out", str(tmp_path / "one")]
    assert main(["train", *options, "--mode", "sync", "--stages", "1", "--updates", str(UPDATES)]) == 0
    updates, evaluations = metrics(tmp_path / "one")
    for mine, theirs in zip(updates, two.updates, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], abs=1e-4)
        assert mine["learning_rate"] == theirs["learning_rate"]
    for mine, theirs in zip(evaluations, two.evaluations, strict=True):
        assert mine["held_out_loss"] == pytest.approx(theirs["held_out_loss"], abs=1e-5)


def test_under_torchrun_with_a_plan(train: Callable[..., Run]) -> None:
    made = train(
        (*TORCHRUN, "2", "-m", "adapipe"),
        *["--stages", "2", "--updates", "60", "--plan", "sync:20,async:30"],
    )
    check_run(made, mode="plan", stages=2, updates=60)
    assert [(phase["mode"], phase["updates"]) for phase in made.summary["phases"]] == [("sync", 20), ("async", 40)]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_target_ends_the_run(corpus: Path, tmp_path: Path, stages: int, mode: str) -> None:
    options = [*TINY, "--data", str(corpus), "--evaluate-every", "10", "--mode", mode, "--stages", str(stages)]
    goal = ["--updates", "200", "--target-perplexity", "150", "--out", str(tmp_path / "run")]
    ranks = fork_ranks(stages, tmp_path / "ranks", main, ["train", *options, *goal])
    made = Run(ranks[0], tmp_path / "run")
    assert made.summary["target_perplexity"] == 150.0
    assert made.summary["held_out_perplexity"] <= 150.0
    assert made.summary["updates"] < 200
    assert made.summary["updates"] % 10 == 0
    assert made.summary["seconds_to_target"] == made.summary["training_seconds"] > 0
    before = [line["held_out_perplexity"] for line in made.evaluations[:-1]]
    assert min(before) > 150.0


def test_a_target_out_of_reach_has_no_time(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [*TINY, "--data", str(corpus), "--stages", "1", "--updates", "3", "--out", str(out)]
    assert main(["train", *options, "--target-perplexity", "1"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["updates"], summary["target_perplexity"], summary["seconds_to_target"]) == (3, 1.0, None)
