"""The spec, its manager and the request adapter, on vLLM's own `KVCacheManager`."""

import inspect

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import RequestStatus

import chunkattn
from chunkattn import (
    ARDiffusionRequestAdapter,
    ChunkWindowManager,
    ChunkWindowSpec,
    LifecycleError,
    build_kv_manager,
    resident_block_ids,
)
from tests.helpers.rollout import RELATIONS, TG, Window


def make_spec(chunk: int = 4, block: int = 4, policy: Window = TG, **more) -> ChunkWindowSpec:
    fields = {
        "block_size": block,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": torch.float32,
        "sliding_window": policy.window * chunk,
        "chunk_size": chunk,
        "window_chunks": policy.window,
        "sink_chunks": policy.sink,
        "reset_at_boundary": policy.reset,
    }
    return ChunkWindowSpec(**(fields | more))


class Raw:
    """vLLM's manager and one request, without the cache on top."""

    def __init__(self, spec: ChunkWindowSpec, num_blocks: int = 64):
        self.manager = build_kv_manager(spec, ["layer"], num_blocks, 4096)
        self.window = self.manager.coordinator.single_type_managers[0]
        self.null = self.manager.block_pool.null_block.block_id
        self.adapter = ARDiffusionRequestAdapter("raw", chunk_size=spec.chunk_size)

    @property
    def free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def table(self) -> list[int]:
        return list(self.manager.get_block_ids("raw")[0])

    def step(self, num_chunks: int = 1) -> None:
        """Allocate and commit; what has left goes with the next allocation, as vLLM does it."""
        tokens = num_chunks * self.window.kv_cache_spec.chunk_size
        assert self.manager.allocate_slots(self.adapter, num_new_tokens=tokens) is not None
        for _ in range(num_chunks):
            self.adapter.on_chunk_committed()


# -- the adapter -------------------------------------------------------------------------------
def test_adapter_moves_by_chunks_only():
    adapter = ARDiffusionRequestAdapter("r", chunk_size=16)
    assert (adapter.num_computed_tokens, adapter.num_tokens) == (0, 16)
    adapter.on_chunk_committed()
    assert (adapter.num_computed_tokens, adapter.num_tokens) == (16, 32)
    assert (adapter.completed_chunks, adapter.absolute_num_computed_tokens) == (1, 16)
    assert adapter.num_in_flight_tokens == 0
    assert isinstance(adapter.status, RequestStatus)


def test_adapter_counts_a_prefix():
    adapter = ARDiffusionRequestAdapter("r", chunk_size=16, prefill_prefix_tokens=4)
    assert adapter.num_computed_tokens == adapter.num_prompt_tokens == 4
    assert adapter.num_tokens == 20
    adapter.on_chunk_committed()
    assert adapter.absolute_num_computed_tokens == 20
    assert adapter.completed_chunks == 1


def test_adapter_counts_storage_and_the_time_line():
    adapter = ARDiffusionRequestAdapter("r", chunk_size=4)
    for _ in range(8):
        adapter.on_chunk_committed()
    adapter.compacted_tokens = 16
    assert adapter.absolute_num_computed_tokens == 32
    assert (adapter.num_computed_tokens, adapter.num_tokens) == (16, 20)


def test_signatures():
    """The seed's arguments and defaults."""
    adapter = inspect.signature(ARDiffusionRequestAdapter)
    assert str(adapter).split(" -> ")[0] == (
        "(request_id: str, *, chunk_size: int, prefill_prefix_tokens: int = 0)"
    )
    build = inspect.signature(build_kv_manager).parameters
    assert list(build) == ["spec", "layer_names", "num_blocks", "max_model_len", "enable_caching"]
    assert build["enable_caching"].default is False
    assert build["enable_caching"].kind is inspect.Parameter.KEYWORD_ONLY
    spec = inspect.signature(ChunkWindowSpec).parameters
    assert (spec["sink_chunks"].default, spec["reset_at_boundary"].default) == (0, False)
    for name in ("chunk_size", "window_chunks", "sliding_window"):
        assert spec[name].default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("function", "positional", "named"),
    [
        (
            chunkattn.scatter_kv,
            ["key", "value", "key_pool", "value_pool", "slot_mapping"],
            {"key_scale": None, "value_scale": None, "backend": "auto"},
        ),
        (
            chunkattn.paged_window_attention,
            ["query", "key_pool", "value_pool", "block_table", "seq_lens"],
            {
                "query_start_loc": None,
                "softmax_scale": None,
                "key_current": None,
                "value_current": None,
                "current_start_loc": None,
                "key_scale": None,
                "value_scale": None,
                "out": None,
                "return_lse": False,
                "backend": "auto",
                # Beyond the agreed ones.
                "segment_blocks": None,
                "block_bias": None,
            },
        ),
    ],
)
def test_signatures_of_the_operations(function, positional, named):
    """Names, order and defaults: other people's code calls them."""
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == named
    assert [p.name for p in parameters] == [*positional, *named]


def test_public_names():
    """Every name of `chunkattn.__all__` is there, and no other is."""
    for name in chunkattn.__all__:
        assert getattr(chunkattn, name) is not None
    assert set(chunkattn.__all__) <= set(dir(chunkattn))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        chunkattn.nothing  # noqa: B018


# -- the spec ----------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [0, 8, 11, 13, 16])
def test_spec_refuses_another_window(tokens):
    """B9: the window in tokens is ``window_chunks * chunk_size``."""
    with pytest.raises(
        ValueError, match=rf"`sliding_window` must equal .* \(3 \* 4\), got {tokens}"
    ):
        make_spec(sliding_window=tokens)


