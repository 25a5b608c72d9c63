"""The options: a file, flags on top of it, and the file that every run leaves to be run again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapipe.cli.config import DEFAULT_UPDATES, TrainConfig, parse_config, read_toml, to_toml
from adapipe.cli.main import main
from tests.cli.processes import TINY, fork_ranks

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_paths = st.none() | _text.map(Path)
_floats = st.floats(allow_nan=False)
_whole = st.integers(-(2**63), 2**63 - 1)

configs = st.builds(
    TrainConfig,
    config=st.none(),
    mode=_text,
    plan=st.none() | _text,
    stages=_whole,
    microbatches=_whole,
    microbatch_size=_whole,
    sequence_length=_whole,
    layers=_whole,
    width=_whole,
    heads=_whole,
    positions=_text,
    max_positions=st.none() | _whole,
    updates=st.none() | _whole,
    seconds=st.none() | _floats,
    learning_rate=_floats,
    warmup=_floats,
    decay=_text,
    optimizer=_text,
    clip=_floats,
    precision=_text,
    seed=_whole,
    data=_paths,
    evaluate_every=_whole,
    evaluation_microbatches=_whole,
    target_perplexity=st.none() | _floats,
    device=_text,
    out=_paths,
    overwrite=st.booleans(),
)


class TestFile:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(config=configs)
    def test_round_trip(self, tmp_path: Path, config: TrainConfig) -> None:
        path = tmp_path / "config.toml"
        path.write_text(to_toml(config))
        assert read_toml(path) == config

    @pytest.mark.parametrize("options", [{"data": Path("none")}, {"out": Path("none")}], ids=str)
    def test_a_path_called_none_is_a_path(self, tmp_path: Path, options: dict[str, Any]) -> None:
        path = tmp_path / "config.toml"
        path.write_text(to_toml(TrainConfig(**options)))
        assert read_toml(path) == TrainConfig(**options)

    def test_is_complete(self) -> None:
        text = to_toml(TrainConfig())
        named = set(tomllib.loads(text))
        unset = {field.name for field in fields(TrainConfig) if getattr(TrainConfig(), field.name) is None}
        assert named | unset == {field.name for field in fields(TrainConfig)}
        assert all(f"# {name} is not set" in text for name in unset - {"config"})

    def test_an_empty_file_means_the_defaults(self, tmp_path: Path) -> None:
        (tmp_path / "empty.toml").touch()
        assert read_toml(tmp_path / "empty.toml") == TrainConfig()

    def test_whole_numbers_are_good_where_fractions_are(self, tmp_path: Path) -> None:
        (tmp_path / "file.toml").write_text("clip = 2\nseconds = 30\nlearning_rate = 1\n")
        config = read_toml(tmp_path / "file.toml")
        values = (config.clip, config.seconds, config.learning_rate)
        assert values == (2.0, 30.0, 1.0)
        assert all(type(value) is float for value in values)


class TestFlags:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        path = tmp_path / "file.toml"
        path.write_text('stages = 3\nmode = "sync"\nupdates = 7\nclip = 0\noverwrite = true\ndata = "a"\n')
        return str(path)

    def test_none(self) -> None:
        assert parse_config([]) == TrainConfig()
        assert parse_config([]).budget_updates == DEFAULT_UPDATES

    def test_file_alone(self, file: str) -> None:
        expected = TrainConfig(stages=3, mode="sync", updates=7, clip=0.0, overwrite=True, data=Path("a"))
        assert replace(parse_config(["--config", file]), config=None) == expected

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("joined", [True, False])
    def test_flags_win_over_the_file(self, file: str, before: bool, joined: bool) -> None:
        config_flag = [f"--config={file}"] if joined else ["--config", file]
        flags = ["--stages", "5", "--clip", "2", "--no-overwrite", "--updates", "None"]
        config = parse_config(config_flag + flags if before else flags + config_flag)
        assert (config.stages, config.clip, config.overwrite, config.updates) == (5, 2.0, False, None)
        assert (config.mode, config.data) == ("sync", Path("a"))

    def test_a_flag_with_the_default_value_wins_too(self, file: str) -> None:
        assert parse_config(["--config", file, "--stages", "2", "--mode", "adaptive"]).stages == 2

    @pytest.mark.parametrize("flag", ["--learning-rate", "--learning_rate"])
    def test_hyphens_and_underscores_are_the_same(self, flag: str) -> None:
        assert parse_config([flag, "0.5"]).learning_rate == 0.5

    def test_seconds_alone_are_the_budget(self) -> None:
        assert parse_config(["--seconds", "3"]).budget_updates is None


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["train", "--help"])
    out, err = capsys.readouterr()
    assert ending.value.code == 0
    assert err == ""
    for field in fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in out
    assert "\x1b" not in out


class TestRunAgain:
    @pytest.fixture
    def train(self, corpus: Path, tmp_path: Path) -> Callable[..., Path]:
        def run(name: str, *flags: str) -> Path:
            assert main(["train", *flags, "--out", str(tmp_path / name)]) == 0
            return tmp_path / name

        return run

    @staticmethod
    def numbers(out: Path) -> list[tuple[Any, ...]]:
        """What does not depend on the time that anything took."""
        names = ("update", "mode", "tokens", "loss", "gradient_norm", "learning_rate", "staleness", "held_out_loss")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [tuple(line.get(name) for name in names) for line in lines]

    @pytest.mark.parametrize("flags", ["--mode sync", "--plan sync:4,async:5", "--mode sync --optimizer sgd --seed 3"])
    def test_repeats_the_run_bit_for_bit(self, train: Callable[..., Path], corpus: Path, flags: str) -> None:
        options = [*TINY, "--data", str(corpus), "--stages", "1", "--updates", "12", "--evaluate-every", "5"]
        first = train("first", *options, *flags.split())
        again = train("again", "--config", str(first / "config.toml"))
        assert self.numbers(first) == self.numbers(again)
        assert len(self.numbers(first)) == 12 + 4
        changed = (tomllib.loads((out / "config.toml").read_text()) for out in (first, again))
        first_options, again_options = ({k: v for k, v in options.items() if k != "out"} for options in changed)
        assert first_options == again_options

    def test_the_file_holds_what_was_given(self, train: Callable[..., Path], corpus: Path) -> None:
        out = train("run", *TINY, "--data", str(corpus), "--stages", "1", "--updates", "2", "--learning-rate", "0.01")
        config = read_toml(out / "config.toml")
        assert (config.stages, config.updates, config.learning_rate) == (1, 2, 0.01)
        assert config.data == corpus
        assert config.out == out
        assert all(field.name in (out / "config.toml").read_text() for field in fields(TrainConfig))

    def test_a_path_that_is_not_unicode_works_or_is_refused(self, corpus: Path, tmp_path: Path) -> None:
        path = tmp_path / "caf\udce9"  # what Python makes of the byte E9 in a file name
        path.write_bytes(corpus.read_bytes())
        out = tmp_path / "run"
        options = [*TINY, "--data", str(path), "--stages", "1", "--updates", "2"]
        (ended,) = fork_ranks(1, tmp_path / "rank", main, ["train", *options, "--out", str(out)])
        assert "Traceback" not in ended.err
        assert ended.code in (0, 2)
        if ended.code == 0:
            assert read_toml(out / "config.toml").data == path

    def test_another_seed_is_another_run(self, train: Callable[..., Path], corpus: Path) -> None:
        options = [*TINY, "--data", str(corpus), "--stages", "1", "--updates", "2", "--mode", "sync"]
        first, other = train("first", *options), train("other", *options, "--seed", "1")
        assert self.numbers(first) != self.numbers(other)
