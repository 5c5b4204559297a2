"""Device helpers shared by the attention kernels: query tiles, one online-softmax step, the result.

The query heads of one K/V head are packed into the rows of a tile: row ``r`` of a sequence is
query head ``r % QUERIES_PER_KV`` of its token ``r // QUERIES_PER_KV``. One program serves one tile
and one K/V head.

Running state of one query tile, all float32:

    acc      [BLOCK_M, BLOCK_D]  sum of p * v, not yet divided by row_sum
    row_max  [BLOCK_M]           running maximum of the scores times ``scale_log2``
    row_sum  [BLOCK_M]           sum of p

Scores live in the base-2 domain: ``p = exp2(score * scale_log2 - row_max)`` with
``scale_log2 = softmax_scale * log2(e)``, which folds the scale into the exponent (one FMA an
element).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(
    query,  # [BLOCK_M, BLOCK_D]
    key,  # [BLOCK_D, N]
    value,  # [N, BLOCK_D]
    acc,
    row_max,
    row_sum,
    scale_log2,
    bias,  # base 2; it and the scale may be [1, N] if HAS_BIAS
    acc_scale,  # brings the old sum to the unit of ``value``
    mask_n,  # [N]
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ACC_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of keys into the running state. ``value`` must be zero wherever ``mask_n`` is
    false. fp8 keys and values are multiplied in the query's type, which holds them exactly.
    """
    scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(mask_n[None, :], scores, float("-inf"))
    # Every tile holds a visible key, so new_max is finite and -inf - -inf never happens.
    if not HAS_BIAS:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    else:
        scores = scores * scale_log2 + bias
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_max[:, None])
    alpha = tl.math.exp2(row_max - new_max)
    acc = acc * (alpha * acc_scale if HAS_ACC_SCALE else alpha)[:, None]
    acc = tl.dot(p.to(query.dtype), value.to(query.dtype), acc, input_precision=PRECISION)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    return acc, new_max, row_sum


@triton.jit
def load_query(
    query_ptr, stride_query, segment, token, head, mask_m, offs_d, HEAD_SIZE: tl.constexpr
):
    """The query rows of a tile for a segment of the keys, [BLOCK_M, BLOCK_D]."""
    offset = token * stride_query.token + head * stride_query.head
    return tl.load(
        query_ptr
        + tl.cast(segment, tl.int64) * stride_query.segment
        + offset[:, None]
        + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def times(count, n):
    """A product of counts, made in 64 bits: addresses are computed from it."""
    return (tl.cast(count, tl.int64) * n).to(tl.int32)


@triton.jit
def rows_of(start_loc_ptr, seq):
    """How many rows a sequence has."""
    return (tl.load(start_loc_ptr + seq + 1) - tl.load(start_loc_ptr + seq)).to(tl.int32)


@triton.jit
def row_ptr(ptr, stride, row, kv_head):
    """Where a row's head begins."""
    return ptr + tl.cast(row, tl.int64) * stride.token + kv_head.to(tl.int64) * stride.head


@triton.jit
def not_zero(scale):
    """A scale that may multiply -inf and divide: 0, of a block of zeros, is made very small."""
    return tl.where(scale == 0, 1e-18, scale)


@triton.jit
def block_factors(
    key_scale_ptr,
    value_scale_ptr,
    block_bias_ptr,
    block,  # one id, or one for each of some keys
    kv_head,
    stride_key_scale,
    stride_value_scale,
    stride_bias,
    scale_log2,
):
    """Scale of a block's scores, what is added to them (base 2), and scale of its V rows."""
    block = block.to(tl.int64)
    bias = 0.0
    value_scale = 1.0
    if key_scale_ptr is not None:
        offset = block * stride_key_scale.block + kv_head * stride_key_scale.head
        scale_log2 = not_zero(scale_log2 * tl.load(key_scale_ptr + offset))
    if block_bias_ptr is not None:
        offset = block * stride_bias.block + kv_head * stride_bias.head
        bias = tl.load(block_bias_ptr + offset) * LOG2E
    if value_scale_ptr is not None:
        offset = block * stride_value_scale.block + kv_head * stride_value_scale.head
        value_scale = not_zero(tl.load(value_scale_ptr + offset))
    return scale_log2, bias, value_scale


@triton.jit
def tile_of_program(
    batch, QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr, ONE_SEQ: tl.constexpr
):
    """Sequence that owns this program's query tile, by bisection, and the tile within it.

    Sequence ``s`` is given the tiles from ``first_row_of(s) // BLOCK_M + s`` on, so the grid needs
    no look at the device: ``num_rows // BLOCK_M + num_seqs`` tiles always suffice.
    """
    tile = tl.program_id(0)
    low = 0
    if not ONE_SEQ:
        high = batch.num_seqs - 1
        while low < high:
            middle = (low + high + 1) // 2
            start = tl.load(batch.query_start_loc_ptr + middle).to(tl.int32) * QUERIES_PER_KV
            if start // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle - 1
        start = tl.load(batch.query_start_loc_ptr + low).to(tl.int32) * QUERIES_PER_KV
        tile -= start // BLOCK_M + low
    return low, tile


@triton.jit
def tile_rows(
    query_start_loc_ptr, seq, kv_head, tile, QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Token and query head (int64) of each row of a sequence's tile, which rows there are, any.

    Called before the loops over the keys and again after them. The volatile reads stop the compiler
    from keeping the first call's rows in registers instead, which the loops need.
    """
    query_start = tl.load(query_start_loc_ptr + seq, volatile=True).to(tl.int32)
    query_end = tl.load(query_start_loc_ptr + seq + 1, volatile=True).to(tl.int32)
    num_rows = (query_end - query_start) * QUERIES_PER_KV
    first_row = tile * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    token = (query_start + offs_m // QUERIES_PER_KV).to(tl.int64)
    head = (kv_head * QUERIES_PER_KV + offs_m % QUERIES_PER_KV).to(tl.int64)
    return token, head, offs_m < num_rows, first_row < num_rows


@triton.jit
def store_tile(
    out_ptr,
    lse_ptr,
    acc,
    row_max,
    row_sum,
    stride_out,
    stride_lse,
    token,
    head,
    mask_m,
    offs_d,
    HEAD_SIZE: tl.constexpr,
):
    """Divide and write a tile's result. A row with no key has row_sum 0: out 0, lse -inf."""
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / safe_sum[:, None]
    offset = token * stride_out.token + head * stride_out.head
    tl.store(
        out_ptr + offset[:, None] + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :],
    )
    if lse_ptr is not None:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(safe_sum)) * LN2)
        tl.store(lse_ptr + token * stride_lse.token + head * stride_lse.head, lse, mask=mask_m)
