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

import torch
import triton
import triton.language as tl


def strides(tensor: torch.Tensor | None, num_dims: int) -> tuple[int, ...]:
    """The first ``num_dims`` strides, zeros for an argument that is not there."""
    return (0,) * num_dims if tensor is None else tensor.stride()[:num_dims]


LOG2E = 1.4426950408889634
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
    mask_n,  # [N], read only when MASKED
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of keys into the running state. ``value`` must be zero wherever ``mask_n`` is
    false.
    """
    scores = tl.dot(query, key, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(mask_n[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # Every tile holds a visible key, so new_max is finite and -inf - -inf never happens.
    p = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    alpha = tl.math.exp2(row_max - new_max)
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=PRECISION)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    return acc, new_max, row_sum


@triton.jit
def attend_rows(
    query,
    acc,
    row_max,
    row_sum,
    key_ptr,  # first row of the run, head already chosen
    value_ptr,
    stride_key_row,
    stride_value_row,
    num_rows,
    scale_log2,
    offs_d,
    BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold ``num_rows`` consecutive rows into the running state, in masked tiles of ``BLOCK_N``."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = offs_d < HEAD_SIZE
    for start in tl.range(0, num_rows, BLOCK_N):
        rows = (start + offs_n).to(tl.int64)
        mask_n = rows < num_rows
        # [BLOCK_D, BLOCK_N]
        key = tl.load(
            key_ptr + rows[None, :] * stride_key_row + offs_d[:, None],
            mask=mask_n[None, :] & mask_d[:, None],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_D]
        value = tl.load(
            value_ptr + rows[:, None] * stride_value_row + offs_d[None, :],
            mask=mask_n[:, None] & mask_d[None, :],
            other=0.0,
        )
        acc, row_max, row_sum = softmax_step(
            query, key, value, acc, row_max, row_sum, scale_log2, mask_n, True, PRECISION
        )
    return acc, row_max, row_sum


@triton.jit
def attend_current(
    query,
    acc,
    row_max,
    row_sum,
    key_current_ptr,
    value_current_ptr,
    current_start_loc_ptr,
    seq,
    kv_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    scale_log2,
    offs_d,
    BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold a sequence's current rows into the running state."""
    start = tl.load(current_start_loc_ptr + seq).to(tl.int64)
    end = tl.load(current_start_loc_ptr + seq + 1).to(tl.int64)
    kv_head = kv_head.to(tl.int64)
    return attend_rows(
        query,
        acc,
        row_max,
        row_sum,
        key_current_ptr + start * stride_key_token + kv_head * stride_key_head,
        value_current_ptr + start * stride_value_token + kv_head * stride_value_head,
        stride_key_token,
        stride_value_token,
        (end - start).to(tl.int32),
        scale_log2,
        offs_d,
        BLOCK_N,
        HEAD_SIZE,
        PRECISION,
    )


@triton.jit
def sequence_of_tile(
    query_start_loc_ptr,
    num_seqs,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_SEQ: tl.constexpr,
):
    """Index of the sequence that owns this program's query tile, by bisection.

    Sequence ``s`` is given the tiles from ``first_row_of(s) // BLOCK_M + s`` on, so the grid needs
    no look at the device: ``num_rows // BLOCK_M + num_seqs`` tiles always suffice.
    """
    low = 0
    if not ONE_SEQ:
        tile = tl.program_id(0)
        high = num_seqs - 1
        while low < high:
            middle = (low + high + 1) // 2
            start = tl.load(query_start_loc_ptr + middle).to(tl.int32) * QUERIES_PER_KV
            if start // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle - 1
    return low


@triton.jit
def tile_rows(
    query_start_loc_ptr, seq, kv_head, QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Token and query head (int64) of each row of this program's tile, which rows there are, any.

    Called before the loops over the keys and again after them. The volatile reads stop the compiler
    from keeping the first call's rows in registers instead, which the loops need.
    """
    query_start = tl.load(query_start_loc_ptr + seq, volatile=True).to(tl.int32)
    query_end = tl.load(query_start_loc_ptr + seq + 1, volatile=True).to(tl.int32)
    num_rows = (query_end - query_start) * QUERIES_PER_KV
    first_tile = query_start * QUERIES_PER_KV // BLOCK_M + seq
    first_row = (tl.program_id(0) - first_tile) * BLOCK_M
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
    out_offset,  # [BLOCK_M] of each row's first element
    lse_offset,  # [BLOCK_M]
    mask_m,
    offs_d,
    HEAD_SIZE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Divide and write a tile's result. A row with no key has row_sum 0: out 0, lse -inf."""
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / safe_sum[:, None]
    tl.store(
        out_ptr + out_offset[:, None] + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :],
    )
    if HAS_LSE:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(safe_sum)) * LN2)
        tl.store(lse_ptr + lse_offset, lse, mask=mask_m)
