"""vllm-omni's op ``ar_diffusion_paged_write_attn``, computed by chunkattn.

Its arguments are vllm-omni's own: flat pools, slots, one block table for all layers of a forward.
Every layer of DreamZero and of LingBot-World calls it, whoever manages the blocks.
"""

import functools
import os
import weakref

import torch
from torch import Tensor

from chunkattn import ops
from chunkattn.errors import StaleContextError
from chunkattn.forward import ForwardContext

NAME = "vllm_omni::ar_diffusion_paged_write_attn"
BACKEND_ENV = "CHUNKATTN_BACKEND"
MUTATED = ("key_pool", "value_pool", "stage_key", "stage_value")


class Writes:
    """What the op has written of the forward in flight. One for each cache that plans for it.

    A commit needs every layer written. A CUDA graph writes without calling the op, so a layer
    that was captured in one counts as written when its arguments are handed out.

    Args:
        key_pools: of each layer.
        backend: as of `chunkattn.paged_window_attention`; None is what the deployment asks for.

    Attributes:
        forward: the one that was prepared last: a worker runs one after the other. None where none
            is in flight, and then the op refuses the pools.
    """

    def __init__(self, key_pools: list[Tensor], backend: str | None = None) -> None:
        self.forward: ForwardContext | None = None
        self.backend = backend
        self._captured: set[int] = set()
        self._layer_at = {pool.data_ptr(): layer for layer, pool in enumerate(key_pools)}
        _writes_of_pool.update((address, self) for address in self._layer_at)

    def check(self) -> None:
        if self.forward is None:
            raise StaleContextError(
                "the layer's forward has ended, or its session was reset or closed"
            )

    def handed_out(self, layer: int) -> None:
        """A layer's arguments go to the model."""
        if self.forward is not None and layer in self._captured:
            self.forward.mark_layer_written(layer)

    def written(self, key_pool: Tensor) -> None:
        """The op has written a layer."""
        layer = self._layer_at[key_pool.data_ptr()]
        if key_pool.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.add(layer)
        if self.forward is not None:
            self.forward.mark_layer_written(layer)


_writes_of_pool: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()


def backend_asked() -> str:
    """The backend that the deployment asks for, ``"auto"`` where it does not."""
    return os.environ.get(BACKEND_ENV, "auto")


resolve_backend = functools.cache(ops.resolve_backend)


def write_attend(
    query: Tensor,
    k_curr: Tensor,
    v_curr: Tensor,
    k_act: Tensor | None,
    v_act: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_size: int,
    video_slots: Tensor,
    action_slots: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    stage_key: Tensor | None,
    stage_value: Tensor | None,
    reuse_history: bool,
    stage_first_block: int,
) -> Tensor:
    """Write K and V of the span and of its action rows, then attend over the table.

    The staging arguments are for vllm-omni's contiguous gather; K and V are read where they lie.

    Args:
        query: ``(num_tokens, num_heads, head_size)``, in the pools' dtype.
        k_curr, v_curr: ``(seq_len, num_kv_heads, head_size)``.
        k_act, v_act: ``(action_len, num_kv_heads, head_size)`` or None.
        key_pool, value_pool: ``(num_slots, num_kv_heads, head_size)``, written in place.
        block_size: tokens of a block.
        video_slots, action_slots: the slot of each row, int32 or int64.
        block_table: ``(num_seqs, max_blocks)`` int32.
        query_start_loc: ``(num_seqs + 1,)`` int32.
        seq_lens: ``(num_seqs,)`` int32, visible keys.
        softmax_scale: of the scores.

    Returns:
        As ``query``.

    Raises:
        TypeError: ``query`` has another dtype than the pools.
        StaleContextError: the pools are a chunkattn cache's, and no forward is in flight on it.
    """
    if query.dtype != key_pool.dtype:
        raise TypeError(
            f"`query` must have the dtype of the pools, {key_pool.dtype}, got {query.dtype}"
        )
    writes = _writes_of_pool.get(key_pool.data_ptr())
    if writes is not None:
        writes.check()
    has_action = k_act is not None and v_act is not None and k_act.shape[0] > 0
    backend = (writes and writes.backend) or backend_asked()
    out = torch.empty_like(query)
    ops.write_attend(
        query,
        k_curr,
        v_curr,
        k_act,
        v_act,
        key_pool.unflatten(0, (-1, block_size)),
        value_pool.unflatten(0, (-1, block_size)),
        _joined(video_slots, action_slots) if has_action else video_slots,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        softmax_scale,
        resolve_backend(backend, query.device, query.shape[2], key_pool.dtype, block_size),
    )
    if writes is not None:
        writes.written(key_pool)
    return out


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Two slot vectors as one; no copy where they are neighbours, as those of our plans are."""
    if (
        first.dtype == second.dtype
        and first.data_ptr() + first.nbytes == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    ):
        return first.as_strided((first.numel() + second.numel(),), (1,))
    return torch.cat((first, second))
