"""What the test of an attention kernel needs: poisoned inputs, and a judge.

    case = make_case(seq_lens=[33], query_lens=[5], block_size=16, dtype=torch.bfloat16)
    check_attention(case, backend="triton")

Whatever a kernel must not look at is NaN here: dead slots, blocks that no table names, rows before
and after every tensor. `judge` bounds the error in low precision by the error that torch's own
attention makes on the same inputs; no absolute tolerance would notice a few lost rows among
thousands.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chunkattn import functional

if TYPE_CHECKING:
    from chunkattn.kernels.reference import VisibleKeys

LAYOUTS = ("separate", "interleaved", "slots", "padded", "odd")
"""Pools of `make_pools`: K and V in buffers of their own; in turns of blocks in one buffer; in
turns of slots; cut out of larger rows; of one head whose stride is odd.
"""

GUARD_ROWS = 128
"""Poisoned rows on each side of a tensor: as many as the largest tile reads or writes at once."""

Pools = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]


def make_rows(
    num_rows: int, *shape: int, dtype: torch.dtype, device: str = "cpu", padded: bool = False
) -> torch.Tensor:
    """``(num_rows, *shape)`` of NaN, between `GUARD_ROWS` rows of NaN in the same storage.

    Args:
        num_rows: rows of the result.
        shape: the other dimensions.
        dtype: a floating dtype.
        device: where to put it.
        padded: leave gaps between the rows and between the heads too; the last stride stays 1.
    """
    *outer, last = shape
    if padded:
        outer, last = [size + 1 for size in outer], last + 8
    size = (num_rows + 2 * GUARD_ROWS, *outer, last)
    rows = torch.full(size, math.nan, dtype=dtype, device=device)
    return rows[(slice(GUARD_ROWS, -GUARD_ROWS), *(slice(size) for size in shape))]


def make_pools(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    layout: str = "separate",
    poison: float = math.nan,
) -> Pools:
    """Pools filled with ``poison``, between at least `GUARD_ROWS` poisoned slots.

    Args:
        num_blocks: blocks of each pool.
        block_size: tokens of a block.
        num_kv_heads: heads; must be 1 for layout ``"odd"``.
        head_size: elements of a head.
        dtype: of the pools.
        device: where to put them.
        layout: one of `LAYOUTS`.
        poison: what dead memory holds.

    Returns:
        ``key_pool`` and ``value_pool``, ``(num_blocks, block_size, num_kv_heads, head_size)``, and
        the buffers that they are views of.
    """
    slot = (num_kv_heads, head_size)
    sizes = {
        "separate": (block_size, *slot),
        "interleaved": (2, block_size, *slot),
        "slots": (block_size, 2, *slot),
        "padded": (block_size, num_kv_heads + 1, head_size + 8),
        "odd": (block_size, *slot),
    }[layout]
    count = 1 if layout in ("interleaved", "slots") else 2
    guard = -(-GUARD_ROWS // block_size)
    buffers = tuple(
        torch.full((num_blocks + 2 * guard, *sizes), poison, dtype=dtype, device=device)
        for _ in range(count)
    )
    inner = [buffer[guard:-guard] for buffer in buffers]
    if layout == "interleaved":
        key_pool, value_pool = inner[0][:, 0], inner[0][:, 1]
    elif layout == "slots":
        key_pool, value_pool = inner[0][:, :, 0], inner[0][:, :, 1]
    else:
        key_pool, value_pool = (view[:, :, :num_kv_heads, :head_size] for view in inner)
    if layout == "odd":
        assert num_kv_heads == 1
        shape, strides = key_pool.shape, (*key_pool.stride()[:2], 7, 1)
        offset = key_pool.storage_offset()
        key_pool, value_pool = (
            pool.as_strided(shape, strides, offset) for pool in (key_pool, value_pool)
        )
    return key_pool, value_pool, buffers


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Arguments of `chunkattn.paged_window_attention`, and how exact a float32 result must be."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None = None
    key_current: torch.Tensor | None = None
    value_current: torch.Tensor | None = None
    current_start_loc: torch.Tensor | None = None
    segment_blocks: torch.Tensor | None = None
    key_scale: torch.Tensor | float | None = None
    value_scale: torch.Tensor | float | None = None
    block_bias: torch.Tensor | None = None
    softmax_scale: float | None = None
    fp32_atol: float = 2e-6
    buffers: tuple[torch.Tensor, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """By name, without those that are not arguments."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name not in _NO_ARGUMENTS}

    def scale(self) -> float:
        """The softmax scale, default resolved."""
        scale = self.softmax_scale
        return float(self.query.shape[-1]) ** -0.5 if scale is None else scale

    def visible(self, seq: int) -> "VisibleKeys":
        """Copies of what sequence ``seq`` sees, in the query's dtype."""
        from chunkattn.kernels.reference import visible_keys

        arguments = self.arguments()
        for name in ("query", "query_start_loc", "softmax_scale"):
            del arguments[name]
        num_segments = self.query.shape[0] if self.query.dim() == 4 else 1
        return visible_keys(seq, num_segments, **arguments, dtype=self.query.dtype)

    def query_rows(self, seq: int) -> slice:
        """Rows of ``query`` that belong to sequence ``seq``."""
        if self.query_start_loc is None:
            return slice(0, self.query.shape[-3])
        return slice(*self.query_start_loc[seq : seq + 2].tolist())


