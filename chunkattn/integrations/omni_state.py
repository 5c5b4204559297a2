"""vllm-omni's session state and forward context over our sessions, by the names of 0.30.0.

`ARDiffusionKVState` stands where its runner looks for its own. The models see vllm-omni's own layer
contexts and layer inputs: they test for these types.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from vllm_omni.experimental.ar_diffusion.kv_cache import paged_attention

from chunkattn import cache as core
from chunkattn.errors import LifecycleError, StaleContextError
from chunkattn.forward import ForwardContext
from chunkattn.integrations.omni_cache import ARDiffusionKVCache
from chunkattn.manager import ARDiffusionRequestAdapter


def layer_inputs(
    cache: core.ARDiffusionKVCache,
    forward: ForwardContext,
    layer: int,
    video_slots: Tensor,
    action_slots: Tensor,
) -> paged_attention.ARDiffusionPagedLayerInputs:
    """What a model's layer takes: a planned forward, whose slots come as the model splits them."""
    plan = forward.layer_plan(layer)
    return paged_attention.ARDiffusionPagedLayerInputs(
        layer_idx=paged_attention._layer_idx_tensor(layer),
        key_pool=cache.flat_key_pool(layer),
        value_pool=cache.flat_value_pool(layer),
        block_size=forward.table_block_size,
        seq_len=forward.seq_len,
        video_slots=video_slots,
        action_slots=action_slots,
        block_table=plan.block_table,
        query_start_loc=plan.query_start_loc,
        seq_lens=plan.seq_lens,
        max_query_len=forward.seq_len + forward.action_len,
        # What the table can hold, for ever: a number that changes would be compiled anew.
        max_seq_len=plan.block_table.shape[1] * forward.table_block_size,
    )


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
        if query_len != self.seq_len + action_len:
            raise ValueError(
                f"`query_len` must be {self.seq_len} + {action_len}, the span and its action "
                f"rows, got {query_len}"
            )
        session, branch = self.kv_cache.branch_of(self.adapter, self.kv_branch)
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
        slots = (self.current_video_slot_mapping, self.action_slot_mapping)
        inputs = layer_inputs(self.kv_cache, self._forward, layer_idx, *slots)
        self.kv_cache.writes.handed_out(layer_idx)
        return inputs

    def commit(self) -> None:
        """End the forward; a commit forward's K/V become history.

        Raises:
            LifecycleError: a commit forward that did not write every layer. It is aborted.
        """
        self._ended = True
        if self._forward is None and self.commit_current:
            raise LifecycleError(
                f"a commit must write every layer, got none: branch {self.kv_branch!r} never ran"
            )
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
        owned = [first[index] for index in sorted(first)]
        self._session = kv_cache.admit_session(session_id, adapters=owned)
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
        """Forget the history, and the cross-attention K/V but for these names. Opens a closed
        session again.

        Raises:
            KeyError: an unknown name.
            LifecycleError: the session is closed, and another one of its id is open.
            PoolExhaustedError: it is closed, and ``session_capacity`` others are open.
        """
        for name in keep_cross_attention:
            self.kv_cache._cross_kind(name)
        if self._session.is_closed:
            self._session = self.kv_cache.admit_session(self.session_id)
        else:
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
