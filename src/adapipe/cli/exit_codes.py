"""The exit codes of the command."""

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""Ctrl-C ended it: 128 plus the number of SIGINT."""
