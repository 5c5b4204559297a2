"""Paged chunk-window attention for autoregressive video and world models."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from chunkattn import __version__

EPILOG = (
    "`chunkattn COMMAND --help` says more. Exit status: 0 done, 1 a check failed, 2 cannot run."
)


_ENDED_BY_PIPE = 128 + 13
"""What a shell reports of a program that SIGPIPE ends."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error of a command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; ``None`` takes them from ``sys.argv``.

    Returns:
        The exit status: 0, or 1 when a command found a mistake in the results, or 2 when it could
        not run at all.
    """
    try:
        importlib.import_module("chunkattn.presets")  # may be a user's file
    except ValueError as error:
        print(f"chunkattn: {error}", file=sys.stderr)
        return 2
    from chunkattn.commands import CannotRunError, aot, bench, capacity, demo, doctor, plan

    parser = _Parser(prog="chunkattn", description=__doc__, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, plan, capacity, aot, bench, doctor):
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except CannotRunError as error:
        print(f"chunkattn {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ENDED_BY_PIPE
    return status
