"""The tensors of a plan: allocated once, rewritten in place for every forward, shared by all
layers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chunkattn.window import ceil_div

IntArray = npt.NDArray[np.int64]
_ALIGN = 4  # int32 elements of 16 bytes, so that each part starts as aligned as an allocation


class Extent:
    """Storage positions ``[start, stop)`` of a block table."""

    def __init__(self, table: IntArray, start: int, stop: int, block_size: int) -> None:
        self._table, self._start, self._stop, self._block_size = table, start, stop, block_size

    def __len__(self) -> int:
        return self._stop - self._start

    def blocks(self) -> list[int]:
        """Blocks that hold these positions, in order."""
        if self._start == self._stop:
            return []
        first, last = self._start // self._block_size, (self._stop - 1) // self._block_size
        return [int(block) for block in self._table[first : last + 1]]

    def entries(self, part: int) -> IntArray:
        """These positions as parts of ``part`` tokens, numbered through the pool."""
        positions = np.arange(self._start, self._stop, part)
        block = self._table[positions // self._block_size]
        return block * (self._block_size // part) + positions % self._block_size // part

    def slots(self) -> IntArray:
        """The slot of each position."""
        positions = np.arange(self._start, self._stop)
        block = self._table[positions // self._block_size]
        return block * self._block_size + positions % self._block_size


class Plan(NamedTuple):
    """What `session.ForwardContext` says of a forward; see its attributes."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    kv_len: int
    history_block_ids: list[int]
    span_block_ids: list[int]
    action_block_ids: list[int]


class PlanBuffers:
    """One branch's plan, packed into a single int32 buffer so that it reaches the device in one
    copy.

    Attributes:
        block_table: ``(1, max_blocks)`` int32 on the device, padded with 0.
        seq_lens: ``(1,)`` int32.
        query_start_loc: ``(2,)`` int32.
    """

    def __init__(self, max_blocks: int, max_rows: int, device: torch.device) -> None:
        table_start = 2 * _ALIGN
        slots_start = table_start + ceil_div(max_blocks, _ALIGN) * _ALIGN
        size = slots_start + max_rows
        self._table = slice(table_start, table_start + max_blocks)
        self._slots_start = slots_start
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
        self.seq_lens = self._buffer[_ALIGN : _ALIGN + 1]
        self.query_start_loc = self._buffer[0:2]

    def write(self, past: list[Extent], span: Extent, action: Extent, part: int) -> Plan:
        """Rewrite the plan. The tensors handed out keep their addresses and shapes.

        Args:
            past: storage of the visible history.
            span: storage of the span in flight.
            action: storage of the action rows, behind which nothing follows.
            part: tokens of one entry of ``block_table``; divides every start and stop but the
                action's.
        """
        extents = [extent for extent in (*past, span, action) if len(extent)]
        entries = np.concatenate([extent.entries(part) for extent in extents])
        kv_len = sum(len(extent) for extent in extents)
        num_rows = len(span) + len(action)

        if self._on_gpu:
            self._turn ^= 1
            self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        host[1] = num_rows
        host[_ALIGN] = kv_len
        table = host[self._table]
        table[: len(entries)] = entries
        table[len(entries) :] = 0
        slots = host[self._slots_start :]
        slots[: len(span)] = span.slots()
        slots[len(span) : num_rows] = action.slots()
        if self._on_gpu:
            self._buffer.copy_(self._staging[self._turn], non_blocking=True)
            self._copied[self._turn].record()
        return Plan(
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self._buffer[self._slots_start : self._slots_start + num_rows],
            kv_len,
            list(dict.fromkeys(block for extent in past for block in extent.blocks())),
            span.blocks(),
            action.blocks(),
        )
