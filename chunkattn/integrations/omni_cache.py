"""vllm-omni's K/V cache over ours, by the names and arguments of 0.30.0."""

import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec

from chunkattn import cache as core
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.cross_attention import CrossAttentionSpec, NamedCrossAttention
from chunkattn.errors import LifecycleError, PoolExhaustedError, StaleContextError
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

    default_scratch_blocks = 0  # vllm-omni has no more than the model declares

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
        scratch = local * scratch_blocks(
            span_blocks + ceil_div(scratch_tokens, block_size), self.default_scratch_blocks
        )

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
