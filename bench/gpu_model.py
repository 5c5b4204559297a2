"""A model of the GPU where none is at hand: predicted time and limiter of attention calls.

    python bench/gpu_model.py --card H100 --preset dreamzero_14b
    python bench/gpu_model.py --append bench/results/model.jsonl --figures docs

Everything printed is a model, not measured. Its input: the compiler's counts in bench/results (made
by ``chunkattn aot --json`` and by ``--compile``), the kernels' own choice of tiles and splits, and
bench/cards.toml. The model is explained in gpu_predict.py; docs/gpu_model.md redoes one row by hand
and says how wrong the model is.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_predict import (
    BENCH,
    FACTS,
    MORE_COUNTS,
    PEER,
    REPORTS,
    TRITON,
    Call,
    Card,
    Counts,
    calls_of,
    card_of,
    chosen_split,
    kernel_of,
    load_counts,
    predict,
    predict_call,
    tiles_of,
)
from rich.console import Console
from rich.table import Table

from chunkattn.kernels.tuning import GATHER_BELOW
from chunkattn.presets import PRESETS

LABEL = "model, not measured"
BOUNDS = ("overlapped", "half", "serial")


def rows_of(
    card: Card, preset: str, counts: Counts, block_size: int | None = None
) -> Iterator[dict[str, Any]]:
    """A result row for each call of a preset, unsplit and, where the kernel can, split."""
    for call in calls_of(preset, block_size):
        chosen, peer = chosen_split(card, call), None
        if (PEER, card.arch, call.block_size, 16) in counts and call.block_size % 16 == 0:
            peer = predict_call(card, counts, call, kernel=PEER).seconds["serial"]
        splits = (0,) if call.block_size < GATHER_BELOW else (0, card.multiprocessors)
        for num_split in splits:
            found = predict_call(card, counts, call, num_split)
            seconds = found.seconds
            yield {
                "benchmark": "attention model",
                "label": LABEL,
                "card": card.device,
                "preset": preset,
                "call": call.what,
                "query_rows": call.query_rows,
                "kv_rows": call.kv_rows,
                "block_size": call.block_size,
                "heads": call.heads,
                "head_size": call.head_size,
                "dtype": "bfloat16",
                "kernel": kernel_of(call, num_split),
                "programs": found.schedule.programs,
                "is_default": num_split == chosen,
                "seconds": {bound: float(f"{s:.4g}") for bound, s in seconds.items()},
                "tflops": round(call.flop / seconds["serial"] / 1e12, 1),
                "limiter": found.limiter(),
                "roof": found.limiter("overlapped"),
                "microseconds_of": {
                    part: round(1e6 * s, 2) for part, s in found.parts["serial"].items()
                },
                "vllm_over_ours": None if peer is None else round(peer / seconds["serial"], 2),
            }


def error_rows(counts: Counts) -> Iterator[dict[str, Any]]:
    """The model beside each public figure of cards.toml."""
    for report in REPORTS:
        card = card_of(report["card"])
        row = next(r for k, r in counts.items() if k[:3] == (report["row"], card.arch, 880))
        for tokens, heads, reported in report["points"]:
            call = Call(report["what"], tokens, tokens, tokens, heads, heads, 128)
            seconds = predict(card, row, tiles_of(card, call), call).seconds[report["bound"]]
            predicted = call.flop / seconds / 1e12
            yield {
                "benchmark": "attention model error",
                "label": LABEL,
                "what": report["what"],
                "card": card.name,
                "bound": report["bound"],
                "tokens": tokens,
                "predicted": round(predicted, 1),
                "reported": reported,
                "error": round(predicted / reported - 1, 3),
                "fitted": report["fitted"],
            }


def measured(row: dict[str, Any]) -> float | None:
    """The median of the latest measurement of a row's call on its card, in seconds."""
    keys = ("card", "preset", "query_rows", "kv_rows", "block_size", "heads", "dtype")
    found = None
    for path in sorted((BENCH / "results").glob("*.jsonl")):
        for other in map(json.loads, path.read_text().splitlines()):
            if other.get("benchmark") == "attention" and all(other.get(k) == row[k] for k in keys):
                found = other["seconds"]["chunkattn"][0]
    return found


