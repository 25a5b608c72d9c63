"""What the user watches while a run trains: a live display on a terminal, plain lines elsewhere.

Every number may be None or not finite, and is then shown as "-": a display never ends a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.text import Text

UNKNOWN = "-"
REFRESHES_PER_SECOND = 4
PLAIN_INTERVAL_SECONDS = 10.0
# The same hues as the shades of the curves.
MODE_STYLES = {"sync": "bold #56b4e9", "async": "bold #e69f00"}


class Progress(Protocol):
    """The display of a run. Cheap: `update` may be called a hundred times a second."""

    def start(self, header: str) -> None:
        """Show one line that says what runs, and begin."""

    def update(
        self,
        *,
        update: int,
        fraction: float,
        mode: str,
        loss: float | None,
        tokens_per_second: float | None,
        idle_share: float | None,
        seconds_left: float | None,
    ) -> None:
        """The state after an update. fraction and idle_share are 0..1; fraction is of the budget used."""

    def evaluation(self, *, update: int, mode: str, perplexity: float, training_seconds: float) -> None:
        """A held-out perplexity, measured after that many updates. Leaves a permanent line."""

    def message(self, text: str) -> None:
        """Leave a permanent line."""

    def stop(self) -> None:
        """Give the terminal back. May be called at any time, more than once."""


def make_progress(enabled: bool, *, terminal: bool | None = None) -> Progress:
    """The display that fits: none when not enabled, live on a terminal, else plain lines on stdout.

    terminal: None asks stdout.
    """
    if not enabled:
        return SilentProgress()
    if terminal is None:
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalProgress() if terminal else PlainProgress()


@dataclass(frozen=True, slots=True)
class _State:
    """What the display shows; replaced whole, because another thread reads it."""

    update: int = 0
    fraction: float = 0.0
    mode: str = ""
    loss: float | None = None
    perplexity: float | None = None
    tokens_per_second: float | None = None
    idle_share: float | None = None
    seconds_left: float | None = None


class SilentProgress:
    """Shows nothing."""

    def start(self, header: str) -> None:
        pass

    def update(
        self,
        *,
        update: int,
        fraction: float,
        mode: str,
        loss: float | None,
        tokens_per_second: float | None,
        idle_share: float | None,
        seconds_left: float | None,
    ) -> None:
        pass

    def evaluation(self, *, update: int, mode: str, perplexity: float, training_seconds: float) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class PlainProgress:
    """Lines for a log file: every evaluation and message, and an update line at most every ten seconds."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        interval: float = PLAIN_INTERVAL_SECONDS,
    ) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._interval = interval
        self._next_line = -math.inf
        self._perplexity: float | None = None

    def start(self, header: str) -> None:
        self._line(header)

    def update(
        self,
        *,
        update: int,
        fraction: float,
        mode: str,
        loss: float | None,
        tokens_per_second: float | None,
        idle_share: float | None,
        seconds_left: float | None,
    ) -> None:
        now = self._monotonic()
        if now < self._next_line:
            return
        self._next_line = now + self._interval
        state = _State(update, fraction, mode, loss, self._perplexity, tokens_per_second, idle_share, seconds_left)
        fields = "  ".join(text for text, _ in _fields(state))
        self._line(f"{_percent(_bar_fraction(fraction))}  {fields}  {_duration(seconds_left)} left")

    def evaluation(self, *, update: int, mode: str, perplexity: float, training_seconds: float) -> None:
        self._perplexity = perplexity
        self._line(_evaluation_line(update, mode, perplexity, training_seconds))

    def message(self, text: str) -> None:
        self._line(text)

    def stop(self) -> None:
        pass

    def _line(self, text: str) -> None:
        # sys.stdout is looked up now, not at the start: a caller may have redirected it since.
        # A reader that has gone away (`| head`) must not end the run.
        with contextlib.suppress(OSError):
            print(text, file=self._stream if self._stream is not None else sys.stdout, flush=True)


class TerminalProgress:
    """Two live lines at the bottom of a terminal, the permanent lines above them.

    `update` only stores numbers; the display redraws itself four times a second.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console if console is not None else Console(highlight=False, force_terminal=True)
        self._state = _State()
        self._live: Live | None = None

    def start(self, header: str) -> None:
        from rich.live import Live

        self.message(header)
        if self._live is None:
            self._live = Live(self, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
            self._live.start()

    def update(
        self,
        *,
        update: int,
        fraction: float,
        mode: str,
        loss: float | None,
        tokens_per_second: float | None,
        idle_share: float | None,
        seconds_left: float | None,
    ) -> None:
        self._state = _State(
            update, fraction, mode, loss, self._state.perplexity, tokens_per_second, idle_share, seconds_left
        )

    def evaluation(self, *, update: int, mode: str, perplexity: float, training_seconds: float) -> None:
        self._state = replace(self._state, update=update, mode=mode, perplexity=perplexity)
        self.message(_evaluation_line(update, mode, perplexity, training_seconds))

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        # One column is left free: some terminals wrap a line that fills the last one.
        width = max(1, options.max_width - 1)
        state = self._state
        yield _bar_line(state, width, ascii_only=options.ascii_only)
        line = Text(no_wrap=True, overflow="crop")
        for text, style in _fields(state):
            # What does not fit is left out whole: half a number is a wrong number.
            gap = "  " if line else ""
            if len(line) + len(gap) + len(text) > width:
                break
            line.append(gap).append(text, style=style)
        yield line


def _bar_line(state: _State, width: int, *, ascii_only: bool) -> Text:
    from rich.text import Text

    fraction = _bar_fraction(state.fraction)
    after = f"  {_percent(fraction)}  {_duration(state.seconds_left)} left"
    bar = max(0, width - len(after))
    done = round(bar * fraction)
    mark = "=" if ascii_only else "━"
    line = Text(no_wrap=True, overflow="crop")
    line.append(mark * done, style=MODE_STYLES.get(state.mode, "bold"))
    line.append((" " if ascii_only else mark) * (bar - done), style="bright_black")
    line.append(after)
    return line


def _fields(state: _State) -> list[tuple[str, str]]:
    """Text and style of each field, the most wanted first. Together within 79 columns below a million updates."""
    return [
        (f"{state.mode:<5}", MODE_STYLES.get(state.mode, "bold")),
        (f"update {state.update}", ""),
        (f"loss {_loss(state.loss)}", ""),
        (f"perplexity {_perplexity(state.perplexity)}", ""),
        (f"{_count(state.tokens_per_second)} tokens/s", ""),
        (f"idle {_percent(state.idle_share).strip()}", ""),
    ]


def _evaluation_line(update: int, mode: str, perplexity: float | None, training_seconds: float | None) -> str:
    seconds = f"{training_seconds:.1f} s" if _known(training_seconds) else UNKNOWN
    return f"evaluation  {mode:<5}  update {update:>6}  perplexity {_perplexity(perplexity):>7}  at {seconds}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _bar_fraction(fraction: float | None) -> float:
    return min(max(fraction, 0.0), 1.0) if fraction is not None and math.isfinite(fraction) else 0.0


def _loss(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.1e}"


def _perplexity(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 1000:
        return f"{value:.2f}"
    return f"{value:.0f}" if value < 100_000 else f"{value:.1e}"


def _count(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 100_000:
        return f"{value:,.0f}"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value / 1e3:.0f}k"


def _percent(share: float | None) -> str:
    return f"{share:4.0%}" if share is not None and math.isfinite(share) else f"{UNKNOWN:>4}"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
