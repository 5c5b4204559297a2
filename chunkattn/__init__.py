"""Paged attention and a K/V window for chunk-wise autoregressive video and world models."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chunkattn.block_ops import blend_blocks as blend_blocks
    from chunkattn.block_ops import clear_blocks as clear_blocks
    from chunkattn.block_ops import copy_blocks as copy_blocks
    from chunkattn.block_ops import swap_blocks as swap_blocks
    from chunkattn.cache import ARDiffusionKVCache as ARDiffusionKVCache
    from chunkattn.config import ARDiffusionKVConfig as ARDiffusionKVConfig
    from chunkattn.cross_attention import CrossAttentionSpec as CrossAttentionSpec
    from chunkattn.errors import ChunkAttnError as ChunkAttnError
    from chunkattn.errors import LifecycleError as LifecycleError
    from chunkattn.errors import MissingDependencyError as MissingDependencyError
    from chunkattn.errors import PoolExhaustedError as PoolExhaustedError
    from chunkattn.errors import StaleContextError as StaleContextError
    from chunkattn.forward import ForwardContext as ForwardContext
    from chunkattn.functional import paged_window_attention as paged_window_attention
    from chunkattn.functional import scatter_kv as scatter_kv
    from chunkattn.fused import norm_rope_scatter as norm_rope_scatter
    from chunkattn.fused import qk_sum_squares as qk_sum_squares
    from chunkattn.fused import rope_tables as rope_tables
    from chunkattn.manager import ARDiffusionRequestAdapter as ARDiffusionRequestAdapter
    from chunkattn.manager import ChunkWindowManager as ChunkWindowManager
    from chunkattn.manager import ChunkWindowSpec as ChunkWindowSpec
    from chunkattn.manager import build_kv_manager as build_kv_manager
    from chunkattn.merge import merge_states as merge_states
    from chunkattn.pool import allocate_kv_pool_with_views as allocate_kv_pool_with_views
    from chunkattn.pool import chunk_slot_mapping as chunk_slot_mapping
    from chunkattn.pool import compute_num_blocks as compute_num_blocks
    from chunkattn.pool import compute_slot_mapping as compute_slot_mapping
    from chunkattn.pool import pool_write_chunk as pool_write_chunk
    from chunkattn.pool import resident_block_ids as resident_block_ids
    from chunkattn.session import Session as Session
    from chunkattn.window import chunk_window_skipped_tokens as chunk_window_skipped_tokens

_MODULE_OF = {
    "blend_blocks": "block_ops",
    "clear_blocks": "block_ops",
    "copy_blocks": "block_ops",
    "swap_blocks": "block_ops",
    "ARDiffusionKVConfig": "config",
    "CrossAttentionSpec": "cross_attention",
    "ChunkAttnError": "errors",
    "LifecycleError": "errors",
    "MissingDependencyError": "errors",
    "PoolExhaustedError": "errors",
    "StaleContextError": "errors",
    "ARDiffusionKVCache": "cache",
    "norm_rope_scatter": "fused",
    "qk_sum_squares": "fused",
    "rope_tables": "fused",
    "ARDiffusionRequestAdapter": "manager",
    "ChunkWindowManager": "manager",
    "ChunkWindowSpec": "manager",
    "build_kv_manager": "manager",
    "merge_states": "merge",
    "paged_window_attention": "functional",
    "scatter_kv": "functional",
    "allocate_kv_pool_with_views": "pool",
    "chunk_slot_mapping": "pool",
    "compute_num_blocks": "pool",
    "compute_slot_mapping": "pool",
    "pool_write_chunk": "pool",
    "resident_block_ids": "pool",
    "ForwardContext": "forward",
    "Session": "session",
    "chunk_window_skipped_tokens": "window",
}
__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import chunkattn` stays light."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
