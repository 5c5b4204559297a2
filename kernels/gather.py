"""Attention that looks every row's block up: for small blocks, where a tile of keys spans many.

Layouts and meaning as in `walk`. One program serves one tile of query rows and one K/V head, and
runs full tiles of ``BLOCK_N`` visible rows without a mask, one masked tile, then the current rows.
With blocks of one slot the table is a list of slots.
"""

import torch
import triton
import triton.language as tl

from .arguments import AttentionArguments
from .launch import arch_of, launch_arguments
from .loops import attend_rows
from .primitives import (
    block_factors,
    load_query,
    row_ptr,
    rows_of,
    softmax_step,
    store_tile,
    tile_of_program,
    tile_rows,
)
from .tuning import gather_tiles

_MAX_INT32 = 2**31 - 1


@triton.jit
def _attend_positions(
    query,
    acc,
    row_max,
    row_sum,
    key_ptr,  # of the pools, head already chosen
    value_ptr,
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
    scale_log2,
    position,  # [N] visible rows of the sequence
    mask_n,  # [N], read only when MASKED
    offs_d,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Look some rows up and fold them into the running state."""
    # Rows of a tile lie in blocks of their own, with factors of their own.
    PER_KEY: tl.constexpr = key_scale_ptr is not None or block_bias_ptr is not None
    entry = (position // BLOCK_SIZE).to(tl.int64)
    block = tl.load(table_ptr + entry * stride_table.entry)
    slot = position % BLOCK_SIZE
    if WIDE:
        block = block.to(tl.int64)
        slot = slot.to(tl.int64)
    else:
        block = block.to(tl.int32)
    key_offset = block * stride_key.block
    value_offset = block * stride_value.block
    if BLOCK_SIZE > 1:
        key_offset += slot * stride_key.slot
        value_offset += slot * stride_value.slot
    key_row = key_ptr + key_offset[:, None] + offs_d[None, :]
    value_row = value_ptr + value_offset[:, None] + offs_d[None, :]
    # [N, BLOCK_D]
    if MASKED or BLOCK_D != HEAD_SIZE:
        mask = (offs_d < HEAD_SIZE)[None, :]
        if MASKED:
            mask = mask_n[:, None] & mask
        key = tl.load(key_row, mask=mask, other=0.0)
        value = tl.load(value_row, mask=mask, other=0.0)
    else:
        key = tl.load(key_row)
        value = tl.load(value_row)
    scale_log2, bias, value_scale = block_factors(
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
    if key_scale_ptr is not None:
        scale_log2 = scale_log2[None, :]
    if block_bias_ptr is not None:
        bias = bias[None, :]
    if value_scale_ptr is not None:
        value = (value.to(tl.float32) * value_scale[:, None]).to(query.dtype)
    return softmax_step(
        query,
        key.T,
        value,
        acc,
        row_max,
        row_sum,
        scale_log2,
        bias,
        1.0,
        mask_n,
        MASKED,
        PER_KEY,
        False,
        PRECISION,
    )


@triton.jit
def _gather_kernel(
    query_ptr,
    key_pool_ptr,
    value_pool_ptr,
    block_table_ptr,
    segment_blocks_ptr,
    key_current_ptr,
    value_current_ptr,
    key_extra_ptr,
    value_extra_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_bias_ptr,
    out_ptr,
    lse_ptr,
    batch,
    stride_query,
    stride_key,
    stride_value,
    stride_table,
    stride_key_current,
    stride_value_current,
    stride_key_extra,
    stride_value_extra,
    stride_key_scale,
    stride_value_scale,
    stride_bias,
    stride_out,
    stride_lse,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_SEQ: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend one tile of ``BLOCK_M`` query rows over one sequence's rows and current rows.

    Layout: `arguments`. Work and bytes of a launch: as `walk`'s, without the padding of blocks,
    plus one table entry (4 bytes) a visible key for every tile of query rows.
    """
    seq, tile = tile_of_program(batch, QUERIES_PER_KV, BLOCK_M, ONE_SEQ)
    kv_head = tl.program_id(1)
    token, head, mask_m, has_rows = tile_rows(
        batch.query_start_loc_ptr, seq, kv_head, tile, QUERIES_PER_KV, BLOCK_M
    )
    if not has_rows:
        return
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    seq_len = tl.load(batch.seq_lens_ptr + seq).to(tl.int32)
    table_ptr = block_table_ptr + tl.cast(seq, tl.int64) * stride_table.seq
    key_head_ptr = key_pool_ptr + kv_head.to(tl.int64) * stride_key.head
    value_head_ptr = value_pool_ptr + kv_head.to(tl.int64) * stride_value.head

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    query = load_query(query_ptr, stride_query, 0, token, head, mask_m, offs_d, HEAD_SIZE)
    stop = 0
    for segment in tl.range(0, NUM_SEGMENTS):
        start = stop
        stop = seq_len
        if NUM_SEGMENTS > 1:
            query = load_query(
                query_ptr, stride_query, segment, token, head, mask_m, offs_d, HEAD_SIZE
            )
            if segment < NUM_SEGMENTS - 1:
                entries = tl.load(segment_blocks_ptr + seq * (NUM_SEGMENTS - 1) + segment)
                # Any large number means all that is left: clamped before it is multiplied.
                entries = tl.minimum(entries, (seq_len - start) // BLOCK_SIZE)
                stop = start + entries.to(tl.int32) * BLOCK_SIZE
        # A product and no difference, or the compiler does not see that tiles start at multiples.
        rest = start + ((stop - start).to(tl.int64) // BLOCK_N * BLOCK_N).to(tl.int32)
        for first in tl.range(start, rest, BLOCK_N):
            acc, row_max, row_sum = _attend_positions(
                query,
                acc,
                row_max,
                row_sum,
                key_head_ptr,
                value_head_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_bias_ptr,
                table_ptr,
                kv_head,
                stride_key,
                stride_value,
                stride_table,
                stride_key_scale,
                stride_value_scale,
                stride_bias,
                scale_log2,
                first + offs_n,
                None,
                offs_d,
                BLOCK_SIZE,
                BLOCK_D,
                HEAD_SIZE,
                PRECISION,
                WIDE,
                False,
            )
        if rest < stop:
            # A row that is not there looks the last one up: nothing past the table is read.
            acc, row_max, row_sum = _attend_positions(
                query,
                acc,
                row_max,
                row_sum,
                key_head_ptr,
                value_head_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_bias_ptr,
                table_ptr,
                kv_head,
                stride_key,
                stride_value,
                stride_table,
                stride_key_scale,
                stride_value_scale,
                stride_bias,
                scale_log2,
                tl.minimum(rest + offs_n, stop - 1),
                rest + offs_n < stop,
                offs_d,
                BLOCK_SIZE,
                BLOCK_D,
                HEAD_SIZE,
                PRECISION,
                WIDE,
                True,
            )
    if key_current_ptr is not None:
        first_row = tl.load(batch.current_start_loc_ptr + seq)
        acc, row_max, row_sum = attend_rows(
            query,
            acc,
            row_max,
            row_sum,
            row_ptr(key_current_ptr, stride_key_current, first_row, kv_head),
            row_ptr(value_current_ptr, stride_value_current, first_row, kv_head),
            stride_key_current.token,
            stride_value_current.token,
            0,
            rows_of(batch.current_start_loc_ptr, seq),
            scale_log2,
            0.0,
            offs_d,
            REST_N,
            HEAD_SIZE,
            False,
            PRECISION,
        )
        if key_extra_ptr is not None:
            acc, row_max, row_sum = attend_rows(
                query,
                acc,
                row_max,
                row_sum,
                row_ptr(key_extra_ptr, stride_key_extra, 0, kv_head),
                row_ptr(value_extra_ptr, stride_value_extra, 0, kv_head),
                stride_key_extra.token,
                stride_value_extra.token,
                0,
                batch.num_extra,
                scale_log2,
                0.0,
                offs_d,
                REST_N,
                HEAD_SIZE,
                False,
                PRECISION,
            )
    token, head, mask_m, _ = tile_rows(
        batch.query_start_loc_ptr, seq, kv_head, tile, QUERIES_PER_KV, BLOCK_M
    )
    store_tile(
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
        HEAD_SIZE,
    )


def gather(inputs: AttentionArguments) -> None:
    """Launch the gather. Writes ``out`` and, where given, ``lse``. Arguments are taken as checked.

    The pools are addressed with 32 bits where their last element allows it.
    """
    if inputs.num_rows == 0:
        return
    query, key_pool, value_pool = inputs[:3]
    arch, head_size = arch_of(query.device), query.shape[-1]
    tiles = gather_tiles(arch, head_size, query.element_size(), inputs.num_rows)
    grid, arguments, constants = launch_arguments(inputs, tiles)
    _gather_kernel[grid](
        *arguments,
        **constants,
        BLOCK_N=tiles.block_n,
        WIDE=max(_last_offset(key_pool), _last_offset(value_pool)) > _MAX_INT32,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )


def _last_offset(pool: torch.Tensor) -> int:
    """Offset of a pool's last element."""
    return sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
