"""Attention over the window against its peers, at a model's true lengths.

    python bench/bench_attention.py --preset dreamzero_14b
    python bench/bench_attention.py --preset dreamzero_14b --cycle --append bench/results/cpu.jsonl

The window lies in the pool as a rollout leaves it: one run of blocks a span, other blocks between
   the
runs. Every variant's result is checked against float64 before anything is printed; a wrong one
stops the benchmark. Ratios are ours over theirs in speed: above 1 we are faster.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from timing import conditions, interleaved, speed_ratio, spread

import chunkattn
from chunkattn import torch_backend
from chunkattn.kernels import reference
from chunkattn.presets import PRESETS, ModelPreset, get_preset

OURS = "chunkattn"


class Call(NamedTuple):
    """One forward: query rows, and the visible rows in chunks and extra rows."""

    query_rows: int
    history_chunks: int
    span_chunks: int
    action_rows: int


def calls_of(preset: ModelPreset, whole_cycle: bool) -> list[Call]:
    """The denoise forwards of a rollout until the window is full, or the last of them alone."""
    if preset.window_frames is None:
        raise SystemExit("this model keeps ranges of its own: it has no window to benchmark")
    full = preset.sink_frames + preset.window_frames
    span, action = preset.frames_per_span, preset.action_tokens + preset.state_tokens
    query_rows = span * preset.frame_tokens + action
    first = full % span  # as DreamZero: a first frame, then spans
    calls = [Call(query_rows, h, span, action) for h in range(first, full - span + 1, span)]
    return calls if whole_cycle else calls[-1:]


def variants_of(
    preset: ModelPreset,
    call: Call,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    block: int | None,
) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
    """The ways to compute one call, by name, and its result in float64."""
    # Runs of one span each (of one block, where the block size is chosen), the blocks between them
    # belonging to somebody else.
    run = 1 if block else preset.frames_per_span
    block, size = block or preset.frame_tokens, preset.head_size
    kv_heads = max(1, heads * preset.kv_heads // preset.heads)
    kv_len = (call.history_chunks + call.span_chunks) * preset.frame_tokens + call.action_rows
    num_table = -(-kv_len // block)
    ids = [2 * run * (i // run) + i % run + 1 for i in range(num_table)]
    shape = (max(ids) + 1, block, kv_heads, size)
    key_pool, value_pool = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    query = torch.randn(call.query_rows, heads, size, device=device).to(dtype)
    table = torch.tensor([ids], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([kv_len], dtype=torch.int32, device=device)
    start_loc = torch.tensor([0, call.query_rows], dtype=torch.int32, device=device)
    index = table[0].long()

    def gathered(pool: torch.Tensor) -> torch.Tensor:
        return pool[index].flatten(0, 1)[:kv_len]

    key, value = gathered(key_pool), gathered(value_pool)
    own = call.span_chunks * preset.frame_tokens + call.action_rows
    past = [(tensor[:-own].clone(), tensor[-own:].clone()) for tensor in (key, value)]

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.transpose(0, 1).unsqueeze(0) for x in (query, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=heads != kv_heads)
        return out[0].transpose(0, 1)

    variants: dict[str, Callable[[], torch.Tensor]] = {
        OURS: lambda: chunkattn.paged_window_attention(
            query, key_pool, value_pool, table, seq_lens, query_start_loc=start_loc
        ),
        "sdpa contiguous": lambda: sdpa(key, value),
        "gather + sdpa": lambda: sdpa(gathered(key_pool), gathered(value_pool)),
        "concat + sdpa": lambda: sdpa(*(torch.cat(pair) for pair in past)),
    }
    omni = _vllm_omni()
    if omni is not None:
        variants["vllm-omni"] = lambda: omni(
            query,
            key_pool,
            value_pool,
            block_table=table,
            query_start_loc=start_loc,
            seq_lens=seq_lens,
            max_query_len=call.query_rows,
            max_seq_len=num_table * block,
            softmax_scale=size**-0.5,
        )
    expected, _ = reference.paged_window_attention(
        query.cpu(), key_pool.cpu(), value_pool.cpu(), table.cpu(), seq_lens.cpu()
    )
    return variants, expected


def _vllm_omni() -> Callable[..., torch.Tensor] | None:
    try:
        from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import (
            ar_diffusion_paged_attention,
        )
    except ImportError:
        return None
    return ar_diffusion_paged_attention


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="dreamzero_14b")
    parser.add_argument(
        "--cycle", action="store_true", help="every forward until the window is full"
    )
    parser.add_argument("--heads", type=int, help="query heads; default: 2 on a CPU, all on a GPU")
    parser.add_argument("--block-size", type=int, help="default: one frame; else single blocks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the device")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", type=Path, help="append the results to this JSON-lines file")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = get_preset(args.preset)
    heads = args.heads or (preset.heads if device.type == "cuda" else 2)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    calls = calls_of(preset, args.cycle)
    torch.manual_seed(args.seed)
    with torch.no_grad():
        for call in calls:
            variants, expected = variants_of(preset, call, heads, dtype, device, args.block_size)
            tolerance = 2e-5 if dtype == torch.float32 else 2e-2
            for name, run in variants.items():
                error = (run().double().cpu() - expected).abs().max().item()
                if not error < tolerance:  # a NaN is wrong too
                    print(f"{name} is wrong by {error:.3g}: no times", file=sys.stderr)
                    return 1
            before = torch_backend.copied_kv_bytes()
            variants[OURS]()
            copied = torch_backend.copied_kv_bytes() - before
            with Progress(transient=True) as progress:
                task = progress.add_task("timing", total=len(variants) * args.repeats)
                times = interleaved(
                    variants, device, args.repeats, lambda p=progress, t=task: p.advance(t)
                )
            row = {
                "benchmark": "attention",
                "preset": args.preset,
                "query_rows": call.query_rows,
                "kv_rows": (call.history_chunks + call.span_chunks) * preset.frame_tokens
                + call.action_rows,
                "block_size": args.block_size or preset.frame_tokens,
                "heads": heads,
                "head_size": preset.head_size,
                "dtype": str(dtype).removeprefix("torch."),
                "copied_kv_bytes": copied,
                "seconds": {name: spread(seconds) for name, seconds in times.items()},
                "ratio": {name: speed_ratio(times[name], times[OURS]) for name in times},
                **conditions(device, args.seed),
            }
            show(row)
            if args.append:
                args.append.parent.mkdir(parents=True, exist_ok=True)
                with args.append.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


def show(row: dict) -> None:
    """Print one result as a table."""
    table = Table(
        title=f"{row['preset']}: {row['query_rows']} queries, {row['kv_rows']} keys, block "
        f"{row['block_size']}, {row['heads']} heads of {row['head_size']}, {row['dtype']}"
    )
    for column in ("variant", "ms (median)", "p20", "p80", "TFLOP/s", "chunkattn is ... x as fast"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    flop = 4 * row["query_rows"] * row["kv_rows"] * row["heads"] * row["head_size"]
    for name, (median, p20, p80) in row["seconds"].items():
        numbers = (f"{1e3 * s:.2f}" for s in (median, p20, p80))
        table.add_row(name, *numbers, f"{flop / median / 1e12:.3f}", f"{row['ratio'][name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
