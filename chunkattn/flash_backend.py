"""FlashAttention-3 and -2 as attention backends, chosen by name where one is installed.

The libraries attend over the same pools and block tables, so nothing is copied but their results.
The write stays with the device's own backend. Rows that are not in the pool take a second call, and
the two results are merged by their log-sum-exp in float32.

One promise of the other backends does not hold: FlashAttention-3 multiplies the rows behind
``seq_lens`` by 0, so that NaN or infinity in a dead slot of a visible block reaches the result
(github.com/Dao-AILab/flash-attention/issues/1745 and 2374). Such slots must hold finite values.
"""

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from chunkattn.errors import MissingDependencyError
from chunkattn.kernels.arguments import SMALLEST_SOFTMAX_SCALE, AttentionArguments
from chunkattn.kernels.arguments import find_arch as _arch_of
from chunkattn.merge import merge_states

NAMES = ("fa3", "fa2")
_MAX_HEAD_SIZE = 256
_ALIGNMENT = 16  # bytes that the libraries load at once


# -- the choice of "auto" --------------------------------------------------------------------------
class Measured(NamedTuple):
    """One result: ``backend`` was the fastest from this many query rows on."""

    arch: int
    head_size: int
    dtype: torch.dtype
    block_size: int
    min_query_rows: int
    backend: str
    result: str  # the file below bench/results/ that shows it


MEASURED: tuple[Measured, ...] = ()
"""What a GPU has shown. No GPU has run this yet, so "auto" is triton there."""


def chosen_backend(
    arch: int, head_size: int, dtype: torch.dtype, block_size: int, num_query_rows: int
) -> str:
    """What ``backend="auto"`` takes on a GPU: the measured winner, else ``"triton"``.

    Args:
        arch: compute capability, ``10 * major + minor``.
        head_size: elements of one head.
        dtype: of the pools.
        block_size: tokens of one block.
        num_query_rows: query rows of the whole call, of all query heads of a K/V head.
    """
    shape = (arch, head_size, dtype, block_size)
    rows = [row for row in MEASURED if row[:4] == shape and row.min_query_rows <= num_query_rows]
    return max(rows, key=lambda row: row.min_query_rows).backend if rows else "triton"


def auto_backend(
    device: torch.device, head_size: int, dtype: torch.dtype, block_size: int, num_query_rows: int
) -> str:
    """`chosen_backend` on this device, or triton where that one cannot run."""
    name = chosen_backend(_arch_of(device), head_size, dtype, block_size, num_query_rows)
    if name in NAMES:
        try:
            check(name, device, head_size, dtype, block_size)
        except (NotImplementedError, MissingDependencyError):
            return "triton"
    return name


# -- the libraries ---------------------------------------------------------------------------------
Result = tuple[torch.Tensor, torch.Tensor]  # out, and lse as (num_heads, num_tokens)


def _attend_fa3(
    module: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_loc: torch.Tensor,
    max_query_len: int,
    key_lens: torch.Tensor,
    max_key_len: int,
    block_table: torch.Tensor | None,
    scale: float,
) -> Result:
    if block_table is None:
        result = module.flash_attn_varlen_func(
            query,
            key,
            value,
            start_loc,
            key_lens,
            max_query_len,
            max_key_len,
            softmax_scale=scale,
            return_attn_probs=True,
        )
    else:
        result = module.flash_attn_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=key_lens,
            page_table=block_table,
            cu_seqlens_q=start_loc,
            max_seqlen_q=max_query_len,
            softmax_scale=scale,
            return_softmax_lse=True,
        )
    return result[0], result[1]


def _attend_fa2(
    module: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_loc: torch.Tensor,
    max_query_len: int,
    key_lens: torch.Tensor,
    max_key_len: int,
    block_table: torch.Tensor | None,
    scale: float,
) -> Result:
    if block_table is not None:
        # It reads lengths as differences of a running sum, of a paged sequence too.
        key_lens = torch.nn.functional.pad(key_lens.cumsum(0, dtype=torch.int32), (1, 0))
    result = module.flash_attn_varlen_func(
        query,
        key,
        value,
        start_loc,
        key_lens,
        max_query_len,
        max_key_len,
        softmax_scale=scale,
        return_attn_probs=True,
        block_table=block_table,
    )
    return result[0], result[1]


