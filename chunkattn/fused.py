"""What a layer does to Q, K and V before it attends, as one operation: RMSNorm over all heads of Q
and K, rotary embedding, and the write of K and V into the pool.
"""

from typing import Any

import torch

from chunkattn import torch_backend
from chunkattn.checks import (
    INDEX_DTYPES,
    POOL_DTYPES,
    check_both,
    check_dense,
    check_device,
    check_key_value,
    check_pools,
    check_scales,
    check_shape,
    check_slots,
    check_tensor,
    check_writable,
    refuse,
    values_visible,
)
from chunkattn.kernels.arguments import FusedArguments, ScatterArguments
from chunkattn.ops import import_kernel, on_their_device, resolve_backend

FP8 = torch.float8_e4m3fn

_library = torch.library.Library("chunkattn", "FRAGMENT")
_library.define(
    "norm_rope_scatter(Tensor query, Tensor key, Tensor value, Tensor? query_weight, "
    "Tensor? key_weight, Tensor? cos, Tensor? sin, Tensor? sum_squares, Tensor(a!) query_out, "
    "Tensor(b!) key_pool, Tensor(c!) value_pool, Tensor slot_mapping, Tensor? key_scale, "
    "Tensor? value_scale, float eps, int tp_size, bool rotate_key, str backend) -> ()"
)


# -- backends --------------------------------------------------------------------------------------
@torch.library.impl(_library, "norm_rope_scatter", "CompositeExplicitAutograd")
@on_their_device
def _norm_rope_scatter(*arguments: Any) -> None:
    launch = _torch_launch if arguments[-1] == "torch" else import_kernel("fused").fused
    launch(FusedArguments(*arguments[:-1]))


torch.library.register_fake("chunkattn::norm_rope_scatter", lambda *_: None, lib=_library)


@torch.no_grad()
def _torch_launch(rows: FusedArguments) -> None:
    """`chunkattn.kernels.fused.fused` in torch."""
    sum_squares = rows.sum_squares
    if sum_squares is None:
        sum_squares = qk_sum_squares(rows.query, rows.key)
    query = _norm(rows.query, rows.query_weight, sum_squares[:, 0], rows.eps, rows.tp_size)
    key = _norm(rows.key, rows.key_weight, sum_squares[:, 1], rows.eps, rows.tp_size)
    if rows.cos is not None and rows.sin is not None:
        angles = torch.complex(rows.cos, rows.sin).unsqueeze(1)
        query = _rotate(query, angles, in_place=query is not rows.query)
        if rows.rotate_key:
            key = _rotate(key, angles, in_place=key is not rows.key)
    rows.query_out.copy_(query)
    key, value = key.to(rows.key.dtype), rows.value
    key_pool, value_pool = rows.key_pool, rows.value_pool
    if key_pool.dtype == FP8:
        blocks = rows.slot_mapping.clamp(min=0) // key_pool.shape[1]
        key, value = (
            torch_backend.to_e4m3(x, _of_rows(scale, blocks))
            for x, scale in ((key, rows.key_scale), (value, rows.value_scale))
        )
        # Bytes, because torch indexes no tensor of fp8.
        key, value, key_pool, value_pool = (
            x.view(torch.uint8) for x in (key, value, key_pool, value_pool)
        )
    written = ScatterArguments(
        key,
        value,
        key_extra=None,
        value_extra=None,
        key_pool=key_pool,
        value_pool=value_pool,
        slot_mapping=rows.slot_mapping,
        key_scale=None,
        value_scale=None,
    )
    torch_backend.scatter(written)


def _of_rows(scale: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor | float:
    """What the rows of these blocks are divided by."""
    if scale is None:
        return 1.0
    return scale[blocks, :, None] if scale.dim() == 2 else scale


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    sum_squares: torch.Tensor,
    eps: float,
    tp_size: int,
) -> torch.Tensor:
    if weight is None:
        return x
    inverse = torch.rsqrt(sum_squares / (tp_size * weight.numel()) + eps)
    normed = (x * inverse[:, None, None]).to(x.dtype)
    weight = weight.view(x.shape[1:])
    return normed.mul_(weight) if weight.dtype == x.dtype else normed * weight


