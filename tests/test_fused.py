"""`norm_rope_scatter` against vllm-omni's own modules; shapes, strides, dtypes, fp8."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch

import chunkattn
from chunkattn.kernels.reference import norm_rope
from chunkattn.ops import resolve_backend
from chunkattn.testing import LAYOUTS, make_pools, snapshot
from tests.helpers.fused import (
    EPS,
    FLOATS,
    FP8,
    assert_near,
    check,
    make_inputs,
    modules,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ACTIONS, STATES = 6, 1


# -- the model's own modules -----------------------------------------------------------------------
@pytest.fixture
def model(monkeypatch):
    """vllm-omni's module of the transformer, in a tensor-parallel group of one."""
    pytest.importorskip("vllm_omni")
    path = "vllm_omni.diffusion.models.dreamzero.causal_wan_model"
    module = importlib.import_module(path)
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    return module


def model_freqs(model, head_size: int, grid: list[int], start_frame: int):
    """The 3-D table of a span, and the 1-D tables of action and state, as the model makes them."""
    third = 2 * (head_size // 6)
    tables = SimpleNamespace(
        patch_embedding=SimpleNamespace(weight=torch.empty(0)),
        freqs=[model.rope_params(64, d) for d in (head_size - 2 * third, third, third)],
        freqs_action=model.rope_params(256, head_size),
        freqs_state=model.rope_params(64, head_size),
    )
    video = model.CausalWanModel._create_freqs(tables, torch.tensor(grid), start_frame)
    return video, tables.freqs_action, tables.freqs_state


@pytest.mark.parametrize("with_actions", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_model_s_own_modules(target, model, dtype, with_actions):
    """Two frames of 3 x 5 tokens, then action and state tokens, straight from a QKV projection."""
    heads, head_size, index = 5, 128, 3
    video, action, state = model_freqs(model, head_size, [2, 3, 5], 1 + 2 * index)
    extra = ACTIONS + STATES if with_actions else 0
    num_tokens = 30 + extra
    qkv = (3 * torch.randn(1, num_tokens, 3 * heads * head_size)).to(dtype)
    norms = [model.DistributedRMSNorm(heads * head_size, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data += torch.randn(heads * head_size).to(dtype) / 4
    q, k, v = qkv.split(heads * head_size, dim=-1)
    with torch.no_grad():
        want = [
            model.causal_rope_action_apply(
                x.unflatten(2, (heads, head_size)),
                video,
                action,
                state,
                extra or None,
                ACTIONS,
                STATES,
                index,
            ).type_as(v)[0]
            for x in model.fused_qk_rms_norm(*norms, q, k)
        ]

    parts = [video]
    if with_actions:
        parts += [
            action[index * ACTIONS : (index + 1) * ACTIONS],
            state[index * STATES : (index + 1) * STATES],
        ]
    cos, sin = (table.to(target.device) for table in chunkattn.rope_tables(*parts))
    rows = qkv[0].to(target.device).view(num_tokens, 3, heads, head_size).unbind(1)
    key_pool, value_pool, _ = make_pools(5, 15, heads, head_size, dtype=dtype, device=target.device)
    slots = torch.cat([torch.arange(45, 75), torch.arange(15, 15 + extra)]).to(target.device)
    weights = [norm.weight.data.to(target.device) for norm in norms]
    query = chunkattn.norm_rope_scatter(
        *rows, *weights, cos, sin, key_pool, value_pool, slots, eps=1e-6, backend=target.backend
    )
    assert_near(query.cpu(), want[0])
    assert_near(key_pool.flatten(0, 1)[slots].cpu(), want[1])
    assert torch.equal(value_pool.flatten(0, 1)[slots], rows[2])
    # The yardstick of the other tests is the model too.
    table = torch.cat([part.reshape(-1, head_size // 2) for part in parts])
    for x, norm, theirs in zip((q, k), norms, want, strict=True):
        ours = modules(x[0].unflatten(1, (heads, head_size)), norm.weight.data, table, 1e-6)
        assert torch.equal(ours, theirs)


def test_ranks_of_the_model(target, model, monkeypatch):
    """Two ranks with two heads each, as the model norms them."""
    inputs = make_inputs(heads=4, head_size=16, device=target.device)
    query, key = (inputs.arguments[name].cpu() for name in ("query", "key"))
    weights = [inputs.arguments[f"{name}_weight"].cpu() for name in ("query", "key")]
    total = chunkattn.qk_sum_squares(query, key)
    monkeypatch.setattr(model, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(model, "tensor_model_parallel_all_reduce", lambda _: total[None])
    inputs.arguments |= {"cos": None, "sin": None}
    for rank in (0, 1):
        share, columns = slice(2 * rank, 2 * rank + 2), slice(32 * rank, 32 * rank + 32)
        norms = [model.DistributedRMSNorm(32, eps=EPS) for _ in range(2)]
        for norm, weight in zip(norms, weights, strict=True):
            norm.weight.data = weight[columns]
        rows = (x[:, share].flatten(1)[None] for x in (query, key))
        with torch.no_grad():
            want = model.fused_qk_rms_norm(*norms, *rows)
        got, got_key = rank_s_share(inputs, share, columns, total, target.backend)
        assert_near(got.cpu(), want[0][0].view(-1, 2, 16))
        written = inputs.arguments["slot_mapping"].cpu() >= 0
        assert_near(got_key.cpu(), want[1][0].view(-1, 2, 16)[written])


def rank_s_share(inputs, heads, columns, total, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and the written K of a rank that holds these heads; the pool has the others' places."""
    arguments = dict(inputs.arguments)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name][:, heads]
    for name in ("query_weight", "key_weight"):
        arguments[name] = arguments[name][columns]
    for name in ("key_pool", "value_pool"):
        arguments[name] = arguments[name][:, :, heads]
    total = total.to(arguments["query"].device)
    query = chunkattn.norm_rope_scatter(**arguments, sum_squares=total, tp_size=2, backend=backend)
    slots = arguments["slot_mapping"]
    return query, arguments["key_pool"].flatten(0, 1)[slots[slots >= 0]]


def test_two_ranks_make_what_one_makes(target):
    """Half of the heads each, with the sums of both, into the halves of one pool."""
    inputs = make_inputs(heads=4, head_size=16, device=target.device)
    arguments = inputs.arguments
    one = chunkattn.norm_rope_scatter(**arguments, backend=target.backend)
    slots = arguments["slot_mapping"]
    one_key = arguments["key_pool"].flatten(0, 1)[slots[slots >= 0]]
    halves = [
        [arguments[name][:, first : first + 2] for name in ("query", "key")] for first in (0, 2)
    ]
    total = sum(chunkattn.qk_sum_squares(*half) for half in halves)
    for pool in (arguments["key_pool"], arguments["value_pool"]):
        pool.fill_(math.nan)
    shares = [
        rank_s_share(inputs, slice(f, f + 2), slice(16 * f, 16 * f + 32), total, target.backend)
        for f in (0, 2)
    ]
    assert_near(torch.cat([query for query, _ in shares], 1), one)
    assert_near(torch.cat([key for _, key in shares], 1), one_key)


# -- shapes, strides, dtypes -----------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_size", (8, 24, 80, 128))
def test_head_sizes(target, dtype, head_size):
    check(make_inputs(dtype=dtype, head_size=head_size, device=target.device), target.backend)


@pytest.mark.parametrize("heads", ((1, 1), (5, 5), (6, 2), (40, 40)))
def test_numbers_of_heads(target, heads):
    inputs = make_inputs((3, -1, 8), heads=heads[0], kv_heads=heads[1], device=target.device)
    check(inputs, target.backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", (False, True))
def test_strided_rows_and_pools(target, layout, padded):
    heads = 1 if layout == "odd" else 3
    inputs = make_inputs(
        heads=heads, layout=layout, padded=padded, device=target.device, index_dtype=torch.int32
    )
    check(inputs, target.backend)


def test_strided_tables_and_slots(target):
    inputs = make_inputs(device=target.device)
    arguments = inputs.arguments
    for name in ("cos", "sin"):
        wide = torch.full((len(arguments[name]), 100), math.nan, device=target.device)
        arguments[name] = wide[:, 7:19].copy_(arguments[name])
    arguments["slot_mapping"] = arguments["slot_mapping"].repeat_interleave(2)[::2]
    check(inputs, target.backend)


def test_one_angle_for_all_tokens(target):
    inputs = make_inputs(device=target.device)
    inputs.freqs = inputs.freqs[:1].expand_as(inputs.freqs)
    for name, table in zip(("cos", "sin"), chunkattn.rope_tables(inputs.freqs[:1]), strict=True):
        inputs.arguments[name] = table.expand(len(inputs.freqs), -1)
    check(inputs, target.backend)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_another_dtype(target, dtype, weight_dtype):
    """torch's promotion: bf16 rows times float32 weights are not rounded before the rotation."""
    inputs = make_inputs(dtype=dtype, weight_dtype=weight_dtype, device=target.device)
    check(inputs, target.backend)


@pytest.mark.parametrize("pool_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_pools_of_another_dtype(target, dtype, pool_dtype):
    """E9: rows are rounded to their own dtype, then to the pool's."""
    inputs = make_inputs(dtype=dtype, pool_dtype=pool_dtype, device=target.device)
    inputs.arguments |= {"key_weight": None, "cos": None, "sin": None}
    check(inputs, target.backend)
    inputs = make_inputs(dtype=dtype, pool_dtype=pool_dtype, device=target.device)
    chunkattn.norm_rope_scatter(**inputs.arguments, backend=target.backend)
    same = make_inputs(dtype=dtype, device=target.device)
    same.arguments |= {k: v for k, v in inputs.arguments.items() if "_pool" not in k}
    chunkattn.norm_rope_scatter(**same.arguments, backend=target.backend)
    for name in ("key_pool", "value_pool"):
        rounded = same.arguments[name].to(pool_dtype)
        assert torch.equal(inputs.arguments[name].nan_to_num(), rounded.nan_to_num())


@pytest.mark.parametrize(
    "without", ("query_weight", "key_weight", "rotation", "key rotation", "all")
)
def test_parts_left_out(target, without):
    inputs = make_inputs(device=target.device)
    options = {
        "query_weight": {"query_weight": None},
        "key_weight": {"key_weight": None},
        "rotation": {"cos": None, "sin": None},
        "key rotation": {"rotate_key": False},
        "all": {"query_weight": None, "key_weight": None, "cos": None, "sin": None},
    }[without]
    check(inputs, target.backend, **options)


def test_skipped_and_no_rows(target):
    """A7, A8: slots below 0 change no byte of the pools, but their queries are made."""
    check(make_inputs([-1, -5, -1], device=target.device), target.backend)
    check(make_inputs([], device=target.device), target.backend)


def test_out_is_made_where_none_is_given(target):
    inputs = make_inputs(device=target.device, padded=True)
    query = inputs.arguments["query"]
    before = snapshot(query)
    out = chunkattn.norm_rope_scatter(**inputs.arguments, backend=target.backend)
    assert out.is_contiguous()
    assert_near(out, modules(query, inputs.arguments["query_weight"], inputs.freqs))
    assert torch.equal(snapshot(query), before)


def test_float64_oracle(target):
    """In float32 within its rounding; in 16 bits no further off than the model's own steps are."""
    for dtype in FLOATS:
        inputs = make_inputs(dtype=dtype, head_size=64, device=target.device)
        arguments = inputs.arguments
        names = ("query", "query_weight", "cos", "sin")
        exact = norm_rope(*(arguments[name] for name in names), eps=EPS)
        out = chunkattn.norm_rope_scatter(**arguments, backend=target.backend)
        error = (out.double() - exact).abs()
        if dtype == torch.float32:
            assert error.max() < 2e-6
        else:
            theirs = modules(arguments["query"], arguments["query_weight"], inputs.freqs)
            their_error = (theirs.double() - exact).abs()
            assert error.max() <= 2 * their_error.max() + 1e-5
            assert error.mean() <= 1.01 * their_error.mean()


def test_nan_of_one_token_stays_there(target):
    inputs = make_inputs(device=target.device)
    inputs.arguments["query"][3, 0, 0] = math.nan
    out = chunkattn.norm_rope_scatter(**inputs.arguments, backend=target.backend)
    assert out[3].isnan().all()
    assert out.isnan().sum() == out[3].numel()


# -- fp8 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8(target, dtype):
    """E4: one step; scales are numbers or tables of block and head, and differ for K and V."""
    for layout in ("separate", "slots"):
        inputs = make_inputs(dtype=dtype, pool_dtype=FP8, device=target.device, layout=layout)
        check(inputs, target.backend)
        check(inputs, target.backend, key_scale=0.5, value_scale=2.0)
        # A table is read where a block is written, whatever its strides.
        tables = torch.rand(2, 3, 4, device=target.device) + 0.5
        tables[:, :, 3] = tables[:, :, 3] / 200  # the rows of block 3 are clamped
        key_scale, value_scale = tables.transpose(1, 2)
        check(inputs, target.backend, key_scale=key_scale, value_scale=value_scale)
        check(inputs, target.backend, value_scale=3.0)
        # As `scatter_kv` takes it: one for all rows, on the device.
        check(inputs, target.backend, key_scale=torch.full((1,), 0.5, device=target.device))


def test_scales_of_blocks_not_written(target):
    inputs = make_inputs([1, -1, 2, -9], pool_dtype=FP8, device=target.device)
    scale = torch.full((4, 3), math.nan, device=target.device)
    scale[0] = 0.5
    check(inputs, target.backend, key_scale=scale, value_scale=scale)


def test_fp8_saturates(target):
    """E3: 448 for what e4m3 does not hold, infinities too; NaN stays NaN, -0.0 keeps its sign."""
    special = [448, 449, 464, 1000, math.inf, -0.0, -448, -449, -1e30, -math.inf, math.nan, 0]
    want = [448, 448, 448, 448, 448, -0.0, -448, -448, -448, -448, math.nan, 0.0]
    row = torch.tensor(special, device=target.device).view(1, 1, 12)
    pools = make_pools(1, 2, 1, 12, dtype=FP8, device=target.device)[:2]
    slots = torch.tensor([1], device=target.device)
    for scale in (None, 2.0):
        rows = row * (scale or 1)
        chunkattn.norm_rope_scatter(
            *(rows,) * 3, *(None,) * 4, *pools, slots, key_scale=scale, value_scale=scale,
            backend=target.backend,
        )  # fmt: skip
        for pool in pools:
            stored = pool[0, 1, 0].float().cpu()
            torch.testing.assert_close(stored, torch.tensor(want), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(stored.signbit()[5:6], torch.tensor([True]))


def test_oldest_gpus(monkeypatch):
    """E3: Triton has no e4m3 below; the name of the argument and the capability are said."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(NotImplementedError, match=r"`key_pool` must .*8\.9, got .*\(8, 6\)"):
        resolve_backend("triton", torch.device("cuda"), 128, FP8)
    assert resolve_backend("triton", torch.device("cuda"), 128, torch.bfloat16) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(NotImplementedError, match=r"`backend` must .*8\.0, got .*\(7, 5\)"):
        resolve_backend("auto", torch.device("cuda"), 128, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert resolve_backend("triton", torch.device("cuda"), 128, FP8) == "triton"
