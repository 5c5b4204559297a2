"""The two ways the demo runs DreamZero's transformer: through chunkattn, and as upstream does it.

Both take the same calls, and both keep a tally of the bytes of K and V that they move and hold.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chunkattn import ARDiffusionKVCache, ARDiffusionKVConfig, ForwardContext, torch_backend
from chunkattn.integrations.dreamzero_demo import Geometry
from chunkattn.integrations.omni_op import Writes
from chunkattn.integrations.omni_state import layer_inputs
from chunkattn.integrations.vllm_omni import serve_op
from chunkattn.rollout import Recorder


@dataclass(frozen=True)
class Call:
    """The inputs of one forward, shared by all branches and by both ways."""

    first_frame: int
    commit: bool
    inputs: dict[str, Tensor]  # what the model takes by name

    @property
    def frames(self) -> int:
        return self.inputs["x"].shape[2]


@dataclass
class Tally:
    """What one way has cost so far."""

    seconds: list[float] = field(default_factory=list)  # of each forward
    forwards: int = 0
    copied_bytes: int = 0
    peak_bytes: int = 0


@dataclass
class CrossAttention:
    """K and V of the text, kept by the model between forwards; one set a branch."""

    geometry: Geometry
    contexts: list[Tensor]
    caches: list[list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        layers = range(self.geometry.layers)
        self.caches = [[{"is_init": False} for _ in layers] for _ in self.contexts]

    def arguments(self, branch: int) -> dict[str, Any]:
        return {"context": self.contexts[branch], "crossattn_cache": self.caches[branch]}


def row_bytes(geometry: Geometry) -> int:
    """Bytes of one token's K and V in one layer, in float32."""
    return 2 * geometry.heads * geometry.head_size * 4


class UpstreamWay:
    """The model as it runs without chunkattn: concatenate, crop to the window, attend."""

    name = "upstream"

    def __init__(self, model: Any, geometry: Geometry, contexts: list[Tensor]) -> None:
        self.tally = Tally()
        self._model = model
        self._geometry = geometry
        self._cross = CrossAttention(geometry, contexts)
        self.reset()

    def reset(self) -> None:
        geometry = self._geometry
        empty = torch.zeros(2, 1, 0, geometry.heads, geometry.head_size)
        self._caches = [[empty] * geometry.layers for _ in range(geometry.branches)]
        self._cross.reset()

    def restart(self) -> None:
        """Forget the warm-up."""
        self.reset()
        self.tally = Tally()

    def forward(self, branch: int, call: Call) -> list[Tensor]:
        seq_len = call.frames * self._geometry.frame_tokens
        self._count(branch, call, seq_len)
        video, action, updated = self._model(
            seq_len=seq_len,
            kv_cache=self._caches[branch],
            current_start_frame=call.first_frame,
            **call.inputs,
            **self._cross.arguments(branch),
        )
        if call.commit:
            self._caches[branch] = updated
        return [video] if action is None else [video, action]

    def _count(self, branch: int, call: Call, seq_len: int) -> None:
        """Count the rows that `CausalWanSelfAttention.forward` moves, and those it holds."""
        geometry = self._geometry
        window = geometry.window_frames * geometry.frame_tokens
        extra = 0 if call.commit else geometry.extra_tokens
        joined = self._caches[branch][0].shape[2] + seq_len  # torch.cat of history and span
        kept = min(joined, window)  # cropped: a view
        attended = kept + extra if extra else 0  # torch.cat with the action rows
        stacked = kept  # torch.stack of K and V, on every forward
        copied = geometry.layers * (joined + attended + stacked)
        # All hold at the last layer's torch.stack: every branch's history, what the layers hand
        # back, and the two joined tensors of that layer.
        history = geometry.layers * sum(caches[0].shape[2] for caches in self._caches)
        held = history + geometry.layers * stacked + joined + attended
        self.tally.copied_bytes += copied * row_bytes(geometry)
        self.tally.peak_bytes = max(self.tally.peak_bytes, held * row_bytes(geometry))


