"""Attention that walks a block table: no gather, any block size, no host plan.

Layouts (strides are in elements; the last one is 1):

    query, out               (num_tokens, num_heads, head_size)
    key_pool, value_pool     (num_blocks, block_size, num_kv_heads, head_size)
    block_table              (num_seqs, max_blocks)
    seq_lens                 (num_seqs,)     visible rows of each sequence in the pool
    query_start_loc          (num_seqs + 1,)
    key_current, value_current  (num_current, num_kv_heads, head_size), visible after the paged rows
    current_start_loc        (num_seqs + 1,)
    lse                      (num_tokens, num_heads) float32, natural log

Attention is not causal, so the order of the keys is free. One program serves one (query tile, head)
and runs:

1. the full tiles of every whole block, without any mask;
2. the ragged last tile of every whole block, with a tile size of its own;
3. the rows of the last, partly filled block, then the current rows.
"""

import functools

import torch
import triton
import triton.language as tl

from .primitives import LN2, LOG2E, attend_rows, softmax_step, strides
from .tuning import next_power_of_2, walk_tiles

# Stands for 0: every key weighs the same, and a masked score stays -inf (-inf * 0 would be NaN).
_SMALLEST_SCALE = 1e-30


@triton.jit
def _sequence_of_tile(query_start_loc_ptr, num_seqs, tile, BLOCK_M: tl.constexpr):
    """Index of the sequence that owns query tile ``tile``, by bisection.

    Sequence ``s`` is given the tiles from ``query_start_loc[s] // BLOCK_M + s`` on, so the grid
    needs no look at the device: ``num_tokens // BLOCK_M + num_seqs`` tiles always suffice.
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // BLOCK_M + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _walk_kernel(
    query_ptr,
    key_pool_ptr,
    value_pool_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    key_current_ptr,
    value_current_ptr,
    current_start_loc_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_seqs,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_table_seq,
    stride_table_block,
    stride_key_current_token,
    stride_key_current_head,
    stride_value_current_token,
    stride_value_current_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_SEQ: tl.constexpr,
    HAS_CURRENT: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // BLOCK_N
    TAIL_ROWS: tl.constexpr = BLOCK_SIZE % BLOCK_N

    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // QUERIES_PER_KV
    if ONE_SEQ:
        seq = 0
    else:
        seq = _sequence_of_tile(query_start_loc_ptr, num_seqs, tile, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_row = (tile - (query_start // BLOCK_M + seq)) * BLOCK_M
    if first_row >= query_len:
        return

    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < query_len
    mask_d = offs_d < HEAD_SIZE
    rows_m = (query_start + offs_m).to(tl.int64)
    # [BLOCK_M, BLOCK_D]
    query = tl.load(
        query_ptr
        + rows_m[:, None] * stride_query_token
        + head * stride_query_head
        + offs_d[None, :],
        mask=mask_m[:, None] & mask_d[None, :],
        other=0.0,
    )

    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    num_whole_blocks = seq_len // BLOCK_SIZE
    table_ptr = block_table_ptr + tl.cast(seq, tl.int64) * stride_table_seq
    key_head_ptr = key_pool_ptr + kv_head * stride_key_head
    value_head_ptr = value_pool_ptr + kv_head * stride_value_head
    # Offsets inside a tile do not change from tile to tile: computed once, in 64 bits.
    key_tile_ptr = key_head_ptr + offs_n.to(tl.int64)[None, :] * stride_key_slot + offs_d[:, None]
    value_tile_ptr = (
        value_head_ptr + offs_n.to(tl.int64)[:, None] * stride_value_slot + offs_d[None, :]
    )

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    if TILES_PER_BLOCK > 0:
        for i in tl.range(0, num_whole_blocks * TILES_PER_BLOCK):
            entry = tl.cast(i // TILES_PER_BLOCK, tl.int64)
            block = tl.load(table_ptr + entry * stride_table_block).to(tl.int64)
            slot = tl.cast(i % TILES_PER_BLOCK, tl.int64) * BLOCK_N
            key_base = block * stride_key_block + slot * stride_key_slot
            value_base = block * stride_value_block + slot * stride_value_slot
            if BLOCK_D == HEAD_SIZE:
                key = tl.load(key_tile_ptr + key_base)
                value = tl.load(value_tile_ptr + value_base)
            else:
                key = tl.load(key_tile_ptr + key_base, mask=mask_d[:, None], other=0.0)
                value = tl.load(value_tile_ptr + value_base, mask=mask_d[None, :], other=0.0)
            acc, row_max, row_sum = softmax_step(
                query,
                key,
                value,
                acc,
                row_max,
                row_sum,
                scale_log2,
                offs_n < BLOCK_N,
                False,
                PRECISION,
            )

    if TAIL_ROWS > 0:
        offs_t = tl.arange(0, TAIL_N)
        mask_t = offs_t < TAIL_ROWS
        slots = (TILES_PER_BLOCK * BLOCK_N + offs_t).to(tl.int64)
        key_tail_ptr = key_head_ptr + slots[None, :] * stride_key_slot + offs_d[:, None]
        value_tail_ptr = value_head_ptr + slots[:, None] * stride_value_slot + offs_d[None, :]
        for b in tl.range(0, num_whole_blocks):
            entry = tl.cast(b, tl.int64)
            block = tl.load(table_ptr + entry * stride_table_block).to(tl.int64)
            key = tl.load(
                key_tail_ptr + block * stride_key_block,
                mask=mask_t[None, :] & mask_d[:, None],
                other=0.0,
            )
            value = tl.load(
                value_tail_ptr + block * stride_value_block,
                mask=mask_t[:, None] & mask_d[None, :],
                other=0.0,
            )
            acc, row_max, row_sum = softmax_step(
                query, key, value, acc, row_max, row_sum, scale_log2, mask_t, True, PRECISION
            )

    num_last_rows = seq_len - num_whole_blocks * BLOCK_SIZE
    # Past the table's end when the last block is full: then nothing may be read there.
    last_block = tl.load(
        table_ptr + tl.cast(num_whole_blocks, tl.int64) * stride_table_block,
        mask=num_last_rows > 0,
        other=0,
    ).to(tl.int64)
    acc, row_max, row_sum = attend_rows(
        query,
        acc,
        row_max,
        row_sum,
        key_head_ptr + last_block * stride_key_block,
        value_head_ptr + last_block * stride_value_block,
        stride_key_slot,
        stride_value_slot,
        num_last_rows,
        scale_log2,
        offs_d,
        BLOCK_N,
        HEAD_SIZE,
        PRECISION,
    )
    if HAS_CURRENT:
        current_start = tl.load(current_start_loc_ptr + seq).to(tl.int64)
        current_end = tl.load(current_start_loc_ptr + seq + 1).to(tl.int64)
        acc, row_max, row_sum = attend_rows(
            query,
            acc,
            row_max,
            row_sum,
            key_current_ptr
            + current_start * stride_key_current_token
            + kv_head * stride_key_current_head,
            value_current_ptr
            + current_start * stride_value_current_token
            + kv_head * stride_value_current_head,
            stride_key_current_token,
            stride_value_current_token,
            (current_end - current_start).to(tl.int32),
            scale_log2,
            offs_d,
            BLOCK_N,
            HEAD_SIZE,
            PRECISION,
        )

    # A row with no key has row_sum 0: out 0, lse -inf.
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / safe_sum[:, None]
    tl.store(
        out_ptr + rows_m[:, None] * stride_out_token + head * stride_out_head + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & mask_d[None, :],
    )
    if HAS_LSE:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.math.log2(safe_sum)) * LN2)
        tl.store(lse_ptr + rows_m * stride_lse_token + head * stride_lse_head, lse, mask=mask_m)


@functools.cache
def _arch(device: torch.device) -> int:
    """Compute capability as one number; 0 where the kernel is interpreted, and on an AMD GPU."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 at their import)."""
    return not isinstance(_walk_kernel, triton.JITFunction)


