"""Tile sizes: a pure function of head size, element size and block size. Nothing is tuned at run
time.
"""

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


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``)."""
    return 1 << (n - 1).bit_length()


def padded_head_size(head_size: int) -> int:
    """Columns of a tile: a matrix product needs a power of two, at least 16."""
    return max(16, next_power_of_2(head_size))


def walk_tiles(
    arch: int, head_size: int, element_size: int, block_size: int, num_rows: int
) -> WalkTiles:
    """Choose the tiles of `walk`.

    The sizes come from the compiler's counts, not from a GPU: ``chunkattn aot`` prints registers,
    stack and instructions of each loop.

    Args:
        arch: compute capability, ``10 * major + minor``; 0 in the interpreter and on an AMD GPU.
        head_size: elements of one head.
        element_size: bytes of one K/V element.
        block_size: tokens of one entry of the block table.
        num_rows: query rows of the whole call, those of all query heads of a K/V head counted.
    """
    block_d = padded_head_size(head_size)
    # fp32 has no tensor-core path at full precision, and 256-wide heads double the accumulator.
    wide = element_size == 2 and block_d <= 128
    block_m = 128 if wide else 64
    # On sm_90 and sm_100 operands come from shared memory, which leaves registers for twice the
    # columns; sm_120 multiplies as sm_80 does.
    block_n = (128 if 90 <= arch < 120 else 64) if wide else 32
    block_m = min(block_m, max(16, next_power_of_2(num_rows)))
    block_n = min(block_n, max(16, next_power_of_2(block_size)))
    tail_n = max(16, next_power_of_2(block_size % block_n or block_n))
    # The masked loops at the end are short: a smaller tile keeps them from raising the register
    # count.
    rest_n = min(block_n, 64)
    num_warps = 8 if block_m == 128 else 4
    return WalkTiles(block_m, block_n, tail_n, rest_n, num_warps, 2, count_tiles=arch >= 100)


def gather_tiles(arch: int, head_size: int, element_size: int, num_rows: int) -> WalkTiles:
    """Choose the tiles of `gather`: those of `walk` in one block that holds everything."""
    tiles = walk_tiles(arch, head_size, element_size, 1 << 30, num_rows)
    # Two stages take 80 KiB of shared memory on gfx942, which has 64.
    return tiles._replace(num_stages=2 if arch else 1)


# A launch that keeps this share of the GPU busy is not worth the records and the second launch of a
# split: from counting waves, not from a GPU.
_BUSY_ENOUGH = 0.9


def split_programs(num_tiles: int, num_multiprocessors: int) -> int:
    """How many programs divide the keys of a launch of `walk`; 0: one program takes one tile.

    A tile of 128 rows fills a multiprocessor, so tiles run in waves of ``num_multiprocessors``.
    880 rows of 40 heads are 280 tiles, 2.12 waves on 132 multiprocessors: 3 are waited for.

    Args:
        num_tiles: tiles of query rows, of all K/V heads.
        num_multiprocessors: of the GPU; 0 in the interpreter.
    """
    if not num_multiprocessors:
        return 0
    waves = -(-num_tiles // num_multiprocessors)
    busy = num_tiles / (waves * num_multiprocessors)
    return num_multiprocessors if busy < _BUSY_ENOUGH else 0


def padding_waste(block_size: int, tiles: WalkTiles) -> float:
    """Keys that `walk` computes over keys that are visible, less one, in whole blocks."""
    tail_rows = block_size % tiles.block_n
    return (tiles.tail_n - tail_rows) / block_size if tail_rows else 0.0


def scatter_tile(num_columns: int) -> tuple[int, int]:
    """Rows and columns of one program of `scatter`, 4096 elements: 16-byte accesses for 4 warps.

    Args:
        num_columns: elements of one row, all heads.
    """
    block_c = min(1024, next_power_of_2(num_columns))
    return max(1, 4096 // block_c), block_c


def fused_tile(num_heads: int, head_size: int) -> tuple[int, int, int]:
    """Heads and elements of a head, both padded, and warps of one program of `fused`.

    One program holds a whole row; 32 elements a thread of each of Q, K and V stay in registers.
    """
    block_h, block_d = next_power_of_2(num_heads), max(16, next_power_of_2(head_size))
    return block_h, block_d, min(16, max(1, block_h * block_d // 1024))
