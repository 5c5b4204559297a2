"""Normalise and rotate Q and K, then write K and V into their slots of the pool and Q beside it:
one launch a layer.

Layouts (strides are in elements; the last one is 1):

    query, query_out         (num_tokens, num_heads, head_size)
    key, value               (num_tokens, num_kv_heads, head_size)
    query_weight, key_weight (heads * head_size,) of an RMSNorm over all heads of a token
    cos, sin                 (num_tokens, head_size // 2) float32, of pairs (2i, 2i + 1)
    sum_squares              (num_tokens, 2) float32 of Q and K, where other ranks hold more heads
    key_pool, value_pool     (num_blocks, block_size, num_kv_heads, head_size)
    slot_mapping             (num_tokens,); slot = block * block_size + offset, below 0 means skip
    key_scales, value_scales (num_blocks, num_kv_heads) float32, of fp8 pools

One program does one token: it reads each row once, keeps it in registers between the sum of squares
and the rest, and writes it once. A launch moves twice the bytes of Q, K and V. Rows are rounded to
their own dtype wherever the modules that this replaces round them: after the norm, after its
weight, after the rotation.
"""

import torch
import triton
import triton.language as tl

from .arguments import strides
from .scales import to_e4m3
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
    HAS_SUM_SQUARES: tl.constexpr,
):
    """``x * rsqrt(mean(x^2) + eps)`` in the dtype of ``x``, times the weight. Returns float32."""
    weight = tl.load(weight_ptr + offs_w, mask=mask, other=0.0)
    x_fp32 = x.to(tl.float32)
    if HAS_SUM_SQUARES:
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
def _to_pool(
    x,  # [BLOCK_H, BLOCK_D]
    dtype: tl.constexpr,
    scale,
    scales_ptr,
    offs_s,  # [BLOCK_H, 1]
    mask_s,
    HAS_SCALES: tl.constexpr,
):
    """``x`` in the dtype of a pool; e4m3 is scaled and saturated, and NaN stays NaN."""
    if dtype == tl.float8e4nv:
        if HAS_SCALES:
            scale = tl.load(scales_ptr + offs_s, mask=mask_s, other=1.0)
            scale = tl.broadcast_to(scale, x.shape)
        else:
            scale = tl.full(x.shape, 1.0, tl.float32) * scale
        return to_e4m3(x, scale)
    return x.to(dtype)


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
    key_scales_ptr,
    value_scales_ptr,
    eps,
    tp_size,
    key_scale,
    value_scale,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cos_token,
    stride_sin_token,
    stride_sum_squares_token,
    stride_sum_squares_which,
    stride_query_out_token,
    stride_query_out_head,
    stride_key_block,
    stride_key_slot,
    stride_key_pool_head,
    stride_value_block,
    stride_value_slot,
    stride_value_pool_head,
    stride_slot_mapping,
    stride_key_scales_block,
    stride_key_scales_head,
    stride_value_scales_block,
    stride_value_scales_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    HAS_SUM_SQUARES: tl.constexpr,
    ROTATE_QUERY: tl.constexpr,
    ROTATE_KEY: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr,
    HAS_VALUE_SCALES: tl.constexpr,
):
    """Do one token: norm and rotation of Q and K, Q out, K and V into the token's slot.

    Layout: as the module says. Work of a launch: about 10 operations an element of Q and K. Bytes:
    Q, K and V are read once and written once, cos and sin once a token.
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
        query_ptr + token * stride_query_token + head * stride_query_head + offs_d,
        mask=mask,
        other=0.0,
    )
    key = tl.load(
        key_ptr + token * stride_key_token + kv_head * stride_key_head + offs_d,
        mask=kv_mask,
        other=0.0,
    )
    value = tl.load(
        value_ptr + token * stride_value_token + kv_head * stride_value_head + offs_d,
        mask=kv_mask,
        other=0.0,
    )
    sum_offset = token * stride_sum_squares_token
    if HAS_QUERY_NORM:
        query = _rms_norm(
            query,
            query_weight_ptr,
            sum_squares_ptr,
            sum_offset,
            tp_size * NUM_HEADS * HEAD_SIZE,
            eps,
            head * HEAD_SIZE + offs_d,
            mask,
            HAS_SUM_SQUARES,
        )
    if HAS_KEY_NORM:
        key = _rms_norm(
            key,
            key_weight_ptr,
            sum_squares_ptr,
            sum_offset + stride_sum_squares_which,
            tp_size * NUM_KV_HEADS * HEAD_SIZE,
            eps,
            kv_head * HEAD_SIZE + offs_d,
            kv_mask,
            HAS_SUM_SQUARES,
        )
    if ROTATE_QUERY:
        # [BLOCK_D // 2]
        offs_p = tl.arange(0, BLOCK_D // 2)
        mask_p = offs_p < HEAD_SIZE // 2
        cos = tl.load(cos_ptr + token * stride_cos_token + offs_p, mask=mask_p, other=0.0)
        sin = tl.load(sin_ptr + token * stride_sin_token + offs_p, mask=mask_p, other=0.0)
        query = _rotate(query.to(tl.float32), cos, sin, BLOCK_H, BLOCK_D)
        if ROTATE_KEY:
            key = _rotate(key.to(tl.float32), cos, sin, BLOCK_KV_H, BLOCK_D)
    tl.store(
        query_out_ptr + token * stride_query_out_token + head * stride_query_out_head + offs_d,
        query.to(query_ptr.dtype.element_ty),
        mask=mask,
    )
    if slot >= 0:
        mask_scale = kv_head < NUM_KV_HEADS  # [BLOCK_KV_H, 1]
        tl.store(
            key_pool_ptr
            + block * stride_key_block
            + offset * stride_key_slot
            + kv_head * stride_key_pool_head
            + offs_d,
            _to_pool(
                key.to(key_ptr.dtype.element_ty),
                key_pool_ptr.dtype.element_ty,
                key_scale,
                key_scales_ptr,
                block * stride_key_scales_block + kv_head * stride_key_scales_head,
                mask_scale,
                HAS_KEY_SCALES,
            ),
            mask=kv_mask,
        )
        tl.store(
            value_pool_ptr
            + block * stride_value_block
            + offset * stride_value_slot
            + kv_head * stride_value_pool_head
            + offs_d,
            _to_pool(
                value,
                value_pool_ptr.dtype.element_ty,
                value_scale,
                value_scales_ptr,
                block * stride_value_scales_block + kv_head * stride_value_scales_head,
                mask_scale,
                HAS_VALUE_SCALES,
            ),
            mask=kv_mask,
        )


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    sum_squares: torch.Tensor | None,
    query_out: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    eps: float,
    tp_size: int,
    key_scale: float,
    value_scale: float,
    rotate_key: bool,
) -> None:
    """Launch the kernel. Writes `query_out` and the pools. Arguments are taken as checked."""
    num_tokens, num_heads, head_size = query.shape
    if num_tokens == 0:
        return
    num_kv_heads = key.shape[1]
    block_h, block_d, num_warps = fused_tile(num_heads, head_size)
    _fused_kernel[(num_tokens,)](
        query,
        key,
        value,
        query_weight,
        key_weight,
        cos,
        sin,
        sum_squares,
        query_out,
        key_pool,
        value_pool,
        slot_mapping,
        key_scales,
        value_scales,
        eps,
        tp_size,
        key_scale,
        value_scale,
        *strides(query, 2),
        *strides(key, 2),
        *strides(value, 2),
        *strides(cos, 1),
        *strides(sin, 1),
        *strides(sum_squares, 2),
        *strides(query_out, 2),
        *strides(key_pool, 3),
        *strides(value_pool, 3),
        *strides(slot_mapping, 1),
        *strides(key_scales, 2),
        *strides(value_scales, 2),
        BLOCK_SIZE=key_pool.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_H=block_h,
        BLOCK_KV_H=next_power_of_2(num_kv_heads),
        BLOCK_D=block_d,
        HAS_QUERY_NORM=query_weight is not None,
        HAS_KEY_NORM=key_weight is not None,
        HAS_SUM_SQUARES=sum_squares is not None,
        ROTATE_QUERY=cos is not None,
        ROTATE_KEY=cos is not None and rotate_key,
        HAS_KEY_SCALES=key_scales is not None,
        HAS_VALUE_SCALES=value_scales is not None,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )
