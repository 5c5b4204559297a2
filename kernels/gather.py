"""Attention that looks every row's block up: for small blocks, where a tile of keys spans many.

Layouts and meaning as in `walk`. One program serves one tile of query rows and one K/V head, and
runs full tiles of ``BLOCK_N`` visible rows without a mask, one masked tile, then the current rows.
With blocks of one slot the table is a list of slots.
"""

import torch
import triton
import triton.language as tl

from .launch import arch_of, launch_arguments
from .primitives import attend_current, sequence_of_tile, softmax_step, store_tile, tile_rows
from .tuning import gather_tiles

_MAX_INT32 = 2**31 - 1


@triton.jit
def _row_offsets(
    table_ptr,
    stride_table_block,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    position,  # [N] visible rows of the sequence
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Offsets of rows in the K and in the V pool, in 64 bits where the pool needs them."""
    entry = (position // BLOCK_SIZE).to(tl.int64)
    block = tl.load(table_ptr + entry * stride_table_block)
    slot = position % BLOCK_SIZE
    if WIDE:
        block = block.to(tl.int64)
        slot = slot.to(tl.int64)
    else:
        block = block.to(tl.int32)
    if BLOCK_SIZE == 1:
        return block * stride_key_block, block * stride_value_block
    key = block * stride_key_block + slot * stride_key_slot
    return key, block * stride_value_block + slot * stride_value_slot


@triton.jit
def _gather_kernel(
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
    REST_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_SEQ: tl.constexpr,
    HAS_CURRENT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend one tile of ``BLOCK_M`` query rows over one sequence's rows and current rows.

    Layout: as `walk` says. Work and bytes of a launch: as `walk`'s, without the padding of blocks,
    plus one table entry (4 bytes) a visible key for every tile of query rows.
    """
    seq = sequence_of_tile(query_start_loc_ptr, num_seqs, QUERIES_PER_KV, BLOCK_M, ONE_SEQ)
    kv_head = tl.program_id(1)
    token, head, mask_m, has_rows = tile_rows(
        query_start_loc_ptr, seq, kv_head, QUERIES_PER_KV, BLOCK_M
    )
    if not has_rows:
        return
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_SIZE
    # [BLOCK_M, BLOCK_D]
    query = tl.load(
        query_ptr
        + (token * stride_query_token + head * stride_query_head)[:, None]
        + offs_d[None, :],
        mask=mask_m[:, None] & mask_d[None, :],
        other=0.0,
    )

    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    table_ptr = block_table_ptr + tl.cast(seq, tl.int64) * stride_table_seq
    key_head_ptr = key_pool_ptr + kv_head.to(tl.int64) * stride_key_head
    value_head_ptr = value_pool_ptr + kv_head.to(tl.int64) * stride_value_head

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # A product and no difference, or the compiler does not see that tiles start at multiples.
    num_full = (seq_len.to(tl.int64) // BLOCK_N * BLOCK_N).to(tl.int32)
    for start in tl.range(0, num_full, BLOCK_N):
        key_offset, value_offset = _row_offsets(
            table_ptr,
            stride_table_block,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            start + offs_n,
            BLOCK_SIZE,
            WIDE,
        )
        # [BLOCK_N, BLOCK_D]
        if BLOCK_D == HEAD_SIZE:
            key = tl.load(key_head_ptr + key_offset[:, None] + offs_d[None, :])
            value = tl.load(value_head_ptr + value_offset[:, None] + offs_d[None, :])
        else:
            key = tl.load(
                key_head_ptr + key_offset[:, None] + offs_d[None, :],
                mask=mask_d[None, :],
                other=0.0,
            )
            value = tl.load(
                value_head_ptr + value_offset[:, None] + offs_d[None, :],
                mask=mask_d[None, :],
                other=0.0,
            )
        acc, row_max, row_sum = softmax_step(
            query, key.T, value, acc, row_max, row_sum, scale_log2, None, False, PRECISION
        )
    if num_full < seq_len:
        mask_n = num_full + offs_n < seq_len
        # A row that is not there looks the last one up, so that nothing past the table is read.
        key_offset, value_offset = _row_offsets(
            table_ptr,
            stride_table_block,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            tl.minimum(num_full + offs_n, seq_len - 1),
            BLOCK_SIZE,
            WIDE,
        )
        mask = mask_n[:, None] & mask_d[None, :]
        key = tl.load(key_head_ptr + key_offset[:, None] + offs_d[None, :], mask=mask, other=0.0)
        value = tl.load(
            value_head_ptr + value_offset[:, None] + offs_d[None, :], mask=mask, other=0.0
        )
        acc, row_max, row_sum = softmax_step(
            query, key.T, value, acc, row_max, row_sum, scale_log2, mask_n, True, PRECISION
        )
    if HAS_CURRENT:
        acc, row_max, row_sum = attend_current(
            query,
            acc,
            row_max,
            row_sum,
            key_current_ptr,
            value_current_ptr,
            current_start_loc_ptr,
            seq,
            kv_head,
            stride_key_current_token,
            stride_key_current_head,
            stride_value_current_token,
            stride_value_current_head,
            scale_log2,
            offs_d,
            REST_N,
            HEAD_SIZE,
            PRECISION,
        )
    token, head, mask_m, _ = tile_rows(query_start_loc_ptr, seq, kv_head, QUERIES_PER_KV, BLOCK_M)
    store_tile(
        out_ptr,
        lse_ptr,
        acc,
        row_max,
        row_sum,
        token * stride_out_token + head * stride_out_head,
        token * stride_lse_token + head * stride_lse_head,
        mask_m,
        offs_d,
        HEAD_SIZE,
        HAS_LSE,
    )


def gather(
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
    """Launch the gather. Writes ``out`` and, where given, ``lse``. Arguments are taken as checked.

    The pools are addressed with 32 bits where their last element allows it.
    """
    num_tokens, num_heads, head_size = query.shape
    num_rows = num_tokens * (num_heads // key_pool.shape[2])
    if num_rows == 0:
        return
    tiles = gather_tiles(arch_of(query.device), head_size, key_pool.element_size(), num_rows)
    grid, arguments, constants = launch_arguments(
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
        softmax_scale,
        tiles.block_m,
    )
    _gather_kernel[grid](
        *arguments,
        **constants,
        BLOCK_SIZE=key_pool.shape[1],
        BLOCK_N=tiles.block_n,
        REST_N=tiles.rest_n,
        WIDE=max(_last_offset(key_pool), _last_offset(value_pool)) > _MAX_INT32,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )


def _last_offset(pool: torch.Tensor) -> int:
    """Offset of a pool's last element."""
    return sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