class PagedWay:
    """The same model through a chunkattn session; blocks as large as a frame."""

    name = "chunkattn"

    def __init__(
        self, model: Any, geometry: Geometry, contexts: list[Tensor], backend: str
    ) -> None:
        self.tally = Tally()
        self._model = model
        self._geometry = geometry
        self._cross = CrossAttention(geometry, contexts)
        frame_tokens = geometry.frame_tokens
        # What a rollout needs to go on for ever: window and span of every branch, the null block.
        frames = geometry.branches * (geometry.window_frames + geometry.frames_per_span) + 1
        self.cache = ARDiffusionKVCache(
            ARDiffusionKVConfig(
                enable=True,
                chunk_size=frame_tokens,
                window_chunks=geometry.window_frames,
                gpu_memory_fraction=1.0,
            ),
            num_layers=geometry.layers,
            num_kv_heads=geometry.heads,
            head_size=geometry.head_size,
            dtype=torch.float32,
            block_size=frame_tokens,
            max_model_len=1 << 20,
            available_bytes=frames * frame_tokens * geometry.layers * row_bytes(geometry),
            device=torch.device("cpu"),
            local_branches=geometry.branches,
            num_frame_per_block=geometry.frames_per_span,
            max_scratch_tokens_per_branch=geometry.extra_tokens,
            backend=backend,
        )
        self.session = self.cache.open_session("robot")
        self._writes = Writes(list(map(self.cache.flat_key_pool, range(geometry.layers))), backend)
        serve_op()
        self.recorder = Recorder(self.session)

    def reset(self) -> None:
        self.session.reset()
        self._cross.reset()
        self.recorder.reset()

    def restart(self) -> None:
        """Forget the warm-up."""
        self.reset()
        self.tally = Tally()
        self.recorder.clear()

    def forward(self, branch: int, call: Call) -> list[Tensor]:
        seq_len = call.frames * self._geometry.frame_tokens
        extra = 0 if call.commit else self._geometry.extra_tokens
        before = torch_backend.copied_kv_bytes()
        with self.session.forward(
            branch=branch, seq_len=seq_len, commit=call.commit, action_len=extra
        ) as planned:
            self._writes.forward = planned
            slots = (planned.slot_mapping[:seq_len], planned.slot_mapping[seq_len:])
            layers = [
                layer_inputs(self.cache, planned, layer, *slots)
                for layer in range(self._geometry.layers)
            ]
            video, action, _ = self._model(
                seq_len=seq_len,
                kv_cache=layers,
                current_start_frame=call.first_frame,
                **call.inputs,
                **self._cross.arguments(branch),
            )
            self._count(planned, torch_backend.copied_kv_bytes() - before)
        if branch == 0:
            self.recorder.add(planned)
        return [video] if action is None else [video, action]

    def _count(self, planned: ForwardContext, copied: int) -> None:
        """Count the rows written into the pool, what the backend copied on top, the blocks in use.

        A backend's copy lives for one layer.
        """
        layers, cache = self._geometry.layers, self.cache
        written = len(planned.slot_mapping) * layers * row_bytes(self._geometry)
        self.tally.copied_bytes += written + copied
        managed = cache.manager.block_pool
        blocks = managed.num_gpu_blocks - 1 - managed.get_num_free_blocks()  # less the null block
        blocks += sum(
            block >= cache.num_blocks
            for block in (*planned.span_block_ids, *planned.action_block_ids)
        )
        block_bytes = layers * cache.block_size * row_bytes(self._geometry)
        self.tally.peak_bytes = max(self.tally.peak_bytes, blocks * block_bytes + copied // layers)

    def reserved_bytes(self) -> int:
        """Bytes of all pools: managed, scratch and null blocks."""
        pools = (self.cache.key_cache(i).nbytes * 2 for i in range(self._geometry.layers))
        return sum(pools)