def _attend_vllm(
    version: int,
    module: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_loc: torch.Tensor,
    max_query_len: int,
    key_lens: torch.Tensor,
    max_key_len: int,
    block_table: torch.Tensor | None,
    scale: float,
) -> Result:
    out, lse = module.flash_attn_varlen_func(
        query,
        key,
        value,
        max_query_len,
        start_loc,
        max_key_len,
        cu_seqlens_k=key_lens if block_table is None else None,
        seqused_k=None if block_table is None else key_lens,
        softmax_scale=scale,
        block_table=block_table,
        return_softmax_lse=True,
        fa_version=version,
    )
    return out, lse


class Library(NamedTuple):
    """A package that has the kernels of one version of FlashAttention."""

    module: str
    attend: Callable[..., Result]
    block_multiple: int = 1  # of paged K/V
    vllm_version: int | None = None


# In order of preference. fa3-fwd comes last: it is built without fp16, and reads pages by TMA only.
LIBRARIES = {
    "fa3": (
        Library("flash_attn_interface", _attend_fa3),
        Library("vllm.vllm_flash_attn", functools.partial(_attend_vllm, 3), vllm_version=3),
        Library("fa3_fwd_interface", _attend_fa3),
    ),
    "fa2": (
        Library("flash_attn", _attend_fa2, block_multiple=256),
        Library("vllm.vllm_flash_attn", functools.partial(_attend_vllm, 2), 16, vllm_version=2),
    ),
}
_INSTALL = {"fa3": "pip install fa3-fwd, or vllm", "fa2": "pip install flash-attn, or vllm"}


@functools.cache
def load(name: str) -> tuple[Library, ModuleType]:
    """The first library of this version that can be imported.

    Raises:
        MissingDependencyError: none can; the message says why, and what to install.
    """
    reasons = []
    for library in LIBRARIES[name]:
        try:
            module = importlib.import_module(library.module)
        except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
            reasons.append(f"{library.module}: {error}")
            continue
        version = library.vllm_version
        if version is None or module.is_fa_version_supported(version):
            return library, module
        reasons.append(f"{library.module}: {module.fa_version_unsupported_reason(version)}")
    raise MissingDependencyError(
        f"backend {name!r} needs FlashAttention: {_INSTALL[name]} ({'; '.join(reasons)})"
    )


# -- checks ----------------------------------------------------------------------------------------
def check(
    name: str,
    device: torch.device,
    head_size: int,
    dtype: torch.dtype | None = None,
    block_size: int | None = None,
) -> None:
    """Refuse what this backend cannot do.

    Args:
        name: one of `NAMES`.
        device: where the pools lie.
        head_size: elements of one head.
        dtype: of the pools; None leaves that check out, as for a write.
        block_size: tokens of one block; None leaves that check out.

    Raises:
        NotImplementedError: the message names the argument.
        MissingDependencyError: no library is installed.
    """
    _check_device(name, device)
    if head_size % 8 or head_size > _MAX_HEAD_SIZE:
        raise NotImplementedError(
            f"`head_size` must be a multiple of 8 and at most {_MAX_HEAD_SIZE} "
            f"for backend {name!r}, got {head_size}"
        )
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"`dtype` must be float16 or bfloat16 for backend {name!r}, got {dtype}"
        )
    library, _ = load(name)
    if block_size is not None and block_size % library.block_multiple:
        raise NotImplementedError(
            f"`block_size` must be a multiple of {library.block_multiple} "
            f"for backend {name!r} by {library.module}, got {block_size}"
        )


def _check_device(name: str, device: torch.device) -> None:
    if device.type != "cuda" or torch.version.hip:
        raise NotImplementedError(
            f"`backend` must be 'torch' or 'triton' without an NVIDIA GPU, got {name!r} "
            f"for tensors on {device}"
        )
    arch = _arch_of(device)
    # FlashAttention-3 has no kernels for Blackwell.
    if arch < 80 or (name == "fa3" and arch >= 100):
        raise NotImplementedError(
            f"`backend` must be 'torch' or 'triton' on sm_{arch}, got {name!r}"
        )


