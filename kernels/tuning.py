"""Tile sizes: a pure function of the GPU and the call's shapes. Nothing is tuned at run time."""

import functools
from typing import NamedTuple

# A tile of `walk` never spans two blocks, so small blocks would leave it mostly padding.
GATHER_BELOW = 64
"""Blocks of fewer tokens are read by `gather`."""


class WalkTiles(NamedTuple):
    """Compile-time sizes of one launch of `walk`, or of `gather`, which has no tail."""

    block_m: int
    block_n: int
    tail_n: int
    rest_n: int
    num_warps: int
    num_stages: int
    count_tiles: bool  # along with the blocks of a table, where that is cheaper than to divide


def cdiv(n: int, divisor: int) -> int:
    """``n / divisor`` rounded up. `triton.cdiv` is for kernels: a call costs the host 5 µs."""
    return -(-n // divisor)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``)."""
    return 1 << (n - 1).bit_length()


def padded_head_size(head_size: int) -> int:
    """Columns of a tile: a matrix product needs a power of two, at least 16."""
    return max(16, next_power_of_2(head_size))


class _Choice(NamedTuple):
    """One row of the table: for which calls, and the tile."""

    first_arch: int
    last_arch: int
    element_size: int  # at most
    head_size: int  # at most
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The first row that fits is taken. Every row so far comes from the compiler's counts (`chunkattn
# aot`, Triton 3.7.1): of the tiles that fit the shared memory of their targets and leave nothing of
# `walk` on the stack, the one of the fewest issue slots a score, or for float32, whose loops are
# not counted, the largest. A row from a GPU is to name its result file.
_TABLE = (
    # gfx942, 64 KiB: 128x64 with 8 warps takes twice the slots and spills.
    _Choice(0, 0, 2, 128, 128, 64, 4, 2),
    _Choice(0, 0, 2, 256, 64, 32, 4, 2),
    _Choice(0, 0, 4, 128, 64, 32, 4, 2),
    _Choice(0, 0, 4, 256, 32, 16, 4, 1),
    # Operands of wgmma and tcgen05 come from shared memory, 227 KiB: room for twice the columns.
    _Choice(90, 119, 2, 128, 128, 128, 8, 2),
    _Choice(90, 99, 2, 256, 128, 64, 8, 2),
    _Choice(100, 119, 2, 256, 128, 32, 8, 2),  # 64 columns spill
    # mma.sync. sm_80 has 163 KiB, the others 99: 64x64 would take 104.
    _Choice(80, 999, 2, 128, 128, 64, 8, 2),  # 8 bytes of stack on sm_120, plain calls
    _Choice(80, 80, 2, 256, 64, 64, 8, 2),
    _Choice(80, 999, 2, 256, 64, 32, 8, 2),
    # No tensor core multiplies float32 at its full precision: operands are held in registers.
    _Choice(80, 89, 4, 128, 64, 16, 8, 2),
    _Choice(80, 89, 4, 256, 32, 16, 8, 2),
    _Choice(90, 999, 4, 128, 32, 16, 8, 2),
    _Choice(90, 999, 4, 256, 16, 16, 8, 2),  # about 200 bytes of stack, as all that was tried
)
# The masked loops over the last rows: short, often 25 action rows, and a small tile keeps them from
# raising the register count of the others.
_REST_N = 32


@functools.lru_cache
def walk_tiles(
    arch: int, head_size: int, element_size: int, block_size: int, num_rows: int
) -> WalkTiles:
    """Choose the tiles of `walk`.

    Args:
        arch: compute capability, ``10 * major + minor``; 0 in the interpreter and on an AMD GPU.
        head_size: elements of one head, at most 256.
        element_size: bytes of one element of the query, in which products are made.
        block_size: tokens of one entry of the block table.
        num_rows: query rows of the whole call, those of all query heads of a K/V head counted.
    """
    choice = next(
        row
        for row in _TABLE
        if row.first_arch <= arch <= row.last_arch
        and element_size <= row.element_size
        and head_size <= row.head_size
    )
    block_m = min(choice.block_m, max(16, next_power_of_2(num_rows)))
    block_n = min(choice.block_n, max(16, next_power_of_2(block_size)))
    return WalkTiles(
        block_m,
        block_n,
        tail_n=max(16, next_power_of_2(block_size % block_n or block_n)),
        rest_n=min(block_n, _REST_N),
        num_warps=max(4, choice.num_warps * block_m // choice.block_m),
        num_stages=choice.num_stages,
        count_tiles=arch >= 100,
    )


@functools.lru_cache
def gather_tiles(arch: int, head_size: int, element_size: int, num_rows: int) -> WalkTiles:
    """Choose the tiles of `gather`: those of `walk` in one block that holds everything."""
    tiles = walk_tiles(arch, head_size, element_size, 1 << 30, num_rows)
    # A second stage takes all of gfx942's shared memory, and more for heads of 256.
    return tiles._replace(num_stages=tiles.num_stages if arch else 1)


# A launch that keeps this share of the GPU busy is not worth the records and the second launch of a
# split. From counting, not from a GPU: docs/gpu_model.md.
_BUSY_ENOUGH = 0.9


def split_programs(num_tiles: int, num_multiprocessors: int) -> int:
    """How many programs divide the tiles of a launch of `walk`; 0: one program takes one tile.

    A tile of 128 rows fills a multiprocessor, so tiles run in waves of ``num_multiprocessors``.
    880 rows of 40 heads are 280 tiles, 2.12 waves on 132 multiprocessors: 3 are waited for. Split,
    each program takes 2 whole tiles, and all of them share the keys of the other 16.

    Args:
        num_tiles: tiles of query rows, of all K/V heads.
        num_multiprocessors: of the GPU; 0 in the interpreter.
    """
    if not num_multiprocessors:
        return 0
    waves = cdiv(num_tiles, num_multiprocessors)
    busy = num_tiles / (waves * num_multiprocessors)
    return num_multiprocessors if busy < _BUSY_ENOUGH else 0


def padding_waste(block_size: int, block_n: int, tail_n: int) -> float:
    """Keys that `walk` computes over keys that are visible, less one, in whole blocks."""
    tail_rows = block_size % block_n
    return (tail_n - tail_rows) / block_size if tail_rows else 0.0


def scatter_tile(num_columns: int) -> tuple[int, int]:
    """Rows and columns of one program of `scatter`, whose 4 warps access 16 bytes a thread.

    2048 elements: two accesses a thread to each tensor. Twice as many spill on sm_100 and sm_120.

    Args:
        num_columns: elements of one row, all heads.
    """
    block_c = min(1024, next_power_of_2(num_columns))
    return max(1, 2048 // block_c), block_c


def fused_tile(num_heads: int, head_size: int) -> tuple[int, int, int]:
    """Heads and elements of a head, both padded, and warps of one program of `fused`.

    One program holds a whole row; 32 elements a thread of each of Q, K and V stay in registers.
    """
    block_h, block_d = next_power_of_2(num_heads), padded_head_size(head_size)
    return block_h, block_d, min(16, max(1, block_h * block_d // 1024))
