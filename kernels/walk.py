"""Attention that walks a block table: no gather, any block size, no host plan.

Layouts: `arguments`. Attention is not causal, so the order of the keys is free. A program takes one
tile of query rows (the query heads of one K/V head packed into it) and one K/V head, and runs:

1. the full tiles of every whole block, without any mask;
2. the ragged last tile of every whole block, with a tile size of its own;
3. the rows of the last, partly filled block, then the current and the extra rows.

Where the blocks are divided into segments, 1 and 2 run for each of them with a query of its own,
and 3 with the last one. The bounds are read from ``seq_lens`` on the device: a launch does not
change as the window moves. Where the tiles do not fill the GPU, a fixed number of programs divides
the tiles and the keys of the last of them evenly (`split`), and `merge` finishes those that several
programs saw.
"""

import triton
import triton.language as tl

from .arguments import AttentionArguments
from .launch import arch_of, block_descriptors, descriptors_fit, launch_arguments, multiprocessors
from .loops import attend_blocks, attend_rows
from .merge import merge, new_workspace, store_record
from .primitives import (
    block_factors,
    load_query,
    row_ptr,
    rows_of,
    store_tile,
    tile_of_program,
    tile_rows,
    times,
)
from .split import UNIT, items_between, locate_piece, share_of_program, split_sizes
from .tuning import split_programs, walk_tiles


