"""How many blocks a cache has, and what it refuses before it has any."""

import logging
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from chunkattn.capacity import capacity
from chunkattn.checks import check_fraction, check_int
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.policy import Policy
from chunkattn.pool import compute_num_blocks
from chunkattn.window import blocks_per_branch, ceil_div

if TYPE_CHECKING:
    from chunkattn.manager import ChunkWindowSpec

logger = logging.getLogger(__name__)

SCRATCH_ENV = "AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH"
DEFAULT_SCRATCH_BLOCKS = 4


def managed_blocks(
    free_bytes: int,
    gpu_memory_fraction: float,
    *,
    page_size_bytes: int,
    local_branches: int,
    blocks_per_branch: int,
) -> int:
    """Managed blocks: the configured share of the memory, raised to what a rollout needs.

    Args:
        free_bytes: memory after cross-attention.
        gpu_memory_fraction: the share that the managed blocks may take.
        page_size_bytes: bytes of one block, K and V of all layers.
        local_branches: branches on this rank.
        blocks_per_branch: sink, window and span of one branch.

    Raises:
        ValueError: all of the memory holds fewer blocks than a rollout needs to go on for ever.
    """
    free = max(0, free_bytes)
    num_blocks = compute_num_blocks(free, gpu_memory_fraction, page_size_bytes)
    needed = local_branches * blocks_per_branch + 1  # and the null block
    floor = needed + 1
    if num_blocks >= floor:
        return num_blocks
    raised = min(floor, free // page_size_bytes)
    if raised < needed:
        raise ValueError(
            f"`available_bytes` must hold at least {needed} blocks of {page_size_bytes} bytes "
            f"({needed * page_size_bytes} bytes) so that a rollout can go on for ever: "
            f"{local_branches} branch(es) x (sink + window + span = {blocks_per_branch} blocks) "
            f"+ the null block; got {free} bytes after cross-attention, "
            f"{free // page_size_bytes} blocks"
        )
    if raised > num_blocks:
        logger.warning(
            "K/V pool: gpu_memory_fraction %s gives %d blocks; raised to the %d that a "
            "rollout needs: %d branch(es) x (sink + window + span = %d blocks) + 2",
            gpu_memory_fraction,
            num_blocks,
            raised,
            local_branches,
            blocks_per_branch,
        )
    return max(num_blocks, raised)


def budgeted_blocks(session_capacity: int, budget: int, **parts: int) -> int:
    """Managed blocks of as many sessions under a hard budget. Logs what it admits.

    Args:
        session_capacity: sessions to admit.
        budget: bytes.
        parts: as `capacity.capacity` takes them.

    Raises:
        ValueError: the budget is too small.
    """
    found = capacity(budget, **parts)
    needed = found.needed(session_capacity)
    sums = (
        f"{found.fixed} bytes of null block, scratch and static cross-attention, and for each "
        f"session {found.self_attention} of self-attention, {found.cross_attention} of "
        f"cross-attention and {found.model_owned} of the model's own"
    )
    if needed > budget:
        raise ValueError(
            f"`memory_budget_bytes` must be at least {needed} for session_capacity "
            f"{session_capacity} ({sums}), got {budget}, which admits {found.sessions}"
        )
    logger.info("a budget of %d bytes admits %d session(s): %s", budget, found.sessions, sums)
    return session_capacity * found.blocks_per_session + 1


def branch_blocks(spec: "ChunkWindowSpec", policy: Policy | None, span_chunks: int) -> int:
    """The most blocks that one branch owns at any time: what it keeps, and the span in flight.

    Args:
        spec: the window.
        policy: None is the spec's window, whose bound is exact.
        span_chunks: chunks of a span.
    """
    if policy is None:
        return blocks_per_branch(
            block_size=spec.block_size,
            chunk_size=spec.chunk_size,
            window_chunks=spec.window_chunks,
            sink_chunks=spec.sink_chunks,
            span_chunks=span_chunks,
        )
    chunks = policy.capacity_chunks
    tokens = (chunks + span_chunks) * spec.chunk_size
    # Where chunks are not whole blocks, each edge of each kept run may cut one.
    edges = 0 if spec.chunk_size % spec.block_size == 0 else 2 * (chunks + 1)
    return ceil_div(tokens, spec.block_size) + edges


def check_policy(policy: Policy, num_layers: int, span_chunks: int) -> None:
    """Refuse a policy whose windows are shorter than the span, or that lacks a layer's window."""
    if not isinstance(policy, Policy):
        raise TypeError(f"`policy` must be a Policy or None, got {type(policy).__name__}")
    if policy.longest_span < span_chunks:
        raise ValueError(
            f"`policy` must have windows that hold the span of {span_chunks} chunks, got {policy}"
        )
    layers = (0,) * num_layers if policy.layers is None else policy.layers
    if len(layers) != num_layers or not set(layers) <= set(range(len(policy.views()))):
        raise ValueError(
            f"`policy` must name a window for each of {num_layers} layers, got {policy}"
        )


def checked_window(config: ARDiffusionKVConfig, num_frame_per_block: int) -> int:
    """The config's ``window_chunks``, after every check that needs the config alone."""
    # vllm-omni's own will do.
    if not all(hasattr(config, field.name) for field in fields(ARDiffusionKVConfig)):
        raise TypeError(f"`config` must be an ARDiffusionKVConfig, got {type(config).__name__}")
    if not config.enable:
        raise ValueError(
            "`config` must be enabled (ARDiffusionKVConfig(enable=True, ...)), got a disabled one"
        )
    if config.window_chunks is None:
        raise ValueError("`window_chunks` must be set: the window is bounded, got None")
    for name, number, least in (
        ("chunk_size", config.chunk_size, 1),
        ("window_chunks", config.window_chunks, 1),
        ("sink_chunks", config.sink_chunks, 0),
        ("num_frame_per_block", num_frame_per_block, 1),
    ):
        check_int(name, number, least)
    check_fraction(config.gpu_memory_fraction)
    if config.window_chunks < num_frame_per_block:
        raise ValueError(
            f"`window_chunks` must hold the span of {num_frame_per_block} chunks, got "
            f"{config.window_chunks}"
        )
    return config.window_chunks


def scratch_blocks(needed: int, default: int) -> int:
    """Scratch blocks of a branch: what the model needs, or more if the environment asks.

    Args:
        needed: of the span and the declared action rows.
        default: what to ask for where the environment is silent. To ask for 0 is to ask for none.
    """
    text = os.environ.get(SCRATCH_ENV, str(default))
    if not text.isdecimal():
        raise ValueError(f"`{SCRATCH_ENV}` must be an integer from 0 on, got {text!r}")
    return max(needed, int(text))
