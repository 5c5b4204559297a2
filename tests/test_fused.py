"""`norm_rope_scatter`: against vllm-omni's own modules, and byte by byte where it must not write."""

import importlib
import importlib.util
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import chunkattn
from chunkattn import fused
from chunkattn.kernels.reference import norm_rope
from chunkattn.testing import LAYOUTS, make_pools, make_rows, snapshot

pytestmark = pytest.mark.usefixtures("one_thread", "_e4m3")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LOW = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
EPS = 0.05  # large enough to be seen
ACTIONS, STATES = 6, 1
KERNELS = Path(__file__).resolve().parent.parent / "kernels"
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture
def _e4m3(monkeypatch):
    """The interpreter loses the carry of a rounding to e4m3, and NaN; this casts as torch does."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.create_fp_to_fp

    def to_e4m3(builder, source, target, rounding):
        if target.scalar != interpreter.tl.float8e4nv:
            return cast(builder, source, target, rounding)
        assert source.dtype.scalar == interpreter.tl.float32
        codes = torch.tensor(source.data).to(FP8).view(torch.uint8).numpy()
        return interpreter.TensorHandle(codes, target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", to_e4m3)


# -- what it is judged by --------------------------------------------------------------------------
def rope_params(rows: int, dim: int) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(rows).double(), 10000 ** -(torch.arange(0, dim, 2).double() / dim)
    )
    return torch.polar(torch.ones_like(angles), angles)


def modules(x, weight, freqs, eps=EPS):
    """The model's RMSNorm and rotation, with its roundings; ``freqs`` complex128."""
    rows, heads, _ = x.shape
    if weight is not None:
        x_float = x.flatten(1).float()
        mean = x_float.pow(2).sum(-1, keepdim=True) / x_float.shape[1]
        normed = (x_float * torch.rsqrt(mean + eps)).type_as(x) * weight
        normed = normed.view(rows, heads, -1)
    else:
        normed = x
    if freqs is not None:
        pairs = torch.view_as_complex(normed.double().reshape(rows, heads, -1, 2))
        normed = torch.view_as_real(pairs * freqs.unsqueeze(1)).flatten(2)
    return normed.type_as(x)


