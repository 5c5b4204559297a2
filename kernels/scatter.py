"""Write K and V rows into their slots of the pool: one launch for both, and for the extra rows of a
forward.

Layouts (strides are in elements; the last one is 1):

    key, value               (num_tokens, num_kv_heads, head_size)
    key_extra, value_extra   (num_extra, num_kv_heads, head_size), written after the others (action
    rows) key_pool, value_pool     (num_blocks, block_size, num_kv_heads, head_size) slot_mapping
    (num_tokens + num_extra,); slot = block * block_size + offset, below 0 means skip

A pure copy is bit-exact; fp32 rows into a 16-bit pool are rounded to nearest even.
"""

import torch
import triton
import triton.language as tl

from .primitives import strides
from .tuning import scatter_tile


@triton.jit
def _scatter_kernel(
    key_ptr,
    value_ptr,
    key_extra_ptr,
    value_extra_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slot_mapping_ptr,
    num_tokens,
    num_extra,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_extra_token,
    stride_key_extra_head,
    stride_value_extra_token,
    stride_value_extra_head,
    stride_key_block,
    stride_key_slot,
    stride_key_pool_head,
    stride_value_block,
    stride_value_slot,
    stride_value_pool_head,
    stride_slot_mapping,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = offs_c // HEAD_SIZE
    dim = offs_c % HEAD_SIZE
    mask_t = offs_t < num_tokens + num_extra
    slot = tl.load(slot_mapping_ptr + offs_t * stride_slot_mapping, mask=mask_t, other=-1).to(
        tl.int64
    )
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    mask_c = offs_c < NUM_KV_HEADS * HEAD_SIZE
    # [BLOCK_T, BLOCK_C]
    mask = ((slot >= 0) & mask_t)[:, None] & mask_c[None, :]
    is_token = (offs_t < num_tokens)[:, None]
    key = tl.load(
        key_ptr
        + offs_t[:, None] * stride_key_token
        + head[None, :] * stride_key_head
        + dim[None, :],
        mask=mask & is_token,
        other=0.0,
    )
    value = tl.load(
        value_ptr
        + offs_t[:, None] * stride_value_token
        + head[None, :] * stride_value_head
        + dim[None, :],
        mask=mask & is_token,
        other=0.0,
    )
    if HAS_EXTRA:
        extra = (offs_t - num_tokens)[:, None]
        key_extra = tl.load(
            key_extra_ptr
            + extra * stride_key_extra_token
            + head[None, :] * stride_key_extra_head
            + dim[None, :],
            mask=mask & (extra >= 0),
            other=0.0,
        )
        value_extra = tl.load(
            value_extra_ptr
            + extra * stride_value_extra_token
            + head[None, :] * stride_value_extra_head
            + dim[None, :],
            mask=mask & (extra >= 0),
            other=0.0,
        )
        key = tl.where(is_token, key, key_extra)
        value = tl.where(is_token, value, value_extra)
    key_slot = block * stride_key_block + offset * stride_key_slot
    value_slot = block * stride_value_block + offset * stride_value_slot
    tl.store(
        key_pool_ptr + key_slot[:, None] + head[None, :] * stride_key_pool_head + dim[None, :],
        key.to(key_pool_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        value_pool_ptr
        + value_slot[:, None]
        + head[None, :] * stride_value_pool_head
        + dim[None, :],
        value.to(value_pool_ptr.dtype.element_ty),
        mask=mask,
    )


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    key_extra: torch.Tensor | None,
    value_extra: torch.Tensor | None,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch the scatter. Writes the pools in place. Arguments are taken as checked."""
    num_tokens, num_kv_heads, head_size = key.shape
    num_extra = key_extra.shape[0] if key_extra is not None else 0
    if num_tokens + num_extra == 0:
        return
    columns = num_kv_heads * head_size
    block_t, block_c = scatter_tile(columns)
    _scatter_kernel[(triton.cdiv(num_tokens + num_extra, block_t), triton.cdiv(columns, block_c))](
        key,
        value,
        key_extra,
        value_extra,
        key_pool,
        value_pool,
        slot_mapping,
        num_tokens,
        num_extra,
        *strides(key, 2),
        *strides(value, 2),
        *strides(key_extra, 2),
        *strides(value_extra, 2),
        *strides(key_pool, 3),
        *strides(value_pool, 3),
        *strides(slot_mapping, 1),
        BLOCK_SIZE=key_pool.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        HAS_EXTRA=num_extra > 0,
        num_warps=4,
        enable_fp_fusion=True,
    )
