"""fp8 pools: what is written, what is read back, and biases of blocks, on every backend."""

import dataclasses
import math

import pytest
import torch

import chunkattn
from chunkattn import checks
from chunkattn.testing import (
    check_attention,
    make_case,
    make_pools,
    make_rows,
    run_attention,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]


def written(target, rows, slots, *, scale=None, blocks=4, block_size=4, heads=None):
    """The pool of K after a write of ``rows`` as K and V into a pool of NaN, and the buffers."""
    key, value, buffers = make_pools(
        blocks, block_size, rows.shape[1], rows.shape[2], dtype=FP8, device=target.device
    )
    before = [snapshot(buffer) for buffer in buffers]
    slots = torch.tensor(slots, device=target.device)
    chunkattn.scatter_kv(
        rows, rows, key, value, slots, key_scale=scale, value_scale=scale, backend=target.backend
    )
    assert torch.equal(key.view(torch.uint8), value.view(torch.uint8))
    flat = key.flatten(0, 1).clone()
    key.flatten(0, 1)[slots[slots >= 0]] = math.nan
    value.flatten(0, 1)[slots[slots >= 0]] = math.nan
    for old, buffer in zip(before, buffers, strict=True):
        assert torch.equal(old, snapshot(buffer)), "something else was written"
    return flat