def _check_aligned(name: str, **tensors: torch.Tensor | None) -> None:
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        # The stride of a dimension of one element is never used.
        steps = [s for n, s in zip(tensor.shape[:-1], tensor.stride(), strict=False) if n > 1]
        offsets = [tensor.data_ptr(), *(step * tensor.element_size() for step in steps)]
        if any(offset % _ALIGNMENT for offset in offsets):
            raise NotImplementedError(
                f"`{argument}` must start and have strides at multiples of {_ALIGNMENT} bytes "
                f"for backend {name!r}, got strides {tensor.stride()} of {tensor.dtype}"
            )


# -- attention -------------------------------------------------------------------------------------
@torch.no_grad()
def attend(name: str, inputs: AttentionArguments) -> None:
    """`chunkattn.kernels.walk.walk` by a library of ``name``, for one segment. No host sync.

    Raises:
        NotImplementedError: a layout, or a call that this build of the library does not have.
    """
    query, key_pool, value_pool, block_table, seq_lens, query_start_loc, *_ = inputs
    key_current, value_current = inputs.key_current, inputs.value_current
    num_tokens, num_seqs = query.shape[0], seq_lens.shape[0]
    if num_tokens == 0:
        return
    _check_aligned(
        name,
        query=query,
        key_pool=key_pool,
        value_pool=value_pool,
        key_current=key_current,
        value_current=value_current,
        key_extra=inputs.key_extra,
        value_extra=inputs.value_extra,
    )
    library, module = load(name)
    # Lengths lie on the device, so the longest is only bounded. With 1, FlashAttention-2 expects as
    # many rows as sequences.
    max_query_len = num_tokens if num_seqs == 1 else max(2, num_tokens)
    queries = (query_start_loc.to(torch.int32), max_query_len)
    scale = max(inputs.softmax_scale, SMALLEST_SOFTMAX_SCALE)
    results = []
    try:
        if key_pool.shape[0] and block_table.shape[1]:
            keys = (seq_lens.to(torch.int32), block_table.shape[1] * key_pool.shape[1])
            table = block_table.to(torch.int32).contiguous()
            results.append(
                library.attend(module, query, key_pool, value_pool, *queries, *keys, table, scale)
            )
        if key_current is not None and key_current.shape[0]:
            assert inputs.current_start_loc is not None
            keys = (inputs.current_start_loc.to(torch.int32), key_current.shape[0])
            results.append(
                library.attend(
                    module, query, key_current, value_current, *queries, *keys, None, scale
                )
            )
        if inputs.key_extra is not None and inputs.key_extra.shape[0]:
            rows, num_extra = (inputs.key_extra, inputs.value_extra), inputs.key_extra.shape[0]
            ends = torch.arange(0, 2 * num_extra, num_extra, dtype=torch.int32, device=query.device)
            keys = (ends, num_extra)
            results.append(library.attend(module, query, *rows, *queries, *keys, None, scale))
    except RuntimeError as error:  # raised by the build's own checks, before it launches anything
        if "does not support" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise NotImplementedError(
            f"`backend` must have a build for this call, got {name!r} by {library.module}: {reason}"
        ) from error
    if not results:
        inputs.out.zero_()
        if inputs.lse is not None:
            inputs.lse.fill_(-math.inf)
    elif len(results) == 1:
        inputs.out.copy_(results[0][0])
        if inputs.lse is not None:
            inputs.lse.copy_(_with_rows_first(results[0][1]))
    else:
        outs, lses = zip(*results, strict=True)
        out, lse = merge_states(outs, [_with_rows_first(part) for part in lses])
        inputs.out.copy_(out)
        if inputs.lse is not None:
            inputs.lse.copy_(lse)


def _with_rows_first(lse: torch.Tensor) -> torch.Tensor:
    """``(num_tokens, num_heads)``; a row with no key is -inf, not FlashAttention-2's inf."""
    lse = lse.transpose(0, 1)
    return lse.masked_fill(lse == math.inf, -math.inf)
