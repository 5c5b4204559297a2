"""A rollout of a window on the real manager, without a model: what ``chunkattn plan`` shows.

Nothing is computed and no pool is allocated; the cache keeps its books as it does under a model.
"""

from dataclasses import replace

import torch

from chunkattn.cache import ARDiffusionKVCache
from chunkattn.config import ARDiffusionKVConfig
from chunkattn.forward import ForwardContext
from chunkattn.policy import Policy
from chunkattn.presets import ModelPreset
from chunkattn.session import Session
from chunkattn.timeline import ForwardRecord
from chunkattn.window import Runs, ceil_div

_NO_LIMIT = 1 << 60  # bytes: the pool has the blocks of one session in any case


class Recorder:
    """Writes down what the manager does with the blocks of a session's branch 0."""

    def __init__(self, session: Session) -> None:
        self.records: list[ForwardRecord] = []
        self._session = session
        self._blocks: dict[int, tuple[int, ...]] = {}  # of every committed chunk that still has any
        self._resident: Runs = ()
        self._rollout = 0

    def reset(self) -> None:
        """Call after `Session.reset`."""
        self._blocks, self._resident = {}, ()
        self._rollout += 1

    def clear(self) -> None:
        """Forget the records, and count rollouts from here."""
        self.records.clear()
        self._rollout = 0

    def add(self, planned: ForwardContext) -> None:
        """Record a forward that has just ended; one with the plan of the last is counted there."""
        cache, adapter = self._session.cache, self._session.adapter(0)
        span = range(planned.first_chunk, planned.first_chunk + planned.num_chunks)
        history = [c for run in cache.policy.visible(self._resident, span) for c in run]
        # A commit goes on where the last block is partly filled; scratch begins with a block.
        size = cache.spec.chunk_size
        start = planned.first_chunk * size % cache.block_size if planned.commit else 0
        edges = [start + size * i for i in range(planned.num_chunks + 1)]
        written = {
            chunk: tuple(
                planned.span_block_ids[a // cache.block_size : ceil_div(b, cache.block_size)]
            )
            for chunk, a, b in zip(span, edges, edges[1:], strict=False)
        }
        block_ids = {chunk: self._blocks[chunk] for chunk in history} | written
        if planned.commit:
            self._blocks |= {c: written[c] for c in span[: cache.policy.committed(len(span))]}
        pool = cache.manager.block_pool.blocks
        evicted = [c for c, ids in self._blocks.items() if any(pool[i].ref_cnt == 0 for i in ids)]
        for chunk in evicted:
            del self._blocks[chunk]
        self._resident = adapter.resident
        record = ForwardRecord(
            first_chunk=planned.first_chunk,
            num_chunks=planned.num_chunks,
            commit=planned.commit,
            visible_chunks=tuple(block_ids),
            block_ids=block_ids,
            evicted_chunks=tuple(evicted),
            action_block_ids=tuple(planned.action_block_ids),
            rollout=self._rollout,
        )
        last = self.records[-1] if self.records else None
        if last is not None and replace(last, forwards=1) == record:
            self.records[-1] = replace(last, forwards=last.forwards + 1)
        else:
            self.records.append(record)


def play(
    preset: ModelPreset,
    spans: int,
    *,
    block_size: int | None = None,
    reset_at_boundary: bool = False,
    policy: Policy | None = None,
) -> list[ForwardRecord]:
    """Play a model's rollout: the first frames, then spans of denoise forwards and a commit.

    Args:
        preset: the model; where its denoise steps are not known, one stands for them.
        spans: how many.
        block_size: tokens of a block; None is one frame.
        reset_at_boundary: after every commit everything but the sink leaves.
        policy: what is seen and kept; None is the model's sink and window.

    Returns:
        The forwards of branch 0. Denoise forwards of a span, which have one plan, are one record.

    Raises:
        ValueError: an argument does not fit the model, or it has no window.
        PoolExhaustedError, LifecycleError: the policy keeps more than it says, or shows a chunk
            that has left.
    """
    if preset.window_frames is None:
        raise ValueError("`window_frames` must be given for a model with ranges of its own")
    tokens = preset.frame_tokens
    config = ARDiffusionKVConfig(
        enable=True,
        chunk_size=tokens,
        window_chunks=preset.window_frames,
        sink_chunks=preset.sink_frames,
        reset_at_boundary=reset_at_boundary,
    )
    extra = preset.action_tokens + preset.state_tokens
    cache = ARDiffusionKVCache(
        config,
        num_layers=preset.layers,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        block_size=block_size or tokens,
        max_model_len=1 << 20,
        available_bytes=0,
        memory_budget_bytes=_NO_LIMIT,
        local_branches=preset.cfg_branches,
        num_frame_per_block=preset.frames_per_span,
        max_scratch_tokens_per_branch=extra,
        policy=policy,
    )
    session = cache.open_session("plan")
    recorder = Recorder(session)

    def forward(frames: int, commit: bool) -> None:
        for branch in range(preset.cfg_branches):
            with session.forward(
                branch=branch,
                seq_len=frames * tokens,
                commit=commit,
                action_len=0 if commit else extra,
            ) as planned:
                for layer in range(preset.layers):
                    planned.mark_layer_written(layer)
            if branch == 0:
                recorder.add(planned)

    if preset.first_frames:
        forward(preset.first_frames, commit=True)
    for _ in range(spans):
        for _ in range(preset.denoise_forwards or preset.denoise_steps or 1):
            forward(preset.frames_per_span, commit=False)
        forward(preset.frames_per_span, commit=True)
    session.close()
    return recorder.records
