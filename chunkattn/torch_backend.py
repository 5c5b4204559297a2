"""The CPU default: torch's own attention over the window. Needs no Triton; runs on a GPU when asked
for by name.

K and V are read where they lie. The visible blocks of a sequence form runs of consecutive block
ids; each run is one view of the pool. On the CPU in float32 the runs are attended one after the
other and merged by their log-sum-exp, so nothing is copied, however scattered the window is. In 16
bits each partial result would be rounded once more, so there (and where runs are short) a window of
more than one run is copied together first.
"""

import torch

MIN_ROWS_PER_RUN = 256
"""Mean length of a run below which copying is faster: torch attends in blocks of 512 keys."""

_copied_kv_bytes = 0


def copied_kv_bytes() -> int:
    """Bytes of K and V that this backend has copied so far to make a window contiguous; see the
    difference.
    """
    return _copied_kv_bytes


def _flat(pool: torch.Tensor) -> torch.Tensor | None:
    """The pool as ``(num_slots, num_kv_heads, head_size)`` without a copy, or None where its
    strides forbid it.
    """
    num_blocks, block_size, num_kv_heads, head_size = pool.shape
    if num_blocks > 1 and block_size > 1 and pool.stride(0) != block_size * pool.stride(1):
        return None
    stride = pool.stride(1) if block_size > 1 else pool.stride(0)
    return pool.as_strided(
        (num_blocks * block_size, num_kv_heads, head_size), (stride, *pool.stride()[2:])
    )


@torch.no_grad()
def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    key_extra: torch.Tensor | None,
    value_extra: torch.Tensor | None,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`chunkattn.kernels.scatter.scatter` in torch."""
    num_tokens, block_size = key.shape[0], key_pool.shape[1]
    parts = [(key, value, slot_mapping[:num_tokens])]
    if key_extra is not None and value_extra is not None:
        parts.append((key_extra, value_extra, slot_mapping[num_tokens:]))
    flat_key, flat_value = _flat(key_pool), _flat(value_pool)
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
        for pool, rows in ((key_pool, keys), (value_pool, values)):
            pool[slots // block_size, slots % block_size] = rows[keep].to(pool.dtype)


def _runs(ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Runs of ids that rise by one, as ``(first id, begin, end)``; ids below 0 stand alone."""
    if ids.numel() == 0:
        return []
    breaks = (ids[1:] != ids[:-1] + 1) | (ids[:-1] < 0)
    begins = [0, *(breaks.nonzero().flatten() + 1).tolist()]
    return list(zip(ids[begins].tolist(), begins, [*begins[1:], ids.numel()], strict=True))


@torch.no_grad()
def attend(
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
    """`chunkattn.kernels.walk.walk` in torch."""
    starts = query_start_loc.tolist()
    current = current_start_loc.tolist() if current_start_loc is not None else None
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start == rows.stop:  # torch's CPU kernel divides by the number of rows
            continue
        parts = _window_parts(key_pool, value_pool, block_table[s], seq_len)
        if current is not None and key_current is not None and value_current is not None:
            own = slice(current[s], current[s + 1])
            parts.append((key_current[own], value_current[own]))
        parts = [(k, v) for k, v in parts if k.shape[0]]
        if not parts:
            out[rows] = 0
            if lse is not None:
                lse[rows] = float("-inf")
            continue
        if len(parts) > 1 and not _worth_merging(parts):
            parts = [_copy_together(parts)]
        part_out, part_lse = _attend_parts(query[rows], parts, softmax_scale, lse is not None)
        out[rows] = part_out
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse


Part = tuple[torch.Tensor, torch.Tensor]


def _window_parts(
    key_pool: torch.Tensor, value_pool: torch.Tensor, block_table: torch.Tensor, seq_len: int
) -> list[Part]:
    """The visible rows as views of the pools, one a run of consecutive blocks (one a block in a
    strided pool).
    """
    block_size = key_pool.shape[1]
    table = block_table[: -(-seq_len // block_size)]
    flat_key, flat_value = _flat(key_pool), _flat(value_pool)
    if flat_key is None or flat_value is None:
        rows = [min(block_size, seq_len - i * block_size) for i in range(len(table))]
        ids = zip(table.tolist(), rows, strict=True)
        return [(key_pool[block, :n], value_pool[block, :n]) for block, n in ids]
    parts = []
    for first, begin, end in _runs(table):
        start = first * block_size
        stop = start + min(end * block_size, seq_len) - begin * block_size
        parts.append((flat_key[start:stop], flat_value[start:stop]))
    return parts


def _worth_merging(parts: list[Part]) -> bool:
    key = parts[0][0]
    if key.device.type != "cpu" or key.dtype != torch.float32:
        return False
    return sum(k.shape[0] for k, _ in parts) >= MIN_ROWS_PER_RUN * len(parts)


def _copy_together(parts: list[Part]) -> Part:
    global _copied_kv_bytes
    key = torch.cat([k for k, _ in parts])
    value = torch.cat([v for _, v in parts])
    _copied_kv_bytes += key.nbytes + value.nbytes
    return key, value


def _attend_parts(
    query: torch.Tensor, parts: list[Part], softmax_scale: float, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to each part and merge: ``out = lerp(out_1, out_2, sigmoid(lse_2 - lse_1))``."""
    out, lse = _attend_part(query, *parts[0], softmax_scale, want_lse or len(parts) > 1)
    for key, value in parts[1:]:
        next_out, next_lse = _attend_part(query, key, value, softmax_scale, True)
        assert lse is not None
        assert next_lse is not None
        out.lerp_(next_out, torch.sigmoid(next_lse - lse).unsqueeze(-1))
        lse = torch.logaddexp(lse, next_lse)
    return out, lse


def _attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dense attention of ``(q, heads, d)`` over ``(k, kv_heads, d)``: out ``(q, heads, d)``, lse
    ``(q, heads)``.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    # The query heads of one K/V head become more rows: without a mask the same attention, and K/V
    # are not copied.
    q = query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
    q = q.reshape(1, num_kv_heads, group * num_rows, head_size)
    k, v = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    part_lse: torch.Tensor | None = None
    if key.device.type == "cpu":
        # The op behind scaled_dot_product_attention on a CPU; called directly because it also
        # returns the lse.
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, scale=softmax_scale
        )
    else:
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)
        if want_lse:
            scores = q.float() @ k.float().transpose(-2, -1)
            part_lse = torch.logsumexp(scores * softmax_scale, -1)
    out = part.reshape(num_kv_heads, group, num_rows, head_size).permute(2, 0, 1, 3)
    if part_lse is not None:
        part_lse = part_lse.reshape(num_kv_heads, group, num_rows).permute(2, 0, 1)
        part_lse = part_lse.reshape(num_rows, num_heads)
    return out.reshape(num_rows, num_heads, head_size), part_lse
