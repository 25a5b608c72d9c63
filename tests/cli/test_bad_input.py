"""Bad input: one line that says what and where, exit code 2, nothing written, no process started. And odd sizes that
must work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import adapipe.cli.launch
import adapipe.cli.rank
from adapipe.cli.main import main
from tests.cli.processes import TINY, fork_ranks, metrics

BAD_INPUT = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a corpus `text`, where training or starting a process fails the test."""
    (tmp_path / "text").write_bytes(b"some words " * 200)
    monkeypatch.chdir(tmp_path)

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("training was started")

    monkeypatch.setattr(adapipe.cli.launch, "launch_ranks", refuse)
    monkeypatch.setattr(adapipe.cli.rank, "train", refuse)
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `adapipe train` with a tiny model and more flags; its one line on stderr."""

    def command(*flags: str) -> str:
        before = sorted(folder.rglob("*"))
        code = main(["train", *TINY, "--data", "text", "--updates", "2", "--out", "run", *flags])
        out, err = capsys.readouterr()
        assert code == BAD_INPUT
        assert out == ""
        assert err.startswith("adapipe train: ")
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
        assert sorted(folder.rglob("*")) == before, "something was written"
        return err

    return command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--stages 5", ["5 stages", "4", "layers"]),
        ("--stages 0", ["--stages 0"]),
        ("--microbatches 0", ["--microbatches 0"]),
        ("--microbatches -1", ["--microbatches -1"]),
        ("--microbatch-size 0", ["--microbatch-size 0"]),
        ("--sequence-length 0", ["--sequence-length 0"]),
        ("--layers 0", ["--layers 0"]),
        ("--width 0", ["--width 0"]),
        ("--heads 0", ["--heads 0"]),
        ("--heads 3", ["--heads 3", "--width 16"]),
        ("--heads 16", ["--positions rotary", "--heads 16", "learned"]),
        ("--positions sideways", ["--positions sideways", "rotary", "learned"]),
        ("--sequence-length 32 --max-positions 24", ["--sequence-length 32", "--max-positions 24"]),
        ("--max-positions 0", ["--max-positions 0"]),
        ("--mode sideways", ["--mode sideways", "sync, async, adaptive"]),
        ("--plan sideways:3", ["--plan", "sideways:3", "MODE:UPDATES"]),
        ("--plan sync:0", ["--plan", "sync:0"]),
        ("--plan sync:3,", ["--plan"]),
        ("--plan=", ["--plan"]),
        ("--plan sync", ["--plan", "'sync'"]),
        ("--updates 2 --seconds 3", ["--updates", "--seconds", "not both"]),
        ("--updates 0", ["--updates 0"]),
        ("--updates None --seconds 0", ["--seconds 0"]),
        ("--updates None --seconds nan", ["--seconds nan"]),
        ("--updates None --seconds inf", ["--seconds inf"]),
        ("--learning-rate nan", ["--learning-rate nan"]),
        ("--learning-rate 0", ["--learning-rate 0"]),
        ("--learning-rate -1", ["--learning-rate -1"]),
        ("--learning-rate inf", ["--learning-rate inf"]),
        ("--warmup 1", ["--warmup 1"]),
        ("--warmup -0.1", ["--warmup -0.1"]),
        ("--warmup nan", ["--warmup nan"]),
        ("--decay sideways", ["--decay sideways", "cosine, linear, constant"]),
        ("--optimizer sideways", ["--optimizer sideways", "adamw, sgd"]),
        ("--precision fp16", ["--precision fp16", "fp32, bf16"]),
        ("--clip -1", ["--clip -1", "0 for no clipping"]),
        ("--clip nan", ["--clip nan"]),
        ("--seed -1", ["--seed -1"]),
        ("--evaluate-every 0", ["--evaluate-every 0"]),
        ("--evaluation-microbatches 0", ["--evaluation-microbatches 0"]),
        ("--target-perplexity 0.99", ["--target-perplexity 0.99", "at least 1"]),
        ("--target-perplexity nan", ["--target-perplexity nan"]),
        ("--device tpu", ["--device tpu", "cpu", "cuda"]),
        ("--data nowhere", ["nowhere", "check the path"]),
        ("--data /proc/self/mem", ["cannot read /proc/self/mem", "another corpus"]),
    ],
)
def test_values_that_cannot_work(refused: Callable[..., str], flags: str, words: list[str]) -> None:
    line = refused(*flags.split())
    for word in words:
        assert word in line


@pytest.mark.parametrize("stages", ["1", "2"])
def test_a_gpu_per_stage(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, stages: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    line = refused("--device", "cuda", "--stages", stages)
    assert "--device cuda" in line
    assert "it shows 0" in line


def test_fewer_gpus_than_stages(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    assert "--device cuda" in refused("--device", "cuda", "--stages", "2")


class TestCorpus:
    def test_empty_file(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "empty").touch()
        line = refused("--data", "empty")
        assert "corpus is empty (empty)" in line

    def test_empty_folder(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "empty").mkdir()
        assert "the folder empty has no files" in refused("--data", "empty")

    @pytest.mark.parametrize(("size", "part"), [(5, "training"), (100, "held-out")])
    def test_too_short(self, refused: Callable[..., str], folder: Path, size: int, part: str) -> None:
        (folder / "short").write_bytes(b"x" * size)
        line = refused("--data", "short")
        assert f"the {part} part of short" in line
        assert "at least 17" in line

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_unreadable_file(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0)
        line = refused("--data", "secret")
        assert "secret" in line
        assert "Permission denied" in line

    def test_neither_file_nor_folder(self, refused: Callable[..., str], folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        assert "pipe is neither a file nor a folder" in refused("--data", "pipe")


class TestOut:
    def test_another_run(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "run").mkdir()
        (folder / "run" / "metrics.jsonl").write_text("{}\n")
        line = refused()
        assert "--out run holds another run (metrics.jsonl)" in line
        assert "--overwrite" in line

    def test_a_file(self, refused: Callable[..., str]) -> None:
        assert "--out text is a file" in refused("--out", "text")

    def test_below_a_file(self, refused: Callable[..., str]) -> None:
        assert "--out text/run" in refused("--out", "text/run")

    def test_where_nobody_can_write(self, refused: Callable[..., str]) -> None:
        assert "--out /proc/run" in refused("--out", "/proc/run")

    def test_too_long_a_name(self, refused: Callable[..., str]) -> None:
        assert "--out" in refused("--out", "x" * 300)


class TestFile:
    @pytest.fixture
    def toml(self, refused: Callable[..., str], folder: Path) -> Callable[..., str]:
        def with_file(text: str | bytes) -> str:
            (folder / "file.toml").write_bytes(text.encode() if isinstance(text, str) else text)
            line = refused("--config", "file.toml")
            assert "--config file.toml" in line
            return line

        return with_file

    @pytest.mark.parametrize("text", ["stages = = 3", "stages", "[stages", b"\xff\xfe", "a = 1\na = 2"])
    def test_not_toml(self, toml: Callable[..., str], text: str | bytes) -> None:
        assert "is not TOML" in toml(text)

    def test_a_misspelt_option(self, toml: Callable[..., str]) -> None:
        assert "there is no option stagse; did you mean stages?" in toml("stagse = 3")

    def test_an_unknown_option(self, toml: Callable[..., str]) -> None:
        line = toml("zzzzzzz = 3")
        assert "there is no option zzzzzzz" in line
        assert "learning_rate" in line

    def test_a_file_in_a_file(self, toml: Callable[..., str]) -> None:
        assert "there is no option config" in toml('config = "other.toml"')

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("stages = '3'", "stages = '3' must be of type int"),
            ("stages = 3.0", "must be of type int"),
            ("stages = true", "must be of type int"),
            ("stages = 'none'", "must be of type int"),
            ("stages = [3]", "must be of type int"),
            ("updates = 'many'", "must be of type int"),
            ("learning_rate = '1e-3'", "must be of type float"),
            ("learning_rate = true", "must be of type float"),
            ("overwrite = 1", "must be of type bool"),
            ("mode = 3", "must be of type str"),
            ("out = 3", "must be of type Path"),
            ("seed = 2020-01-01", "must be of type int"),
            ("[stages]\nx = 1", "must be of type int"),
        ],
    )
    def test_a_wrong_type(self, toml: Callable[..., str], text: str, wanted: str) -> None:
        assert wanted in toml(text)

    def test_a_value_that_cannot_work(self, refused: Callable[..., str], folder: Path) -> None:
        (folder / "file.toml").write_text("mode = 'sideways'\n")
        assert "--mode sideways" in refused("--config", "file.toml")

    @pytest.mark.parametrize("path", ["nowhere.toml", "."])
    def test_unreadable(self, refused: Callable[..., str], path: str) -> None:
        assert f"--config {path} cannot be read" in refused("--config", path)


class TestLauncher:
    """Under torchrun."""

    @pytest.fixture
    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
        def pretend(rank: int, size: int) -> None:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(size))

        return pretend

    @pytest.mark.parametrize("size", [1, 3])
    def test_world_size_unequal_to_stages(
        self, refused: Callable[..., str], ranks: Callable[[int, int], None], size: int
    ) -> None:
        ranks(0, size)
        line = refused("--stages", "2")
        assert f"--stages 2, but the launcher started {size} ranks" in line
        assert "--nproc-per-node" in line

    @pytest.mark.usefixtures("folder")
    def test_only_one_rank_speaks(self, ranks: Callable[[int, int], None], capsys: pytest.CaptureFixture[str]) -> None:
        ranks(1, 3)
        assert main(["train", *TINY, "--data", "text", "--stages", "2"]) == BAD_INPUT
        assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("folder")
class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            ("--sideways", "--sideways"),
            ("--stages", "--stages"),
            ("--stages two", "--stages"),
            ("--learning-rate x", "--learning-rate"),
            ("--updates 2.5", "--updates"),
            ("--config", "--config"),
            ("sideways", "sideways"),
        ],
    )
    def test_what_cannot_be_parsed(self, capsys: pytest.CaptureFixture[str], arguments: str, word: str) -> None:
        with pytest.raises(SystemExit) as ending:
            main(["train", *arguments.split()])
        out, err = capsys.readouterr()
        assert ending.value.code == BAD_INPUT
        assert word in err
        assert "Traceback" not in err
        assert out == ""

    def test_an_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trian"]) == BAD_INPUT
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "adapipe: 'trian' is not a command; there is: train, plan, profile\n"

    def test_no_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == BAD_INPUT
        assert "usage: adapipe COMMAND" in "".join(capsys.readouterr())

    @pytest.mark.parametrize("flag", ["-h", "--help", "--version"])
    def test_help_and_version(self, capsys: pytest.CaptureFixture[str], flag: str) -> None:
        assert main([flag]) == 0
        assert "adapipe" in capsys.readouterr().out


class TestSizesThatWork:
    @pytest.fixture
    def trained(self, corpus: Path, tmp_path: Path) -> Callable[..., Path]:
        def train(*flags: str) -> Path:
            out = tmp_path / "run"
            code = main(["train", *TINY, "--data", str(corpus), "--out", str(out), "--stages", "1", *flags])
            assert code == 0
            assert (out / "summary.json").exists()
            assert (out / "curves.png").exists()
            return out

        return train

    @pytest.mark.parametrize("mode", ["sync", "async", "adaptive"])
    def test_one_stage_one_update_one_microbatch(self, trained: Callable[..., Path], mode: str) -> None:
        updates, evaluations = metrics(trained("--mode", mode, "--updates", "1", "--microbatches", "1"))
        assert [line["update"] for line in updates] == [1]
        assert updates[0]["microbatches"] == 1
        assert [line["update"] for line in evaluations] == [0, 1]

    def test_one_layer_of_one_head_of_width_one(self, trained: Callable[..., Path]) -> None:
        flags = "--updates 2 --layers 1 --width 1 --heads 1 --positions learned --sequence-length 1"
        out = trained(*flags.split())
        assert len(metrics(out)[0]) == 2

    @pytest.mark.parametrize("content", [bytes(range(256)) * 20, b"\x00" * 3000, b"\xff" * 200], ids=str)
    def test_bytes_that_are_not_text(self, trained: Callable[..., Path], tmp_path: Path, content: bytes) -> None:
        (tmp_path / "bytes").write_bytes(content)
        assert len(metrics(trained("--updates", "3", "--data", str(tmp_path / "bytes")))[0]) == 3

    def test_the_smallest_corpus(self, trained: Callable[..., Path], tmp_path: Path) -> None:
        (tmp_path / "small").write_bytes(b"abcdefghij" * 17)
        out = trained("--updates", "3", "--microbatch-size", "8", "--data", str(tmp_path / "small"))
        assert len(metrics(out)[0]) == 3

    def test_a_budget_in_seconds(self, trained: Callable[..., Path]) -> None:
        updates, _ = metrics(trained("--seconds", "0.3", "--mode", "adaptive"))
        assert updates[-1]["training_seconds"] >= 0.3

    @pytest.mark.parametrize("flags", ["--optimizer sgd --clip 0", "--precision bf16", "--warmup 0 --decay linear"])
    def test_other_choices(self, trained: Callable[..., Path], flags: str) -> None:
        assert len(metrics(trained("--updates", "3", *flags.split()))[0]) == 3

    def test_a_target_that_is_reached_before_training(self, trained: Callable[..., Path]) -> None:
        updates, evaluations = metrics(trained("--updates", "3", "--target-perplexity", "1e6"))
        assert updates == []
        assert len(evaluations) == 1

    def test_overwrite(self, trained: Callable[..., Path]) -> None:
        trained("--updates", "3")
        assert len(metrics(trained("--updates", "2", "--overwrite"))[0]) == 2

    @pytest.mark.parametrize("mode", ["sync", "async"])
    @pytest.mark.parametrize(("stages", "microbatches"), [(4, 1), (4, 3), (2, 1), (3, 7)])
    def test_fewer_microbatches_than_stages(
        self, corpus: Path, tmp_path: Path, mode: str, stages: int, microbatches: int
    ) -> None:
        out = tmp_path / "run"
        flags = ["--stages", str(stages), "--microbatches", str(microbatches), "--mode", mode, "--updates", "5"]
        ended = fork_ranks(
            stages, tmp_path / "ranks", main, ["train", *TINY, "--data", str(corpus), "--out", str(out), *flags]
        )
        assert [rank.code for rank in ended] == [0] * stages, ended
        updates, _ = metrics(out)
        assert [line["update"] for line in updates] == [1, 2, 3, 4, 5]
        assert len(updates[-1]["staleness"]) == stages
