"""`adapipe train --emulate` and `adapipe profile`: what they write, print and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import adapipe.cli.profile
from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.cli.main import main
from adapipe.schedule.cost import read_cost
from tests.cli.processes import ADAPIPE, TINY, fork_ranks, metrics, run

SHORT = ("--microbatches", "2", "--updates", "12", "--evaluate-every", "6", "--evaluation-microbatches", "2")


def emulate(corpus: Path, out: Path, *flags: str) -> dict[str, Any]:
    """An emulated run in this process; its summary."""
    words = ["train", "--emulate", *TINY, *SHORT, "--data", str(corpus), "--out", str(out), *flags]
    assert main(words) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert isinstance(summary, dict)
    return summary


def test_an_emulated_run(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ("--stages", "4", "--mode", "async", "--forward-ms", "1", "--timeline", "4:8", "--measure-memory")
    summary = emulate(corpus, tmp_path / "run", *flags)
    assert summary["clock"] == "virtual"
    # Three forwards until the pipeline is full, six backwards until it is empty: 12 updates of 2 microbatches of 3 ms.
    assert summary["training_seconds"] == pytest.approx(2 * (6 * 2 * 3e-3 + 9e-3))
    assert summary["in_flight"] == 1
    assert [set(stage) for stage in summary["peak_memory"]] == [
        {"weights", "versions", "gradients", "optimizer", "activations", "messages"}
    ] * 4
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        *("config.toml", "cost.toml", "metrics.jsonl", "decisions.jsonl", "summary.json"),
        *("curves.png", "timeline.png"),
    }
    assert read_cost(tmp_path / "run" / "cost.toml").stages[0].backward == 0.002
    out = capsys.readouterr().out
    assert "emulated: times are virtual (equal stages, 1 ms forward, 2 backward, 0 update)" in out
    updates, _ = metrics(tmp_path / "run")
    assert updates[-7]["staleness"] == [1.5, 1.0, 0.5, 0.0]

    again = emulate(corpus, tmp_path / "again", "--config", str(tmp_path / "run" / "config.toml"))
    for figure in ("training_seconds", "held_out_loss", "tokens_per_second", "phases", "peak_memory"):
        assert again[figure] == summary[figure]


def test_emulated_and_real_runs_learn_the_same(corpus: Path, tmp_path: Path):
    words = (*TINY, *SHORT, "--data", str(corpus), "--stages", "2", "--plan", "sync:3,async:6,sync:3")
    real = fork_ranks(2, tmp_path / "ranks", main, ["train", *words, "--out", str(tmp_path / "real")])
    assert [finished.code for finished in real] == [0, 0], real
    emulate(corpus, tmp_path / "emulated", "--stages", "2", "--plan", "sync:3,async:6,sync:3")
    for real_lines, lines in zip(metrics(tmp_path / "real"), metrics(tmp_path / "emulated"), strict=True):
        for name in ("update", "mode", "loss", "gradient_norm", "clip_norm", "staleness", "held_out_loss"):
            assert [line.get(name) for line in real_lines] == [line.get(name) for line in lines]


def test_a_budget_of_virtual_seconds(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ("--stages", "2", "--mode", "sync", "--seconds", "0.35", "--forward-ms", "10", "--updates", "None")
    flags += ("--sync-schedule", "1f1b")
    summary = emulate(corpus, tmp_path / "run", *flags, "--timeline", "7:9")
    assert "no timeline: the run ended before update 7\n" in capsys.readouterr().out
    assert not (tmp_path / "run" / "timeline.png").exists()
    # Of 90 ms each. The clock is read when one begins, and the fifth, which finds the budget spent, is the last.
    assert summary["updates"] == 5
    assert summary["training_seconds"] == pytest.approx(0.45)


def test_a_schedule_of_ones_own(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It learns what every schedule learns, and says what cannot run."""
    words = ("--stages", "2", "--mode", "sync")
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W1,1W0\n")
    summary = emulate(corpus, tmp_path / "own", *words, "--sync-schedule", str(path))
    assert summary["sync_schedule"] == str(path)
    known = emulate(corpus, tmp_path / "known", *words, "--sync-schedule", "gpipe")
    assert known["held_out_loss"] == pytest.approx(summary["held_out_loss"], rel=1e-6)
    path.write_text("0F0,0B0\n1F0,1B0\n")
    capsys.readouterr()
    assert main(["train", *TINY, *words, "--sync-schedule", str(path)]) == BAD_INPUT
    assert capsys.readouterr().err.endswith(f"{path} is for --microbatches 1, not 4\n")


