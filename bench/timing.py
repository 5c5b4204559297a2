"""What the benchmarks share: interleaved timing with cold caches, the roof, rows of results."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
FEWEST_ROUNDS = 3
Variants = dict[str, Callable[[], object]]


# -- timing ----------------------------------------------------------------------------------------
def interleaved(
    variants: Variants,
    device: torch.device,
    rounds: int,
    budget: float = float("inf"),
    warm: bool = False,
) -> dict[str, list[float]]:
    """Time the variants in turn, A B C A B C ..., after one call of each that does not count.

    Args:
        variants: name to call.
        device: where they run. The caches are flushed before each call, so that none gains by what
            ran before it. On a GPU CUDA events time them, and it sleeps until the host has run
            ahead, so that no launch is timed.
        rounds: counted calls of each variant, at most.
        budget: seconds after which no further round begins, once there are three.
        warm: every variant has run before.

    Returns:
        Seconds of each counted call, for each name.
    """
    timed = _gpu_timer(device) if device.type == "cuda" else _cpu_timer()
    for call in () if warm else variants.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    began = time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("timing", total=len(variants) * rounds)
        for done in range(rounds):
            if done >= FEWEST_ROUNDS and time.perf_counter() - began > budget:
                break
            for name, call in variants.items():
                seconds[name].append(timed(call))
                progress.advance(task)
    return seconds


def progress_bar() -> Progress:
    """A bar on stderr that goes when the work is done: stdout is for results."""
    return Progress(transient=True, console=Console(stderr=True))


def _cpu_timer() -> Callable[[Callable[[], object]], float]:
    flush = torch.empty(128 << 20, dtype=torch.int8)

    def seconds(call: Callable[[], object]) -> float:
        flush.zero_()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return seconds


def _gpu_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)

    def seconds(call: Callable[[], object]) -> float:
        flush.zero_()
        torch.cuda._sleep(2_000_000)  # cycles, about 1 ms: time for the host to run ahead
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return seconds


def spread(seconds: list[float]) -> list[float]:
    """Median, 20th and 80th percentile."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return [float(f"{s:.5g}") for s in (statistics.median(seconds), fifths[0], fifths[3])]


def speed_ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast we are: the median over rounds, in which both ran close together."""
    return round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 3)


# -- the roof: what this machine does at best, timed as one more variant ---------------------------
def large_product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """A large matrix product, and its floating-point operations."""
    n = 8192 if device.type == "cuda" else 1536
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def large_copy(device: torch.device) -> tuple[Callable[[], object], float]:
    """A large copy, and the bytes that it reads and writes."""
    source = torch.randn((1 << 30 if device.type == "cuda" else 1 << 27) // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * source.nbytes


def share_of_roof(
    work: float, seconds: list[float], roof_work: float, roof_seconds: list[float]
) -> float:
    """Rate of a variant over the rate of the roof, the median over rounds."""
    return round(speed_ratio(roof_seconds, seconds) * work / roof_work, 3)


# -- results ---------------------------------------------------------------------------------------
def arguments(doc: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; with ``rounds``, of those that time calls
    in turn.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if rounds is not None:
        text = "timed calls of each variant"
        parser.add_argument("--rounds", type=int, default=rounds, help=text)
        parser.add_argument("--budget", type=float, default=20.0, help="seconds a case, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows, not tables")
    parser.add_argument(
        "--append",
        type=Path,
        nargs="?",
        const=results_file(find_device()),
        help="append the rows to a file of JSON lines; default: this machine's in bench/results",
    )
    return parser


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def results_file(device: torch.device) -> Path:
    """The file of this machine's results."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return RESULTS / f"{card.lower().replace(' ', '-')}.jsonl"


def record(row: dict[str, Any], args: argparse.Namespace, table: Table) -> None:
    """Print one result, as a table or as JSON, and append it where asked."""
    if args.json:
        print(json.dumps(row), flush=True)
    else:
        Console().print(table)
    if args.append:
        args.append.parent.mkdir(parents=True, exist_ok=True)
        with args.append.open("a") as file:
            file.write(json.dumps(row) + "\n")


def table_of(title: str, *columns: str) -> Table:
    """An empty table: text on the left, numbers on the right."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def conditions(device: torch.device, seed: int) -> dict[str, Any]:
    """What a result must say to be comparable: commit, machine, versions, threads, seed."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", ":!bench/results", ":!*.md", ":!docs"],
        capture_output=True,
        text=True,
    )
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "commit": commit.stdout.strip() + ("-dirty" if dirty.stdout.strip() else ""),
        "date": time.strftime("%Y-%m-%d"),
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
