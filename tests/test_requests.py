"""The seed's low-level calls: one request for each branch of a rollout, block by block."""

import pytest
import torch

from chunkattn import (
    ChunkAttnError,
    LifecycleError,
    PoolExhaustedError,
    compute_slot_mapping,
)
from tests.helpers.rollout import RELATIONS, TG, Window, make_cache, state


def commit(cache, adapter, num_chunks: int = 1) -> None:
    for _ in range(num_chunks):
        cache.allocate_chunk(adapter)
        cache.commit_chunk(adapter)


# -- requests -------------------------------------------------------------------------------------
def test_a_chunk_keeps_its_slots_until_it_is_committed():
    cache = make_cache()
    adapter = cache.begin_request("r")
    table = cache.allocate_chunk(adapter)
    slots = cache.chunk_write_slots(adapter)
    assert slots.tolist() == [table[0] * 4 + i for i in range(4)]
    assert cache.allocate_chunk(adapter) == table == cache.block_table(adapter)
    assert torch.equal(cache.chunk_write_slots(adapter), slots)
    cache.commit_chunk(adapter)
    assert len(cache.allocate_chunk(adapter)) == 2
    assert cache.chunk_write_slots(adapter).tolist()[0] // 4 == cache.block_table(adapter)[1]
    cache.end_request(adapter)
    assert cache.num_free_blocks == 40


def test_storage_and_time_line():
    """B11: 8 commits: absolute 32, storage 16; a surviving block's bytes never change."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    bytes_of: dict[int, torch.Tensor] = {}
    for chunk in range(8):
        cache.allocate_chunk(adapter)
        new = torch.full((1, 4, 1, 8), float(chunk))
        cache.write_chunk_kv(0, new, -new, adapter)
        cache.commit_chunk(adapter)
        for block in cache.window_block_ids(adapter):
            key = cache.key_cache(0)[block].clone()
            assert torch.equal(cache.value_cache(0)[block], -key)
            assert torch.equal(bytes_of.setdefault(block, key), key)
        assert cache.window_block_ids(adapter) == cache.block_table(adapter)
        for block in set(bytes_of) - set(cache.window_block_ids(adapter)):
            del bytes_of[block]  # a later chunk may be given it
    assert adapter.absolute_num_computed_tokens == 32
    assert adapter.completed_chunks == 8
    assert adapter.num_computed_tokens == 16
    held = [int(cache.key_cache(0)[b, 0, 0, 0]) for b in cache.window_block_ids(adapter)]
    assert held == [0, 5, 6, 7]


def test_history_is_committed_chunks_only():
    """B15: two chunks allocated, one committed."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    table = cache.allocate_token_slots(adapter, 8)
    assert len(table) == 2
    assert cache.window_block_ids(adapter) == []
    cache.commit_chunk(adapter)
    assert cache.window_block_ids(adapter) == table[:1]
    cache.commit_chunk(adapter)
    assert cache.window_block_ids(adapter) == table
    cache.check_integrity()


def test_a_live_request_id_is_refused():
    """F3: else the old history would be shown at position 0."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    commit(cache, adapter, 2)
    before = state(cache)
    with pytest.raises(LifecycleError, match="`request_id` must be new, got 'r', which is live"):
        cache.begin_request("r")
    assert state(cache) == before
    cache.end_request(adapter)
    assert cache.block_table(cache.begin_request("r")) == []


def test_a_second_commit_and_one_without_slots_are_refused():
    """F4."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    before = state(cache)
    with pytest.raises(
        LifecycleError, match="'r' has 0 allocated tokens in flight, 1 chunk.* needed"
    ):
        cache.commit_chunk(adapter)
    with pytest.raises(LifecycleError, match="allocate first"):
        cache.chunk_write_slots(adapter)
    assert state(cache) == before
    commit(cache, adapter)
    before = state(cache)
    with pytest.raises(LifecycleError, match="allocate first"):
        cache.commit_chunk(adapter)
    cache.allocate_token_slots(adapter, 3)
    with pytest.raises(LifecycleError, match="has 3 allocated tokens in flight, 1 chunk"):
        cache.commit_chunk(adapter)
    cache.release_uncommitted(adapter)
    assert state(cache) == before


