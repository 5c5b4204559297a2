"""Host time to plan a forward and to commit it, beside vllm-omni's own, in one process.

    python bench/bench_plan.py
    python bench/bench_plan.py --preset dreamzero_14b --append

A rollout of spans, each one first denoise forward (which writes the plan), one repeated denoise
forward and one commit forward, on both systems in turn, and books without tensors: nothing but host
code is timed. Of vllm-omni: ``get_kv_caches``, ``prepare``, ``to_layer_inputs`` of every layer,
``commit_paged_context``. Of chunkattn: the ``with`` block, and `ForwardContext.layer_plan` and
`ForwardContext.mark_layer_written` of every layer. Ratios are medians over spans of theirs over
ours.
"""

import functools
import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, SupportsInt

import torch
from timing import arguments, conditions, progress_bar, record, speed_ratio, spread, table_of

from chunkattn.cache import ARDiffusionKVCache
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.presets import PRESETS, ModelPreset, get_preset

GEOMETRIES = ("dreamzero_14b", "lingbot_world_v2", "longlive_2_5b")
KINDS = ("first denoise", "repeated denoise", "commit")
OURS, THEIRS = "chunkattn", "vllm-omni"
ROUNDS = 200
"""Spans that are timed around each span number."""
Forward = Callable[[bool], SupportsInt]


def arguments_of(preset: ModelPreset, layers: int) -> dict[str, Any]:
    """What both caches are built with."""
    return {
        "num_layers": layers,
        "num_kv_heads": preset.kv_heads,
        "head_size": preset.head_size,
        "dtype": torch.bfloat16,
        "block_size": preset.frame_tokens,
        "max_model_len": 1 << 20,
        "available_bytes": 1 << 40,
        "max_scratch_tokens_per_branch": preset.action_tokens + preset.state_tokens,
    }


def config_of(preset: ModelPreset) -> dict[str, Any]:
    return {
        "enable": True,
        "chunk_size": preset.frame_tokens,
        "window_chunks": preset.window_frames,
        "sink_chunks": preset.sink_frames,
    }


def ours(preset: ModelPreset, layers: int) -> Forward:
    """One forward of chunkattn; True commits it. Returns how many rows it sees."""
    cache = ARDiffusionKVCache(
        ARDiffusionKVConfig(**config_of(preset)),
        **arguments_of(preset, layers),
        local_branches=1,
        num_frame_per_block=preset.frames_per_span,
        scratch=False,
    )
    session = cache.open_session("bench")
    seq_len = preset.frames_per_span * preset.frame_tokens
    action_len = preset.action_tokens + preset.state_tokens

    def forward(commit: bool) -> SupportsInt:
        with session.forward(seq_len=seq_len, commit=commit, action_len=action_len) as fwd:
            for layer in range(layers):
                fwd.layer_plan(layer)
                fwd.mark_layer_written(layer)
        return fwd.kv_len

    return forward


def theirs(preset: ModelPreset, layers: int) -> Forward:
    """One forward of vllm-omni; True commits it. Returns how many rows it sees."""
    from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec
    from vllm_omni.experimental.ar_diffusion.kv_cache import config, manager, state

    cache = manager.ARDiffusionKVCache(
        config.ARDiffusionKVConfig(**config_of(preset)),
        **arguments_of(preset, layers),
        kv_branches=(ARDiffusionKVBranchSpec("positive", 0),),
        session_capacity=1,
        frames_per_block=preset.frames_per_span,
    )
    # Pools that are only handed on: `to_layer_inputs` looks them up.
    cache._k_pools = cache._v_pools = [torch.empty(0)] * layers
    kv = state.ARDiffusionKVState(
        cache, "bench", {"positive": cache.begin_request("bench")}, num_layers=layers
    )
    device = torch.device("cpu")
    seq_len = preset.frames_per_span * preset.frame_tokens
    action_len = preset.action_tokens + preset.state_tokens

    def forward(commit: bool) -> SupportsInt:
        contexts = kv.get_kv_caches("positive", seq_len=seq_len, commit_current=commit)
        contexts[0].forward_ctx.prepare(device, action_len, seq_len + action_len)
        inputs = [context.to_layer_inputs() for context in contexts]
        kv.commit_paged_context("positive")
        return inputs[0].seq_lens

    return forward


