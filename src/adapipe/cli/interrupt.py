"""Ctrl-C, and the end of the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from adapipe.cli.exit_codes import INTERRUPTED

LAUNCHER_VARIABLE = "ADAPIPE_LAUNCHER"
"""Process number of the command that started this rank."""


def end_quietly_on_interrupt() -> None:
    """Until training starts there is nothing to save: Ctrl-C ends the process at once, without a traceback."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


class Interrupt:
    """The first Ctrl-C asks the run to end after the update in progress, a second one ends the process."""

    _SAME_PRESS_SECONDS = 0.5  # a terminal and a launcher may both deliver one key press

    def __init__(self) -> None:
        self._since: float | None = None
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since > self._SAME_PRESS_SECONDS:
            os._exit(INTERRUPTED)
        self._since = self._since or now

    def requested(self) -> bool:
        return self._since is not None


def end_with_launcher() -> None:
    """End this rank when the command that started it is gone, even if it was killed and could say nothing."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
