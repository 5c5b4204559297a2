"""Eager oracles: attention over a block table, row by row, and norm and rotation of Q and K, as the
definitions say, in the dtype they are asked for.
"""

from typing import NamedTuple

import torch


class VisibleKeys(NamedTuple):
    """What one sequence sees, paged rows first, in the order of its table."""

    key: torch.Tensor  # (num_keys, num_kv_heads, head_size)
    value: torch.Tensor
    bias: torch.Tensor  # (num_keys, num_kv_heads), what is added to the scores
    segment: torch.Tensor  # (num_keys,), which query attends to a key


def visible_keys(
    seq: int,
    num_segments: int,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    key_current: torch.Tensor | None = None,
    value_current: torch.Tensor | None = None,
    current_start_loc: torch.Tensor | None = None,
    segment_blocks: torch.Tensor | None = None,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    block_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> VisibleKeys:
    """Copies in ``dtype``, scales multiplied in; arguments as of `paged_window_attention`."""
    block_size, num_kv_heads = key_pool.shape[1:3]
    seq_len = int(seq_lens[seq])
    position = torch.arange(seq_len, device=key_pool.device)
    entry = position // block_size
    block = block_table[seq].long()[entry]

    def rows_of(pool: torch.Tensor, scale: torch.Tensor | float | None) -> torch.Tensor:
        rows = pool[block, position % block_size].double()
        if isinstance(scale, torch.Tensor) and scale.dim() == 2:
            scale = scale[block].double().unsqueeze(-1)
        return (rows if scale is None else rows * scale).to(dtype)

    key, value = rows_of(key_pool, key_scale), rows_of(value_pool, value_scale)
    bias = torch.zeros(seq_len, num_kv_heads, dtype=dtype, device=key_pool.device)
    if block_bias is not None:
        of_head = block_bias if block_bias.dim() == 2 else block_bias.unsqueeze(1)
        bias += of_head[block].to(dtype)
    # The last query attends to everything from the partly filled block on.
    segment = torch.full_like(entry, num_segments - 1)
    if segment_blocks is not None:
        segment = torch.searchsorted(segment_blocks[seq].cumsum(0), entry, right=True)
        segment[entry >= seq_len // block_size] = num_segments - 1
    if key_current is not None and value_current is not None:
        own = slice(0, key_current.shape[0])
        if current_start_loc is not None:
            own = slice(*current_start_loc[seq : seq + 2].tolist())
        key = torch.cat([key, key_current[own].to(dtype)])
        value = torch.cat([value, value_current[own].to(dtype)])
        count = len(key) - seq_len
        bias = torch.cat([bias, bias.new_zeros(count, num_kv_heads)])
        segment = torch.cat([segment, segment.new_full((count,), num_segments - 1)])
    return VisibleKeys(key, value, bias, segment)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of ``(q, heads, d)`` over ``(k, kv_heads, d)``: out ``(q, heads, d)``, lse
    ``(q, heads)``.

    A row with no key gives out 0 and lse -inf.
    """
    group = query.shape[1] // key.shape[1]
    q = query.to(dtype).transpose(0, 1)
    k = key.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
    v = value.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * softmax_scale
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)) @ v
    return out.transpose(0, 1), lse.transpose(0, 1)


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
    segment_blocks: torch.Tensor | None = None,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    block_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The public function of that name, from its definition, computed and returned in ``dtype``.

    Returns:
        out ``(num_tokens, num_heads, head_size)`` and lse ``(num_tokens, num_heads)``, natural log.
    """
    queries = query if query.dim() == 4 else query.unsqueeze(0)
    num_segments, num_tokens, num_heads, head_size = queries.shape
    scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    group = num_heads // key_pool.shape[2]
    starts = [0, num_tokens] if query_start_loc is None else query_start_loc.tolist()
    outs, lses = [], []
    for s in range(len(seq_lens)):
        seen = visible_keys(
            s,
            num_segments,
            key_pool,
            value_pool,
            block_table,
            seq_lens,
            key_current,
            value_current,
            current_start_loc,
            segment_blocks,
            key_scale,
            value_scale,
            block_bias,
            dtype,
        )
        key, value, bias = (x.repeat_interleave(group, 1).transpose(0, 1) for x in seen[:3])
        rows = slice(starts[s], starts[s + 1])
        scores = bias.unsqueeze(1).repeat(1, rows.stop - rows.start, 1)
        for number, q in enumerate(queries[:, rows].to(dtype)):
            own = seen.segment == number
            scores[..., own] += q.transpose(0, 1) @ key[:, own].transpose(1, 2) * scale
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
        outs.append((p @ value).transpose(0, 1))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """RMSNorm over all heads of a token, then rotation of the pairs ``(2i, 2i + 1)``.

    Args:
        x: ``(num_tokens, num_heads, head_size)``.
        weight: ``(num_heads * head_size,)``; None leaves the norm out.
        cos: ``(num_tokens, head_size // 2)``; None leaves the rotation out.
        sin: as ``cos``.
        eps: added to the mean of the squares.
        dtype: of the computation and of the result, without a rounding between.
    """
    x = x.to(dtype)
    if weight is not None:
        mean = x.pow(2).mean((1, 2), keepdim=True)
        x = x * torch.rsqrt(mean + eps) * weight.to(dtype).view(x.shape[1:])
    if cos is not None and sin is not None:
        angle = torch.complex(cos.to(dtype), sin.to(dtype)).unsqueeze(1)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        x = torch.view_as_real(pairs * angle).flatten(-2)
    return x
