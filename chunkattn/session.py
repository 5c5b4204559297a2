"""The life of a rollout.

A session holds one request for each local branch. A branch is idle until a forward opens on it:

| branch state | event | next state | effect |
|---|---|---|---|
| idle | enter ``forward(...)`` | planned | slots allocated, plan written |
| idle | enter, pool exhausted | idle | nothing allocated |
| planned | ``write_attend`` of a layer | planned | that layer counts as written |
| planned | clean exit, denoise | idle | nothing committed |
| planned | clean exit, commit, every layer written | idle | committed, window evicted |
| planned | clean exit, commit, a layer missing | idle | aborted, `LifecycleError` |
| planned | exception | idle | aborted: slots given back, history untouched |
| any | ``reset`` | idle | blocks freed, the open forward is stale |
| any | ``close`` | closed | blocks freed, the open forward is stale |

A stale or ended forward raises `StaleContextError` when it is used.
"""

import logging
from typing import TYPE_CHECKING

from chunkattn.errors import LifecycleError
from chunkattn.forward import Branch, ForwardContext

if TYPE_CHECKING:
    from chunkattn.cache import ARDiffusionKVCache
    from chunkattn.manager import ARDiffusionRequestAdapter

logger = logging.getLogger(__name__)


class Session:
    """One rollout. Open it with `ARDiffusionKVCache.open_session`."""

    def __init__(self, cache: "ARDiffusionKVCache", session_id: str) -> None:
        self.cache = cache
        self.session_id = session_id
        self._closed = False
        self._branches: list[Branch] = []
        try:
            for index in range(cache.local_branches):
                self._branches.append(Branch(cache, index, f"{session_id}::branch{index}"))
        except LifecycleError:  # a live request of that name: leave none of ours behind
            for branch in self._branches:
                cache.end_request(branch.adapter)
            raise

    def adapter(self, branch: int = 0) -> "ARDiffusionRequestAdapter":
        """The request of a branch: its position and counters."""
        return self._branch(branch).adapter

    def forward(
        self, *, branch: int = 0, seq_len: int, commit: bool = False, action_len: int = 0
    ) -> ForwardContext:
        """A forward over one span, to be used in a ``with`` statement, which plans and allocates.

        Args:
            branch: guidance side, from 0 to ``local_branches - 1``.
            seq_len: tokens of the span, a whole number of chunks up to the window.
            commit: make the span part of the history on a clean exit; else it is a denoise forward.
            action_len: action and state rows that follow the span's; they are visible, never
                committed.

        Raises:
            ValueError: an argument does not fit.
            LifecycleError: the session is closed, or a forward is open on that branch.
        """
        cache, chunk_size = self.cache, self.cache.spec.chunk_size
        side = self._branch(branch)
        if seq_len <= 0 or seq_len % chunk_size or seq_len > cache.window_chunks * chunk_size:
            raise ValueError(
                f"`seq_len` must be a positive multiple of chunk_size {chunk_size}, at most "
                f"{cache.window_chunks} chunks, got {seq_len}"
            )
        scratch_tokens = cache.scratch_blocks_per_branch * cache.block_size
        if not 0 <= action_len <= scratch_tokens:
            raise ValueError(
                f"`action_len` must be from 0 to {scratch_tokens}, what the scratch blocks of a "
                f"branch hold (see max_scratch_tokens_per_branch), got {action_len}"
            )
        return ForwardContext(self, side, seq_len, commit, action_len)

    def rollback(self, num_chunks: int) -> None:
        """Drop the last committed chunks of every branch, as if they had never been committed.

        A world model whose prediction was wrong commits the real observation in their place. It may
        cut a span. A branch that is behind the others goes back no further than they do.

        Args:
            num_chunks: chunks to drop, counted from the branch that is furthest.

        Raises:
            ValueError: negative, or more chunks than were committed.
            LifecycleError: a forward is open, the session is closed, or chunks that the next span
                must see have left the window. Nothing has changed.
        """
        self._check_idle("rollback")
        cache = self.cache
        position = max(branch.adapter.completed_chunks for branch in self._branches)
        if not isinstance(num_chunks, int) or not 0 <= num_chunks <= position:
            raise ValueError(f"`num_chunks` must be from 0 to {position}, got {num_chunks}")
        adapters = [branch.adapter for branch in self._branches]
        targets = [min(a.completed_chunks, position - num_chunks) for a in adapters]
        for adapter, target in zip(adapters, targets, strict=True):
            cache.check_rollback(adapter, target, cache.num_frame_per_block)
        for adapter, target in zip(adapters, targets, strict=True):
            cache.rollback_chunks(adapter, target)
        logger.debug("rollback: session=%s chunks=%d", self.session_id, num_chunks)

    def reset(self) -> None:
        """Forget the history and start anew under the same id. Frees every block; an open forward
        becomes stale.

        Raises:
            LifecycleError: the session is closed.
        """
        self._check_open()
        for branch in self._branches:
            branch.open_forward = None
            self.cache.end_request(branch.adapter)
            branch.adapter = self.cache.begin_request(branch.request_id)
        logger.debug("reset: session=%s", self.session_id)

    def close(self) -> None:
        """Free every block and end the session. An open forward becomes stale; closing twice is a
        no-op.
        """
        if self._closed:
            return
        self._closed = True
        for branch in self._branches:
            branch.open_forward = None
            self.cache.end_request(branch.adapter)
        self.cache.forget_session(self.session_id)
        logger.debug("close: session=%s", self.session_id)

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError(f"session {self.session_id!r} is closed")

    def _check_idle(self, call: str) -> None:
        """Refuse a call that would pull the history from under an open forward."""
        self._check_open()
        for branch in self._branches:
            if branch.open_forward is not None:
                raise LifecycleError(
                    f"`{call}` must wait for the open forward on branch {branch.index} of session "
                    f"{self.session_id!r}"
                )

    def _branch(self, branch: int) -> Branch:
        self._check_open()
        if not 0 <= branch < len(self._branches):
            raise ValueError(f"`branch` must be from 0 to {len(self._branches) - 1}, got {branch}")
        return self._branches[branch]
