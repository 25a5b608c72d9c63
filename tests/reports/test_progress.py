"""The display: plain lines are sparse, the live one fits its terminal, and no number ends a run."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from adapipe.reports.progress import (
    PlainProgress,
    Progress,
    SilentProgress,
    TerminalProgress,
    make_progress,
)

STATE: dict[str, Any] = {
    "update": 312,
    "fraction": 0.45,
    "mode": "async",
    "loss": 2.13449,
    "tokens_per_second": 12345.6,
    "idle_share": 0.231,
    "seconds_left": 151.0,
}
UNKNOWN_STATE = {"loss": None, "tokens_per_second": None, "idle_share": None, "seconds_left": None}
BAD_NUMBERS = [math.nan, math.inf, -math.inf, None]


def plain(clock: Callable[[], float] = lambda: 0.0) -> tuple[PlainProgress, StringIO]:
    stream = StringIO()
    return PlainProgress(stream, monotonic=clock), stream


def terminal(width: int = 80, **options: Any) -> tuple[TerminalProgress, Console]:
    options = {"color_system": None, **options}
    console = Console(file=StringIO(), force_terminal=True, width=width, highlight=False, **options)
    return TerminalProgress(console), console


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def frame(progress: TerminalProgress, width: int = 80) -> list[str]:
    """The live lines as they are now."""
    console = Console(file=StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(progress)
    return shown(console).splitlines()


def every_call(progress: Progress, number: Any) -> None:
    progress.start("a run")
    progress.update(
        update=1,
        fraction=number,
        mode="sync",
        loss=number,
        tokens_per_second=number,
        idle_share=number,
        seconds_left=number,
    )
    progress.evaluation(update=1, mode="sync", perplexity=number, training_seconds=number)
    progress.message("a message")
    progress.stop()
    progress.stop()


def test_plain_lines_say_everything() -> None:
    progress, stream = plain()
    progress.start("two stages")
    progress.evaluation(update=300, mode="sync", perplexity=8.4567, training_seconds=45.21)
    progress.update(**STATE)
    progress.message("switching")
    progress.stop()
    assert stream.getvalue().splitlines() == [
        "two stages",
        "evaluation  sync   update    300  perplexity    8.46  at 45.2 s",
        " 45%  async  update 312  loss 2.134  perplexity 8.46  12,346 tokens/s  idle 23%  2:31 left",
        "switching",
    ]


def test_plain_updates_are_at_least_ten_seconds_apart() -> None:
    now = 100.0
    progress, stream = plain(lambda: now)
    for update in range(1, 101):
        progress.update(**{**STATE, "update": update})
        now += 0.25
    lines = stream.getvalue().splitlines()
    assert [int(re.findall(r"update (\d+)", line)[0]) for line in lines] == [1, 41, 81]


def test_plain_evaluations_and_messages_are_never_held_back() -> None:
    progress, stream = plain()
    for update in range(5):
        progress.update(**STATE)
        progress.evaluation(update=update, mode="sync", perplexity=9.0, training_seconds=1.0)
        progress.message("word")
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("evaluation") for line in lines) == 5
    assert lines.count("word") == 5
    assert len(lines) == 11


def test_the_terminal_shows_every_field_within_80_columns() -> None:
    progress, _ = terminal()
    progress.evaluation(update=300, mode="sync", perplexity=8.4567, training_seconds=45.21)
    progress.update(**STATE)
    bar, fields = frame(progress)
    assert bar.startswith("━━━")
    assert bar.endswith("   45%  2:31 left")
    assert fields == "async  update 312  loss 2.134  perplexity 8.46  12,346 tokens/s  idle 23%"


def test_large_numbers_still_fit_80_columns() -> None:
    progress, _ = terminal()
    progress.evaluation(update=999_999, mode="async", perplexity=12345.6, training_seconds=1e6)
    progress.update(
        update=999_999,
        fraction=1.0,
        mode="async",
        loss=99.999,
        tokens_per_second=99_999,
        idle_share=1.0,
        seconds_left=1e6,
    )
    bar, fields = frame(progress)
    assert max(len(bar), len(fields)) < 80
    assert fields.endswith("idle 100%")
    assert bar.endswith("100%  277:46:40 left")


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 79, 80, 200])
def test_no_live_line_is_wrapped_or_cut_within_a_field(width: int) -> None:
    progress, _ = terminal()
    progress.update(**STATE)
    lines = frame(progress, width)
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)
    whole = ["async", "update 312", "loss 2.134", "perplexity -", "12,346 tokens/s", "idle 23%"]
    assert all(field in whole for field in lines[1].split("  ") if field)


def test_permanent_lines_are_printed_above_the_live_ones() -> None:
    progress, console = terminal()
    progress.start("two [stages] :smile:")
    progress.update(**STATE)
    progress.evaluation(update=300, mode="sync", perplexity=8.4567, training_seconds=45.21)
    progress.message("[bold]switching[/nothing]")
    progress.stop()
    text = shown(console)
    places = [
        text.index(line)
        for line in ("two [stages] :smile:", "evaluation  sync", "[bold]switching[/nothing]", "idle 23%")
    ]
    assert places[0] < places[1] < places[2]
    assert text.rindex("idle 23%") > places[2]


def test_the_cursor_comes_back_and_modes_have_colours() -> None:
    progress, console = terminal(color_system="truecolor")
    progress.start("a run")
    for mode in ("sync", "async"):
        progress.update(**{**STATE, "mode": mode})
        console.print(progress)
    progress.stop()
    assert isinstance(console.file, StringIO)
    written = console.file.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert "38;2;86;180;233msync" in written
    assert "38;2;230;159;0masync" in written


def test_updates_cost_little() -> None:
    progress, console = terminal()
    progress.start("a run")
    start = time.perf_counter()
    for update in range(2000):
        progress.update(**{**STATE, "update": update})
    spent = time.perf_counter() - start
    progress.stop()
    assert spent < 1.0
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count("tokens/s") < 20


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_unknown_numbers_are_shown_as_a_dash(number: float | None) -> None:
    progress, stream = plain()
    every_call(progress, number)
    assert "loss -  perplexity -  - tokens/s  idle -  - left" in stream.getvalue()
    live, console = terminal()
    every_call(live, number)
    assert "loss -  perplexity -  - tokens/s  idle -" in shown(console)
    every_call(SilentProgress(), number)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.4, "0"), (99_999, "99,999"), (123_456, "123k"), (1_234_567, "1.23M"), (2e9, "2.00G")],
)
def test_token_rates_stay_short(rate: float, text: str) -> None:
    progress, stream = plain()
    progress.update(**{**STATE, "tokens_per_second": rate})
    assert f"  {text} tokens/s" in stream.getvalue()


def test_an_unfinished_display_can_be_stopped_at_any_time() -> None:
    for progress in (terminal()[0], plain()[0], SilentProgress()):
        progress.stop()
        progress.update(**{**STATE, **UNKNOWN_STATE})
        progress.stop()


def test_make_progress_chooses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(False), SilentProgress)
    assert isinstance(make_progress(False, terminal=True), SilentProgress)
    assert isinstance(make_progress(True, terminal=True), TerminalProgress)
    assert isinstance(make_progress(True, terminal=False), PlainProgress)
    assert isinstance(make_progress(True), PlainProgress)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert isinstance(make_progress(True), TerminalProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(True), PlainProgress)
    monkeypatch.undo()
    every_call(make_progress(False), 1.0)
    assert capsys.readouterr().out == ""
    every_call(make_progress(True, terminal=False), 1.0)
    assert "a message\n" in capsys.readouterr().out


def test_importing_the_reports_imports_neither_rich_nor_matplotlib() -> None:
    code = "import sys, adapipe.reports; print(*sorted({'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
