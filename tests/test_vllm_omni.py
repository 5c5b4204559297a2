"""The plug-in for vllm-omni, under its real runner and its real transformers.

Every model runs three times, with `off`, `kernels` and `full`: the outputs must be the same.
"""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from chunkattn import ARDiffusionKVCache, LifecycleError, PoolExhaustedError, StaleContextError
from chunkattn.integrations import vllm_omni as plugin

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 2e-5  # rounding of float32 through all layers, and no more
needs_vllm_omni = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("vllm", "vllm_omni")),
    reason="needs vllm and vllm_omni",
)
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


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
    from vllm_omni.experimental.ar_diffusion import runner

    made = runner.ARDiffusionModelRunner.__new__(runner.ARDiffusionModelRunner)
    made.od_config = SimpleNamespace(
        dtype=torch.float32, ar_diffusion_kv_config={"gpu_memory_fraction": 1.0, **kv_config}
    )
    made.device, made.pipeline = torch.device("cpu"), pipeline
    made.ar_diffusion_kv_config = runner.resolve_ar_diffusion_kv_config(made.od_config)
    made._sessions = runner.OrderedDict()
    made._perf_e2e_times = []
    made._preallocate_kv_cache(available_bytes=available_bytes)
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


# ------------------------------------------------------------------------------------ the models
@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    from chunkattn.integrations import dreamzero_demo

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
    dreamzero_demo.cpu_attention()
    with dreamzero_demo.one_process(), torch.no_grad():
        yield
    torch.set_num_threads(threads)


def dreamzero_rollout(model: Any, geometry: Any) -> list[torch.Tensor]:
    """Cycles from a first frame to a hard reset, on both branches, in one session."""
    from chunkattn.demo import play
    from chunkattn.integrations.dreamzero_demo import (
        LATENT_CHANNELS,
        TEXT_FEATURES,
        TEXT_TOKENS,
    )

    generator = torch.Generator().manual_seed(1)
    frames = 1 + geometry.spans * geometry.frames_per_span
    latents = torch.randn(1, LATENT_CHANNELS, frames, *geometry.latent_size, generator=generator)
    names = ("positive", "negative")
    text = {n: torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator) for n in names}

    def text_kv(branch: str) -> Pairs:
        projected = model.text_embedding(text[branch])
        for block in model.blocks:
            layer, shape = block.cross_attn, (geometry.heads, geometry.head_size)
            key = layer.norm_k(layer.k(projected))
            yield key.unflatten(2, shape), layer.v(projected).unflatten(2, shape)

    from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionCrossAttentionKVSpec

    pipeline = Pipeline(
        spec(
            num_layers=geometry.layers,
            num_kv_heads=geometry.heads,
            head_size=geometry.head_size,
            tokens_per_frame=geometry.frame_tokens,
            frames_per_block=geometry.frames_per_span,
            window_frames=geometry.window_frames,
            sink_frames=0,
            cross_attention=(ARDiffusionCrossAttentionKVSpec("text", TEXT_TOKENS),),
            max_scratch_tokens_per_branch=geometry.extra_tokens,
        )
    )
    runner = make_runner(pipeline)
    outputs = []
    for _ in range(geometry.cycles):
        for call in play(geometry, latents, generator):
            seq_len = call.frames * geometry.frame_tokens
            with bound(runner, "robot"):
                state = pipeline.state
                for branch in names:
                    if not state.is_cross_attention_populated(branch, "text"):
                        state.populate_cross_attention(branch, "text", text_kv(branch))
                    video, action, _ = model(
                        seq_len=seq_len,
                        kv_cache=state.get_kv_caches(branch, seq_len, call.commit),
                        current_start_frame=call.first_frame,
                        context=text[branch],
                        crossattn_cache=state.get_cross_attention_kv(branch, "text"),
                        **call.inputs,
                    )
                    if call.commit:
                        state.commit_paged_context(branch)
                    outputs += [video.clone()] if action is None else [video.clone(), action]
        with bound(runner, "robot"):
            pipeline.state.reset(keep_cross_attention=("text",))
    return outputs


