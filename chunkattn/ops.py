"""The ops of `torch.library`: schemas, fakes, and dispatch to a backend.

An op trusts its arguments: `functional` checks them for a caller, and a plan that has been checked
once (`session.ForwardContext`) calls `write_attend` for every layer without a check.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from chunkattn import flash_backend, torch_backend
from chunkattn.errors import MissingDependencyError
from chunkattn.kernels.arguments import AttentionArguments, ScatterArguments

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton", *flash_backend.NAMES)
_MAX_TRITON_HEAD_SIZE = 256

_library = torch.library.Library("chunkattn", "DEF")
_library.define(
    "scatter_kv(Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, "
    "Tensor slot_mapping, Tensor(c!)? key_scale, Tensor(d!)? value_scale, str backend) -> ()"
)
_library.define(
    "paged_window_attention(Tensor query, Tensor key_pool, Tensor value_pool, Tensor block_table, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor? key_current, Tensor? value_current, "
    "Tensor? current_start_loc, Tensor? segment_blocks, Tensor? key_scale, Tensor? value_scale, "
    "Tensor? block_bias, Tensor(a!) out, Tensor(b!)? lse, float softmax_scale, str backend) -> ()"
)
_library.define(
    "write_attend(Tensor query, Tensor key, Tensor value, Tensor? key_extra, Tensor? value_extra, "
    "Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor slot_mapping, Tensor block_table, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor(c!) out, float softmax_scale, "
    "str backend, Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None, "
    "Tensor? current_start_loc=None) -> ()"
)


# -- backends --------------------------------------------------------------------------------------
def resolve_backend(
    backend: str,
    device: torch.device,
    head_size: int,
    dtype: torch.dtype | None = None,
    block_size: int | None = None,
    num_query_rows: int | None = None,
) -> str:
    """Name of the backend that will run: ``"torch"``, ``"triton"``, ``"fa3"`` or ``"fa2"``.

    Args:
        backend: ``"auto"`` is torch on the CPU and, on a GPU, triton or what
            `flash_backend.MEASURED` shows to be faster. A backend asked for by name never falls
            back.
        device: where the pools lie.
        head_size: elements of one head.
        dtype: of the pools; None for a write.
        block_size: tokens of one block; None for a write.
        num_query_rows: query rows of all query heads of a K/V head; None where not yet known.

    Raises:
        ValueError: an unknown name, or a device that the named backend cannot run on.
        NotImplementedError: a head size, a dtype or a block size that the named backend cannot do.
        MissingDependencyError: the named backend needs a package that is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = _default_backend(device.type)
        if backend == "triton" and dtype and block_size and num_query_rows:
            backend = flash_backend.auto_backend(
                device, head_size, dtype, block_size, num_query_rows
            )
    if backend in flash_backend.NAMES:
        flash_backend.check(backend, device, head_size, dtype, block_size)
    if backend == "triton":
        if device.type == "cpu" and not import_kernel("walk").is_interpreted():
            raise ValueError(
                "`backend` must be 'torch' for tensors on the CPU (or set TRITON_INTERPRET=1 "
                "before the first import of triton), got 'triton'"
            )
        if head_size > _MAX_TRITON_HEAD_SIZE:
            raise NotImplementedError(
                f"`head_size` must be at most {_MAX_TRITON_HEAD_SIZE} for backend 'triton', "
                f"got {head_size}"
            )
        if device.type == "cuda" and not torch.version.hip:
            capability = torch.cuda.get_device_capability(device)
            if capability < (8, 0):
                raise NotImplementedError(
                    "`backend` must be 'torch' below compute capability 8.0, "
                    f"got 'triton' on {capability}"
                )
            if dtype == torch.float8_e4m3fn and capability < (8, 9):
                raise NotImplementedError(
                    "`key_pool` must be float32, float16 or bfloat16 for backend 'triton' below "
                    f"compute capability 8.9, got {dtype} on {capability}"
                )
    return backend


def _default_backend(device_type: str) -> str:
    if device_type != "cpu":
        return "triton"
    if not torch.compiler.is_compiling():  # a log call would break the graph
        _say_torch_is_used()
    return "torch"


@functools.cache
def _say_torch_is_used() -> None:
    logger.info("chunkattn: the tensors are on the CPU, using the torch backend")


def on_their_device(op: Callable[..., None]) -> Callable[..., None]:
    """Run an op on the device of its tensors: kernels are launched on the current one."""

    @functools.wraps(op)
    def guarded(*arguments: Any) -> None:
        tensors = (x for x in arguments if isinstance(x, torch.Tensor) and x.is_cuda)
        first = next(tensors, None)
        with _SAME_DEVICE if first is None else torch.cuda.device(first.device):
            op(*arguments)

    return guarded


