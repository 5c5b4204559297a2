"""Timing shared by the benchmarks: variants interleaved, cold caches, medians with their spread."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def interleaved(
    variants: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time the variants in turn, A B C A B C ..., after one call of each that does not count.

    Args:
        variants: name to call.
        device: where they run; on a GPU CUDA events time them, and the L2 cache is flushed in
            between.
        repeats: counted calls of each variant.
        tick: called after each counted call, for a progress bar.

    Returns:
        Seconds of each counted call, for each name.
    """
    on_gpu = device.type == "cuda"
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if on_gpu else None
    for call in variants.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            if flush is not None:
                flush.zero_()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                stop.synchronize()
                seconds[name].append(start.elapsed_time(stop) / 1e3)
            else:
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
            tick()
    return seconds


def spread(seconds: list[float]) -> list[float]:
    """Median, 20th and 80th percentile."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return [round(s, 6) for s in (statistics.median(seconds), fifths[0], fifths[3])]


def speed_ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast we are: the median over rounds, in which both ran close together."""
    return round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 3)


def conditions(device: torch.device, seed: int) -> dict[str, Any]:
    """What a result must say to be comparable: commit, machine, versions, threads, seed."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", ":!bench/results"],
        capture_output=True,
        text=True,
    )
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "commit": commit.stdout.strip() + ("-dirty" if dirty.stdout.strip() else ""),
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
