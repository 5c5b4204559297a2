"""Slots, block counts, and the pools with their views."""

import inspect

import pytest
import torch

from chunkattn import (
    allocate_kv_pool_with_views,
    chunk_slot_mapping,
    chunk_window_skipped_tokens,
    compute_num_blocks,
    compute_slot_mapping,
    pool_write_chunk,
    resident_block_ids,
)

CPU = torch.device("cpu")


# -- how many blocks ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("available", "fraction", "page", "blocks"),
    [
        (1000, 1.0, 100, 10),
        (1000, 0.1, 100, 1),
        (999, 0.1, 100, 0),
        (0, 1.0, 7, 0),
        (1000, 1, 7, 142),
    ],
)
def test_compute_num_blocks(available, fraction, page, blocks):
    assert compute_num_blocks(available, fraction, page) == blocks


@pytest.mark.parametrize("page", [0, -1])
def test_compute_num_blocks_refuses_a_page_of_no_bytes(page):
    with pytest.raises(ValueError, match=rf"`page_size_bytes` must be positive, got {page}"):
        compute_num_blocks(1000, 0.5, page)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_compute_num_blocks_refuses_a_fraction_that_is_none(fraction):
    with pytest.raises(ValueError, match=r"`gpu_memory_fraction` must be in \(0, 1\], got"):
        compute_num_blocks(1000, fraction, 10)


# -- slots -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["list", "tensor"])
def test_slot_mapping_over_a_block_edge(kind):
    """A11: block 4, table [5, 2, 7], positions 6 to 9."""
    slots = compute_slot_mapping([5, 2, 7], kind([6, 7, 8, 9]), 4)
    assert slots.tolist() == [10, 11, 28, 29]
    assert slots.dtype == torch.int64
    assert chunk_slot_mapping([5, 2, 7], 6, 4, 4).tolist() == [10, 11, 28, 29]


