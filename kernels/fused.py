"""Normalise and rotate Q and K, then write K and V into their slots of the pool and Q beside it:
one launch a layer.

Layouts: `arguments`. One program does one token: it reads each row once, keeps it in registers
between the sum of squares and the rest, and writes it once. A launch moves twice the bytes of Q, K
and V. Rows are rounded to their own dtype wherever the modules that this replaces round them: after
the norm, after its weight, after the rotation.
"""

import triton
import triton.language as tl

from .arguments import (
    FusedArguments,
    SumStrides,
    block_strides,
    row_strides,
    scale_strides,
    strides,
)
from .scales import as_stored
from .tuning import fused_tile, next_power_of_2


@triton.jit
def _rms_norm(
    x,  # [BLOCK_H, BLOCK_D]
    weight_ptr,
    sum_squares_ptr,
    sum_offset,
    norm_size,
    eps,
    offs_w,  # [BLOCK_H, BLOCK_D] of the weight
    mask,
):
    """``x * rsqrt(mean(x^2) + eps)`` in the dtype of ``x``, times the weight. Returns float32."""
    weight = tl.load(weight_ptr + offs_w, mask=mask, other=0.0)
    x_fp32 = x.to(tl.float32)
    if sum_squares_ptr is not None:
        sum_squares = tl.load(sum_squares_ptr + sum_offset)
    else:
        sum_squares = tl.sum(x_fp32 * x_fp32)
    normed = (x_fp32 * tl.rsqrt(sum_squares / norm_size + eps)).to(x.dtype)
    out = normed.to(tl.float32) * weight.to(tl.float32)
    if weight.dtype == x.dtype:  # two different dtypes give float32, as in torch
        out = out.to(x.dtype).to(tl.float32)
    return out


@triton.jit
def _rotate(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Turn the pairs ``(2i, 2i + 1)`` of float32 ``x``; all heads have the same angles."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    pairs = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(pairs, (BLOCK_H, BLOCK_D))


@triton.jit
def _fused_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    sum_squares_ptr,
    query_out_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slot_mapping_ptr,
    key_scale_ptr,
    value_scale_ptr,
    eps,
    tp_size,
    stride_query,
    stride_key,
    stride_value,
    stride_cos,
    stride_sin,
    stride_sum_squares,
    stride_query_out,
    stride_key_pool,
    stride_value_pool,
    stride_slot_mapping,
    stride_key_scale,
    stride_value_scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATE_KEY: tl.constexpr,
):
    """Do one token: norm and rotation of Q and K, Q out, K and V into the token's slot.

    Layout: `arguments`. Work of a launch: about 10 operations an element of Q and K. Bytes: Q, K
    and V are read once and written once, cos and sin once a token.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * stride_slot_mapping).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    head = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    kv_head = tl.arange(0, BLOCK_KV_H)[:, None].to(tl.int64)
    # [BLOCK_H, BLOCK_D]
    mask = (head < NUM_HEADS) & (offs_d < HEAD_SIZE)
    kv_mask = (kv_head < NUM_KV_HEADS) & (offs_d < HEAD_SIZE)
    query = tl.load(
        query_ptr + token * stride_query.token + head * stride_query.head + offs_d,
        mask=mask,
        other=0.0,
    )
    key = tl.load(
        key_ptr + token * stride_key.token + kv_head * stride_key.head + offs_d,
        mask=kv_mask,
        other=0.0,
    )
    value = tl.load(
        value_ptr + token * stride_value.token + kv_head * stride_value.head + offs_d,
        mask=kv_mask,
        other=0.0,
    )
    sum_offset = token * stride_sum_squares.token
    if query_weight_ptr is not None:
        query = _rms_norm(
            query,
            query_weight_ptr,
            sum_squares_ptr,
            sum_offset,
            tp_size * NUM_HEADS * HEAD_SIZE,
            eps,
            head * HEAD_SIZE + offs_d,
            mask,
        )
    if key_weight_ptr is not None:
        key = _rms_norm(
            key,
            key_weight_ptr,
            sum_squares_ptr,
            sum_offset + stride_sum_squares.which,
            tp_size * NUM_KV_HEADS * HEAD_SIZE,
            eps,
            kv_head * HEAD_SIZE + offs_d,
            kv_mask,
        )
    if cos_ptr is not None:
        # [BLOCK_D // 2]
        offs_p = tl.arange(0, BLOCK_D // 2)
        mask_p = offs_p < HEAD_SIZE // 2
        cos = tl.load(cos_ptr + token * stride_cos + offs_p, mask=mask_p, other=0.0)
        sin = tl.load(sin_ptr + token * stride_sin + offs_p, mask=mask_p, other=0.0)
        query = _rotate(query.to(tl.float32), cos, sin, BLOCK_H, BLOCK_D)
        if ROTATE_KEY:
            key = _rotate(key.to(tl.float32), cos, sin, BLOCK_KV_H, BLOCK_D)
    tl.store(
        query_out_ptr + token * stride_query_out.token + head * stride_query_out.head + offs_d,
        query.to(query_ptr.dtype.element_ty),
        mask=mask,
    )
    if slot >= 0:
        key_slot = block * stride_key_pool.block + offset * stride_key_pool.slot
        value_slot = block * stride_value_pool.block + offset * stride_value_pool.slot
        key_scale = block * stride_key_scale.block + kv_head * stride_key_scale.head
        value_scale = block * stride_value_scale.block + kv_head * stride_value_scale.head
        key_rows = key.to(key_ptr.dtype.element_ty)
        head_mask = kv_head < NUM_KV_HEADS  # [BLOCK_KV_H, 1]
        tl.store(
            key_pool_ptr + key_slot + kv_head * stride_key_pool.head + offs_d,
            as_stored(key_rows, key_scale_ptr, key_scale, head_mask, key_pool_ptr),
            mask=kv_mask,
        )
        tl.store(
            value_pool_ptr + value_slot + kv_head * stride_value_pool.head + offs_d,
            as_stored(value, value_scale_ptr, value_scale, head_mask, value_pool_ptr),
            mask=kv_mask,
        )


def fused(rows: FusedArguments) -> None:
    """Launch the kernel. Writes `query_out` and the pools. Arguments are taken as checked."""
    num_tokens, num_heads, head_size = rows.query.shape
    if num_tokens == 0:
        return
    num_kv_heads = rows.key.shape[1]
    block_h, block_d, num_warps = fused_tile(num_heads, head_size)
    _fused_kernel[(num_tokens,)](
        rows.query,
        rows.key,
        rows.value,
        rows.query_weight,
        rows.key_weight,
        rows.cos,
        rows.sin,
        rows.sum_squares,
        rows.query_out,
        rows.key_pool,
        rows.value_pool,
        rows.slot_mapping,
        rows.key_scale,
        rows.value_scale,
        rows.eps,
        rows.tp_size,
        row_strides(rows.query),
        row_strides(rows.key),
        row_strides(rows.value),
        *strides(rows.cos, 1),
        *strides(rows.sin, 1),
        SumStrides(*strides(rows.sum_squares, 2)),
        row_strides(rows.query_out),
        block_strides(rows.key_pool),
        block_strides(rows.value_pool),
        rows.slot_mapping.stride(0),
        scale_strides(rows.key_scale),
        scale_strides(rows.value_scale),
        BLOCK_SIZE=rows.key_pool.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_H=block_h,
        BLOCK_KV_H=next_power_of_2(num_kv_heads),
        BLOCK_D=block_d,
        ROTATE_KEY=rows.rotate_key,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
