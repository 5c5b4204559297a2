"""The recount: who owns every managed block."""

from typing import TYPE_CHECKING

from chunkattn.errors import ChunkAttnError
from chunkattn.pool import resident_block_ids
from chunkattn.window import ceil_div, count, whole_block_gaps

if TYPE_CHECKING:
    from chunkattn.manager import ARDiffusionRequestAdapter
    from chunkattn.requests import Requests


def check_integrity(requests: "Requests") -> None:
    """See `ARDiffusionKVCache.check_integrity`."""
    owners: dict[int, list[str]] = {}
    for request_id, adapter in requests._adapters.items():
        table = requests.block_table(adapter)
        expected = ceil_div(adapter.allocated_tokens, requests.block_size)
        if len(table) != expected:
            raise ChunkAttnError(
                f"request {request_id!r} has {len(table)} blocks for "
                f"{adapter.allocated_tokens} tokens"
            )
        gap = requests._window_manager.gap(request_id, adapter.num_computed_tokens)
        if requests.null_block_id in table[: gap.start] + table[gap.stop :]:
            raise ChunkAttnError(f"request {request_id!r} sees the null block: {table}")
        for block in resident_block_ids(table, requests.null_block_id):
            owners.setdefault(block, []).append(request_id)
    blocks = requests.manager.block_pool.blocks
    for block in blocks:
        names = owners.get(block.block_id, [])
        if len(set(names)) < len(names) or len(names) > max(1, block.ref_cnt):
            raise ChunkAttnError(
                f"block {block.block_id} is owned by {' and by '.join(map(repr, names))}, and "
                f"its reference count is {block.ref_cnt}"
            )
        if block.block_id != requests.null_block_id and block.ref_cnt != len(names):
            raise ChunkAttnError(
                f"block {block.block_id} has {len(names)} owner(s) and reference count "
                f"{block.ref_cnt}"
            )
    if len(owners) + requests.num_free_blocks + 1 != len(blocks):
        raise ChunkAttnError(
            f"{len(owners)} owned + {requests.num_free_blocks} free + the null block are not the "
            f"pool's {len(blocks)} blocks"
        )
    for adapter in requests._adapters.values():
        _check_resident(requests, adapter)


def _check_resident(requests: "Requests", adapter: "ARDiffusionRequestAdapter") -> None:
    """The resident chunks have blocks, and what has left has none."""
    request_id, window = adapter.request_id, requests._window_manager
    owned = window.num_blocks(request_id) * requests.block_size
    stored = requests.storage(adapter, adapter.resident)
    if owned and stored and stored[-1].stop > owned:  # what was swapped out owns nothing
        raise ChunkAttnError(
            f"request {request_id!r} has blocks for {owned} tokens, which end before its resident "
            f"chunks {adapter.resident}"
        )
    gaps = whole_block_gaps(
        adapter.resident,
        adapter.num_prompt_tokens,
        adapter.absolute_num_computed_tokens,
        chunk_size=requests.spec.chunk_size,
        block_size=requests.block_size,
    )
    if not window.evicts and count(gaps) != window.compacted_tokens(request_id):
        raise ChunkAttnError(
            f"request {request_id!r} must own the blocks of its resident chunks {adapter.resident} "
            f"and no others, and has let go of {window.compacted_tokens(request_id)} tokens"
        )
