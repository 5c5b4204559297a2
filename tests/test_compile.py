"""torch.compile: what it knows of the ops, what it makes of the pools, how often it compiles."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import get_code

import chunkattn
from chunkattn import block_ops, fused, ops
from chunkattn.testing import make_case, make_pools
from tests.helpers import processes
from tests.helpers.fused import make_inputs
from tests.helpers.machine import needs_vllm_omni
from tests.helpers.rollout import HEAD_SIZE, Window, make_cache

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 4
LIBRARIES = (ops, block_ops, fused)  # importing these defines the ops
OPS = torch.ops.chunkattn


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


# -- what torch knows of the ops -------------------------------------------------------------------
def write_attend_arguments() -> tuple:
    """A block of old rows, then two new ones and two extra ones."""
    query, rows = torch.randn(4, 2, 8), torch.randn(2, 4, 1, 8)
    key_pool, value_pool, _ = make_pools(5, 4, 1, 8, dtype=torch.float32, poison=0.5)
    plan = [torch.tensor(x, dtype=torch.int32) for x in ([4, 5, 8, 9], [[3, 1, 2]], [12], [0, 4])]
    new = (*rows[:, :2], *rows[:, 2:])
    return (query, *new, key_pool, value_pool, *plan, torch.zeros(4, 2, 8), 0.25, "torch")


def attention_arguments() -> tuple:
    case = make_case(seq_lens=[33, 6], query_lens=[5, 2], current_lens=[1, 2])
    *arguments, _ = case.arguments().values()
    return (*arguments, torch.zeros_like(case.query), torch.zeros(7, 2), 0.25, "torch")


def fused_arguments() -> tuple:
    inputs = make_inputs(dtype=torch.float32).arguments
    query, key, value, *tables, key_pool, value_pool, slots, eps = inputs.values()
    sums = chunkattn.qk_sum_squares(query, key)
    out = torch.zeros_like(query)
    pools = (key_pool, value_pool, slots, None, None)
    return (query, key, value, *tables, sums, out, *pools, eps, 1, True, "torch")


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(2, 3, 2, 1, 8))


ONE, TWO, FOUR = torch.tensor([1]), torch.tensor([2]), torch.arange(4)
ARGUMENTS: dict[str, Callable[[], tuple]] = {
    "scatter_kv": lambda: (*torch.randn(2, 4, 1, 8), *pools(), FOUR, None, None, "torch"),
    "paged_window_attention": attention_arguments,
    "write_attend": write_attend_arguments,
    "norm_rope_scatter": fused_arguments,
    "copy_blocks": lambda: (*pools(), ONE, TWO, "torch"),
    "swap_blocks": lambda: (*pools(), *pools(), ONE, TWO, "torch"),
    "blend_blocks": lambda: (*pools(), ONE, TWO, 0.5, "torch"),
    "clear_blocks": lambda: (*pools(), ONE, 1.0, "torch"),
}
MUTATED = {
    "scatter_kv": {"key_pool", "value_pool", "key_scale", "value_scale"},
    "paged_window_attention": {"out", "lse"},
    "write_attend": {"key_pool", "value_pool", "out", "key_scale", "value_scale"},
    "norm_rope_scatter": {"query_out", "key_pool", "value_pool"},
    "copy_blocks": {"key_pool", "value_pool"},
    "swap_blocks": {"target_key", "target_value"},
    "blend_blocks": {"key_pool", "value_pool"},
    "clear_blocks": {"key_pool", "value_pool"},
}


def test_schemas_declare_every_mutated_tensor():
    """And return nothing: a result would be a copy. No op is missing from the tables above."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("chunkattn::")]
    declared = {
        schema.name.removeprefix("chunkattn::"): {
            a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write
        }
        for schema in schemas
    }
    assert declared == MUTATED
    assert {*ARGUMENTS} == {*MUTATED}
    assert not any(schema.returns for schema in schemas)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name):
    """Schema, fake kernel, autograd's registration, and the op after functionalization."""
    torch.library.opcheck(getattr(OPS, name).default, ARGUMENTS[name]())


# -- the public functions in one graph -------------------------------------------------------------
def attention_call() -> tuple:
    case = make_case(seq_lens=[33, 6], query_lens=[5, 2], current_lens=[1, 2])
    return chunkattn.paged_window_attention, case.arguments() | {"return_lse": True}


def fp8_call() -> tuple:
    case = make_case(seq_lens=[33], query_lens=[5], fp8=True, biased=True, segment_blocks=[[1]])
    return chunkattn.paged_window_attention, case.arguments()


def named(function: Callable, *names: str) -> Callable[[], tuple]:
    """A call of ``function`` with the arguments of its op, those that have these names."""
    values = ARGUMENTS[function.__name__]()
    return lambda: (function, dict(zip(names, values, strict=False)))