_NO_ARGUMENTS = ("buffers", "fp32_atol")


def make_case(
    *,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    current_lens: Sequence[int] | None = None,
    block_size: int = 16,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "separate",
    index_dtype: torch.dtype = torch.int32,
    score_shift: float = 0.0,
    softmax_scale: float | None = None,
    poison: float = math.nan,
    seed: int = 0,
    segment_blocks: Sequence[Sequence[int]] | None = None,
    fp8: bool = False,
    biased: bool = False,
) -> AttentionCase:
    """Random inputs, drawn in ``dtype``, in which everything that is not visible is ``poison``.

    Block ids are in random order. Block 0 is dead, and the table's padding names it.

    Args:
        seq_lens: visible paged rows of each sequence.
        query_lens: query rows of each sequence.
        current_lens: current rows of each sequence; None leaves those arguments out.
        block_size: tokens of a block.
        num_heads: query heads.
        num_kv_heads: K/V heads.
        head_size: elements of a head.
        dtype: of all rows.
        device: of all tensors.
        layout: of the pools, one of `LAYOUTS`; ``"padded"`` leaves gaps in the other rows too.
        index_dtype: int32 or int64.
        score_shift: every visible score is about this much; a key of zeros would score 0.
        softmax_scale: None is ``head_size ** -0.5``.
        poison: what dead slots of the pools hold.
        seed: of the random numbers, which do not depend on the device.
        segment_blocks: for each sequence, blocks that each query but the last attends to.
        fp8: pools of e4m3 with a scale for each block and head, from 2**-4 to 2**4; NaN where
            nothing may be looked at. ``dtype`` is that of the query and of the current rows.
        biased: a bias for each block and head, NaN where nothing may be looked at.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    padded = layout == "padded"

    def draw(num_rows: int, heads: int, first: float | None = None) -> torch.Tensor:
        rows = make_rows(num_rows, heads, head_size, dtype=dtype, device=device, padded=padded)
        drawn = torch.randn(num_rows, heads, head_size, generator=generator)
        if first is not None and score_shift:
            drawn[..., 0] = first
        return rows.copy_(drawn)

    first = math.sqrt(abs(score_shift) / scale) if score_shift else 0.0
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 2
    key_pool, value_pool, buffers = make_pools(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        dtype=torch.float8_e4m3fn if fp8 else dtype,
        device=device,
        layout=layout,
        poison=poison,
    )
    ids = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    table = torch.zeros(len(seq_lens), max(counts) + 1, dtype=index_dtype)
    for seq, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        key = draw(seq_len, num_kv_heads, math.copysign(first, score_shift))
        value = draw(seq_len, num_kv_heads)
        for i in range(count):
            table[seq, i] = block = next(ids)
            rows = slice(i * block_size, min((i + 1) * block_size, seq_len))
            key_pool[block, : rows.stop - rows.start] = key[rows].to(key_pool.dtype)
            value_pool[block, : rows.stop - rows.start] = value[rows].to(key_pool.dtype)

    def starts(lens: Sequence[int]) -> torch.Tensor:
        sums = np.cumsum([0, *lens])
        return torch.tensor(sums, dtype=index_dtype, device=device)

    key_current = value_current = current_start_loc = None
    if current_lens is not None:
        key_current = draw(sum(current_lens), num_kv_heads, math.copysign(first, score_shift))
        value_current = draw(sum(current_lens), num_kv_heads)
        current_start_loc = starts(current_lens)
    num_tokens, num_segments = sum(query_lens), 1
    if segment_blocks is not None:
        num_segments += len(segment_blocks[0])
    query = draw(num_segments * num_tokens, num_heads, first)
    if segment_blocks is not None:
        query = query.unflatten(0, (num_segments, num_tokens))

    def per_block() -> torch.Tensor:
        drawn = torch.randn(num_blocks, num_kv_heads, generator=generator)
        drawn[[b for b in range(num_blocks) if b not in set(table.flatten().tolist())]] = math.nan
        drawn[0] = math.nan
        return drawn.to(device)

    return AttentionCase(
        query=query,
        key_pool=key_pool,
        value_pool=value_pool,
        block_table=table.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=index_dtype, device=device),
        query_start_loc=starts(query_lens),
        key_current=key_current,
        value_current=value_current,
        current_start_loc=current_start_loc,
        segment_blocks=None
        if segment_blocks is None
        else torch.tensor(segment_blocks, dtype=index_dtype, device=device),
        key_scale=per_block().clamp(-4, 4).exp2() if fp8 else None,
        value_scale=per_block().clamp(-4, 4).exp2() if fp8 else None,
        block_bias=per_block() if biased else None,
        softmax_scale=softmax_scale,
        # Scales of fp8 make the values, and what rounding leaves of them, up to 16 times as large.
        fp32_atol=2e-5 if score_shift or fp8 else 2e-6,
        buffers=buffers,
    )


def with_needles(case: AttentionCase, positions: Sequence[int]) -> AttentionCase:
    """``case`` of one sequence with a query row ``2 * key`` for each of these visible positions.

    Such a row puts nearly all of its weight on its key, so that one lost key is seen whatever
    the length is. Needs a head size of 64 or more.
    """
    from chunkattn.kernels.reference import dense_attention

    assert case.seq_lens.shape[0] == 1
    key, value, *_ = case.visible(0)
    query = make_rows(
        len(positions), *case.query.shape[1:], dtype=key.dtype, device=str(key.device)
    )
    needles = 2 * key[torch.tensor(positions, device=key.device)]
    query.copy_(needles.repeat_interleave(query.shape[1] // key.shape[1], 1))
    _, lse = dense_attention(query, key, value, case.scale(), torch.float64)
    score = 2 * needles.double().pow(2).sum(-1) / 4 * case.scale()
    weight = torch.exp(score.repeat_interleave(query.shape[1] // key.shape[1], 1) - lse)
    assert weight.min() > 0.9, f"a needle has only {weight.min():.2f} of its row's weight"
    return dataclasses.replace(case, query=query, query_start_loc=None, fp32_atol=1e-5)


def run_attention(case: AttentionCase, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the public function and return out and lse.

    Raises:
        AssertionError: it returned another ``out``, wrote beside it, or changed the pools.
    """
    padded = case.query.stride(-2) != case.query.shape[-1]
    rows, *shape = case.query.shape[-3:]
    out = make_rows(
        rows, *shape, dtype=case.query.dtype, device=str(case.query.device), padded=padded
    )
    before = [snapshot(buffer) for buffer in case.buffers]
    result = functional.paged_window_attention(
        **case.arguments(), out=out, return_lse=True, backend=backend
    )
    assert isinstance(result, tuple)
    assert result[0] is out
    for buffer, old in zip(case.buffers, before, strict=True):
        assert torch.equal(snapshot(buffer), old), "the pools changed"
    assert_nan_beside("out", out)
    return result


