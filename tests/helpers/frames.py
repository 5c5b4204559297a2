"""Rollouts of random frames, to be compared bit for bit with a fresh rollout of the same frames."""

from collections.abc import Iterable, Sequence

import torch

from chunkattn import ARDiffusionKVCache, Session


def rows(session: Session, frame: int, layer: int = 0, tokens: int | None = None) -> torch.Tensor:
    """Q, K and V of a frame, ``(3, tokens, heads, head_size)``; the same for the same number."""
    cache = session.cache
    tokens = cache.spec.chunk_size if tokens is None else tokens
    generator = torch.Generator().manual_seed(1000 * frame + layer)
    shape = (3, tokens, cache.num_kv_heads, cache.head_size)
    return torch.randn(shape, generator=generator).to(cache.device)


def forward(
    session: Session,
    frames: Sequence[int],
    *,
    branch: int = 0,
    commit: bool = True,
    action: int = 0,
) -> list[torch.Tensor]:
    """One forward whose span is these frames; the output of each layer."""
    cache, outs = session.cache, []
    length = len(frames) * cache.spec.chunk_size
    with session.forward(branch=branch, seq_len=length, commit=commit, action_len=action) as fwd:
        for layer in range(cache.num_layers):
            q, k, v = torch.cat([rows(session, frame, layer) for frame in frames], 1)
            extra = rows(session, frames[0] + 500, layer, action)
            if action:
                outs.append(fwd.write_attend(layer, torch.cat([q, extra[0]]), k, v, *extra[1:]))
            else:
                outs.append(fwd.write_attend(layer, q, k, v))
    return outs


def play(session: Session, frames: Iterable[int], *, span: int = 1, branches: int = 1) -> None:
    """Commit these frames, ``span`` at a time, on every branch."""
    frames = list(frames)
    for first in range(0, len(frames), span):
        for branch in range(branches):
            forward(session, frames[first : first + span], branch=branch)


def assert_as_fresh(
    session: Session,
    frames: Sequence[int],
    fresh: ARDiffusionKVCache,
    *,
    span: int = 1,
    branches: int = 1,
    more: int = 6,
) -> None:
    """From here on ``session`` says, bit for bit, what a session of ``fresh`` says that has played
    ``frames`` and nothing else."""
    other = fresh.open_session("fresh")
    play(other, frames, span=span, branches=branches)
    for step in range(more):
        new = [100 + step * span + i for i in range(span)]
        for commit in (False, True):
            for branch in range(branches):
                mine, theirs = (
                    forward(one, new, branch=branch, commit=commit, action=0 if commit else 2)
                    for one in (session, other)
                )
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.equal(a, b)
        session.cache.check_integrity()
    other.close()
