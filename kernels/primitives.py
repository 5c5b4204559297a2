"""Device helpers shared by the attention kernels: one online-softmax step, and attention over a run
of rows.

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
    if MASKED:
        # No visible key so far: subtract 0 instead of -inf, so that -inf - -inf never happens.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        base = new_max
    p = tl.math.exp2(scores * scale_log2 - base[:, None])
    alpha = tl.math.exp2(row_max - base)
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
