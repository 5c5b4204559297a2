"""Whole rollouts of attention, all layers, kept in different ways: paged, concatenated, rolled.

    python bench/bench_rollout.py --preset dreamzero_14b --append
    python bench/bench_rollout.py --preset lingbot_world_v2 --sessions 1 2 4 8

Every way gets the same rows, forward by forward, in turn; which goes first changes. In a warm-up
rollout, results are compared with the window's definition in float64; a way that is wrong gets no
number. Ratios are theirs over ours in time, the median over forwards: above 1 we are faster.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, conditions, find_device, progress_bar, record, speed_ratio, table_of
from ways import (
    Geometry,
    Oracle,
    Paged,
    Rows,
    Step,
    cache_of,
    geometry_of,
    refill,
    rollout_of,
    rows_of,
    ways_of,
)

from chunkattn import torch_backend
from chunkattn.presets import PRESETS, get_preset

OURS = Paged.name
MODELS = ("dreamzero_14b", "krea_realtime_14b")


class Play:
    """Some sessions of every way, and the rollout that all of them play."""

    def __init__(self, geometry: Geometry, steps: list[Step], sessions: int) -> None:
        self.geometry, self.steps, self.sessions = geometry, steps, sessions
        self.buffers = {step.kind: rows_of(geometry, step) for step in steps}
        ways = ways_of(geometry.device)
        paged = sum(issubclass(way, Paged) for way in ways.values())
        cache = cache_of(geometry, sessions=paged * sessions)
        self.ways: dict[str, list[Any]] = {
            name: [
                way(geometry, cache) if issubclass(way, Paged) else way(geometry)
                for _ in range(sessions)
            ]
            for name, way in ways.items()
        }

    def check(self) -> dict[str, str]:
        """Play once, and drop the ways that are wrong; returns why."""
        oracle, wrong = Oracle(self.geometry), {}
        for step in self.steps:
            layers = self.buffers[step.kind]
            refill(layers)
            for name, way in self.ways.items():
                for session in way:
                    outs = session.forward(layers, step.commit)
                    if fault := oracle.fault(layers[0], outs[0]):
                        wrong[name] = fault
            if step.commit:
                oracle.commit(layers[0])
        self.ways = {name: way for name, way in self.ways.items() if name not in wrong}
        return wrong

    def times(self, rounds: int, budget: float) -> dict[str, list[list[float]]]:
        """Seconds of each forward, of all sessions, of each rollout, for each way."""
        found: dict[str, list[list[float]]] = {name: [] for name in self.ways}
        began = time.perf_counter()
        order = itertools.cycle(range(len(self.ways)))
        with progress_bar() as progress:
            task = progress.add_task("rollouts", total=rounds * len(self.steps))
            for done in range(rounds):
                if done and time.perf_counter() - began > budget:
                    break
                for way in self.ways.values():
                    for session in way:
                        session.reset()
                for times in found.values():
                    times.append([])
                for step in self.steps:
                    layers = self.buffers[step.kind]
                    refill(layers)
                    names, first = [*self.ways], next(order)
                    for name in names[first:] + names[:first]:
                        found[name][-1].append(self._seconds(name, layers, step))
                    progress.advance(task)
        return found

    def _seconds(self, name: str, layers: list[Rows], step: Step) -> float:
        synchronize: Callable[[], Any] = (
            torch.cuda.synchronize if self.geometry.device.type == "cuda" else lambda: None
        )
        synchronize()
        began = time.perf_counter()
        for session in self.ways[name]:
            session.forward(layers, step.commit)
        synchronize()
        return time.perf_counter() - began


def measure(
    name: str, geometry: Geometry, steps: list[Step], sessions: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One model with so many sessions: a checked rollout, then timed ones."""
    play = Play(geometry, steps, sessions)
    wrong = play.check()
    copied = torch_backend.copied_kv_bytes()
    times = play.times(args.rounds, args.budget)
    copied = torch_backend.copied_kv_bytes() - copied
    flat = {way: list(itertools.chain.from_iterable(of_way)) for way, of_way in times.items()}
    return {
        "benchmark": "rollout",
        "preset": name,
        "layers": geometry.layers,
        "heads": geometry.heads,
        "head_size": geometry.head_size,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "sessions": sessions,
        "forwards": len(steps),
        "rollouts": len(next(iter(times.values()), ())),
        "copied_kv_bytes": copied,
        "reasons": wrong,
        "seconds": {
            way: float(f"{statistics.median(map(sum, of_way)):.5g}")
            for way, of_way in times.items()
        },
        "ratio": {way: speed_ratio(seconds, flat[OURS]) for way, seconds in flat.items()}
        if OURS in flat
        else {},
        **conditions(geometry.device, args.seed),
    }


def show(row: dict[str, Any]) -> Any:
    """One result as a table."""
    table = table_of(
        f"{row['preset']}: {row['forwards']} forwards, {row['layers']} layers, {row['heads']} x "
        f"{row['head_size']}, {row['dtype']}, {row['sessions']} session(s)",
        *("way", "seconds a rollout", "time over ours"),
    )
    for way, ratio in row["ratio"].items():
        table.add_row(way, f"{row['seconds'][way]:.3g}", f"{ratio:.2f}")
    for way, reason in row["reasons"].items():
        table.add_row(way, reason)
    return table


def main() -> int:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--preset", choices=sorted(PRESETS), nargs="+", default=MODELS)
    parser.add_argument("--layers", type=int, help="default: 2 on a CPU, the model's on a GPU")
    parser.add_argument("--heads", type=int, help="default: 1 on a CPU, the model's on a GPU")
    parser.add_argument("--spans", type=int, help="default: until the window has slid twice")
    parser.add_argument("--denoise-steps", type=int, default=2, help="forwards before each commit")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    device = find_device()
    on_gpu = device.type == "cuda"
    torch.manual_seed(args.seed)
    wrong = False
    with torch.no_grad():
        for name in args.preset:
            preset = get_preset(name)
            geometry = geometry_of(
                preset,
                args.layers or (preset.layers if on_gpu else 2),
                args.heads or (preset.heads if on_gpu else 1),
                torch.bfloat16 if on_gpu else torch.float32,
                device,
            )
            spans = args.spans or geometry.spans_to_fill + 2
            steps = rollout_of(geometry, spans, args.denoise_steps)
            for sessions in args.sessions:
                row = measure(name, geometry, steps, sessions, args)
                record(row, args, show(row))
                wrong |= bool(row["reasons"])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
