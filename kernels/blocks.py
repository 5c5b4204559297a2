"""Copy, blend and clear whole blocks: one launch for K and V of many blocks.

Layouts (strides are in elements; the last one is 1):

    pools        (num_blocks, block_size, num_kv_heads, head_size)
    block_ids    (num_ids,) int32 or int64, dense; the i-th source goes to the i-th target

A program serves one tile of ``BLOCK_T`` slots by ``BLOCK_C`` columns (all heads of a slot are one
row of columns) of one block, in K and in V.
"""

import torch
import triton
import triton.language as tl

from .arguments import block_strides
from .tuning import cdiv, scatter_tile


@triton.jit
def _tile(
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Slot, head and element (int64) of this program's tile in its block, and what of it exists."""
    slot = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    offs_c = tl.program_id(2).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask = (slot < BLOCK_SIZE) & (offs_c < NUM_KV_HEADS * HEAD_SIZE)
    return slot, offs_c // HEAD_SIZE, offs_c % HEAD_SIZE, mask


@triton.jit
def _copy_kernel(
    source_key_ptr,
    source_value_ptr,
    key_pool_ptr,
    value_pool_ptr,
    source_ids_ptr,
    target_ids_ptr,
    stride_source_key,
    stride_source_value,
    stride_key,
    stride_value,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Copy blocks of the source pools into blocks of the others, as integers: every bit survives.

    Layout: as the module says, the source pools with strides of their own. Work: none. Bytes: each
    block is read and written once in K and in V.
    """
    slot, head, dim, mask = _tile(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, BLOCK_T, BLOCK_C)
    source = tl.load(source_ids_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_ids_ptr + tl.program_id(0)).to(tl.int64)
    source_key = source * stride_source_key.block + slot * stride_source_key.slot
    source_value = source * stride_source_value.block + slot * stride_source_value.slot
    target_key = target * stride_key.block + slot * stride_key.slot
    target_value = target * stride_value.block + slot * stride_value.slot
    # [BLOCK_T, BLOCK_C]
    key = tl.load(
        source_key_ptr + source_key + head * stride_source_key.head + dim, mask=mask, other=0
    )
    value = tl.load(
        source_value_ptr + source_value + head * stride_source_value.head + dim, mask=mask, other=0
    )
    tl.store(key_pool_ptr + target_key + head * stride_key.head + dim, key, mask=mask)
    tl.store(value_pool_ptr + target_value + head * stride_value.head + dim, value, mask=mask)


@triton.jit
def _blend_kernel(
    key_pool_ptr,
    value_pool_ptr,
    source_ids_ptr,
    target_ids_ptr,
    keep,
    weight,
    stride_key,
    stride_value,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """``target = keep * target + weight * source`` in float32, rounded once to the pool's dtype.

    Layout: as the module says. Work: 3 operations an element. Bytes: in K and in V each source
    block is read, each target block is read and written.
    """
    slot, head, dim, mask = _tile(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, BLOCK_T, BLOCK_C)
    source = tl.load(source_ids_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_ids_ptr + tl.program_id(0)).to(tl.int64)
    # [BLOCK_T, BLOCK_C]
    key_ptrs = key_pool_ptr + slot * stride_key.slot + head * stride_key.head + dim
    value_ptrs = value_pool_ptr + slot * stride_value.slot + head * stride_value.head + dim
    new_key = tl.load(key_ptrs + source * stride_key.block, mask=mask, other=0.0)
    new_value = tl.load(value_ptrs + source * stride_value.block, mask=mask, other=0.0)
    key_ptrs += target * stride_key.block
    value_ptrs += target * stride_value.block
    old_key = tl.load(key_ptrs, mask=mask, other=0.0)
    old_value = tl.load(value_ptrs, mask=mask, other=0.0)
    key = keep * old_key.to(tl.float32) + weight * new_key.to(tl.float32)
    value = keep * old_value.to(tl.float32) + weight * new_value.to(tl.float32)
    tl.store(key_ptrs, key.to(key_pool_ptr.dtype.element_ty), mask=mask)
    tl.store(value_ptrs, value.to(value_pool_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bits"])
def _clear_kernel(
    key_pool_ptr,
    value_pool_ptr,
    block_ids_ptr,
    bits,
    stride_key,
    stride_value,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write one element's bits all over the blocks.

    Layout: as the module says. Work: none. Bytes: each block is written once in K and in V.
    """
    slot, head, dim, mask = _tile(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, BLOCK_T, BLOCK_C)
    block = tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)
    key = block * stride_key.block + slot * stride_key.slot + head * stride_key.head + dim
    value = block * stride_value.block + slot * stride_value.slot + head * stride_value.head + dim
    tl.store(key_pool_ptr + key, bits.to(key_pool_ptr.dtype.element_ty), mask=mask)
    tl.store(value_pool_ptr + value, bits.to(value_pool_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, pool: torch.Tensor, num_ids: int, *arguments: object) -> None:
    """Launch over every tile of ``num_ids`` blocks; ``pool`` gives the shape of a block."""
    _, block_size, num_kv_heads, head_size = pool.shape
    columns = num_kv_heads * head_size
    block_t, block_c = scatter_tile(columns)
    grid = (num_ids, cdiv(block_size, block_t), cdiv(columns, block_c))
    if num_ids == 0:
        return
    kernel[grid](
        *arguments,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        # Both products of a blend are rounded, as torch does: the backends agree to the bit.
        enable_fp_fusion=False,
    )


def copy(
    source_key: torch.Tensor,
    source_value: torch.Tensor,
    target_key: torch.Tensor,
    target_value: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
) -> None:
    """Launch the copy. The pools come as integers of their element size. Arguments are taken as
    checked.
    """
    pools = (source_key, source_value, target_key, target_value)
    steps = [block_strides(pool) for pool in pools]
    _launch(_copy_kernel, target_key, target_ids.shape[0], *pools, source_ids, target_ids, *steps)


def blend(
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    weight: float,
) -> None:
    """Launch the blend. Arguments are taken as checked, ``0 < weight < 1``."""
    _launch(
        _blend_kernel,
        key_pool,
        target_ids.shape[0],
        key_pool,
        value_pool,
        source_ids,
        target_ids,
        1 - weight,
        weight,
        block_strides(key_pool),
        block_strides(value_pool),
    )


def clear(
    key_pool: torch.Tensor, value_pool: torch.Tensor, block_ids: torch.Tensor, bits: int
) -> None:
    """Launch the clearing. The pools come as integers of their element size; ``bits`` is what each
    is set to. Arguments are taken as checked.
    """
    _launch(
        _clear_kernel,
        key_pool,
        block_ids.shape[0],
        key_pool,
        value_pool,
        block_ids,
        bits,
        block_strides(key_pool),
        block_strides(value_pool),
    )