def test_what_e4m3_does_not_hold(target):
    """E3: clamped to 448, infinities too; NaN stays NaN; -0.0 keeps its sign."""
    row = torch.tensor([448, 449, 464, 1000, math.inf, -0.0, -math.inf, math.nan])
    for scale in (None, 2.0, torch.tensor(0.5), torch.tensor([4.0])):
        rows = row.to(target.device).reshape(1, 1, 8) * (1.0 if scale is None else float(scale))
        if isinstance(scale, torch.Tensor):
            scale = scale.to(target.device)
        stored = written(target, rows, [5], scale=scale)[5, 0].float().cpu()
        assert stored[:5].tolist() == [448.0] * 5
        assert stored[5] == 0
        assert math.copysign(1, stored[5]) == -1
        assert stored[6] == -448
        assert stored[7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_of_one_scale(target, dtype):
    """E4: K by 0.5 and V by 2, each one rounding away; slots below 0 are left out."""
    key, value = torch.randn(2, 9, 3, 24).to(target.device, dtype)
    pools = make_pools(4, 4, 3, 24, dtype=FP8, device=target.device, layout="interleaved")
    slots = torch.tensor([3, 12, -1, 5, 0, 8, 15, -7, 1], device=target.device)
    scales = {"key_scale": 0.5, "value_scale": 2.0}
    chunkattn.scatter_kv(key, value, *pools[:2], slots, **scales, backend=target.backend)
    for rows, pool, scale in zip((key, value), pools, (0.5, 2.0), strict=False):
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if slot >= 0:
                wanted = (row.float() / scale).clamp(-448, 448).to(FP8)
                assert torch.equal(pool[slot // 4, slot % 4].float(), wanted.float())


def test_write_sets_the_scales_of_the_blocks_that_it_opens(target):
    """Block 2 is opened and filled, block 0 opened by two rows, block 1 gets one more row."""
    rows = torch.randn(7, 2, 16)
    rows[1, 0, 3] = 90.0
    rows[2, 1, 5] = math.inf  # clamped: does not count
    rows[3, 1, 5] = math.nan
    rows[6] = 50.0  # more than block 1 can hold
    slots = [8, 9, 10, 11, 1, 0, 6]
    rows = rows.to(target.device)
    scale = torch.tensor([[math.nan] * 2, [0.05, 0.1], [7.0, 7.0], [3.0, 3.0]]).to(target.device)
    expected = scale.clone()
    for block, own in ((2, rows[:4]), (0, rows[4:6])):
        size = own.abs().amax(-1) if block == 0 else own.abs()
        if block == 2:
            size = torch.where(size < math.inf, size, 0.0).amax(-1)
        expected[block] = size.amax(0) / 448
    key, value, _ = make_pools(4, 4, 2, 16, dtype=FP8, device=target.device)
    value_scale = scale.clone()
    chunkattn.scatter_kv(
        rows,
        2 * rows,
        key,
        value,
        torch.tensor(slots, device=target.device),
        key_scale=scale,
        value_scale=value_scale,
        backend=target.backend,
    )
    torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
    opened = torch.tensor([0, 2])
    torch.testing.assert_close(value_scale[opened], 2 * expected[opened], rtol=1e-6, atol=0)
    assert torch.equal(value_scale[[1, 3]], torch.tensor([[0.05, 0.1], [3.0, 3.0]]).to(scale))
    for row, slot in zip(rows, slots, strict=True):
        wanted = (row / scale[slot // 4, :, None]).clamp(-448, 448).to(FP8)
        got = key[slot // 4, slot % 4]
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_write_of_zeros_leaves_a_scale_that_divides(target):
    rows = torch.zeros(4, 1, 8, device=target.device)
    scale = torch.ones(2, 1, device=target.device)
    key, value, _ = make_pools(2, 4, 1, 8, dtype=FP8, device=target.device)
    slots = torch.arange(4, device=target.device)
    chunkattn.scatter_kv(
        rows, rows, key, value, slots, key_scale=scale, value_scale=scale, backend=target.backend
    )
    assert scale.tolist() == [[2.0**-20], [1.0]]
    assert (key[0].float() == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "layout"), [(6, "separate"), (64, "interleaved"), (144, "padded")]
)
def test_read(attention_target, dtype, block_size, layout):
    """E4: scales of 2**-4 to 2**4 for each block and head, NaN where no row is seen."""
    target = attention_target
    case = make_case(
        seq_lens=[2 * block_size + 5, 0, block_size],
        query_lens=[9, 2, 3],
        current_lens=[3, 4, 0],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        head_size=24,
        dtype=dtype,
        device=target.device,
        layout=layout,
        fp8=True,
    )
    check_attention(case, target.backend)
    # One number for all blocks, and none: 1.
    for key_scale, value_scale in ((0.5, 2.0), (None, 0.5), (None, None)):
        case = dataclasses.replace(case, key_scale=key_scale, value_scale=value_scale)
        check_attention(case, target.backend)


@pytest.mark.parametrize("block_size", (24, 80))
@pytest.mark.parametrize("entry", (0, 1, 2), ids=("first", "between", "partly filled"))
def test_scales_of_zero(attention_target, block_size, entry):
    """What another quantiser gives a block of zeros: its keys count, with scores of 0."""
    target = attention_target
    case = make_case(
        seq_lens=[2 * block_size + 5],
        query_lens=[9],
        current_lens=[3],
        block_size=block_size,
        dtype=torch.float16,
        device=target.device,
        fp8=True,
    )
    block = case.block_table[0, entry]
    case.key_scale[block] = 0.0
    case.value_scale[block] = 0.0
    check_attention(case, target.backend)


def test_read_by_descriptors(monkeypatch):
    pytest.importorskip("triton")
    from chunkattn.kernels import walk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seen = []
    monkeypatch.setattr(walk, "arch_of", lambda device: 90)
    descriptors = walk.block_descriptors
    monkeypatch.setattr(
        walk, "block_descriptors", lambda *args: seen.append(args[2]) or descriptors(*args)
    )
    case = make_case(
        seq_lens=[2 * 144 + 3],
        query_lens=[9],
        block_size=144,
        num_heads=2,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.bfloat16,
        device=device,
        fp8=True,
    )
    check_attention(case, "triton")
    assert seen == [128, 16]


@pytest.mark.parametrize("fp8", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", (6, 80))
def test_bias_of_blocks(attention_target, dtype, block_size, fp8):
    """Added to the scores of a block's keys; current rows have none; NaN where no row is seen."""
    target = attention_target
    case = make_case(
        seq_lens=[3 * block_size + 5, block_size, 0],
        query_lens=[9, 2, 1],
        current_lens=[3, 0, 2],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        device=target.device,
        biased=True,
        fp8=fp8,
    )
    check_attention(case, target.backend)
    one = dataclasses.replace(case, block_bias=case.block_bias[:, 0].contiguous())
    check_attention(one, target.backend)


def test_bias_of_past_frames(attention_target):
    """Log 0.3 on every block but the last counts their keys 0.3 times (V = 1 there, else 0)."""
    target = attention_target
    case = make_case(seq_lens=[4 * 64], query_lens=[3], block_size=64, device=target.device)
    case.query.zero_()
    value_pool = torch.zeros_like(case.value_pool)
    value_pool[case.block_table[0, :3].long()] = 1.0
    bias = torch.full((case.key_pool.shape[0],), math.log(0.3), device=target.device)
    bias[case.block_table[0, 3].long()] = 0.0
    out = chunkattn.paged_window_attention(
        case.query,
        case.key_pool,
        value_pool,
        case.block_table,
        case.seq_lens,
        block_bias=bias,
        backend=target.backend,
    )
    expected = torch.full_like(out, 3 * 0.3 / (3 * 0.3 + 1))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_low_scores_and_needles_of_fp8(attention_target):
    """A dead row that is seen, with its scale or bias, would take all of the weight."""
    target = attention_target
    case = make_case(
        seq_lens=[2 * 80 + 33],
        query_lens=[5],
        block_size=80,
        device=target.device,
        score_shift=-30.0,
        biased=True,
    )
    check_attention(case, target.backend)


REFUSED = {
    "key_scale": [
        (0.0, ValueError),
        (math.nan, ValueError),
        (torch.tensor(-1.0), ValueError),
        (torch.ones(3), ValueError),
        (torch.ones(5, 1), ValueError),
        (torch.ones(4, 1, dtype=torch.float64), TypeError),
        (torch.ones(4, 1, device="meta"), ValueError),
        ("1", TypeError),
    ],
    "value_scale": [(torch.ones(4, 1), ValueError), (0.0, ValueError)],
}


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n in REFUSED for i in range(len(REFUSED[n]))]
)
@pytest.mark.parametrize("write", (True, False))
def test_refused_scales(name, number, write):
    wrong, error = REFUSED[name][number]
    key, value, buffers = make_pools(4, 4, 1, 8, dtype=FP8)
    before = [snapshot(buffer) for buffer in buffers]
    rows = make_rows(2, 1, 8, dtype=torch.float32)
    call, arguments = chunkattn.scatter_kv, (rows, rows, key, value, torch.tensor([0, 1]))
    if not write:
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2])
        call, arguments = chunkattn.paged_window_attention, (rows, key, value, table, lens)
    names = "key_scale|value_scale" if isinstance(wrong, torch.Tensor) else name
    with pytest.raises(error, match=f"`({names})` must .*, got "):
        call(*arguments, **({"key_scale": 1.0} | {name: wrong}))
    assert all(map(torch.equal, before, map(snapshot, buffers)))


TABLE = torch.ones(4, 1)
REFUSED_WRITES = [
    # E4: only fp8 is scaled; a flat pool has no blocks; e5m2 is no format here.
    (torch.bfloat16, {"key_scale": 0.5}, ValueError, "`key_scale` must be None for a pool of"),
    (torch.float8_e5m2, {}, NotImplementedError, "`key_pool` must be .*float8_e4m3fn, got"),
    (
        FP8,
        {"key_scale": TABLE[:1].expand(4, 1), "value_scale": TABLE},
        ValueError,
        "`key_scale` must have memory for every element",
    ),
]


@pytest.mark.parametrize(("dtype", "scales", "error", "message"), REFUSED_WRITES)
def test_refused_writes(dtype, scales, error, message):
    rows, pool = torch.zeros(2, 1, 8), torch.zeros(4, 4, 1, 8).to(dtype)
    with pytest.raises(error, match=message):
        chunkattn.scatter_kv(rows, rows, pool, pool.clone(), torch.tensor([0, 1]), **scales)


def test_refused_scales_of_a_flat_pool():
    rows, pool = torch.zeros(2, 1, 8), torch.zeros(16, 1, 8).to(FP8)
    with pytest.raises(ValueError, match="`key_scale` must have one element for a flat pool"):
        chunkattn.scatter_kv(
            rows, rows, pool, pool.clone(), torch.tensor([0, 1]), key_scale=TABLE, value_scale=TABLE
        )


@pytest.mark.parametrize(
    ("bias", "error"),
    [
        (torch.zeros(3), ValueError),
        (torch.zeros(4, 2), ValueError),
        (torch.zeros(4).double(), TypeError),
        (0.5, TypeError),
        (torch.zeros(4, device="meta"), ValueError),
    ],
)
def test_refused_biases(bias, error):
    rows, pool = torch.zeros(2, 1, 8), torch.zeros(4, 4, 1, 8)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2])
    with pytest.raises(error, match=r"`block_bias` must .*, got "):
        chunkattn.paged_window_attention(rows, pool, pool, table, lens, block_bias=bias)


