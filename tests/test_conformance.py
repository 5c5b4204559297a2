"""J2: the request adapter against the real `KVCacheManager` of the vLLM that is installed.

``python tests/conformance_matrix.py`` runs this file against every supported version.
"""

import logging
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash

from chunkattn import (
    ARDiffusionRequestAdapter,
    ChunkWindowSpec,
    build_kv_manager,
    resident_block_ids,
)
from chunkattn.manager import say_if_untested
from tests import conformance_matrix

CHUNK, WINDOW, SINK, NUM_BLOCKS = 4, 3, 1, 8


class Recorder:
    """Hands attributes through and writes down which ones vLLM asked for."""

    def __init__(self, adapter: ARDiffusionRequestAdapter, hidden: str = ""):
        object.__setattr__(self, "adapter", adapter)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "read", set())
        object.__setattr__(self, "written", set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        if name == self.hidden:
            raise AttributeError(name)
        return getattr(self.adapter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.written.add(name)
        setattr(self.adapter, name, value)


def make_manager(**more: Any) -> KVCacheManager:
    spec = ChunkWindowSpec(
        block_size=CHUNK,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=WINDOW * CHUNK,
        chunk_size=CHUNK,
        window_chunks=WINDOW,
        sink_chunks=SINK,
    )
    return build_kv_manager(spec, ["layer"], NUM_BLOCKS, 4096, **more)


def make_adapter(name: str = "r") -> ARDiffusionRequestAdapter:
    return ARDiffusionRequestAdapter(name, chunk_size=CHUNK)


def drive(manager: KVCacheManager, request: Any) -> None:
    """Everything that the package asks of vLLM, in the order of a rollout.

    ``request`` may be the adapter or something that wraps it.
    """
    pool = manager.block_pool
    null = pool.null_block.block_id
    free = pool.get_num_free_blocks()
    assert free == NUM_BLOCKS - 1
    assert manager.get_computed_blocks(request)[1] == 0
    first = manager.allocate_slots(request, num_new_tokens=CHUNK, full_sequence_must_fit=True)
    assert first is not None
    seen = list(manager.get_block_ids("r")[0])
    for committed in range(9):
        for _ in range(2):  # what is in flight is allocated once
            assert manager.allocate_slots(request, num_new_tokens=CHUNK) is not None
            table = list(manager.get_block_ids("r")[0])
            assert len(table) == committed + 1
        seen += table[len(seen) :]
        # Chunks 0, committed-3, ..., committed-1 and the one in flight; the others are null.
        live = {0, *range(max(0, committed - WINDOW), committed + 1)}
        assert table == [b if i in live else null for i, b in enumerate(seen)]
        assert pool.get_num_free_blocks() == free - len(live)
        if not manager.enable_caching:
            assert all(b.ref_cnt == 1 for b in pool.blocks if b.block_id in set(table) - {null})
        request.on_chunk_committed()
    # Exhaustion is None, and changes nothing: 2 free blocks and one that leaves do not hold 4.
    table = list(manager.get_block_ids("r")[0])
    assert manager.allocate_slots(request, num_new_tokens=4 * CHUNK) is None
    assert resident_block_ids(manager.get_block_ids("r")[0], null) == [table[0], *table[-WINDOW:]]
    assert manager.allocate_slots(request, num_new_tokens=3 * CHUNK) is not None
    assert pool.get_num_free_blocks() == 0
    manager.free(request)
    assert pool.get_num_free_blocks() == free
    assert manager.get_block_ids("r") == ([],)


def test_a_rollout_on_the_real_manager():
    """J2: allocate, evict, commit, run out, free."""
    drive(make_manager(), make_adapter())


def test_with_prefix_caching():
    """J2: hashes are whoever's who turns caching on; the rest of the surface is the same."""
    adapter = make_adapter()
    adapter.block_hashes = [BlockHash(bytes([i]) * 32) for i in range(32)]
    recorder = Recorder(adapter)
    drive(make_manager(enable_caching=True), recorder)
    assert "block_hashes" in recorder.read
    assert sorted(n for n in recorder.read | recorder.written if not hasattr(adapter, n)) == []


def recorded() -> Recorder:
    recorder = Recorder(make_adapter())
    drive(make_manager(), recorder)
    return recorder


def test_every_attribute_that_vllm_reads_is_there():
    """J2: also one that vLLM asks for with a default, which would be drift that nobody sees."""
    recorder = recorded()
    adapter = make_adapter()
    assert {"request_id", "num_computed_tokens", "num_tokens", "status"} <= recorder.read
    assert sorted(name for name in recorder.read if not hasattr(adapter, name)) == []
    assert recorder.written == set()


def test_the_guard_sees_a_missing_attribute():
    """J2: an adapter without any one of them does not pass."""
    for name in sorted(recorded().read):
        hiding = Recorder(make_adapter(), hidden=name)
        with pytest.raises(AttributeError, match=f"^{name}$"):
            drive(make_manager(), hiding)


def test_the_manager_is_built_for_one_group():
    """J2: whatever else this version's constructor asks for."""
    manager = make_manager()
    assert type(manager) is KVCacheManager
    assert len(manager.coordinator.single_type_managers) == 1
    assert len(manager.kv_cache_config.kv_cache_groups) == 1
    (managed,) = manager.coordinator.single_type_managers
    assert managed.block_pool is manager.block_pool
    assert managed._null_block is manager.block_pool.null_block


@pytest.mark.parametrize("version", ("0.27.1", "0.34.0rc1", "1.0.0", "dev"))
def test_an_unsupported_vllm_gives_one_line(caplog, version):
    """J2: said at the import, and by ``make test-vllm`` before it installs anything."""
    with caplog.at_level(logging.WARNING):
        say_if_untested("0.28.1+cpu")
        say_if_untested(version)
    (line,) = caplog.messages
    assert line == f"vLLM {version} is not supported by chunkattn: tested are 0.28 to 0.33"


def test_the_matrix_refuses_an_unsupported_vllm(capsys):
    assert conformance_matrix.main(["0.28.0", "0.27.0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vLLM must be one of 0.28.0, 0.29.0, ")
    assert line.endswith(", 0.33.0, got 0.27.0")