def assert_nan_beside(name: str, rows: torch.Tensor) -> None:
    """The memory of `make_rows` is still NaN where ``rows`` are not."""
    whole = rows.as_strided((rows.untyped_storage().nbytes() // rows.itemsize,), (1,), 0).clone()
    whole.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(math.nan)
    assert whole.isnan().all(), f"something was written beside `{name}`"


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes, in which NaN equals NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def baseline(case: AttentionCase) -> torch.Tensor:
    """What torch's attention makes of the visible rows in the query's dtype."""
    queries = case.query if case.query.dim() == 4 else case.query.unsqueeze(0)
    out = torch.zeros_like(queries[0], memory_format=torch.contiguous_format)
    for seq in range(case.seq_lens.shape[0]):
        rows = case.query_rows(seq)
        key, value, bias, segment = case.visible(seq)
        if rows.start == rows.stop or not key.shape[0]:
            continue
        group = queries.shape[2] // key.shape[1]
        query = queries[:, rows]
        if len(queries) > 1 or case.block_bias is not None:
            # One product of longer rows: a key lies in the columns of its query, and the bias, as a
            # sum of two numbers, is multiplied by ones.
            own = [key.where((segment == i)[:, None, None], 0) for i in range(len(queries))]
            high = bias.double() / case.scale()
            high, low = high.to(key.dtype), (high - high.to(key.dtype).double()).to(key.dtype)
            key = torch.cat([*own, high.unsqueeze(-1), low.unsqueeze(-1)], -1)
            ones = query.new_ones(*query.shape[1:-1], 2)
            query = torch.cat([*query, ones], -1).unsqueeze(0)
            # Values as wide as keys, or torch takes another path, which rounds less.
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
            if key.shape[-1] > 256:  # where that path ends on a GPU, but not on a CPU
                query, key, value = query.cpu(), key.cpu(), value.cpu()
        out[rows] = (
            torch.nn.functional.scaled_dot_product_attention(
                query[0].transpose(0, 1).unsqueeze(0),
                key.repeat_interleave(group, 1).transpose(0, 1).unsqueeze(0),
                value.repeat_interleave(group, 1).transpose(0, 1).unsqueeze(0),
                scale=case.scale(),
            )[0]
            .transpose(0, 1)[..., : out.shape[-1]]
            .to(out.device)
        )
    return out


def judge(case: AttentionCase, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Compare a result with the definition in float64.

    float32 must be within the case's ``fp32_atol``. In low precision the error is bounded by the
    error of `baseline`: twice its maximum plus 1e-5, 1.5 times its mean, 1.25 times its root mean
    square. The lse must be within 1e-5 in float32 (a millionth of it where that is more), 1e-3 in
    low precision, and -inf where no key is.

    Raises:
        AssertionError: it is further off; the message says where the largest error is.
    """
    from chunkattn.kernels.reference import paged_window_attention

    arguments = case.arguments()
    expected, expected_lse = paged_window_attention(**arguments, dtype=torch.float64)
    assert out.shape == expected.shape, f"out must have shape {tuple(expected.shape)}"
    assert out.dtype == case.query.dtype
    error = (out.double() - expected).abs()
    exact = case.query.dtype == torch.float32
    if error.numel():
        where = np.unravel_index(int(error.nan_to_num(math.inf).argmax()), error.shape)
        at = f"at (row, head, element) {tuple(int(i) for i in where)}"
        if exact:
            _bounded("largest error of out", error.max(), case.fp32_atol, at)
        else:
            theirs = (baseline(case).double() - expected).abs()
            _bounded("largest error of out", error.max(), 2 * theirs.max() + 1e-5, at)
            _bounded("mean error of out", error.mean(), 1.5 * theirs.mean(), at)
            rms, their_rms = error.pow(2).mean().sqrt(), theirs.pow(2).mean().sqrt()
            _bounded("root mean square error of out", rms, 1.25 * their_rms, at)
    if lse is not None and lse.numel():
        assert lse.shape == expected_lse.shape, f"lse must have shape {tuple(expected_lse.shape)}"
        assert lse.dtype == torch.float32
        empty = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty), "lse must be -inf exactly where no key is"
        lse_error = (lse.double() - expected_lse).masked_fill(empty, 0.0).abs()
        # float32 cannot tell larger values apart any better than that.
        largest = float(expected_lse.masked_fill(empty, 0.0).abs().max())
        bound = max(1e-5, 1e-6 * largest) if exact else 1e-3
        _bounded("largest error of lse", lse_error.max(), bound, "")


def _bounded(what: str, error: torch.Tensor, bound: torch.Tensor | float, at: str) -> None:
    # Written so that NaN fails.
    assert float(error) <= float(bound), (
        f"{what} is {float(error):.3g}, must be at most {float(bound):.3g} {at}"
    )


def check_attention(case: AttentionCase, backend: str) -> torch.Tensor:
    """`run_attention`, then `judge`. Returns out."""
    out, lse = run_attention(case, backend)
    judge(case, out, lse)
    return out


def check_scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    pools: Pools,
    slot_mapping: torch.Tensor,
    backend: str,
    *,
    flat: bool = False,
) -> None:
    """Call `chunkattn.scatter_kv` and compare every byte of the pools with row-by-row copies.

    Args:
        key: ``(num_tokens, num_kv_heads, head_size)``.
        value: as ``key``.
        pools: from `make_pools`; changed in place.
        slot_mapping: ``(num_tokens,)``.
        backend: as the public function's.
        flat: hand the pools over as ``(num_slots, num_kv_heads, head_size)``.
    """
    key_pool, value_pool, buffers = pools
    block_size = key_pool.shape[1]
    expected = [buffer.clone() for buffer in buffers]
    for i, pool in enumerate((key_pool, value_pool)):
        target = expected[i if len(expected) == 2 else 0].as_strided(
            pool.shape, pool.stride(), pool.storage_offset()
        )
        for row, slot in zip((key, value)[i], slot_mapping.tolist(), strict=True):
            if slot >= 0:
                target[slot // block_size, slot % block_size] = row.to(pool.dtype)
    if flat:
        key_pool, value_pool = key_pool.flatten(0, 1), value_pool.flatten(0, 1)
        assert key_pool.data_ptr() == pools[0].data_ptr(), "this layout has no flat view"
    functional.scatter_kv(key, value, key_pool, value_pool, slot_mapping, backend=backend)
    for name, buffer, wanted in zip(("key", "value"), buffers, expected, strict=False):
        wrong = (snapshot(buffer) != snapshot(wanted)).sum()
        assert wrong == 0, f"{wrong} bytes of the {name} buffer are wrong"
