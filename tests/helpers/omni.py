"""vllm-omni's real runner around small pipelines, with the plug-in put in and taken out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from chunkattn.integrations import vllm_omni as plugin

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer."""


@contextmanager
def plugged(mode: str, backend: str = "torch") -> Iterator[None]:
    """The plug-in in force as in a worker, and taken out again."""
    from vllm_omni.experimental.ar_diffusion.kv_cache import paged_attention

    op = paged_attention._paged_write_attn_op
    environment = {plugin.ENV: mode, "CHUNKATTN_BACKEND": backend}
    with mock.patch.dict("os.environ", environment), op.set_kernel_enabled("cpu", mode != "off"):
        classes = plugin._classes()
        plugin.register()
        try:
            yield
        finally:
            for theirs, ours in classes.items():
                plugin._put_in_place_of(ours, theirs)
            plugin.active = "off"


class Pipeline:
    """What vllm-omni's `SupportsARDiffusionPipeline` asks for, around any transformer."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.state: Any = None
        self.events: list[tuple[str, str]] = []

    def ar_diffusion_kv_cache_spec(self) -> Any:
        return self.spec

    @contextmanager
    def bind_ar_diffusion_state(self, session_id: str, state: Any) -> Iterator[None]:
        assert state.session_id == session_id
        self.state = state
        try:
            yield
        finally:
            self.state = None

    def reset_ar_diffusion_session(self, session_id: str) -> None:
        self.events.append(("reset", session_id))

    def close_ar_diffusion_session(self, session_id: str) -> None:
        self.events.append(("close", session_id))


def make_runner(pipeline: Any, *, available_bytes: int = 1 << 26, **kv_config: Any) -> Any:
    """vllm-omni's runner with its cache built, on the CPU, without loading a checkpoint."""
    made = bare_runner(**kv_config)
    made.pipeline = pipeline
    made._preallocate_kv_cache(available_bytes=available_bytes)
    return made


def bare_runner(**kv_config: Any) -> Any:
    """The same before it has loaded anything."""
    from vllm_omni.experimental.ar_diffusion import runner

    made = runner.ARDiffusionModelRunner.__new__(runner.ARDiffusionModelRunner)
    made.od_config = SimpleNamespace(
        dtype=torch.float32,
        enforce_eager=True,
        ar_diffusion_kv_config={"gpu_memory_fraction": 1.0, **kv_config},
    )
    made.device = torch.device("cpu")
    made.ar_diffusion_kv_config = runner.resolve_ar_diffusion_kv_config(made.od_config)
    made._sessions = runner.OrderedDict()
    made._perf_e2e_times = []
    return made


def bound(runner: Any, session_id: str) -> Any:
    return runner._bound_ar_session(session_id, description="forward", synchronize=False)


def spec(**changes: Any) -> Any:
    """Two branches, spans of two frames of four tokens, window 3, sink 1."""
    from vllm_omni.experimental.ar_diffusion.capability import (
        ARDiffusionCrossAttentionKVSpec,
        ARDiffusionKVBranchSpec,
        ARDiffusionKVCacheSpec,
    )

    arguments: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_size": 8,
        "tokens_per_frame": 4,
        "frames_per_block": 2,
        "window_frames": 3,
        "sink_frames": 1,
        "kv_branches": (
            ARDiffusionKVBranchSpec("positive", 0),
            ARDiffusionKVBranchSpec("negative", 1),
        ),
        "session_capacity": 2,
        "cross_attention": (ARDiffusionCrossAttentionKVSpec("text", 5, num_kv_heads=3),),
        "max_scratch_tokens_per_branch": 6,
    }
    return ARDiffusionKVCacheSpec(**(arguments | changes))


def forward(
    state: Any,
    branch: str = "positive",
    frames: int = 2,
    commit: bool = True,
    action_len: int = 0,
    seed: int = 0,
    stop_after: int | None = None,
) -> torch.Tensor:
    """One forward of a two-layer model that is nothing but attention; the last layer's output."""
    from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import paged_write_attn

    generator = torch.Generator().manual_seed(seed)
    caches = state.get_kv_caches(branch, seq_len=4 * frames, commit_current=commit)
    caches[0].forward_ctx.prepare(torch.device("cpu"), action_len, 4 * frames + action_len)
    out = torch.randn(4 * frames + action_len, 2, 8, generator=generator)
    for layer in caches[:stop_after]:
        rows, action = out[: 4 * frames], out[4 * frames :] if action_len else None
        out = paged_write_attn(layer.to_layer_inputs(), out, rows, rows, action, action, 0.3)
    if stop_after is not None:
        raise RuntimeError("the model has failed")
    if commit:
        state.commit_paged_context(branch)
    return out


def both(state: Any, **arguments: Any) -> None:
    for branch in state.kv_branch_names:
        forward(state, branch, **arguments)
