"""`adapipe plan`: tables, the recommendation, the picture; nonsense is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.cli.main import main
from adapipe.schedule import sync_schedule
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, cost_toml
from adapipe.schedule.csv_file import schedule_csv
from adapipe.schedule.laws import time_per_update

MODEL = ("--layers", "6", "--width", "64", "--heads", "4", "--sequence-length", "32", "--tflops", "0.01")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    stages = (StageCost(0.01, 0.02, weight_bytes=1000, optimizer_bytes=2000, activation_bytes=5000),) * 2
    (tmp_path / "cost.toml").write_text(cost_toml(CostModel(stages, (LinkCost(),), message_bytes=10, tokens=64)))
    return tmp_path


def plan(*words: str) -> list[dict[str, object]]:
    """The figures of a plan that works."""
    assert main(["plan", *words, "--json", "plan.json"]) == 0
    figures = json.loads(Path("plan.json").read_text())
    assert isinstance(figures, list)
    return figures


def test_equal_stages_follow_the_law(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--stages", "2,4", "--microbatches", "1,8", "--forward-ms", "1")
    figures = plan(*words, "--modes", "gpipe,1f1b,zb-h1,async")
    assert len(figures) == 16
    for figure in figures:
        c = figure["candidate"]
        assert isinstance(c, dict)
        n = float("inf") if c["mode"] == "async" else 1
        expected = 3e-3 * time_per_update(c["stages"], c["microbatches"], n)
        # Halves of a backward that nobody named are equal: I = W = F.
        best = 1e-3 * (3 * c["microbatches"] + 2 * (c["stages"] - 1) - min(c["stages"], c["microbatches"]) + 1)
        if c["mode"] == "zb-h1":
            expected = best
        assert figure["seconds_per_update"] == pytest.approx(expected)
        assert figure["bubble"] == pytest.approx(1 - 3e-3 * c["microbatches"] / expected)
        assert figure["speed_up"] == pytest.approx(best / expected)
        assert figure["against"] == "zb-h1"
        ahead = [0 if n == 1 else c["stages"] - 1 - s for s in range(c["stages"])]
        assert figure["mean_staleness"] == [w / c["microbatches"] for w in ahead]
        assert figure["most_stale"] == [-(-w // c["microbatches"]) for w in ahead]
        assert figure["memory"] is None
    out = capsys.readouterr().out
    assert "all times are modelled (virtual clock)" in out
    # All asynchronous plans are equally fast per microbatch; the one with least staleness is chosen.
    assert "recommended: --mode async --stages 2 --microbatches 8\n" in out
    assert "1.04 times sync (zb-h1) with the same stages" in out
    assert (folder / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(folder.glob("*.jsonl"))


def test_one_mode_only(capsys: pytest.CaptureFixture[str]):
    assert [f["candidate"]["mode"] for f in plan("--modes", "gpipe", "--stages", "3")] == ["gpipe"]  # type: ignore[index]
    out = capsys.readouterr().out
    assert "recommended: --mode sync --sync-schedule gpipe --stages 3 --microbatches 8\n" in out


def test_orders_to_look_at_and_to_run():
    plan("--modes", "zb-h1", "--stages", "3", "--microbatches", "4", "--csv", "zb.csv")
    assert Path("zb.csv").read_text() == schedule_csv(sync_schedule("zb-h1", 3, 4))


def test_asynchronous_orders_are_not_written(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--modes", "async", "--csv", "async.csv"]) == BAD_INPUT
    assert "--csv: the recommended plan is asynchronous" in capsys.readouterr().err


def test_a_cost_file_names_its_stages_and_tokens(capsys: pytest.CaptureFixture[str]):
    sync, other = plan("--cost", "cost.toml", "--microbatches", "4", "--modes", "1f1b,async")
    assert sync["tokens_per_second"] == pytest.approx(4 * 64 / 0.15)
    assert other["tokens_per_second"] == pytest.approx(64 / 0.03)
    # Two microbatches in flight: 5000 each; weights, gradients, optimizer; 2 gradient, 2 send slots of 10 bytes.
    assert sync["memory"][0]["activations"] == 10_000  # type: ignore[index]
    assert sync["memory"][0] | {"messages": 0} == {  # type: ignore[index]
        "weights": 1000,
        "versions": 0,
        "gradients": 1000,
        "optimizer": 2000,
        "activations": 10_000,
        "messages": 0,
    }
    assert sync["memory"][0]["messages"] == 40  # type: ignore[index]


def test_links_of_the_command_line_replace_those_of_the_file():
    slow = plan("--cost", "cost.toml", "--latency-ms", "50", "--modes", "async", "--microbatches", "4")
    assert slow[0]["seconds_per_update"] == pytest.approx(2 * (0.03 * 2 + 0.1 - 0.0))


def test_slow_links_and_more_in_flight(capsys: pytest.CaptureFixture[str]):
    words = ("--stages", "4", "--microbatches", "4", "--latency-ms", "50", "--forward-ms", "10")
    one, five = plan(*words, "--modes", "async", "--in-flight", "1,5")
    assert one["seconds_per_update"] > 2 * 0.12  # type: ignore[operator]
    assert five["seconds_per_update"] == pytest.approx(0.12)
    assert five["most_stale"] == [4, 3, 2, 0]
    assert "recommended: --mode async --stages 4 --microbatches 4 --in-flight 5" in capsys.readouterr().out
    plan(*words, "--modes", "async")
    assert "--in-flight 5 would hide them and be 3.50 times as fast" in capsys.readouterr().out.replace("\n", " ")


def test_a_model(capsys: pytest.CaptureFixture[str]):
    figures = plan(*MODEL, "--stages", "2,4", "--microbatches", "4", "--memory-gb", "1")
    assert all(figure["fits"] for figure in figures)
    out = capsys.readouterr().out
    assert "costs: 6 layers of width 64 at 0.01 TFLOP/s" in out
    assert "does not fit" not in out


def test_what_does_not_fit_is_marked_and_not_recommended(capsys: pytest.CaptureFixture[str]):
    figures = plan(*MODEL, "--stages", "1,4", "--microbatches", "4", "--modes", "1f1b", "--memory-gb", "0.005")
    assert [figure["fits"] for figure in figures] == [False, True]
    out = capsys.readouterr().out
    assert out.count("does not fit") == 1
    assert "recommended: --mode sync --sync-schedule 1f1b --stages 4" in out
    assert "of those that fit" in out


def test_too_little_memory_for_any_plan(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *MODEL, "--memory-gb", "0.0001"]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert "does not fit" in out  # the table shows by how much
    assert err.startswith("adapipe plan: nothing fits into 0.0001 GB per device: the smallest (")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stages 0", "--stages 0: give at least 1"),
        ("--stages=-2", "--stages -2: give at least 1"),
        ("--stages 2,x", "--stages '2,x': give whole numbers separated by commas"),
        ("--stages 2,,4", "--stages '2,,4'"),
        ("--stages 2.5", "--stages '2.5'"),
        ("--microbatches 0", "--microbatches 0: give at least 1"),
        ("--in-flight 0", "--in-flight 0: give at least 1"),
        ("--modes sink", "--modes sink: unknown mode, choose of gpipe, 1f1b, zb-h1, async"),
        ("--modes 1f1b,", "--modes : unknown mode"),
        ("--forward-ms 0", "--forward-ms: forward and backward are 0 on every stage"),
        ("--forward-ms -1", "--forward-ms: stage 0: forward = -0.001: give a number that is not negative"),
        ("--forward-ms nan", "stage 0: forward = nan"),
        ("--backward-ms -1", "--backward-ms: stage 0: backward = -0.001"),
        ("--update-ms -1", "stage 0: update = -0.001"),
        ("--latency-ms -1", "link 0: latency = -0.001"),
        ("--bandwidth-gbit 0", "link 0: bandwidth = 0"),
        ("--jitter -1", "jitter = -1"),
        (
            "--bandwidth-gbit 10",
            "the links have a bandwidth (--bandwidth-gbit), but the size of a message is not known",
        ),
        ("--stages 100000 --microbatches 100000", "is too much to simulate: give a product of at most"),
        ("--memory-gb 0", "--memory-gb 0: give a number above 0"),
        ("--memory-gb 1", "--memory-gb: the costs say nothing of memory; describe a model, or profile one"),
        ("--cost none.toml", "cost file none.toml cannot be read"),
        ("--cost cost.toml --stages 3", "--stages 3, but the cost file cost.toml is of 2 stages: give --stages 2"),
        ("--cost cost.toml --forward-ms 1", "--forward-ms describes equal stages, and so does --cost cost.toml"),
        ("--tflops 1", "--tflops is for a model: describe it with --layers"),
        ("--layers 4", "--layers describes a model: give --tflops too"),
        ("--layers 4 --tflops 0", "0 flops per second"),
        ("--layers 0 --tflops 1", "--layers 0 must be at least 1"),
        ("--layers 4 --tflops 1 --width 63", "--heads 16 does not divide --width 63"),
        ("--layers 4 --tflops 1 --stages 9", "9 stages need at least 9 blocks, but the model has 6"),
        ("--layers 4 --tflops 1 --precision fp16", "--precision fp16: unknown precision"),
        ("--layers 4 --tflops 1 --microbatch-size 0", "--microbatch-size 0: give at least 1"),
        ("--layers 4 --tflops 1 --cost cost.toml", "--cost gives the times of the stages, and so does --layers"),
        ("--layers 4 --tflops 1 --forward-ms 3", "--forward-ms gives the times"),
        ("--picture cost.toml/plan.png", "--picture cost.toml/plan.png cannot be written"),
        ("--json missing/plan.json", "--json missing/plan.json cannot be written"),
    ],
)
def test_nonsense_is_refused_in_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words.split()]) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.startswith("adapipe plan: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_deep_pipeline_is_planned_at_once():
    figures = plan("--stages", "64", "--microbatches", "512")
    assert figures[0]["seconds_per_update"] == pytest.approx(0.03 * (512 + 63))
    assert figures[1]["seconds_per_update"] == pytest.approx(0.03 * 512 + 0.01 * 63)
    assert figures[2]["seconds_per_update"] == pytest.approx(0.03 * 512)
