"""What the launchers of the attention kernels share: the device, descriptors, arguments."""

import functools
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .arguments import (
    SMALLEST_SOFTMAX_SCALE,
    AttentionArguments,
    Batch,
    QueryStrides,
    TableStrides,
    block_strides,
    entry_strides,
    find_arch,
    row_strides,
    strides,
)
from .primitives import LOG2E
from .tuning import WalkTiles, cdiv, padded_head_size

arch_of = functools.cache(find_arch)  # which torch.compile may trace: it knows no caches


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a large tile run at once; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def batch_of(inputs: AttentionArguments) -> Batch:
    """Where the sequences' rows are, as kernels take it."""
    return Batch(
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.current_start_loc,
        inputs.seq_lens.shape[0],
        inputs.key_pool.shape[2],
        None if inputs.key_extra is None else inputs.key_extra.shape[0],
    )


def launch_arguments(
    inputs: AttentionArguments, tiles: WalkTiles
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and compile-time sizes of a launch of one program a tile of query rows."""
    num_heads, head_size = inputs.out.shape[1:]
    num_kv_heads = inputs.key_pool.shape[2]
    num_seqs = inputs.seq_lens.shape[0]
    if num_seqs == 1:
        num_tiles = cdiv(inputs.num_rows, tiles.block_m)
    else:
        num_tiles = inputs.num_rows // tiles.block_m + num_seqs
    query_strides = inputs.query.stride()
    extra = (inputs.key_extra, inputs.value_extra)
    arguments = (
        inputs.query,
        inputs.key_pool,
        inputs.value_pool,
        inputs.block_table,
        inputs.segment_blocks,
        inputs.key_current,
        inputs.value_current,
        *extra,
        inputs.key_scale,
        inputs.value_scale,
        inputs.block_bias,
        inputs.out,
        inputs.lse,
        batch_of(inputs),
        QueryStrides(query_strides[0] if len(query_strides) == 4 else 0, *query_strides[-3:-1]),
        block_strides(inputs.key_pool),
        block_strides(inputs.value_pool),
        TableStrides(*inputs.block_table.stride()),
        row_strides(inputs.key_current),
        row_strides(inputs.value_current),
        # Numbers that nobody reads would still be parameters.
        *(None if rows is None else row_strides(rows) for rows in extra),
        entry_strides(inputs.key_scale),
        entry_strides(inputs.value_scale),
        entry_strides(inputs.block_bias),
        row_strides(inputs.out),
        row_strides(inputs.lse),
        max(inputs.softmax_scale, SMALLEST_SOFTMAX_SCALE) * LOG2E.value,
    )
    constants = {
        "BLOCK_SIZE": inputs.key_pool.shape[1],
        "HEAD_SIZE": head_size,
        "QUERIES_PER_KV": num_heads // num_kv_heads,
        "BLOCK_M": tiles.block_m,
        "BLOCK_D": padded_head_size(head_size),
        "REST_N": tiles.rest_n,
        "PRECISION": "ieee" if inputs.query.dtype == torch.float32 else "tf32",
        "ONE_SEQ": num_seqs == 1,
        "NUM_SEGMENTS": inputs.num_segments,
    }
    return (num_tiles, num_kv_heads), arguments, constants


def descriptors_fit(key_pool: torch.Tensor, value_pool: torch.Tensor) -> bool:
    """Whether tensor descriptors (TMA) can read the pools: at most 16 bits, aligned, no gaps.

    Only asked on sm_90 and newer; below, Triton turns a descriptor into slow pointers.
    """
    return all(_descriptor_fits(pool) for pool in (key_pool, value_pool))


def _descriptor_fits(pool: torch.Tensor) -> bool:
    # The rules of cuTensorMapEncodeTiled: no empty dimension, 16-byte base and strides, and each
    # stride a multiple of the one inside it.
    num_blocks, _, num_kv_heads, head_size = pool.shape
    stride_block, stride_slot, stride_head, _ = pool.stride()
    return (
        pool.element_size() <= 2
        and head_size in (16, 32, 64, 128)
        and num_blocks > 0
        and pool.data_ptr() % 16 == 0
        and (stride_head == head_size or num_kv_heads == 1)
        and stride_slot >= num_kv_heads * head_size
        and stride_slot * pool.element_size() % 16 == 0
        and stride_block > 0
        and stride_block % stride_slot == 0
    )


def block_descriptors(
    key_pool: torch.Tensor, value_pool: torch.Tensor, rows: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The pools in boxes of one block, ``rows`` rows and one head."""
    return _block_descriptor(key_pool, rows), _block_descriptor(value_pool, rows)


def _block_descriptor(pool: torch.Tensor, rows: int) -> TensorDescriptor:
    num_blocks, block_size, num_kv_heads, head_size = pool.shape
    shape, steps = [num_blocks, block_size, num_kv_heads * head_size], [*strides(pool, 2), 1]
    return TensorDescriptor(pool, shape, steps, [1, rows, head_size])