def test_an_ended_request_is_refused():
    """F2, F11: whatever it is asked to do; ending it twice is nothing."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    commit(cache, adapter, 3)
    cache.end_request(adapter)
    successor = cache.begin_request("r")
    commit(cache, successor)
    before = state(cache)
    chunk = torch.zeros(1, 4, 1, 8)
    for call in (
        lambda: cache.allocate_chunk(adapter),
        lambda: cache.commit_chunk(adapter),
        lambda: cache.chunk_write_slots(adapter),
        lambda: cache.write_chunk_kv(0, chunk, chunk, adapter),
        lambda: cache.release_uncommitted(adapter),
    ):
        with pytest.raises(LifecycleError, match="request 'r' has ended"):
            call()
    cache.end_request(adapter)
    assert state(cache) == before


def test_exhaustion_leaves_nothing_pending():
    """G1: 6 free blocks, two requests; the second runs out, the first ends, the same call works."""
    cache = make_cache(usable=6)
    first, second = cache.begin_request("a"), cache.begin_request("b")
    commit(cache, first, 4)
    commit(cache, second, 2)
    before = state(cache)
    for _ in range(2):
        with pytest.raises(PoolExhaustedError, match="exhausted: 0 free blocks are too few for 4"):
            cache.allocate_chunk(second)
        assert state(cache) == before
        cache.check_integrity()
    cache.end_request(first)
    table = cache.allocate_chunk(second)
    assert len(table) == 3
    assert cache.num_free_blocks == 3


@pytest.mark.parametrize("num_tokens", [0, -4])
def test_a_span_of_nothing_is_refused(num_tokens):
    """D6."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    with pytest.raises(ValueError, match=f"`num_tokens` must be positive, got {num_tokens}"):
        cache.allocate_token_slots(adapter, num_tokens)
    assert cache.num_free_blocks == 40


# -- a prefix -----------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", [1, 4, 6, 13, 16])
@pytest.mark.parametrize(("chunk", "block"), [*RELATIONS, (24, 5)])
@pytest.mark.parametrize(
    "policy", [TG, Window(2, 0), Window(2, 0, True)], ids=["S1", "S0", "reset"]
)
def test_prefix(chunk, block, policy, prefix):
    """A prefix counts as committed from the start; eviction stays exact to the token."""
    cache = make_cache(chunk, block, policy, usable=200)
    adapter = cache.begin_request("r", prefill_prefix_tokens=prefix)
    assert adapter.num_computed_tokens == prefix
    table = cache.allocate_chunk(adapter)
    assert compute_slot_mapping(table, range(prefix), block).unique().numel() == prefix
    owner = dict(enumerate(table))  # block on the time line -> block of the pool
    sink, window = policy.sink * chunk, policy.window * chunk
    for step in range(1, 12):
        cache.allocate_chunk(adapter)
        cache.check_integrity()
        start, end = prefix + (step - 1) * chunk, prefix + step * chunk
        slots = cache.chunk_write_slots(adapter)
        for token, slot in zip(range(start, end), slots.tolist(), strict=True):
            assert owner.setdefault(token // block, slot // block) == slot // block
            assert slot % block == token % block
        cache.commit_chunk(adapter)
        recent = end if policy.reset else end - window
        recent -= (recent - sink) % chunk  # a chunk leaves as a whole
        live = [t // block for t in range(end) if t < sink or t >= recent]
        live += [end // block] * (end % block > 0)  # it is being filled
        table = cache.block_table(adapter)
        assert table == [owner[b] for b in dict.fromkeys(live)]
        assert cache.window_block_ids(adapter) == table
        assert adapter.absolute_num_computed_tokens == end
        cache.check_integrity()


def test_a_prefix_that_does_not_fit_is_exhaustion():
    """vLLM's own count is short for a prefix longer than the window, and would raise its own."""
    cache = make_cache(policy=Window(2, 0), usable=6)
    adapter = cache.begin_request("r", prefill_prefix_tokens=24)
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match="pool exhausted: 6 free blocks"):
        cache.allocate_chunk(adapter)
    assert state(cache) == before
    cache.end_request(adapter)
    fits = cache.begin_request("r", prefill_prefix_tokens=20)
    assert len(cache.allocate_chunk(fits)) == 6
    cache.commit_chunk(fits)
    assert len(cache.block_table(fits)) == 2
    cache.check_integrity()


def test_a_negative_prefix_is_refused():
    cache = make_cache()
    with pytest.raises(ValueError, match="`prefill_prefix_tokens` must not be negative, got -1"):
        cache.begin_request("r", prefill_prefix_tokens=-1)
    cache.begin_request("r")


def test_giving_back_before_the_first_allocation():
    """A prefix counts as computed, but it owns no block yet."""
    cache = make_cache()
    adapter = cache.begin_request("r", prefill_prefix_tokens=8)
    cache.release_uncommitted(adapter)
    cache.check_integrity()
    assert cache.block_table(adapter) == []


# -- pools --------------------------------------------------------------------------------------
def test_write_chunk_kv_writes_the_chunk_in_flight():
    cache = make_cache(layers=2)
    adapter = cache.begin_request("r")
    commit(cache, adapter)
    (first, second) = cache.allocate_chunk(adapter)
    before = cache.flat_key_pool(0).clone()
    new_k, new_v = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8)
    cache.write_chunk_kv(1, new_k, new_v, adapter)
    assert torch.equal(cache.key_cache(1)[second], new_k[0])
    assert torch.equal(cache.value_cache(1)[second], new_v[0])
    assert cache.key_cache(1)[first].isnan().all()
    assert torch.equal(cache.flat_key_pool(0), before) or cache.flat_key_pool(0).isnan().any()
    assert cache.flat_key_pool(1).data_ptr() == cache.key_cache(1).data_ptr()
    assert cache.flat_value_pool(1).data_ptr() == cache.value_cache(1).data_ptr()


@pytest.mark.parametrize(
    ("new_k", "layer", "message"),
    [
        (
            torch.zeros(1, 3, 1, 8),
            0,
            r"`value` must have shape \(3, 1, 8\)",
        ),
        (torch.zeros(4, 1, 8), 0, r"`new_k` must be 4-D, got shape \(4, 1, 8\)"),
        (torch.zeros(1, 4, 2, 8), 0, r"`key` must have shape \(4, 1, 8\)"),
        (torch.zeros(1, 4, 1, 8), 1, "`layer_index` must be from 0 to 0, got 1"),
        (torch.zeros(1, 4, 1, 8), -1, "`layer_index` must be from 0 to 0, got -1"),
    ],
)
def test_write_chunk_kv_refuses(new_k, layer, message):
    cache = make_cache()
    adapter = cache.begin_request("r")
    cache.allocate_chunk(adapter)
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        cache.write_chunk_kv(layer, new_k, torch.zeros(1, 4, 1, 8), adapter)
    assert state(cache) == before


def test_books_without_tensors():
    """``device=None``: every block is accounted for, and there is nothing to read or write."""
    cache = make_cache(device=None, local_branches=2, layers=3)
    adapter = cache.begin_request("r")
    commit(cache, adapter, 6)
    assert len(cache.block_table(adapter)) == 4
    cache.allocate_chunk(adapter)
    chunk = torch.zeros(1, 4, 1, 8)
    for call in (
        lambda: cache.key_cache(0),
        lambda: cache.value_cache(2),
        lambda: cache.flat_key_pool(0),
        lambda: cache.write_chunk_kv(0, chunk, chunk, adapter),
    ):
        with pytest.raises(LifecycleError, match=r"built without tensors \(device=None\)"):
            call()
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=f"`layer_idx` must be from 0 to 2, got {layer}"):
            cache.key_cache(layer)
    cache.end_request(adapter)
    assert cache.num_free_blocks == 40