def lingbot() -> tuple[Any, Any]:
    """LingBot-World's transformer, and the module that drives it block by block.

    Its package imports its pipelines, which need av and torchvision; these two need neither.
    """
    import vllm_omni.diffusion.models as models

    name = f"{models.__name__}.lingbot_world"
    package = types.ModuleType(name)
    package.__path__ = [f"{path}/lingbot_world" for path in models.__path__]
    with mock.patch.dict(sys.modules, {name: package}):
        from vllm_omni.diffusion.models.lingbot_world import dmd_block, transformer
    return transformer, dmd_block


TEXT_TOKENS = 512  # LingBot's text K/V have exactly these
SPAN, SINK, WINDOW = 3, 2, 6


def lingbot_model(transformer: Any) -> Any:
    torch.manual_seed(0)
    alone = SimpleNamespace(ulysses_world_size=1, ulysses_rank=0, ulysses_group=None)
    transformer.get_sp_group = lambda: alone  # its group of one needs a GPU backend
    model = transformer.CausalLingBotWorldTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        sink_size=SINK,
        num_frames_per_block=SPAN,
        sliding_window_num_frames=SINK + WINDOW,
    )
    for name, parameter in model.named_parameters():  # vLLM's layers leave them as they find them
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.constant_(parameter, float(name.endswith("weight")))
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    for block in model.blocks:  # its native rotation takes one head only
        rotary = block.self_attn.rotary_embedding
        rotary._forward_method = lambda x, cos, sin, native=rotary.forward_native: native(
            x, cos.unsqueeze(1), sin.unsqueeze(1)
        )
    return model.float().eval()


def lingbot_rollout(model: Any, dmd_block: Any, num_blocks: int) -> list[torch.Tensor]:
    """Blocks of one session, with another prompt half way."""
    from vllm_omni.experimental.ar_diffusion.capability import (
        ARDiffusionCrossAttentionKVSpec,
        ARDiffusionKVBranchSpec,
    )

    attention = model.blocks[0].cross_attn
    pipeline = Pipeline(
        spec(
            num_layers=model.config.num_layers,
            num_kv_heads=model.blocks[0].self_attn.num_sp_heads,
            head_size=model.config.attention_head_dim,
            tokens_per_frame=6,
            frames_per_block=SPAN,
            window_frames=WINDOW,
            sink_frames=SINK,
            kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
            cross_attention=(
                ARDiffusionCrossAttentionKVSpec("text", TEXT_TOKENS, attention.num_local_heads),
            ),
            max_scratch_tokens_per_branch=0,
        )
    )
    runner = make_runner(pipeline)
    assert runner.kv_cache.session_capacity == 2
    blocks = dmd_block.LingBotDMDBlockRunner(model, device=torch.device("cpu"), enforce_eager=True)
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def text_kv(prompt: torch.Tensor) -> Pairs:
        projected = model.text_embedding(prompt)
        for block in model.blocks:
            layer = block.cross_attn
            shape = (layer.num_local_heads, layer.head_dim)
            key = layer.norm_k(layer.k(projected))
            yield key.unflatten(2, shape), layer.v(projected).unflatten(2, shape)

    outputs = []
    prompt = randn(1, TEXT_TOKENS, 12)
    for index in range(num_blocks):
        with bound(runner, "world"):
            state = pipeline.state
            if index == num_blocks // 2:
                prompt = randn(1, TEXT_TOKENS, 12)
                state.clear_cross_attention()
            if not state.is_cross_attention_populated("main", "text"):
                state.populate_cross_attention("main", "text", text_kv(prompt))
            cross = [
                dmd_block.LingBotAttentionCache(
                    layer["k"], layer["v"], end=TEXT_TOKENS, absolute_end=TEXT_TOKENS
                )
                for layer in state.get_cross_attention_kv("main", "text")
            ]
            outputs.append(
                blocks.generate_block(
                    condition=randn(1, 4, SPAN, 4, 6),
                    camera=randn(1, 6 * 64, SPAN, 4, 6),
                    prompt_embeds=prompt,
                    cache=None,
                    ar=dmd_block.ARBlockContext(state, cross, "main"),
                    start_frame=index * SPAN,
                    schedule=((1000.0, 1.0), (500.0, 0.5)),
                    generator=generator,
                    progress_bar=mock.Mock(),
                )
            )
            assert state.adapter("main").completed_chunks == (index + 1) * SPAN
    return outputs


