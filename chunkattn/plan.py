"""The tensors of a plan: allocated once, rewritten in place for every forward, shared by all
layers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chunkattn.window import ceil_div

IntArray = npt.NDArray[np.int32]
_ALIGN = 4  # int32 elements of 16 bytes, so that each part starts as aligned as an allocation


class Extent(NamedTuple):
    """Storage positions ``[start, stop)`` of a block table."""

    table: IntArray
    start: int
    stop: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def blocks(self) -> list[int]:
        """Blocks that hold these positions, in order."""
        found: list[int] = self._blocks().tolist()
        return found

    def entries(self, part: int) -> IntArray:
        """These positions as parts of ``part`` tokens, numbered through the pool."""
        if part == self.block_size:
            return self._blocks()
        positions = np.arange(self.start, self.stop, part, dtype=np.int32)
        block = self.table[positions // self.block_size]
        return block * (self.block_size // part) + positions % self.block_size // part

    def _blocks(self) -> IntArray:
        stop = ceil_div(self.stop, self.block_size) if self.stop > self.start else 0
        return self.table[self.start // self.block_size : stop]


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
        part: tokens of one entry of the block table.
        device: where the kernels read the plan.

    Attributes:
        block_table: ``(1, max_blocks)`` int32 on the device, padded with 0.
        seq_lens: ``(1,)`` int32.
        query_start_loc: ``(2,)`` int32.
        current_start_loc: ``(2,)`` int32.
    """

    def __init__(self, max_blocks: int, max_rows: int, part: int, device: torch.device) -> None:
        table_start = 3 * _ALIGN
        slots_start = table_start + ceil_div(max_blocks, _ALIGN) * _ALIGN
        size = slots_start + max_rows + part  # slots are written in whole parts
        self._part = part
        self._offsets = np.arange(part, dtype=np.int32)
        self._table = slice(table_start, table_start + max_blocks)
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
        self._host = [staging.numpy() for staging in self._staging]
        self._turn = 0
        self.block_table = self._buffer[self._table].unsqueeze(0)
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
        host, part = self._host[self._turn], self._part
        stop = first_slot = self._slots_start
        table, paged = self._table.start, 0
        for extent in past:
            entries = extent.entries(part)
            host[table : table + len(entries)] = entries
            table += len(entries)
            paged += extent.stop - extent.start
        for written in (span, action):
            if written is not None:
                entries = written.entries(part)
                num_entries, num_tokens = len(entries), written.stop - written.start
                host[table : table + num_entries] = entries
                table += num_entries
                paged += num_tokens
                slots = host[stop : stop + num_entries * part].reshape(num_entries, part)
                np.add((entries * part)[:, None], self._offsets, out=slots)
                stop += num_tokens
        host[table : self._table.stop] = 0
        num_written = stop - first_slot
        host[1] = span_len + action_len
        # Of the rows that are not written, the first kind: the other needs no bounds.
        host[_ALIGN + 1] = span_len if span is None else action_len if action is None else 0
        host[2 * _ALIGN] = paged
        if self._on_gpu:
            self._buffer.copy_(self._staging[self._turn], non_blocking=True)
            self._copied[self._turn].record()
        if num_written not in self._slots:
            self._slots[num_written] = self._buffer[first_slot:stop]
        kv_len = paged + span_len + action_len - num_written
        return Plan(self, self._slots[num_written], kv_len, past, span, action)
