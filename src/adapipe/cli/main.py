"""The `adapipe` command: finds the subcommand and turns our errors into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from adapipe.cli.exit_codes import BAD_INPUT
from adapipe.cli.interrupt import end_quietly_on_interrupt

USAGE = """\
usage: adapipe COMMAND [OPTIONS]

Pipeline-parallel training that alternates between synchronous and asynchronous phases.

commands:
  train    train a language model through a pipeline of stages, real or emulated
  plan     say what to expect of a pipeline: speed, idle time, staleness, memory; trains nothing
  profile  measure the stages of a model on this machine, for plan and for emulated runs

adapipe COMMAND --help lists the options of a command; adapipe --version prints the version."""


COMMANDS = ("train", "plan", "profile")


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """Importing one does not import the others: planning needs no torch, which takes seconds to load."""
    command: Callable[[Sequence[str]], int] = getattr(import_module(f"adapipe.cli.{name}"), f"{name}_command")
    return command


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
    if arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"adapipe: {arguments[0]!r} is not a command; there is: {known}", file=sys.stderr)
        return BAD_INPUT
    return _command(arguments[0])(arguments[1:])
