"""`paged_window_attention` sees every row that is visible, and nothing of what is not."""

import dataclasses
import math

import pytest
import torch

import chunkattn
from chunkattn.testing import (
    AttentionCase,
    check_attention,
    make_case,
    run_attention,
    with_needles,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def target(attention_target):
    """Small blocks go through both kernels."""
    return attention_target


DEAD = {"V": (False, True, math.nan), "K": (True, False, math.nan)}
DEAD |= {"Inf": (True, True, math.inf), "both": (True, True, math.nan)}


@all_dtypes
@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize(("block_size", "seq_len"), [(16, 17), (80, 81)])
def test_dead_rows_do_not_matter(target, dtype, dead, block_size, seq_len):
    """C1, C2: NaN or Inf behind the last row gives the same bits as zeros there."""
    in_key, in_value, poison = DEAD[dead]
    case = make_case(
        seq_lens=[seq_len],
        query_lens=[5],
        block_size=block_size,
        dtype=dtype,
        device=target.device,
        poison=0.0,
    )
    expected, expected_lse = run_attention(case, target.backend)
    last = int(case.block_table[0, seq_len // block_size])
    for pool, hit in ((case.key_pool, in_key), (case.value_pool, in_value)):
        if hit:
            pool[last, seq_len % block_size :] = poison
    out, lse = run_attention(case, target.backend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_null_block_and_table_padding(target):
    """C3: block 0 is NaN and pads the table, before and after a warm-up; it stays as it was."""
    case = make_case(seq_lens=[33, 4], query_lens=[5, 5], device=target.device)
    assert case.key_pool[0].isnan().all()
    assert (case.block_table[:, -1] == 0).all()
    first = check_attention(case, target.backend)
    assert torch.equal(check_attention(case, target.backend), first)


def test_constant_upper_bound(target):
    """D7: a table for 20 rows of which 4 are visible is a table for 4 rows."""
    wide = make_case(seq_lens=[20], query_lens=[3], block_size=4, device=target.device)
    wide = dataclasses.replace(wide, seq_lens=torch.full_like(wide.seq_lens, 4))
    expected = dataclasses.replace(wide, block_table=wide.block_table[:, :1].contiguous())
    wide.key_pool[wide.block_table[0, 1:].long()] = math.nan
    wide.value_pool[wide.block_table[0, 1:].long()] = math.nan
    out, lse = run_attention(wide, target.backend)
    expected_out, expected_lse = run_attention(expected, target.backend)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    check_attention(wide, target.backend)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16")])
def test_dreamzero_window(target, dtype):
    """E8: 21 blocks of 880 rows are 18,480 keys; the outputs are about 0.01."""
    case = make_case(
        seq_lens=[21 * 880],
        query_lens=[64],
        block_size=880,
        num_heads=1,
        head_size=64,
        dtype=dtype,
        device=target.device,
    )
    out = check_attention(case, target.backend)
    assert 0.005 < out.float().std() < 0.02


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        (6, torch.float32),
        (16, torch.bfloat16),
        (96, torch.float32),
        (96, torch.float16),
        (880, torch.float32),
        (880, torch.bfloat16),
        (1560, torch.bfloat16),
    ],
)
def test_needles(target, block_size, dtype):
    """E8: a query for the first and last row of every block, tile and segment finds its row."""
    paged, current = 2 * block_size + 33, 35
    case = make_case(
        seq_lens=[paged],
        query_lens=[1],
        current_lens=[current],
        block_size=block_size,
        num_heads=2 if block_size < 100 else 1,
        head_size=128,
        dtype=dtype,
        device=target.device,
    )
    # Tiles are 16 rows or a multiple of that, counted from the start of a block or segment.
    starts = [
        start + tile
        for start, stop in (
            (0, block_size),
            (block_size, 2 * block_size),
            (2 * block_size, paged),
            (paged, paged + current),
        )
        for tile in range(0, stop - start, 16)
    ]
    total = paged + current
    edges = {0, total - 1, paged - 1, *starts, *(start - 1 for start in starts if start)}
    case = with_needles(case, sorted(edges))
    out = check_attention(case, target.backend)
    _, value, *_ = case.visible(0)
    found = value[sorted(edges)].repeat_interleave(case.query.shape[1], 1)
    assert (out.float() - found.float()).abs().mean() < 0.05


@all_dtypes
@pytest.mark.parametrize("block_size", (1, 6, 12, 16, 80, 880))
def test_low_scores_see_unmasked_zeros(target, dtype, block_size):
    """E8: scores are near -30, so one unmasked key of zeros would take all of the weight."""
    case = make_case(
        seq_lens=[2 * block_size + 1, block_size],
        query_lens=[17, 2],
        current_lens=[3, 18],
        block_size=block_size,
        num_heads=1 if block_size > 100 else 2,
        score_shift=-30.0,
        poison=0.0,
        dtype=dtype,
        device=target.device,
    )
    check_attention(case, target.backend)


def test_same_bits_every_time(target):
    case = make_case(
        seq_lens=[100, 7], query_lens=[20, 3], dtype=torch.float16, device=target.device
    )
    first, first_lse = run_attention(case, target.backend)
    for _ in range(2):
        out, lse = run_attention(case, target.backend)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


def beyond_int32(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pools of more than 2**31 elements, interleaved; nearly all of it is never touched."""
    blocks, block_size, heads, head_size = 140, 1560, 40, 128
    storage = torch.empty(
        blocks, 2, block_size, heads, head_size, dtype=torch.float16, device=device
    )
    assert storage[-1, 0].storage_offset() > 2**31
    return storage[:, 0], storage[:, 1]


@pytest.mark.parametrize("block_size", (20, 80))
def test_pool_beyond_32_bit_offsets(target, block_size):
    """A1: block id times stride leaves int32; the bytes of the last block are those that count."""
    key_pool, value_pool = beyond_int32(target.device)
    last, first = key_pool.shape[0] - 1, 1560 - block_size
    key, value, query = (
        torch.randn(block_size, 40, 128).to(target.device, torch.float16) for _ in range(3)
    )
    slots = torch.arange(last * 1560 + first, (last + 1) * 1560, device=target.device)
    chunkattn.scatter_kv(key, value, key_pool, value_pool, slots, backend=target.backend)
    assert torch.equal(key_pool[last, first:], key)
    assert torch.equal(value_pool[last, first:], value)
    # The same rows as a pool of small blocks whose stride is that of the big ones.
    case = AttentionCase(
        query=query[:3, :2],
        key_pool=key_pool[:, first:, :2],
        value_pool=value_pool[:, first:, :2],
        block_table=torch.tensor([[last]], dtype=torch.int32, device=target.device),
        seq_lens=torch.tensor([block_size], dtype=torch.int32, device=target.device),
    )
    check_attention(case, target.backend)
