"""Attention over the window against its peers, at a model's true lengths.

    python bench/bench_attention.py --preset dreamzero_14b
    python bench/bench_attention.py --preset dreamzero_14b --cycle --append
    python bench/bench_attention.py --suite --append

The window lies in the pool as a rollout leaves it: a run of blocks a span, other blocks in between.
Every variant's result is compared with float64 before its time is printed; one that is wrong gets
no number, and the exit status is 1. Ratios are theirs over ours in time: above 1 we are faster.
"""

import argparse
import sys
from typing import Any, NamedTuple

import torch
from cases import Call, Case, bound_of, calls_of, make_case
from peers import OURS, PEERS, Run, Unavailable, sdpa_contiguous
from timing import (
    arguments,
    conditions,
    find_device,
    interleaved,
    large_product,
    record,
    share_of_roof,
    speed_ratio,
    spread,
    table_of,
)

from chunkattn import torch_backend
from chunkattn.presets import PRESETS, ModelPreset, get_preset

ROOF = "large matrix product"


class Suite(NamedTuple):
    """One line of the suite; the heads are those of a CPU."""

    preset: str
    whole_cycle: bool = False
    heads: int = 1
    dtype: str | None = None
    block_size: int | None = None


SUITE = (
    Suite("dreamzero_14b", whole_cycle=True, heads=2),
    Suite("dreamzero_14b", heads=2, block_size=16),
    Suite("dreamzero_14b", heads=2, dtype="bfloat16"),
    Suite("dreamzero_14b", heads=2, dtype="fp8"),
    Suite("dreamzero_5b", heads=2),
    Suite("lingbot_world_v2"),
    Suite("longlive_1"),
    Suite("longlive_2_5b"),
    Suite("krea_realtime_14b"),
    Suite("matrix_game_2", heads=2),
    Suite("self_forcing_1_3b"),
)
ON_A_GPU = (Suite("lingbot_world_720p"), Suite("lingbot_world_v2", dtype="fp8"))
"""Minutes on a CPU."""


def checked(case: Case) -> tuple[dict[str, Run], dict[str, str]]:
    """The peers that are right, and why each other one has no number.

    The reasons of those that are wrong begin with "wrong".
    """
    expected = case.expected()

    def error_of(run: Run) -> float:
        return (run().double() - expected).abs().max().item()

    bound = bound_of(case.query.dtype, error_of(sdpa_contiguous(case)))
    right: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name, make in PEERS.items():
        try:
            run = make(case)
            error = error_of(run)
        except Unavailable as reason:
            reasons[name] = str(reason)
            continue
        except Exception as refusal:  # another library's is not the end of the others
            if name == OURS:
                raise
            reasons[name] = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
            continue
        if error <= bound:  # a NaN is wrong too
            right[name] = run
        else:
            reasons[name] = f"wrong by {error:.3g}"
    return right, reasons


def measure(
    name: str,
    preset: ModelPreset,
    call: Call,
    heads: int,
    dtype: str,
    block_size: int | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One call, timed by every peer that is right."""
    device = find_device()
    case = make_case(preset, call, heads, dtype, device, block_size)
    variants, reasons = checked(case)
    row: dict[str, Any] = {
        "benchmark": "attention",
        "preset": name,
        "call": call.what,
        "query_rows": call.query_rows,
        "kv_rows": call.kv_rows,
        "block_size": case.key_pool.shape[1],
        "heads": heads,
        "head_size": preset.head_size,
        "dtype": dtype,
        "reasons": reasons,
    }
    if OURS in variants:
        before = torch_backend.copied_kv_bytes()
        variants[OURS]()
        row["copied_kv_bytes"] = torch_backend.copied_kv_bytes() - before
        # A CPU without bf16 instructions multiplies it slower than attention does.
        roof_dtype = case.query.dtype if device.type == "cuda" else torch.float32
        roof, roof_flop = large_product(device, roof_dtype)
        roof()
        seconds = interleaved({**variants, ROOF: roof}, device, args.rounds, args.budget, warm=True)
        row |= {
            "flop": case.flop,
            "seconds": {name: spread(times) for name, times in seconds.items()},
            "ratio": {name: speed_ratio(seconds[name], seconds[OURS]) for name in variants},
            "share_of_roof": {
                name: share_of_roof(case.flop, seconds[name], roof_flop, seconds[ROOF])
                for name in variants
            },
        }
    return row | conditions(device, args.seed)


def show(row: dict[str, Any]) -> Any:
    """One result as a table."""
    table = table_of(
        f"{row['preset']}, {row['call']}: {row['query_rows']} queries, {row['kv_rows']} keys, "
        f"block {row['block_size']}, {row['heads']} x {row['head_size']}, {row['dtype']}",
        *("variant", "ms (median)", "p20", "p80", "TFLOP/s", "of the roof", "time over ours"),
    )
    for name in row.get("ratio", ()):
        median, p20, p80 = row["seconds"][name]
        table.add_row(
            name,
            *(f"{1e3 * s:.3g}" for s in (median, p20, p80)),
            f"{row['flop'] / median / 1e12:.3g}",
            f"{row['share_of_roof'][name]:.2f}",
            f"{row['ratio'][name]:.2f}",
        )
    for name, reason in row["reasons"].items():
        if reason != "needs a GPU":
            table.add_row(name, reason[:40])
    return table


def main() -> int:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="dreamzero_14b")
    parser.add_argument(
        "--cycle", action="store_true", help="every forward until the window is full"
    )
    parser.add_argument("--suite", action="store_true", help="all models, their own blocks and 16")
    parser.add_argument("--heads", type=int, help="query heads; default: 2 on a CPU, all on a GPU")
    parser.add_argument("--block-size", type=int, help="default: one frame; else single blocks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "fp8"), help="of the pools")
    args = parser.parse_args()
    device = find_device()
    on_gpu = device.type == "cuda"
    asked = Suite(args.preset, args.cycle, args.heads or 2, args.dtype, args.block_size)
    suite = (*SUITE, *(ON_A_GPU if on_gpu else ())) if args.suite else (asked,)
    wrong = False
    torch.manual_seed(args.seed)
    with torch.no_grad():
        for name, whole_cycle, cpu_heads, dtype, block_size in suite:
            preset = get_preset(name)
            heads = args.heads or (preset.heads if on_gpu else cpu_heads)
            for call in calls_of(preset, whole_cycle):
                row = measure(
                    *(name, preset, call, heads),
                    *(dtype or ("bfloat16" if on_gpu else "float32"), block_size, args),
                )
                record(row, args, show(row))
                wrong |= any(reason.startswith("wrong") for reason in row["reasons"].values())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