PAIR = ("key_pool", "value_pool", "source_block_ids", "target_block_ids")
CALLS: dict[str, Callable[[], tuple]] = {
    "paged_window_attention": attention_call,
    "fp8 segments bias": fp8_call,
    "norm_rope_scatter": lambda: (chunkattn.norm_rope_scatter, make_inputs().arguments),
    "merge_states": lambda: (
        chunkattn.merge_states,
        {"outs": torch.randn(2, 3, 4, 8), "lses": torch.randn(2, 3, 4)},
    ),
    "scatter_kv": named(
        chunkattn.scatter_kv, "key", "value", "key_pool", "value_pool", "slot_mapping"
    ),
    "copy_blocks": named(chunkattn.copy_blocks, *PAIR),
    "blend_blocks": named(chunkattn.blend_blocks, *PAIR, "weight"),
    "clear_blocks": named(chunkattn.clear_blocks, "key_pool", "value_pool", "block_ids", "value"),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_trace(name):
    """``fullgraph=True``: results and all that a call changes are those of an eager call."""
    function, arguments = CALLS[name]()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        copies = {n: a.clone() if torch.is_tensor(a) else a for n, a in arguments.items()}
        returned = call(**copies)
        returned = returned if isinstance(returned, tuple) else (returned,)
        results.append([x for x in (*returned, *copies.values()) if torch.is_tensor(x)])
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.equal(eager.float().nan_to_num(), compiled.float().nan_to_num())


def test_refused_while_tracing():
    """Shapes and dtypes are checked in a traced call too, and named in the error."""
    _, arguments = attention_call()
    arguments["query"] = arguments["query"][..., :8]
    compiled = torch.compile(chunkattn.paged_window_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"`query` must have shape \(7, 2, 16\)"):
        compiled(**arguments)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_the_choice_of_a_backend_traces(monkeypatch):
    """That of a GPU as well, where the capability of the device is asked for."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(
        torch.cuda, "_get_device_properties", lambda device: properties, raising=False
    )
    chosen = []

    def call(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        chosen.append(ops.resolve_backend("auto", device, 128, torch.float8_e4m3fn, 64, x.shape[0]))
        return x + 1

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for device, name in (("cuda:0", "triton"), ("cpu", "torch")):
        compiled(torch.zeros(5), torch.device(device))
        assert chosen.pop() == name


# -- the pools in the generated code ---------------------------------------------------------------
UNCACHED = {"force_disable_caches": True, "cpp.simdlen": 1}  # nor asks g++ what the CPU can do


def largest_buffer(function: Callable, *arguments: Any) -> int:
    """Elements of the largest buffer that inductor's code for this call allocates."""
    torch._dynamo.reset()
    # The cache on disk does not tell inputs that share their storage from others.
    with torch._inductor.config.patch(**UNCACHED):
        codes = get_code(torch.compile(function, fullgraph=True), *arguments)
    shapes = re.findall(r"= empty_strided_\w+\(\(([\d, ]+)\)", "".join(codes))
    assert shapes, "no buffer at all: not even `out` was found"
    return max(math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes)


def test_no_copy_of_a_pool():
    """H1: a compiled forward of two layers allocates `out`, and nothing as large as a pool."""
    cache = make_cache(layers=2, usable=50)
    session = cache.open_session("a")

    def model(fwd, query, key, value):
        for layer in range(2):
            query = fwd.write_attend(layer, query, key, value)
        return query

    with session.forward(seq_len=4) as fwd:
        rows = torch.randn(3, 4, 1, HEAD_SIZE)
        assert largest_buffer(model, fwd, *rows) == rows[0].numel()


def test_a_copy_of_a_pool_is_found():
    """What the test above would find: K and V as views of one storage are copied in each call."""
    arguments = list(write_attend_arguments())
    both = torch.randn(2, 5, 4, 1, 8)

    def layer(key_pool, value_pool):
        out = torch.empty(4, 2, 8)
        ops.write_attend(*arguments[:5], key_pool, value_pool, *arguments[7:11], out, 0.25, "torch")
        return out

    assert largest_buffer(layer, *both.unbind()) == both.numel()


# -- order, and how often it compiles --------------------------------------------------------------
def test_read_write_read():
    """H2: in one graph a read sees the writes before it, and none of those behind it."""
    arguments = list(write_attend_arguments())
    key_pool, value_pool, slots, *table = arguments[5:11]

    def attend(query):
        return chunkattn.paged_window_attention(
            query, key_pool, value_pool, *table[:2], backend="torch"
        )

    def function(query, key, value):
        first = attend(query)
        chunkattn.scatter_kv(key, value, key_pool, value_pool, slots)
        second = attend(query)
        chunkattn.scatter_kv(value, key, key_pool, value_pool, slots)
        return first, second, attend(query)

    before = key_pool.clone(), value_pool.clone()
    rows = arguments[0], *torch.randn(2, 4, 1, 8)
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="inductor")):
        key_pool.copy_(before[0])
        value_pool.copy_(before[1])
        results.append((*call(*rows), key_pool.clone(), value_pool.clone()))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=0)
    assert not any(torch.equal(a, b) for a, b in zip(results[1][:2], results[1][1:3], strict=True))


