"""The calls that attention benchmarks time, as the models make them, with their right results."""

import dataclasses
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from chunkattn import scatter_kv
from chunkattn.kernels import reference
from chunkattn.presets import ModelPreset

SCORES_AT_ONCE = 1 << 26
"""How many the reference holds at once, in float64."""


def bound_of(dtype: torch.dtype, error_of_torch: float) -> float:
    """How far a result may be off: in float32 2e-5, in 16 bits twice what torch's own attention
    is (docs/numerics.md). Rows are standard normal.
    """
    return 2e-5 if dtype == torch.float32 else 2 * error_of_torch + 1e-5


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's attention over contiguous rows."""
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(*rows, enable_gqa=grouped)[0].transpose(0, 1)


class Call(NamedTuple):
    """One forward: its query rows, and the rows that it sees."""

    what: str
    query_rows: int
    kv_rows: int
    own_rows: int  # of the visible ones, those that came with the forward


def calls_of(preset: ModelPreset, whole_cycle: bool) -> list[Call]:
    """The denoise forward whose window is full, or every forward of a rollout until then."""
    window, chunk = preset.window_frames, preset.frame_tokens
    if window is None:
        raise SystemExit("this model keeps ranges of its own: it has no window to benchmark")
    full, span = preset.sink_frames + window, preset.frames_per_span
    action = preset.action_tokens + preset.state_tokens
    rows = span * chunk
    if not whole_cycle:
        return [Call("full window", rows + action, full * chunk + action, rows + action)]
    calls = []
    first = preset.first_frames
    if first:
        calls.append(Call("first frame, commit", first * chunk, first * chunk, first * chunk))
    for number, history in enumerate(range(first, full - span + 1, span), 1):
        kv = (history + span) * chunk
        calls.append(Call(f"span {number}, denoise", rows + action, kv + action, rows + action))
        if action:
            calls.append(Call(f"span {number}, commit", rows, kv, rows))
    if action:
        calls.append(Call("action rows alone", action, full * chunk + action, action))
    return calls


@dataclasses.dataclass
class Case:
    """One call on tensors: the window lies in the pool as a rollout leaves it.

    Attributes:
        query: ``(query_rows, heads, head_size)``.
        key_pool, value_pool: ``(num_blocks, block_size, kv_heads, head_size)``.
        block_table, seq_lens, query_start_loc: of the one sequence.
        key_scale, value_scale: of the blocks of an fp8 pool, else None.
        own_rows: the last visible rows, which the forward brought.
        kv_len: visible rows.
    """

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    own_rows: int
    kv_len: int

    @property
    def flop(self) -> float:
        """Of the two products."""
        rows, heads, head_size = self.query.shape
        return 4.0 * rows * self.kv_len * heads * head_size

    @property
    def fp8(self) -> bool:
        return self.key_scale is not None

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the visible K and V, in the query's dtype: ``(kv_len, kv_heads, head_size)``"""
        return (
            self._gathered(self.key_pool, self.key_scale),
            self._gathered(self.value_pool, self.value_scale),
        )

    def _gathered(self, pool: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        blocks = self.block_table[0].long()
        if scale is None:
            return pool[blocks].flatten(0, 1)[: self.kv_len]
        rows = pool.view(torch.uint8)[blocks].view(pool.dtype).to(self.query.dtype)
        rows = (rows * scale[blocks][:, None, :, None]).to(self.query.dtype)
        return rows.flatten(0, 1)[: self.kv_len]

    def expected(self) -> torch.Tensor:
        """The result in float64."""
        names = ("key_pool", "value_pool", "block_table", "seq_lens", "key_scale", "value_scale")
        keys = reference.visible_keys(0, 1, **{name: getattr(self, name) for name in names})
        _, heads, head_size = self.query.shape
        return torch.cat(
            [
                reference.dense_attention(
                    rows, keys.key, keys.value, head_size**-0.5, torch.float64
                )[0]
                for rows in self.query.split(max(1, SCORES_AT_ONCE // (heads * self.kv_len)))
            ]
        )


def make_case(
    preset: ModelPreset,
    call: Call,
    heads: int,
    dtype: str,
    device: torch.device,
    block_size: int | None,
) -> Case:
    """Random rows in a pool of scattered runs.

    Args:
        preset: the model.
        call: one of `calls_of`.
        heads: query heads; K/V heads keep the model's proportion.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"fp8"``, which is that of the pool alone.
        device: where all of it lies.
        block_size: None: a frame a block, a span in a run of blocks; else single blocks.
    """
    wide = getattr(torch, dtype) if dtype != "fp8" else _query_dtype(device)
    run = 1 if block_size else preset.frames_per_span
    block_size, size = block_size or preset.frame_tokens, preset.head_size
    kv_heads = max(1, heads * preset.kv_heads // preset.heads)
    num_table = -(-call.kv_rows // block_size)
    # Between the runs lie blocks of somebody else.
    ids = [2 * run * (i // run) + i % run + 1 for i in range(num_table)]
    shape = (max(ids) + 1, block_size, kv_heads, size)
    pools = [torch.randn(shape, device=device).to(wide) for _ in range(2)]
    scales: list[torch.Tensor | None] = [None, None]
    if dtype == "fp8":
        rows, slots = shape[0] * block_size, torch.arange(shape[0] * block_size, device=device)
        wide_pools = [pool.view(rows, kv_heads, size) for pool in pools]
        pools = [torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
        scales = [torch.zeros(shape[0], kv_heads, device=device) for _ in range(2)]
        key_scale, value_scale = scales
        scatter_kv(*wide_pools, *pools, slots, key_scale=key_scale, value_scale=value_scale)
    integers = {"dtype": torch.int32, "device": device}
    return Case(
        torch.randn(call.query_rows, heads, size, device=device).to(wide),
        *pools,
        block_table=torch.tensor([ids], **integers),
        seq_lens=torch.tensor([call.kv_rows], **integers),
        query_start_loc=torch.tensor([0, call.query_rows], **integers),
        key_scale=scales[0],
        value_scale=scales[1],
        own_rows=call.own_rows,
        kv_len=call.kv_rows,
    )


def _query_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
