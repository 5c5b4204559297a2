"""The CPU default: torch's own attention over the window. Needs no Triton; runs on a GPU when asked
for by name.

K and V are read where they lie. The visible blocks of a sequence form runs of consecutive block
ids; each run is one view of the pool. On the CPU in float32 the runs are attended one after the
other and merged by their log-sum-exp, so nothing is copied, however scattered the window is. In 16
bits each partial result would be rounded once more, so there (and where runs are short) a window of
more than one run is copied together first.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch

from chunkattn.kernels.arguments import AttentionArguments, ScatterArguments

MIN_ROWS_PER_RUN = 256
"""Mean length of a run below which copying is faster: torch attends in blocks of 512 keys."""

LARGEST_E4M3 = 448.0
SMALLEST_SCALE = 2.0**-20
"""As in `chunkattn.kernels.scales`."""

_copied_kv_bytes = 0


def copied_kv_bytes() -> int:
    """Bytes of K and V that this backend has copied so far, to make a window contiguous or to give
    blocks their scales; see the difference.
    """
    return _copied_kv_bytes


def _in_line(pool: torch.Tensor) -> bool:
    """Whether a block's first slot is as far from the last one before it as any two slots are."""
    num_blocks, block_size = pool.shape[:2]
    return num_blocks == 1 or block_size == 1 or pool.stride(0) == block_size * pool.stride(1)


def _flat(pool: torch.Tensor) -> torch.Tensor | None:
    """The pool as ``(num_slots, num_kv_heads, head_size)`` without a copy, or None where its
    strides forbid it.
    """
    num_blocks, block_size, num_kv_heads, head_size = pool.shape
    if not _in_line(pool):
        return None
    stride = pool.stride(1) if block_size > 1 else pool.stride(0)
    return pool.as_strided(
        (num_blocks * block_size, num_kv_heads, head_size), (stride, *pool.stride()[2:])
    )