def compile_missing(counts: Counts, block_size: int | None) -> None:
    """Compile what the calls of the presets need and the counts lack, into `MORE_COUNTS`."""
    from chunkattn import aot, aot_vllm
    from chunkattn.aot_launch import Shape

    more = json.loads(MORE_COUNTS.read_text()) if MORE_COUNTS.exists() else []
    windowed = [name for name, preset in PRESETS.items() if preset.window_frames]
    for card in {facts["arch"]: card_of(name) for name, facts in FACTS.items()}.values():
        for call in (call for name in windowed for call in calls_of(name, block_size)):
            shape = Shape(call.block_size, call.head_size, call.query_rows)
            block_m = tiles_of(card, call).block_m
            jobs: dict[tuple[str, int], Callable[[str, Shape], aot.Row]] = {
                ("walk", block_m): aot.compile_walk,
                ("walk_split", block_m): functools.partial(aot.compile_walk, split=True),
                (PEER, 16): aot_vllm.compile_vllm,
            }
            if call.block_size < GATHER_BELOW:
                jobs = {("gather", block_m): aot.compile_gather}
            for (kernel, rows), job in jobs.items():
                key = (kernel, card.arch, call.block_size, rows)
                if key not in counts:
                    counts[key] = dataclasses.asdict(job(card.arch, shape))
                    more.append(counts[key])
    MORE_COUNTS.write_text(json.dumps(more, indent=2) + "\n")


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print predicted calls as a table, measurements beside them where there are any."""
    table = Table(title=f"{title}: {LABEL}; milliseconds", caption="serial: what to expect")
    for heading in ("call", "queries", "keys", "kernel", *BOUNDS, "TFLOP/s", "limiter", "roof"):
        table.add_column(heading, justify="left" if heading in ("call", "kernel") else "right")
    for heading in ("vLLM / ours", "measured", "error"):
        table.add_column(heading, justify="right")
    for row in rows:
        true = measured(row) if row["is_default"] else None
        serial = row["seconds"]["serial"]
        table.add_row(
            row["call"],
            str(row["query_rows"]),
            str(row["kv_rows"]),
            row["kernel"] + ("" if row["is_default"] else " (not chosen)"),
            *(f"{1e3 * row['seconds'][bound]:.3f}" for bound in BOUNDS),
            f"{row['tflops']:.0f}",
            row["limiter"],
            row["roof"],
            "" if row["vllm_over_ours"] is None else f"{row['vllm_over_ours']:.2f}",
            "" if true is None else f"{1e3 * true:.3f}",
            "" if true is None else f"{serial / true - 1:+.0%}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def show_errors(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"TFLOP/s, {LABEL}, beside public figures of similar kernels")
    for heading in ("kernel", "card", "bound", "tokens", "predicted", "reported", "error"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for row in rows:
        table.add_row(
            row["what"] + (" (fitted)" if row["fitted"] else ""),
            row["card"],
            row["bound"],
            str(row["tokens"]),
            f"{row['predicted']:.0f}",
            f"{row['reported']:.0f}",
            f"{row['error']:+.0%}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    windowed = sorted(name for name, preset in PRESETS.items() if preset.window_frames)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", nargs="+", choices=list(FACTS), default=list(FACTS))
    parser.add_argument("--preset", nargs="+", choices=windowed, default=windowed)
    parser.add_argument("--block-size", type=int, help="tokens of a block; default: one frame's")
    parser.add_argument("--json", action="store_true", help="print rows, not tables")
    parser.add_argument("--append", type=Path, help="append the rows to this JSON-lines file")
    parser.add_argument("--figures", type=Path, help="draw the figures into this directory")
    parser.add_argument("--compile", action="store_true", help="first compile what counts lack")
    args = parser.parse_args()

    if args.compile:
        compile_missing(load_counts(), args.block_size)
    counts = load_counts()
    try:
        rows = {
            (name, preset): list(rows_of(card_of(name), preset, counts, args.block_size))
            for name in args.card
            for preset in args.preset
        }
    except ValueError as error:
        parser.error(f"{error}; see --compile")
    errors = list(error_rows(counts))
    everything = [*errors, *(row for found in rows.values() for row in found)]
    if args.json:
        print("\n".join(map(json.dumps, everything)))
    else:
        show_errors(errors)
        for (name, preset), found in rows.items():
            show(found, f"{name}, {preset}")
    if args.append:
        import torch
        from timing import conditions

        found = conditions(torch.device("cpu"), 0)
        made_by = {"triton": TRITON, **{key: found[key] for key in ("commit", "torch", "python")}}
        with args.append.open("a") as file:
            file.writelines(json.dumps(row | made_by) + "\n" for row in everything)
    if args.figures:
        from gpu_figures import draw

        draw(counts, args.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
