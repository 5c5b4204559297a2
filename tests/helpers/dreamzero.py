"""vllm-omni's DreamZero transformer, as small as it can be and still slide. Loads vllm-omni."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chunkattn.demo import play
from chunkattn.integrations.dreamzero_demo import (
    LATENT_CHANNELS,
    TEXT_FEATURES,
    TEXT_TOKENS,
    Geometry,
)
from chunkattn.integrations.dreamzero_ways import Call, PagedWay

GEOMETRY = Geometry(layers=2, heads=2, grid=(1, 2), window_frames=5, denoise_steps=1, cycles=2)


def calls() -> Iterator[Call | None]:
    """Two cycles of a first frame and four spans, which slide; None is the reset between them."""
    generator = torch.Generator().manual_seed(1)
    frames = 1 + GEOMETRY.spans * GEOMETRY.frames_per_span
    for _ in range(GEOMETRY.cycles):
        shape = (1, LATENT_CHANNELS, frames, *GEOMETRY.latent_size)
        yield from play(GEOMETRY, torch.randn(shape, generator=generator), generator)
        yield None


def rollout(
    model: Any,
    *,
    heads: int = GEOMETRY.heads,
    branches: range = range(2),
    on_forward: Callable[[PagedWay], None] = lambda way: None,
) -> list[torch.Tensor]:
    """Outputs of all forwards, through a session.

    Args:
        model: the transformer.
        heads: those of this rank.
        branches: guidance branches that this rank runs; its cache has only these.
        on_forward: called after each.
    """
    generator = torch.Generator().manual_seed(2)
    contexts = torch.randn(2, 1, TEXT_TOKENS, TEXT_FEATURES, generator=generator)
    geometry = dataclasses.replace(GEOMETRY, heads=heads, branches=len(branches))
    way = PagedWay(model, geometry, [contexts[b] for b in branches], "torch")
    outs = []
    for call in calls():
        if call is None:
            way.reset()
            continue
        for branch in range(len(branches)):
            outs += way.forward(branch, call)
            on_forward(way)
    way.cache.check_integrity()
    return outs
