"""Small caches, and rollouts whose outputs say which tokens were visible.

V names its token (column 0 is the chunk's index, the others are random) and Q is zero, so every
output row is the mean of V over the visible tokens: one token too many, too few or twice shows.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chunkattn import ARDiffusionKVCache, ARDiffusionKVConfig, ForwardContext, Session

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
HEAD_SIZE = 8
RELATIONS = [(4, 4), (4, 2), (4, 16), (24, 16), (6, 4), (4, 1), (5, 3)]
"""(chunk, block): equal, whole blocks, whole chunks, and edges inside blocks."""

_NAMES = torch.randn(65536, HEAD_SIZE - 1, generator=torch.Generator().manual_seed(7))


class Window(NamedTuple):
    """A policy in plain Python, against which the package is compared."""

    window: int = 3
    sink: int = 1
    reset: bool = False

    def resident(self, num_chunks: int) -> list[int]:
        """Chunks that are left once ``num_chunks`` are committed."""
        recent = num_chunks if self.reset else num_chunks - self.window
        return [c for c in range(num_chunks) if c < self.sink or c >= recent]

    def visible(self, first: int, num_chunks: int) -> list[int]:
        """Chunks that the span ``[first, first + num_chunks)`` sees, itself included."""
        end = first + num_chunks
        recent = first if self.reset else end - self.window
        return [c for c in range(end) if c < self.sink or c >= min(first, recent)]


TG = Window()
"""The policy of the small cases: with block = chunk = 4, one layer and one head of 8 elements."""


class Timeline(NamedTuple):
    window: Window
    span: int
    forwards: list[dict[str, Any]]


def timelines() -> list[Timeline]:
    """All cases of tests/data/timelines.json."""
    path = Path(__file__).parent.parent / "data" / "timelines.json"
    data = json.loads(path.read_text())
    return [
        Timeline(
            Window(case["window_chunks"], case["sink_chunks"], case["reset_at_boundary"]),
            case["num_frame_per_block"],
            [dict(zip(data["columns"], row, strict=True)) for row in case["forwards"]],
        )
        for case in data["cases"]
    ]


def timeline_id(case: Timeline) -> str:
    window, sink, reset = case.window
    return f"S{sink}W{window}F{case.span}" + ("reset" if reset else "")


def page_bytes(block: int, layers: int = 1, heads: int = 1) -> int:
    """Bytes of one block: K and V of all layers, float32."""
    return 2 * layers * block * heads * HEAD_SIZE * 4


def make_config(chunk: int = 4, policy: Window = TG, **more: Any) -> ARDiffusionKVConfig:
    fields: dict[str, Any] = {
        "enable": True,
        "chunk_size": chunk,
        "window_chunks": policy.window,
        "sink_chunks": policy.sink,
        "reset_at_boundary": policy.reset,
        "gpu_memory_fraction": 1.0,
    }
    return ARDiffusionKVConfig(**(fields | more))


def make_cache(
    chunk: int = 4,
    block: int = 4,
    policy: Window = TG,
    *,
    span: int = 1,
    layers: int = 1,
    heads: int = 1,
    usable: int = 40,
    device: torch.device | None = CPU,
    config: ARDiffusionKVConfig | None = None,
    policy_object: Any = None,
    **more: Any,
) -> ARDiffusionKVCache:
    """A cache of ``usable`` blocks and the null block. All others are NaN until written.

    The defaults are block = chunk = 4, window 3, sink 1, span 1, one branch, one layer, one head.
    """
    arguments: dict[str, Any] = {
        "num_layers": layers,
        "num_kv_heads": heads,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
        "block_size": block,
        "max_model_len": 64,
        "available_bytes": (usable + 1) * page_bytes(block, layers, heads),
        "device": device,
        "local_branches": 1,
        "num_frame_per_block": span,
        "policy": policy_object,
    }
    cache = ARDiffusionKVCache(config or make_config(chunk, policy), **(arguments | more))
    if device is not None:
        for pool in cache.pools:  # as bytes, and scales behind them, where the dtype is fp8
            pool[1:] = 0x7F if pool.dtype == torch.uint8 else float("nan")
    return cache


def in_fp8(rows: torch.Tensor, part: int) -> torch.Tensor:
    """What an fp8 pool gives back for ``(num_tokens, heads, HEAD_SIZE)`` that begin a table entry:
    a scale for each ``part`` rows and head, under which the largest value is 448.
    """
    num_parts = -(-len(rows) // part)
    padded = rows.new_zeros(num_parts * part, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = padded.view(num_parts, part, *rows.shape[1:])
    scale = (parts.abs().amax((1, 3), keepdim=True) / 448).clamp_min(2.0**-20)
    return ((parts / scale).to(FP8).float() * scale).flatten(0, 1)[: len(rows)]


def state(cache: ARDiffusionKVCache) -> dict[str, Any]:
    """Everything that a refused call must leave alone: the books, and each byte of the pools."""
    return {
        "free": cache.num_free_blocks,
        "requests": {
            name: (
                cache.block_table(adapter),
                adapter.completed_chunks,
                adapter.num_computed_tokens,
                adapter.allocated_tokens,
            )
            for name, adapter in cache._adapters.items()
        },
        "sessions": sorted(cache._sessions),
        "pools": [bytes(p.contiguous().view(torch.uint8).cpu().numpy()) for p in cache.pools],
    }


class Rollout:
    """A session played forward by forward, each output compared with the mean of what it must see.

    ``tag`` moves all values, so that two rollouts have no token in common.
    """

    def __init__(
        self, session: Session, policy: Window = TG, *, branch: int = 0, tag: float = 0.0
    ) -> None:
        self.session, self.cache, self.policy = session, session.cache, policy
        self.branch, self.tag = branch, tag
        self.chunk = self.cache.spec.chunk_size
        self.block = self.cache.block_size
        self.committed = 0

    @property
    def adapter(self):
        return self.session.adapter(self.branch)

    def values(self, tokens: Sequence[int], layer: int = 0, noise: float = 0.0) -> torch.Tensor:
        """V of absolute token positions, ``(num_tokens, num_kv_heads, HEAD_SIZE)``."""
        index = torch.as_tensor(tokens, dtype=torch.int64)
        rows = torch.cat([(index // self.chunk).unsqueeze(1), _NAMES[index] + layer], dim=1)
        rows = rows + self.tag + noise
        return rows.unsqueeze(1).expand(-1, self.cache.num_kv_heads, -1).to(self.cache.device)

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the pool gives them back. They begin a table entry."""
        if self.cache.dtype == FP8:
            return in_fp8(rows, self.cache.table_block_size)
        return rows

    def tokens(self, chunks: Sequence[int]) -> list[int]:
        return [t for c in chunks for t in range(c * self.chunk, (c + 1) * self.chunk)]

    def open(self, num_chunks: int = 1, **more: Any) -> ForwardContext:
        return self.session.forward(branch=self.branch, seq_len=num_chunks * self.chunk, **more)

    def write(self, fwd: ForwardContext, layer: int = 0, noise: float = 0.0) -> torch.Tensor:
        """One layer of an open forward; the action rows hold ``noise - 1``."""
        span = self.tokens(range(self.committed, self.committed + fwd.num_chunks))
        value = self.values(span, layer, noise)
        rows = fwd.seq_len + fwd.action_len
        query = torch.zeros(rows, self.cache.num_kv_heads, HEAD_SIZE, device=value.device)
        extra = None
        if fwd.action_len:
            extra = torch.full_like(query[: fwd.action_len], noise - 1)
        return fwd.write_attend(layer, query, value, value, extra, extra)

    def forward(
        self,
        num_chunks: int = 1,
        *,
        commit: bool = False,
        action_len: int = 0,
        noise: float = 0.0,
        visible: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One forward over all layers, checked. Returns the last layer's output.

        ``noise`` is what a denoise forward's own K/V differ by; ``visible`` is an oracle's answer.
        """
        span = range(self.committed, self.committed + num_chunks)
        if visible is None:
            visible = self.policy.visible(self.committed, num_chunks)
        history = self.tokens([c for c in visible if c not in span])
        with self.open(num_chunks, commit=commit, action_len=action_len) as fwd:
            assert fwd.kv_len == len(visible) * self.chunk + action_len
            has_scratch = self.cache.scratch_blocks_per_branch > 0
            for layer in range(self.cache.num_layers):
                out = self.write(fwd, layer, noise)
                past, own = (
                    self.values(history, layer),
                    self.values(self.tokens(span), layer, noise),
                )
                action = own.new_full((action_len, *own.shape[1:]), noise - 1)
                seen = [self.stored(past), self.stored(own) if commit or has_scratch else own]
                seen.append(self.stored(action) if has_scratch else action)
                mean = torch.cat(seen).double().mean(0).float()
                torch.testing.assert_close(out, mean.expand_as(out), atol=2e-5, rtol=1e-5)
        if commit:
            self.committed += num_chunks
        return out

    def live_blocks(self, resident: Sequence[int] | None = None) -> list[int]:
        """Blocks with a live token, numbered on the time line as if nothing had ever left.

        A block that is still being filled counts, even if all it holds is dead.
        """
        if resident is None:
            resident = self.policy.resident(self.committed)
        filling, rest = divmod(self.committed * self.chunk, self.block)
        live = {token // self.block for token in self.tokens(resident)}
        return sorted(live | {filling}) if rest else sorted(live)

    def check_blocks(self, resident: Sequence[int] | None = None) -> None:
        """The table owns the blocks that hold a live token, no other, and they hold its K and V."""
        if resident is None:
            resident = self.policy.resident(self.committed)
        live = self.live_blocks(resident)
        table = self.cache.block_table(self.adapter)
        assert len(table) == len(set(table)) == len(live)
        assert self.cache.null_block_id not in table
        self.check_pools(self.tokens(resident), dict(zip(live, table, strict=True)))
        self.cache.check_integrity()

    def check_pools(self, tokens: Sequence[int], place: dict[int, int]) -> None:
        """K and V of these tokens lie where they must; ``place`` has the id of each block."""
        size, part = self.block, self.cache.table_block_size
        slots = torch.tensor(
            [place[t // size] * size + t % size for t in tokens], dtype=torch.int64
        )
        for layer in range(self.cache.num_layers):
            expected = self.stored(self.values(tokens, layer))
            pools = self.cache.flat_key_pool(layer), self.cache.flat_value_pool(layer)
            for pool, scale in zip(pools, self.cache.table_scales[layer], strict=True):
                found = pool.float()[slots]
                if scale is not None:
                    found *= scale[slots // part].unsqueeze(-1)
                torch.testing.assert_close(found, expected, atol=0, rtol=0)


def spans(num_chunks: int, span: int) -> Iterator[int]:
    """Chunks of each span: ``num_chunks`` in spans of ``span``."""
    for first in range(0, num_chunks, span):
        yield min(span, num_chunks - first)