_SAME_DEVICE = contextlib.nullcontext()


@functools.cache
def import_kernel(name: str) -> ModuleType:
    """A module of the kernels.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    try:
        return importlib.import_module(f"chunkattn.kernels.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            f"backend 'triton' needs Triton: pip install triton, or use backend='torch' ({error})"
        ) from error


def _attention_kernel(block_size: int) -> Callable[..., None]:
    name = "gather" if block_size < import_kernel("tuning").GATHER_BELOW else "walk"
    launch: Callable[..., None] = getattr(import_kernel(name), name)
    return launch


def _as_blocks(pool: torch.Tensor) -> torch.Tensor:
    """A flat pool ``(num_slots, ...)`` as blocks of one slot; a pool of blocks as it is."""
    return pool if pool.dim() == 4 else pool.unsqueeze(1)


def _per_block(scale: torch.Tensor | None, pool: torch.Tensor) -> torch.Tensor | None:
    """A scale ``(num_blocks, num_kv_heads)``; one number stands for all of them."""
    if scale is None or scale.dim() == 2:
        return scale
    return scale.expand(pool.shape[0], pool.shape[2])


@torch.library.impl(_library, "scatter_kv", "CompositeExplicitAutograd")
@on_their_device
def _scatter_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    backend: str,
) -> None:
    rows = ScatterArguments(
        key,
        value,
        key_extra=None,
        value_extra=None,
        key_pool=_as_blocks(key_pool),
        value_pool=_as_blocks(value_pool),
        slot_mapping=slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    _scatter(rows, backend)


def _scatter(rows: ScatterArguments, backend: str) -> None:
    if backend in flash_backend.NAMES:  # these only attend
        backend = _default_backend(rows.key_pool.device.type)
    launch = torch_backend.scatter if backend == "torch" else import_kernel("scatter").scatter
    launch(rows)


@torch.library.impl(_library, "paged_window_attention", "CompositeExplicitAutograd")
@on_their_device
def _paged_window_attention(*arguments: Any) -> None:
    *tensors, backend = arguments
    inputs = AttentionArguments(*tensors)
    inputs = inputs._replace(
        key_scale=_per_block(inputs.key_scale, inputs.key_pool),
        value_scale=_per_block(inputs.value_scale, inputs.value_pool),
    )
    _attend(inputs, backend)


def _attend(inputs: AttentionArguments, backend: str) -> None:
    if backend in flash_backend.NAMES:
        flash_backend.attend(backend, inputs)
    elif backend == "torch":
        torch_backend.attend(inputs)
    else:
        _attention_kernel(inputs.key_pool.shape[1])(inputs)


@torch.library.impl(_library, "write_attend", "CompositeExplicitAutograd")
@on_their_device
def _write_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_extra: torch.Tensor | None,
    value_extra: torch.Tensor | None,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    backend: str,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    current_start_loc: torch.Tensor | None = None,
) -> None:
    # The rows that have a slot are written and attended in their blocks, the others where they lie.
    has_extra = key_extra is not None and key_extra.shape[0] > 0
    pairs = [(key, value), (key_extra, value_extra) if has_extra else (None, None)]
    num_written = slot_mapping.shape[0]
    num_pairs = 0 if num_written == 0 else 1 if num_written == key.shape[0] else 2
    if num_pairs:
        rows = ScatterArguments(
            key,
            value,
            *(pairs[1] if num_pairs == 2 else (None, None)),
            key_pool,
            value_pool,
            slot_mapping,
            key_scale,
            value_scale,
        )
        _scatter(rows, backend)
    (key_current, value_current), (key_extra, value_extra) = [
        tuple(None if rows is None else rows.to(query.dtype) for rows in pair)
        for pair in (*pairs[num_pairs:], (None, None), (None, None))[:2]
    ]
    inputs = AttentionArguments(
        query,
        key_pool,
        value_pool,
        block_table,
        seq_lens,
        query_start_loc,
        key_current,
        value_current,
        current_start_loc=None if key_current is None else current_start_loc,
        segment_blocks=None,
        key_scale=_per_block(key_scale, key_pool),
        value_scale=_per_block(value_scale, value_pool),
        block_bias=None,
        out=out,
        lse=None,
        softmax_scale=softmax_scale,
        key_extra=key_extra,
        value_extra=value_extra,
    )
    _attend(inputs, backend)


for _name in ("scatter_kv", "paged_window_attention", "write_attend"):
    # All results are written into arguments, so the fake kernels have nothing to return.
    torch.library.register_fake(f"chunkattn::{_name}", lambda *_, **__: None, lib=_library)

write_attend = torch.ops.chunkattn.write_attend.default
"""One layer of a planned forward: write the rows, then attend. Trusts its arguments; see the schema
above.
"""