def _rotate(x: torch.Tensor, angles: torch.Tensor, in_place: bool) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    pairs = pairs.mul_(angles) if in_place else pairs * angles
    return torch.view_as_real(pairs).flatten(-2)


# -- public functions ------------------------------------------------------------------------------
def norm_rope_scatter(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float = 1e-6,
    sum_squares: torch.Tensor | None = None,
    tp_size: int | None = None,
    rotate_key: bool = True,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    query_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise and rotate Q and K, write K and V into their slots in place, and return Q.

    A token's norm is that of an RMSNorm over all of its heads. It is rounded to the rows' dtype
    before it is multiplied by the weight and again after that (not where the weight has another
    dtype; torch's promotion then gives float32). The pairs ``(2i, 2i + 1)`` of each head are turned
    in float32. Not differentiable.

    Args:
        query: ``(num_tokens, num_heads, head_size)``, float32, float16 or bfloat16. Any stride but
            the last, which is 1: views of one QKV projection need no copy.
        key: ``(num_tokens, num_kv_heads, head_size)``, of ``query``'s dtype.
        value: as ``key``.
        query_weight: ``(num_heads * head_size,)``, a floating dtype, without gaps; None leaves
            ``query`` as it is.
        key_weight: ``(num_kv_heads * head_size,)``, as ``query_weight``.
        cos: ``(num_tokens, head_size // 2)`` float32: row ``t`` is of the angles of token ``t``,
            whichever table it comes from; see `rope_tables`. None rotates nothing.
        sin: as ``cos``.
        key_pool: ``(num_blocks, block_size, num_kv_heads, head_size)``; may be a strided view.
            Changed in place at the mapped slots, nowhere else. K and V are rounded to their own
            dtype first, so that the bytes are those of separate modules and `scatter_kv`. In
            float8_e4m3fn the pool gets ``x / scale``, clamped to what e4m3 holds, +-448 (infinities
            too); NaN stays NaN.
        value_pool: as ``key_pool``.
        slot_mapping: ``(num_tokens,)`` int32 or int64; ``slot = block_id * block_size + offset``. A
            slot below 0 writes no K and V; the row of Q is made all the same.
        eps: added to the mean of the squares.
        sum_squares: ``(num_tokens, 2)`` float32, the sums of `qk_sum_squares` added up over the
            ranks of a tensor-parallel group, each of which has its share of the heads. None: all
            heads are here.
        tp_size: ranks that ``sum_squares`` is of; given together with it.
        rotate_key: False writes K as it is after the norm, for models that rotate by the place in
            the window.
        key_scale: of an fp8 pool only: a number, a float32 tensor of one, or ``(num_blocks,
            num_kv_heads)`` float32, which is only read, at the blocks that are written: what
            `scatter_kv` sets must have been set before. None is 1.
        value_scale: as ``key_scale``, and of the same kind.
        query_out: ``query``'s shape and dtype, written in place; must not overlap an input. None
            allocates it.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        ``query_out``.

    Raises:
        TypeError, ValueError: an argument does not fit, found before anything is written. Slot
            values are looked at when the tensors are on the CPU, or with ``CHUNKATTN_DEBUG=1``.
        NotImplementedError: a head size that the named backend cannot do, another fp8 format than
            e4m3, or Triton and fp8 on a GPU below compute capability 8.9.
    """
    check_pools(key_pool, value_pool, (4,))
    num_blocks, block_size, num_kv_heads, head_size = key_pool.shape
    device = key_pool.device
    check_tensor("query", query, (3,), POOL_DTYPES)
    num_tokens, num_heads, _ = query.shape
    check_shape(
        "query", query, (num_tokens, num_heads, head_size), "the last is the pool's head size"
    )
    if num_heads == 0 or num_heads % num_kv_heads:
        raise refuse(
            "query", f"have a multiple of the pool's {num_kv_heads} K/V heads", f"{num_heads} heads"
        )
    check_key_value("", key, value, num_kv_heads, head_size)
    check_shape("key", key, (num_tokens, num_kv_heads, head_size), "as many rows as `query`")
    if key.dtype != query.dtype:
        raise TypeError(f"`key` must have the dtype of `query`, {query.dtype}, got {key.dtype}")
    for name, weight, heads in (
        ("query_weight", query_weight, num_heads),
        ("key_weight", key_weight, num_kv_heads),
    ):
        if weight is not None:
            check_tensor(name, weight, (1,), POOL_DTYPES)
            check_shape(name, weight, (heads * head_size,), "one for each element of a token")
            check_dense(name, weight)
    check_both(cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            check_tensor(name, table, (2,), (torch.float32,))
            if head_size % 2:
                raise refuse(name, f"be None for an odd head size, {head_size}", "a tensor")
            check_shape(name, table, (num_tokens, head_size // 2), "one angle a token and pair")
            check_dense(name, table)
    check_both(sum_squares=sum_squares, tp_size=tp_size)
    if sum_squares is not None:
        if query_weight is None or key_weight is None:
            raise refuse("sum_squares", "be None without both weights", "a tensor")
        check_tensor("sum_squares", sum_squares, (2,), (torch.float32,))
        check_shape("sum_squares", sum_squares, (num_tokens, 2), "one of Q and one of K a token")
        if not isinstance(tp_size, int) or tp_size < 1:
            raise refuse("tp_size", "be a positive int", tp_size)
    check_tensor("slot_mapping", slot_mapping, (1,), INDEX_DTYPES)
    check_shape("slot_mapping", slot_mapping, (num_tokens,), "one slot a row of `key`")
    if query_out is not None:
        check_tensor("query_out", query_out, (3,), (query.dtype,))
        check_shape("query_out", query_out, tuple(query.shape), "that of `query`")
    check_writable(key_pool=key_pool, value_pool=value_pool, query_out=query_out)
    key_scale, value_scale = check_scales(key_pool, key_scale, value_scale)
    check_device(
        device,
        query=query,
        key=key,
        value=value,
        query_weight=query_weight,
        key_weight=key_weight,
        cos=cos,
        sin=sin,
        value_pool=value_pool,
        slot_mapping=slot_mapping,
        sum_squares=sum_squares,
        query_out=query_out,
    )
    backend = resolve_backend(backend, device, head_size, key_pool.dtype)
    if values_visible(device):
        check_slots(slot_mapping, num_blocks * block_size)

    if query_out is None:
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    torch.ops.chunkattn.norm_rope_scatter(
        query,
        key,
        value,
        query_weight,
        key_weight,
        cos,
        sin,
        sum_squares,
        query_out,
        key_pool,
        value_pool,
        slot_mapping,
        key_scale,
        value_scale,
        float(eps),
        tp_size or 1,
        rotate_key,
        backend,
    )
    return query_out


def qk_sum_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """This rank's sums of squares of Q and K, to be added up over a tensor-parallel group.

    Args:
        query: ``(num_tokens, num_heads, head_size)``, the heads of this rank.
        key: ``(num_tokens, num_kv_heads, head_size)``.

    Returns:
        ``(num_tokens, 2)`` float32: one all-reduce for both.
    """
    # A seventh of the time of x.pow(2).sum(), which keeps the squares.
    norms = [torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32) for x in (query, key)]
    return torch.stack(norms, -1).square_()


def rope_tables(*freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``cos`` and ``sin`` of `norm_rope_scatter`: once a forward, for all of its layers.

    Args:
        freqs: complex tables ``(rows, ..., head_size // 2)`` in the order of the tokens, e.g. the
            3-D table of the video tokens, then the rows of the action and of the state table.

    Returns:
        Two tensors ``(all rows, head_size // 2)`` float32.
    """
    table = torch.cat([part.reshape(-1, part.shape[-1]) for part in freqs])
    return table.real.float().contiguous(), table.imag.float().contiguous()
