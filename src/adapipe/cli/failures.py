"""What the command says, and how it ends, when a run fails."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from adapipe.cli.exit_codes import BAD_INPUT, FAILED
from adapipe.errors import ConfigurationError, PeerFailure, StageFailure


def guarded(command: str, action: Callable[[], None]) -> int:
    """Do it on this rank. Returns 0, or the exit code for bad input; ends the process if a stage or a peer fails."""
    try:
        action()
    except ConfigurationError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except PeerFailure as error:
        _fail(None if error.reported else f"{command} failed: {error}", None)
    except StageFailure as error:
        _fail(f"{command} failed: {error}", error.__cause__ or error)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        _fail(f"{command} failed: rank {rank}: {type(error).__name__}: {error}", error)
    return 0


def _fail(message: str | None, error: BaseException | None) -> NoReturn:
    """Say what happened, once, with the original traceback, and end this rank without waiting for its peers."""
    if message is not None:
        lines = [] if error is None else traceback.format_exception(error)
        sys.stderr.write("".join([*lines, message, "\n"]))
    sys.stderr.flush()
    os._exit(FAILED)
