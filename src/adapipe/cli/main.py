"""The `adapipe` command: finds the subcommand and turns our errors into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.cli.interrupt import end_quietly_on_interrupt

USAGE = """\
usage: adapipe COMMAND [OPTIONS]

Pipeline-parallel training that alternates between synchronous and asynchronous phases.

commands:
  train    train a language model through a pipeline of stages

adapipe COMMAND --help lists the options of a command; adapipe --version prints the version."""


def _commands() -> dict[str, Callable[[Sequence[str]], int]]:
    from adapipe.cli.train import train_command

    return {"train": train_command}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    end_quietly_on_interrupt()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    if arguments[0] == "--version":
        from adapipe import __version__

        print(f"adapipe {__version__}")
        return 0
    commands = _commands()
    if arguments[0] not in commands:
        known = ", ".join(commands)
        print(f"adapipe: {arguments[0]!r} is not a command; there is: {known}", file=sys.stderr)
        return BAD_INPUT
    return commands[arguments[0]](arguments[1:])
