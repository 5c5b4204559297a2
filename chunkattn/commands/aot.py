"""``chunkattn aot``."""

import argparse
import multiprocessing
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from chunkattn.commands import MODEL, add_parser, require
from chunkattn.presets import PRESETS
from chunkattn.sass import ARCHS


def add(commands: Any) -> None:
    parser = add_parser(
        commands,
        "aot",
        help="compile the kernels for GPUs that need not be there, and count",
        description=(
            "Compile every kernel for other machines' GPUs and print registers, stack, shared "
            "memory and the instructions of each loop with matrix instructions; beside them vLLM's "
            "Triton attention, where vLLM is installed. Needs no GPU."
        ),
        found="a budget is missed (with --budgets)",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHS,
        metavar="ARCH",
        help=f"GPUs: {', '.join(ARCHS)} (default: all)",
    )
    parser.add_argument(
        "--preset",
        nargs="+",
        choices=sorted(PRESETS),
        metavar="NAME",
        help=f"{MODEL} (default: all)",
    )
    parser.add_argument(
        "--budgets",
        action="store_true",
        help="compile what has a budget and compare",
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON, not a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require(("triton", "rich"), "demo")
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
                pool.map(operator.call, jobs),
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
    aot_report.print_rows(
        compile_all(aot.jobs(args.arch or ARCHS, args.preset or sorted(PRESETS))), args.json
    )
    return 0
