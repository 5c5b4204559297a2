"""Kernels with a fault in them, as a package of their own."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def planted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str = "",
    right: str = "",
    wrong: str = "",
) -> Callable[[str], ModuleType]:
    """Copy the kernels, with ``wrong`` in place of the one ``right`` in a file of them.

    Returns:
        What loads a module of the copy by its name, in place of `ops.import_kernel`.
    """
    package = tmp_path / tmp_path.name  # a name that no other test has
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    if file:
        source = (package / file).read_text()
        assert source.count(right) == 1, f"{file} has {source.count(right)} of {right!r}, not one"
        (package / file).write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(package.parent)
    return lambda name: importlib.import_module(f"{package.name}.{name}")
