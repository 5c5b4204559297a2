"""On a GPU: the kernels at the shapes of the models, repeats, CUDA graphs, the sanitizer.

Each check is a function of a shape and a device. ``pytest -m gpu`` runs them at true shapes, on a
machine that need not have vLLM but for the sessions; `test_small` runs the same functions small,
through the interpreter where there is no GPU. Run as a script, this file is what the sanitizer
watches.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import chunkattn
from chunkattn import ops
from chunkattn.presets import PRESETS, get_preset
from chunkattn.testing import check_scatter, judge, make_case, make_pools, run_attention
from tests.helpers.fused import check as check_norm_rope
from tests.helpers.fused import make_inputs
from tests.helpers.machine import needs_triton, needs_vllm

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Shape(NamedTuple):
    """Attention of one forward of a model: its window is full."""

    block_size: int
    heads: int
    kv_heads: int
    head_size: int
    frames: int  # visible ones, the span counted in
    span: int
    extra: int  # action and state rows

    @property
    def query_rows(self) -> int:
        return self.span * self.block_size + self.extra


def shape_of(name: str) -> Shape:
    preset = get_preset(name)
    assert preset.window_frames is not None
    return Shape(
        preset.frame_tokens,
        preset.heads,
        preset.kv_heads,
        preset.head_size,
        preset.window_frames + preset.sink_frames,
        preset.frames_per_span,
        preset.action_tokens + preset.state_tokens,
    )


SMALL = Shape(block_size=80, heads=2, kv_heads=1, head_size=16, frames=3, span=1, extra=5)
SMALL_GATHER = SMALL._replace(block_size=24)
MODELS = [name for name in PRESETS if PRESETS[name].window_frames]
DEPLOYED = ("dreamzero_14b", "dreamzero_5b", "lingbot_world_v2")  # 5b: blocks of 50, the gather


# -- checks ----------------------------------------------------------------------------------------
def case_of(shape: Shape, device: str, **more: Any) -> Any:
    """The visible frames in blocks, and the action rows in a block that they do not fill."""
    return make_case(
        seq_lens=[shape.frames * shape.block_size + shape.extra],
        query_lens=[shape.query_rows],
        **({"current_lens": [shape.extra]} if more.pop("current", False) else {}),
        block_size=shape.block_size,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        device=device,
        **more,
    )


def attention(shape: Shape, device: str, judged: int = 256, **more: Any) -> None:
    """All rows are computed, about ``judged`` of them are held to the float64 rule: the scores of
    all would not fit beside the pools.
    """
    case = case_of(shape, device, **more)
    out, lse = run_attention(case, "triton")
    step = shape.query_rows // judged | 1  # odd: it meets every row of a tile
    query = case.query[..., ::step, :, :]
    rows = dataclasses.replace(case, query=query, query_start_loc=None)
    judge(rows, out[::step], lse[::step])
    assert out.isfinite().all()


@contextlib.contextmanager
def no_wait(device: str) -> Iterator[None]:
    """On a GPU it is an error here to wait for it; `test_host_work` looks without one."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def repeats(shape: Shape, device: str, times: int = 100, **more: Any) -> None:
    """The same bits every time: no atomics, and the split depends on shapes only."""
    case = case_of(shape, device, dtype=torch.float16, **more)
    call = functools.partial(
        chunkattn.paged_window_attention, **case.arguments(), return_lse=True, backend="triton"
    )
    out, lse = call()
    for _ in range(times):
        with no_wait(device):
            again, again_lse = call()
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


def scatter(shape: Shape, device: str, dtype: torch.dtype) -> None:
    """Every byte of the pools, whatever lies beside the written slots; some rows are skipped."""
    pools = make_pools(
        shape.span + 2,
        shape.block_size,
        shape.kv_heads,
        shape.head_size,
        dtype=dtype,
        device=device,
    )
    rows = shape.query_rows
    slots = torch.randperm((shape.span + 2) * shape.block_size)[:rows]
    slots[::7] = -1
    key, value = torch.randn(2, rows, shape.kv_heads, shape.head_size).to(device, dtype)
    check_scatter(key, value, pools, slots.to(device), "triton")


def norm_rope(shape: Shape, device: str, dtype: torch.dtype) -> None:
    slots = [*torch.randperm(16).tolist()[:15], -1]
    inputs = make_inputs(
        slots,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=dtype,
        device=device,
    )
    check_norm_rope(inputs, "triton")


