"""Tile sizes: a pure function of head size, element size and block size. Nothing is tuned at run
time.
"""

from typing import NamedTuple


class WalkTiles(NamedTuple):
    """Compile-time sizes of one walk launch."""

    block_m: int
    block_n: int
    tail_n: int
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``)."""
    return 1 << (n - 1).bit_length()


def walk_tiles(
    arch: int, head_size: int, element_size: int, block_size: int, num_query_rows: int
) -> WalkTiles:
    """Choose the tiles of `walk`.

    The sizes come from the compiler's counts, not from a GPU: ``chunkattn aot`` prints registers,
    stack and instructions of each loop.

    Args:
        arch: compute capability, ``10 * major + minor``; 0 in the interpreter and on an AMD GPU.
        head_size: elements of one head.
        element_size: bytes of one K/V element.
        block_size: tokens of one entry of the block table.
        num_query_rows: query rows of the whole call.
    """
    block_d = max(16, next_power_of_2(head_size))
    # fp32 has no tensor-core path at full precision, and 256-wide heads double the accumulator.
    wide = element_size == 2 and block_d <= 128
    block_m = 128 if wide else 64
    # From sm_90 on operands come from shared memory, which leaves registers for twice the columns.
    block_n = (128 if arch >= 90 else 64) if wide else 32
    block_m = min(block_m, max(16, next_power_of_2(num_query_rows)))
    block_n = min(block_n, max(16, next_power_of_2(block_size)))
    tail_n = max(16, next_power_of_2(block_size % block_n or block_n))
    return WalkTiles(block_m, block_n, tail_n, num_warps=8 if block_m == 128 else 4, num_stages=2)


def scatter_tile(num_columns: int) -> tuple[int, int]:
    """Rows and columns of one program of `scatter`, 4096 elements: 16-byte accesses for 4 warps.

    Args:
        num_columns: elements of one row, all heads.
    """
    block_c = min(1024, next_power_of_2(num_columns))
    return max(1, 4096 // block_c), block_c