def same_windows(systems: dict[str, Forward], spans: int) -> bool:
    """Whether all systems see as many rows in every forward of some spans."""
    return all(
        len({int(forward(commit)) for forward in systems.values()}) == 1
        for _ in range(spans)
        for commit in (False, False, True)
    )


def rollout(systems: dict[str, Forward], spans: int) -> dict[str, dict[str, list]]:
    """Seconds of each kind of forward of each system, span by span, the systems in turn."""
    clock = time.perf_counter
    seconds = {name: {kind: [] for kind in KINDS} for name in systems}
    gc.collect()
    gc.disable()
    for _ in range(spans):
        for name, forward in systems.items():
            for kind in KINDS:
                began = clock()
                forward(kind == "commit")
                seconds[name][kind].append(clock() - began)
    gc.enable()
    return seconds


def around_spans(make: Callable[[], Forward], numbers: tuple[int, ...]) -> dict[int, list[float]]:
    """Seconds of a span, one denoise and one commit forward, around each of some span numbers.

    Each number has a rollout of its own, and they are timed in turn: a clock that changes meets
    them all.
    """
    clock = time.perf_counter
    rollouts = {number: make() for number in numbers}
    with progress_bar() as progress:
        for number, forward in rollouts.items():
            for _ in progress.track(range(number), description=f"to span {number}"):
                forward(True)
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for number, forward in rollouts.items():
            began = clock()
            forward(False)
            forward(True)
            seconds[number].append(clock() - began)
    gc.enable()
    return seconds


def show(row: dict[str, Any]) -> Any:
    """One result as a table."""
    table = table_of(
        f"{row['preset']}: host µs a forward, {row['layers']} layers",
        *("forward", OURS, THEIRS, "theirs / ours"),
    )
    for kind in KINDS:
        times = [f"{1e6 * row['seconds'][name][kind][0]:.1f}" for name in (OURS, THEIRS)]
        table.add_row(kind, *times, f"{row['ratio'][kind]:.1f}")
    for name in (OURS, THEIRS):
        spans = list(row["by_span"][name])
        table.add_row(f"{name}: span {spans[-1]} / span {spans[0]}", "", "", str(row["flat"][name]))
    return table


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), nargs="+", default=GEOMETRIES)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--spans", type=int, default=500, help="spans of the interleaved rollout")
    parser.add_argument("--longest", type=int, default=100_000, help="last span number")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    numbers = tuple(10**power for power in range(2, 10) if 10**power <= args.longest)
    for name in args.preset:
        preset = get_preset(name)
        makers = {
            system: functools.partial(make, preset, args.layers)
            for system, make in ((OURS, ours), (THEIRS, theirs))
        }
        systems = {system: make() for system, make in makers.items()}
        if not same_windows(systems, spans=50):
            print(f"{name}: the systems see different windows, so no times", file=sys.stderr)
            return 1
        seconds = rollout(systems, args.spans)
        # Theirs takes minutes to get to the last span, and is no claim of ours.
        reach = {OURS: numbers, THEIRS: numbers[:-1] or numbers}
        by_span = {system: around_spans(make, reach[system]) for system, make in makers.items()}
        row = {
            "benchmark": "plan",
            "preset": name,
            "layers": args.layers,
            "seconds": {
                system: {kind: spread(times) for kind, times in kinds.items()}
                for system, kinds in seconds.items()
            },
            "ratio": {
                kind: speed_ratio(seconds[THEIRS][kind], seconds[OURS][kind]) for kind in KINDS
            },
            "by_span": {
                system: {str(span): spread(times) for span, times in spans.items()}
                for system, spans in by_span.items()
            },
            "flat": {
                system: speed_ratio(spans[max(spans)], spans[min(spans)])
                for system, spans in by_span.items()
            },
            **conditions(torch.device("cpu"), args.seed),
        }
        record(row, args, show(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
