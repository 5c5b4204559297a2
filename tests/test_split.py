"""Split launches: any number of programs gives what one program a tile gives."""

import dataclasses
import functools
import importlib.util
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import ops
from chunkattn.testing import AttentionCase, check_attention, make_case, run_attention, with_needles

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def split(monkeypatch):
    """``split(n)``: from now on, ``n`` programs divide the keys of every launch of the walk."""
    from chunkattn.kernels import walk

    def use(num_programs: int | None, **options) -> None:
        launch = functools.partial(walk.walk, num_programs=num_programs, **options)
        monkeypatch.setattr(ops, "_attention_kernel", lambda block_size: launch)

    return use


def ragged(dtype: torch.dtype = torch.float32, **options) -> AttentionCase:
    """Full tiles, tails, rests and current rows; sequences without rows, keys, or both."""
    shape = {
        "seq_lens": [80 + 33, 0, 7],
        "query_lens": [35, 3, 1],
        "current_lens": [5, 0, 17],
        "block_size": 80,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    return make_case(**(shape | {"dtype": dtype, "device": DEVICE} | options))


@pytest.mark.parametrize(
    ("num_programs", "dtype"), list(zip((1, 2, 3, 5, 9, 16), 2 * DTYPES, strict=True))
)
def test_any_number_of_programs(split, num_programs, dtype):
    """C7: within 1e-6 of one program a tile in fp32; every program, tile and record is met."""
    case = ragged(dtype)
    split(0)
    whole, whole_lse = run_attention(case, "triton")
    split(num_programs)
    out, lse = run_attention(case, "triton")
    check_attention(case, "triton")
    if dtype == torch.float32:
        assert (out - whole).abs().max() <= 1e-6
        assert torch.equal(lse == -math.inf, whole_lse == -math.inf)
        assert (lse - whole_lse)[lse != -math.inf].abs().max() <= 1e-6


@pytest.mark.parametrize("split_at", (1, 2, 3, 4))
def test_17_keys_over_4_splits(split, split_at):
    """C7 as reported: tiles of 16, the last with one key."""
    case = make_case(seq_lens=[17], query_lens=[5], block_size=64, num_heads=1, device=DEVICE)
    split(0)
    whole = run_attention(case, "triton")
    split(split_at)
    for a, b in zip(run_attention(case, "triton"), whole, strict=True):
        assert (a - b).abs().max() <= 1e-6


def test_more_programs_than_keys(split):
    """Shares without a key, of which some lie within a tile: two empties give (0, -inf)."""
    case = make_case(seq_lens=[40], query_lens=[3], block_size=64, num_heads=1, device=DEVICE)
    split(20)
    check_attention(case, "triton")
    case = make_case(seq_lens=[0, 0], query_lens=[4, 3], block_size=64, device=DEVICE)
    out, lse = run_attention(case, "triton")
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_needles_at_the_edges_of_shares(split):
    """The first and last key of every tile, tail and share has nearly all of a row's weight."""
    case = make_case(
        seq_lens=[3 * 144 + 20],
        query_lens=[1],
        block_size=144,
        num_heads=1,
        head_size=64,
        device=DEVICE,
    )
    edges = {0, 451}
    for start in range(0, 452, 32):
        edges |= {start, max(start - 1, 0)}
    case = with_needles(case, sorted(edges))
    for num_programs in (2, 5):
        split(num_programs)
        check_attention(case, "triton")


def test_low_scores(split):
    """A tile of zeros that is not masked would take all of the weight."""
    split(5)
    check_attention(ragged(score_shift=-30.0), "triton")


def test_same_bits_again_and_at_other_blocks(split):
    split(7)
    case = ragged(torch.bfloat16)
    first = run_attention(case, "triton")
    assert all(map(torch.equal, first, run_attention(case, "triton")))
    order = torch.randperm(case.key_pool.shape[0])
    moved = dataclasses.replace(
        case,
        key_pool=case.key_pool[order],
        value_pool=case.value_pool[order],
        block_table=torch.argsort(order)[case.block_table.long()].to(case.block_table.dtype),
        buffers=(),
    )
    assert all(map(torch.equal, first, run_attention(moved, "triton")))


def test_descriptors_and_counted_tiles(monkeypatch, split):
    """The tiles of sm_90 and of sm_100, which counts them along: a share may begin in a block."""
    from chunkattn.kernels import walk

    for arch in (90, 100):
        monkeypatch.setattr(walk, "arch_of", lambda device, arch=arch: arch)
        for num_programs in (3, 7):
            split(num_programs)
            case = make_case(
                seq_lens=[2 * 272 + 9],
                query_lens=[130],
                current_lens=[25],
                block_size=272,
                num_heads=1,
                head_size=32,
                dtype=torch.float16,
                device=DEVICE,
            )
            check_attention(case, "triton")


@settings(max_examples=8)
@given(st.data())
def test_random_batches(data):
    """Any batch over any number of programs."""
    from chunkattn.kernels import walk

    count = data.draw(st.integers(1, 2))
    lens = st.lists(st.integers(0, 150), min_size=count, max_size=count)
    case = make_case(
        seq_lens=data.draw(lens),
        query_lens=data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)),
        current_lens=data.draw(st.none() | lens),
        block_size=data.draw(st.sampled_from((64, 70, 96))),
        num_heads=4,
        num_kv_heads=data.draw(st.sampled_from((1, 4))),
        device=DEVICE,
    )
    launch = functools.partial(walk.walk, num_programs=data.draw(st.integers(1, 12)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_attention_kernel", lambda block_size: launch)
        check_attention(case, "triton")


def test_when_a_launch_is_split():
    """From shapes alone: DreamZero's one frame and its action rows are, a full GPU is not."""
    from chunkattn.kernels.tuning import split_programs

    h100 = 132
    assert split_programs(40 * 7, h100) == h100  # 880 rows: 2.12 waves
    assert split_programs(40, h100) == h100  # 25 rows
    assert split_programs(40 * 37, h100) == 0  # 4680 rows: 11.2 waves
    assert split_programs(h100, h100) == 0
    assert split_programs(40, 0) == 0


def test_launcher_splits_by_the_number_of_multiprocessors(monkeypatch):
    from chunkattn.kernels import walk

    seen = []
    merge = walk.merge
    monkeypatch.setattr(walk, "merge", lambda *a: (seen.append(a[2]), merge(*a)))
    case = ragged()
    check_attention(case, "triton")
    monkeypatch.setattr(walk, "multiprocessors", lambda device: 10)
    check_attention(case, "triton")
    if DEVICE == "cpu":
        assert seen == [10]