class Run:
    """The outputs of a model, and how often our op ran for them."""

    def __init__(self, mode: str, backend: str, play: Callable[[], list[torch.Tensor]]) -> None:
        from vllm_omni.experimental.ar_diffusion import runner

        from chunkattn import ops

        with (
            plugged(mode, backend),
            mock.patch.object(ops, "write_attend", wraps=ops.write_attend) as op,
        ):
            self.cache_is_ours = issubclass(runner.ARDiffusionKVCache, ARDiffusionKVCache)
            self.outputs = play()
        self.calls = op.call_count
        self.backends = {call.args[-1] for call in op.call_args_list}


def check_runs(runs: dict[str, Run], calls: int, backend: str) -> None:
    assert [run.calls for run in runs.values()] == [0, calls, calls]
    assert [run.cache_is_ours for run in runs.values()] == [False, False, True]
    assert runs["kernels"].backends == runs["full"].backends == {backend}
    for mode in ("kernels", "full"):
        pairs = zip(runs["off"].outputs, runs[mode].outputs, strict=True)
        # torch's max, unlike Python's, does not drop a NaN
        worst = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
        assert worst < TOLERANCE, mode
    largest = torch.stack([out.abs().max() for out in runs["off"].outputs]).max()
    assert 0.1 < largest < 100  # TOLERANCE means something


@needs_vllm_omni
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_dreamzero_is_the_same(backend, one_process):
    from chunkattn.integrations.dreamzero_demo import Geometry, build_model

    sizes: dict[str, Any] = {"layers": 3, "heads": 2, "grid": (4, 6), "denoise_steps": 3}
    if backend == "triton":
        sizes = {"layers": 2, "heads": 1, "grid": (1, 2), "denoise_steps": 1, "cycles": 1}
    geometry = Geometry(head_size=16, action_tokens=6, state_tokens=1, **sizes)
    model = build_model(geometry, 0)
    runs = {m: Run(m, backend, lambda: dreamzero_rollout(model, geometry)) for m in plugin.MODES}
    spans = geometry.cycles * geometry.branches * geometry.spans
    commits = spans + geometry.cycles * geometry.branches
    denoises = spans * geometry.denoise_steps
    check_runs(runs, (commits + denoises) * geometry.layers, backend)
    assert len(runs["off"].outputs) == commits + 2 * denoises
    if backend == "torch":
        assert len(runs["off"].outputs) == 116


@needs_vllm_omni
@pytest.mark.parametrize(("backend", "num_blocks"), [("torch", 12), ("triton", 3)])
def test_lingbot_is_the_same(backend, num_blocks, one_process):
    transformer, dmd_block = lingbot()
    model = lingbot_model(transformer)
    runs = {
        mode: Run(mode, backend, lambda: lingbot_rollout(model, dmd_block, num_blocks))
        for mode in plugin.MODES
    }
    check_runs(runs, num_blocks * 3 * model.config.num_layers, backend)


# ------------------------------------------------------------------------------------ the runner
@pytest.fixture
def full() -> Iterator[None]:
    with plugged("full"), torch.no_grad():
        yield


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