def test_the_fastest_schedule_is_chosen_and_said(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    summary = emulate(corpus, tmp_path / "run", "--stages", "2", "--mode", "sync")
    assert summary["sync_schedule"] == "zb-h1"
    out = capsys.readouterr().out
    assert "synchronous schedule zb-h1: the fastest for the measured costs (modelled per update: 1f1b" in out


def test_profile_then_emulate_then_plan(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More stages than cores are measured in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapipe.cli.profile, "cores", lambda: 1)
    words = ["profile", *TINY, "--stages", "3", "--updates", "4", "--out", "cost.toml"]
    assert main(words) == 0
    cost = read_cost(tmp_path / "cost.toml")
    assert [link.latency for link in cost.links] == [0, 0]
    assert all(0 < stage.forward < 1 and 0 < stage.backward < 1 and 0 < stage.update < 1 for stage in cost.stages)
    assert cost.tokens == 16
    assert cost.message_bytes == 16 * 16 * 4
    assert cost.knows_memory
    assert all(stage.optimizer_bytes > stage.weight_bytes for stage in cost.stages)  # type: ignore[operator]

    assert main(words) == BAD_INPUT  # the file exists
    assert main([*words, "--overwrite"]) == 0
    summary = emulate(corpus, tmp_path / "run", "--stages", "3", "--cost", "cost.toml")
    assert summary["clock"] == "virtual"
    assert main(["plan", "--cost", "cost.toml", "--memory-gb", "1", "--json", "plan.json"]) == 0


def test_profile_of_real_ranks(tmp_path: Path):
    finished = run([*ADAPIPE, "profile", *TINY, "--stages", "2", "--updates", "4"], tmp_path)
    assert finished.code == 0, finished
    cost = read_cost(tmp_path / "cost.toml")
    assert "2 stages as processes of their own" in cost.source
    assert 0 < cost.links[0].latency < 0.1
    assert re.search(
        r"^stage 1: forward .* ms, backward .* ms \(halves .* and .*\), update .* ms", finished.out, re.MULTILINE
    )
    assert finished.out.endswith("cost file written to cost.toml\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train --cost cost.toml", "--cost is for modelled devices: give --emulate with it"),
        ("train --jitter 0.1", "--jitter is for modelled devices"),
        ("train --emulate --cost none.toml", "cost file none.toml cannot be read"),
        ("train --emulate --forward-ms -3", "--forward-ms: stage 0: forward = -0.003"),
        ("train --emulate --device cuda", "--emulate runs all stages on the CPU"),
        ("train --emulate --stages 99", "99 stages need at least 99 blocks"),
        ("train --emulate --in-flight 0", "--in-flight 0: give at least 1"),
        ("train --emulate --timeline 3", "--timeline '3': give the first update and the one after the last"),
        ("train --emulate --timeline 3:3", "--timeline '3:3'"),
        ("train --emulate --timeline -1:3", "--timeline"),
        ("profile --updates 1", "--updates 1: give at least 4"),
        ("profile --stages 0", "--stages 0: a pipeline has at least 1"),
        ("profile --stages 9", "9 stages need at least 9 blocks"),
        ("profile --out missing/cost.toml", "--out missing/cost.toml: its folder does not exist"),
        ("profile --out .", "--out . exists"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.startswith(f"adapipe {words.split()[0]}: ")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_emulation_under_a_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["train", "--emulate"]) == BAD_INPUT
    assert "--emulate runs all stages in one process: start it without torchrun" in capsys.readouterr().err
