"""The public functions: they check their arguments, then call the op (`ops`), which trusts them."""

import math

import torch

from chunkattn import flash_backend
from chunkattn.checks import (
    INDEX_DTYPES,
    POOL_DTYPES,
    check_block_bias,
    check_block_values,
    check_both,
    check_device,
    check_key_value,
    check_pools,
    check_scales,
    check_segment_blocks,
    check_shape,
    check_slots,
    check_softmax_scale,
    check_start_loc,
    check_start_loc_values,
    check_table_values,
    check_tensor,
    check_writable,
    refuse,
    values_visible,
)
from chunkattn.ops import resolve_backend


def scatter_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    backend: str = "auto",
) -> None:
    """Write K and V rows into the slots of a paged pool, in place. No gradient is tracked.

    Args:
        key: ``(num_tokens, num_kv_heads, head_size)``, float32, float16 or bfloat16; rows may be
            strided.
        value: as ``key``.
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``, or flat ``(num_slots,
            num_kv_heads, head_size)``; may be a strided view. Changed in place at the mapped slots,
            nowhere else. Another floating dtype than ``key``'s is converted with torch's rounding.
        value_pool: as ``key_pool``.
        slot_mapping: ``(num_tokens,)`` int32 or int64; ``slot = block_id * block_size + offset``. A
            slot below 0 skips its row. The block size is read off the pool.
        key_scale: only for pools of ``torch.float8_e4m3fn``, which hold ``clamp(row / scale, -448,
            448)`` (NaN stays NaN). A number, or a float32 tensor of one: the scale of all rows;
            None is 1. Or ``(num_blocks, num_kv_heads)`` float32, *changed in place*: a call that
            writes a block's first slot sets the block's scales, so that the largest finite value
            that it writes there becomes 448, at least ``2**-20``; a call that adds rows to a block
            keeps them. Then the pool must not be flat, and both scales must be of this kind.
        value_scale: as ``key_scale``.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``; ``"fa3"`` and ``"fa2"`` write as
            ``"auto"`` does.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written. Slot
            values are looked at when the tensors are on the CPU, or with ``CHUNKATTN_DEBUG=1``.
        NotImplementedError: a head size, or an fp8 pool, that the named backend cannot do.
    """
    check_pools(key_pool, value_pool, (3, 4))
    heads, head_size = key_pool.shape[-2:]
    check_key_value("", key, value, heads, head_size)
    check_tensor("slot_mapping", slot_mapping, (1,), INDEX_DTYPES)
    check_shape("slot_mapping", slot_mapping, (key.shape[0],), "one slot a row of `key`")
    check_device(
        key_pool.device, key=key, value=value, value_pool=value_pool, slot_mapping=slot_mapping
    )
    check_writable(key_pool=key_pool, value_pool=value_pool)
    key_scale, value_scale = check_scales(key_pool, key_scale, value_scale)
    if key_scale is not None and value_scale is not None:
        check_writable(key_scale=key_scale, value_scale=value_scale)
    if backend in flash_backend.NAMES:  # these only attend
        resolve_backend(backend, key_pool.device, head_size)
        backend = "auto"
    backend = resolve_backend(backend, key_pool.device, head_size, key_pool.dtype)
    if values_visible(key_pool.device):
        check_slots(slot_mapping, math.prod(key_pool.shape[:-2]))
    torch.ops.chunkattn.scatter_kv(
        key, value, key_pool, value_pool, slot_mapping, key_scale, value_scale, backend
    )