@triton.jit
def _walk_kernel(
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
    key_desc,  # blocks of the pools as [1, BLOCK_N, BLOCK_D] and [1, TAIL_N, BLOCK_D], or None
    value_desc,
    key_tail_desc,
    value_tail_desc,
    workspace_ptr,  # of a split launch, else None
    num_programs,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_N: tl.constexpr,
    REST_N: tl.constexpr,
    SIZES: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_SEQ: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    COUNT_TILES: tl.constexpr,
):
    """Attend tiles of ``BLOCK_M`` query rows over their sequence's blocks and current rows.

    Layout: `arguments`; K/V blocks also as descriptors of ``(num_blocks, block_size,
    num_kv_heads * head_size)``, read in boxes of one block, one tile of rows and one head.
    Work of a launch: 4 * head_size multiply-adds' flops a (query row, head, visible key), plus what
    ``TAIL_N`` pads each whole block's last tile with (`tuning.padding_waste`).
    Bytes of a launch: every tile of query rows reads the K and V of its head once,
    2 * head_size * visible keys * element size; ``query`` is read and ``out`` written once. A split
    launch also writes at most two records a program (`merge`).
    """
    TAIL_ROWS: tl.constexpr = BLOCK_SIZE % BLOCK_N
    FULL_ROWS: tl.constexpr = BLOCK_SIZE - TAIL_ROWS
    TILES_PER_BLOCK: tl.constexpr = FULL_ROWS // BLOCK_N
    SPLIT: tl.constexpr = workspace_ptr is not None

    offs_d = tl.arange(0, BLOCK_D)
    num_pieces = 1
    if SPLIT:
        num_whole, first_unit, last_unit, first_tile, num_shared = share_of_program(
            num_programs, batch, SIZES
        )
        num_pieces = num_whole + num_shared
    for piece in tl.range(0, num_pieces):
        if SPLIT:
            seq, kv_head, tile, first, last, num_units = locate_piece(
                piece, num_whole, first_unit, last_unit, first_tile, num_programs, batch, SIZES
            )
        else:
            seq, tile = tile_of_program(batch, QUERIES_PER_KV, BLOCK_M, ONE_SEQ)
            kv_head = tl.program_id(1)
        token, head, mask_m, has_rows = tile_rows(
            batch.query_start_loc_ptr, seq, kv_head, tile, QUERIES_PER_KV, BLOCK_M
        )
        # A grid over ragged sequences has tiles without rows: those see no key.
        seq_len = tl.load(batch.seq_lens_ptr + seq, mask=has_rows, other=0).to(tl.int32)
        num_whole_blocks = seq_len // BLOCK_SIZE
        table_ptr = block_table_ptr + tl.cast(seq, tl.int64) * stride_table.seq
        key_head_ptr = key_pool_ptr + kv_head.to(tl.int64) * stride_key.head
        value_head_ptr = value_pool_ptr + kv_head.to(tl.int64) * stride_value.head

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc_unit = 1.0  # the scale of the V rows in acc
        query = load_query(query_ptr, stride_query, 0, token, head, mask_m, offs_d, HEAD_SIZE)
        next_entry = 0
        for segment in tl.range(0, NUM_SEGMENTS):
            first_entry = next_entry
            next_entry = num_whole_blocks
            if NUM_SEGMENTS > 1:
                query = load_query(
                    query_ptr, stride_query, segment, token, head, mask_m, offs_d, HEAD_SIZE
                )
                if segment < NUM_SEGMENTS - 1:
                    entries = tl.load(segment_blocks_ptr + seq * (NUM_SEGMENTS - 1) + segment)
                    entries = tl.minimum(entries, num_whole_blocks - first_entry)
                    next_entry = first_entry + entries.to(tl.int32)
            if FULL_ROWS > 0:
                start = times(first_entry, TILES_PER_BLOCK)
                stop = times(next_entry, TILES_PER_BLOCK)
                if SPLIT:
                    start, stop = items_between(first, last, 0, start, stop, BLOCK_N)
                acc, row_max, row_sum, acc_unit = attend_blocks(
                    query,
                    acc,
                    row_max,
                    row_sum,
                    acc_unit,
                    key_head_ptr,
                    value_head_ptr,
                    key_desc,
                    value_desc,
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
                    start,
                    stop,
                    scale_log2,
                    offs_d,
                    0,
                    FULL_ROWS,
                    BLOCK_N,
                    BLOCK_D,
                    HEAD_SIZE,
                    PRECISION,
                    COUNT_TILES,
                )
            if TAIL_ROWS > 0:
                start = first_entry
                stop = next_entry
                if SPLIT:
                    base = times(num_whole_blocks, FULL_ROWS // UNIT)
                    start, stop = items_between(first, last, base, start, stop, TAIL_N)
                acc, row_max, row_sum, acc_unit = attend_blocks(
                    query,
                    acc,
                    row_max,
                    row_sum,
                    acc_unit,
                    key_head_ptr,
                    value_head_ptr,
                    key_tail_desc,
                    value_tail_desc,
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
                    start,
                    stop,
                    scale_log2,
                    offs_d,
                    FULL_ROWS,
                    TAIL_ROWS,
                    TAIL_N,
                    BLOCK_D,
                    HEAD_SIZE,
                    PRECISION,
                    False,
                )

        num_last_rows = seq_len - num_whole_blocks * BLOCK_SIZE
        start = 0
        stop = tl.cdiv(num_last_rows, REST_N)
        if SPLIT:
            base = times(num_whole_blocks, SIZES.UNITS_PER_BLOCK)
            current_base = base + times(stop, REST_N // UNIT)
            start, stop = items_between(first, last, base, start, stop, REST_N)
        # Past the table's end when the last block is full: then nothing may be read there.
        last_block = tl.load(
            table_ptr + tl.cast(num_whole_blocks, tl.int64) * stride_table.entry,
            mask=num_last_rows > 0,
            other=0,
        ).to(tl.int64)
        rest_scale, bias, new_unit = block_factors(
            key_scale_ptr,
            value_scale_ptr,
            block_bias_ptr,
            last_block,
            kv_head,
            stride_key_scale,
            stride_value_scale,
            stride_bias,
            scale_log2,
        )
        if value_scale_ptr is not None:
            # The null block's scale, where there are no rows, may be anything.
            new_unit = tl.where(num_last_rows > 0, new_unit, 1.0)
            acc *= acc_unit / new_unit
        acc, row_max, row_sum = attend_rows(
            query,
            acc,
            row_max,
            row_sum,
            key_head_ptr + last_block * stride_key.block,
            value_head_ptr + last_block * stride_value.block,
            stride_key.slot,
            stride_value.slot,
            times(start, REST_N),
            tl.minimum(times(stop, REST_N), num_last_rows),
            rest_scale,
            bias,
            offs_d,
            REST_N,
            HEAD_SIZE,
            block_bias_ptr is not None,
            PRECISION,
        )
        if value_scale_ptr is not None:
            acc *= new_unit
        if key_current_ptr is not None:
            first_row = tl.load(batch.current_start_loc_ptr + seq)
            num_current = rows_of(batch.current_start_loc_ptr, seq)
            start = 0
            stop = tl.cdiv(num_current, REST_N)
            if SPLIT:
                start, stop = items_between(first, last, current_base, start, stop, REST_N)
            acc, row_max, row_sum = attend_rows(
                query,
                acc,
                row_max,
                row_sum,
                row_ptr(key_current_ptr, stride_key_current, first_row, kv_head),
                row_ptr(value_current_ptr, stride_value_current, first_row, kv_head),
                stride_key_current.token,
                stride_value_current.token,
                times(start, REST_N),
                tl.minimum(times(stop, REST_N), num_current),
                scale_log2,
                0.0,
                offs_d,
                REST_N,
                HEAD_SIZE,
                False,
                PRECISION,
            )
            if key_extra_ptr is not None:
                num_extra = tl.cast(batch.num_extra, tl.int32)
                start = 0
                stop = tl.cdiv(num_extra, REST_N)
                if SPLIT:
                    base = current_base + times(tl.cdiv(num_current, REST_N), REST_N // UNIT)
                    start, stop = items_between(first, last, base, start, stop, REST_N)
                acc, row_max, row_sum = attend_rows(
                    query,
                    acc,
                    row_max,
                    row_sum,
                    row_ptr(key_extra_ptr, stride_key_extra, 0, kv_head),
                    row_ptr(value_extra_ptr, stride_value_extra, 0, kv_head),
                    stride_key_extra.token,
                    stride_value_extra.token,
                    times(start, REST_N),
                    tl.minimum(times(stop, REST_N), num_extra),
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
        if SPLIT:
            if (first > 0) | (last < num_units):  # other programs see the rest of the keys
                record = times(tl.program_id(0), 2) + tl.minimum(piece - num_whole, 1)
                store_record(workspace_ptr, record, acc, row_max, row_sum, BLOCK_M, BLOCK_D)
                mask_m = mask_m & False
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


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 at their import)."""
    return not isinstance(_walk_kernel, triton.JITFunction)


def walk(
    inputs: AttentionArguments,
    descriptors: bool | None = None,
    num_programs: int | None = None,
) -> None:
    """Launch the walk, and `merge` where it is split. Writes ``out`` and, where given, ``lse``.

    Args:
        inputs: taken as checked.
        descriptors: read the pools by tensor descriptors; None: on sm_90 and newer, where they fit.
        num_programs: how many programs divide the tiles among them; 0: one program a tile; None:
            what `tuning.split_programs` says.
    """
    if inputs.num_rows == 0:
        return
    key_pool, value_pool, device = inputs.key_pool, inputs.value_pool, inputs.query.device
    arch = arch_of(device)
    _, block_size, _, head_size = key_pool.shape
    tiles = walk_tiles(arch, head_size, inputs.query.element_size(), block_size, inputs.num_rows)
    if descriptors is None:
        descriptors = arch >= 90 and descriptors_fit(key_pool, value_pool)
    blocks = tails = (None, None)
    if descriptors:
        blocks = tails = block_descriptors(key_pool, value_pool, tiles.block_n)
        if tiles.tail_n != tiles.block_n:
            tails = block_descriptors(key_pool, value_pool, tiles.tail_n)
    grid, arguments, constants = launch_arguments(inputs, tiles)
    if num_programs is None:
        num_programs = split_programs(grid[0] * grid[1], multiprocessors(device))
    workspace = None
    if num_programs:
        workspace = new_workspace(num_programs, tiles, head_size, device)
    _walk_kernel[(num_programs,) if num_programs else grid](
        *arguments,
        *blocks,
        *tails,
        workspace,
        num_programs,
        **constants,
        BLOCK_N=tiles.block_n,
        TAIL_N=tiles.tail_n,
        SIZES=split_sizes(tiles, block_size, constants["QUERIES_PER_KV"]),
        # Always cheaper beside 64-bit addresses on sm_90.
        COUNT_TILES=tiles.count_tiles or (arch >= 90 and not descriptors),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    if workspace is not None:
        merge(inputs, workspace, num_programs, grid[0] * grid[1], tiles)