@needs_vllm_omni
def test_runner_sessions(full):
    pipeline = Pipeline(spec())
    runner = make_runner(pipeline)
    cache = runner.kv_cache
    assert isinstance(cache, ARDiffusionKVCache)
    unused = cache.num_free_blocks
    for session_id in ("a", "b", "a"):  # a is used last
        with bound(runner, session_id):
            both(pipeline.state)
    assert list(runner._sessions) == ["b", "a"]
    oldest = runner._sessions["b"]
    assert pipeline.state is None
    with bound(runner, "c"):
        both(pipeline.state)
    assert list(runner._sessions) == ["a", "c"]
    assert pipeline.events == [("close", "b")]
    cache.check_integrity()
    with pytest.raises(LifecycleError, match="session 'b' is closed"):
        oldest.get_kv_caches("positive", 8, False)

    runner.reset_session("a")
    assert pipeline.events[-1] == ("reset", "a")
    with bound(runner, "a"):
        assert pipeline.state.adapter("negative").completed_chunks == 0
        both(pipeline.state)
    for session_id in ("a", "c", "never opened"):
        runner.close_session(session_id)
    assert cache.num_free_blocks == unused


@needs_vllm_omni
def test_runner_releases_a_session_that_failed(full):
    pipeline = Pipeline(spec())
    runner = make_runner(pipeline)
    unused = runner.kv_cache.num_free_blocks
    with bound(runner, "a"):
        both(pipeline.state)
    with pytest.raises(RuntimeError, match="the model has failed"), bound(runner, "a"):
        forward(pipeline.state, stop_after=1)
    assert pipeline.events == [("close", "a")]
    assert runner.kv_cache.num_free_blocks == unused
    with bound(runner, "a"):
        assert pipeline.state.adapter("positive").completed_chunks == 0
        both(pipeline.state)


@needs_vllm_omni
def test_runner_overrides(full, monkeypatch):
    monkeypatch.setenv("AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH", "9")
    pipeline = Pipeline(spec())
    runner = make_runner(pipeline, window_chunks=5, sink_chunks=2, reset_at_boundary=True)
    cache = runner.kv_cache
    assert (cache.spec.window_chunks, cache.spec.sink_chunks) == (5, 2)
    assert cache.scratch_blocks_per_kv_branch == 9
    assert cache.scratch_block_ids("negative", 8, 1) == [cache.num_blocks_total - 1]
    with bound(runner, "a"):
        for _ in range(3):
            both(pipeline.state)
        assert pipeline.state.adapter("positive").completed_chunks == 6
        assert len(cache.window_block_ids(pipeline.state.adapter("positive"))) == 2


@needs_vllm_omni
def test_runner_warms_up(full):
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
    from vllm_omni.platforms import current_omni_platform

    class Warm(Pipeline):
        def ar_diffusion_warmup_requests(self, session_id: str) -> Iterator[Any]:
            for index in range(3):
                extra = {"session_id": session_id, "reset": index == 0}
                yield SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))

    pipeline = Warm(spec())
    runner = make_runner(pipeline)
    unused = runner.kv_cache.num_free_blocks
    positions = []

    def execute(self: Any, request: Any, **_: Any) -> None:
        both(pipeline.state)
        positions.append(pipeline.state.adapter("positive").completed_chunks)

    with (
        mock.patch.object(DiffusionModelRunner, "execute_model", execute),
        mock.patch.object(type(current_omni_platform), "synchronize", create=True),
    ):
        runner._warmup_ar_rollout()
    assert positions == [2, 4, 6]
    assert [event for event, _ in pipeline.events] == ["reset", "close"]
    assert runner.kv_cache.num_free_blocks == unused


@needs_vllm_omni
def test_memory_is_shared_out_as_vllm_omni_does():
    found = {}
    for mode in ("off", "full"):
        with plugged(mode):
            found[mode] = []
            for kilobytes in range(20, 80, 3):
                asked = spec(session_capacity=4, model_owned_state_bytes_per_session=1000)
                try:
                    cache = make_runner(Pipeline(asked), available_bytes=1000 * kilobytes).kv_cache
                except ValueError:
                    found[mode].append(None)
                else:
                    found[mode].append((cache.session_capacity, cache.num_blocks))
    assert found["full"] == found["off"]
    assert found["full"][0] is None
    assert {capacity for capacity, _ in filter(None, found["full"])} == {1, 2, 3, 4}