def walk(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_current: torch.Tensor | None,
    value_current: torch.Tensor | None,
    current_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
) -> None:
    """Launch the walk. Writes ``out`` and, where given, ``lse``. Arguments are taken as checked."""
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_pool.shape
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0:
        return
    tiles = walk_tiles(
        _arch(query.device), head_size, key_pool.element_size(), block_size, num_tokens
    )
    if num_seqs == 1:
        num_tiles = triton.cdiv(num_tokens, tiles.block_m)
    else:
        num_tiles = num_tokens // tiles.block_m + num_seqs
    _walk_kernel[(num_tiles, num_heads)](
        query,
        key_pool,
        value_pool,
        block_table,
        seq_lens,
        query_start_loc,
        key_current,
        value_current,
        current_start_loc,
        out,
        lse,
        max(softmax_scale, _SMALLEST_SCALE) * LOG2E,
        num_seqs,
        *strides(query, 2),
        *strides(key_pool, 3),
        *strides(value_pool, 3),
        *strides(block_table, 2),
        *strides(key_current, 2),
        *strides(value_current, 2),
        *strides(out, 2),
        *strides(lse, 2),
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        QUERIES_PER_KV=num_heads // num_kv_heads,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, next_power_of_2(head_size)),
        TAIL_N=tiles.tail_n,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ONE_SEQ=num_seqs == 1,
        HAS_CURRENT=key_current is not None,
        HAS_LSE=lse is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
