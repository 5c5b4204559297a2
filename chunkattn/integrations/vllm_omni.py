"""The plug-in that puts chunkattn under vllm-omni's DreamZero and LingBot-World.

vllm-omni loads it in every worker, by the entry point in group ``vllm.general_plugins``. What it
does then is the deployment's choice, ``CHUNKATTN_VLLM_OMNI``:

| value | effect |
|---|---|
| ``off`` (default) | nothing is imported, nothing changes |
| ``kernels`` | the op ``ar_diffusion_paged_write_attn`` runs on our kernels |
| ``full`` | and our cache and sessions stand where the runner looks for vllm-omni's |

``CHUNKATTN_BACKEND`` names the backend, ``auto`` where it is not set.
"""

import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Iterator

ENV = "CHUNKATTN_VLLM_OMNI"
MODES = ("off", "kernels", "full")
VERSIONS = ("0.30.0",)
"""Of vllm-omni, tested."""
_KV_CACHE = "vllm_omni.experimental.ar_diffusion.kv_cache"

logger = logging.getLogger("vllm.chunkattn")  # below "vllm", whose lines a worker prints

active = "off"
"""What is in force in this process."""


def register() -> None:
    """Do what `ENV` asks for. Asking again changes nothing; ``full`` may follow ``kernels``.

    Raises:
        ValueError: an unknown mode or backend.
        RuntimeError: less than what is in force already.
        MissingDependencyError: vllm-omni is not installed.
        NotImplementedError: a vllm-omni that this plug-in does not know. Nothing was changed.
    """
    global active
    mode = os.environ.get(ENV, "off")
    if mode not in MODES:
        raise ValueError(f"`{ENV}` must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == active:
        return
    if MODES.index(mode) < MODES.index(active):
        raise RuntimeError(f"`{ENV}` must stay {active!r} in this process, got {mode!r}")
    version = _checked_version()

    import torch

    from chunkattn import __version__
    from chunkattn.integrations import omni_op

    backend = _checked_backend(omni_op.backend_asked())
    importlib.import_module(f"{_KV_CACHE}.paged_attention")
    faults = list(_op_faults())
    classes = _classes() if mode == "full" else {}
    for theirs, ours in classes.items():
        faults += signature_faults(theirs, ours)
    if faults:
        raise NotImplementedError(f"vllm-omni {version} is not what `{ENV}` knows: {faults[0]}")

    serve_op()
    for theirs, ours in classes.items():
        _put_in_place_of(theirs, ours)
    active = mode
    logger.info(
        "chunkattn %s is active in vllm-omni %s: %s=%s, backend %s, torch %s",
        __version__,
        version,
        ENV,
        mode,
        backend,
        torch.__version__,
    )


def serve_op() -> None:
    """Have vllm-omni's op computed by `omni_op.write_attend`, for the rest of the process."""
    import torch

    from chunkattn.integrations import omni_op

    importlib.import_module(f"{_KV_CACHE}.paged_attention")
    for device_type in ("cpu", "cuda"):  # one by one: torch 2.13 confuses the devices of a list
        torch.library.register_kernel(omni_op.NAME, device_type, omni_op.write_attend)


def _checked_version() -> str:
    from chunkattn.errors import MissingDependencyError

    try:
        version = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(f"`{ENV}` needs vllm-omni {VERSIONS[-1]}") from error
    if version.partition("+")[0] not in VERSIONS:
        raise NotImplementedError(
            f"vllm-omni must be {' or '.join(VERSIONS)} for `{ENV}`, got {version}"
        )
    return version


def _checked_backend(asked: str) -> str:
    """The backend in words. Starts no CUDA context: this process may fork its workers."""
    import torch
    from vllm.platforms import current_platform

    from chunkattn import ops
    from chunkattn.integrations.omni_op import BACKEND_ENV

    if asked not in ops.BACKENDS:
        raise ValueError(f"`{BACKEND_ENV}` must be one of {', '.join(ops.BACKENDS)}, got {asked!r}")
    if asked != "auto":
        return asked
    device = torch.device("cuda" if current_platform.is_cuda_alike() else "cpu")
    return f"{ops.resolve_backend('auto', device, head_size=128)} (auto)"


def _classes() -> dict[type, type]:
    """vllm-omni's classes, and ours in their place."""
    from chunkattn.integrations import omni_cache, omni_state
    from chunkattn.manager import ARDiffusionRequestAdapter

    ours = {
        "manager": (omni_cache.ARDiffusionKVCache, ARDiffusionRequestAdapter),
        "state": (omni_state.ARDiffusionKVState,),
        "paged_attention": (omni_state.ARDiffusionPagedForwardContext,),
    }
    return {
        getattr(importlib.import_module(f"{_KV_CACHE}.{module}"), cls.__name__): cls
        for module, classes in ours.items()
        for cls in classes
    }


def _op_faults() -> Iterator[str]:
    """Where the op is not declared as our implementation of it."""
    import torch

    from chunkattn.integrations import omni_op

    expected = torch.library.infer_schema(
        omni_op.write_attend, mutates_args=omni_op.MUTATED, op_name=omni_op.NAME
    )
    found = str(torch.ops.vllm_omni.ar_diffusion_paged_write_attn.default._schema)
    if found != expected:
        yield f"the op must be {expected}, got {found}"


def signature_faults(theirs: type, ours: type) -> Iterator[str]:
    """The public methods of ``theirs`` that ``ours`` lacks or takes by other arguments."""
    for name, member in vars(theirs).items():
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(ours, name):
            if callable(member) or isinstance(member, property):
                yield f"{theirs.__name__}.{name} is new"
        elif inspect.isfunction(member):
            wanted, found = _arguments(member), _arguments(getattr(ours, name))
            if wanted != found:
                yield f"{theirs.__name__}.{name} must take {found}, got {wanted}"


def _arguments(function: object) -> list[str]:
    """Names, kinds and defaults."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]


def _put_in_place_of(theirs: type, ours: type) -> None:
    """Every module of vllm-omni that has bound ``theirs`` to a name gets ``ours``.

    Modules that are imported later find it where they look for theirs.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm_omni":
            for attribute, value in list(vars(module).items()):
                if value is theirs:
                    setattr(module, attribute, ours)
