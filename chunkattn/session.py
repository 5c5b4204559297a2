"""The life of a rollout.

A session holds one request for each local branch. A branch is idle until a forward opens on it, and
idle again when the forward has ended:

| branch | event | next | effect |
|---|---|---|---|
| idle | enter ``forward(...)`` | planned | slots allocated, plan written |
| idle | enter, pool exhausted or branches disagree | idle | nothing allocated, error raised |
| planned | ``write_attend`` of a layer | planned | that layer counts as written |
| planned | ``write_attend`` of the last layer | written | |
| planned, written | clean exit, denoise | idle | nothing committed |
| written | clean exit, commit | committed | the span is history, what the policy drops is freed |
| planned | clean exit, commit, a layer missing | aborted | slots given back, `LifecycleError` |
| planned, written | exception | aborted | slots given back, history untouched |
| written | clean exit, commit, the policy or a host copy fails | aborted | as an exception |
| committed, aborted | | idle | after an abort the same forward can be tried again |

| session | event | next | effect |
|---|---|---|---|
| open | any call below but ``reset`` and ``close``, a forward open | open | refused |
| open | ``rollback(n)`` | open | the last n chunks of every branch are gone, blocks freed |
| open | ``fork(id)`` | open | another session owns the same blocks; a write copies |
| open | ``switch_prompt("recache")`` | replaying | the next commits rewrite the resident chunks |
| replaying | commit of the last resident chunk, every branch | open | |
| replaying | ``rollback``, ``fork``, ``swap_out``, ``switch_prompt`` | replaying | refused |
| open | ``swap_out`` | swapped | bytes in host memory, blocks freed |
| swapped | ``swap_in`` | open | blocks allocated, bytes restored |
| swapped | ``swap_in``, pool exhausted | swapped | nothing allocated, `PoolExhaustedError` |
| swapped | any forward, ``rollback``, ``fork``, ``switch_prompt`` | swapped | refused |
| open, replaying, swapped | ``reset`` | open | blocks freed, open forwards are stale |
| open, replaying, swapped | ``close`` | closed | blocks freed, open forwards are stale |
| closed | anything but ``close`` | closed | refused |

Refused is a `LifecycleError`. A stale or ended forward raises `StaleContextError` when it is used.
The branches that ran agree: a span starts where each of them stands, or stood before it ran that
span. A branch on which no forward was ever opened is not asked.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from chunkattn.branch import Branch
from chunkattn.checks import check_int
from chunkattn.errors import LifecycleError
from chunkattn.forward import ForwardContext
from chunkattn.pool import HostCopy

if TYPE_CHECKING:
    from chunkattn.cache import ARDiffusionKVCache
    from chunkattn.manager import ARDiffusionRequestAdapter

logger = logging.getLogger(__name__)


class Session:
    """One rollout. Open it with `ARDiffusionKVCache.open_session`.

    A session is used by one thread at a time; different sessions by different threads.
    """

    @torch.inference_mode(False)  # as the cache
    def __init__(
        self,
        cache: "ARDiffusionKVCache",
        session_id: str,
        source: "Session | None" = None,
        adapters: "Sequence[ARDiffusionRequestAdapter]" = (),
    ) -> None:
        self.cache = cache
        self.session_id = session_id
        self._closed = False
        self.last_used = next(cache.uses)
        self._swapped: list[HostCopy] | None = None
        self._branches: list[Branch] = []
        self._cross_attention = cache.new_cross_attention()
        try:
            for index in range(cache.local_branches):
                origin = source._branches[index] if source else None
                begun = adapters[index] if adapters else None
                name = f"{session_id}::branch{index}"
                self._branches.append(Branch(cache, index, name, origin, begun))
        except BaseException:  # leave no request of ours behind; those taken over are the caller's
            if not adapters:
                for branch in self._branches:
                    branch.end()
            raise
        if source is not None:
            self._cross_attention.share(source._cross_attention)

    @property
    def is_idle(self) -> bool:
        """Whether no forward is open."""
        return all(branch.open_forward is None for branch in self._branches)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the session was evicted."""
        return self._closed

    def adapter(self, branch: int = 0) -> "ARDiffusionRequestAdapter":
        """The request of a branch: its position and counters."""
        return self._branch(branch).adapter

    def forward(
        self, *, branch: int = 0, seq_len: int, commit: bool = False, action_len: int = 0
    ) -> ForwardContext:
        """A forward over one span, to be used in a ``with`` statement, which plans and allocates.

        Args:
            branch: guidance side, from 0 to ``local_branches - 1``.
            seq_len: tokens of the span, a whole number of chunks up to the shortest window.
            commit: make the span part of the history on a clean exit; else it is a denoise forward.
            action_len: action and state rows that follow the span's; they are visible, never
                committed.

        Raises:
            ValueError, TypeError: an argument does not fit.
            LifecycleError: the session is closed or swapped out.
        """
        cache, chunk_size = self.cache, self.cache.spec.chunk_size
        side = self._branch(branch)
        if self._swapped is not None:
            self._check_open()
        check_int("seq_len", seq_len)
        check_int("action_len", action_len)
        if seq_len <= 0 or seq_len % chunk_size or seq_len > cache.longest_span * chunk_size:
            raise ValueError(
                f"`seq_len` must be a positive multiple of chunk_size {chunk_size}, at most "
                f"{cache.longest_span} chunks, got {seq_len}"
            )
        scratch_tokens = cache.scratch_blocks_per_branch * cache.block_size
        if action_len < 0:
            raise ValueError(f"`action_len` must not be negative, got {action_len}")
        if scratch_tokens and action_len > scratch_tokens:
            raise ValueError(
                f"`action_len` must be at most {scratch_tokens}, what the scratch blocks of a "
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
        adapters = self._adapters()
        position = max(adapter.completed_chunks for adapter in adapters)
        check_int("num_chunks", num_chunks)
        if not 0 <= num_chunks <= position:
            raise ValueError(f"`num_chunks` must be from 0 to {position}, got {num_chunks}")
        targets = [min(a.completed_chunks, position - int(num_chunks)) for a in adapters]
        for adapter, target in zip(adapters, targets, strict=True):
            cache.check_rollback(adapter, target, cache.num_frame_per_block)
        for adapter, target in zip(adapters, targets, strict=True):
            cache.rollback_chunks(adapter, target)
        self._show({branch: branch.adapter.retrieved for branch in self._branches})
        logger.debug("rollback: session=%s chunks=%d", self.session_id, num_chunks)

    def fork(self, new_id: str) -> "Session":
        """A new session with the same past; each goes on by itself.

        The blocks are shared and counted by reference: a block is copied when one of its owners
        writes to it, and free when the last one has let it go. Counts against `session_capacity`.

        Args:
            new_id: the id of the new session.

        Raises:
            LifecycleError: a session of that id is open, a forward is open, or the session is
                closed or swapped out.
            PoolExhaustedError: ``session_capacity`` sessions are open.
        """
        self._check_idle("fork")
        session = self.cache.admit_session(new_id, self)
        logger.debug("fork: session=%s new=%s", self.session_id, new_id)
        return session

    def swap_out(self) -> None:
        """Move the history to host memory (pinned where there is a GPU) and free its blocks.

        Until `swap_in` the session refuses to run. Swapping out twice is a no-op.

        Raises:
            LifecycleError: a forward is open, or the session is closed.
            RuntimeError: host memory has run out; every block stays.
        """
        if self._swapped is None or self._closed:
            self._check_idle("swap_out")
            self._swapped = self.cache.swap_out_requests(self.requests())
            logger.debug("swap_out: session=%s", self.session_id)

    def swap_in(self) -> None:
        """Bring the history back into blocks. A no-op where it was not swapped out.

        Raises:
            PoolExhaustedError: too few free blocks; the session stays swapped out.
            LifecycleError: the session is closed.
        """
        self._check_not_closed()
        if self._swapped is not None:
            self.cache.swap_in_requests(self.requests(), self._swapped)
            self._swapped = None
            logger.debug("swap_in: session=%s", self.session_id)

    def retrieve(self, chunks: Sequence[int]) -> None:
        """Show these chunks beside what the policy shows, to all forwards until told otherwise.

        For a `policy.Retrieval`: a chunk that is resident stays so, one that has left is brought
        back from host memory.

        Args:
            chunks: committed chunks, at most the policy's ``num_chunks``; empty for none.

        Raises:
            ValueError: too many, or a chunk that a branch which ran has not committed, or no longer
                has: see the policy's ``archive_chunks``.
            LifecycleError: a forward is open, or the session is closed or swapped out.
            PoolExhaustedError: too few free blocks. Nothing has changed.
        """
        self._check_idle("retrieve")
        wanted = tuple(sorted(set(chunks)))
        most = self.cache.policy.retrieved_chunks
        if len(wanted) > most:
            raise ValueError(
                f"`chunks` must name at most {most} chunks, what the policy retrieves, got {wanted}"
            )
        self._show({branch: wanted for branch in self._branches if branch.ran})

    def switch_prompt(self, history: Literal["keep", "recache", "reset"]) -> list[int]:
        """Go on with another prompt: say what becomes of the history made with the old one.

        The session's cross-attention K/V are forgotten in any case, the cache's static ones where
        no other session is open: write the new prompt's.

        Args:
            history: ``"keep"`` leaves it as it is. ``"reset"`` forgets it. ``"recache"`` has the
                caller replay the resident frames: the next commit forwards of each branch are
                planned over those chunks, in order, each seeing what is resident before it, and
                rewrite the same slots. A span is contiguous; denoise forwards are refused until the
                last resident chunk is replayed.

        Returns:
            The chunks to replay; none but for ``"recache"``.

        Raises:
            ValueError: another word.
            LifecycleError: a forward is open, or the session is closed or swapped out.
            PoolExhaustedError: blocks shared with a fork cannot be copied; nothing has changed.
        """
        if history not in ("keep", "recache", "reset"):
            raise ValueError(f"`history` must be keep, recache or reset, got {history!r}")
        self._check_idle("switch_prompt")
        if history == "reset":
            self.reset(keep_cross_attention=False)
            return []
        if history == "recache":
            self.cache.make_private(self._adapters())
            self.retrieve(())
            for branch in self._branches:
                branch.replay_from(0)
        self._forget_cross_attention()
        logger.debug("switch_prompt: session=%s history=%s", self.session_id, history)
        longest = max(self._branches, key=lambda branch: branch.adapter.completed_chunks)
        resident = longest.adapter.resident if history == "recache" else ()
        return [chunk for run in resident for chunk in run]

    def reset(self, *, keep_cross_attention: bool = True) -> None:
        """Forget the history and start anew under the same id. Frees every block; an open forward
        becomes stale.

        Args:
            keep_cross_attention: keep the prompt's K/V. Else they must be written before they are
                read again: the session's own, and the cache's static ones where no other session
                is open.

        Raises:
            LifecycleError: the session is closed.
        """
        self._check_not_closed()
        with self.cache.lock:
            self._swapped = None
            for branch in self._branches:
                branch.restart()
            if not keep_cross_attention:
                self._forget_cross_attention()
        logger.debug("reset: session=%s", self.session_id)

    def close(self) -> None:
        """Free every block and end the session. An open forward becomes stale; closing twice is a
        no-op.
        """
        with self.cache.lock:
            if self._closed:
                return
            self._closed, self._swapped = True, None
            for branch in self._branches:
                branch.end()
            self._cross_attention.close()
            self.cache.forget_session(self.session_id)
        logger.debug("close: session=%s", self.session_id)

    def fill_cross_attention(
        self,
        name: str,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        branch: int = 0,
    ) -> None:
        """Write the K/V of conditioning tokens, all layers at once, in place.

        Args:
            name: one of the names that the cache was built with.
            keys: for each layer ``(rows, num_kv_heads, head_size)``, the name's own heads and at
                most its ``length`` rows.
            values: as ``keys``.
            branch: guidance side.

        Raises:
            ValueError, TypeError: a layer is missing or does not fit; nothing was written.
            LifecycleError: the session is closed.
        """
        self._branch(branch)
        with self.cache.lock:  # a fork may let go of what it shares
            self._cross_attention.fill(name, branch, keys, values)

    def cross_attention(
        self, name: str, layer: int, *, branch: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, ``(rows, num_kv_heads, head_size)``: views, valid until refilled.

        Raises:
            LifecycleError: not filled since the session or its prompt began, or the session is
                closed.
        """
        self._branch(branch)
        self.cache._check_layer(layer)
        return self._cross_attention.read(name, layer, branch)

    def _adapters(self) -> "list[ARDiffusionRequestAdapter]":
        return [branch.adapter for branch in self._branches]

    def _show(self, wanted: dict[Branch, tuple[int, ...]]) -> None:
        """Have each branch show these chunks beside the visible ones; all of them or none does."""
        fetches = {branch: branch.to_fetch(chunks) for branch, chunks in wanted.items()}
        fetched = self.cache.fetch_chunks(
            [(b.chunk_id(c), b.adapter.archive[c]) for b, (new, _) in fetches.items() for c in new],
            [b.fetched[c] for b, (_, old) in fetches.items() for c in old],
        )
        arrived = iter(fetched)
        for branch, (new, old) in fetches.items():
            for chunk in old:
                del branch.fetched[chunk]
            branch.fetched.update((chunk, next(arrived)) for chunk in new)
            branch.adapter.retrieved = wanted[branch]
            branch.adapter.table_epoch += 1

    def requests(self) -> "list[ARDiffusionRequestAdapter]":
        """Everything that owns blocks: each branch's request, and those of the chunks fetched."""
        return [request for branch in self._branches for request in branch.requests()]

    def _forget_cross_attention(self) -> None:
        self._cross_attention.forget()
        self.cache.forget_cross_kv(self.session_id)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise LifecycleError(f"session {self.session_id!r} is closed")

    def _check_open(self) -> None:
        if self._closed:
            self._check_not_closed()
        if self._swapped is not None:
            raise LifecycleError(
                f"session {self.session_id!r} is swapped out: call swap_in() first"
            )

    def _check_idle(self, call: str) -> None:
        """Refuse a call that would pull the history from under an open forward or a replay."""
        self._check_open()
        for branch in self._branches:
            what = "open forward" if branch.open_forward is not None else "replay"
            if branch.open_forward is not None or branch.replaying is not None:
                raise LifecycleError(
                    f"`{call}` must wait for the {what} on branch {branch.index} of session "
                    f"{self.session_id!r}"
                )

    def _check_agreement(self, branch: Branch, span: range) -> None:
        """A span starts where every branch that ran stands, or stood before it ran this span."""
        for other in self._branches:
            if other is not branch and other.ran and other.next_chunk != span.start:
                if other.next_chunk == branch.after(span):
                    continue
                raise LifecycleError(
                    f"branches must agree: branch {branch.index} of session {self.session_id!r} "
                    f"would run chunks {span.start} to {span.stop - 1}, and branch {other.index} "
                    f"stands at chunk {other.next_chunk}"
                )

    def _branch(self, branch: int) -> Branch:
        self._check_not_closed()
        check_int("branch", branch)
        if not 0 <= branch < len(self._branches):
            raise ValueError(f"`branch` must be from 0 to {len(self._branches) - 1}, got {branch}")
        return self._branches[branch]