def blocks(shape: Shape, device: str, dtype: torch.dtype) -> None:
    """Copies and fills are exact; a blend is rounded once, as torch's."""
    pool = torch.randn(2, 6, shape.block_size, shape.kv_heads, shape.head_size).to(device, dtype)
    source, target = (torch.tensor(ids, device=device) for ids in ([0, 3, 3], [1, 5, 2]))
    calls: list[tuple[Callable[..., None], tuple, float]] = [
        (chunkattn.copy_blocks, (source, target), 0.0),
        (chunkattn.blend_blocks, (source, target, 0.25), torch.finfo(dtype).eps),
        (chunkattn.clear_blocks, (target, -2.0), 0.0),
    ]
    for call, arguments, rounding in calls:
        ours, theirs = pool.clone(), pool.clone()
        call(*ours, *arguments, backend="triton")
        call(*theirs, *arguments, backend="torch")
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)
        assert not torch.equal(ours, pool)
    host = [part.cpu() for part in pool]
    host = [part.pin_memory() for part in host] if device == "cuda" else host
    back = torch.zeros_like(pool)
    chunkattn.swap_blocks(*host, *back, [4, 1], [0, 5], backend="triton")
    assert torch.equal(back[:, [0, 5]], pool[:, [4, 1]])
    assert not back[:, 1:5].any()


def capture(function: Callable[[], None], device: str) -> Callable[[], None]:
    """A replay of what ``function`` launched; on the CPU the function itself, on the tensors that
    it was made with.
    """
    if device != "cuda":
        return function
    function()  # compiled outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def graphs(shape: Shape, device: str, layers: int = 3, spans: int = 4) -> None:
    """H5: one capture of a whole denoise forward serves growth, slide, reset and other sessions'
    blocks; its results are those of eager calls, bit for bit.
    """
    from tests.helpers.rollout import Window, make_config

    dtype = torch.float16
    row_bytes = 2 * layers * shape.kv_heads * shape.head_size * dtype.itemsize
    cache = chunkattn.ARDiffusionKVCache(
        make_config(shape.block_size, Window(shape.frames - 1, 1), gpu_memory_fraction=1.0),
        num_layers=layers,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=dtype,
        block_size=shape.block_size,
        max_model_len=1 << 20,
        available_bytes=4 * (shape.frames + shape.span) * shape.block_size * row_bytes,
        device=torch.device(device),
        local_branches=1,
        num_frame_per_block=shape.span,
        max_scratch_tokens_per_branch=shape.extra,
        backend="triton",
    )
    session, tokens = cache.open_session("a"), shape.span * shape.block_size
    query = torch.zeros(shape.query_rows, shape.heads, shape.head_size, dtype=dtype, device=device)
    key, value = torch.zeros(2, shape.query_rows, shape.kv_heads, shape.head_size).to(query)
    own = (key[:tokens], value[:tokens], key[tokens:], value[tokens:])
    outs = torch.zeros(layers, *query.shape).to(query)
    replay, addresses, seen_lens = None, set(), set()

    def denoise(plan: Any) -> None:
        x = query
        for layer, out in enumerate(outs):
            tensors = (plan.slot_mapping, plan.block_table, plan.seq_lens, plan.query_start_loc)
            pools = cache.table_pools[layer]
            ops.write_attend(x, *own, *pools, *tensors, out, shape.head_size**-0.5, cache.backend)
            x = out

    for step in range(2 * spans):
        if step == spans:
            assert session.adapter().completed_chunks > shape.frames  # it slid
            session.reset()
        for _ in range(2):
            for rows in (query, key, value):
                rows.normal_()
            with session.forward(seq_len=tokens, action_len=shape.extra) as fwd:
                plan = fwd.layer_plan(0)
                if replay is None:
                    replay = capture(functools.partial(denoise, plan), device)
                outs.zero_()
                replay()
                found, x = outs.clone(), query
                for layer in range(layers):
                    x = fwd.write_attend(layer, x, *own)
                    assert torch.equal(found[layer], x)
                tensors = (plan.slot_mapping, plan.block_table, plan.seq_lens, plan.query_start_loc)
                addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
                seen_lens.add(fwd.kv_len)
        with session.forward(seq_len=tokens, commit=True) as fwd:
            for layer in range(layers):
                fwd.write_attend(layer, query[:tokens], *own[:2])
    assert len(addresses) == 1
    assert len(seen_lens) > 1
    cache.check_integrity()


# -- small -----------------------------------------------------------------------------------------
CHECKS: dict[str, Callable[[str], None]] = {
    "walk": lambda device: attention(SMALL, device, judged=40, current=True),
    "gather": lambda device: attention(SMALL_GATHER, device, current=True),
    "segments": lambda device: attention(SMALL, device, judged=40, segment_blocks=[[1]]),
    "fp8": lambda device: attention(SMALL, device, fp8=True),
    "repeats": lambda device: repeats(SMALL, device, times=2),
    "scatter": lambda device: scatter(SMALL, device, torch.float16),
    "norm_rope": lambda device: norm_rope(SMALL, device, torch.float32),
    "blocks": lambda device: blocks(SMALL, device, torch.float16),
    "graphs": lambda device: graphs(SMALL_GATHER._replace(heads=1), device, layers=2),
    "graphs, no action": lambda device: graphs(SMALL_GATHER._replace(extra=0), device, layers=2),
}
needs_fp8 = pytest.mark.skipif(CAPABILITY < (8, 9), reason="no e4m3 below compute capability 8.9")