def test_slot_mapping_addresses_rows():
    """A11: the slots are rows of the flat pool, whatever the number of heads."""
    views, keys, _ = allocate_kv_pool_with_views(8, 4, 1, 3, 2, torch.float32, CPU)
    for slot in compute_slot_mapping([5, 2, 7], [6, 7, 8, 9], 4).tolist():
        keys[0][slot] = slot
        assert (views[0][0][slot // 4, slot % 4] == slot).all()


@pytest.mark.parametrize("block_size", [1, 6, 12, 16, 880, 1560])
def test_slot_mapping_at_any_block_size(block_size):
    """A12: two blocks and a token."""
    table = [7, 3, 5]
    slots = compute_slot_mapping(table, range(2 * block_size + 1), block_size).tolist()
    assert slots == [
        table[p // block_size] * block_size + p % block_size for p in range(2 * block_size + 1)
    ]


def test_slot_mapping_of_nothing():
    assert compute_slot_mapping([], [], 4).tolist() == []


@pytest.mark.parametrize(
    ("table", "positions", "block_size", "message"),
    [
        ([5], [0, 0], 1, "`positions` must map to different slots, got slots"),
        ([5], [3, 3, 1], 4, "`positions` must map to different slots, got slots"),
        ([5, 5], [0, 4], 4, "`positions` must map to different slots, got slots"),
        ([5, 2], [7, 8], 4, "`positions` must be from 0 to 7, what 2 blocks hold, got 7 to 8"),
        ([5, 2], [-1], 4, "`positions` must be from 0 to 7, what 2 blocks hold, got -1 to -1"),
        ([5, -1], [4], 4, "`block_ids` must not be negative, got -1"),
        ([5], [0], 0, "`block_size` must be positive, got 0"),
        ([5], [0], -4, "`block_size` must be positive, got -4"),
    ],
)
def test_slot_mapping_refuses(table, positions, block_size, message):
    """A9, A10: two tokens in one slot, a token behind the table, a block that is none."""
    with pytest.raises(ValueError, match=message):
        compute_slot_mapping(table, positions, block_size)


@pytest.mark.parametrize(
    ("table", "positions", "block_size", "message"),
    [
        ([1.7, 2], [0], 4, "`block_ids` must be integers, got torch.float32"),
        ([1, 2], [0.5], 4, "`positions` must be integers, got torch.float32"),
        ([1, 2], torch.tensor([True]), 4, "`positions` must be integers, got torch.bool"),
        ([1, 2], [0], 4.0, "`block_size` must be an integer, got 4.0"),
    ],
)
def test_slot_mapping_refuses_what_is_no_integer(table, positions, block_size, message):
    """Block 1.7 was block 1."""
    with pytest.raises(TypeError, match=message):
        compute_slot_mapping(table, positions, block_size)


def test_chunk_slot_mapping_refuses_an_unallocated_chunk():
    """A9: the table holds less than the chunk."""
    with pytest.raises(ValueError, match="`positions` must be from 0 to 7, .* got 4 to 9"):
        chunk_slot_mapping([5, 2], 4, 6, 4)


def test_resident_block_ids():
    assert resident_block_ids([3, 0, 0, 7, 1], 0) == [3, 7, 1]
    assert resident_block_ids([3, 0], 3) == [0]


# -- pools -------------------------------------------------------------------------------------
def test_pools_are_static_bases_of_their_own():
    """H1: two views of one storage make Inductor clone the pool; only a base keeps its mark."""
    views, keys, values = allocate_kv_pool_with_views(5, 4, 3, 2, 8, torch.float16, CPU)
    assert len(views) == len(keys) == len(values) == 3
    storages = set()
    for (key_view, value_view), key, value in zip(views, keys, values, strict=True):
        for view, flat in ((key_view, key), (value_view, value)):
            assert view.shape == (5, 4, 2, 8)
            assert flat.shape == (20, 2, 8)
            assert view.dtype == flat.dtype == torch.float16
            assert view.is_contiguous()
            assert not flat._is_view()
            assert view.data_ptr() == flat.data_ptr()
            assert getattr(flat, "_dynamo_static_input_type", None) is not None
            storages.add(flat.untyped_storage().data_ptr())
    assert len(storages) == 6


def test_null_block_is_zero(monkeypatch):
    """C3: whatever the allocation held, nobody reads garbage from block 0."""
    empty = torch.empty
    garbage = lambda *a, **k: empty(*a, **k).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", garbage)
    views, _, _ = allocate_kv_pool_with_views(3, 4, 2, 1, 8, torch.float32, CPU)
    for view in (pool for layer in views for pool in layer):
        assert (view[0] == 0).all()
        assert view[1:].isnan().all()


def test_pool_write_chunk_writes_its_slots_and_no_others():
    _, keys, values = allocate_kv_pool_with_views(4, 4, 1, 2, 8, torch.float32, CPU)
    new_k, new_v = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    for dtype in (torch.int32, torch.int64):
        keys[0].fill_(-7)
        values[0].fill_(-7)
        slots = torch.tensor([9, 4, 15], dtype=dtype)
        pool_write_chunk(keys[0], values[0], new_k, new_v, slots)
        for pool, new in ((keys[0], new_k), (values[0], new_v)):
            assert torch.equal(pool[slots.long()], new[0])  # batch entry 0
            others = torch.ones(16, dtype=torch.bool)
            others[slots.long()] = False
            assert (pool[others] == -7).all()


def test_pool_write_chunk_twice_is_once():
    """H4."""
    _, keys, values = allocate_kv_pool_with_views(2, 4, 1, 1, 8, torch.float32, CPU)
    new, slots = torch.randn(1, 4, 1, 8), torch.tensor([4, 5, 6, 7])
    pool_write_chunk(keys[0], values[0], new, -new, slots)
    once = keys[0].clone(), values[0].clone()
    pool_write_chunk(keys[0], values[0], new, -new, slots)
    assert torch.equal(keys[0][4:], once[0][4:])
    assert torch.equal(values[0][4:], once[1][4:])


good = torch.zeros(1, 4, 1, 8)


@pytest.mark.parametrize(
    ("new_k", "new_v", "slots", "message"),
    [
        (good[0], good, [4, 5, 6, 7], "`new_k` must be 4-D, got shape \\(4, 1, 8\\)"),
        (good, good[0], [4, 5, 6, 7], "`new_v` must be 4-D, got shape \\(4, 1, 8\\)"),
        (
            good[:0],
            good,
            [4, 5, 6, 7],
            "`new_k` must have a batch of at least 1, got \\(0, 4, 1, 8\\)",
        ),
        (good, good[:, :3], [4, 5, 6, 7], "`value` must have shape \\(4, 1, 8\\)"),
        (good, good, [4, 5, 6], "`slot_mapping` must have shape \\(4,\\)"),
        (good, good, [4, 5, 6, 8], "`slot_mapping` must stay below the pool's 8 slots, got 8"),
        (
            good,
            good,
            [4, 5, 6, 6],
            "`slot_mapping` must name each slot at most once, got slot 6 2 times",
        ),
        (good.expand(1, 4, 2, 8), good, [4, 5, 6, 7], "`key` must have shape \\(4, 1, 8\\)"),
    ],
)
def test_pool_write_chunk_refuses(new_k, new_v, slots, message):
    """A6, A8, A9, A10: refused by name, nothing written."""
    _, keys, values = allocate_kv_pool_with_views(2, 4, 1, 1, 8, torch.float32, CPU)
    keys[0].fill_(-7)
    values[0].fill_(-7)
    with pytest.raises(ValueError, match=message):
        pool_write_chunk(keys[0], values[0], new_k, new_v, torch.tensor(slots))
    assert (keys[0] == -7).all()
    assert (values[0] == -7).all()


def test_pool_write_chunk_rounds_as_torch_does():
    """E9: float32 K/V into a float16 pool."""
    _, keys, values = allocate_kv_pool_with_views(2, 4, 1, 1, 8, torch.float16, CPU)
    new = torch.randn(1, 4, 1, 8)
    pool_write_chunk(keys[0], values[0], new, new, torch.arange(4, 8))
    assert torch.equal(keys[0][4:], new[0].half())
    with pytest.raises(TypeError, match="`new_k` must have one of the dtypes .*, got torch.int32"):
        pool_write_chunk(keys[0], values[0], new.int(), new.int(), torch.arange(4, 8))


# -- the seed's names --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (compute_num_blocks, "available_bytes gpu_memory_fraction page_size_bytes"),
        (compute_slot_mapping, "block_ids positions block_size"),
        (chunk_slot_mapping, "block_ids num_computed_tokens chunk_size block_size"),
        (resident_block_ids, "block_ids null_block_id"),
        (pool_write_chunk, "k_pool v_pool new_k new_v slot_mapping"),
        (
            allocate_kv_pool_with_views,
            "num_blocks block_size num_layers num_kv_heads head_dim dtype device",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_arguments(function, arguments):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters] == arguments.split()
    assert all(p.default is p.empty for p in parameters)


def test_the_pool_functions_name_what_is_wrong():
    with pytest.raises(ValueError, match="^`chunk_size` must be at least 1, got -4"):
        chunk_slot_mapping([5, 2], 4, -4, 4)
    with pytest.raises(ValueError, match="^`num_computed_tokens` must be at least 0, got -1"):
        chunk_slot_mapping([5, 2], -1, 4, 4)
    pools, rows = torch.zeros(2, 8, 1, 8), torch.zeros(1, 4, 1, 8)
    with pytest.raises(TypeError, match="^`slot_mapping` must be a torch.Tensor, got list"):
        pool_write_chunk(*pools, rows, rows, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="^`num_blocks` must be at least 1, got -1"):
        allocate_kv_pool_with_views(-1, 4, 1, 1, 8, torch.float32, torch.device("cpu"))
    window = {"sliding_window": 4, "sink_chunks": 0, "reset_at_boundary": False}
    with pytest.raises(ValueError, match="^`chunk_size` must be at least 1, got 0"):
        chunk_window_skipped_tokens(8, chunk_size=0, **window)
