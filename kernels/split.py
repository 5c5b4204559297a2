"""How the tiles of an attention launch are divided among a fixed number of programs.

A tile (``BLOCK_M`` query rows of a sequence, one K/V head) owns as many units as its sequence has
keys to read, 16 keys a unit. All tiles stand in one line, sequence by sequence, head by head.

With one sequence, program ``p`` of ``P`` first takes tiles ``p``, ``p + P``, ... whole, as many as
there are full waves of ``P`` tiles: neighbours then read the keys of a head together. The units of
the tiles that are left, of ragged sequences those of all tiles, stand in one line too, of which
program ``p`` takes the ``p``-th share of ``ceil(units / P)``. So every program reads as many keys
as any other, whatever the number of tiles. A tile that lies in two or more shares is finished by
`merge`.

The number of programs is chosen from shapes, the shares follow from ``seq_lens`` on the device: the
same call gives the same bits, and a launch does not change as the window moves.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .primitives import rows_of, times
from .tuning import WalkTiles

_UNIT = 16
UNIT = tl.constexpr(_UNIT)
"""Keys of a unit: the smallest tile of keys there is."""


class SplitSizes(NamedTuple):
    """Compile-time sizes that the division depends on."""

    QUERIES_PER_KV: int
    BLOCK_M: int
    BLOCK_SIZE: int
    UNITS_PER_BLOCK: int  # of its full tiles and of its tail
    REST_N: int


def split_sizes(tiles: WalkTiles, block_size: int, queries_per_kv: int) -> SplitSizes:
    """The sizes of a launch of `walk`."""
    tail_rows = block_size % tiles.block_n
    computed = block_size - tail_rows + (tiles.tail_n if tail_rows else 0)
    return SplitSizes(queries_per_kv, tiles.block_m, block_size, computed // _UNIT, tiles.rest_n)


@triton.jit
def work_of_sequence(seq, batch, SIZES: tl.constexpr):
    """Tiles of one head, and units of one of them; a tile without a key has one unit too."""
    num_tokens = rows_of(batch.query_start_loc_ptr, seq)
    num_tiles = tl.cdiv(times(num_tokens, SIZES.QUERIES_PER_KV), SIZES.BLOCK_M)
    seq_len = tl.load(batch.seq_lens_ptr + seq).to(tl.int32)
    num_rest = tl.cdiv(seq_len % SIZES.BLOCK_SIZE, SIZES.REST_N)
    if batch.current_start_loc_ptr is not None:
        num_rest += tl.cdiv(rows_of(batch.current_start_loc_ptr, seq), SIZES.REST_N)
    if batch.num_extra is not None:
        num_rest = num_rest + tl.cdiv(tl.cast(batch.num_extra, tl.int32), SIZES.REST_N)
    num_units = times(seq_len // SIZES.BLOCK_SIZE, SIZES.UNITS_PER_BLOCK)
    num_units += times(num_rest, SIZES.REST_N // UNIT)
    return num_tiles, tl.maximum(num_units, 1)


@triton.jit
def tile_of_unit(unit, batch, SIZES: tl.constexpr):
    """Index of the tile that owns a unit; the number of tiles for a unit past the last."""
    tile = tl.cast(0, tl.int32)
    first_unit = tl.cast(0, tl.int64)
    for seq in tl.range(0, batch.num_seqs):
        num_tiles, num_units = work_of_sequence(seq, batch, SIZES)
        units = num_tiles.to(tl.int64) * batch.num_kv_heads * num_units
        inside = tl.minimum(tl.maximum(unit - first_unit, 0), units)
        tile += (inside // num_units).to(tl.int32)
        first_unit += units
    return tile


@triton.jit
def locate_tile(index, batch, SIZES: tl.constexpr):
    """Sequence, K/V head, tile within them, first unit and units of the tile of an index.

    For an index past the last tile the first unit is the number of all units.
    """
    found = tl.cast(0, tl.int32)
    kv_head = tl.cast(0, tl.int32)
    tile = tl.cast(0, tl.int32)
    units_of_tile = tl.cast(1, tl.int32)
    first_unit = tl.cast(0, tl.int64)
    first_tile = tl.cast(0, tl.int32)
    for seq in tl.range(0, batch.num_seqs):
        num_tiles, num_units = work_of_sequence(seq, batch, SIZES)
        count = times(num_tiles, batch.num_kv_heads)
        inside = index - first_tile
        first_unit += tl.minimum(tl.maximum(inside, 0), count).to(tl.int64) * num_units
        if (inside >= 0) & (inside < count):
            found = seq
            kv_head = inside // num_tiles
            tile = inside % num_tiles
            units_of_tile = num_units
        first_tile += count
    return found, kv_head, tile, first_unit, units_of_tile


@triton.jit
def items_between(first_unit, last_unit, base, first_item, last_item, BLOCK_N: tl.constexpr):
    """Which items of ``BLOCK_N`` keys, laid out from unit ``base`` on, begin in some units."""
    first = tl.cdiv(tl.maximum(first_unit - base, 0), BLOCK_N // UNIT)
    last = tl.cdiv(tl.maximum(last_unit - base, 0), BLOCK_N // UNIT)
    return tl.maximum(first_item, first), tl.minimum(last_item, last)


@triton.jit
def even_shares(num_programs, batch, SIZES: tl.constexpr):
    """Tiles that each program takes whole, the first unit after all of those, the number of all
    units, and the units of one program's share of the rest.
    """
    num_whole = tl.cast(0, tl.int32)
    base = tl.cast(0, tl.int64)
    if batch.num_seqs == 1:
        num_tiles, tile_units = work_of_sequence(0, batch, SIZES)
        num_whole = times(num_tiles, batch.num_kv_heads) // num_programs
        base += times(num_whole, num_programs).to(tl.int64) * tile_units
    # The tile after the last starts behind all units.
    _, _, _, num_units, _ = locate_tile(2**31 - 1, batch, SIZES)
    return num_whole, base, num_units, tl.maximum(tl.cdiv(num_units - base, num_programs), 1)


@triton.jit
def share_of_program(num_programs, batch, SIZES: tl.constexpr):
    """Tiles that this program takes whole; of its share of the rest the first unit, the one after
    the last, the first tile, and how many tiles it touches.
    """
    num_whole, base, num_units, share = even_shares(num_programs, batch, SIZES)
    first_unit = tl.minimum(base + tl.program_id(0) * share, num_units)
    last_unit = tl.minimum(first_unit + share, num_units)
    first_tile = tile_of_unit(first_unit, batch, SIZES)
    last_tile = tile_of_unit(last_unit - 1, batch, SIZES)
    num_tiles = tl.where(first_unit < last_unit, last_tile - first_tile + 1, 0)
    return num_whole, first_unit, last_unit, first_tile, num_tiles


@triton.jit
def locate_piece(
    piece, num_whole, first_unit, last_unit, first_tile, num_programs, batch, SIZES: tl.constexpr
):
    """Sequence, K/V head and tile within them of a piece of this program, the tile's first unit
    that is the program's, the one after the last that is, and the tile's units.
    """
    is_whole = piece < num_whole
    whole_tile = tl.program_id(0) + times(piece, num_programs)
    index = tl.where(is_whole, whole_tile, first_tile + piece - num_whole)
    seq, kv_head, tile, tile_unit, num_units = locate_tile(index, batch, SIZES)
    first = tl.where(is_whole, 0, tl.maximum(first_unit - tile_unit, 0)).to(tl.int32)
    last = tl.minimum(last_unit - tile_unit, num_units).to(tl.int32)
    return seq, kv_head, tile, first, last, num_units
