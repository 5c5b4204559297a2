"""vllm-omni's K/V classes over our cache and sessions, by the names and arguments of 0.30.0.

`ARDiffusionKVCache` and `ARDiffusionKVState` stand where its runner looks for its own. The models
see its own layer contexts and layer inputs: they test for these types.
"""

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec
from vllm_omni.experimental.ar_diffusion.kv_cache import paged_attention

from chunkattn import cache as core
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.cross_attention import CrossAttentionSpec, NamedCrossAttention
from chunkattn.errors import LifecycleError, PoolExhaustedError, StaleContextError
from chunkattn.forward import ForwardContext
from chunkattn.integrations.omni_op import Writes, backend_asked
from chunkattn.manager import ARDiffusionRequestAdapter
from chunkattn.pool import compute_num_blocks
from chunkattn.session import Session
from chunkattn.sizing import checked_window, scratch_blocks
from chunkattn.window import blocks_per_branch, ceil_div

logger = logging.getLogger(__name__)


class ARDiffusionKVCache(core.ARDiffusionKVCache):
    """Our cache by vllm-omni's constructor; branches go by name, cross-attention by session id.

    ``session_capacity`` is lowered to what fits: scratch, and for each session its window, its
    cross-attention and ``model_owned_state_bytes_per_session``, within ``gpu_memory_fraction`` of
    ``available_bytes``. One session is admitted whenever all of the memory holds it.

    Args: see `chunkattn.ARDiffusionKVCache`, and
        kv_branches: names of the guidance branches; those that never run on the same worker share
            a ``local_index``.
        cross_attention_lengths: tokens of each named cross-attention cache.
        cross_attention_kv_heads: heads of those that have not ``num_kv_heads``.
        frames_per_block: chunks of a span.
        model_owned_state_bytes_per_session: memory to leave to the model.

    Raises:
        ValueError: an argument does not fit, or the memory does not hold one session.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
        available_bytes: int,
        kv_branches: tuple[ARDiffusionKVBranchSpec, ...],
        session_capacity: int,
        cross_attention_lengths: dict[str, int] | None = None,
        cross_attention_kv_heads: dict[str, int] | None = None,
        device: torch.device | None = None,
        frames_per_block: int = 1,
        max_scratch_tokens_per_branch: int = 0,
        model_owned_state_bytes_per_session: int = 0,
    ) -> None:
        self.kv_branches = kv_branches
        self._local_index = {branch.name: branch.local_index for branch in kv_branches}
        self.num_local_kv_branches = len(set(self._local_index.values()))
        if (
            not kv_branches
            or len(self._local_index) != len(kv_branches)
            or max(self._local_index.values()) >= self.num_local_kv_branches
        ):
            raise ValueError(
                "`kv_branches` must have unique names and local indices from 0 on, got "
                f"{kv_branches}"
            )
        self.cross_attention_lengths = dict(cross_attention_lengths or {})
        heads = dict.fromkeys(self.cross_attention_lengths, num_kv_heads)
        self.cross_attention_kv_heads = heads | (cross_attention_kv_heads or {})
        if set(self.cross_attention_kv_heads) != set(heads):
            raise ValueError(
                f"`cross_attention_kv_heads` must name some of {sorted(heads)}, got "
                f"{sorted(cross_attention_kv_heads or ())}"
            )
        self._cross_kinds = {
            name: CrossAttentionSpec(length, self.cross_attention_kv_heads[name])
            for name, length in self.cross_attention_lengths.items()
        }
        self._runs_as: weakref.WeakKeyDictionary[ARDiffusionRequestAdapter, str] = (
            weakref.WeakKeyDictionary()
        )
        self._cross: dict[tuple[str, str, str], NamedCrossAttention] = {}
        self.requested_session_capacity = session_capacity
        self.frames_per_block = frames_per_block
        settings = ARDiffusionKVConfig(
            enable=config.enable,
            chunk_size=config.chunk_size,
            window_chunks=config.window_chunks,
            sink_chunks=config.sink_chunks,
            reset_at_boundary=config.reset_at_boundary,
            gpu_memory_fraction=config.gpu_memory_fraction,
        )
        page_size = 2 * num_layers * block_size * num_kv_heads * head_size * dtype.itemsize
        cross_rows = sum(kind.length * kind.num_kv_heads for kind in self._cross_kinds.values())
        session_bytes = (
            2 * len(kv_branches) * num_layers * cross_rows * head_size * dtype.itemsize
            + model_owned_state_bytes_per_session
        )
        num_blocks, self.session_capacity = self._fit(
            settings,
            block_size=block_size,
            page_size=page_size,
            session_bytes=session_bytes,
            scratch_tokens=max_scratch_tokens_per_branch,
            available_bytes=available_bytes,
        )
        super().__init__(
            replace(settings, gpu_memory_fraction=1.0),
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            available_bytes=num_blocks * page_size,
            device=device,
            local_branches=self.num_local_kv_branches,
            num_frame_per_block=frames_per_block,
            max_scratch_tokens_per_branch=max_scratch_tokens_per_branch,
            session_capacity=self.session_capacity,
            backend=backend_asked(),
        )
        self.config = config
        self.scratch_blocks_per_kv_branch = self.scratch_blocks_per_branch
        self.writes = Writes(self._flat_keys)

    def _fit(
        self,
        config: ARDiffusionKVConfig,
        *,
        block_size: int,
        page_size: int,
        session_bytes: int,
        scratch_tokens: int,
        available_bytes: int,
    ) -> tuple[int, int]:
        """Managed blocks, and the sessions that they hold, by vllm-omni's rule."""
        window_chunks = checked_window(config, self.frames_per_block)
        if self.requested_session_capacity < 1:
            raise ValueError(
                f"`session_capacity` must be at least 1, got {self.requested_session_capacity}"
            )
        # Refuses a fraction that is none, and a page of no bytes.
        compute_num_blocks(available_bytes, config.gpu_memory_fraction, page_size)
        local, span = self.num_local_kv_branches, self.frames_per_block * config.chunk_size
        resident = blocks_per_branch(
            block_size=block_size,
            chunk_size=config.chunk_size,
            window_chunks=window_chunks,
            sink_chunks=config.sink_chunks,
            span_chunks=0,
        )
        span_blocks = ceil_div(span, block_size)
        scratch = local * scratch_blocks(span_blocks + ceil_div(scratch_tokens, block_size))

        def outside(capacity: int) -> int:
            return scratch * page_size + capacity * session_bytes

        def needed(capacity: int) -> int:
            blocks = local * (capacity * resident + span_blocks) + 2
            return outside(capacity) + blocks * page_size

        if needed(1) > available_bytes:
            raise ValueError(
                f"`available_bytes` must hold one session, {needed(1)} bytes: window, scratch, "
                f"cross-attention and the model's own state; got {available_bytes}"
            )
        budget = max(int(available_bytes * config.gpu_memory_fraction), needed(1))
        asked = self.requested_session_capacity
        capacity = next(n for n in range(asked, 0, -1) if needed(n) <= budget)
        if capacity < asked:
            logger.warning("session_capacity %d lowered to the %d that fit", asked, capacity)
        return (budget - outside(capacity)) // page_size, capacity

    def branch_of(self, adapter: ARDiffusionRequestAdapter, kv_branch: str) -> tuple[Session, int]:
        """The session that owns a request, and the local branch that it is.

        Raises:
            StaleContextError: none does, or no longer.
            LifecycleError: it runs under another name, one that shares the local index.
        """
        runs = self._runs_as.setdefault(adapter, kv_branch)
        if runs != kv_branch:
            raise LifecycleError(
                f"branches {runs!r} and {kv_branch!r} must not run on the same worker: they share "
                f"local index {self.local_index(kv_branch)}"
            )
        for session in self._sessions.values():
            for index in range(self.local_branches):
                if session.adapter(index) is adapter:
                    return session, index
        raise StaleContextError(
            f"request {adapter.request_id!r} has ended: its session was reset or closed"
        )

    def local_index(self, kv_branch: str) -> int:
        """The local branch of a name.

        Raises:
            KeyError: an unknown name.
        """
        if kv_branch not in self._local_index:
            raise KeyError(
                f"`kv_branch` must be one of {tuple(self._local_index)}, got {kv_branch!r}"
            )
        index: int = self._local_index[kv_branch]
        return index

    def scratch_block_ids(self, kv_branch: str | bool, start: int, count: int) -> list[int]:
        """Blocks ``[start, start + count)`` of the scratch of a branch, by name."""
        if isinstance(kv_branch, str):
            kv_branch = bool(self.local_index(kv_branch))
        return super().scratch_block_ids(kv_branch, start, count)

    # -- cross-attention, by session id, name and branch -------------------------------------------
    def is_cross_attention_populated(
        self, session_id: str, cache_name: str, kv_branch: str
    ) -> bool:
        """Whether every layer of a named cache of a branch is written."""
        self._cross_kind(cache_name)
        self.local_index(kv_branch)
        return (session_id, cache_name, kv_branch) in self._cross

    def populate_cross_attention(
        self,
        session_id: str,
        cache_name: str,
        kv_branch: str,
        layer_kv: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        """Write a named cache of a branch, all layers or none.

        Args:
            session_id: the session.
            cache_name: one of ``cross_attention_lengths``.
            kv_branch: the branch.
            layer_kv: K and V of each layer, ``(1, length, heads, head_size)``, read once.

        Raises:
            ValueError, TypeError: a layer is missing or does not fit; the old K/V are still there.
            PoolExhaustedError: ``session_capacity`` other sessions have cross-attention K/V.
        """
        kind = self._cross_kind(cache_name)
        self.local_index(kv_branch)
        shape = (1, kind.length, kind.num_kv_heads, self.head_size)
        pairs = list(layer_kv)
        for pair in pairs:
            for tensor in pair:
                if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
                    found = getattr(tensor, "shape", type(tensor).__name__)
                    raise ValueError(f"`layer_kv` must have tensors of shape {shape}, got {found}")
        others = {owner for owner, _, _ in self._cross} - {session_id}
        if len(others) >= self.session_capacity:
            raise PoolExhaustedError(
                f"`session_capacity` is {self.session_capacity} and {sorted(others)} have "
                f"cross-attention K/V: close one before writing those of {session_id!r}"
            )
        place = (session_id, cache_name, kv_branch)
        named = self._cross.get(place) or NamedCrossAttention(
            {cache_name: kind},
            num_layers=self.num_layers,
            head_size=self.head_size,
            dtype=self.dtype,
            device=self.device if self._has_tensors else None,
        )
        named.fill(cache_name, 0, [k[0] for k, _ in pairs], [v[0] for _, v in pairs])
        self._cross[place] = named

    def read_cross_attention_kv(
        self, session_id: str, cache_name: str, layer_idx: int, kv_branch: str
    ) -> dict[str, Tensor | bool]:
        """K and V of a layer, views ``(1, length, heads, head_size)``, as the models take them.

        Raises:
            LifecycleError: not populated.
        """
        self._check_layer(layer_idx)
        if not self.is_cross_attention_populated(session_id, cache_name, kv_branch):
            raise LifecycleError(
                f"cross-attention K/V {cache_name!r} of branch {kv_branch!r}, session "
                f"{session_id!r}, must be populated before they are read"
            )
        key, value = self._cross[session_id, cache_name, kv_branch].read(cache_name, layer_idx, 0)
        return {"is_init": True, "k": key.unsqueeze(0), "v": value.unsqueeze(0)}

    def retain_cross_attention(self, session_id: str, cache_names: Collection[str]) -> None:
        """Free a session's cross-attention K/V but for these names."""
        for place in [p for p in self._cross if p[0] == session_id and p[1] not in cache_names]:
            del self._cross[place]

    def release_cross_attention(self, session_id: str) -> None:
        """Free all cross-attention K/V of a session."""
        self.retain_cross_attention(session_id, ())

    def _cross_kind(self, cache_name: str) -> CrossAttentionSpec:
        if cache_name not in self._cross_kinds:
            raise KeyError(
                f"`cache_name` must be one of {tuple(self._cross_kinds)}, got {cache_name!r}"
            )
        return self._cross_kinds[cache_name]


class ARDiffusionPagedForwardContext(paged_attention.ARDiffusionPagedForwardContext):
    """One forward of a branch: a `chunkattn.ForwardContext` that opens when the model prepares it.

    The runner asks for the contexts of both branches, and a worker may run only one of them.
    """

    _forward: ForwardContext | None = None
    _ended = False

    def prepare(self, device: torch.device, action_len: int, query_len: int) -> None:
        """Allocate and plan; once, until the forward ends.

        Raises:
            StaleContextError: the context was replaced, or its session was reset or closed.
            ValueError: the rows do not fit; nothing was allocated, and it may be tried again.
            PoolExhaustedError: too few free blocks; likewise.
        """
        if self._ended:
            raise StaleContextError(
                f"this context of branch {self.kv_branch!r} has ended, or its session was reset "
                "or closed"
            )
        if self._forward is not None:
            return
        session, branch = self.kv_cache.branch_of(self.adapter, self.kv_branch)
        if query_len != self.seq_len + action_len:
            raise ValueError(
                f"`query_len` must be {self.seq_len} + {action_len}, the span and its action "
                f"rows, got {query_len}"
            )
        forward = session.forward(
            branch=branch, seq_len=self.seq_len, commit=self.commit_current, action_len=action_len
        )
        self._forward = self.kv_cache.writes.forward = forward.__enter__()
        self.history_block_ids = forward.history_block_ids
        self.current_video_block_ids = forward.span_block_ids
        self.action_scratch_block_ids = forward.action_block_ids
        self.current_video_slot_mapping = forward.slot_mapping[: self.seq_len]
        self.action_slot_mapping = forward.slot_mapping[self.seq_len :]
        self.block_table = forward.block_table
        self.query_start_loc = forward.query_start_loc
        self.seq_lens = forward.seq_lens
        self.kv_len = forward.kv_len
        self.query_len = self.max_query_len = query_len
        # What the table can hold, for ever: a number that changes would be compiled anew.
        self.max_seq_len = forward.block_table.shape[1] * forward.table_block_size
        self._allocated_video = self._prepared = True

    def layer_inputs(self, layer_idx: int) -> paged_attention.ARDiffusionPagedLayerInputs:
        """What the model's layer takes.

        Raises:
            LifecycleError: before `prepare`.
            StaleContextError: the forward has ended, or its session was reset or closed.
        """
        if self._forward is None:
            raise LifecycleError("`prepare` must come before `layer_inputs`")
        plan = self._forward.layer_plan(layer_idx)
        self.kv_cache.writes.handed_out(layer_idx)
        return paged_attention.ARDiffusionPagedLayerInputs(
            layer_idx=paged_attention._layer_idx_tensor(layer_idx),
            key_pool=self.kv_cache.flat_key_pool(layer_idx),
            value_pool=self.kv_cache.flat_value_pool(layer_idx),
            block_size=self._forward.table_block_size,
            seq_len=self.seq_len,
            video_slots=self.current_video_slot_mapping,
            action_slots=self.action_slot_mapping,
            block_table=plan.block_table,
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )

    def commit(self) -> None:
        """End the forward; a commit forward's K/V become history.

        Raises:
            LifecycleError: a commit forward that did not write every layer. It is aborted.
        """
        if self._forward is None and self.commit_current:
            raise LifecycleError(
                f"a commit must write every layer, got none: branch {self.kv_branch!r} never ran"
            )
        self._ended = True
        if self._forward is not None:
            self._release_pools()
            self._forward.__exit__(None, None, None)
        self.mark_committed()

    def abandon(self) -> None:
        """End the forward; nothing becomes history."""
        self._ended = True
        if self._forward is not None:
            self._release_pools()
            self._forward.abort()

    def check_replaceable(self) -> None:
        """Refuse to drop a commit forward that has run.

        Raises:
            LifecycleError: every layer is written, and it was not committed.
        """
        if self._forward is not None and self.commit_current and not self._forward.missing_layers:
            raise LifecycleError(
                f"the last forward of branch {self.kv_branch!r} must be committed before the next"
            )

    def _release_pools(self) -> None:
        writes = self.kv_cache.writes
        if writes.forward is self._forward:
            writes.forward = None


class ARDiffusionKVState:
    """What the pipelines see of a session: a `chunkattn.Session` with branches by name.

    Args:
        kv_cache: the cache.
        session_id: a new id.
        adapters: a request begun on ``kv_cache`` for each branch. The session owns them now.
        num_layers: layers of the model.

    Raises:
        ValueError: the branches or the layers are not the cache's.
        LifecycleError: a session of that id is open.
        PoolExhaustedError: ``session_capacity`` sessions are open.
    """

    def __init__(
        self,
        kv_cache: ARDiffusionKVCache,
        session_id: str,
        adapters: Mapping[str, ARDiffusionRequestAdapter],
        *,
        num_layers: int,
    ) -> None:
        self.kv_cache = kv_cache
        names = self.kv_branch_names
        if set(adapters) != set(names):
            raise ValueError(f"`adapters` must be those of {names}, got {tuple(adapters)}")
        if num_layers != kv_cache.num_layers:
            raise ValueError(f"`num_layers` must be {kv_cache.num_layers}, got {num_layers}")
        self.session_id = session_id
        self.num_layers = num_layers
        self._pending: dict[str, ARDiffusionPagedForwardContext] = {}
        # Branches that share a local index never run on the same worker: one request is enough.
        first = {kv_cache.local_index(name): adapters[name] for name in reversed(names)}
        self._session = kv_cache.open_session(session_id, [first[i] for i in sorted(first)])
        for name in names:
            if adapters[name] is not self.adapter(name):
                kv_cache.end_request(adapters[name])

    @property
    def kv_branch_names(self) -> tuple[str, ...]:
        """The branches, in the cache's order."""
        return tuple(branch.name for branch in self.kv_cache.kv_branches)

    @property
    def adapters(self) -> dict[str, ARDiffusionRequestAdapter]:
        """The request of each branch."""
        return {name: self.adapter(name) for name in self.kv_branch_names}

    def adapter(self, kv_branch: str) -> ARDiffusionRequestAdapter:
        """The request of a branch.

        Raises:
            KeyError: an unknown name.
            LifecycleError: the session is closed.
        """
        return self._session.adapter(self.kv_cache.local_index(kv_branch))

    def get_kv_caches(
        self, kv_branch: str, seq_len: int | None = None, commit_current: bool = False
    ) -> list[paged_attention.ARDiffusionPagedLayerContext]:
        """`prepare_paged_context`; ``seq_len`` must be given."""
        if seq_len is None:
            raise ValueError("`seq_len` must be given, got None")
        return self.prepare_paged_context(kv_branch, seq_len, commit_current)

    def prepare_paged_context(
        self, kv_branch: str, seq_len: int, commit_current: bool
    ) -> list[paged_attention.ARDiffusionPagedLayerContext]:
        """A context for each layer of the next forward of a branch. Allocates nothing yet.

        An unfinished forward of the branch is abandoned.

        Raises:
            ValueError: ``seq_len`` is not a whole number of chunks up to the window.
            LifecycleError: the last commit forward has run and is not committed.
        """
        cache, adapter = self.kv_cache, self.adapter(kv_branch)
        self._session.forward(branch=cache.local_index(kv_branch), seq_len=seq_len)  # checks only
        if kv_branch in self._pending:
            self._pending[kv_branch].check_replaceable()
            self._pending.pop(kv_branch).abandon()
        visible = cache.spec.sliding_window + cache.spec.sink_chunks * cache.spec.chunk_size
        forward = ARDiffusionPagedForwardContext(
            kv_cache=cache,
            adapter=adapter,
            kv_branch=kv_branch,
            history_block_ids=cache.window_block_ids(adapter),
            seq_len=int(seq_len),
            commit_current=bool(commit_current),
            max_video_tokens=int(visible),
        )
        self._pending[kv_branch] = forward
        return [
            paged_attention.ARDiffusionPagedLayerContext(layer_idx=layer, forward_ctx=forward)
            for layer in range(self.num_layers)
        ]

    def commit_paged_context(self, kv_branch: str) -> None:
        """End the branch's forward; a commit forward's K/V become history.

        Raises:
            LifecycleError: there is none, or it did not write every layer.
        """
        self.adapter(kv_branch)
        if kv_branch not in self._pending:
            raise LifecycleError(f"branch {kv_branch!r} must have a forward to commit, got none")
        self._pending.pop(kv_branch).commit()

    def is_cross_attention_populated(self, kv_branch: str, cache_name: str) -> bool:
        """Whether every layer of a named cache of a branch is written."""
        self.adapter(kv_branch)
        return self.kv_cache.is_cross_attention_populated(self.session_id, cache_name, kv_branch)

    def populate_cross_attention(
        self, kv_branch: str, cache_name: str, layer_kv: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """See `ARDiffusionKVCache.populate_cross_attention`."""
        self.adapter(kv_branch)
        self.kv_cache.populate_cross_attention(self.session_id, cache_name, kv_branch, layer_kv)

    def get_cross_attention_kv(
        self, kv_branch: str, cache_name: str
    ) -> list[dict[str, Tensor | bool]]:
        """K and V of every layer. See `ARDiffusionKVCache.read_cross_attention_kv`."""
        self.adapter(kv_branch)
        return [
            self.kv_cache.read_cross_attention_kv(self.session_id, cache_name, layer, kv_branch)
            for layer in range(self.num_layers)
        ]

    def clear_cross_attention(self) -> None:
        """Free the prompt's K/V; the history stays.

        Raises:
            LifecycleError: the session is closed.
        """
        self._session.adapter()
        self.kv_cache.release_cross_attention(self.session_id)

    def reset(self, *, keep_cross_attention: Collection[str] = ()) -> None:
        """Forget the history, and the cross-attention K/V but for these names.

        Raises:
            KeyError: an unknown name.
            LifecycleError: the session is closed.
        """
        for name in keep_cross_attention:
            self.kv_cache._cross_kind(name)
        self._session.reset()
        self._forget_forwards()
        self.kv_cache.retain_cross_attention(self.session_id, keep_cross_attention)

    def close(self) -> None:
        """Free everything that the session owns. Closing twice is a no-op."""
        self._session.close()
        self._forget_forwards()
        self.kv_cache.release_cross_attention(self.session_id)

    def _forget_forwards(self) -> None:
        for forward in self._pending.values():
            forward.abandon()
        self._pending.clear()
