"""vllm-omni's DreamZero transformer, as small as it can be and still slide. Loads vllm-omni."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)

from chunkattn.demo import play
from chunkattn.integrations.dreamzero_demo import (
    LATENT_CHANNELS,
    TEXT_FEATURES,
    TEXT_TOKENS,
    Geometry,
    build_model,
    one_process,
)
from chunkattn.integrations.dreamzero_ways import Call, PagedWay
from chunkattn.timeline import ForwardRecord

GEOMETRY = Geometry(layers=2, heads=4, grid=(1, 2), window_frames=5, spans=3, denoise_steps=1)


def calls() -> Iterator[Call | None]:
    """Two cycles of a first frame and three spans, which slide; None is the reset between them."""
    generator = torch.Generator().manual_seed(1)
    frames = 1 + GEOMETRY.spans * GEOMETRY.frames_per_span
    for _ in range(GEOMETRY.cycles):
        shape = (1, LATENT_CHANNELS, frames, *GEOMETRY.latent_size)
        yield from play(GEOMETRY, torch.randn(shape, generator=generator), generator)
        yield None


class Rollout(NamedTuple):
    """What a rollout gave and what it took."""

    outs: dict[int, list[torch.Tensor]]  # of each branch, forward by forward
    records: list[ForwardRecord]  # plans of the rank's first branch, block ids included
    num_blocks: int
    pool_bytes: int


def rollout(
    model: Any, *, heads: int = GEOMETRY.heads, branches: tuple[int, ...] = (0, 1)
) -> Rollout:
    """Play all calls through a session.

    Args:
        model: the transformer.
        heads: those of this rank.
        branches: guidance branches that this rank runs; its cache has only these.
    """
    generator = torch.Generator().manual_seed(2)
    contexts = torch.randn(2, 1, TEXT_TOKENS, TEXT_FEATURES, generator=generator)
    geometry = dataclasses.replace(GEOMETRY, heads=heads, branches=len(branches))
    way = PagedWay(model, geometry, [contexts[branch] for branch in branches], "torch")
    outs: dict[int, list[torch.Tensor]] = {branch: [] for branch in branches}
    for call in calls():
        if call is None:
            way.reset()
            continue
        for i, branch in enumerate(branches):
            outs[branch] += way.forward(i, call)
    way.cache.check_integrity()
    way.session.close()
    cache = way.cache
    assert cache.num_free_blocks == cache.num_blocks - 1
    return Rollout(outs, way.recorder.records, cache.num_blocks_total, way.reserved_bytes())


def compile_blocks() -> tuple[float, float, int]:
    """The rollout with each block compiled, against one that is not.

    Returns:
        The largest difference, the largest output, and the number of graphs.
    """
    counter = CompileCounterWithBackend("eager")
    with one_process(), torch.no_grad():
        model = build_model(GEOMETRY, 0)
        eager = rollout(model, branches=(0,))
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
        compiled = rollout(model, branches=(0,))
    return difference(compiled, eager), largest(eager), counter.frame_count


def split_model(rank: int) -> dict[str, Any]:
    """Rank by rank: the whole model with both branches; with this rank's branch alone; half of its
    heads with both. For two processes that have a default process group.
    """
    found: dict[str, Any] = {}
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(2, rank, "env://", rank, "gloo")
        initialize_model_parallel(1)
        weights: dict[str, torch.Tensor] = {}
        whole = build_model(GEOMETRY, 0, lambda model: weights.update(model.state_dict()))
        found["whole"] = rollout(whole)
        found["cfg"] = rollout(whole, branches=(rank,))
        destroy_model_parallel()
        initialize_model_parallel(2)
        part = build_model(GEOMETRY, 0, lambda model: load_share(model, weights, rank))
        found["tensor"] = rollout(part, heads=GEOMETRY.heads // 2)
        found["heads"] = part.blocks[0].self_attn.tp_num_heads
        destroy_model_parallel()
    return found


def load_share(part: torch.nn.Module, whole: dict[str, torch.Tensor], rank: int) -> None:
    """Give a rank of two its share of the whole model's weights, in place."""
    for name, own in part.state_dict().items():
        # Q, K and V lie in one weight; each is split for itself.
        pieces = whole[name].chunk(3) if ".qkv." in name else [whole[name]]
        for dim in range(own.dim()):
            if own.shape[dim] != whole[name].shape[dim]:
                pieces = [piece.chunk(2, dim)[rank] for piece in pieces]
        own.copy_(torch.cat(pieces))


def difference(a: Rollout, b: Rollout) -> float:
    """The largest between outputs of branches that both have; NaN where one is NaN."""
    pairs = [pair for br in a.outs for pair in zip(a.outs[br], b.outs[br], strict=True)]
    return float(torch.stack([(x - y).abs().max() for x, y in pairs]).max())


def largest(rollout: Rollout) -> float:
    return float(torch.stack([x.abs().max() for x in sum(rollout.outs.values(), [])]).max())
