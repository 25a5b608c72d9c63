"""metrics.jsonl and JSON files: what is written is read back, whatever ends the writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapipe.errors import AdaPipeError
from adapipe.policy.base import is_evaluation
from adapipe.reports.metrics import MetricsWriter, read_metrics, write_json

UPDATE = {
    "update": 1,
    "mode": "sync",
    "microbatches": 4,
    "tokens": 1024,
    "training_seconds": 0.5,
    "loss": 5.5,
    "gradient_norm": None,
    "learning_rate": 1e-3,
    "staleness": [0.25, 0.0],
    "idle_share": [0.1, 0.2],
    "skipped_stages": [],
}
EVALUATION = {
    "update": 1,
    "mode": "sync",
    "training_seconds": 0.5,
    "held_out_loss": 5.0,
    "held_out_perplexity": math.exp(5.0),
    "evaluation_seconds": 0.1,
}


def strict_loads(text: str) -> object:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_records_round_trip_and_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(UPDATE)
        writer.write(EVALUATION)
    records = read_metrics(path)
    assert records == [UPDATE, EVALUATION]
    assert [is_evaluation(record) for record in records] == [False, True]


def test_each_line_is_readable_before_close(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for count in range(1, 4):
            writer.write(UPDATE)
            assert len(read_metrics(path)) == count


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsWriter(path) as writer:
            writer.write(UPDATE)
    assert read_metrics(path) == [UPDATE, UPDATE]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=st.dictionaries(st.text(), json_values, max_size=5))
def test_any_record_is_one_line_of_strict_json(tmp_path: Path, record: dict[str, object]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with MetricsWriter(path) as writer:
        writer.write(record)
    (line,) = path.read_text().splitlines()
    assert strict_loads(line) == read_metrics(path)[0]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), np.array(np.nan)]
)
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: object) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"loss": value, "staleness": [value, 1.0], "nested": {"x": (value,)}})
    assert strict_loads(path.read_text()) == {"loss": None, "staleness": [None, 1.0], "nested": {"x": [None]}}


def test_numpy_values_become_plain_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"update": np.int64(3), "loss": np.float32(0.5), "staleness": np.array([1.0, 2.0])})
    assert read_metrics(path) == [{"update": 3, "loss": 0.5, "staleness": [1.0, 2.0]}]


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_truncated_last_line_is_ignored_and_then_replaced(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(UPDATE) + "\n" + json.dumps(EVALUATION)[:kept])
    assert read_metrics(path) == [UPDATE]
    with MetricsWriter(path) as writer:
        writer.write(EVALUATION)
    assert read_metrics(path) == [UPDATE, EVALUATION]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(UPDATE))
    assert read_metrics(path) == [UPDATE]
    with MetricsWriter(path) as writer:
        writer.write(EVALUATION)
    assert read_metrics(path) == [UPDATE, EVALUATION]


@pytest.mark.parametrize("broken", [b'{"update": ', b"", b"[1]", b"3", b'{"update": "\xff"}'])
def test_a_broken_line_elsewhere_is_named(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(UPDATE).encode()
    path.write_bytes(good + b"\n" + broken + b"\n" + good + b"\n")
    with pytest.raises(AdaPipeError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_an_empty_file_has_no_records_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert read_metrics(tmp_path / "empty.jsonl") == []
    with pytest.raises(AdaPipeError, match="cannot read"):
        read_metrics(tmp_path / "missing.jsonl")


def test_a_record_that_json_cannot_hold_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(UPDATE)
        with pytest.raises(AdaPipeError, match="not JSON serializable"):
            writer.write({"loss": object()})
        writer.write(EVALUATION)
    assert read_metrics(path) == [UPDATE, EVALUATION]


def test_write_json_writes_strict_json_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "run" / "summary.json"
    write_json(path, {"old": 1})
    write_json(path, {"loss": math.nan, "seconds": [1.5, math.inf]})
    assert strict_loads(path.read_text()) == {"loss": None, "seconds": [1.5, None]}
    assert [file.name for file in path.parent.iterdir()] == ["summary.json"]


def test_write_json_keeps_the_old_file_when_the_data_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    with pytest.raises(AdaPipeError, match=r"summary\.json"):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}


def test_write_json_keeps_the_old_file_when_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
