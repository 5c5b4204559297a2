"""The K/V pools of all layers, and the slots of token positions."""

from collections.abc import Iterator, Sequence

import torch

from chunkattn.checks import INDEX_DTYPES, POOL_DTYPES, check_fraction, check_int, check_tensor
from chunkattn.window import ceil_div

_ALIGN = 16
"""Bytes that each pool's part of a host copy begins at a multiple of."""


def compute_num_blocks(
    available_bytes: int, gpu_memory_fraction: float, page_size_bytes: int
) -> int:
    """Blocks that fit into a share of the free memory.

    Args:
        available_bytes: free memory.
        gpu_memory_fraction: the share, in (0, 1].
        page_size_bytes: bytes of one block, K and V of all layers.

    Raises:
        ValueError: a page that is not positive, or a fraction outside (0, 1].
    """
    if page_size_bytes <= 0:
        raise ValueError(f"`page_size_bytes` must be positive, got {page_size_bytes}")
    check_fraction(gpu_memory_fraction)
    return max(0, int(available_bytes * gpu_memory_fraction) // page_size_bytes)


def compute_slot_mapping(
    block_ids: Sequence[int], positions: torch.Tensor | Sequence[int], block_size: int
) -> torch.Tensor:
    """Slots of token positions: ``block_ids[position // block_size] * block_size + position %
    block_size``.

    Args:
        block_ids: a request's block table.
        positions: ``(num_tokens,)`` token positions in that table.
        block_size: tokens of a block.

    Returns:
        ``(num_tokens,)`` int64 slots.

    Raises:
        ValueError: a block size that is not positive, a position outside the table, a negative
            block id, or two positions that share a slot.
        TypeError: one of them is no integer.
    """
    check_int("block_size", block_size)
    if block_size <= 0:
        raise ValueError(f"`block_size` must be positive, got {block_size}")
    table, position = _integers("block_ids", block_ids), _integers("positions", positions)
    capacity = table.numel() * block_size
    if position.numel() and not 0 <= int(position.min()) <= int(position.max()) < capacity:
        raise ValueError(
            f"`positions` must be from 0 to {capacity - 1}, what {table.numel()} blocks hold, got "
            f"{int(position.min())} to {int(position.max())}"
        )
    blocks = table[position // block_size]
    if blocks.numel() and int(blocks.min()) < 0:
        raise ValueError(f"`block_ids` must not be negative, got {int(blocks.min())}")
    slots = blocks * block_size + position % block_size
    if slots.unique().numel() != slots.numel():
        raise ValueError(f"`positions` must map to different slots, got slots {slots.tolist()}")
    return slots


def _integers(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    tensor = torch.as_tensor(values)
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(f"`{name}` must be integers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def chunk_slot_mapping(
    block_ids: Sequence[int], num_computed_tokens: int, chunk_size: int, block_size: int
) -> torch.Tensor:
    """Slots of the chunk in flight: positions ``[num_computed_tokens, num_computed_tokens +
    chunk_size)``.
    """
    check_int("num_computed_tokens", num_computed_tokens, 0)
    check_int("chunk_size", chunk_size, 1)
    positions = torch.arange(num_computed_tokens, num_computed_tokens + chunk_size)
    return compute_slot_mapping(block_ids, positions, block_size)


def resident_block_ids(block_ids: Sequence[int], null_block_id: int) -> list[int]:
    """The blocks of a table that are not the null block, in order."""
    return [int(block) for block in block_ids if int(block) != null_block_id]


def allocate_kv_pool_with_views(
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], list[torch.Tensor]]:
    """Allocate the pools of all layers.

    K and V are base allocations of their own: two views of one storage make Inductor clone the
    whole pool in every step. The flat tensors are the bases, marked static, because only a base
    keeps its mark as a graph input. Block 0, the null block, is zero; every other block holds
    garbage until it is written.

    Returns:
        ``views[layer] == [key, value]`` of ``(num_blocks, block_size, num_kv_heads, head_dim)``,
        and the flat ``keys[layer]``, ``values[layer]`` of ``(num_blocks * block_size,
        num_kv_heads, head_dim)``.
    """
    sizes = (num_blocks, block_size, num_layers, num_kv_heads, head_dim)
    names = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim")
    for name, size in zip(names, sizes, strict=True):
        check_int(name, size, 1)
    views, keys, values = [], [], []
    for _ in range(num_layers):
        flats = []
        for _ in range(2):
            flat = torch.empty(
                num_blocks * block_size, num_kv_heads, head_dim, dtype=dtype, device=device
            )
            flat[:block_size].zero_()
            torch._dynamo.mark_static_address(flat)
            flats.append(flat)
        views.append([flat.unflatten(0, (num_blocks, block_size)) for flat in flats])
        keys.append(flats[0])
        values.append(flats[1])
    return views, keys, values


def pool_write_chunk(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one chunk's K and V into its slots, in place.

    Args:
        k_pool: flat ``(num_slots, num_kv_heads, head_size)``, changed in place.
        v_pool: as ``k_pool``.
        new_k: ``(batch, chunk_size, num_kv_heads, head_size)``; batch entry 0 is written.
        new_v: as ``new_k``.
        slot_mapping: ``(chunk_size,)`` int32 or int64.
    """
    from chunkattn.block_ops import to_device
    from chunkattn.functional import scatter_kv

    for name, new in (("new_k", new_k), ("new_v", new_v)):
        check_tensor(name, new, (4,), POOL_DTYPES)
        if new.shape[0] < 1:
            raise ValueError(f"`{name}` must have a batch of at least 1, got {tuple(new.shape)}")
    check_tensor("slot_mapping", slot_mapping, (1,), INDEX_DTYPES)
    slots = to_device(slot_mapping, k_pool.device)
    scatter_kv(new_k[0], new_v[0], k_pool, v_pool, slots)


def copy_blocks(pools: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks within each pool, in place: `block_ops` for all layers.

    Args:
        pools: K and V of every layer in turn, ``(num_blocks, block_size, num_kv_heads, head_size)``
            and what belongs to their blocks, ``(num_blocks, ...)``.
        pairs: the source and the target block of each copy; no target is also a source.
    """
    if not pairs or not pools:
        return
    from chunkattn import block_ops

    ids = block_ops.to_device(torch.tensor(pairs).T.contiguous(), pools[0].device)
    for key, value in _layers(pools):
        block_ops.copy_blocks_op(key, value, *ids, "triton" if key.is_cuda else "torch")


def _layers(pools: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """K and V of each layer, as blocks of four dimensions."""
    for pair in zip(pools[::2], pools[1::2], strict=True):
        yield [pool[(slice(None), *(None,) * (4 - pool.dim()))] for pool in pair]


class HostCopy:
    """Bytes of blocks in host memory, pinned where the pools lie on a GPU.

    Args:
        pools: as for `copy_blocks`.
        block_ids: blocks to copy, in this order.
    """

    def __init__(self, pools: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        self.num_blocks = len(block_ids)
        # One allocation: pinned ones take long, and torch rounds each up to a power of two.
        num_bytes = [ceil_div(self.num_blocks * pool[0].nbytes, _ALIGN) * _ALIGN for pool in pools]
        host = torch.empty(
            sum(num_bytes), dtype=torch.uint8, pin_memory=bool(pools) and pools[0].is_cuda
        )
        self._host = [
            part[: self.num_blocks * pool[0].nbytes]
            .view(pool.dtype)
            .view(self.num_blocks, *pool.shape[1:])
            for pool, part in zip(pools, host.split(num_bytes), strict=True)
        ]
        self._swap(pools, self._host, block_ids, range(len(block_ids)))
        self._copied: torch.cuda.Event | None = None
        if pools and pools[0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(pools[0].device))

    def restore(self, pools: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
        """Write the bytes into as many other blocks, in place."""
        if self._copied is not None:
            # For this stream, not for the host.
            self._copied.wait(torch.cuda.current_stream(pools[0].device))
        self._swap(self._host, pools, range(self.num_blocks), block_ids)

    @staticmethod
    def _swap(
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        from chunkattn import block_ops

        ids = torch.tensor([list(source_ids), list(target_ids)], dtype=torch.int64)
        for source, target in zip(_layers(sources), _layers(targets), strict=True):
            block_ops.swap_blocks_op(*source, *target, *ids, "torch")
