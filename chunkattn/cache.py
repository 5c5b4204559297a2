"""The paged K/V cache of one model: vLLM's manager, pools, scratch and cross-attention."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chunkattn.checks import POOL_DTYPES, check_int
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.cross_attention import CrossAttention, CrossAttentionSpec, NamedCrossAttention
from chunkattn.errors import LifecycleError, PoolExhaustedError
from chunkattn.manager import ARDiffusionRequestAdapter, ChunkWindowSpec
from chunkattn.policy import Policy
from chunkattn.pool import allocate_kv_pool_with_views, pool_write_chunk
from chunkattn.requests import Requests, locked
from chunkattn.sizing import (
    DEFAULT_SCRATCH_BLOCKS,
    SCRATCH_ENV,
    branch_blocks,
    budgeted_blocks,
    check_policy,
    checked_window,
    managed_blocks,
    scratch_blocks,
)
from chunkattn.streams import Turn
from chunkattn.window import ceil_div, part_of_blocks

if TYPE_CHECKING:
    from chunkattn.session import Session

logger = logging.getLogger(__name__)


class ARDiffusionKVCache(Requests):
    """The paged K/V cache of one model.

    Most callers need `open_session` alone. Below it lie the calls of one request a branch:
    ``begin_request``, then per chunk ``allocate_chunk``, ``chunk_write_slots``, the model's writes,
    ``commit_chunk``; at the end ``end_request``.

    Args:
        config: the window. Must be enabled, with ``chunk_size`` and ``window_chunks``.
        num_layers: attention layers; each has a K and a V pool.
        num_kv_heads: K/V heads on this rank.
        head_size: elements of a head.
        dtype: of the pools. With ``torch.float8_e4m3fn`` each table entry and head has a scale,
            written with its rows; queries stay in 16 or 32 bits, and cross-attention K/V are kept
            in bfloat16.
        block_size: tokens of a block; any relation to ``chunk_size``.
        max_model_len: vLLM's limit for a request, raised when a rollout's storage needs more.
        available_bytes: free memory. The cross-attention pools are deducted, then
            ``config.gpu_memory_fraction`` of the rest goes to managed blocks. Scratch blocks come
            on top: the fraction must leave room for them, as ``memory_budget_bytes`` does itself.
        cross_attn_length: text tokens of the static cross-attention pool; 0 for none.
        cross_attn_img_length: image tokens of it; 0 for none.
        device: where the pools lie; None keeps the books without tensors.
        local_branches: guidance branches that run on this rank, 1 or 2.
        num_frame_per_block: chunks of a span. A forward may bring more, up to the window; the
            smallest pool has room for this many, so one that is longer may find it exhausted.
        max_scratch_tokens_per_branch: action and state tokens of a forward.
        scratch: reserve scratch blocks, into which action rows and the span of a denoise forward
            are written. Without them these rows are attended where the model left them.
        session_capacity: sessions that may be open at a time. Reserves no blocks.
        memory_budget_bytes: a hard budget for blocks, scratch, cross-attention and what the model
            owns: the pool gets the blocks of ``session_capacity`` sessions, each with a forward in
            flight, in place of a share of ``available_bytes``. None is the share.
        model_owned_bytes_per_session: state that the model keeps for a session, declared so that
            the budget can count it.
        backend: ``"auto"``, ``"torch"``, ``"triton"``, ``"fa3"`` or ``"fa2"``, for the sessions.
        policy: what the branches see and keep, from `chunkattn.policy` or one's own. None is the
            config's sink and window. A span is bounded by ``window_chunks`` in either case, and by
            the policy's ``longest_span``.
        cross_attention: named cross-attention K/V of each session, beside the static pools; room
            for ``session_capacity`` of them is deducted from the memory.
        debug_group: ranks that must plan the same blocks, for debugging: each forward that opens
            waits for all of them, and where one plans otherwise, or cannot, it is an error on every
            rank and nothing stays allocated. None compares nothing.

    Raises:
        TypeError: a number is no integer, or the policy no `Policy`.
        ValueError: an argument does not fit, or the memory holds fewer blocks than a rollout needs
            to go on for ever: sink, window and span of every local branch, and the null block.
    """

    default_scratch_blocks = DEFAULT_SCRATCH_BLOCKS

    @torch.inference_mode(False)  # what is made in inference mode is of no use outside of it
    def __init__(
        self,
        config: ARDiffusionKVConfig,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
        available_bytes: int,
        cross_attn_length: int = 0,
        cross_attn_img_length: int = 0,
        device: torch.device | None = None,
        local_branches: int = 2,
        num_frame_per_block: int = 1,
        max_scratch_tokens_per_branch: int = 0,
        scratch: bool = True,
        session_capacity: int = 1,
        memory_budget_bytes: int | None = None,
        model_owned_bytes_per_session: int = 0,
        backend: str = "auto",
        policy: Policy | None = None,
        cross_attention: Mapping[str, CrossAttentionSpec] | None = None,
        debug_group: "torch.distributed.ProcessGroup | None" = None,
    ) -> None:
        from chunkattn.ops import BACKENDS, resolve_backend

        window_chunks = checked_window(config, num_frame_per_block)
        if policy is not None:
            check_policy(policy, num_layers, num_frame_per_block)
        check_int("local_branches", local_branches)
        if local_branches not in (1, 2):
            raise ValueError(f"`local_branches` must be 1 or 2, got {local_branches}")
        for name, number, least in (
            ("num_layers", num_layers, 1),
            ("num_kv_heads", num_kv_heads, 1),
            ("head_size", head_size, 1),
            ("block_size", block_size, 1),
            ("max_model_len", max_model_len, 1),
            ("available_bytes", available_bytes, 0),
            ("cross_attn_length", cross_attn_length, 0),
            ("cross_attn_img_length", cross_attn_img_length, 0),
            ("max_scratch_tokens_per_branch", max_scratch_tokens_per_branch, 0),
            ("session_capacity", session_capacity, 1),
            ("model_owned_bytes_per_session", model_owned_bytes_per_session, 0),
        ):
            check_int(name, number, least)
        is_fp8 = dtype == torch.float8_e4m3fn
        if dtype not in POOL_DTYPES and not is_fp8:
            raise NotImplementedError(
                f"`dtype` must be float32, float16, bfloat16 or float8_e4m3fn, got {dtype}"
            )
        # Nothing scales cross-attention K/V.
        self._cross_dtype = torch.bfloat16 if is_fp8 else dtype
        self.query_dtypes = POOL_DTYPES if is_fp8 else (dtype,)

        self.config = config
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = torch.device("cpu") if device is None else torch.device(device)
        self.local_branches = local_branches
        self.num_frame_per_block = num_frame_per_block
        self.session_capacity = session_capacity
        self.debug_group = debug_group
        self.window_chunks = window_chunks
        self.backend = backend
        if device is not None:
            part = part_of_blocks(block_size, config.chunk_size)
            self.backend = resolve_backend(backend, self.device, head_size, dtype, part)
        elif backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}")

        spec = ChunkWindowSpec(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            sliding_window=window_chunks * config.chunk_size,
            chunk_size=config.chunk_size,
            window_chunks=window_chunks,
            sink_chunks=config.sink_chunks,
            reset_at_boundary=config.reset_at_boundary,
        )
        self.cross_attn_length = cross_attn_length
        self.cross_attn_img_length = cross_attn_img_length
        self._cross_attention = CrossAttention(
            cross_attn_length,
            cross_attn_img_length,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=self._cross_dtype,
            device=device,
        )

        self._cross_specs = dict(cross_attention or {})
        self._has_tensors = device is not None
        self.scratch_blocks_per_branch = 0
        if scratch:
            self.scratch_blocks_per_branch = scratch_blocks(
                ceil_div(num_frame_per_block * config.chunk_size, block_size)
                + ceil_div(max_scratch_tokens_per_branch, block_size),
                self.default_scratch_blocks,
            )
        self.scratch_num_blocks = local_branches * self.scratch_blocks_per_branch
        parts_per_block = block_size // part_of_blocks(block_size, config.chunk_size)
        scale_bytes = 2 * 4 * num_kv_heads * parts_per_block if is_fp8 else 0
        page_size_bytes = (int(spec.page_size_bytes) + scale_bytes) * num_layers
        num_branch_blocks = branch_blocks(spec, policy, num_frame_per_block)
        session_bytes = self.new_cross_attention().num_bytes(local_branches)
        if memory_budget_bytes is None:
            self.num_blocks = managed_blocks(
                available_bytes
                - self._cross_attention.num_bytes
                - session_capacity * (session_bytes + model_owned_bytes_per_session),
                config.gpu_memory_fraction,
                page_size_bytes=page_size_bytes,
                local_branches=local_branches,
                blocks_per_branch=num_branch_blocks,
            )
        else:
            self.num_blocks = budgeted_blocks(
                session_capacity,
                memory_budget_bytes,
                page_size_bytes=page_size_bytes,
                local_branches=local_branches,
                blocks_per_branch=num_branch_blocks,
                scratch_blocks=self.scratch_num_blocks,
                static_bytes=self._cross_attention.num_bytes,
                cross_attention_bytes=session_bytes,
                model_owned_bytes=model_owned_bytes_per_session,
            )
        self.managed_num_blocks = self.num_blocks
        self.num_blocks_total = self.managed_num_blocks + self.scratch_num_blocks
        if self.num_blocks_total * block_size > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"`available_bytes` must give at most 2**31 - 1 slots, got {self.num_blocks_total} "
                f"blocks of {block_size}"
            )
        super().__init__(spec, policy, num_layers, self.num_blocks, max_model_len, self.device)
        # For all plans, whose slot mappings are copies: adding offsets takes twice as long.
        self.slots_of_entry = np.arange(self.num_blocks_total * block_size, dtype=np.int32).reshape(
            -1, self.table_block_size
        )
        self.longest_span = min(window_chunks, self.policy.longest_span)
        self.view_of_layer = [self.policy.view_of(layer) for layer in range(num_layers)]
        # A single session waits for nobody.
        shared = scratch and session_capacity > 1
        self.scratch_turns = [Turn() for _ in range(local_branches)] if shared else []
        self._sessions: dict[str, Session] = {}
        self.uses = itertools.count()

        self._views: list[list[torch.Tensor]] = []
        self._flat_keys: list[torch.Tensor] = []
        self._flat_values: list[torch.Tensor] = []
        if device is not None:
            self._views, self._flat_keys, self._flat_values = allocate_kv_pool_with_views(
                self.num_blocks_total,
                block_size,
                num_layers,
                num_kv_heads,
                head_size,
                dtype,
                self.device,
            )
        self.table_pools = [
            (
                key.unflatten(0, (-1, self.table_block_size)),
                value.unflatten(0, (-1, self.table_block_size)),
            )
            for key, value in zip(self._flat_keys, self._flat_values, strict=True)
        ]
        self.pool_device = self.table_pools[0][0].device if self.table_pools else self.device
        self.table_scales: list[tuple[torch.Tensor | None, torch.Tensor | None]]
        self.table_scales = [(None, None)] * num_layers
        # What is copied with a block, or with a part of one.
        self.pools = [_bytes_of(pool) for pair in self._views for pool in pair]
        self.part_pools = [_bytes_of(pool) for pair in self.table_pools for pool in pair]
        if is_fp8 and device is not None:
            shape = (self.num_blocks_total, parts_per_block, num_kv_heads)
            scales = [torch.ones(shape, device=self.device) for _ in range(2 * num_layers)]
            parts = [scale.flatten(0, 1) for scale in scales]
            self.table_scales = list(zip(parts[::2], parts[1::2], strict=True))
            self.pools += scales
            self.part_pools += parts
        logger.info(
            "K/V window in force: chunk %d tokens, %s, span %d; block %d tokens, "
            "%d managed blocks + %d scratch, %d branch(es), backend %s",
            config.chunk_size,
            policy
            or f"window {window_chunks} chunks, sink {config.sink_chunks}, "
            f"reset_at_boundary {config.reset_at_boundary}",
            num_frame_per_block,
            block_size,
            self.managed_num_blocks,
            self.scratch_num_blocks,
            local_branches,
            self.backend,
        )

    # -- cross-attention ------------------------------------------------------------------------
    def write_cross_kv(
        self,
        layer_idx: int,
        is_negative: bool,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        k_img: torch.Tensor | None = None,
        v_img: torch.Tensor | None = None,
    ) -> None:
        """Write one layer's cross-attention K/V of one branch, in place.

        Args:
            layer_idx: the layer.
            is_negative: the negative guidance branch.
            k: ``(batch, cross_attn_length, num_kv_heads, head_size)``, batch entry 0 is copied.
                None skips the text half, which stays as it was.
            v: as ``k``; both or neither.
            k_img: ``(batch, cross_attn_img_length, ...)`` for the image half; None skips it.
            v_img: as ``k_img``.
        """
        self._check_layer(layer_idx, "layer_idx")
        self._cross_attention.write(layer_idx, int(is_negative), k, v, k_img, v_img)

    def read_cross_kv(self, layer_idx: int, is_negative: bool) -> dict[str, Any]:
        """One layer's cross-attention K/V as the dict that the model's cross-attention takes.

        Returns:
            ``{"is_init": True, "k": ..., "v": ...}`` and, with an image pool, ``"k_img"`` and
            ``"v_img"``: views ``(1, length, num_kv_heads, head_size)``.

        Raises:
            LifecycleError: what is asked for has not been written.
        """
        self._check_layer(layer_idx, "layer_idx")
        return {"is_init": True, **self._cross_attention.read(layer_idx, int(is_negative))}

    def write_chunk_kv(
        self,
        layer_index: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        adapter: ARDiffusionRequestAdapter,
    ) -> None:
        """Write one layer's K/V of the chunk in flight, ``(batch, chunk_size, num_kv_heads,
        head_size)``.

        Raises:
            NotImplementedError: the pools are fp8, which sessions write.
        """
        self._check_layer(layer_index, "layer_index")
        if self.table_scales[layer_index][0] is not None:
            raise NotImplementedError(
                f"`dtype` must be float32, float16 or bfloat16 for write_chunk_kv, got {self.dtype}"
            )
        slots = self.chunk_write_slots(adapter)
        pool_write_chunk(
            self.flat_key_pool(layer_index), self.flat_value_pool(layer_index), new_k, new_v, slots
        )
        logger.debug(
            "write_chunk_kv: req=%s layer=%d chunk=%d",
            adapter.request_id,
            layer_index,
            adapter.completed_chunks,
        )

    def new_cross_attention(self) -> NamedCrossAttention:
        """Empty named K/V for a session."""
        return NamedCrossAttention(
            self._cross_specs,
            num_layers=self.num_layers,
            head_size=self.head_size,
            dtype=self._cross_dtype,
            device=self.device if self._has_tensors else None,
        )

    def forget_cross_kv(self, session_id: str) -> None:
        """Count the static K/V as unwritten, unless another session than this one is open."""
        if set(self._sessions) <= {session_id}:
            self._cross_attention.forget()

    # -- pools -------------------------------------------------------------------------------------
    def scratch_block_ids(self, is_negative: bool, start: int, count: int) -> list[int]:
        """Blocks ``[start, start + count)`` of a branch's scratch, which the manager does not own.

        With one local branch that branch has the first scratch, whichever guidance side it is.
        """
        if start < 0 or count < 0:
            raise ValueError(f"`start` and `count` must not be negative, got {start} and {count}")
        if start + count > self.scratch_blocks_per_branch:
            raise PoolExhaustedError(
                f"scratch blocks exhausted: a branch has {self.scratch_blocks_per_branch}, got a "
                f"call for [{start}, {start + count}); declare max_scratch_tokens_per_branch or "
                f"set {SCRATCH_ENV}"
            )
        branch = int(is_negative) if self.local_branches == 2 else 0
        base = self.managed_num_blocks + branch * self.scratch_blocks_per_branch + start
        return list(range(base, base + count))

    def key_cache(self, layer_idx: int) -> torch.Tensor:
        """K pool of a layer, ``(num_blocks_total, block_size, num_kv_heads, head_size)``."""
        return self._pool(layer_idx)[0]

    def value_cache(self, layer_idx: int) -> torch.Tensor:
        """V pool of a layer, as `key_cache`."""
        return self._pool(layer_idx)[1]

    def flat_key_pool(self, layer_idx: int) -> torch.Tensor:
        """The base allocation of `key_cache`, ``(num_slots, num_kv_heads, head_size)``."""
        self._pool(layer_idx)
        return self._flat_keys[layer_idx]

    def flat_value_pool(self, layer_idx: int) -> torch.Tensor:
        """The base allocation of `value_cache`."""
        self._pool(layer_idx)
        return self._flat_values[layer_idx]

    # -- sessions ----------------------------------------------------------------------------------
    def open_session(self, session_id: str, *, evict_idle: bool = False) -> "Session":
        """Open a rollout: one request a local branch.

        Args:
            session_id: the id of the new session.
            evict_idle: where ``session_capacity`` sessions are open, close the one without an open
                forward that was used least recently. A refused call closes none.

        Raises:
            LifecycleError: a session of that id is open, or a request has the name of a branch.
            PoolExhaustedError: ``session_capacity`` sessions are open, and none may be evicted.
        """
        return self.admit_session(session_id, evict_idle=evict_idle)

    @locked
    def admit_session(
        self,
        session_id: str,
        source: "Session | None" = None,
        evict_idle: bool = False,
        adapters: Sequence[ARDiffusionRequestAdapter] = (),
    ) -> "Session":
        """`open_session`; or a fork of ``source``; or one that takes over ``adapters``, requests
        that have begun, one a local branch and without a prefill prefix.
        """
        from chunkattn.session import Session

        if not isinstance(session_id, str):
            raise TypeError(f"`session_id` must be a str, got {session_id!r}")
        if adapters and len(adapters) != self.local_branches:
            raise ValueError(
                f"`adapters` must be one for each of {self.local_branches} local branches, got "
                f"{len(adapters)}"
            )
        for adapter in adapters:
            self._check_live(adapter)
            if adapter.num_prompt_tokens:
                raise ValueError(
                    "`adapters` must have no prefill prefix, which a session would not see, got "
                    f"{adapter.num_prompt_tokens} tokens of {adapter.request_id!r}"
                )
        if session_id in self._sessions:
            raise LifecycleError(f"`session_id` must be new, got {session_id!r}, which is open")
        evicted = None
        if len(self._sessions) >= self.session_capacity:
            idle = [session for session in self._sessions.values() if session.is_idle]
            if not (evict_idle and idle):
                raise PoolExhaustedError(
                    f"`session_capacity` is {self.session_capacity} and {sorted(self._sessions)} "
                    f"are open: close one before opening {session_id!r}"
                )
            evicted = min(idle, key=lambda session: session.last_used)
        session = Session(self, session_id, source, adapters)
        if evicted is not None:  # not before the new one is there: it may have been refused
            logger.info("session %r makes room for %r", evicted.session_id, session_id)
            evicted.close()
        self._sessions[session_id] = session
        return session

    @locked
    def check_integrity(self) -> None:
        """Recount who owns every managed block.

        Raises:
            ChunkAttnError: a block is owned twice, lost, or counted wrongly, a resident chunk has
                none, or a request of a session has ended; the message names it.
        """
        super().check_integrity()
        for session in self._sessions.values():
            for request in session.requests():
                self._check_live(request)

    def forget_session(self, session_id: str) -> None:
        """Called by `Session.close`."""
        self._sessions.pop(session_id, None)

    # -- checks ------------------------------------------------------------------------------------
    def _pool(self, layer_idx: int) -> list[torch.Tensor]:
        self._check_layer(layer_idx, "layer_idx")
        if not self._views:
            raise LifecycleError("the cache was built without tensors (device=None)")
        return self._views[layer_idx]

    def _check_layer(self, layer: int, name: str = "layer") -> None:
        check_int(name, layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"`{name}` must be from 0 to {self.num_layers - 1}, got {layer}")


def _bytes_of(pool: torch.Tensor) -> torch.Tensor:
    """A pool that can be copied by index: torch cannot index 8-bit floats everywhere."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
