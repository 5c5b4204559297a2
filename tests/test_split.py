"""Split launches: any number of programs gives what one program a tile gives."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import ops
from chunkattn.testing import AttentionCase, check_attention, make_case, run_attention, with_needles
from tests.helpers.machine import TRITON_DEVICE as DEVICE
from tests.helpers.machine import needs_triton

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_triton,
]

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


def one_sequence(dtype: torch.dtype = torch.float32) -> AttentionCase:
    """9 tiles, three of each K/V head: from 9 programs on none of them is taken whole."""
    shape = {"seq_lens": [80 + 33], "query_lens": [70], "current_lens": [5], "num_heads": 6}
    return ragged(dtype, **shape, num_kv_heads=3)


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


@pytest.mark.parametrize(
    ("num_programs", "dtype"), list(zip((2, 4, 5, 9, 10), (*DTYPES, *DTYPES[:2]), strict=True))
)
def test_whole_tiles_of_one_sequence(split, num_programs, dtype):
    """Whole tiles before a share of the last ones, of more programs than tiles, and none left."""
    split(num_programs)
    check_attention(one_sequence(dtype), "triton")


def pieces_of_programs(
    num_programs: int, query_lens: list[int], seq_lens: list[int], num_kv_heads: int
) -> list[list[tuple[int, ...]]]:
    """The (sequence, head, tile, first unit, unit after the last, units) of every program, in turn.

    Tiles of 16 rows, blocks of 64 keys and rests of 32.
    """
    import triton
    import triton.language as tl

    from chunkattn.kernels import split
    from chunkattn.kernels.arguments import Batch

    @triton.jit
    def kernel(
        out_ptr,
        count_ptr,
        batch,
        num_programs,
        SIZES: tl.constexpr,
        MOST: tl.constexpr,
        SHARE: tl.constexpr,
        LOCATE: tl.constexpr,
    ):
        num_whole, first_unit, last_unit, first_tile, num_shared = SHARE(num_programs, batch, SIZES)
        num_pieces = num_whole + num_shared
        tl.store(count_ptr + tl.program_id(0), num_pieces)
        for piece in tl.range(0, num_pieces):
            seq, kv_head, tile, first, last, num_units = LOCATE(
                piece, num_whole, first_unit, last_unit, first_tile, num_programs, batch, SIZES
            )
            row_ptr = out_ptr + (tl.program_id(0) * MOST + piece) * 6
            tl.store(row_ptr, seq)
            tl.store(row_ptr + 1, kv_head)
            tl.store(row_ptr + 2, tile)
            tl.store(row_ptr + 3, first)
            tl.store(row_ptr + 4, last)
            tl.store(row_ptr + 5, num_units)

    as_int32 = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    starts = as_int32([0, *itertools.accumulate(query_lens)])
    batch = Batch(starts, as_int32(seq_lens), None, len(seq_lens), num_kv_heads, None)
    most = num_kv_heads * sum(-(-rows // 16) for rows in query_lens)
    out = torch.zeros(num_programs, most, 6, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(num_programs, dtype=torch.int32, device=DEVICE)
    sizes = split.SplitSizes(1, 16, 64, 4, 32)
    device_functions = (split.share_of_program, split.locate_piece)
    kernel[(num_programs,)](out, count, batch, num_programs, sizes, most, *device_functions)
    return [
        [tuple(piece) for piece in pieces[:n]]
        for pieces, n in zip(out.tolist(), count.tolist(), strict=True)
    ]


@pytest.mark.parametrize("num_programs", (1, 2, 4, 5, 6, 9))
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([40], [3 * 64 + 20]), ([16], [64]), ([3], [0]), ([40, 0, 5], [2 * 64, 64, 7])],
)
def test_who_takes_what(num_programs, query_lens, seq_lens):
    """Every unit once, at most two records a program, and whole tiles first of one sequence."""
    tiles = [
        (seq, head, tile)
        for seq, rows in enumerate(query_lens)
        for head in range(2)
        for tile in range(-(-rows // 16))
    ]
    units = [max(1, keys // 64 * 4 + math.ceil(keys % 64 / 32) * 2) for keys in seq_lens]
    programs = pieces_of_programs(num_programs, query_lens, seq_lens, 2)
    taken = [
        (*tile, unit)
        for pieces in programs
        for *tile, first, last, _ in pieces
        for unit in range(first, last)
    ]
    assert sorted(taken) == [(*tile, unit) for tile in tiles for unit in range(units[tile[0]])]

    waves = len(tiles) // num_programs if len(seq_lens) == 1 else 0
    rest = sum(units[tile[0]] for tile in tiles[waves * num_programs :])
    for program, pieces in enumerate(programs):
        assert all(num_units == units[seq] for seq, *_, num_units in pieces)
        whole, shared = pieces[:waves], pieces[waves:]
        mine = tiles[program : waves * num_programs : num_programs]
        assert whole == [(*tile, 0, units[0], units[0]) for tile in mine]
        assert sum(last - first for *_, first, last, _ in shared) <= -(-rest // num_programs)
        partial = [last - first < num_units for *_, first, last, num_units in shared]
        assert not any(partial[1:-1])


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


@pytest.mark.parametrize("make", (ragged, one_sequence))
def test_same_bits_again_and_at_other_blocks(split, make):
    split(7)
    case = make(torch.bfloat16)
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