def test_sink_and_current_rows_in_16_bits(target):
    """A window in fp8 beside a sink and current rows that are not, made one by their lse."""
    whole = make_case(
        seq_lens=[5 * 64],
        query_lens=[9],
        current_lens=[7],
        block_size=64,
        dtype=torch.float16,
        device=target.device,
    )
    table, backend = whole.block_table, target.backend
    sink, window = table[:, :2].contiguous(), table[:, 2:5].contiguous()
    pools, scales = [], []
    for pool in (whole.key_pool, whole.value_pool):
        low = torch.zeros(pool.shape, dtype=FP8, device=target.device)
        scales.append(torch.ones(pool.shape[0], pool.shape[2], device=target.device))
        pools.append(low)
    blocks = window[0].long()
    slots = (blocks[:, None] * 64 + torch.arange(64, device=target.device)).flatten()
    rows = (pool[blocks].flatten(0, 1) for pool in (whole.key_pool, whole.value_pool))
    names = ("key_scale", "value_scale")
    chunkattn.scatter_kv(
        *rows, *pools, slots, **dict(zip(names, scales, strict=True)), backend=backend
    )
    options = {"return_lse": True, "backend": backend}
    lens = [torch.tensor([64 * n], device=target.device) for n in (2, 3)]
    states = (
        chunkattn.paged_window_attention(
            whole.query, whole.key_pool, whole.value_pool, sink, lens[0], **options
        ),
        chunkattn.paged_window_attention(
            whole.query,
            *pools,
            window,
            lens[1],
            key_current=whole.key_current,
            value_current=whole.value_current,
            **dict(zip(names, scales, strict=True)),
            **options,
        ),
    )
    out, _ = chunkattn.merge_states(*zip(*states, strict=True))
    expected = chunkattn.paged_window_attention(**whole.arguments(), backend=backend)
    # e4m3 has a step of 1/16 at most; attention averages it over 327 keys.
    assert (out - expected).abs().max() < 0.05
    assert (out - expected).abs().mean() < 0.01


