"""Write K and V rows into their slots of the pool: one launch for both, and for the extra rows of a
forward.

Layouts: `arguments`. A pure copy is bit-exact; fp32 rows into a 16-bit pool are rounded to nearest
even. Into an fp8 pool a row goes as ``clamp(row / scale, -448, 448)``, rounded to nearest even; NaN
stays NaN.
"""

import triton
import triton.language as tl

from .arguments import ScatterArguments, block_strides, row_strides, scale_strides
from .scales import as_stored, set_block_scales
from .tuning import cdiv, scatter_tile


@triton.jit
def _scatter_kernel(
    key_ptr,
    value_ptr,
    key_extra_ptr,
    value_extra_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slot_mapping_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_tokens,
    num_extra,
    stride_key,
    stride_value,
    stride_key_extra,
    stride_value_extra,
    stride_key_pool,
    stride_value_pool,
    stride_key_scale,
    stride_value_scale,
    stride_slot_mapping,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write ``BLOCK_T`` rows, ``BLOCK_C`` columns of all heads side by side.

    Layout: `arguments`. Work of a launch: none but the conversion. Bytes: K and V are read and
    written once, plus one slot (4 or 8 bytes) a row and tile of columns.
    """
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
    key_column = head * stride_key.head + dim
    value_column = head * stride_value.head + dim
    key = tl.load(
        key_ptr + offs_t[:, None] * stride_key.token + key_column[None, :],
        mask=mask & is_token,
        other=0.0,
    )
    value = tl.load(
        value_ptr + offs_t[:, None] * stride_value.token + value_column[None, :],
        mask=mask & is_token,
        other=0.0,
    )
    if key_extra_ptr is not None:
        extra = (offs_t - num_tokens)[:, None]
        key_column = head * stride_key_extra.head + dim
        value_column = head * stride_value_extra.head + dim
        key_extra = tl.load(
            key_extra_ptr + extra * stride_key_extra.token + key_column[None, :],
            mask=mask & (extra >= 0),
            other=0.0,
        )
        value_extra = tl.load(
            value_extra_ptr + extra * stride_value_extra.token + value_column[None, :],
            mask=mask & (extra >= 0),
            other=0.0,
        )
        key = tl.where(is_token, key, key_extra)
        value = tl.where(is_token, value, value_extra)
    key_slot = block * stride_key_pool.block + offset * stride_key_pool.slot
    value_slot = block * stride_value_pool.block + offset * stride_value_pool.slot
    key_column = head * stride_key_pool.head + dim
    value_column = head * stride_value_pool.head + dim
    key_scale = block[:, None] * stride_key_scale.block + head[None, :] * stride_key_scale.head
    value_scale = block[:, None] * stride_value_scale.block
    value_scale += head[None, :] * stride_value_scale.head
    tl.store(
        key_pool_ptr + key_slot[:, None] + key_column[None, :],
        as_stored(key, key_scale_ptr, key_scale, mask, key_pool_ptr),
        mask=mask,
    )
    tl.store(
        value_pool_ptr + value_slot[:, None] + value_column[None, :],
        as_stored(value, value_scale_ptr, value_scale, mask, value_pool_ptr),
        mask=mask,
    )


def scatter(rows: ScatterArguments) -> None:
    """Launch the scatter. Writes the pools, and scales of blocks, in place. Arguments are taken as
    checked.
    """
    num_tokens, num_kv_heads, head_size = rows.key.shape
    num_rows = rows.slot_mapping.shape[0]
    if num_rows == 0:
        return
    if rows.key_scale is not None and rows.key_scale.dim() == 2:
        set_block_scales(rows)
    columns = num_kv_heads * head_size
    block_t, block_c = scatter_tile(columns)
    _scatter_kernel[(cdiv(num_rows, block_t), cdiv(columns, block_c))](
        rows.key,
        rows.value,
        rows.key_extra,
        rows.value_extra,
        rows.key_pool,
        rows.value_pool,
        rows.slot_mapping,
        rows.key_scale,
        rows.value_scale,
        num_tokens,
        num_rows - num_tokens,
        *map(row_strides, (rows.key, rows.value, rows.key_extra, rows.value_extra)),
        block_strides(rows.key_pool),
        block_strides(rows.value_pool),
        scale_strides(rows.key_scale),
        scale_strides(rows.value_scale),
        rows.slot_mapping.stride(0),
        BLOCK_SIZE=rows.key_pool.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        enable_fp_fusion=True,
    )
