"""The window's arithmetic, as pure functions of integers. Positions are absolute."""

import math
from collections.abc import Iterable

Runs = tuple[range, ...]
"""Chunks of the time line, as ascending, disjoint, non-empty ranges."""


def part_of_blocks(block_size: int, chunk_size: int) -> int:
    """Tokens of the entries of a block table: a block, where chunks are whole blocks.

    Elsewhere an edge of the window may fall inside a block. Plans then name parts of blocks, the
    largest parts whose edges are all the edges there are.
    """
    return block_size if chunk_size % block_size == 0 else math.gcd(block_size, chunk_size)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def chunk_window_skipped_tokens(
    num_computed_tokens: int,
    *,
    chunk_size: int,
    sliding_window: int,
    sink_chunks: int,
    reset_at_boundary: bool,
) -> int:
    """Tokens after the sink that are out of the window, a whole number of chunks.

    The gap that leaves is ``[sink, sink + skipped)`` with ``sink = sink_chunks * chunk_size``.

    Args:
        num_computed_tokens: committed tokens.
        chunk_size: tokens of a chunk.
        sliding_window: tokens of the window.
        sink_chunks: chunks that never leave.
        reset_at_boundary: everything but the sink leaves at each chunk boundary.
    """
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}")
    sink = sink_chunks * chunk_size
    if reset_at_boundary:
        return max(0, num_computed_tokens // chunk_size * chunk_size - sink)
    return max(0, num_computed_tokens - sliding_window - sink) // chunk_size * chunk_size


def visible_history(
    first_chunk: int,
    num_chunks: int,
    *,
    window_chunks: int,
    sink_chunks: int,
    reset_at_boundary: bool,
) -> tuple[range, range]:
    """History that the span ``[first_chunk, first_chunk + num_chunks)`` sees: chunks of the sink,
    recent chunks.

    Everything while ``first_chunk + num_chunks <= sink_chunks + window_chunks``, then the sink and
    the last ``window_chunks``, the span counted in. With ``reset_at_boundary`` the sink alone. A
    denoise forward and the commit forward of a span see the same.
    """
    sink_end = min(sink_chunks, first_chunk)
    if reset_at_boundary:
        return range(sink_end), range(first_chunk, first_chunk)
    recent_start = max(sink_end, first_chunk + num_chunks - window_chunks)
    return range(sink_end), range(recent_start, first_chunk)


def blocks_per_branch(
    *, block_size: int, chunk_size: int, window_chunks: int, sink_chunks: int, span_chunks: int
) -> int:
    """The most blocks that one branch owns at any time: sink, window and the span in flight.

    Where chunks are not whole blocks, the edges of the sink and of the window may each cut a block.
    """
    moving = (window_chunks + span_chunks) * chunk_size
    sink = sink_chunks * chunk_size
    if chunk_size % block_size == 0:
        return (sink + moving) // block_size
    return ceil_div(sink, block_size) + ceil_div(moving, block_size) + 1


def runs(chunks: Iterable[int]) -> Runs:
    """Chunk indices, in any order, as `Runs`."""
    return merged(range(chunk, chunk + 1) for chunk in sorted(set(chunks)))


def merged(ranges: Iterable[range]) -> Runs:
    """Ascending, disjoint ranges, those that touch made one and empty ones left out."""
    found: list[range] = []
    for run in ranges:
        if found and run and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return tuple(found)


def union(*many: Runs) -> Runs:
    """What is in any of them."""
    return runs(chunk for some in many for run in some for chunk in run)


def common(a: Runs, b: Runs) -> Runs:
    """What two `Runs` have in common."""
    found = []
    for x in a:
        for y in b:
            start = x.start if x.start > y.start else y.start
            stop = x.stop if x.stop < y.stop else y.stop
            if start < stop:
                found.append(range(start, stop))
    return tuple(found)


def within(chunks: Runs, others: Runs) -> bool:
    """Whether every one of ``chunks`` is in ``others``; every plan asks, so nothing is built."""
    for x in chunks:
        for y in others:
            if y.start <= x.start and x.stop <= y.stop:
                break
        else:
            return False
    return True


def count(chunks: Iterable[range]) -> int:
    """How many chunks there are."""
    return sum(map(len, chunks))


def whole_block_gaps(
    kept: Iterable[range], start: int, end: int, *, chunk_size: int, block_size: int
) -> Runs:
    """Token positions before ``end`` of the blocks that hold no token of the kept chunks.

    Args:
        kept: chunks, ascending.
        start: position of chunk 0; what lies before it is kept.
        end: committed tokens. A block that is still being filled is kept.
        chunk_size: tokens of a chunk.
        block_size: tokens of a block.
    """
    inner = [start + edge * chunk_size for run in kept for edge in (run.start, run.stop)]
    edges = [start, *inner, end]
    return merged(
        range(ceil_div(a, block_size) * block_size, b // block_size * block_size)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    )
