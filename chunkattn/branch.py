"""One guidance side of a session: where it stands, and what its forwards share."""

from typing import TYPE_CHECKING

from chunkattn.plan import Extent, Plan, PlanBuffers
from chunkattn.window import Runs, ceil_div

if TYPE_CHECKING:
    from chunkattn.cache import ARDiffusionKVCache
    from chunkattn.forward import ForwardContext
    from chunkattn.manager import ARDiffusionRequestAdapter


class Branch:
    """One guidance side of a session: its request, its plan buffers, and its open forward.

    Attributes:
        adapter: the request; a reset begins another one.
        open_forward: the forward whose ``with`` block is entered, if any.
        ran: a forward was opened since the history began: the branches that ran must agree.
        replaying: the next resident chunk to be replayed after a prompt switch; None where none is.
    """

    def __init__(
        self,
        cache: "ARDiffusionKVCache",
        index: int,
        request_id: str,
        source: "Branch | None" = None,
        adapter: "ARDiffusionRequestAdapter | None" = None,
    ) -> None:
        self.cache = cache
        self.index = index
        self.request_id = request_id if adapter is None else adapter.request_id
        self.ran: bool = source is not None and source.ran
        self.replaying: int | None = None
        self.open_forward: ForwardContext | None = None
        self.fetched: dict[int, ARDiffusionRequestAdapter] = {}
        self.plans: tuple[Plan, ...] = ()
        self.plan_key: tuple[object, ...] = ()
        # Of the span planned last: what it sees, as chunks and as storage.
        self.seen: list[Runs] = []
        self.past: list[list[Extent]] = []
        self.past_key: tuple[object, ...] = ()
        self.scratch = cache.scratch_block_ids(bool(index), 0, cache.scratch_blocks_per_branch)
        scratch_tokens = cache.scratch_blocks_per_branch * cache.block_size
        chunk_size, part = cache.spec.chunk_size, cache.table_block_size
        self.buffers = [
            PlanBuffers(
                max_blocks=view.most_visible(cache.window_chunks) * chunk_size // part
                + cache.policy.retrieved_chunks * chunk_size // part
                + ceil_div(scratch_tokens, part),
                max_rows=cache.window_chunks * chunk_size + scratch_tokens,
                slots_of_entry=cache.slots_of_entry,
                device=cache.device,
            )
            for view in cache.views
        ]
        # The request is last: nothing above leaves one behind.
        if adapter is not None:
            self.adapter = adapter
        elif source is None:
            self.adapter = cache.begin_request(request_id)
        else:
            self.adapter = cache.fork_request(source.adapter, request_id)
            try:
                for chunk, fetched in source.fetched.items():
                    self.fetched[chunk] = cache.fork_request(fetched, self.chunk_id(chunk))
            except BaseException:
                self.end()
                raise

    @property
    def next_chunk(self) -> int:
        """First chunk of the next span."""
        return self.adapter.completed_chunks if self.replaying is None else self.replaying

    def after(self, span: range) -> int:
        """First chunk of the span that follows ``span``."""
        if self.replaying is None:
            return span.start + self.cache.policy.committed(len(span))
        later = (run for run in self.adapter.resident if run.stop > span.stop)
        return next((max(run.start, span.stop) for run in later), self.adapter.completed_chunks)

    def replay_from(self, chunk: int) -> None:
        """Have the resident chunks from ``chunk`` on replayed; behind the last one, go on."""
        self.replaying = chunk
        self.replaying = self.after(range(chunk, chunk))
        if self.replaying == self.adapter.completed_chunks:
            self.replaying = None

    def restart(self) -> None:
        """Begin an empty history."""
        self.end()
        self.adapter = self.cache.begin_request(self.request_id)
        self.ran = False

    def end(self) -> None:
        """Free every block; an open forward becomes stale."""
        self.open_forward = self.replaying = None
        for request in self.requests():
            self.cache.end_request(request)
        self.fetched.clear()

    def requests(self) -> "list[ARDiffusionRequestAdapter]":
        """The branch's own request, and those of the chunks fetched from host memory."""
        return [self.adapter, *self.fetched.values()]

    def chunk_id(self, chunk: int) -> str:
        """Request id of a fetched chunk."""
        return f"{self.request_id}::chunk{chunk}"

    def to_fetch(self, chunks: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """What to bring from host memory, and what to give back, so that these can be shown.

        Raises:
            ValueError: a chunk is neither resident nor shown nor in host memory.
        """
        adapter, most = self.adapter, self.cache.policy.archive_chunks
        away = [c for c in chunks if not any(c in run for run in adapter.resident)]
        for chunk in away:
            if chunk not in adapter.archive and chunk not in self.fetched:
                kept = "" if most is None else f", resident or of the last {most} that left"
                raise ValueError(
                    f"`chunks` must name committed chunks, from 0 to "
                    f"{adapter.completed_chunks - 1}{kept}, got {chunk}"
                )
        return [c for c in away if c not in self.fetched], [
            c for c in self.fetched if c not in away
        ]
