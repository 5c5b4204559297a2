"""What the launchers of the attention kernels share: the device, and arguments of all kernels."""

import functools
from typing import Any

import torch
import triton

from .primitives import LOG2E, strides
from .tuning import next_power_of_2

NUM_POINTERS = 11
"""Tensors that `launch_arguments` puts before the scalars."""

# Stands for 0: every key weighs the same, and a masked score stays -inf (-inf * 0 would be NaN).
_SMALLEST_SCALE = 1e-30


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability as one number; 0 where the kernel is interpreted, and on an AMD GPU."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch_arguments(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_current: torch.Tensor | None,
    value_current: torch.Tensor | None,
    current_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    block_m: int,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, positional arguments, compile-time sizes of a launch over tiles of ``block_m`` rows."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key_pool.shape[2]
    num_seqs = seq_lens.shape[0]
    num_rows = num_tokens * (num_heads // num_kv_heads)
    if num_seqs == 1:
        num_tiles = triton.cdiv(num_rows, block_m)
    else:
        num_tiles = num_rows // block_m + num_seqs
    arguments = (
        query,
        key_pool,
        value_pool,
        block_table,
        seq_lens,
        query_start_loc,
        key_current,
        value_current,
        current_start_loc,
        out,
        lse,
        max(softmax_scale, _SMALLEST_SCALE) * LOG2E,
        num_seqs,
        *strides(query, 2),
        *strides(key_pool, 3),
        *strides(value_pool, 3),
        *strides(block_table, 2),
        *strides(key_current, 2),
        *strides(value_current, 2),
        *strides(out, 2),
        *strides(lse, 2),
    )
    constants = {
        "HEAD_SIZE": head_size,
        "QUERIES_PER_KV": num_heads // num_kv_heads,
        "BLOCK_M": block_m,
        "BLOCK_D": max(16, next_power_of_2(head_size)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "ONE_SEQ": num_seqs == 1,
        "HAS_CURRENT": key_current is not None,
        "HAS_LSE": lse is not None,
    }
    return (num_tiles, num_kv_heads), arguments, constants
