"""Settings of the K/V window."""

import re
from dataclasses import dataclass


@dataclass
class ARDiffusionKVConfig:
    """What a model asks of its K/V cache.

    Attributes:
        enable: a cache is only built from an enabled config.
        chunk_size: tokens of one chunk, the unit of commit and eviction (one latent frame for
            DreamZero).
        window_chunks: the last chunks that stay visible, the span in flight counted in. Must be
            set.
        sink_chunks: the first chunks of the rollout, which stay for ever.
        reset_at_boundary: after every commit drop everything but the sink, instead of sliding.
        gpu_memory_fraction: share of the free memory that the managed blocks may take, in (0, 1].
    """

    enable: bool = False
    chunk_size: int = 0
    window_chunks: int | None = None
    sink_chunks: int = 0
    reset_at_boundary: bool = False
    gpu_memory_fraction: float = 0.1

    @property
    def sliding_window(self) -> int | None:
        """The window in tokens, or None when ``window_chunks`` is not set."""
        return None if self.window_chunks is None else self.window_chunks * self.chunk_size


SUPPORTED_VLLM = ((0, 28), (0, 33))
"""The oldest and the newest minor version of vLLM that the manager is tested with."""


def untested_vllm(version: str) -> str:
    """What to say of a vLLM that is not one of those; empty of one that is."""
    first, last = SUPPORTED_VLLM
    found = re.match(r"(\d+)\.(\d+)", version)  # a checkout may say "dev"
    tested = found is not None and first <= tuple(map(int, found.groups())) <= last
    return "" if tested else f"tested are {supported_vllm()}"


def supported_vllm() -> str:
    """`SUPPORTED_VLLM` in words."""
    return " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VLLM)