@torch.no_grad()
def scatter(rows: ScatterArguments) -> None:
    """`chunkattn.kernels.scatter.scatter` in torch."""
    num_tokens, block_size = rows.key.shape[0], rows.key_pool.shape[1]
    parts = [(rows.key, rows.value, rows.slot_mapping[:num_tokens])]
    if rows.key_extra is not None and rows.value_extra is not None:
        parts.append((rows.key_extra, rows.value_extra, rows.slot_mapping[num_tokens:]))
    if rows.key_pool.dtype == torch.float8_e4m3fn:
        _scatter_fp8(rows, parts)
        return
    flat_key, flat_value = _flat(rows.key_pool), _flat(rows.value_pool)
    for keys, values, slots in parts:
        if flat_key is not None and flat_value is not None and slots.device.type == "cpu":
            # The slots of a span are a few runs: one plain copy each.
            for first, begin, end in _runs(slots):
                if first >= 0:
                    flat_key[first : first + end - begin] = keys[begin:end]
                    flat_value[first : first + end - begin] = values[begin:end]
            continue
        keep = slots >= 0
        slots = slots[keep].long()
        for pool, new in ((rows.key_pool, keys), (rows.value_pool, values)):
            pool[slots // block_size, slots % block_size] = new[keep].to(pool.dtype)


def _scatter_fp8(
    rows: ScatterArguments, parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> None:
    slots = torch.cat([part[2] for part in parts]).long()
    keep = slots >= 0
    block, offset = slots[keep] // rows.key_pool.shape[1], slots[keep] % rows.key_pool.shape[1]
    for i, (pool, scale) in enumerate(
        ((rows.key_pool, rows.key_scale), (rows.value_pool, rows.value_scale))
    ):
        new = torch.cat([part[i] for part in parts])[keep].float()
        if scale is not None and scale.dim() == 2:
            size = new.abs()
            largest = torch.where(size < math.inf, size, 0.0).amax(-1) / LARGEST_E4M3
            found = torch.full_like(scale, SMALLEST_SCALE)
            found.scatter_reduce_(0, block.unsqueeze(-1).expand_as(largest), largest, "amax")
            opened = block[offset == 0]
            scale[opened] = found[opened]
            scale = scale[block].unsqueeze(-1)
        stored = to_e4m3(new, 1.0 if scale is None else scale)
        pool.view(torch.uint8)[block, offset] = stored.view(torch.uint8)


def to_e4m3(rows: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """``rows / scale`` in e4m3, clamped; NaN stays NaN."""
    scaled = rows.float() / scale
    return scaled.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def _runs(ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Runs of ids that rise by one, as ``(first id, begin, end)``; ids below 0 stand alone."""
    numbers = ids.numpy(force=True)  # a quarter of torch's time for so few
    if not len(numbers):
        return []
    breaks = (numbers[1:] != numbers[:-1] + 1) | (numbers[:-1] < 0)
    begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return list(zip(numbers[begins].tolist(), begins, [*begins[1:], len(numbers)], strict=True))


# Attention's rows are (1, num_kv_heads, rows, head_size), as torch's own attention takes them, and
# its lse (1, num_kv_heads, rows). The query heads of one K/V head become more rows: without a mask
# the same attention, and K/V are not copied.
def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """``(rows, num_kv_heads, head_size)`` as attention takes it: a view."""
    return rows.transpose(0, 1).unsqueeze(0)


@torch.no_grad()
def attend(inputs: AttentionArguments) -> None:
    """`chunkattn.kernels.walk.walk` in torch."""
    starts = inputs.query_start_loc.tolist()
    for s, seq_len in enumerate(inputs.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start == rows.stop:  # torch's CPU kernel divides by the number of rows
            continue
        found = _attend_sequence(inputs, s, rows, seq_len)
        targets = (inputs.out,) if inputs.lse is None else (inputs.out, inputs.lse)
        for target, result, of_no_key in zip(targets, found, (0.0, -math.inf), strict=False):
            by_row = target[rows].transpose(0, 1)
            if result is None:
                by_row.fill_(of_no_key)
            else:
                by_row.copy_(result.reshape(by_row.shape))


def _attend_sequence(
    inputs: AttentionArguments, s: int, rows: slice, seq_len: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """out and lse of one sequence; None where it sees no key."""
    # Parts that only merging brings together are attended in float32.
    merged = inputs.num_segments > 1 or inputs.block_bias is not None
    merged = merged or inputs.key_pool.dtype == torch.float8_e4m3fn
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    for query, parts in _segments(inputs, s, rows, seq_len, merged):
        want_lse = merged or len(parts) > 1 or inputs.lse is not None
        for key, value, bias in parts:
            part_out, part_lse = _attend_part(query, key, value, inputs.softmax_scale, want_lse)
            if part_lse is not None and bias is not None:
                part_lse += bias.unsqueeze(-1)
            if out is None:
                out, lse = part_out, part_lse
                continue
            assert lse is not None
            assert part_lse is not None
            # out = lerp(out, part_out, its share of the sum of both)
            out.lerp_(part_out, torch.sigmoid(part_lse - lse).unsqueeze(-1))
            lse = torch.logaddexp(lse, part_lse)
    return out, lse


def _segments(
    inputs: AttentionArguments, s: int, rows: slice, seq_len: int, merged: bool
) -> Iterator[tuple[torch.Tensor, list["Part"]]]:
    """The query rows of each segment, and the parts of the keys that they attend to."""
    _, block_size, num_kv_heads, _ = inputs.key_pool.shape
    queries = inputs.query if inputs.query.dim() == 4 else (inputs.query,)
    blocks = inputs.segment_blocks[s].tolist() if inputs.segment_blocks is not None else []
    end = 0
    for segment, query in enumerate(queries):
        is_last = segment == len(queries) - 1
        start, end = end, seq_len
        if not is_last:
            whole = seq_len // block_size * block_size
            end = min(whole, start + blocks[segment] * block_size)
        own: list[Rows] = []
        if is_last and inputs.key_current is not None and inputs.value_current is not None:
            assert inputs.current_start_loc is not None
            current = slice(*inputs.current_start_loc[s : s + 2].tolist())
            own.append((inputs.key_current[current], inputs.value_current[current]))
            if inputs.key_extra is not None and inputs.value_extra is not None:
                own.append((inputs.key_extra, inputs.value_extra))
        table = inputs.block_table[s, start // block_size : -(-end // block_size)]
        own = [pair for pair in own if len(pair[0])]
        parts_of = _blocks if merged else _runs_or_copy
        query = query[rows].float() if merged else query[rows]
        query = query.transpose(0, 1).reshape(1, num_kv_heads, -1, query.shape[-1])
        yield query, parts_of(inputs, table, end - start, own)


Rows = tuple[torch.Tensor, torch.Tensor]
"""K and V rows ``(rows, num_kv_heads, head_size)`` that came with the call."""
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""K and V rows that are attended together, and what is added to their scores,
``(num_kv_heads,)``.
"""


def _blocks(
    inputs: AttentionArguments, table: torch.Tensor, num_rows: int, own: list[Rows]
) -> list[Part]:
    """Each block's visible rows by themselves in float32, because each has its own factors."""
    global _copied_kv_bytes
    block_size, bias = inputs.key_pool.shape[1], inputs.block_bias
    parts = []
    for i, block in enumerate(table.tolist()):
        count = min(block_size, num_rows - i * block_size)
        key, value = (
            pool[block, :count].float() * (1.0 if scale is None else scale[block].unsqueeze(-1))
            for pool, scale in (
                (inputs.key_pool, inputs.key_scale),
                (inputs.value_pool, inputs.value_scale),
            )
        )
        _copied_kv_bytes += key.nbytes + value.nbytes
        own_bias = None if bias is None else bias[block]
        parts.append((_heads_first(key), _heads_first(value), own_bias))
    parts += [(_heads_first(key.float()), _heads_first(value.float()), None) for key, value in own]
    return parts


def _runs_or_copy(
    inputs: AttentionArguments, table: torch.Tensor, num_rows: int, own: list[Rows]
) -> list[Part]:
    """The rows where they lie, one view a run of consecutive blocks (a block in a strided pool); or
    all of them in one copy, where that is faster.
    """
    key_pool, value_pool = inputs.key_pool, inputs.value_pool
    block_size, blocks = key_pool.shape[1], table.tolist()
    in_line = _in_line(key_pool) and _in_line(value_pool)
    begins = [
        i for i, block in enumerate(blocks) if not i or not in_line or block != blocks[i - 1] + 1
    ]
    num_parts = len(begins) + len(own)
    total = num_rows + sum([len(key) for key, _ in own])
    in_place = key_pool.device.type == "cpu" and key_pool.dtype == torch.float32
    if num_parts > 1 and not (in_place and total >= MIN_ROWS_PER_RUN * num_parts):
        return [_copied_together(inputs, table, num_rows, own)]
    parts: list[Part] = []
    for begin, end in itertools.pairwise((*begins, len(blocks))):
        count = min(end * block_size, num_rows) - begin * block_size
        run = (blocks[begin], count)
        parts.append((_run_of(key_pool, *run), _run_of(value_pool, *run), None))
    return parts + [(_heads_first(key), _heads_first(value), None) for key, value in own]


def _run_of(pool: torch.Tensor, block: int, num_rows: int) -> torch.Tensor:
    """Rows from the first of a block on, as attention takes them: a view."""
    _, block_size, num_kv_heads, head_size = pool.shape
    stride_block, stride_slot, stride_head, _ = pool.stride()
    return pool.as_strided(
        (1, num_kv_heads, num_rows, head_size),
        (0, stride_head, stride_slot if block_size > 1 else stride_block, 1),
        pool.storage_offset() + block * stride_block,
    )


def _copied_together(
    inputs: AttentionArguments, table: torch.Tensor, num_rows: int, own: list[Rows]
) -> Part:
    global _copied_kv_bytes
    num_blocks, (_, *block_shape) = len(table), inputs.key_pool.shape
    paged = num_blocks * block_shape[0]
    own_rows = sum([len(key) for key, _ in own])
    copies: list[torch.Tensor] = []
    for i, pool in enumerate((inputs.key_pool, inputs.value_pool)):
        rows = pool.new_empty((paged + own_rows, *block_shape[1:]))
        blocks = rows[:paged].view(num_blocks, *block_shape)
        torch.index_select(pool, 0, table, out=blocks)
        end = num_rows  # what the last block holds behind it is written over, or left out
        for pair in own:
            rows[end : end + len(pair[i])] = pair[i]
            end += len(pair[i])
        copies.append(_heads_first(rows[:end]))
        _copied_kv_bytes += copies[-1].nbytes
    return copies[0], copies[1], None


def _attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of ``query`` over one part of the keys: out and lse."""
    if key.device.type == "cpu":
        # The op behind scaled_dot_product_attention on a CPU; called directly because it also
        # returns the lse.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=softmax_scale
        )
        return out, lse
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=softmax_scale)
    if not want_lse:
        return out, None
    scores = query.float() @ key.float().transpose(-2, -1)
    return out, torch.logsumexp(scores * softmax_scale, -1)
