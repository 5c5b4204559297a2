"""One file a command: ``add`` declares its arguments, ``run`` returns the exit status."""

import argparse
import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from chunkattn.presets import ENV, PRESETS

MODEL = f"the model: {', '.join(PRESETS)}; {ENV} may name a TOML file of more"


class CannotRunError(Exception):
    """Why a command cannot run, in one line: it ends with status 2."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)


def add_parser(
    commands: Any, name: str, *, help: str, description: str, found: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a command.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        help: one line for the list of commands.
        description: for the command's own help.
        found: what an exit status of 1 says; None where there is no such status.
    """
    one = f"1 {found}, " if found else ""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"Exit status: 0 done, {one}2 cannot run.",
        formatter_class=_Help,
    )
    return parser


def require(packages: Iterable[str], extras: str) -> None:
    """Refuse to run where one of these packages is not installed.

    Raises:
        CannotRunError: it names what is missing and the ``extras`` that bring it.
    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise CannotRunError(f"needs {', '.join(missing)}: pip install 'chunkattn[{extras}]'")


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def status(text: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal's stderr while something takes its time, where rich is installed."""
    if not is_installed("rich"):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """An argument that is a whole number of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
    return int(text)
