"""Whole blocks of one layer's pools: copy, swap to and from the host, blend, clear.

As in `ops`, the public functions check and call an op of the same name, and the op trusts. Block
ids name positions along the first dimension of a pool; the i-th source goes to the i-th target.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from chunkattn.checks import (
    INDEX_DTYPES,
    POOL_DTYPES,
    check_device,
    check_shape,
    check_tensor,
    check_writable,
    refuse,
    values_visible,
)
from chunkattn.ops import import_kernel, on_their_device, resolve_backend

BLOCK_BACKENDS = ("auto", "torch", "triton")
_DTYPES = (*POOL_DTYPES, torch.float8_e4m3fn)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_library = torch.library.Library("chunkattn", "FRAGMENT")
_library.define(
    "copy_blocks(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor source_block_ids, "
    "Tensor target_block_ids, str backend) -> ()"
)
_library.define(
    "swap_blocks(Tensor source_key, Tensor source_value, Tensor(a!) target_key, "
    "Tensor(b!) target_value, Tensor source_block_ids, Tensor target_block_ids, str backend) -> ()"
)
_library.define(
    "blend_blocks(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor source_block_ids, "
    "Tensor target_block_ids, float weight, str backend) -> ()"
)
_library.define(
    "clear_blocks(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor block_ids, float value, "
    "str backend) -> ()"
)


def to_device(integers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Block ids or slots on the pools' device, which is not waited for."""
    if integers.device == device or device.type == "cpu":
        return integers.to(device)
    return integers.pin_memory().to(device, non_blocking=True)


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """The pool as integers: they are copied bit for bit everywhere, fp8 and NaN included."""
    return pool.view(_BITS[pool.element_size()])


@torch.library.impl(_library, "copy_blocks", "CompositeExplicitAutograd")
@on_their_device
@torch.no_grad()
def _copy_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    source_block_ids: torch.Tensor,
    target_block_ids: torch.Tensor,
    backend: str,
) -> None:
    key, value = _bits(key_pool), _bits(value_pool)
    if backend == "triton":
        import_kernel("blocks").copy(key, value, key, value, source_block_ids, target_block_ids)
        return
    source, target = source_block_ids.long(), target_block_ids.long()
    for pool in (key, value):
        pool[target] = pool[source]


@torch.library.impl(_library, "swap_blocks", "CompositeExplicitAutograd")
@on_their_device
@torch.no_grad()
def _swap_blocks(
    source_key: torch.Tensor,
    source_value: torch.Tensor,
    target_key: torch.Tensor,
    target_value: torch.Tensor,
    source_block_ids: torch.Tensor,
    target_block_ids: torch.Tensor,
    backend: str,
) -> None:
    pools = [_bits(pool) for pool in (source_key, source_value, target_key, target_value)]
    if backend == "triton":
        device = next((pool.device for pool in pools if pool.is_cuda), target_key.device)
        ids = (to_device(ids, device) for ids in (source_block_ids, target_block_ids))
        import_kernel("blocks").copy(*pools, *ids)
        return
    # A copy of a slice with gaps goes through pageable memory: then block by block.
    merge = all(pool.is_contiguous() for pool in pools)
    for source, target, count in _runs(source_block_ids, target_block_ids, merge):
        for from_pool, to_pool in (pools[::2], pools[1::2]):
            to_pool[target : target + count].copy_(
                from_pool[source : source + count], non_blocking=True
            )


def _runs(sources: torch.Tensor, targets: torch.Tensor, merge: bool) -> list[list[int]]:
    """Pairs of block ids as ``[first source, first target, count]``."""
    runs: list[list[int]] = []
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if merge and runs and [source, target] == [first + runs[-1][2] for first in runs[-1][:2]]:
            runs[-1][2] += 1
        else:
            runs.append([source, target, 1])
    return runs


@torch.library.impl(_library, "blend_blocks", "CompositeExplicitAutograd")
@on_their_device
@torch.no_grad()
def _blend_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    source_block_ids: torch.Tensor,
    target_block_ids: torch.Tensor,
    weight: float,
    backend: str,
) -> None:
    if weight == 0:  # 0 * NaN is NaN
        return
    if weight == 1:
        _copy_blocks(key_pool, value_pool, source_block_ids, target_block_ids, backend)
        return
    if backend == "triton":
        import_kernel("blocks").blend(
            key_pool, value_pool, source_block_ids, target_block_ids, weight
        )
        return
    source, target = source_block_ids.long(), target_block_ids.long()
    for pool in (key_pool, value_pool):
        kept = pool[target].float() * (1 - weight)
        pool[target] = (kept + pool[source].float() * weight).to(pool.dtype)


@torch.library.impl(_library, "clear_blocks", "CompositeExplicitAutograd")
@on_their_device
@torch.no_grad()
def _clear_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_ids: torch.Tensor,
    value: float,
    backend: str,
) -> None:
    bits = int(_bits(torch.tensor([value]).to(key_pool.dtype)))
    if backend == "triton":
        import_kernel("blocks").clear(_bits(key_pool), _bits(value_pool), block_ids, bits)
        return
    for pool in (key_pool, value_pool):
        _bits(pool).index_fill_(0, block_ids.long(), bits)