def rollout(session: chunkattn.Session, call: Callable, sizes: list[int], action: int) -> list:
    """Spans of ``sizes`` chunks, each denoised twice and committed; outputs of all forwards."""
    generator, outs = torch.Generator().manual_seed(0), []
    for chunks in sizes:
        for commit in (False, False, True):
            extra, tokens = 0 if commit else action, 4 * chunks
            rows = torch.randn(3, tokens + extra, 1, HEAD_SIZE, generator=generator)
            with session.forward(seq_len=tokens, commit=commit, action_len=extra) as fwd:
                query, key, value = rows
                own = (key[tokens:], value[tokens:]) if extra else (None, None)
                outs.append(call(fwd, query.clone(), key[:tokens], value[:tokens], *own))
    return outs


def whole_model(fwd, query, *rows):
    for layer in range(LAYERS):
        query = torch.tanh(fwd.write_attend(layer, query, *rows))
    return query


def block(query, rows, key_pool, value_pool, slots, table, seq_lens, query_start_loc):
    out = torch.empty_like(query)
    plan = (slots, table, seq_lens, query_start_loc)
    ops.write_attend(query, *rows, key_pool, value_pool, *plan, out, 0.5, "torch")
    return torch.tanh(out)


def block_by_block(compiled: Callable) -> Callable:
    """One graph for the blocks of all layers: the layer's pools and plan are its inputs."""

    def model(fwd, query, *rows):
        for layer in range(LAYERS):
            plan = fwd.layer_plan(layer)
            tensors = (plan.slot_mapping, plan.block_table, plan.seq_lens, plan.query_start_loc)
            query = compiled(query, rows, *fwd.session.cache.table_pools[layer], *tensors)
            fwd.mark_layer_written(layer)
        return query

    return model


@pytest.mark.parametrize("sizes, action", [([1] + [2] * 7, 0), ([2] * 8, 2)])
@pytest.mark.parametrize("road", (whole_model, block_by_block))
def test_compilations(road, sizes, action):
    """H8: 4 layers, 8 spans that grow, slide and start anew: one compilation, and one more where
    the first span is shorter, or where denoise forwards have action rows.
    """
    counter = CompileCounterWithBackend("aot_eager")
    function = whole_model if road is whole_model else block
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    results = []
    for call in (function, compiled):
        policy = Window(sink=1, window=4)
        cache = make_cache(policy=policy, span=2, layers=LAYERS, max_scratch_tokens_per_branch=4)
        session = cache.open_session("a")
        call = call if road is whole_model else block_by_block(call)
        outs = rollout(session, call, sizes, action)
        assert session.adapter().completed_chunks > policy.sink + policy.window  # it slid
        session.reset()
        results.append(outs + rollout(session, call, sizes[:2], action))
    for eager, seen in zip(*results, strict=True):
        assert torch.equal(eager, seen)
    assert counter.frame_count == 2


def test_compiled_commit_needs_every_layer():
    """A traced `write_attend` marks its layer as an eager one does."""
    session = make_cache(layers=LAYERS).open_session("a")

    def half(fwd, query, key, value):
        return fwd.write_attend(0, query, key, value)

    compiled = torch.compile(half, backend="eager", fullgraph=True)
    with (
        pytest.raises(chunkattn.LifecycleError, match=r"got none for layers \[1, 2, 3\]"),
        session.forward(seq_len=4, commit=True) as fwd,
    ):
        compiled(fwd, *torch.randn(3, 4, 1, HEAD_SIZE))


def test_sessions_that_take_turns():
    """They share scratch, which a lock orders, and no graph can hold it: it breaks there. Without
    scratch there is no lock.
    """
    results = []
    for call in (whole_model, torch.compile(whole_model, backend="eager")):
        session = make_cache(layers=LAYERS, session_capacity=2).open_session("a")
        results.append(rollout(session, call, [1], 0))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    torch._dynamo.reset()
    session = make_cache(layers=LAYERS, session_capacity=2).open_session("a")
    whole = torch.compile(whole_model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="lock"):
        rollout(session, whole, [1], 0)
    more = {"scratch": False, "memory_budget_bytes": 1 << 20}
    results = []
    for call in (whole_model, whole):
        session = make_cache(layers=LAYERS, session_capacity=2, **more).open_session("a")
        results.append(rollout(session, call, [1], 0))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_pools_are_static_inputs():
    """CUDA graphs need no copy of them; no guard on the address, which would be one compilation
    a layer.
    """
    cache = make_cache(layers=2)
    for pool in (*map(cache.flat_key_pool, range(2)), *map(cache.flat_value_pool, range(2))):
        assert pool._dynamo_static_input_type == "unguarded"
        assert pool._base is None


# -- the real model --------------------------------------------------------------------------------


def dreamzero(rank: int) -> tuple[float, float, int]:
    from tests.helpers.dreamzero import compile_blocks

    return compile_blocks()


@pytest.mark.slow
@needs_vllm_omni
def test_dreamzero_blocks(tmp_path):
    """Each block of vllm-omni's transformer is one graph. Compilations are for the kinds of
    forwards (first frame, denoise, commit) and for the first layer's strides, not for a plan.
    """
    [(difference, largest, graphs)] = processes.run(dreamzero, tmp_path, processes=1)
    assert difference < 2e-5
    assert 1 < largest < 100
    assert graphs <= 4
