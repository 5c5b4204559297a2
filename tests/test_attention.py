"""`paged_window_attention` against its definition in float64, on every backend.

Everything that a kernel must not look at is NaN, and so is `out` before the call.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkattn
from chunkattn import torch_backend
from chunkattn.testing import (
    LAYOUTS,
    baseline,
    check_attention,
    make_case,
    run_attention,
)
from tests.helpers.machine import TRITON_DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
BLOCK_SIZES = (1, 6, 12, 16, 880, 1560)

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


@pytest.fixture
def target(attention_target):
    """Small blocks go through both kernels."""
    return attention_target


@all_dtypes
@all_block_sizes
def test_block_sizes(target, dtype, block_size):
    """A12, E8: two whole blocks and one row."""
    heads = 1 if block_size > 16 else 2
    case = make_case(
        seq_lens=[2 * block_size + 1],
        query_lens=[17],
        block_size=block_size,
        num_heads=heads,
        head_size=32,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


@pytest.mark.parametrize("block_size", (16, 100, 880))
@pytest.mark.parametrize("rest", (0, 1, -1))
def test_last_block_full_or_not(target, block_size, rest):
    """The last block holds every row, one row, or all but one."""
    case = make_case(
        seq_lens=[2 * block_size + rest],
        query_lens=[3],
        block_size=block_size,
        num_heads=1,
        device=target.device,
    )
    # No entry behind the last one that is needed.
    width = -(-(2 * block_size + rest) // block_size)
    table = case.block_table[:, :width].contiguous()
    check_attention(dataclasses.replace(case, block_table=table), target.backend)


@all_dtypes
@pytest.mark.parametrize("head_size", (8, 16, 24, 80, 96, 128, 256))
def test_head_sizes(target, dtype, head_size):
    """E6: sizes that are no power of two, with 1, 3, 15, 16 and 17 rows in one call."""
    case = make_case(
        seq_lens=[33, 20, 7, 16, 40],
        query_lens=[1, 3, 15, 16, 17],
        head_size=head_size,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


@all_dtypes
@pytest.mark.parametrize("rows", (1, 3, 15, 16, 17, 129))
def test_query_rows(target, dtype, rows):
    """E6: rows of the only sequence."""
    case = make_case(
        seq_lens=[33],
        query_lens=[rows],
        num_heads=8,
        num_kv_heads=4,
        head_size=40,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


def test_head_size_320(target):
    """E6: torch takes every size, triton refuses by name what it cannot do."""
    case = make_case(
        seq_lens=[33], query_lens=[3], num_heads=1, head_size=320, device=target.device
    )
    if target.backend == "torch":
        check_attention(case, "torch")
        return
    out = torch.full_like(case.query, math.nan)
    with pytest.raises(NotImplementedError, match=r"`head_size` must be at most 256.*got 320"):
        chunkattn.paged_window_attention(**case.arguments(), out=out, backend=target.backend)
    assert out.isnan().all()


@needs_triton
@pytest.mark.parametrize(("arch", "descriptors"), [(80, False), (90, False), (90, True)])
@pytest.mark.parametrize("block_size", (16, 100, 880, 1560))
def test_tiles_of_other_gpus(monkeypatch, arch, descriptors, block_size):
    """Every GPU's choice of tiles gives the same attention, here or interpreted."""
    from chunkattn.kernels import gather, walk

    for kernel in (gather, walk):
        monkeypatch.setattr(kernel, "arch_of", lambda device: arch)
    if not descriptors:
        monkeypatch.setattr(walk, "descriptors_fit", lambda *pools: False)
    case = make_case(
        seq_lens=[block_size + 70],
        query_lens=[130],
        current_lens=[25],
        block_size=block_size,
        num_heads=1,
        dtype=torch.float16,
        device=TRITON_DEVICE,
    )
    check_attention(case, "triton")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (4, 2), (6, 3), (3, 3), (5, 1)])