def steps(x: torch.Tensor) -> torch.Tensor:
    """Places of 16-bit or 8-bit floats among all of their dtype; both zeros have the same."""
    kind, bits = (torch.int16, 15) if x.element_size() == 2 else (torch.int8, 7)
    codes = x.contiguous().view(kind).int()
    return torch.where(codes < 0, -(codes + 2**bits), codes)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same roundings: one step off on few elements, where float32 fell on another side."""
    assert got.dtype == want.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
        return
    assert not got.float().isnan().any()
    off = (steps(got) - steps(want)).abs().cpu()
    assert np.quantile(off, 0.999) <= 1, f"{(off > 1).sum()} of {off.numel()} elements are off"
    assert (off == 0).float().mean() > 0.99, f"{(off > 0).sum()} of {off.numel()} are off a step"


def quantised(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


# -- inputs ----------------------------------------------------------------------------------------
def make_inputs(
    slots=(4, 9, -1, 10, 2, 0, 7, 15),
    *,
    heads: int = 3,
    kv_heads: int | None = None,
    head_size: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    pool_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "separate",
    padded: bool = False,
    index_dtype: torch.dtype = torch.int64,
) -> SimpleNamespace:
    """Arguments by name, the complex angles, and the buffers of the pools, all but 0 poisoned."""
    kv_heads, num_tokens = kv_heads or heads, len(slots)
    rows = {}
    for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
        rows[name] = make_rows(
            num_tokens, count, head_size, dtype=dtype, device=device, padded=padded
        )
        rows[name].copy_(torch.randn(num_tokens, count, head_size))
    freqs = rope_params(997, head_size)[torch.randint(997, (num_tokens,))].to(device)
    cos, sin = fused.rope_tables(freqs)
    weights = [
        (1 + torch.randn(count * head_size) / 4).to(device, weight_dtype or dtype)
        for count in (heads, kv_heads)
    ]
    key_pool, value_pool, buffers = make_pools(
        4, 4, kv_heads, head_size, dtype=pool_dtype or dtype, device=device, layout=layout
    )
    arguments = {
        **rows,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "cos": cos,
        "sin": sin,
        "key_pool": key_pool,
        "value_pool": value_pool,
        # Neighbours in memory are valid slots: reading too far would write there.
        "slot_mapping": torch.tensor([1, *slots, 3], dtype=index_dtype, device=device)[1:-1],
        "eps": EPS,
    }
    return SimpleNamespace(arguments=arguments, freqs=freqs, buffers=buffers)


def check(inputs: SimpleNamespace, backend: str, **options) -> None:
    """Call, compare Q and the written rows with `modules`, and every other byte with before."""
    arguments = inputs.arguments | options
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    freqs = inputs.freqs if arguments["cos"] is not None else None
    want = modules(query, arguments["query_weight"], freqs)
    raw = not arguments.get("rotate_key", True)
    want_key = modules(key, arguments["key_weight"], None if raw else freqs)
    before = [buffer.view(torch.uint8).clone() for buffer in inputs.buffers]
    out = make_rows(*query.shape, dtype=query.dtype, device=str(query.device), padded=True)
    got = chunkattn.norm_rope_scatter(**arguments, query_out=out, backend=backend)
    assert got is out
    assert_near(out, want)
    whole = torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
    whole = whole.clone()
    whole.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(math.nan)
    assert whole.isnan().all(), "something was written beside `query_out`"

    slots = arguments["slot_mapping"]
    for name, rows in (("key", want_key), ("value", value)):
        pool, scale = arguments[f"{name}_pool"], arguments.get(f"{name}_scale")
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, pool.shape[1])
            row = rows[token]
            if pool.dtype == FP8:
                factor = scale[block, :, None] if isinstance(scale, torch.Tensor) else scale or 1.0
                assert_near(pool[block, offset], quantised(row, factor))
            elif name == "value":
                assert torch.equal(pool[block, offset], row.to(pool.dtype))
            else:
                assert_near(pool[block, offset], row.to(pool.dtype))
    # What was written is zero now on both sides; the rest must be as it was.
    for name in ("key", "value"):
        pool = arguments[f"{name}_pool"]
        buffer = 0 if len(inputs.buffers) == 1 or name == "key" else 1
        for bytes_of in (inputs.buffers[buffer].view(torch.uint8), before[buffer]):
            view = bytes_of.view(pool.dtype).as_strided(
                pool.shape, pool.stride(), pool.storage_offset()
            )
            for slot in slots[slots >= 0].tolist():
                view.view(torch.uint8)[divmod(slot, pool.shape[1])] = 0
    for buffer, old in zip(inputs.buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), old), "something else in the pools changed"


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
    for name, table in zip(("cos", "sin"), fused.rope_tables(inputs.freqs[:1]), strict=True):
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
        assert torch.equal(snapshot(inputs.arguments[name]), snapshot(rounded))


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
    """E4: one step, by numbers or by tables of block and head, and other scales for V than for K."""
    for layout in ("separate", "slots"):
        inputs = make_inputs(dtype=dtype, pool_dtype=FP8, device=target.device, layout=layout)
        check(inputs, target.backend)
        check(inputs, target.backend, key_scale=0.5, value_scale=2.0)
        # A table is read where a block is written, whatever its strides.
        tables = torch.rand(2, 3, 4, device=target.device) + 0.5
        tables[:, :, 3] = tables[:, :, 3] / 200  # the rows of block 3 are clamped
        key_scale, value_scale = tables.transpose(1, 2)
        check(inputs, target.backend, key_scale=key_scale, value_scale=value_scale)
        check(inputs, target.backend, value_scale=value_scale)


def test_scales_of_blocks_not_written(target):
    inputs = make_inputs([1, -1, 2, -9], pool_dtype=FP8, device=target.device)
    scale = torch.full((4, 3), math.nan, device=target.device)
    scale[0] = 0.5
    check(inputs, target.backend, key_scale=scale, value_scale=scale)


def test_fp8_saturates(target):
    """E3: beyond what e4m3 holds, infinities too, 448 is stored; NaN stays NaN, -0.0 keeps its sign."""
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


def test_fp8_needs_sm_89(monkeypatch):
    """E3: Triton has no e4m3 below; the name of the argument and the capability are said."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(NotImplementedError, match=r"`key_pool` must .*8\.9.*, got 8\.6"):
        fused._check_fp8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    fused._check_fp8_device(torch.device("cuda"))
    fused._check_fp8_device(torch.device("cpu"))


