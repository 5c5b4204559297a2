"""The tensors of a plan: allocated once, rewritten in place for every forward, shared by all
layers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from chunkattn.errors import ChunkAttnError
from chunkattn.window import ceil_div

_ALIGN = 4  # int32 elements of 16 bytes, so that each part starts as aligned as an allocation


class Extent(NamedTuple):
    """Storage positions ``[start, stop)`` of a block table."""

    table: list[int]
    start: int
    stop: int
    block_size: int

    def blocks(self) -> list[int]:
        """Blocks that hold these positions, in order."""
        stop = ceil_div(self.stop, self.block_size) if self.stop > self.start else 0
        return self.table[self.start // self.block_size : stop]

    def entries(self, part: int) -> list[int]:
        """These positions as parts of ``part`` tokens, numbered through the pool.

        Raises:
            ChunkAttnError: the table ends before them: the books are wrong, see `check_integrity`.
        """
        if self.stop > len(self.table) * self.block_size:
            raise ChunkAttnError(
                f"a plan must lie in owned blocks, got positions {self.start} to {self.stop - 1} "
                f"of a table of {len(self.table)} blocks of {self.block_size}"
            )
        if part == self.block_size:
            return self.blocks()
        table, size = self.table, self.block_size
        return [
            (table[position // size] * size + position % size) // part
            for position in range(self.start, self.stop, part)
        ]


class Plan:
    """What `forward.ForwardContext` says of a forward; see its attributes. The lists of blocks are
    made when they are asked for.
    """

    def __init__(
        self,
        buffers: "PlanBuffers",
        slot_mapping: torch.Tensor,
        kv_len: int,
        past: Sequence[Extent],
        span: Extent | None,
        action: Extent | None,
    ) -> None:
        self.block_table = buffers.block_table
        self.seq_lens = buffers.seq_lens
        self.query_start_loc = buffers.query_start_loc
        self.current_start_loc = buffers.current_start_loc
        self.slot_mapping = slot_mapping
        self.kv_len = kv_len
        self._past, self._span, self._action = past, span, action

    @cached_property
    def history_block_ids(self) -> list[int]:
        return list(dict.fromkeys(block for extent in self._past for block in extent.blocks()))

    @cached_property
    def span_block_ids(self) -> list[int]:
        return self._span.blocks() if self._span else []

    @cached_property
    def action_block_ids(self) -> list[int]:
        return self._action.blocks() if self._action else []


class PlanBuffers:
    """One branch's plan, packed into a single int32 buffer so that it reaches the device in one
    copy.

    Args:
        max_blocks: entries of the block table.
        max_rows: rows that a forward writes.
        slots_of_entry: ``(num_entries, part)`` int32, the slots of every block table entry, each of
            ``part`` tokens; slot mappings are copied from it.
        device: where the kernels read the plan.

    Attributes:
        block_table: ``(1, max_blocks)`` int32 on the device, padded with 0.
        seq_lens: ``(1,)`` int32.
        query_start_loc: ``(2,)`` int32.
        current_start_loc: ``(2,)`` int32.
    """

    def __init__(
        self, max_blocks: int, max_rows: int, slots_of_entry: np.ndarray, device: torch.device
    ) -> None:
        part = slots_of_entry.shape[1]
        table_start = 3 * _ALIGN
        slots_start = table_start + ceil_div(max_blocks, _ALIGN) * _ALIGN
        size = slots_start + (max_rows // part + 1) * part  # slots are written in whole parts
        self._part = part
        self._slots_of_entry = slots_of_entry
        self._padding = [0] * max_blocks
        self._slots_start = slots_start
        self._slots: dict[int, torch.Tensor] = {}
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        # A GPU reads a staging buffer some time after the copy was asked for: two take turns, each
        # with the event that says when it may be written again.
        self._on_gpu = device.type != "cpu"
        self._staging = [self._buffer]
        if self._on_gpu:
            self._staging = [
                torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in range(2)]
        # Of each: all of it, its block table, and its slots by part.
        table = slice(table_start, table_start + max_blocks)
        self._host = [
            (host, host[table], host[slots_start:].reshape(-1, part))
            for host in (staging.numpy() for staging in self._staging)
        ]
        self._turn = 0
        self.block_table = self._buffer[table].unsqueeze(0)
        self.seq_lens = self._buffer[2 * _ALIGN : 2 * _ALIGN + 1]
        self.query_start_loc = self._buffer[0:2]
        self.current_start_loc = self._buffer[_ALIGN : _ALIGN + 2]

    def write(
        self,
        past: Sequence[Extent],
        span: Extent | None,
        action: Extent | None,
        *,
        span_len: int,
        action_len: int,
    ) -> Plan:
        """Rewrite the plan. The tensors handed out keep their addresses and shapes.

        Args:
            past: storage of the visible history. Starts and stops are multiples of ``part``.
            span: storage of the span in flight, as ``past``; None where its rows are attended
                where they lie.
            action: storage of the action rows, behind which nothing follows; None as for ``span``.
            span_len: rows of the span.
            action_len: action rows.
        """
        if self._on_gpu:
            self._turn ^= 1
            self._copied[self._turn].synchronize()
        (host, table, slots), part = self._host[self._turn], self._part
        entries: list[int] = []
        paged = 0
        for extent in past:
            entries += extent.entries(part)
            paged += extent.stop - extent.start
        first_written = len(entries)
        num_written = 0
        for extent in filter(None, (span, action)):
            entries += extent.entries(part)
            num_written += extent.stop - extent.start
        num_entries = len(entries)
        table[:] = entries + self._padding[num_entries:]
        if num_written:
            written = table[first_written:num_entries]
            # The span is a whole number of parts, so the action rows' slots follow its own.
            self._slots_of_entry.take(written, 0, slots[: len(written)], "clip")
        host[1] = span_len + action_len
        # Of the rows that are not written, the first kind: the other needs no bounds.
        host[_ALIGN + 1] = span_len if span is None else action_len if action is None else 0
        host[2 * _ALIGN] = paged + num_written
        if self._on_gpu:
            self._buffer.copy_(self._staging[self._turn], non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._buffer.device))
        slot_mapping = self._slots.get(num_written)
        if slot_mapping is None:
            slot_mapping = self._buffer[self._slots_start : self._slots_start + num_written]
            self._slots[num_written] = slot_mapping
        return Plan(self, slot_mapping, paged + span_len + action_len, past, span, action)