def test_grouped_queries(target, num_heads, num_kv_heads):
    case = make_case(
        seq_lens=[37, 9],
        query_lens=[5, 18],
        current_lens=[3, 0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        device=target.device,
    )
    check_attention(case, target.backend)


RAGGED = {
    "paged": ([33, 0, 16, 5, 1, 0], [5, 3, 0, 17, 1, 0], None),
    "both": ([33, 0, 16, 0, 7, 0], [5, 3, 2, 17, 0, 1], [7, 4, 0, 0, 9, 33]),
    "current alone": ([0, 0, 0, 0], [3, 20, 0, 1], [16, 0, 5, 1]),
    "one, current alone": ([0], [9], [35]),
    "one, no current rows": ([35], [9], [0]),
    "one, no key": ([0], [9], [0]),
    "one, no query row": ([9], [0], None),
    "many short": ([4] * 9, [1] * 9, [1] * 9),
}


@all_dtypes
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches(target, dtype, name):
    """C6 among others: sequences without query rows, without paged rows, without current rows."""
    seq_lens, query_lens, current_lens = RAGGED[name]
    case = make_case(
        seq_lens=seq_lens,
        query_lens=query_lens,
        current_lens=current_lens,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


def test_rows_without_a_key(target):
    """C6: they give out 0 and lse -inf, whatever the other sequences do."""
    case = make_case(seq_lens=[0, 5], query_lens=[3, 3], device=target.device)
    out, lse = run_attention(case, target.backend)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert (lse[:3] == -math.inf).all()
    assert out[3:].isfinite().all()
    assert lse[3:].isfinite().all()


def test_one_sequence_needs_no_start_locs(target):
    case = make_case(seq_lens=[20], query_lens=[5], current_lens=[6], device=target.device)
    case = dataclasses.replace(case, query_start_loc=None, current_start_loc=None)
    check_attention(case, target.backend)


def test_table_of_no_width(target):
    """Without a paged row the table needs no column, and the pool no block."""
    case = make_case(seq_lens=[0], query_lens=[5], current_lens=[6], device=target.device)
    case = dataclasses.replace(
        case, block_table=case.block_table[:, :0], key_pool=case.key_pool[:0]
    )
    case = dataclasses.replace(case, value_pool=case.value_pool[:0])
    check_attention(case, target.backend)


def test_results_without_out_and_lse(target):
    """``out=None`` allocates the same result; the lse comes only when it is asked for."""
    case = make_case(seq_lens=[33], query_lens=[5], layout="padded", device=target.device)
    expected, _ = run_attention(case, target.backend)
    out = chunkattn.paged_window_attention(**case.arguments(), backend=target.backend)
    assert torch.equal(out, expected)
    assert out.is_contiguous()


@pytest.mark.parametrize("scale", (0.0, 1e-3, 0.3, 1.0))
@pytest.mark.parametrize("seq_len", (16, 23))
def test_softmax_scale(target, scale, seq_len):
    """A scale of 0 is the mean of all visible values, masked tail or not."""
    case = make_case(
        seq_lens=[seq_len],
        query_lens=[5],
        current_lens=[3],
        softmax_scale=scale,
        device=target.device,
    )
    check_attention(case, target.backend)


@all_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_arguments(target, dtype, layout):
    """A4, and gaps everywhere: K and V in one buffer, padded heads, an odd stride of one head."""
    case = make_case(
        seq_lens=[33, 6],
        query_lens=[5, 17],
        current_lens=[7, 2],
        num_kv_heads=1 if layout == "odd" else 2,
        layout=layout,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


def test_heads_before_rows(target):
    """Rows and heads in the other order in memory, as ``transpose`` gives them."""
    case = make_case(seq_lens=[33], query_lens=[17], current_lens=[5], device=target.device)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(0, 1).contiguous().transpose(0, 1)

    case = dataclasses.replace(
        case,
        query=turned(case.query),
        key_current=turned(case.key_current),
        value_current=turned(case.value_current),
        key_pool=case.key_pool.transpose(1, 2).contiguous().transpose(1, 2),
        value_pool=case.value_pool.transpose(0, 2).contiguous().transpose(0, 2),
        buffers=(),
    )
    expected = check_attention(case, target.backend)
    out = turned(torch.full_like(case.query, math.nan))
    result = chunkattn.paged_window_attention(**case.arguments(), out=out, backend=target.backend)
    assert result is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("step", (1, 2, 3))
def test_strided_and_wide_index_tensors(target, index_dtype, step):
    """Every second column of a table, every third length, int64: right, not read as if dense."""
    case = make_case(
        seq_lens=[33, 0, 20],
        query_lens=[5, 1, 17],
        current_lens=[3, 7, 0],
        index_dtype=index_dtype,
        device=target.device,
    )

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        shape = (*tensor.shape[:-1], tensor.shape[-1] * step)
        wide = torch.full(shape, 1, dtype=index_dtype, device=tensor.device)
        wide[..., ::step] = tensor
        return wide[..., ::step]

    names = ("block_table", "seq_lens", "query_start_loc", "current_start_loc")
    case = dataclasses.replace(case, **{name: spread(getattr(case, name)) for name in names})
    check_attention(case, target.backend)


def test_one_table_for_all(target):
    """Sequences may share a table, as a view without a stride."""
    case = make_case(seq_lens=[33, 0], query_lens=[5, 17], device=target.device)
    table = case.block_table[:1].expand(2, -1)
    lens = torch.tensor([33, 20], dtype=torch.int32, device=target.device)
    check_attention(dataclasses.replace(case, block_table=table, seq_lens=lens), target.backend)


def test_torch_backend_counts_what_fp8_copies():
    """Each block gets its scale in a float32 copy."""
    case = make_case(seq_lens=[192], query_lens=[5], block_size=64, dtype=torch.float32, fp8=True)
    before = torch_backend.copied_kv_bytes()
    check_attention(case, "torch")
    assert torch_backend.copied_kv_bytes() - before == 2 * 3 * 64 * 16 * 4


@pytest.mark.parametrize(
    ("dtype", "block_size", "scattered", "copies"),
    [
        (torch.bfloat16, 16, False, 0),
        (torch.float32, 16, False, 0),
        (torch.float32, 300, True, 0),
        (torch.float32, 16, True, 1),
        (torch.bfloat16, 300, True, 1),
    ],
)
def test_torch_backend_copies_only_scattered_windows(dtype, block_size, scattered, copies):
    """A contiguous window is read where it lies, and so are long runs in float32."""
    case = make_case(
        seq_lens=[4 * block_size + 1], query_lens=[5], block_size=block_size, dtype=dtype
    )
    if not scattered:
        key, value, *_ = case.visible(0)
        table = torch.arange(1, 6, dtype=torch.int32).unsqueeze(0)
        rows = 4 * block_size + 1
        case.key_pool.flatten(0, 1)[block_size : block_size + rows] = key
        case.value_pool.flatten(0, 1)[block_size : block_size + rows] = value
        case = dataclasses.replace(case, block_table=table)
    before = torch_backend.copied_kv_bytes()
    check_attention(case, "torch")
    window = 2 * (4 * block_size + 1) * 16 * dtype.itemsize
    assert torch_backend.copied_kv_bytes() - before == copies * window


def test_baseline_is_dense_attention():
    """The judge's yardstick is itself within float32 rounding of the definition."""
    case = make_case(seq_lens=[33, 0, 5], query_lens=[5, 2, 1], current_lens=[3, 0, 2], num_heads=4)
    expected = check_attention(case, "torch")
    torch.testing.assert_close(baseline(case), expected, atol=1e-6, rtol=0)


lengths = st.integers(0, 40)


@st.composite
def cases(draw, max_seqs: int):
    group, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]))
    rows = draw(
        st.lists(
            st.tuples(lengths, st.integers(0, 20), st.integers(0, 20)),
            min_size=1,
            max_size=max_seqs,
        )
    )
    seq_lens, query_lens, current_lens = (list(lens) for lens in zip(*rows, strict=True))
    layouts = LAYOUTS if kv_heads == 1 else LAYOUTS[:-1]
    return {
        "seq_lens": seq_lens,
        "query_lens": query_lens,
        "current_lens": current_lens if draw(st.booleans()) else None,
        "block_size": draw(st.integers(1, 40)),
        "num_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "head_size": draw(st.integers(1, 40)),
        "layout": draw(st.sampled_from(layouts)),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "score_shift": draw(st.sampled_from([0.0, -30.0])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(cases(max_seqs=4))
@settings(max_examples=60)
def test_any_geometry_torch(arguments):
    check_attention(make_case(**arguments), "torch")


@needs_triton
@given(cases(max_seqs=3))
@settings(max_examples=30)
def test_any_geometry_triton(arguments):
    check_attention(make_case(**arguments, device=TRITON_DEVICE), "triton")
