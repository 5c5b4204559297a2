"""Finish the tiles of a split launch: combine what several programs saw of one tile.

Program ``p`` of a split launch leaves what it saw of a tile that is not wholly its own in record
``2 * p`` (the first of its share) or ``2 * p + 1`` (the last) of the workspace, float32:

    acc      [BLOCK_M, BLOCK_D]  sum of p * v, not divided
    row_max  [BLOCK_M]           maximum of the scores, base 2
    row_sum  [BLOCK_M]           sum of p

Records of one tile are added in the order of the programs, so results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl

from .arguments import AttentionArguments, row_strides
from .launch import batch_of
from .primitives import store_tile, tile_rows, times
from .split import even_shares, locate_tile, split_sizes
from .tuning import WalkTiles, padded_head_size


@triton.jit
def record_offsets(record, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of a record's acc, row_max and row_sum in the workspace."""
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)
    first = record.to(tl.int64) * (BLOCK_M * (BLOCK_D + 2))
    acc = first + offs_m[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    row_max = first + BLOCK_M * BLOCK_D + offs_m
    return acc, row_max, row_max + BLOCK_M


@triton.jit
def store_record(
    workspace_ptr, record, acc, row_max, row_sum, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Leave a tile's running state to `merge`."""
    acc_offset, max_offset, sum_offset = record_offsets(record, BLOCK_M, BLOCK_D)
    tl.store(workspace_ptr + acc_offset, acc)
    tl.store(workspace_ptr + max_offset, row_max)
    tl.store(workspace_ptr + sum_offset, row_sum)


@triton.jit
def combine(acc, row_max, row_sum, other_acc, other_max, other_sum):
    """The running state after the keys of both; two that saw no key give one that saw none."""
    new_max = tl.maximum(row_max, other_max)
    # -inf - -inf would be NaN.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.math.exp2(row_max - safe_max)
    beta = tl.math.exp2(other_max - safe_max)
    acc = acc * alpha[:, None] + other_acc * beta[:, None]
    return acc, new_max, row_sum * alpha + other_sum * beta


@triton.jit
def _merge_kernel(
    workspace_ptr,
    batch,
    out_ptr,
    lse_ptr,
    stride_out,
    stride_lse,
    num_programs,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Combine the records of one tile, where there are two or more, and write its result.

    Work of a launch: 2 * head_size multiply-adds a row of a record. Bytes: each record read once,
    at most two a program of the split launch, and ``out`` written where a tile was split.
    """
    BLOCK_M: tl.constexpr = SIZES.BLOCK_M
    num_whole, base, num_units, share = even_shares(num_programs, batch, SIZES)
    index = tl.program_id(0) + times(num_whole, num_programs)
    seq, kv_head, tile, first_unit, units = locate_tile(index, batch, SIZES)
    first_unit -= base
    first_program = (first_unit // share).to(tl.int32)
    last_program = ((first_unit + units - 1) // share).to(tl.int32)
    if (first_unit == num_units - base) | (first_program == last_program):
        return
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for program in tl.range(first_program, last_program + 1):
        # A program whose share begins before this tile met another one first.
        record = times(program, 2) + (tl.cast(program, tl.int64) * share < first_unit).to(tl.int32)
        acc_offset, max_offset, sum_offset = record_offsets(record, BLOCK_M, BLOCK_D)
        acc, row_max, row_sum = combine(
            acc,
            row_max,
            row_sum,
            tl.load(workspace_ptr + acc_offset),
            tl.load(workspace_ptr + max_offset),
            tl.load(workspace_ptr + sum_offset),
        )
    token, head, mask_m, _ = tile_rows(
        batch.query_start_loc_ptr, seq, kv_head, tile, SIZES.QUERIES_PER_KV, BLOCK_M
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
        tl.arange(0, BLOCK_D),
        HEAD_SIZE,
    )


def new_workspace(
    num_programs: int, tiles: WalkTiles, head_size: int, device: torch.device
) -> torch.Tensor:
    """Room for two records a program."""
    size = 2 * num_programs * tiles.block_m * (padded_head_size(head_size) + 2)
    return torch.empty(size, dtype=torch.float32, device=device)


def merge(
    inputs: AttentionArguments,
    workspace: torch.Tensor,
    num_programs: int,
    num_tiles: int,
    tiles: WalkTiles,
) -> None:
    """Launch the merge of a split launch over ``num_tiles`` tiles or fewer. Writes the rows of
    ``out`` and ``lse`` whose tiles were split.
    """
    _, num_heads, head_size = inputs.out.shape
    _, block_size, num_kv_heads, _ = inputs.key_pool.shape
    _merge_kernel[(num_tiles,)](
        workspace,
        batch_of(inputs),
        inputs.out,
        inputs.lse,
        row_strides(inputs.out),
        row_strides(inputs.lse),
        num_programs,
        HEAD_SIZE=head_size,
        BLOCK_D=padded_head_size(head_size),
        SIZES=split_sizes(tiles, block_size, num_heads // num_kv_heads),
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
    )
