"""The write of a span's K and V into the pool, alone and with norm and rotation, against its peers.

    python bench/bench_scatter.py --preset dreamzero_14b --append

True shapes on every machine: a span of all heads into the scattered blocks of a pool. The pool that
each variant leaves is compared with the expected one before its time is printed. GB/s counts every
byte that must be read or written once; the roof is a large copy in the same run. Ratios are theirs
over ours in time: above 1 we are faster.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from timing import (
    arguments,
    conditions,
    find_device,
    interleaved,
    large_copy,
    record,
    share_of_roof,
    speed_ratio,
    spread,
    table_of,
)

import chunkattn
from chunkattn.kernels import reference
from chunkattn.presets import PRESETS, ModelPreset, get_preset

OURS, ROOF = "chunkattn", "large copy"
FUSED = "norm_rope_scatter"
MODELS = ("dreamzero_14b", "lingbot_world_v2", "longlive_2_5b")
EPS = 1e-6
Writes = dict[str, Callable[[], Any]]


class Span:
    """Rows of one span, the blocks it goes to, and the two pools, with runs of other blocks."""

    def __init__(self, preset: ModelPreset, dtype: torch.dtype, device: torch.device) -> None:
        rows, block = preset.frames_per_span * preset.frame_tokens, preset.frame_tokens
        heads, size = preset.heads, preset.head_size
        self.query, self.key, self.value = (
            torch.randn(rows, heads, size, device=device).to(dtype) for _ in range(3)
        )
        order = torch.randperm(2 * preset.frames_per_span)[: preset.frames_per_span]
        slots = [int(b) * block + i for b in order for i in range(block)]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        shape = (2 * preset.frames_per_span, block, heads, size)
        self.key_pool, self.value_pool = (
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)
        )
        self.weights = [torch.randn(heads * size, device=device).to(dtype) for _ in range(2)]
        angles = torch.rand(rows, size // 2, device=device) * 6.28
        self.cos, self.sin = angles.cos(), angles.sin()

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As slots: ``(num_slots, heads, head_size)``."""
        return self.key_pool.flatten(0, 1), self.value_pool.flatten(0, 1)


def writes_of(span: Span) -> tuple[Writes, dict[str, str]]:
    """The ways to write K and V, and why others cannot run here."""
    pools = span.pools()

    def index_put() -> None:
        for pool, rows in zip(pools, (span.key, span.value), strict=True):
            pool.index_put_((span.slots,), rows)

    def scatter() -> None:
        chunkattn.scatter_kv(span.key, span.value, span.key_pool, span.value_pool, span.slots)

    writes: Writes = {OURS: scatter, "index_put": index_put}
    reasons = {}
    if span.key.device.type != "cuda":
        reasons["vllm reshape_and_cache_flash"] = "needs a GPU"
    else:
        try:
            from vllm._custom_ops import reshape_and_cache_flash
        except ImportError as error:
            reasons["vllm reshape_and_cache_flash"] = f"not installed: {error}"
        else:
            one = torch.ones(1, device=span.key.device)
            into = (span.key, span.value, span.key_pool, span.value_pool, span.slots)
            writes["vllm reshape_and_cache_flash"] = lambda: reshape_and_cache_flash(
                *into, "auto", one, one
            )
    return writes, reasons