# -- refusals --------------------------------------------------------------------------------------
def last_stride_2(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


REFUSED = [
    *((name, change, ValueError) for name in ("query", "key", "value", "key_pool", "value_pool")
      for change in (last_stride_2, lambda x: x[..., :-2], lambda x: x[0])),
    *((name, change, ValueError) for name in ("query_weight", "key_weight", "cos", "sin")
      for change in (last_stride_2, lambda x: x[:-1], lambda x: x[None])),
    *((name, lambda x: x.double(), TypeError) for name in (
        "query", "key", "value", "query_weight", "key_weight", "cos", "sin", "key_pool",
        "value_pool", "slot_mapping")),
    *((name, lambda x: x.to("meta"), ValueError) for name in (
        "query", "key", "value", "query_weight", "key_weight", "cos", "sin", "value_pool",
        "slot_mapping")),
    *((name, lambda x: None, TypeError) for name in ("query", "key", "value", "slot_mapping")),
    *((name, lambda x: None, ValueError) for name in ("cos", "sin")),
    ("query", lambda x: x[:, :2], ValueError),
    ("query", lambda x: x[:, :0], ValueError),
    ("key", lambda x: x.half(), TypeError),
    ("query", lambda x: x.half(), TypeError),
    ("slot_mapping", lambda x: x[:-1], ValueError),
    ("slot_mapping", lambda x: x + 100, ValueError),
    ("slot_mapping", lambda x: x * 0, ValueError),
    ("key_pool", lambda x: x[:1].expand(4, -1, -1, -1), ValueError),
    ("key_pool", lambda x: x[:, :0], ValueError),
    ("key_pool", lambda x: x.to(torch.float8_e5m2), NotImplementedError),
    ("value_pool", lambda x: x.to(FP8), NotImplementedError),
    ("key_scale", lambda x: 1.0, ValueError),
    ("value_scale", lambda x: torch.ones(4, 3), ValueError),
    ("tp_size", lambda x: 2, ValueError),
    ("sum_squares", lambda x: torch.ones(8, 2), ValueError),
    ("query_out", lambda x: torch.empty(8, 3, 8), ValueError),
    ("query_out", lambda x: torch.empty(1, 3, 24).expand(8, -1, -1), ValueError),
    ("query_out", lambda x: torch.empty(8, 3, 24).half(), TypeError),
    ("backend", lambda x: "fa3", ValueError),
]  # fmt: skip
FP8_REFUSED = [
    ("key_scale", 0.0, ValueError),
    ("key_scale", -1.0, ValueError),
    ("value_scale", math.inf, ValueError),
    ("value_scale", "1", TypeError),
    ("key_scale", torch.ones(4, 2), ValueError),
    ("value_scale", torch.ones(4), ValueError),
    ("value_scale", torch.ones(4, 3).half(), TypeError),
    ("key_scale", torch.ones(4, 3, device="meta"), ValueError),
    ("value_pool", torch.zeros(4, 4, 3, 24), TypeError),
    ("value_pool", torch.zeros(4, 4, 3, 23).to(FP8), ValueError),
    ("key_pool", torch.zeros(4, 0, 3, 24).to(FP8), ValueError),
]
# The message may name the argument that does not fit to the one that was changed.
PARTNERS = {
    "cos": "cos|sin",
    "sin": "cos|sin",
    "tp_size": "sum_squares",
    "sum_squares": "tp_size",
    "key": "key|value",
    "query": "query|key",
    "key_pool": "key_pool|value_pool|query|key",
}


def check_refused(inputs: SimpleNamespace, name: str, wrong, error) -> None:
    arguments = {"query_out": torch.full((8, 3, 24), math.nan)} | inputs.arguments | {name: wrong}
    tensors = [t for t in arguments.values() if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [snapshot(tensor) for tensor in tensors]
    names = PARTNERS.get(name, name)
    with pytest.raises(error, match=rf"^`({names})` must .+, got ") as caught:
        chunkattn.norm_rope_scatter(**arguments)
    assert type(caught.value) is error
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(snapshot(tensor), old)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused(case):
    name, change, error = REFUSED[case]
    inputs = make_inputs(dtype=torch.float32)
    check_refused(inputs, name, change(inputs.arguments.get(name)), error)


@pytest.mark.parametrize("case", range(len(FP8_REFUSED)))
def test_refused_of_fp8(case):
    name, wrong, error = FP8_REFUSED[case]
    check_refused(make_inputs(dtype=torch.float32, pool_dtype=FP8), name, wrong, error)


def test_refused_with_sums():
    inputs = make_inputs(dtype=torch.float32)
    inputs.arguments |= {"sum_squares": torch.ones(8, 2), "tp_size": 2}
    for name, wrong, error in (
        ("tp_size", 0, ValueError),
        ("tp_size", 2.0, ValueError),
        ("sum_squares", torch.ones(8, 2).half(), TypeError),
    ):
        with pytest.raises(error, match=rf"^`{name}` must .+, got "):
            chunkattn.norm_rope_scatter(**inputs.arguments | {name: wrong})
    for wrong in (
        torch.ones(8),
        torch.ones(8, 1),
        torch.ones(7, 2),
        torch.ones(8, 2, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"^`sum_squares` must .+, got "):
            chunkattn.norm_rope_scatter(**inputs.arguments | {"sum_squares": wrong})
    with pytest.raises(ValueError, match=r"^`sum_squares` must be None without both weights, got "):
        chunkattn.norm_rope_scatter(**inputs.arguments | {"key_weight": None})


def test_odd_head_size():
    """Without a rotation any size will do."""
    inputs = make_inputs(head_size=26, dtype=torch.float32)
    arguments = inputs.arguments
    for name in ("query", "key", "value", "key_pool", "value_pool"):
        arguments[name] = arguments[name][..., :25]
    for name in ("query_weight", "key_weight"):
        arguments[name] = arguments[name][:75]
    with pytest.raises(ValueError, match=r"^`cos` must be None for an odd head size, 25, got "):
        chunkattn.norm_rope_scatter(**arguments)
    check(inputs, "torch", cos=None, sin=None)
    if importlib.util.find_spec("triton") and TRITON_DEVICE == "cpu":
        check(inputs, "triton", cos=None, sin=None)


# -- what torch knows of it ------------------------------------------------------------------------
def test_opcheck():
    inputs = make_inputs(dtype=torch.float32, pool_dtype=FP8)
    for pool in inputs.arguments["key_pool"], inputs.arguments["value_pool"]:
        pool.view(torch.uint8).zero_()
    query, key, value, *rest = (inputs.arguments[name] for name in list(inputs.arguments)[:10])
    tables, pools = rest[:4], rest[4:]
    sums = chunkattn.qk_sum_squares(query, key)
    scales = torch.ones(2, 4, 3)
    for some in ((sums, *scales), (None, None, None)):
        arguments = (
            *(query, key, value, *tables, some[0], torch.zeros_like(query), *pools, *some[1:]),
            *(EPS, 1, 1.0, 1.0, True, "torch"),
        )
        torch.library.opcheck(
            torch.ops.chunkattn.norm_rope_scatter.default,
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


def test_gradients_are_not_tracked(target):
    inputs = make_inputs(device=target.device)
    for name in ("query", "key", "value", "query_weight", "key_weight"):
        inputs.arguments[name].requires_grad_()
    out = chunkattn.norm_rope_scatter(**inputs.arguments, backend=target.backend)
    assert not out.requires_grad
    assert not inputs.arguments["key_pool"].requires_grad


# -- faults in the source of the kernel ------------------------------------------------------------
def check_all() -> None:
    """A few calls that every path of the kernel takes part in."""
    device = TRITON_DEVICE
    check(make_inputs(device=device, padded=True, layout="slots"), "triton")
    check(make_inputs(heads=4, kv_heads=2, dtype=torch.float32, device=device), "triton")
    check(make_inputs(weight_dtype=torch.float32, device=device), "triton")
    check(make_inputs(device=device), "triton", rotate_key=False)
    # Sums that are not the rows' own.
    inputs = make_inputs(device=device)
    sums = chunkattn.qk_sum_squares(inputs.arguments["query"], inputs.arguments["key"])
    check(inputs, "triton", sum_squares=4 * sums, tp_size=4)
    inputs = make_inputs(pool_dtype=FP8, device=device)
    tables = torch.rand(2, 4, 3, device=device) + 0.5
    tables[:, 3] /= 200
    check(inputs, "triton", key_scale=tables[0], value_scale=tables[1])
    check(inputs, "triton", key_scale=0.5, value_scale=3.0)


FAULTS = {
    "sums of Q for K": ("sum_offset + stride_sum_squares_which", "sum_offset"),
    "sums of the first token": ("token * stride_sum_squares_token", "0"),
    "sums given are not used": ("HAS_SUM_SQUARES=sum_squares is not None", "HAS_SUM_SQUARES=False"),
    "mean of one rank": ("tp_size * NUM_HEADS * HEAD", "NUM_HEADS * HEAD"),
    "mean over padded heads": ("tp_size * NUM_KV_HEADS * HEAD_SIZE", "BLOCK_KV_H * BLOCK_D"),
    "eps dropped": ("/ norm_size + eps", "/ norm_size"),
    "norm not rounded": (").to(x.dtype)\n    out", ")\n    out"),
    "weight not rounded": ("out = out.to(x.dtype).to(tl.float32)", "out = out"),
    "weight rounded": ("if weight.dtype == x.dtype:", "if True:"),
    "weight of the first head": ("kv_head * HEAD_SIZE + offs_d", "0 * kv_head + offs_d"),
    "rotation backwards": ("even * cos - odd * sin, even * sin + odd * cos", "even * cos + odd * sin, odd * cos - even * sin"),
    "halves, not pairs": ("tl.reshape(pairs, (BLOCK_H, BLOCK_D))", "tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_H, BLOCK_D))"),
    "angles of the first token": ("token * stride_cos_token", "0"),
    "angles of another token": ("sin_ptr + token * stride_sin_token", "sin_ptr + (token ^ 1) * stride_sin_token"),
    "last angle dropped": ("offs_p < HEAD_SIZE // 2", "offs_p < HEAD_SIZE // 2 - 1"),
    "K turned when it must not be": ("cos is not None and rotate_key", "cos is not None"),
    "heads of Q one short": ("head < NUM_HEADS)", "head < NUM_HEADS - 1)"),
    "padding written": ("(kv_head < NUM_KV_HEADS) & (offs_d < HEAD_SIZE)", "(kv_head < NUM_KV_HEADS) & (offs_d <= HEAD_SIZE)"),
    "slots below 0 written": ("kv_mask & (slot >= 0)", "kv_mask"),
    "first slot of each block": ("offset * stride_value_slot", "0 * stride_value_slot"),
    "first block": ("+ block * stride_key_block", "+ 0 * stride_key_block"),
    "heads mixed up": ("kv_head * stride_value_pool_head", "(NUM_KV_HEADS - 1 - kv_head) * stride_value_pool_head"),
    "K to V": ("            value,\n            value_pool_ptr.dtype", "            key.to(key_ptr.dtype.element_ty),\n            value_pool_ptr.dtype"),
    "not saturated": ("x = tl.where(x > FP8_MAX, FP8_MAX, tl", "x = tl.where(x > 1e30, FP8_MAX, tl"),
    "scale the wrong way": (".to(tl.float32) / scale", ".to(tl.float32) * scale"),
    "scale of the first head": ("+ kv_head * stride_key_scales_head", "+ 0 * kv_head"),
    "scale of the first block": ("block * stride_value_scales_block", "0"),
    "scales of K for V": ("            value_scale,\n", "            key_scale,\n"),
    "K not rounded to its dtype": ("            key.to(key_ptr.dtype.element_ty),\n            key_pool", "            key,\n            key_pool"),
}  # fmt: skip


@needs_triton
def test_kernel_without_a_fault_passes():
    check_all()


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_kernel_fault_is_found(monkeypatch, tmp_path, fault):
    right, wrong = FAULTS[fault]
    package = tmp_path / tmp_path.name  # a name that no other test has
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / "fused.py").read_text()
    assert source.count(right) == 1, f"there are {source.count(right)} of {right!r}"
    (package / "fused.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(package.parent)
    launch = importlib.import_module(f"{package.name}.fused").fused
    monkeypatch.setattr(fused, "_triton_launch", lambda: launch)
    with pytest.raises(AssertionError):
        check_all()
