"""Requests on vLLM's manager: one for each branch of a rollout, block by block."""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from chunkattn.checks import check_int
from chunkattn.errors import LifecycleError, PoolExhaustedError
from chunkattn.integrity import check_integrity
from chunkattn.manager import (
    ARDiffusionRequestAdapter,
    ChunkWindowManager,
    ChunkWindowSpec,
    build_kv_manager,
)
from chunkattn.plan import Extent
from chunkattn.policy import Policy, SlidingWindow
from chunkattn.pool import HostCopy, chunk_slot_mapping, copy_blocks, resident_block_ids
from chunkattn.streams import Settling
from chunkattn.window import (
    Runs,
    ceil_div,
    common,
    merged,
    part_of_blocks,
    runs,
    union,
    whole_block_gaps,
    within,
)

logger = logging.getLogger("chunkattn.cache")  # a request's lines stand among its cache's

P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound="Requests")


def locked(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """One thread at a time in the methods of a cache that change who owns which block."""

    @functools.wraps(method)
    def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class Requests:
    """The part of `ARDiffusionKVCache` that owns blocks: its calls of one request a branch.

    Args:
        spec: the window.
        policy: what the branches see and keep; None is the spec's window.
        num_layers: layers that share a block table.
        num_blocks: managed blocks, the null block counted in.
        max_model_len: vLLM's limit for a request.
        device: where the pools lie.
    """

    def __init__(
        self,
        spec: ChunkWindowSpec,
        policy: Policy | None,
        num_layers: int,
        num_blocks: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.lock = threading.RLock()
        self.settling = Settling(device)
        self.pools: list[torch.Tensor] = []
        self.part_pools: list[torch.Tensor] = []
        self.spec = spec
        self.policy = policy or SlidingWindow(
            spec.window_chunks, spec.sink_chunks, spec.reset_at_boundary
        )
        self.views = self.policy.views()
        self.block_size = int(spec.block_size)
        self.table_block_size = part_of_blocks(self.block_size, spec.chunk_size)
        layer_names = [f"ar_diffusion.layer.{layer}" for layer in range(num_layers)]
        self.manager = build_kv_manager(spec, layer_names, num_blocks, max_model_len)
        self._window_manager: ChunkWindowManager = self.manager.coordinator.single_type_managers[0]
        self.null_block_id = int(self.manager.block_pool.null_block.block_id)
        self._window_manager.evicts = policy is None
        self._adapters: dict[str, ARDiffusionRequestAdapter] = {}

    @property
    def num_free_blocks(self) -> int:
        """Managed blocks that nobody owns."""
        return int(self.manager.block_pool.get_num_free_blocks())

    # -- requests: one branch of one rollout each -------------------------------------------------
    @locked
    def begin_request(
        self, request_id: str, *, prefill_prefix_tokens: int = 0
    ) -> ARDiffusionRequestAdapter:
        """Start a request with an empty table.

        Raises:
            LifecycleError: a request of that id is live.
        """
        if request_id in self._adapters:
            raise LifecycleError(f"`request_id` must be new, got {request_id!r}, which is live")
        check_int("prefill_prefix_tokens", prefill_prefix_tokens)
        if prefill_prefix_tokens < 0:
            raise ValueError(
                f"`prefill_prefix_tokens` must not be negative, got {prefill_prefix_tokens}"
            )
        adapter = ARDiffusionRequestAdapter(
            request_id,
            chunk_size=self.spec.chunk_size,
            prefill_prefix_tokens=prefill_prefix_tokens,
        )
        self._adapters[request_id] = adapter
        logger.debug("begin_request: req=%s prefill=%d", request_id, prefill_prefix_tokens)
        return adapter

    @locked
    def end_request(self, adapter: ARDiffusionRequestAdapter) -> None:
        """Free all blocks of a request. A request that has ended already is left alone."""
        if self._adapters.get(adapter.request_id) is not adapter:
            return
        self.manager.free(adapter)
        self.settling.freed(adapter.stream)
        del self._adapters[adapter.request_id]
        logger.debug(
            "end_request: req=%s chunks=%d free=%d",
            adapter.request_id,
            adapter.completed_chunks,
            self.num_free_blocks,
        )

    def allocate_chunk(self, adapter: ARDiffusionRequestAdapter) -> list[int]:
        """Allocate the slots of one chunk; returns the request's block table.

        Until the chunk is committed, the same call returns the same table.
        """
        table = self.allocate_token_slots(adapter, self.spec.chunk_size)
        logger.debug(
            "allocate_chunk: req=%s chunk=%d table=%d free=%d",
            adapter.request_id,
            adapter.completed_chunks,
            len(table),
            self.num_free_blocks,
        )
        return table

    @locked
    def allocate_token_slots(
        self, adapter: ARDiffusionRequestAdapter, num_tokens: int
    ) -> list[int]:
        """Allocate the slots of a span that follows the committed tokens; returns the block table.

        Raises:
            ValueError: ``num_tokens`` is not positive.
            LifecycleError: the request has ended.
            PoolExhaustedError: too few free blocks; nothing was allocated.
        """
        check_int("num_tokens", num_tokens)
        if num_tokens <= 0:
            raise ValueError(f"`num_tokens` must be positive, got {num_tokens}")
        self._check_live(adapter)
        computed = adapter.num_computed_tokens
        end = computed + num_tokens
        # A block that is partly filled is written to: it must not be another request's as well.
        shared = self._window_manager.shared(adapter.request_id, computed // self.block_size)
        # vLLM cuts an allocation at max_model_len. Storage stays short, but a window may be longer.
        self.manager.max_model_len = max(self.manager.max_model_len, end)
        # Counted here too: vLLM counts short for a prefix that is longer than the window.
        owned = self._window_manager.num_blocks(adapter.request_id)
        missing = ceil_div(end, self.block_size) - owned + len(shared)
        if (
            missing > self.num_free_blocks
            or self.manager.allocate_slots(adapter, num_new_tokens=num_tokens) is None
        ):
            raise PoolExhaustedError(
                f"K/V pool exhausted: {self.num_free_blocks} free blocks are too few for "
                f"{num_tokens} more tokens of request {adapter.request_id!r}"
            )
        if missing > 0:
            self.settling.reused()
        self._unshare(adapter, shared)
        adapter.allocated_tokens = max(adapter.allocated_tokens, end)
        return self.block_table(adapter)

    @locked
    def release_uncommitted(self, adapter: ARDiffusionRequestAdapter) -> None:
        """Give back what was allocated and not committed."""
        self._check_live(adapter)
        kept = min(adapter.allocated_tokens, adapter.num_computed_tokens)
        self._window_manager.truncate(adapter.request_id, kept)
        adapter.allocated_tokens = kept
        self.settling.freed(adapter.stream)

    def block_table(self, adapter: ARDiffusionRequestAdapter) -> list[int]:
        """The request's block table, in storage order."""
        return self._window_manager.block_ids(adapter.request_id)

    def chunk_write_slots(self, adapter: ARDiffusionRequestAdapter) -> torch.Tensor:
        """Slots of the chunk in flight, ``(chunk_size,)`` int64.

        Raises:
            LifecycleError: the chunk has not been allocated.
        """
        self._check_allocated(adapter, 1)
        return chunk_slot_mapping(
            self.block_table(adapter),
            adapter.num_computed_tokens,
            self.spec.chunk_size,
            self.block_size,
        )

    def window_block_ids(self, adapter: ARDiffusionRequestAdapter) -> list[int]:
        """Resident blocks that hold committed tokens, in order."""
        committed = ceil_div(adapter.num_computed_tokens, self.block_size)
        return resident_block_ids(self.block_table(adapter)[:committed], self.null_block_id)

    def commit_chunk(self, adapter: ARDiffusionRequestAdapter) -> None:
        """Make the chunk in flight part of the history, then evict and compact.

        Raises:
            LifecycleError: no slots were allocated for the chunk.
        """
        self.commit_chunks(adapter, 1)

    @locked
    def commit_chunks(self, adapter: ARDiffusionRequestAdapter, num_chunks: int) -> None:
        """`commit_chunk` for a whole span, or the part of it that the policy commits; the rest is
        given back. All or nothing.
        """
        self._check_allocated(adapter, num_chunks)
        first = adapter.completed_chunks
        span = range(first, first + num_chunks)
        part = span[: self.policy.committed(num_chunks)]
        held = merged((*adapter.resident, part))
        kept = merged(self.policy.kept(adapter.resident, span))
        if adapter.retrieved:
            kept = union(kept, runs(adapter.retrieved))
        resident = common(kept, held)
        archive = {}
        if self.policy.retrieved_chunks:
            left = {chunk for run in held for chunk in run}.difference(*resident)
            archive = {chunk: self._copy_chunk(adapter, chunk) for chunk in left}
        # Up to here anything may have failed; from here on nothing does.
        adapter.on_chunks_committed(len(part))
        adapter.archive |= archive
        most = self.policy.archive_chunks
        while most is not None and len(adapter.archive) > most:
            del adapter.archive[min(adapter.archive)]
        adapter.resident = resident
        if resident != held:
            adapter.last_drop = adapter.completed_chunks
        self._evict(adapter)
        if part != span:
            self.release_uncommitted(adapter)
        logger.debug("commit: req=%s chunks=%d", adapter.request_id, adapter.completed_chunks)

    def _evict(self, adapter: ARDiffusionRequestAdapter) -> None:
        """Free the blocks of what is no longer resident, and compact the table."""
        window = self._window_manager
        if window.evicts:
            window.remove_skipped_blocks(adapter.request_id, adapter.num_computed_tokens)
            removed = window.compact_block_table(adapter.request_id)
        else:
            gaps = whole_block_gaps(
                adapter.resident,
                adapter.num_prompt_tokens,
                adapter.absolute_num_computed_tokens,
                chunk_size=self.spec.chunk_size,
                block_size=self.block_size,
            )
            window.drop(adapter.request_id, gaps)
            removed = window.compacted_tokens(adapter.request_id) - adapter.compacted_tokens
        self.settling.freed(adapter.stream)
        adapter.compacted_tokens += removed
        adapter.allocated_tokens -= removed

    def _copy_chunk(self, adapter: ARDiffusionRequestAdapter, chunk: int) -> HostCopy:
        self.follow([adapter])
        (where,) = self.storage(adapter, (range(chunk, chunk + 1),))
        return HostCopy(self.part_pools, self._parts(adapter, where))

    def _parts(self, adapter: ARDiffusionRequestAdapter, where: range) -> list[int]:
        """Storage positions as parts of blocks, as plans name them."""
        extent = Extent(self.block_table(adapter), where.start, where.stop, self.block_size)
        return extent.entries(self.table_block_size)

    @locked
    def fetch_chunks(
        self,
        wanted: Sequence[tuple[str, HostCopy]],
        given_back: Sequence[ARDiffusionRequestAdapter],
    ) -> list[ARDiffusionRequestAdapter]:
        """Bring chunks back from host memory, each as a request of its own.

        Args:
            wanted: a request id and the bytes of each chunk.
            given_back: chunks fetched before, whose blocks may be used for these where no fork
                owns them as well.

        Raises:
            PoolExhaustedError: too few free blocks; nothing has changed.
        """
        size, window = self.spec.chunk_size, self._window_manager
        back = sum(
            window.num_blocks(adapter.request_id) - len(window.shared(adapter.request_id))
            for adapter in given_back
        )
        needed = len(wanted) * ceil_div(size, self.block_size)
        self._check_free(needed - back, "the chunks to retrieve")
        for adapter in given_back:
            self.end_request(adapter)
        fetched = []
        for request_id, copy in wanted:
            adapter = self.begin_request(request_id)
            self.allocate_token_slots(adapter, size)
            adapter.on_chunk_committed()
            adapter.resident = (range(1),)
            self.follow([adapter])
            copy.restore(self.part_pools, self._parts(adapter, range(size)))
            fetched.append(adapter)
        return fetched

    def storage(self, adapter: ARDiffusionRequestAdapter, chunks: Runs) -> list[range]:
        """Storage positions of runs of resident chunks."""
        size = self.spec.chunk_size
        storage, request_id = self._window_manager.storage, adapter.request_id
        return [storage(request_id, range(run.start * size, run.stop * size)) for run in chunks]

    def check_rollback(
        self, adapter: ARDiffusionRequestAdapter, num_chunks: int, next_span: int
    ) -> None:
        """Refuse to go back to ``num_chunks`` chunks where the span after them, of ``next_span``
        chunks, would not see what it saw.

        Raises:
            LifecycleError: chunks that it must see have left.
        """
        if not self.policy.positional and 0 < num_chunks < adapter.last_drop:
            raise LifecycleError(
                f"request {adapter.request_id!r} can go back to chunk {adapter.last_drop}, where a "
                f"chunk has left, got {num_chunks}"
            )
        resident = common(adapter.resident, (range(num_chunks),))
        must_see = self.policy.visible(resident, range(num_chunks, num_chunks + next_span))
        self.check_resident(adapter, must_see)

    def check_resident(self, adapter: ARDiffusionRequestAdapter, chunks: Runs) -> None:
        """Refuse chunks that have left.

        Raises:
            LifecycleError: a chunk is not resident.
        """
        if not within(chunks, adapter.resident):
            left = {c for run in chunks for c in run} - {c for run in adapter.resident for c in run}
            raise LifecycleError(
                f"request {adapter.request_id!r} must see chunks {sorted(left)}, which have left"
            )

    @locked
    def rollback_chunks(self, adapter: ARDiffusionRequestAdapter, num_chunks: int) -> None:
        """Go back to the first ``num_chunks`` chunks; the blocks of all others are free."""
        self._check_live(adapter)
        if num_chunks == adapter.completed_chunks:
            return
        adapter.on_rollback(num_chunks)
        window = self._window_manager
        window.rewind(adapter.request_id, adapter.absolute_num_computed_tokens)
        self.settling.freed(adapter.stream)
        adapter.compacted_tokens = window.compacted_tokens(adapter.request_id)
        owned = len(self.block_table(adapter)) * self.block_size
        adapter.allocated_tokens = min(adapter.num_computed_tokens, owned)

    @locked
    def fork_request(
        self, source: ARDiffusionRequestAdapter, request_id: str
    ) -> ARDiffusionRequestAdapter:
        """Begin a request that shares the committed blocks of another one.

        A block is copied when one of its owners writes to it.
        """
        adapter = self.begin_request(request_id)
        adapter.on_fork(source)
        committed = min(source.allocated_tokens, source.num_computed_tokens)
        num_blocks = ceil_div(committed, self.block_size)
        self._window_manager.share(source.request_id, request_id, num_blocks)
        adapter.allocated_tokens = committed
        return adapter

    @locked
    def swap_out_requests(self, adapters: Sequence[ARDiffusionRequestAdapter]) -> list[HostCopy]:
        """Copy the blocks of requests to host memory and free them; all of them or none."""
        for adapter in adapters:
            self.release_uncommitted(adapter)
        self.follow(adapters)
        copies = [HostCopy(self.pools, self.block_table(adapter)) for adapter in adapters]
        for adapter in adapters:
            self._window_manager.truncate(adapter.request_id, 0)
            self.settling.freed(adapter.stream)
            adapter.table_epoch += 1
            adapter.allocated_tokens = 0
        return copies

    @locked
    def swap_in_requests(
        self, adapters: Sequence[ARDiffusionRequestAdapter], copies: Sequence[HostCopy]
    ) -> None:
        """Give requests that were swapped out blocks again, with the bytes that they had.

        Raises:
            PoolExhaustedError: too few free blocks; nothing was allocated.
        """
        self._check_free(sum(copy.num_blocks for copy in copies), "what was swapped out")
        self.settling.reused()
        self.follow(adapters)
        for adapter, copy in zip(adapters, copies, strict=True):
            ids = self._window_manager.refill(adapter.request_id, copy.num_blocks)
            copy.restore(self.pools, ids)
            adapter.allocated_tokens = min(
                adapter.num_computed_tokens, copy.num_blocks * self.block_size
            )

    @locked
    def make_private(self, adapters: Sequence[ARDiffusionRequestAdapter]) -> None:
        """Copy every block that requests share with others, so that they may be rewritten.

        Raises:
            PoolExhaustedError: too few free blocks; nothing was copied.
        """
        shared = [self._window_manager.shared(adapter.request_id) for adapter in adapters]
        self._check_free(sum(map(len, shared)), "blocks shared with a fork")
        for adapter, entries in zip(adapters, shared, strict=True):
            self._unshare(adapter, entries)

    def _unshare(self, adapter: ARDiffusionRequestAdapter, entries: Sequence[int]) -> None:
        if not entries:
            return
        pairs = self._window_manager.unshare(adapter.request_id, entries)
        self.settling.reused()
        self.follow([adapter])
        copy_blocks(self.pools, pairs)
        self.settling.freed(adapter.stream)
        adapter.table_epoch += 1

    def follow(self, adapters: Sequence[ARDiffusionRequestAdapter]) -> None:
        """Move requests to this thread's stream, which waits, on the GPU, for the streams that
        they were on: what comes now reads their blocks, or writes to them.
        """
        mine = self.settling.stream()
        for adapter in adapters:
            if mine is not None and adapter.stream is not None and adapter.stream != mine:
                mine.wait_stream(adapter.stream)
            adapter.stream = mine

    def _check_free(self, num_blocks: int, what: str) -> None:
        if num_blocks > self.num_free_blocks:
            raise PoolExhaustedError(
                f"K/V pool exhausted: {self.num_free_blocks} free blocks are too few for the "
                f"{num_blocks} of {what}"
            )

    @locked
    def check_integrity(self) -> None:
        """Recount who owns every managed block.

        Raises:
            ChunkAttnError: a block is owned twice, lost, or counted wrongly, or a resident chunk
                has none; the message names it.
        """
        check_integrity(self)

    def _check_live(self, adapter: ARDiffusionRequestAdapter) -> None:
        if self._adapters.get(adapter.request_id) is not adapter:
            raise LifecycleError(f"request {adapter.request_id!r} has ended")

    def _check_allocated(self, adapter: ARDiffusionRequestAdapter, num_chunks: int) -> None:
        self._check_live(adapter)
        pending = adapter.allocated_tokens - adapter.num_computed_tokens
        if pending < num_chunks * self.spec.chunk_size:
            raise LifecycleError(
                f"request {adapter.request_id!r} has {max(0, pending)} allocated tokens in flight, "
                f"{num_chunks} chunk(s) of {self.spec.chunk_size} are needed: allocate first"
            )
