"""One forward of a branch: plan, layers, end. `chunkattn.session` has the table of states."""

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from chunkattn.agreement import open_alike
from chunkattn.branch import Branch
from chunkattn.checks import (
    POOL_DTYPES,
    check_device,
    check_shape,
    check_softmax_scale,
    check_tensor,
    check_writable,
)
from chunkattn.errors import LifecycleError, StaleContextError
from chunkattn.ops import write_attend
from chunkattn.plan import Extent, Plan
from chunkattn.window import Runs, common, runs, union

if TYPE_CHECKING:
    from chunkattn.session import Session


class ForwardContext:
    """One forward of one branch, planned when its ``with`` block is entered. Made by
    `Session.forward`.

    Attributes (valid inside the block; the tensors are reused by the branch's next forward):
        block_table: ``(1, max_blocks)`` int32, blocks of ``table_block_size`` tokens, padded with
            0.
        seq_lens: ``(1,)`` int32: the keys that lie in blocks. Equal to ``kv_len`` where the cache
            has scratch; without, the action rows and a denoise span are attended where they lie.
        query_start_loc: ``(2,)`` int32.
        slot_mapping: int32, one for each row that is written: the span's slots, then the action
            rows'. ``(seq_len + action_len,)`` with scratch; without, ``(seq_len,)`` in a commit
            forward and ``(0,)`` in a denoise forward.
        kv_len: keys that every query row sees: history, span and action rows.
        history_block_ids: the cache's blocks that hold visible history, in order.
        span_block_ids, action_block_ids: blocks that hold the span, and the action rows.
        table_block_size: tokens of one entry of ``block_table``: the cache's block size where
            chunks are whole blocks, else the largest part of a block that no edge cuts.
        first_chunk, num_chunks: the span on the model's time line.
    """

    def __init__(
        self, session: "Session", branch: Branch, seq_len: int, commit: bool, action_len: int
    ) -> None:
        self.session = session
        self.branch = branch.index
        self.seq_len = seq_len
        self.action_len = action_len
        self.commit = commit
        self.num_chunks = seq_len // session.cache.spec.chunk_size
        self._side = branch
        self._num_layers = session.cache.num_layers
        self._view_of_layer = session.cache.view_of_layer
        self._plans: tuple[Plan, ...] = ()
        self._written: set[int] = set()
        self._borrows = False

    # -- what was planned ------------------------------------------------------------------------
    @property
    def _first_plan(self) -> Plan:
        if not self._plans:
            self._check_usable()
        return self._plans[0]

    @property
    def block_table(self) -> torch.Tensor:
        return self._first_plan.block_table

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._first_plan.seq_lens

    @property
    def query_start_loc(self) -> torch.Tensor:
        return self._first_plan.query_start_loc

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self._first_plan.slot_mapping

    @property
    def kv_len(self) -> int:
        return self._first_plan.kv_len

    @property
    def history_block_ids(self) -> list[int]:
        return self._first_plan.history_block_ids

    @property
    def span_block_ids(self) -> list[int]:
        return self._first_plan.span_block_ids

    @property
    def action_block_ids(self) -> list[int]:
        return self._first_plan.action_block_ids

    @property
    def table_block_size(self) -> int:
        return self.session.cache.table_block_size

    # -- life ----------------------------------------------------------------------------------
    def __enter__(self) -> "ForwardContext":
        group = self.session.cache.debug_group
        if group is None:
            self.open()
        else:
            open_alike(self, group)
        return self

    def open(self) -> None:
        """Allocate and plan.

        Raises:
            LifecycleError: the session is closed, a forward is open on the branch, or the span must
                see chunks that have left.
            PoolExhaustedError: too few free blocks; nothing was allocated.
        """
        session, side = self.session, self._side
        with session.cache.lock:  # nobody evicts the session as idle while it plans
            session._check_open()
            if side.open_forward is not None:
                raise LifecycleError(
                    f"branch {self.branch} of session {session.session_id!r} must have no open "
                    "forward, got a second"
                )
            self.first_chunk = first = side.next_chunk
            if len(session._branches) > 1:
                session._check_agreement(side, range(first, first + self.num_chunks))
            session.cache.follow(side.requests())
            try:
                self._plans = self._plan()
            except BaseException:
                side.plan_key = ()  # the buffers may hold half of another plan
                if self._borrows:
                    session.cache.release_uncommitted(side.adapter)
                raise
            self._written.clear()
            side.open_forward = self
            side.ran = True
            session.last_used = next(session.cache.uses)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.session.cache.lock:  # nor before it has committed
            if self._side.open_forward is not self:
                return  # reset or close has taken the branch back
            self._side.open_forward = None
            cache, adapter = self.session.cache, self._side.adapter
            if self.commit and kind is None and len(self._written) == self._num_layers:
                if self._side.replaying is None:
                    try:
                        cache.commit_chunks(adapter, self.num_chunks)
                    except BaseException:
                        cache.release_uncommitted(adapter)
                        raise
                else:
                    self._side.replay_from(self.first_chunk + self.num_chunks)
                return
            if self._borrows:
                cache.release_uncommitted(adapter)
        if self.commit and kind is None:
            missing = self.missing_layers
            raise LifecycleError(f"a commit must write every layer, got none for layers {missing}")

    def abort(self) -> None:
        """End the forward as an exception does, for hosts without ``with``."""
        self.__exit__(LifecycleError, None, None)

    @property
    def missing_layers(self) -> list[int]:
        """Layers that have not been written."""
        return sorted(set(range(self.session.cache.num_layers)) - self._written)

    def _check_usable(self) -> None:
        if self._side.open_forward is not self:
            raise StaleContextError(
                f"this forward on branch {self.branch} of session {self.session.session_id!r} is "
                "not open: it has not begun or has ended, or its session was reset or closed"
            )

    def _plan(self) -> tuple[Plan, ...]:
        """Allocate what the forward needs and write its plan, or find the plan written already.

        The denoise forwards of a span differ in nothing, so they share one plan.
        """
        cache, side, adapter = self.session.cache, self._side, self._side.adapter
        # A denoise span lies in scratch, where there is one. One longer than the declared span
        # borrows managed blocks.
        has_scratch, block_size = cache.scratch_blocks_per_branch > 0, cache.block_size
        scratch_tokens = cache.scratch_blocks_per_branch * block_size
        self._borrows = self.commit or (
            has_scratch and self.seq_len + self.action_len > scratch_tokens
        )
        past_key = (
            adapter,
            adapter.table_epoch,
            adapter.completed_chunks,
            self.first_chunk,
            self.seq_len,
        )
        key = (past_key, self.action_len)
        if not self._borrows and side.plan_key == key:
            return side.plans
        span_chunks = range(self.first_chunk, self.first_chunk + self.num_chunks)
        if side.past_key != past_key:
            side.seen = self._seen(span_chunks)
        if self._borrows and side.replaying is None:
            block_ids = cache.allocate_token_slots(adapter, self.seq_len)
        else:
            block_ids = cache.block_table(adapter)

        def extents(chunks: Runs) -> list[Extent]:
            where = cache.storage(adapter, chunks)
            return [Extent(block_ids, w.start, w.stop, block_size) for w in where]

        # Allocating may have copied a shared block that is partly filled.
        if side.past_key != past_key or adapter.table_epoch != past_key[1]:
            fetched = [
                Extent(cache.block_table(request), 0, cache.spec.chunk_size, block_size)
                for _, request in sorted(side.fetched.items())
            ]
            side.past = [[*extents(visible), *fetched] for visible in side.seen]
            side.past_key = (adapter, adapter.table_epoch, *past_key[2:])
        span = action = None
        if self._borrows:
            (span,) = extents((span_chunks,))
        elif has_scratch:
            span = Extent(side.scratch, 0, self.seq_len, block_size)
        if has_scratch:
            start = 0 if self._borrows else self.seq_len
            action = Extent(side.scratch, start, start + self.action_len, block_size)
        side.plans = tuple(
            [
                buffers.write(past, span, action, span_len=self.seq_len, action_len=self.action_len)
                for past, buffers in zip(side.past, side.buffers, strict=True)
            ]
        )
        side.plan_key = () if self._borrows else key
        return side.plans

    def _seen(self, span: range) -> list[Runs]:
        """History that the span sees, for each view of the policy."""
        cache, side, adapter = self.session.cache, self._side, self._side.adapter
        resident = adapter.resident
        if side.replaying is not None:
            self._check_replay(span)
            resident = common(resident, (range(self.first_chunk),))
        seen = [view.visible(resident, span) for view in cache.views]
        if side.replaying is not None:
            seen = [common(visible, resident) for visible in seen]
        elif adapter.retrieved:
            shown = runs(adapter.retrieved)
            seen = [common(union(visible, shown), resident) for visible in seen]
        for visible in seen:
            cache.check_resident(adapter, visible)
        return seen

    def _check_replay(self, span: range) -> None:
        if not self.commit:
            raise LifecycleError(
                f"`commit` must be True while session {self.session.session_id!r} replays its "
                "resident chunks after switch_prompt, got False"
            )
        if not any(
            span.start >= run.start and span.stop <= run.stop for run in self._side.adapter.resident
        ):
            raise LifecycleError(
                f"a replayed span must lie in resident chunks {self._side.adapter.resident}, got "
                f"chunks {span.start} to {span.stop - 1}"
            )

    # -- use -----------------------------------------------------------------------------------
    def write_attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_action: torch.Tensor | None = None,
        value_action: torch.Tensor | None = None,
        *,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write one layer's K/V of the rows that have a slot, then attend over all visible keys.

        Without scratch a denoise forward writes nothing, and a commit forward the span.

        torch.compile traces it into one op without a graph break, unless sessions share scratch
        (``session_capacity`` above 1): a lock orders them. Where each block is a graph of its own,
        a layer's number would compile once a layer: hand `layer_plan` and
        ``cache.table_pools[layer]`` to `ops.write_attend` there, and call `mark_layer_written`.

        Args:
            layer: the layer, from 0.
            query: ``(seq_len + action_len, num_heads, head_size)``.
            key: ``(seq_len, num_kv_heads, head_size)``.
            value: as ``key``.
            key_action: ``(action_len, num_kv_heads, head_size)``; None when ``action_len`` is 0.
            value_action: as ``key_action``.
            softmax_scale: None is ``head_size ** -0.5``.
            out: ``query``'s shape and dtype, written in place; None allocates it.

        Returns:
            ``out``.

        Raises:
            StaleContextError: the forward has ended, or its session was reset or closed.
            ValueError, TypeError: an argument does not fit the plan; nothing was written.
        """
        side, cache = self._side, self.session.cache
        if side.open_forward is not self:
            self._check_usable()
        self._check_rows(layer, query, key, value, key_action, value_action, softmax_scale, out)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        key_pool, value_pool = cache.table_pools[layer]
        plan = self._plans[self._view_of_layer[layer]]
        arguments = (
            query,
            key,
            value,
            key_action,
            value_action,
            key_pool,
            value_pool,
            plan.slot_mapping,
            plan.block_table,
            plan.seq_lens,
            plan.query_start_loc,
            out,
            cache.head_size**-0.5 if softmax_scale is None else softmax_scale,
            cache.backend,
            *cache.table_scales[layer],
            plan.current_start_loc,
        )
        if cache.scratch_turns:
            turn = cache.scratch_turns[self.branch]
            with turn.lock:
                turn.take(side.adapter.stream)
                write_attend(*arguments)
        else:
            write_attend(*arguments)
        self._written.add(layer)
        return out

    def layer_plan(self, layer: int) -> Plan:
        """The plan of a layer: the forward's own attributes are those of the first view's layers,
        and a policy with per-layer windows has others.
        """
        if (
            self._side.open_forward is not self
            or type(layer) is not int
            or not 0 <= layer < self._num_layers
        ):
            self._refuse(layer)
        return self._plans[self._view_of_layer[layer]]

    def mark_layer_written(self, layer: int) -> None:
        """Say that another op than ours wrote a layer's K and V to ``slot_mapping``."""
        if (
            self._side.open_forward is not self
            or type(layer) is not int
            or not 0 <= layer < self._num_layers
        ):
            self._refuse(layer)
        self._written.add(layer)

    def _refuse(self, layer: int) -> None:
        self._check_usable()
        self.session.cache._check_layer(layer)

    def _check_rows(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_action: torch.Tensor | None,
        value_action: torch.Tensor | None,
        softmax_scale: float | None,
        out: torch.Tensor | None,
    ) -> None:
        """What only the call can know: that the tensors have the planned rows and fit the pool."""
        cache = self.session.cache
        if type(layer) is not int or not 0 <= layer < self._num_layers:
            cache._check_layer(layer)
        if not cache.table_pools:
            raise LifecycleError("the cache was built without tensors (device=None)")
        heads, size, device = cache.num_kv_heads, cache.head_size, cache.pool_device
        for name, tensor, rows in (
            ("key", key, self.seq_len),
            ("value", value, self.seq_len),
            ("key_action", key_action, self.action_len),
            ("value_action", value_action, self.action_len),
        ):
            if tensor is not None:
                _check_fit(name, tensor, (rows, heads, size), POOL_DTYPES, device)
            elif rows:
                raise ValueError(f"`{name}` must have {rows} rows, got None")
        num_heads = heads
        if isinstance(query, torch.Tensor) and query.dim() == 3:
            num_heads = query.shape[1]
        if num_heads == 0 or num_heads % heads:
            raise ValueError(f"`query` must have a multiple of {heads} heads, got {num_heads}")
        shape = (self.seq_len + self.action_len, num_heads, size)
        _check_fit("query", query, shape, cache.query_dtypes, device)
        if out is not None:
            _check_fit("out", out, shape, (query.dtype,), device)
            if not out.is_contiguous():
                check_writable(out=out)
        if softmax_scale is not None:
            check_softmax_scale(softmax_scale)


def _check_fit(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor by name. One condition where it fits: this runs for every layer."""
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and (tensor.is_contiguous() or tensor.stride(-1) == 1)
        and tensor.device == device
    ):
        return
    check_tensor(name, tensor, (3,), dtypes)
    check_shape(name, tensor, shape, "the plan's rows, the pool's heads and head size")
    check_device(device, **{name: tensor})
