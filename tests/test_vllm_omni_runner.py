"""Sessions of vllm-omni's real runner on our cache: `full`, under a small pipeline."""

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from chunkattn import ARDiffusionKVCache, LifecycleError, PoolExhaustedError, StaleContextError
from chunkattn.sizing import SCRATCH_ENV
from tests.helpers.machine import needs_vllm_omni
from tests.helpers.omni import (
    Pairs,
    Pipeline,
    both,
    bound,
    forward,
    make_runner,
    plugged,
    spec,
)


@pytest.fixture
def full() -> Iterator[None]:
    with plugged("full"), torch.no_grad():
        yield


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
    monkeypatch.setenv(SCRATCH_ENV, "9")
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
@pytest.mark.parametrize(
    ("scratch_blocks", "scratch_tokens"), [(None, 6), (None, 0), ("0", 0), ("0", 6), ("5", 6)]
)
def test_memory_is_shared_out_as_vllm_omni_does(monkeypatch, scratch_blocks, scratch_tokens):
    monkeypatch.delenv(SCRATCH_ENV, raising=False)
    if scratch_blocks is not None:
        monkeypatch.setenv(SCRATCH_ENV, scratch_blocks)
    found = {}
    for mode in ("off", "full"):
        with plugged(mode):
            found[mode] = []
            for kilobytes in range(20, 80, 3):
                asked = spec(
                    session_capacity=4,
                    model_owned_state_bytes_per_session=1000,
                    max_scratch_tokens_per_branch=scratch_tokens,
                )
                try:
                    cache = make_runner(Pipeline(asked), available_bytes=1000 * kilobytes).kv_cache
                except ValueError:
                    found[mode].append(None)
                else:
                    found[mode].append(
                        (
                            cache.session_capacity,
                            cache.num_blocks,
                            cache.scratch_blocks_per_kv_branch,
                        )
                    )
    assert found["full"] == found["off"]
    assert found["full"][0] is None
    assert {capacity for capacity, *_ in filter(None, found["full"])} == {1, 2, 3, 4}


@needs_vllm_omni
def test_a_failed_forward_can_be_tried_again(full):
    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        with pytest.raises(ValueError, match="`action_len` must be at most 16"):
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
@pytest.mark.parametrize("mode", ("kernels", "full"))
def test_a_reset_opens_a_closed_state_again(mode):
    """As vllm-omni's own state does; ours refuses where that would be one session too many."""
    with plugged(mode), torch.no_grad():
        pipeline = Pipeline(spec())
        runner = make_runner(pipeline)
        unused = runner.kv_cache.num_free_blocks if mode == "full" else None
        with bound(runner, "a"):
            state = pipeline.state
            first = forward(state)
            forward(state, seed=1)
        runner.close_session("a")
        for keep in ((), ("text",)):
            state.reset(keep_cross_attention=keep)
            assert state.adapter("positive").completed_chunks == 0
            assert torch.equal(forward(state), first)
            if mode == "full":
                runner.kv_cache.check_integrity()
            state.close()
        if mode == "full":
            assert runner.kv_cache.num_free_blocks == unused
            with bound(runner, "a"), pytest.raises(LifecycleError, match="`session_id` must"):
                state.reset()
            for session_id in ("b", "c"):  # which closes a
                with bound(runner, session_id):
                    pass
            with pytest.raises(PoolExhaustedError, match="`session_capacity` is 2"):
                state.reset()


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
        state.populate_cross_attention("positive", "text", layers(1.0))
    runner.close_session("a")
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


@pytest.mark.slow
@needs_vllm_omni
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_compiled_layers_count_as_written(full):
    """One graph for growth and slide; the compiled code calls the op with the cache's own pools."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import paged_write_attn

    def layers(caches: list[Any], out: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            out = paged_write_attn(cache, 2 * out, out, out, None, None, 0.3)
        return out

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layers, backend=counter, fullgraph=True)
    pipeline = Pipeline(spec())
    with bound(make_runner(pipeline), "a"):
        state = pipeline.state
        for index in range(5):
            rows, outputs = torch.randn(8, 2, 8), []
            for run, commit in ((layers, False), (compiled, True)):
                caches = state.get_kv_caches("positive", 8, commit)
                caches[0].forward_ctx.prepare(torch.device("cpu"), 0, 8)
                outputs.append(run([cache.to_layer_inputs() for cache in caches], rows))
            state.commit_paged_context("positive")
            torch.testing.assert_close(*outputs)
            assert state.adapter("positive").completed_chunks == 2 * (index + 1)
    assert counter.frame_count == 1
