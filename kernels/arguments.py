"""The checked arguments of one call, the same for every kernel and for the torch backend.

Layouts (strides are in elements; the last one is 1):

    query                       (num_tokens, num_heads, head_size), or one for each segment of the
                                keys: (num_segments, num_tokens, num_heads, head_size)
    key_pool, value_pool        (num_blocks, block_size, num_kv_heads, head_size)
    block_table                 (num_seqs, max_blocks)
    seq_lens                    (num_seqs,)     visible rows of each sequence in the pool
    query_start_loc             (num_seqs + 1,)
    segment_blocks              (num_seqs, num_segments - 1): entries of the table that each query
                                but the last attends to
    key_current, value_current  (num_current, num_kv_heads, head_size), visible after the paged rows
    current_start_loc           (num_seqs + 1,)
    key_extra, value_extra      (num_extra, num_kv_heads, head_size), visible after the current rows
                                of the one sequence there is
    key_scale, value_scale      (num_blocks, num_kv_heads) float32: a stored row times its scale is
                                the row
    block_bias                  (num_blocks, num_kv_heads) float32, added to the scores of a block
    out                         (num_tokens, num_heads, head_size)
    lse                         (num_tokens, num_heads) float32, natural log

and of what is written:

    key, value                  (num_tokens, num_kv_heads, head_size)
    key_extra, value_extra      (num_extra, num_kv_heads, head_size), written after the others
                                (action rows)
    slot_mapping                (num_tokens + num_extra,); slot = block * block_size + offset, below
                                0 means skip

and of what is normalised and rotated on the way:

    query, query_out            (num_tokens, num_heads, head_size)
    query_weight, key_weight    (heads * head_size,) of an RMSNorm over all heads of a token
    cos, sin                    (num_tokens, head_size // 2) float32, of pairs (2i, 2i + 1)
    sum_squares                 (num_tokens, 2) float32 of Q and K, where ranks share the heads
"""

from typing import NamedTuple

import torch

SMALLEST_SOFTMAX_SCALE = 1e-30
"""Stands for 0: every key weighs the same, and a masked score stays -inf: -inf * 0 would be NaN."""


class AttentionArguments(NamedTuple):
    """Tensors of one call as the module says. ``out`` and ``lse`` are written, nothing else is."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    key_current: torch.Tensor | None
    value_current: torch.Tensor | None
    current_start_loc: torch.Tensor | None
    segment_blocks: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    block_bias: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    softmax_scale: float
    key_extra: torch.Tensor | None = None
    value_extra: torch.Tensor | None = None

    @property
    def num_segments(self) -> int:
        return self.query.shape[0] if self.query.dim() == 4 else 1

    @property
    def num_rows(self) -> int:
        """Query rows of one K/V head: those of all query heads that read it."""
        return self.out.shape[0] * (self.out.shape[1] // self.key_pool.shape[2])


class ScatterArguments(NamedTuple):
    """Tensors of one write as the module says; the pools are written.

    A scale of one number, 0-D or ``(1,)``, is read. Scales ``(num_blocks, num_kv_heads)`` are
    written too: see `scales`.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_extra: torch.Tensor | None
    value_extra: torch.Tensor | None
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


class FusedArguments(NamedTuple):
    """Tensors of one `fused.fused` as the module says; ``query_out`` and the pools are written.

    A scale is one number, 0-D, or ``(num_blocks, num_kv_heads)``; both kinds are only read.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_weight: torch.Tensor | None
    key_weight: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    sum_squares: torch.Tensor | None
    query_out: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    eps: float
    tp_size: int
    rotate_key: bool


# What kernels take besides flat pointers and numbers. Strides are in elements.
class QueryStrides(NamedTuple):
    segment: int
    token: int
    head: int


class RowStrides(NamedTuple):
    token: int
    head: int


class BlockStrides(NamedTuple):
    block: int
    slot: int
    head: int


class TableStrides(NamedTuple):
    seq: int
    entry: int


class EntryStrides(NamedTuple):
    block: int
    head: int


class SumStrides(NamedTuple):
    token: int
    which: int  # of Q and K


class Batch(NamedTuple):
    """Where each sequence's rows are; how many sequences, K/V heads and extra rows there are."""

    query_start_loc_ptr: torch.Tensor
    seq_lens_ptr: torch.Tensor
    current_start_loc_ptr: torch.Tensor | None
    num_seqs: int
    num_kv_heads: int
    num_extra: int | None


def strides(tensor: torch.Tensor | None, num_dims: int) -> tuple[int, ...]:
    """The first ``num_dims`` strides, zeros for an argument that is not there."""
    return (0,) * num_dims if tensor is None else tensor.stride()[:num_dims]


def row_strides(rows: torch.Tensor | None) -> RowStrides:
    return RowStrides(*strides(rows, 2))


def block_strides(pool: torch.Tensor) -> BlockStrides:
    return BlockStrides(*strides(pool, 3))


def entry_strides(entries: torch.Tensor | None) -> EntryStrides:
    return EntryStrides(*strides(entries, 2))


def scale_strides(scale: torch.Tensor | None) -> EntryStrides:
    """Strides of a scale: zeros where one number stands for every block and head."""
    return entry_strides(scale if scale is not None and scale.dim() == 2 else None)


def find_arch(device: torch.device) -> int:
    """Compute capability as one number; 0 where the kernel is interpreted, and on an AMD GPU."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
