"""Loops over keys, shared by the attention kernels: tiles of whole blocks, and consecutive rows.

Both fold what they read into the running state of one query tile (`primitives`). Strides are in
elements, addresses 64 bits wide.
"""

import triton
import triton.language as tl

from .primitives import block_factors, softmax_step, times


@triton.jit
def attend_blocks(
    query,
    acc,
    row_max,
    row_sum,
    acc_unit,
    key_ptr,  # of the pools, head already chosen
    value_ptr,
    key_desc,
    value_desc,
    key_scale_ptr,
    value_scale_ptr,
    block_bias_ptr,
    table_ptr,  # of the sequence
    kv_head,
    stride_key,
    stride_value,
    stride_table,
    stride_key_scale,
    stride_value_scale,
    stride_bias,
    first_tile,
    last_tile,
    scale_log2,
    offs_d,
    FIRST_ROW: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """Fold a range of tiles into the running state. Each whole block gives ``NUM_ROWS`` rows from
    ``FIRST_ROW`` on, as full tiles of ``BLOCK_N`` or as one that is not full.
    """
    TILES: tl.constexpr = (NUM_ROWS + BLOCK_N - 1) // BLOCK_N
    MASKED: tl.constexpr = NUM_ROWS % BLOCK_N > 0
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < NUM_ROWS
    mask_d = offs_d < HEAD_SIZE
    if key_desc is None:
        # Offsets inside a tile do not change from tile to tile: computed once, in 64 bits.
        rows = (FIRST_ROW + offs_n).to(tl.int64)
        key_offset = rows[None, :] * stride_key.slot + offs_d[:, None]
        value_offset = rows[:, None] * stride_value.slot + offs_d[None, :]
    entry = first_tile // TILES
    row = times(first_tile % TILES, BLOCK_N)  # of a tile, counted from FIRST_ROW
    # A second accumulator would cost the tail, which runs once a block, more than it hides.
    for i in tl.range(first_tile, last_tile, disallow_acc_multi_buffer=MASKED):
        if not COUNT_TILES:
            entry = i // TILES
            row = times(i % TILES, BLOCK_N)
        block = tl.load(table_ptr + tl.cast(entry, tl.int64) * stride_table.entry)
        # Keys as [BLOCK_D, BLOCK_N], values as [BLOCK_N, BLOCK_D]
        if key_desc is not None:
            # Rows past the block are outside the descriptor's second dimension: zeros.
            first = [block.to(tl.int32), FIRST_ROW + row, kv_head * HEAD_SIZE]
            key = key_desc.load(first).reshape(BLOCK_N, BLOCK_D).T
            value = value_desc.load(first).reshape(BLOCK_N, BLOCK_D)
        else:
            # Neither is negative, which saves the sign.
            block = block.to(tl.uint32).to(tl.int64)
            slot = tl.cast(row, tl.uint32).to(tl.int64)
            key_first = block * stride_key.block + slot * stride_key.slot
            value_first = block * stride_value.block + slot * stride_value.slot
            key_tile = key_ptr + key_first + key_offset
            value_tile = value_ptr + value_first + value_offset
            if MASKED or BLOCK_D != HEAD_SIZE:
                key = tl.load(key_tile, mask=mask_n[None, :] & mask_d[:, None], other=0.0)
                value = tl.load(value_tile, mask=mask_n[:, None] & mask_d[None, :], other=0.0)
            else:
                key = tl.load(key_tile)
                value = tl.load(value_tile)
        tile_scale, bias, new_unit = block_factors(
            key_scale_ptr,
            value_scale_ptr,
            block_bias_ptr,
            block,
            kv_head,
            stride_key_scale,
            stride_value_scale,
            stride_bias,
            scale_log2,
        )
        acc, row_max, row_sum = softmax_step(
            query,
            key,
            value,
            acc,
            row_max,
            row_sum,
            tile_scale,
            bias,
            acc_unit / new_unit,
            mask_n,
            MASKED,
            block_bias_ptr is not None,
            value_scale_ptr is not None,
            PRECISION,
        )
        acc_unit = new_unit
        if COUNT_TILES:
            row += BLOCK_N
            if row == TILES * BLOCK_N:
                row = 0
                entry += 1
    return acc, row_max, row_sum, acc_unit


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
    first_row,
    last_row,
    scale_log2,
    bias,  # base 2
    offs_d,
    BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold a range of consecutive rows into the running state, in masked tiles of ``BLOCK_N``."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = offs_d < HEAD_SIZE
    for start in tl.range(first_row, last_row, BLOCK_N):
        rows = (start + offs_n).to(tl.int64)
        mask_n = rows < last_row
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
            query,
            key,
            value,
            acc,
            row_max,
            row_sum,
            scale_log2,
            bias,
            1.0,
            mask_n,
            True,
            HAS_BIAS,
            False,
            PRECISION,
        )
    return acc, row_max, row_sum