@needs_triton
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_vllm if n.startswith("graphs") else ()) for n in CHECKS]
)
def test_small(name):
    """The checks below, on whatever there is."""
    if name == "fp8" and (0, 0) < CAPABILITY < (8, 9):
        pytest.skip("no e4m3 below compute capability 8.9")
    CHECKS[name]("cuda" if torch.cuda.is_available() else "cpu")


@needs_triton
@pytest.mark.usefixtures("one_thread")
def test_the_checks_can_fail(monkeypatch):
    """A lost key is found."""
    from chunkattn.kernels import walk

    launch = walk.walk
    monkeypatch.setattr(
        walk, "walk", lambda inputs: launch(inputs._replace(seq_lens=inputs.seq_lens - 1))
    )
    with pytest.raises(AssertionError, match="largest error of out"):
        attention(SMALL, "cuda" if torch.cuda.is_available() else "cpu")


# -- true shapes -----------------------------------------------------------------------------------
@pytest.fixture
def launch(monkeypatch) -> Callable[..., None]:
    """``launch(**options)``: every walk from now on is launched with these."""
    from chunkattn.kernels import walk

    def use(**options: Any) -> None:
        function = functools.partial(walk.walk, **options)
        monkeypatch.setattr(ops, "_attention_kernel", lambda block_size: function)

    return use


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_models(model):
    attention(shape_of(model), "cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", DEPLOYED)
def test_deployed(model, dtype):
    """Every dtype, with rows that are not in the pool; a first frame of few keys as well."""
    shape = shape_of(model)
    attention(shape, "cuda", dtype=dtype, current=bool(shape.extra))
    attention(shape._replace(frames=1, span=1), "cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("model", DEPLOYED)
def test_segments_and_bias(model):
    shape = shape_of(model)
    attention(shape, "cuda", dtype=torch.bfloat16, segment_blocks=[[1, 3]], biased=True)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("model", DEPLOYED)
def test_fp8(model):
    attention(shape_of(model), "cuda", dtype=torch.bfloat16, fp8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", (0, 7, 132, 1000))
@pytest.mark.parametrize("model", ("dreamzero_14b", "lingbot_world_v2"))
def test_split(model, num_programs, launch):
    """Split or not, right and the same bits a hundred times; 25 action rows alone need a split."""
    launch(num_programs=num_programs)
    shape = shape_of(model)
    attention(shape, "cuda", dtype=torch.float16)
    repeats(shape._replace(span=0, extra=25), "cuda")
    repeats(shape, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (9, 0), reason="descriptors are for sm_90 and newer")
@pytest.mark.parametrize("descriptors", (True, False))
@pytest.mark.parametrize("model", ("dreamzero_14b", "lingbot_world_v2"))
def test_descriptors(model, descriptors, launch):
    """TMA and pointers read the same; the pools of these models are read by TMA."""
    from chunkattn.kernels.launch import descriptors_fit

    shape = shape_of(model)
    case = case_of(shape._replace(frames=1, span=1), "cuda", dtype=torch.bfloat16)
    assert descriptors_fit(case.key_pool, case.value_pool)
    launch(descriptors=descriptors)
    for num_programs in (0, 132):
        launch(descriptors=descriptors, num_programs=num_programs)
        attention(shape, "cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("check", (scatter, norm_rope, blocks))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", DEPLOYED)
def test_rows_and_blocks(model, dtype, check):
    check(shape_of(model), "cuda", dtype)


@pytest.mark.gpu
@needs_vllm
@pytest.mark.parametrize("model", DEPLOYED)
def test_graphs(model):
    graphs(shape_of(model), "cuda", spans=8)


@pytest.mark.gpu
@pytest.mark.parametrize("model", DEPLOYED)
def test_compiled(model):
    """Write and attend by the public functions in one graph of inductor, as eager calls do."""
    case = case_of(shape_of(model), "cuda", dtype=torch.bfloat16)
    rows = torch.randn(2, 64, *case.key_pool.shape[2:], device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(64, device="cuda") + case.block_table[0, 0] * case.key_pool.shape[1]

    def call(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        chunkattn.scatter_kv(key, value, case.key_pool, case.value_pool, slots)
        return chunkattn.paged_window_attention(**case.arguments()) + 1

    compiled = torch.compile(call, fullgraph=True)(*rows)
    assert torch.equal(compiled, call(*rows))


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
def test_sanitizer():
    """No access outside of an allocation."""
    root = Path(__file__).parent.parent
    environment = {"PYTHONPATH": str(root), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # CUDA's libraries ask the driver for functions that it may not have.
    options = ["--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9"]
    done = subprocess.run(
        ["compute-sanitizer", *options, sys.executable, __file__],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    for name in ("walk", "gather", "segments", "scatter", "norm_rope", "blocks"):
        CHECKS[name]("cuda")
