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

Attention is not causal, so the order of the keys is free. One program serves one tile of query rows
(the query heads of one K/V head packed into it) and one K/V head, and runs:

1. the full tiles of every whole block, without any mask;
2. the ragged last tile of every whole block, with a tile size of its own;
3. the rows of the last, partly filled block, then the current rows.

The bounds are read from ``seq_lens`` on the device: a launch does not change as the window moves.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import NUM_POINTERS, arch_of, launch_arguments
from .primitives import (
    attend_current,
    attend_rows,
    sequence_of_tile,
    softmax_step,
    store_tile,
    strides,
    tile_rows,
)
from .tuning import walk_tiles


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
    key_desc,  # blocks of the pools as [1, BLOCK_N, BLOCK_D] and [1, TAIL_N, BLOCK_D], or None
    value_desc,
    key_tail_desc,
    value_tail_desc,
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
    REST_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_SEQ: tl.constexpr,
    HAS_CURRENT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_DESC: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """Attend one tile of ``BLOCK_M`` query rows over one sequence's blocks and current rows.

    Layout: as the module says; K/V blocks also as descriptors of ``(num_blocks, block_size,
    num_kv_heads * head_size)``, read in boxes of one block, one tile of rows and one head.
    Work of a launch: 4 * head_size multiply-adds' flops a (query row, head, visible key), plus what
    ``TAIL_N`` pads each whole block's last tile with (`tuning.padding_waste`).
    Bytes of a launch: every tile of query rows reads the K and V of its head once,
    2 * head_size * visible keys * element size; ``query`` is read and ``out`` written once.
    """
    TILES_PER_BLOCK: tl.constexpr = BLOCK_SIZE // BLOCK_N
    TAIL_ROWS: tl.constexpr = BLOCK_SIZE % BLOCK_N
    TAIL_START: tl.constexpr = TILES_PER_BLOCK * BLOCK_N

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
    num_whole_blocks = seq_len // BLOCK_SIZE
    table_ptr = block_table_ptr + tl.cast(seq, tl.int64) * stride_table_seq
    column = kv_head * HEAD_SIZE  # of a descriptor's last dimension
    key_head_ptr = key_pool_ptr + kv_head.to(tl.int64) * stride_key_head
    value_head_ptr = value_pool_ptr + kv_head.to(tl.int64) * stride_value_head

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    if TILES_PER_BLOCK > 0:
        if not HAS_DESC:
            # Offsets inside a tile do not change from tile to tile: computed once, in 64 bits.
            rows = offs_n.to(tl.int64)
            key_offset = rows[None, :] * stride_key_slot + offs_d[:, None]
            value_offset = rows[:, None] * stride_value_slot + offs_d[None, :]
        entry = 0
        tile = 0
        for i in tl.range(0, num_whole_blocks * TILES_PER_BLOCK):
            if not COUNT_TILES:
                entry = i // TILES_PER_BLOCK
                tile = i % TILES_PER_BLOCK
            block = tl.load(table_ptr + tl.cast(entry, tl.int64) * stride_table_block)
            # Keys as [BLOCK_D, BLOCK_N], values as [BLOCK_N, BLOCK_D]
            if HAS_DESC:
                block = block.to(tl.int32)
                slot = tile * BLOCK_N
                key = key_desc.load([block, slot, column]).reshape(BLOCK_N, BLOCK_D)
                value = value_desc.load([block, slot, column]).reshape(BLOCK_N, BLOCK_D)
                key = key.T
            else:
                block = block.to(tl.uint32).to(tl.int64)
                slot = tl.cast(tile, tl.uint32).to(tl.int64) * BLOCK_N
                key_first = block * stride_key_block + slot * stride_key_slot
                value_first = block * stride_value_block + slot * stride_value_slot
                key_ptr = key_head_ptr + key_first + key_offset
                value_ptr = value_head_ptr + value_first + value_offset
                if BLOCK_D == HEAD_SIZE:
                    key = tl.load(key_ptr)
                    value = tl.load(value_ptr)
                else:
                    key = tl.load(key_ptr, mask=mask_d[:, None], other=0.0)
                    value = tl.load(value_ptr, mask=mask_d[None, :], other=0.0)
            acc, row_max, row_sum = softmax_step(
                query, key, value, acc, row_max, row_sum, scale_log2, None, False, PRECISION
            )
            if COUNT_TILES:
                tile += 1
                if tile == TILES_PER_BLOCK:
                    tile = 0
                    entry += 1

    if TAIL_ROWS > 0:
        offs_t = tl.arange(0, TAIL_N)
        mask_t = offs_t < TAIL_ROWS
        if not HAS_DESC:
            rows = (TAIL_START + offs_t).to(tl.int64)
            key_tail_ptr = key_head_ptr + rows[None, :] * stride_key_slot + offs_d[:, None]
            value_tail_ptr = value_head_ptr + rows[:, None] * stride_value_slot + offs_d[None, :]
        for entry in tl.range(0, num_whole_blocks, disallow_acc_multi_buffer=True):
            block = tl.load(table_ptr + tl.cast(entry, tl.int64) * stride_table_block)
            # Keys as [BLOCK_D, TAIL_N], values as [TAIL_N, BLOCK_D]
            if HAS_DESC:
                # Rows past the block are outside the descriptor's second dimension: zeros.
                block = block.to(tl.int32)
                first = [block, TAIL_START, column]
                key = key_tail_desc.load(first).reshape(TAIL_N, BLOCK_D)
                value = value_tail_desc.load(first).reshape(TAIL_N, BLOCK_D)
                key = key.T
            else:
                block = block.to(tl.int64)
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
        REST_N,
        HEAD_SIZE,
        PRECISION,
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


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 at their import)."""
    return not isinstance(_walk_kernel, triton.JITFunction)


def descriptors_fit(key_pool: torch.Tensor, value_pool: torch.Tensor) -> bool:
    """Whether tensor descriptors (TMA) can read the pools: 16 bits, heads side by side, aligned.

    Only asked on sm_90 and newer; below, Triton turns a descriptor into slow pointers.
    """
    return all(_descriptor_fits(pool) for pool in (key_pool, value_pool))


def _descriptor_fits(pool: torch.Tensor) -> bool:
    # The rules of cuTensorMapEncodeTiled: no empty dimension, 16-byte base and strides, and each
    # stride a multiple of the one inside it.
    num_blocks, _, num_kv_heads, head_size = pool.shape
    stride_block, stride_slot, stride_head, _ = pool.stride()
    return (
        pool.element_size() == 2
        and head_size in (16, 32, 64, 128)
        and num_blocks > 0
        and pool.data_ptr() % 16 == 0
        and (stride_head == head_size or num_kv_heads == 1)
        and stride_slot >= num_kv_heads * head_size
        and stride_slot % 8 == 0
        and stride_block > 0
        and stride_block % stride_slot == 0
    )


def _descriptor(pool: torch.Tensor, rows: int) -> TensorDescriptor:
    num_blocks, block_size, num_kv_heads, head_size = pool.shape
    shape, steps = [num_blocks, block_size, num_kv_heads * head_size], [*strides(pool, 2), 1]
    return TensorDescriptor(pool, shape, steps, [1, rows, head_size])


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
    descriptors: bool | None = None,
) -> None:
    """Launch the walk. Writes ``out`` and, where given, ``lse``. Arguments are taken as checked.

    Args:
        descriptors: read the pools by tensor descriptors; None: on sm_90 and newer, where they fit.
    """
    arch = arch_of(query.device)
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_pool.shape
    num_rows = num_tokens * (num_heads // num_kv_heads)
    if num_rows == 0:
        return
    tiles = walk_tiles(arch, head_size, key_pool.element_size(), block_size, num_rows)
    if descriptors is None:
        descriptors = arch >= 90 and descriptors_fit(key_pool, value_pool)
    full = tail = (None, None)
    if descriptors:
        full = tuple(_descriptor(pool, tiles.block_n) for pool in (key_pool, value_pool))
        tail = tuple(_descriptor(pool, tiles.tail_n) for pool in (key_pool, value_pool))
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
    pointers, scalars = arguments[:NUM_POINTERS], arguments[NUM_POINTERS:]
    _walk_kernel[grid](
        *pointers,
        *full,
        *tail,
        *scalars,
        **constants,
        BLOCK_SIZE=block_size,
        BLOCK_N=tiles.block_n,
        TAIL_N=tiles.tail_n,
        REST_N=tiles.rest_n,
        HAS_DESC=descriptors,
        # Always cheaper beside 64-bit addresses on sm_90.
        COUNT_TILES=tiles.count_tiles or (arch >= 90 and not descriptors),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
