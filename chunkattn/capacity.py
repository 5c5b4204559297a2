"""How many sessions a memory budget admits, and what each part of it takes: plain arithmetic.

`ARDiffusionKVCache` sizes its pools with `capacity`, ``chunkattn capacity`` prints it for a model.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from chunkattn.window import blocks_per_branch, ceil_div, part_of_blocks

if TYPE_CHECKING:
    from chunkattn.presets import ModelPreset

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
"""Bytes of an element of the pools. ``fp8`` also has two float32 scales a block, layer and head."""
MOST_NULL = 0.02
"""The share of one session's blocks that the null block may be, for `block_size_of`."""


@dataclass(frozen=True)
class Capacity:
    """What a budget holds. All in bytes but ``sessions`` and the blocks.

    Attributes:
        sessions: as many as fit; 0 where not even one does.
        blocks_per_session: sink, window and span of every local branch.
        num_blocks: managed blocks of ``sessions``, the null block counted in.
        budget: what there is.
        fixed: null block, scratch and the static cross-attention pools.
        self_attention, cross_attention, model_owned: of one session.
    """

    sessions: int
    blocks_per_session: int
    num_blocks: int
    budget: int
    fixed: int
    self_attention: int
    cross_attention: int
    model_owned: int

    @property
    def per_session(self) -> int:
        """Bytes of one session."""
        return self.self_attention + self.cross_attention + self.model_owned

    def needed(self, sessions: int) -> int:
        """Bytes of so many sessions and everything that they share."""
        return self.fixed + sessions * self.per_session


def capacity(
    budget: int,
    *,
    page_size_bytes: int,
    local_branches: int,
    blocks_per_branch: int,
    scratch_blocks: int = 0,
    static_bytes: int = 0,
    cross_attention_bytes: int = 0,
    model_owned_bytes: int = 0,
) -> Capacity:
    """Divide a budget among sessions that can all have a forward in flight at once.

    Args:
        budget: bytes.
        page_size_bytes: bytes of one block, K and V of all layers.
        local_branches: guidance branches on this rank.
        blocks_per_branch: sink, window and span.
        scratch_blocks: of all branches.
        static_bytes: what the sessions share besides blocks.
        cross_attention_bytes: of one session.
        model_owned_bytes: state that the model keeps for one session.
    """
    blocks = local_branches * blocks_per_branch
    fixed = (1 + scratch_blocks) * page_size_bytes + static_bytes
    session = blocks * page_size_bytes + cross_attention_bytes + model_owned_bytes
    sessions = max(0, budget - fixed) // session
    return Capacity(
        sessions=sessions,
        blocks_per_session=blocks,
        num_blocks=sessions * blocks + 1,
        budget=budget,
        fixed=fixed,
        self_attention=blocks * page_size_bytes,
        cross_attention=cross_attention_bytes,
        model_owned=model_owned_bytes,
    )


def block_size_of(chunk_size: int, chunks_per_session: int) -> int:
    """The largest block, a whole part of a chunk, with a null block of at most `MOST_NULL`."""
    most = MOST_NULL * chunks_per_session * chunk_size
    return max(d for d in range(1, chunk_size + 1) if chunk_size % d == 0 and d <= max(1, most))


def preset_capacity(
    preset: "ModelPreset",
    budget: int,
    *,
    tp: int = 1,
    cfg: int = 1,
    kv_dtype: str | None = None,
    block_size: int | None = None,
    cross_attention_bytes: int = 0,
    model_owned_bytes: int = 0,
) -> dict[str, Any]:
    """What one GPU holds of a model, without scratch.

    Args:
        preset: the model.
        budget: bytes of one GPU for K/V.
        tp: ranks that share the K/V heads.
        cfg: ranks that share the guidance branches.
        kv_dtype: a key of `ITEMSIZE`; None is the preset's.
        block_size: tokens of a block; None is `block_size_of`.
        cross_attention_bytes: of one session on one GPU.
        model_owned_bytes: of one session on one GPU.

    Returns:
        The fields of `Capacity`, and ``block_size``, ``pool_bytes``, ``ideal_bytes`` (sink, window
        and span of every session, to the token), ``pool_over_ideal``, ``bytes_read_per_forward``
        and ``bytes_read_per_span`` (K and V of all layers, local branches and visible keys; a span
        is its denoise forwards and the commit, None where their number is not known).

    Raises:
        ValueError: an argument does not fit the model.
    """
    window, dtype = preset.window_frames, kv_dtype or preset.dtype
    if window is None:
        raise ValueError("`preset` must have one window, got a model with ranges of its own")
    if tp < 1 or preset.kv_heads % tp:
        raise ValueError(f"`tp` must divide the {preset.kv_heads} K/V heads, got {tp}")
    if cfg < 1 or preset.cfg_branches % cfg:
        raise ValueError(f"`cfg` must divide the {preset.cfg_branches} branches, got {cfg}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"`kv_dtype` must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    chunk, span = preset.frame_tokens, preset.frames_per_span
    branches = preset.cfg_branches // cfg
    chunks = branches * (preset.sink_frames + window + span)
    size = block_size or block_size_of(chunk, chunks)
    if size < 1 or part_of_blocks(size, chunk) != size:
        raise ValueError(f"`block_size` must divide the {chunk} tokens of a chunk, got {size}")
    rows = 2 * preset.layers * (preset.kv_heads // tp)  # K and V of one token, in heads
    head_bytes = preset.head_size * ITEMSIZE[dtype]
    found = capacity(
        budget,
        page_size_bytes=rows * (size * head_bytes + (4 if dtype == "fp8" else 0)),
        local_branches=branches,
        blocks_per_branch=blocks_per_branch(
            block_size=size,
            chunk_size=chunk,
            window_chunks=window,
            sink_chunks=preset.sink_frames,
            span_chunks=span,
        ),
        cross_attention_bytes=cross_attention_bytes,
        model_owned_bytes=model_owned_bytes,
    )
    sessions = max(1, found.sessions)
    pool = sessions * found.self_attention + found.fixed
    ideal = sessions * chunks * chunk * rows * head_bytes
    visible = (preset.sink_frames + window) * chunk + preset.action_tokens + preset.state_tokens
    read = branches * visible * rows * head_bytes
    steps = preset.denoise_forwards or preset.denoise_steps
    return {
        **asdict(found),
        "block_size": size,
        "blocks_per_chunk": ceil_div(chunk, size),
        "pool_bytes": pool,
        "ideal_bytes": ideal,
        "pool_over_ideal": round(pool / ideal, 4),
        "bytes_read_per_forward": read,
        "bytes_read_per_span": None if steps is None else (steps + 1) * read,
    }