def test_spec_leads_to_our_manager():
    """Without its registration vLLM would fall back to its sliding window and free the sink."""
    assert KVCacheSpecRegistry.get_manager_class(make_spec()) is ChunkWindowManager
    assert type(Raw(make_spec()).window) is ChunkWindowManager


# -- building ----------------------------------------------------------------------------------
@pytest.mark.parametrize("caching", [False, True])
def test_one_group(caching):
    spec = make_spec()
    manager = build_kv_manager(spec, ("a", "b"), 8, 64, enable_caching=caching)
    assert type(manager) is KVCacheManager
    assert manager.enable_caching is caching
    (group,) = manager.kv_cache_config.kv_cache_groups
    assert list(group.layer_names) == ["a", "b"]
    assert group.kv_cache_spec is spec
    assert manager.max_model_len == 64
    assert manager.block_pool.get_num_free_blocks() == 7


def test_a_table_is_not_compacted_under_prefix_caching():
    """vLLM's cached blocks are counted from the front of the table."""
    manager = build_kv_manager(make_spec(), ["layer"], 8, 64, enable_caching=True)
    with pytest.raises(LifecycleError, match="without prefix caching"):
        manager.coordinator.single_type_managers[0].compact_block_table("r")


@pytest.mark.parametrize("drifted", ["scheduler_block_size", "max_num_batched_tokens", "both", ""])
def test_constructor_signatures_drift(monkeypatch, drifted):
    """J2: arguments that some versions of vLLM want and others do not know."""
    wanted = ["scheduler_block_size", "max_num_batched_tokens"] if drifted == "both" else [drifted]
    names = ["max_model_len", "hash_block_size", "enable_caching", *filter(None, wanted)]

    class Drifted:
        def __init__(self, kv_cache_config, **arguments):
            self.arguments = arguments

    parameters = [inspect.Parameter("kv_cache_config", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    Drifted.__signature__ = inspect.Signature(parameters)
    monkeypatch.setattr("chunkattn.manager.KVCacheManager", Drifted)
    arguments = build_kv_manager(make_spec(block=16), ["layer"], 8, 64).arguments
    every = {
        "max_model_len": 64,
        "hash_block_size": 16,
        "enable_caching": False,
        "scheduler_block_size": 16,
        "max_num_batched_tokens": 64,
    }
    assert arguments == {name: every[name] for name in names}


# -- eviction ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize(
    "policy", [TG, Window(2, 0), Window(3, 2), Window(1, 1, True)], ids=["S1", "S0", "S2", "reset"]
)
def test_what_left_is_null_and_the_rest_stays(chunk, block, policy):
    """B1, B16: without compaction, each entry is null or the block that it always was."""
    raw = Raw(make_spec(chunk, block, policy), num_blocks=200)
    first_seen: list[int] = []
    for step in range(1, 14):
        raw.step()
        table = raw.table()
        first_seen += table[len(first_seen) :]
        # Allocating for chunk `step` frees what was dead after `step - 1` commits.
        live = {
            t // block
            for c in policy.resident(step - 1)
            for t in range(c * chunk, c * chunk + chunk)
        }
        live |= {t // block for t in range((step - 1) * chunk, step * chunk)}
        expected = [b if i in live else raw.null for i, b in enumerate(first_seen)]
        assert table == expected
        assert raw.free == 199 - len(resident_block_ids(table, raw.null))
    raw.manager.free(raw.adapter)
    assert raw.free == 199
    assert raw.table() == []


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_compaction_takes_out_the_gap(chunk, block):
    """The table keeps the sink and the window in order; the tokens it lost are whole blocks."""
    raw = Raw(make_spec(chunk, block))
    for _ in range(9):
        raw.step()
        raw.window.remove_skipped_blocks("raw", raw.adapter.num_computed_tokens)
        kept = [block for block in raw.table() if block != raw.null]
        removed = raw.window.compact_block_table("raw")
        raw.adapter.compacted_tokens += removed
        assert removed % block == 0
        assert raw.table() == kept
        assert raw.window.compact_block_table("raw") == 0
    live = {t // block for c in TG.resident(9) for t in range(c * chunk, (c + 1) * chunk)}
    assert len(kept) == len(live)


def test_truncate_gives_back_the_tail():
    raw = Raw(make_spec())
    raw.step(3)
    table = raw.table()
    raw.window.truncate("raw", 5)
    assert raw.table() == table[:2]
    assert raw.free == 63 - 2
    raw.window.truncate("raw", 8)
    raw.window.truncate("nobody", 0)
    assert raw.table() == table[:2]


def test_freed_blocks_come_back_as_one_run():
    """A window that lies in one run of blocks is read without a copy."""
    raw = Raw(make_spec(policy=Window(8, 0)), num_blocks=9)
    raw.step(8)
    raw.manager.free(raw.adapter)
    raw.adapter = ARDiffusionRequestAdapter("raw", chunk_size=4)
    raw.step(8)
    table = raw.table()
    assert table == list(range(table[0], table[0] + 8))


def test_overrides_take_what_later_versions_pass():
    """J2: an argument more, by position or by name."""
    raw = Raw(make_spec())
    raw.step(6)
    raw.window.remove_skipped_blocks("raw", 24, 0, later=1)
    assert raw.table().count(raw.null) == 2
    raw.window.remove_skipped_blocks("nobody", 24, num_prompt_tokens=0)
    assert "nobody" not in raw.window.req_to_blocks