for _name in ("copy_blocks", "swap_blocks", "blend_blocks", "clear_blocks"):
    # All results are written into arguments, so the fake kernels have nothing to return.
    torch.library.register_fake(f"chunkattn::{_name}", lambda *_: None, lib=_library)

copy_blocks_op = torch.ops.chunkattn.copy_blocks.default
swap_blocks_op = torch.ops.chunkattn.swap_blocks.default
"""Without a check, for a cache that knows its blocks."""


def copy_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    source_block_ids: torch.Tensor,
    target_block_ids: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Copy blocks of a layer's pools into other blocks of them, bit for bit, in place.

    For forks and copy on write: one launch for K and V of all blocks.

    Args:
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``, float32, float16, bfloat16
            or float8_e4m3fn; may be a strided view. Changed in place in the target blocks, nowhere
            else.
        value_pool: as ``key_pool``.
        source_block_ids: ``(num_ids,)`` int32 or int64 on the pools' device. An id may repeat.
        target_block_ids: as ``source_block_ids``; no id may repeat or be a source.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written. Ids are
            looked at when they are on the CPU, or with ``CHUNKATTN_DEBUG=1``.
    """
    _check_pools(key_pool, value_pool, _DTYPES)
    backend = _resolve(backend, key_pool.device)
    source, target = _device_pairs(key_pool, source_block_ids, target_block_ids)
    torch.ops.chunkattn.copy_blocks(key_pool, value_pool, source, target, backend)


def swap_blocks(
    source_key: torch.Tensor,
    source_value: torch.Tensor,
    target_key: torch.Tensor,
    target_value: torch.Tensor,
    source_block_ids: torch.Tensor | Sequence[int],
    target_block_ids: torch.Tensor | Sequence[int],
    backend: str = "auto",
) -> None:
    """Copy blocks between a layer's pools on a device and pools in host memory, either way.

    ``"auto"`` and ``"torch"`` hand each run of consecutive blocks to the GPU's copy engine, beside
    running kernels and at the bus's full rate; ``"triton"`` is one launch that reads or writes
    pinned memory from the device, for many blocks that form no runs.

    All of it is queued on the device's current stream. The target is valid for later work of that
    stream; the host, or another stream, must wait for the stream first. Until then all pools must
    live, and nobody else may write the source blocks.

    Args:
        source_key: ``(num_blocks, block_size, num_kv_heads, head_size)``, float32, float16,
            bfloat16 or float8_e4m3fn; may be a strided view. On the host it must be pinned if the
            target is on a GPU.
        source_value: as ``source_key``.
        target_key: shape and dtype as ``source_key``, but for the number of blocks; in other
            memory. Changed in place in the target blocks, nowhere else. On the host it must be
            pinned if the source is on a GPU.
        target_value: as ``target_key``.
        source_block_ids: ``(num_ids,)`` int32 or int64 on the CPU, or a sequence of ints. An id may
            repeat.
        target_block_ids: as ``source_block_ids``; no id may repeat.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written.
    """
    pools = {
        "source_key": source_key,
        "source_value": source_value,
        "target_key": target_key,
        "target_value": target_value,
    }
    for key_name, value_name in (("source_key", "source_value"), ("target_key", "target_value")):
        _check_pools(pools[key_name], pools[value_name], _DTYPES, key_name, value_name)
    check_tensor("target_key", target_key, (4,), (source_key.dtype,))
    shape = (target_key.shape[0], *source_key.shape[1:])
    check_shape("target_key", target_key, shape, "the blocks of `source_key`")
    device = source_key.device if source_key.is_cuda else target_key.device
    storages = {pool.untyped_storage().data_ptr() for pool in (source_key, source_value)} - {0}
    for name, pool in pools.items():
        on_host = device.type != "cpu" and pool.device.type == "cpu"
        if on_host and pool.numel() and not pool.is_pinned():
            raise refuse(name, f"lie in pinned memory to be swapped with {device}", "pageable")
        if name.startswith("target") and pool.untyped_storage().data_ptr() in storages:
            raise refuse(name, "lie in other memory than the source", "a view of the same")
    source = _host_ids("source_block_ids", source_block_ids, source_key.shape[0])
    target = _host_ids("target_block_ids", target_block_ids, target_key.shape[0])
    _check_paired(source, target)
    _check_unique(target)
    backend = _resolve("torch" if backend == "auto" else backend, device)
    torch.ops.chunkattn.swap_blocks(
        source_key, source_value, target_key, target_value, source, target, backend
    )


def blend_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    source_block_ids: torch.Tensor,
    target_block_ids: torch.Tensor,
    weight: float,
    backend: str = "auto",
) -> None:
    """Move blocks towards others: ``target = (1 - weight) * target + weight * source``, in place.

    The exponential moving average of a sink that follows the rollout. Computed in float32 and
    rounded once. Weight 0 changes nothing and weight 1 copies, bit for bit.

    Args:
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``, float32, float16 or
            bfloat16; may be a strided view. Changed in place in the target blocks, nowhere else.
        value_pool: as ``key_pool``.
        source_block_ids: ``(num_ids,)`` int32 or int64 on the pools' device. An id may repeat.
        target_block_ids: as ``source_block_ids``; no id may repeat or be a source.
        weight: of the source, from 0 to 1.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written. Ids are
            looked at when they are on the CPU, or with ``CHUNKATTN_DEBUG=1``.
    """
    _check_pools(key_pool, value_pool, POOL_DTYPES)
    backend = _resolve(backend, key_pool.device)
    _check_number("weight", weight)
    if not 0 <= weight <= 1:
        raise refuse("weight", "be between 0 and 1", weight)
    source, target = _device_pairs(key_pool, source_block_ids, target_block_ids)
    torch.ops.chunkattn.blend_blocks(key_pool, value_pool, source, target, float(weight), backend)


def clear_blocks(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_ids: torch.Tensor,
    value: float = 0.0,
    backend: str = "auto",
) -> None:
    """Set every element of these blocks to one value, in place.

    Args:
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``, float32, float16, bfloat16
            or float8_e4m3fn; may be a strided view. Changed in place in these blocks, nowhere else.
        value_pool: as ``key_pool``.
        block_ids: ``(num_ids,)`` int32 or int64 on the pools' device.
        value: any number, NaN and infinities too; converted to the pool's dtype by torch's rules.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written. Ids are
            looked at when they are on the CPU, or with ``CHUNKATTN_DEBUG=1``.
    """
    _check_pools(key_pool, value_pool, _DTYPES)
    backend = _resolve(backend, key_pool.device)
    _check_number("value", value)
    ids = _device_ids("block_ids", block_ids, key_pool)
    torch.ops.chunkattn.clear_blocks(key_pool, value_pool, ids, float(value), backend)


# -- checks ----------------------------------------------------------------------------------------
def _check_pools(
    key_pool: Any,
    value_pool: Any,
    dtypes: tuple[torch.dtype, ...],
    key_name: str = "key_pool",
    value_name: str = "value_pool",
) -> None:
    check_tensor(key_name, key_pool, (4,), dtypes)
    check_tensor(value_name, value_pool, (4,), (key_pool.dtype,))
    check_shape(value_name, value_pool, tuple(key_pool.shape), f"that of `{key_name}`")
    if value_pool.device != key_pool.device:
        raise refuse(value_name, f"be on {key_pool.device} as `{key_name}`", value_pool.device)
    check_writable(**{key_name: key_pool, value_name: value_pool})


def _resolve(backend: str, device: torch.device) -> str:
    if backend not in BLOCK_BACKENDS:
        raise refuse("backend", f"be one of {', '.join(BLOCK_BACKENDS)}", repr(backend))
    # Blocks are moved whatever the size of their heads.
    return resolve_backend(backend, device, head_size=1)


def _device_ids(name: str, block_ids: Any, key_pool: torch.Tensor) -> torch.Tensor:
    """Checked ids, dense as the kernels read them."""
    check_tensor(name, block_ids, (1,), INDEX_DTYPES)
    check_device(key_pool.device, **{name: block_ids})
    if values_visible(key_pool.device):
        _check_inside(name, block_ids, key_pool.shape[0])
    dense: torch.Tensor = block_ids.contiguous()
    return dense


def _host_ids(name: str, block_ids: Any, num_blocks: int) -> torch.Tensor:
    if isinstance(block_ids, Sequence):
        if not all(isinstance(block, numbers.Integral) for block in block_ids):
            raise TypeError(f"`{name}` must hold ints, got {block_ids}")
        block_ids = torch.tensor(block_ids, dtype=torch.int64)
    check_tensor(name, block_ids, (1,), INDEX_DTYPES)
    if block_ids.device.type != "cpu":
        raise refuse(name, "be on the CPU, which issues the copies", block_ids.device)
    _check_inside(name, block_ids, num_blocks)
    dense: torch.Tensor = block_ids.contiguous()
    return dense


def _device_pairs(
    key_pool: torch.Tensor, source_block_ids: Any, target_block_ids: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    source = _device_ids("source_block_ids", source_block_ids, key_pool)
    target = _device_ids("target_block_ids", target_block_ids, key_pool)
    _check_paired(source, target)
    if values_visible(key_pool.device):
        _check_unique(target)
        if torch.isin(target, source).any():
            raise refuse("target_block_ids", "name no source block", target.tolist())
    return source, target


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {type(number).__name__}")


def _check_paired(source: torch.Tensor, target: torch.Tensor) -> None:
    check_shape("target_block_ids", target, tuple(source.shape), "one target a source")


def _check_unique(target: torch.Tensor) -> None:
    if target.unique().numel() != target.numel():
        raise refuse("target_block_ids", "name each block at most once", target.tolist())


def _check_inside(name: str, block_ids: torch.Tensor, num_blocks: int) -> None:
    if ((block_ids < 0) | (block_ids >= num_blocks)).any():
        raise refuse(name, f"name blocks from 0 to {num_blocks - 1}", block_ids.tolist())