@pytest.mark.parametrize("name", ("key_scale", "value_scale"))
def test_a_table_alone_names_the_missing_one(name):
    pool = torch.zeros(4, 16, 2, 16).to(torch.float8_e4m3fn)
    other = {"key_scale": "value_scale", "value_scale": "key_scale"}[name]
    with pytest.raises(ValueError, match=rf"^`{other}` must be of the kind of `{name}`.+ None$"):
        checks.check_scales(pool, **{name: torch.ones(4, 2), other: None})


@pytest.mark.parametrize("number", (0, -1.0, math.nan, math.inf))
def test_a_number_is_looked_at_on_every_device(number, monkeypatch):
    monkeypatch.setattr(checks, "values_visible", lambda device: False)  # as on a GPU
    pool = torch.zeros(4, 16, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="^`value_scale` must be finite and above 0, got "):
        checks.check_scales(pool, 1.0, number)


@pytest.mark.parametrize("scale", (-0.5, math.nan, math.inf))
@pytest.mark.parametrize("name", ("key_scale", "value_scale"))
def test_a_wrong_scale_of_a_visible_block_is_refused(name, scale):
    case = make_case(seq_lens=[70], query_lens=[5], block_size=64, fp8=True)
    getattr(case, name)[case.block_table[0, 1], 0] = scale
    with pytest.raises(ValueError, match=f"^`{name}` must be finite and .+ block, got {scale}"):
        run_attention(case, "torch")


@pytest.mark.parametrize("bias", (-math.inf, math.nan, math.inf))
def test_a_bias_of_a_visible_block_is_finite(bias):
    """-inf in the first block would make NaN of all rows."""
    case = make_case(seq_lens=[70], query_lens=[5], block_size=64, biased=True)
    case.block_bias[case.block_table[0, 0]] = bias
    with pytest.raises(ValueError, match=f"^`block_bias` must be finite for .+, got {bias}"):
        run_attention(case, "torch")
    case.block_bias[case.block_table[0, 0]] = -1e30
    assert run_attention(case, "torch")[0].isfinite().all()