# -- the recount --------------------------------------------------------------------------------
def _share(cache, a, b):
    cache._window_manager.req_to_blocks["b"][0] = cache._window_manager.req_to_blocks["a"][0]


def _lose(cache, a, b):
    cache._window_manager.req_to_blocks["b"].pop()


def _lose_and_forget(cache, a, b):
    cache._window_manager.req_to_blocks["b"].pop()
    b.allocated_tokens -= 4


def _count_up(cache, a, b):
    cache._window_manager.req_to_blocks["a"][1].ref_cnt += 1


def _count_a_free_one(cache, a, b):
    free = set(range(1, 41)) - set(cache.block_table(a)) - set(cache.block_table(b))
    cache.manager.block_pool.blocks[min(free)].ref_cnt = 1


def _free_twice(cache, a, b):
    (block,) = cache.manager.block_pool.get_new_blocks(1)
    block.ref_cnt = 0


def _null_in_the_window(cache, a, b):
    blocks = cache._window_manager.req_to_blocks["a"]
    cache.manager.block_pool.free_blocks([blocks[1]])
    blocks[1] = cache.manager.block_pool.null_block


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_share, "block 1 is owned by 'a' and by 'b'"),
        (_lose, "request 'b' has 1 blocks for 8 tokens"),
        (_lose_and_forget, "has 0 owner.* and reference count 1"),
        (_count_up, "block 2 has 1 owner.* and reference count 2"),
        (_count_a_free_one, "has 0 owner.* and reference count 1"),
        (_free_twice, "5 owned . 34 free . the null block are not the pool's 41"),
        (_null_in_the_window, "request 'a' sees the null block: "),
    ],
)
def test_check_integrity_finds(tamper, message):
    """I6: a block with two owners, none, or a wrong count is named."""
    cache = make_cache()
    a, b = cache.begin_request("a"), cache.begin_request("b")
    commit(cache, a, 3)
    commit(cache, b, 2)
    cache.check_integrity()
    tamper(cache, a, b)
    with pytest.raises(ChunkAttnError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize("number", (2.5, "4", None))
def test_what_is_no_number_of_tokens_changes_nothing(number):
    """The blocks that vLLM had handed out before it failed were nobody's."""
    cache = make_cache()
    adapter = cache.begin_request("r")
    before = state(cache)
    with pytest.raises(TypeError, match="^`num_tokens` must be an integer, got "):
        cache.allocate_token_slots(adapter, number)
    with pytest.raises(TypeError, match="^`prefill_prefix_tokens` must be an integer, got "):
        cache.begin_request("p", prefill_prefix_tokens=number)
    assert state(cache) == before
    cache.check_integrity()
    cache.begin_request("p")
