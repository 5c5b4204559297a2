"""Processes that share one model agree: on how many blocks there are, and on what each plan says.

Tensor parallel ranks hold different heads of the same tokens, so their books must be the same.
"""

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from chunkattn.errors import ChunkAttnError

if TYPE_CHECKING:
    from chunkattn.forward import ForwardContext


def agreed_available_bytes(available_bytes: int, group: "dist.ProcessGroup | None" = None) -> int:
    """The smallest free memory of a group, from which every rank sizes the same pools.

    Args:
        available_bytes: of this rank, as `ARDiffusionKVCache` takes it.
        group: ranks that share a model; None is the default group. Every rank must call.

    Raises:
        ValueError: negative.
    """
    if available_bytes < 0:
        raise ValueError(f"`available_bytes` must not be negative, got {available_bytes}")
    least = torch.tensor(available_bytes, dtype=torch.int64, device=_device(group))
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return int(least)


def check_same_plan(fwd: "ForwardContext", group: "dist.ProcessGroup | None" = None) -> None:
    """Compare an open forward's plan over a group, for debugging: it waits for every rank.

    Args:
        fwd: the forward; every rank must call with its own.
        group: as for `agreed_available_bytes`.

    Raises:
        ChunkAttnError: the ranks have planned different blocks, on every rank; names those that
            differ from the first.
    """
    digests = _gathered(plan_digest(fwd), group)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ChunkAttnError(
            f"ranks must plan the same blocks, got another plan than rank 0's on ranks {others} "
            f"(session {fwd.session.session_id!r}, branch {fwd.branch}, chunk {fwd.first_chunk})"
        )


def open_alike(fwd: "ForwardContext", group: "dist.ProcessGroup") -> None:
    """Open a forward whose plan must be that of every rank: where it is not, none stays open.

    Raises:
        ChunkAttnError: as `check_same_plan`, also where another rank could not plan.
        Exception: what refused this rank's own plan.
        RuntimeError: a rank did not come within the group's time limit.
    """
    try:
        fwd.open()
    except Exception:  # whatever it is goes on; but the others learn that this rank has no plan
        _gathered(b"", group)
        raise
    try:
        check_same_plan(fwd, group)
    except BaseException:
        fwd.abort()
        raise


def _gathered(digest: bytes, group: "dist.ProcessGroup | None") -> list[bytes]:
    digests = [b""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group)
    return digests


def plan_digest(fwd: "ForwardContext") -> bytes:
    """What a plan says, in 16 bytes: position, lengths, and every block in order."""
    what = (
        *(fwd.session.session_id, fwd.branch, fwd.commit, fwd.first_chunk),
        *(fwd.seq_len, fwd.action_len, fwd.kv_len),
        *(fwd.history_block_ids, fwd.span_block_ids, fwd.action_block_ids),
    )
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def _device(group: "dist.ProcessGroup | None") -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