@needs_vllm_omni
def test_a_failed_forward_can_be_tried_again(full):
    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        with pytest.raises(ValueError, match="`action_len` must be from 0 to 16"):
            forward(state, action_len=99)
        with pytest.raises(LifecycleError, match="'positive' never ran"):
            state.commit_paged_context("positive")
        forward(state, seed=1)
        free = state.kv_cache.num_free_blocks
        with pytest.raises(RuntimeError, match="the model has failed"):
            forward(state, seed=2, stop_after=1)
        again = forward(state, seed=2, commit=False)
        assert state.kv_cache.num_free_blocks == free
        assert torch.equal(forward(state, seed=2), again)  # denoise and commit see the same
        assert state.adapter("positive").completed_chunks == 4
        with pytest.raises(LifecycleError, match="must have a forward to commit, got none"):
            state.commit_paged_context("positive")


@needs_vllm_omni
def test_a_forward_that_ran_is_not_dropped(full):
    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        with mock.patch.object(state, "commit_paged_context"):
            forward(state)
        with pytest.raises(LifecycleError, match="must be committed before the next"):
            state.get_kv_caches("positive", 8, False)
        state.commit_paged_context("positive")
        assert state.adapter("positive").completed_chunks == 2


@needs_vllm_omni
def test_what_outlives_a_reset_is_stale(full):
    from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import paged_write_attn

    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        layer = state.get_kv_caches("positive", 8, True)[0]
        layer.forward_ctx.prepare(torch.device("cpu"), 0, 8)
        inputs = layer.to_layer_inputs()
        state.reset()
        with pytest.raises(StaleContextError):
            layer.to_layer_inputs()
        with pytest.raises(StaleContextError):
            layer.forward_ctx.prepare(torch.device("cpu"), 0, 8)
        rows = torch.ones(8, 2, 8)
        with pytest.raises(StaleContextError):
            paged_write_attn(inputs, rows, rows, rows, None, None, 1.0)
        assert (state.kv_cache.key_cache(0) == 1).all(-1).sum() == 0


@needs_vllm_omni
def test_branches_of_one_local_index(full):
    from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec

    names = ("positive", "negative")
    pipeline = Pipeline(spec(kv_branches=tuple(ARDiffusionKVBranchSpec(n, 0) for n in names)))
    runner = make_runner(pipeline)
    unused = runner.kv_cache.num_free_blocks
    with bound(runner, "a"):
        state = pipeline.state
        contexts = {name: state.get_kv_caches(name, 8, True) for name in names}
        assert len(contexts) == 2  # a worker asks for both, and runs one
        forward(state, "negative")
        with pytest.raises(LifecycleError, match="must not run on the same worker"):
            forward(state, "positive")
        state.reset()
        forward(state, "positive")
    runner.close_session("a")
    assert runner.kv_cache.num_free_blocks == unused
    with bound(runner, "a"):
        pass