def paged_window_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    key_current: torch.Tensor | None = None,
    value_current: torch.Tensor | None = None,
    current_start_loc: torch.Tensor | None = None,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    segment_blocks: torch.Tensor | None = None,
    block_bias: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over the resident blocks of a window, and over rows that are not in the pool.

    Not causal: every query row of a sequence sees all of its ``seq_lens`` paged rows, then all of
    its current rows. Whatever lies in other slots, in the padding of ``block_table`` or behind
    ``seq_lens`` has no effect. Not differentiable: no gradient is tracked.

    Args:
        query: ``(num_tokens, num_heads, head_size)``, float32, float16 or bfloat16, the pool's
            dtype (any of them for an fp8 pool). Any stride but the last, which is 1. The sequences'
            rows lie one after the other. With ``segment_blocks`` there is one query for each
            segment of the keys: ``(num_segments, num_tokens, num_heads, head_size)``.
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``; may be a strided view.
            ``num_heads % num_kv_heads == 0``: query head ``h`` reads K/V head ``h // (num_heads //
            num_kv_heads)``.
        value_pool: as ``key_pool``.
        block_table: ``(num_seqs, max_blocks)`` int32 or int64: each sequence's blocks in order.
            Only the first ``ceil(seq_len / block_size)`` entries of a row are read.
        seq_lens: ``(num_seqs,)`` int32 or int64: visible paged rows of each sequence; may be 0.
        query_start_loc: ``(num_seqs + 1,)`` int32 or int64: first query row of each sequence, then
            ``num_tokens``. None: one sequence over all rows.
        softmax_scale: finite, not negative; None is ``head_size ** -0.5``.
        key_current: ``(num_current, num_kv_heads, head_size)``: rows visible after the paged ones.
        value_current: as ``key_current``; both or neither.
        current_start_loc: ``(num_seqs + 1,)`` as ``query_start_loc``, over the rows of
            ``key_current``.
        key_scale: only for pools of ``torch.float8_e4m3fn``: a number, a float32 tensor of one, or
            ``(num_blocks, num_kv_heads)`` float32, not negative; None is 1. A stored row times its
            scale is the row. Only visible blocks are looked at.
        value_scale: as ``key_scale``.
        out: ``(num_tokens, num_heads, head_size)`` of ``query``'s dtype, written in place; None
            allocates it.
        return_lse: also return the natural log of the softmax denominators.
        backend: ``"auto"``, ``"torch"``, ``"triton"``, or, where installed, ``"fa3"`` or
            ``"fa2"``, which need finite values in the dead slots of visible blocks.
        segment_blocks: ``(num_seqs, num_segments - 1)`` int32 or int64, for up to three queries:
            how many blocks of a sequence's table, from the first on, each query but the last
            attends to. The last one attends to the rest: blocks, the partly filled block, the
            current rows. All of them are one softmax. For keys whose position is relative to the
            window: the pool holds them unrotated, each query is rotated for its segment.
        block_bias: ``(num_blocks, num_kv_heads)`` or ``(num_blocks,)`` float32, finite (-1e30 hides
            a block): added to the scores (after ``softmax_scale``) of a block's keys; current rows
            have none.

    Returns:
        ``out``, or ``(out, lse)`` with ``lse`` ``(num_tokens, num_heads)`` float32. A row that sees
        no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit. Lengths and block ids are looked at when
            the tensors are on the CPU, or with ``CHUNKATTN_DEBUG=1``; on a GPU that would cost a
            host sync.
        NotImplementedError: a head size, dtype, block size, device, layout, segments or a bias that
            the named backend cannot do.
        MissingDependencyError: the named backend needs a package that is not installed.
    """
    check_pools(key_pool, value_pool, (4,))
    num_blocks, block_size, num_kv_heads, head_size = key_pool.shape
    device = key_pool.device
    check_tensor("query", query, (3,) if segment_blocks is None else (4,), POOL_DTYPES)
    if query.dtype != key_pool.dtype and key_pool.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"`query` must have the dtype of `key_pool`, {key_pool.dtype}, got {query.dtype}"
        )
    num_tokens, num_heads, _ = query.shape[-3:]
    check_shape("query", query, (*query.shape[:-1], head_size), "the last is the pool's head size")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise refuse(
            "query", f"have a multiple of the pool's {num_kv_heads} K/V heads", f"{num_heads} heads"
        )
    check_tensor("seq_lens", seq_lens, (1,), INDEX_DTYPES)
    num_seqs = seq_lens.shape[0]
    if num_seqs == 0:
        raise refuse("seq_lens", "name at least one sequence", "shape (0,)")
    check_tensor("block_table", block_table, (2,), INDEX_DTYPES)
    check_shape(
        "block_table",
        block_table,
        (num_seqs, block_table.shape[1]),
        "one row a sequence of `seq_lens`",
    )
    if query_start_loc is not None:
        check_start_loc("query_start_loc", query_start_loc, num_seqs)
    elif num_seqs > 1:
        raise refuse("query_start_loc", f"be given for {num_seqs} sequences", None)
    check_both(key_current=key_current, value_current=value_current)
    if key_current is not None and value_current is not None:
        check_key_value("_current", key_current, value_current, num_kv_heads, head_size)
        if key_current.dtype != query.dtype:
            raise TypeError(
                f"`key_current` must have the dtype of `query`, {query.dtype}, "
                f"got {key_current.dtype}"
            )
        if current_start_loc is not None:
            check_start_loc("current_start_loc", current_start_loc, num_seqs)
        elif num_seqs > 1:
            raise refuse("current_start_loc", f"be given for {num_seqs} sequences", None)
    elif current_start_loc is not None:
        got = type(current_start_loc).__name__
        raise refuse("current_start_loc", "be None without `key_current`", got)
    if out is not None:
        check_tensor("out", out, (3,), (query.dtype,))
        check_shape("out", out, tuple(query.shape[-3:]), "that of `query`")
        check_writable(out=out)
    if softmax_scale is None:
        softmax_scale = head_size**-0.5
    check_softmax_scale(softmax_scale)
    if segment_blocks is not None:
        check_segment_blocks(segment_blocks, query, num_seqs)
    if block_bias is not None:
        block_bias = check_block_bias(block_bias, key_pool)
    check_device(
        device,
        query=query,
        value_pool=value_pool,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        key_current=key_current,
        value_current=value_current,
        current_start_loc=current_start_loc,
        segment_blocks=segment_blocks,
        block_bias=block_bias,
        out=out,
    )
    key_scale, value_scale = check_scales(key_pool, key_scale, value_scale)
    plain = segment_blocks is None and block_bias is None
    if backend in flash_backend.NAMES and not plain:
        name = "block_bias" if segment_blocks is None else "segment_blocks"
        raise NotImplementedError(f"`{name}` must be None for backend {backend!r}")
    num_query_rows = num_tokens * (num_heads // num_kv_heads)
    backend = resolve_backend(
        backend,
        device,
        head_size,
        key_pool.dtype,
        block_size,
        num_query_rows if plain else None,
    )
    if values_visible(device):
        if query_start_loc is not None:
            check_start_loc_values("query_start_loc", query_start_loc, num_tokens)
        if current_start_loc is not None and key_current is not None:
            check_start_loc_values("current_start_loc", current_start_loc, key_current.shape[0])
        check_table_values(block_table, seq_lens, num_blocks, block_size)
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            if scale is not None and scale.dim() == 2:
                check_block_values(name, scale, block_table, seq_lens, block_size)
        if block_bias is not None:
            name, visible = "block_bias", (block_table, seq_lens, block_size)
            check_block_values(name, block_bias, *visible, negative=True)
        if segment_blocks is not None and bool((segment_blocks < 0).any()):
            raise refuse("segment_blocks", "not be negative", segment_blocks.tolist())

    if query_start_loc is None:
        query_start_loc = _two_ends(num_tokens, device)
    if key_current is not None and current_start_loc is None:
        current_start_loc = _two_ends(key_current.shape[0], device)
    if out is None:
        out = torch.empty(query.shape[-3:], dtype=query.dtype, device=device)
    lse = (
        torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
        if return_lse
        else None
    )
    # Kernels read these few integers as dense vectors; the table and the pools by their strides.
    torch.ops.chunkattn.paged_window_attention(
        query,
        key_pool,
        value_pool,
        block_table,
        seq_lens.contiguous(),
        query_start_loc.contiguous(),
        key_current,
        value_current,
        current_start_loc if current_start_loc is None else current_start_loc.contiguous(),
        segment_blocks if segment_blocks is None else segment_blocks.contiguous(),
        key_scale,
        value_scale,
        block_bias,
        out,
        lse,
        float(softmax_scale),
        backend,
    )
    return out if lse is None else (out, lse)


def _two_ends(num_rows: int, device: torch.device) -> torch.Tensor:
    """``[0, num_rows]`` made on the device: no copy from pageable memory, hence no sync."""
    return torch.arange(0, 2, dtype=torch.int32, device=device) * num_rows
