"""Scales of fp8 blocks: the largest value a block and head can hold, over 448, the largest e4m3.

Layouts: `arguments`. The call that writes a block's first slot sets the block's scales, from the
rows that it writes there; a later call that adds rows keeps them, and what they cannot hold is
clamped. A chunk is written by one call, so its scales fit it.
"""

import triton
import triton.language as tl

from .arguments import ScatterArguments, entry_strides, row_strides
from .tuning import cdiv, padded_head_size

LARGEST_E4M3 = tl.constexpr(448.0)
# A scale may become a divisor: a block of zeros has this one.
SMALLEST_SCALE = tl.constexpr(2.0**-20)


@triton.jit
def to_e4m3(x, scale):
    """``x / scale`` in e4m3, as every writer stores it: clamped, rounded to nearest even; NaN stays
    NaN.
    """
    x = tl.math.div_rn(x.to(tl.float32), scale)
    # The cast does not saturate everywhere. Comparisons with NaN are false.
    x = tl.where(x > LARGEST_E4M3, LARGEST_E4M3, tl.where(x < -LARGEST_E4M3, -LARGEST_E4M3, x))
    return x.to(tl.float8e4nv)


@triton.jit
def as_stored(x, scale_ptr, offset, mask, pool_ptr):
    """Rows in the type of the pool; for fp8 divided by their scales, which lie at ``offset``."""
    if pool_ptr.dtype.element_ty == tl.float8e4nv:
        scale = tl.full(x.shape, 1.0, tl.float32)
        if scale_ptr is not None:
            scale = tl.broadcast_to(tl.load(scale_ptr + offset, mask=mask, other=1.0), x.shape)
        return to_e4m3(x, scale)
    return x.to(pool_ptr.dtype.element_ty)


@triton.jit
def _largest(ptr, stride, row, kv_head, mask, offs_d, HEAD_SIZE: tl.constexpr):
    """The largest finite size in some rows of a head, a scalar; NaN and infinities do not count."""
    offset = row * stride.token + kv_head * stride.head
    x = tl.load(
        ptr + offset[:, None] + offs_d[None, :],
        mask=mask[:, None] & (offs_d < HEAD_SIZE)[None, :],
        other=0.0,
    ).to(tl.float32)
    size = tl.abs(x)
    return tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)


@triton.jit
def _block_scales_kernel(
    key_ptr,
    value_ptr,
    key_extra_ptr,
    value_extra_ptr,
    slot_mapping_ptr,
    key_scale_ptr,
    value_scale_ptr,
    stride_key,
    stride_value,
    stride_key_extra,
    stride_value_extra,
    stride_slot_mapping,
    stride_key_scale,
    stride_value_scale,
    num_tokens,
    num_extra,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Set one head's scales of the blocks whose first slot is that of one of ``BLOCK_T`` rows.

    Work of a launch: one comparison an element. Bytes: K and V read once, and the slots once for
    each block and head.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    num_rows = num_tokens + num_extra
    for i in tl.range(0, BLOCK_T):
        opening = tl.program_id(0).to(tl.int64) * BLOCK_T + i
        first = tl.load(
            slot_mapping_ptr + opening * stride_slot_mapping, mask=opening < num_rows, other=-1
        ).to(tl.int64)
        if (first >= 0) & (first % BLOCK_SIZE == 0):
            key = tl.cast(0.0, tl.float32)
            value = tl.cast(0.0, tl.float32)
            for start in tl.range(0, num_rows, BLOCK_T):
                row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
                slot = tl.load(
                    slot_mapping_ptr + row * stride_slot_mapping, mask=row < num_rows, other=-1
                ).to(tl.int64)
                inside = (slot >= first) & (slot < first + BLOCK_SIZE)
                is_token = inside & (row < num_tokens)
                more = _largest(key_ptr, stride_key, row, kv_head, is_token, offs_d, HEAD_SIZE)
                key = tl.maximum(key, more)
                more = _largest(value_ptr, stride_value, row, kv_head, is_token, offs_d, HEAD_SIZE)
                value = tl.maximum(value, more)
                if key_extra_ptr is not None:
                    extra = row - num_tokens
                    is_extra = inside & (extra >= 0)
                    more = _largest(
                        key_extra_ptr, stride_key_extra, extra, kv_head, is_extra, offs_d, HEAD_SIZE
                    )
                    key = tl.maximum(key, more)
                    more = _largest(
                        value_extra_ptr,
                        stride_value_extra,
                        extra,
                        kv_head,
                        is_extra,
                        offs_d,
                        HEAD_SIZE,
                    )
                    value = tl.maximum(value, more)
            block = first // BLOCK_SIZE
            key_offset = block * stride_key_scale.block + kv_head * stride_key_scale.head
            value_offset = block * stride_value_scale.block + kv_head * stride_value_scale.head
            tl.store(key_scale_ptr + key_offset, tl.maximum(key / LARGEST_E4M3, SMALLEST_SCALE))
            tl.store(
                value_scale_ptr + value_offset, tl.maximum(value / LARGEST_E4M3, SMALLEST_SCALE)
            )


def set_block_scales(rows: ScatterArguments) -> None:
    """Launch. Writes ``key_scale`` and ``value_scale`` of the blocks whose first slot is mapped."""
    num_tokens, num_kv_heads, head_size = rows.key.shape
    num_rows, block_t = rows.slot_mapping.shape[0], 32
    _block_scales_kernel[(cdiv(num_rows, block_t), num_kv_heads)](
        rows.key,
        rows.value,
        rows.key_extra,
        rows.value_extra,
        rows.slot_mapping,
        rows.key_scale,
        rows.value_scale,
        *map(row_strides, (rows.key, rows.value, rows.key_extra, rows.value_extra)),
        rows.slot_mapping.stride(0),
        entry_strides(rows.key_scale),
        entry_strides(rows.value_scale),
        num_tokens,
        num_rows - num_tokens,
        BLOCK_SIZE=rows.key_pool.shape[1],
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_D=padded_head_size(head_size),
        num_warps=4,
        enable_fp_fusion=True,
    )