@needs_vllm_omni
def test_cross_attention(full):
    pipeline = Pipeline(spec())
    runner = make_runner(pipeline)

    def layers(fill: float, *, heads: int = 3, count: int = 2) -> Pairs:
        for layer in range(count):
            yield torch.full((1, 5, heads, 8), fill + layer), torch.full((1, 5, heads, 8), -fill)

    def failing() -> Pairs:
        yield from layers(9.0, count=1)
        raise RuntimeError("projection")

    with bound(runner, "a"):
        state = pipeline.state
        with pytest.raises(LifecycleError, match="must be populated before they are read"):
            state.get_cross_attention_kv("positive", "text")
        state.populate_cross_attention("positive", "text", layers(1.0))
        assert not state.is_cross_attention_populated("negative", "text")
        for refused in (layers(2.0, heads=2), layers(2.0, count=1), layers(2.0, count=3)):
            with pytest.raises(ValueError, match="must have"):
                state.populate_cross_attention("positive", "text", refused)
        with pytest.raises(RuntimeError, match="projection"):
            state.populate_cross_attention("positive", "text", failing())
        first, second = state.get_cross_attention_kv("positive", "text")
        assert first["is_init"] is True
        assert first["k"].shape == (1, 5, 3, 8)
        assert first["k"].unique().tolist() == [1]
        assert second["k"].unique().tolist() == [2]
        assert second["v"].unique().tolist() == [-1]
        for call in (
            lambda: state.is_cross_attention_populated("positive", "image"),
            lambda: state.is_cross_attention_populated("left", "text"),
            lambda: state.reset(keep_cross_attention=("image",)),
        ):
            with pytest.raises(KeyError, match="must be one of"):
                call()
        state.reset(keep_cross_attention=("text",))
        assert state.is_cross_attention_populated("positive", "text")
        forward(state)
        state.clear_cross_attention()
        assert not state.is_cross_attention_populated("positive", "text")
        assert state.adapter("positive").completed_chunks == 2  # the history stays
        state.populate_cross_attention("positive", "text", layers(1.0))
        state.reset()
        assert not state.is_cross_attention_populated("positive", "text")
    cache = runner.kv_cache
    for session_id in ("x", "y"):
        cache.populate_cross_attention(session_id, "text", "positive", layers(1.0))
    with pytest.raises(PoolExhaustedError, match="`session_capacity` is 2"):
        cache.populate_cross_attention("z", "text", "positive", layers(1.0))


@needs_vllm_omni
def test_a_captured_layer_counts_when_it_is_handed_out(full):
    """A CUDA graph writes without calling the op."""
    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        state.kv_cache.writes._captured.update((0, 1))
        layers = state.get_kv_caches("positive", 8, True)
        layers[0].forward_ctx.prepare(torch.device("cpu"), 0, 8)
        layers[0].to_layer_inputs()
        with pytest.raises(LifecycleError, match=r"got none for layers \[1\]"):
            state.commit_paged_context("positive")
        layers = state.get_kv_caches("positive", 8, True)
        layers[0].forward_ctx.prepare(torch.device("cpu"), 0, 8)
        for layer in layers:
            layer.to_layer_inputs()
        state.commit_paged_context("positive")


@needs_vllm_omni
def test_faults_side_by_side(capsys):
    from chunkattn.integrations import faults

    with plugged("kernels"), torch.no_grad():
        theirs, ours = faults.managers()
        assert [faults.judge(fault, theirs).accepted for fault in faults.FAULTS] == [True] * 7
        verdicts = [faults.judge(fault, ours) for fault in faults.FAULTS]
        assert [verdict.accepted for verdict in verdicts] == [False] * 7
        assert sum(verdict.says.startswith("refuses: ") for verdict in verdicts) == 6
        assert faults.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("vllm-omni accepts: ") == 7
    assert printed.count("chunkattn ") == 7
    with plugged("full"), pytest.raises(RuntimeError, match="must not be full here"):
        faults.managers()


# ------------------------------------------------------------------------------------ the plug-in
def test_off_imports_nothing():
    code = (
        "import sys; from chunkattn.integrations import vllm_omni; vllm_omni.register(); "
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'triton', 'vllm', "
        "'vllm_omni'} or 'nothing', vllm_omni.active)"
    )
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}  # the switch is not set
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "nothing off", done.stderr


def test_the_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["chunkattn"].partition(":")
    assert module == plugin.__name__
    assert getattr(plugin, name) is plugin.register


