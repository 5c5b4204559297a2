"""vllm-omni's real transformers run three times, with `off`, `kernels` and `full`: the outputs must
be the same.
"""

import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from chunkattn import ARDiffusionKVCache
from chunkattn.integrations import vllm_omni as plugin
from tests.helpers.machine import needs_vllm_omni
from tests.helpers.omni import Pairs, Pipeline, bound, make_runner, plugged, spec

TOLERANCE = 2e-5  # rounding of float32 through all layers, and no more


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