def layers_of(span: Span) -> Writes:
    """Norm, rotation and write as one operation, and as the separate ones of a model."""

    def fused() -> torch.Tensor:
        return chunkattn.norm_rope_scatter(
            *(span.query, span.key, span.value),
            *span.weights,
            *(span.cos, span.sin),
            *(span.key_pool, span.value_pool, span.slots),
            eps=EPS,
        )

    def prepared(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows_of_heads = rows.flatten(1)
        normed = torch.nn.functional.rms_norm(rows_of_heads, (rows_of_heads.shape[1],), weight, EPS)
        pairs = torch.view_as_complex(normed.view_as(rows).float().unflatten(-1, (-1, 2)))
        turned = pairs * torch.complex(span.cos, span.sin)[:, None]
        return torch.view_as_real(turned).flatten(-2).to(rows.dtype)

    def separate() -> torch.Tensor:
        query, key = (
            prepared(rows, weight)
            for rows, weight in zip((span.query, span.key), span.weights, strict=True)
        )
        for pool, rows in zip(span.pools(), (key, span.value), strict=True):
            pool.index_put_((span.slots,), rows)
        return query

    return {FUSED: fused, "rms_norm, rotation, index_put": separate}


def right(span: Span, run: Callable[[], Any], prepared: bool) -> bool:
    """Whether a variant leaves K and V in the span's slots, nothing elsewhere, and the right Q.

    Args:
        span: whose pools it writes.
        run: the variant.
        prepared: it norms and rotates; else rows are written as they are, to the bit.
    """
    tolerance = 0.0
    query, key = span.query.double(), span.key.double()
    if prepared:
        query, key = (
            reference.norm_rope(rows, weight, span.cos, span.sin, eps=EPS)
            for rows, weight in zip((span.query, span.key), span.weights, strict=True)
        )
        # In 16 bits rows are rounded after the norm, the weight and the rotation, which adds pairs.
        half_unit = torch.finfo(span.key.dtype).eps / 2
        largest = max(float(rows.abs().max()) for rows in (query, key))
        tolerance = 2e-5 if span.key.dtype == torch.float32 else 4 * half_unit * largest
    for pool in span.pools():
        pool.fill_(7.0)
    out = run()
    found = [(out, query)] if prepared else []
    for pool, rows in zip(span.pools(), (key, span.value.double()), strict=True):
        expected = torch.full_like(pool, 7.0, dtype=torch.float64)
        for slot, row in zip(span.slots.tolist(), rows, strict=True):
            expected[slot] = row
        found.append((pool, expected))
    return all(bool((a.double() - b).abs().max() <= tolerance) for a, b in found)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model: every right variant, timed."""
    device = find_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    span = Span(get_preset(name), dtype, device)
    writes, reasons = writes_of(span)
    layers = layers_of(span)
    for variants, prepared in ((writes, False), (layers, True)):
        for variant in [v for v, run in variants.items() if not right(span, run, prepared)]:
            reasons[variant] = "wrong"
            del variants[variant]
    row_bytes = span.key.nbytes
    bytes_of = dict.fromkeys(writes, 4.0 * row_bytes) | dict.fromkeys(layers, 6.0 * row_bytes)
    copy, copy_bytes = large_copy(device)
    seconds = interleaved({**writes, **layers, ROOF: copy}, device, args.rounds, args.budget)
    return {
        "benchmark": "scatter",
        "preset": name,
        "rows": span.key.shape[0],
        "heads": span.key.shape[1],
        "head_size": span.key.shape[2],
        "dtype": str(dtype).removeprefix("torch."),
        "reasons": reasons,
        "bytes": bytes_of,
        "seconds": {variant: spread(times) for variant, times in seconds.items()},
        "ratio": {
            variant: speed_ratio(seconds[variant], seconds[ours])
            for variants, ours in ((writes, OURS), (layers, FUSED))
            for variant in variants
            if ours in variants
        },
        "share_of_roof": {
            variant: share_of_roof(bytes_of[variant], seconds[variant], copy_bytes, seconds[ROOF])
            for variant in bytes_of
        },
        **conditions(device, args.seed),
    }


def show(row: dict[str, Any]) -> Any:
    """One result as a table."""
    table = table_of(
        f"{row['preset']}: {row['rows']} rows of {row['heads']} x {row['head_size']}, "
        f"{row['dtype']}",
        *("variant", "ms (median)", "p20", "p80", "GB/s", "of the roof", "time over ours"),
    )
    for variant, size in row["bytes"].items():
        median, p20, p80 = row["seconds"][variant]
        table.add_row(
            variant,
            *(f"{1e3 * s:.3g}" for s in (median, p20, p80)),
            f"{size / median / 1e9:.1f}",
            f"{row['share_of_roof'][variant]:.2f}",
            f"{row['ratio'].get(variant, float('nan')):.2f}",
        )
    for variant, reason in row["reasons"].items():
        table.add_row(variant, reason[:40])
    return table


def main() -> int:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--preset", choices=sorted(PRESETS), nargs="+", default=MODELS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    wrong = False
    with torch.no_grad():
        for name in args.preset:
            row = measure(name, args)
            record(row, args, show(row))
            wrong |= "wrong" in row["reasons"].values()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