@needs_vllm_omni
def test_unknown_modes_are_refused(monkeypatch):
    monkeypatch.setenv(plugin.ENV, "on")
    with pytest.raises(ValueError, match=r"must be one of off, kernels, full, got 'on'"):
        plugin.register()
    monkeypatch.setenv(plugin.ENV, "kernels")
    monkeypatch.setenv("CHUNKATTN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"`CHUNKATTN_BACKEND` must be one of .* got 'cuda'"):
        plugin.register()
    monkeypatch.setattr(plugin, "active", "full")
    with pytest.raises(RuntimeError, match="must stay 'full' in this process, got 'kernels'"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.0"])
def test_unknown_versions_are_refused(version, monkeypatch):
    monkeypatch.setenv(plugin.ENV, "full")
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: version)
    with pytest.raises(NotImplementedError, match=rf"must be 0\.30\.0 .* got {version}"):
        plugin.register()
    assert plugin.active == "off"


def test_a_missing_vllm_omni_is_named(monkeypatch):
    def missing(name: str) -> str:
        raise plugin.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv(plugin.ENV, "kernels")
    monkeypatch.setattr(plugin.importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="needs vllm-omni 0.30.0"):
        plugin.register()


@needs_vllm_omni
def test_changed_signatures_are_refused(monkeypatch):
    from vllm_omni.experimental.ar_diffusion import runner
    from vllm_omni.experimental.ar_diffusion.kv_cache import manager, state

    from chunkattn.integrations import omni_op

    def changed(self: Any, kv_branch: str, seq_len: int = 0, commit_current: bool = False) -> None:
        pass

    def write_attend(query: torch.Tensor) -> torch.Tensor:
        return query

    before = [vars(module).copy() for module in (runner, manager, state)]
    for where, name, value, message in (
        (state.ARDiffusionKVState, "get_kv_caches", changed, "get_kv_caches must take"),
        (manager.ARDiffusionKVCache, "defragment", changed, "ARDiffusionKVCache.defragment is new"),
        (omni_op, "write_attend", write_attend, "the op must be"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(plugin.ENV, "full")
            patch.setattr(where, name, value, raising=False)
            patch.setattr(omni_op, "MUTATED", ()) if where is omni_op else None
            serve = mock.Mock()
            patch.setattr(plugin, "serve_op", serve)
            with pytest.raises(NotImplementedError, match=message):
                plugin.register()
            serve.assert_not_called()
        assert plugin.active == "off"
    assert [vars(module) for module in (runner, manager, state)] == before


@needs_vllm_omni
def test_one_line_says_what_is_active():
    with mock.patch.object(plugin.logger, "info") as info, plugged("full", "auto"):
        plugin.register()  # again: vLLM may load a plug-in more than once
    (call,) = info.call_args_list
    message = call.args[0] % call.args[1:]
    backend = "triton" if torch.cuda.is_available() else "torch"
    for part in ("vllm-omni 0.30.0", f"{plugin.ENV}=full", f"backend {backend} (auto)"):
        assert part in message
    assert torch.__version__ in message


@needs_vllm_omni
def test_modules_imported_after_the_plugin_find_ours():
    runner = "vllm_omni.experimental.ar_diffusion.runner"
    with mock.patch.dict(sys.modules), plugged("full"):
        sys.modules.pop(runner, None)
        later = importlib.import_module(runner)
        assert issubclass(later.ARDiffusionKVCache, ARDiffusionKVCache)
        assert later.ARDiffusionKVState.__module__ == "chunkattn.integrations.omni_state"


@needs_vllm_omni
def test_slots_that_are_neighbours_are_not_copied():
    from chunkattn.integrations.omni_op import _joined

    slots = torch.arange(10, dtype=torch.int32)
    joined = _joined(slots[2:5], slots[5:9])
    assert joined.data_ptr() == slots[2:].data_ptr()
    assert joined.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert _joined(slots[2:4], slots[5:7]).tolist() == [2, 3, 5, 6]
    assert _joined(slots[:2], slots.long()[2:4]).tolist() == [0, 1, 2, 3]
