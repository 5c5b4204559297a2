"""Eager oracles: attention over a block table, row by row, and norm and rotation of Q and K, as the
definitions say, in the dtype they are asked for.
"""

import torch


def visible_rows(pool: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The ``seq_len`` rows that one sequence sees, ``(seq_len, num_kv_heads, head_size)``, as a
    copy.

    Args:
        pool: ``(num_blocks, block_size, num_kv_heads, head_size)``.
        block_table: ``(max_blocks,)`` of one sequence.
    """
    block_size = pool.shape[1]
    position = torch.arange(seq_len, device=pool.device)
    return pool[block_table.long()[position // block_size], position % block_size]


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
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The public function of that name, from its definition, computed and returned in ``dtype``.

    Returns:
        out ``(num_tokens, num_heads, head_size)`` and lse ``(num_tokens, num_heads)``, natural log.
    """
    num_seqs = seq_lens.shape[0]
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    starts = [0, query.shape[0]] if query_start_loc is None else query_start_loc.tolist()
    if key_current is not None:
        current = (
            [0, key_current.shape[0]] if current_start_loc is None else current_start_loc.tolist()
        )
    outs, lses = [], []
    for s in range(num_seqs):
        key = visible_rows(key_pool, block_table[s], int(seq_lens[s])).to(dtype)
        value = visible_rows(value_pool, block_table[s], int(seq_lens[s])).to(dtype)
        if key_current is not None and value_current is not None:
            key = torch.cat([key, key_current[current[s] : current[s + 1]].to(dtype)])
            value = torch.cat([value, value_current[current[s] : current[s + 1]].to(dtype)])
        out, lse = dense_attention(query[starts[s] : starts[s + 1]], key, value, scale, dtype)
        outs.append(out)
        lses.append(lse)
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
