"""The checks of this suite fail when a kernel is wrong: one planted fault after the other.

A fault that no check notices here would pass unnoticed elsewhere too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from chunkattn import ops, torch_backend
from chunkattn.testing import (
    AttentionCase,
    check_attention,
    check_scatter,
    make_case,
    make_pools,
    run_attention,
    with_needles,
)
from tests.helpers.machine import TRITON_DEVICE, needs_triton
from tests.helpers.planting import planted

pytestmark = pytest.mark.usefixtures("one_thread")

FRAME = 880


# -- faults in what a backend attends to, at DreamZero's length -----------------------------------
@functools.cache
def window(block_size: int, dtype: torch.dtype) -> AttentionCase:
    """21 frames of 880 tokens: 18,480 keys, of which a fault loses few."""
    return make_case(
        seq_lens=[21 * FRAME],
        query_lens=[64],
        block_size=block_size,
        num_heads=1,
        head_size=64,
        dtype=dtype,
    )


def without_blocks(first: int, count: int) -> Callable:
    def change(table, seq_lens, scale, block_size):
        kept = torch.cat([table[:, :first], table[:, first + count :]], 1)
        return kept.contiguous(), seq_lens - count * block_size, scale

    return change


def block_twice(table, seq_lens, scale, block_size):
    return torch.cat([table[:, :3], table[:, 2:]], 1).contiguous(), seq_lens + block_size, scale


def fewer_rows(table, seq_lens, scale, block_size):
    return table, seq_lens - 1, scale


def whole_blocks(table, seq_lens, scale, block_size):
    return table, (seq_lens + block_size - 1) // block_size * block_size, scale


def scale_off(table, seq_lens, scale, block_size):
    return table, seq_lens, scale * 1.01


def attend_with(change: Callable) -> Callable:
    """The torch backend, given a changed table, lengths or scale."""
    attend = torch_backend.attend

    def changed(inputs):
        table, seq_lens, scale = change(
            inputs.block_table, inputs.seq_lens, inputs.softmax_scale, inputs.key_pool.shape[1]
        )
        attend(inputs._replace(block_table=table, seq_lens=seq_lens, softmax_scale=scale))

    return changed


def unmasked_value(inputs):
    """Weights of dead rows are 0, but their values are multiplied all the same."""
    torch_backend_attend(inputs)
    last = int(inputs.seq_lens[0]) // inputs.key_pool.shape[1]
    inputs.out.add_(0 * inputs.value_pool[inputs.block_table[0, last]].sum())


torch_backend_attend = torch_backend.attend
LOW = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("block_size", "change"),
    [
        pytest.param(FRAME, without_blocks(7, 1), id="a chunk dropped"),
        pytest.param(FRAME, without_blocks(0, 1), id="the sink dropped"),
        pytest.param(FRAME, block_twice, id="a chunk counted twice"),
        pytest.param(16, without_blocks(500, 1), id="one 16-token block dropped"),
        pytest.param(FRAME, scale_off, id="the scale 1% off"),
    ],
)
def test_error_rule_finds(monkeypatch, dtype, block_size, change):
    """E8: on random data, among 18,480 keys, relative to torch's own error."""
    case = window(block_size, dtype)
    monkeypatch.setattr(torch_backend, "attend", attend_with(change))
    with pytest.raises(AssertionError, match="error of out"):
        check_attention(case, "torch")


def test_error_rule_passes_what_is_right():
    for block_size in (FRAME, 16):
        for dtype in (torch.float16, torch.bfloat16):
            check_attention(window(block_size, dtype), "torch")


def test_needles_find_the_last_key_dropped(monkeypatch):
    case = window(FRAME, torch.bfloat16)
    case = with_needles(case, [0, FRAME - 1, 21 * FRAME - 1])
    check_attention(case, "torch")
    monkeypatch.setattr(torch_backend, "attend", attend_with(fewer_rows))
    with pytest.raises(AssertionError, match=r"error of out.*\(2, 0, "):
        check_attention(case, "torch")


@pytest.mark.parametrize("poison", (0.0, math.nan))
def test_low_scores_and_poison_find_a_tail_not_masked(monkeypatch, poison):
    """Zeros that are seen take all of the weight where scores are near -30; NaN is NaN."""
    case = make_case(
        seq_lens=[33],
        query_lens=[5],
        score_shift=-30.0 if poison == 0 else 0.0,
        poison=poison,
        dtype=torch.bfloat16,
    )
    check_attention(case, "torch")
    monkeypatch.setattr(torch_backend, "attend", attend_with(whole_blocks))
    with pytest.raises(AssertionError):
        check_attention(case, "torch")


def test_poison_finds_values_not_masked(monkeypatch):
    """C1: 0 * NaN."""
    case = make_case(seq_lens=[33], query_lens=[5])
    monkeypatch.setattr(torch_backend, "attend", unmasked_value)
    with pytest.raises(AssertionError, match="error of out is nan"):
        check_attention(case, "torch")


def test_writes_beside_out_and_into_pools_are_found(monkeypatch):
    def too_much(inputs):
        torch_backend_attend(inputs)
        inputs.out.as_strided((1,), (1,), 0).zero_()

    def into_pool(inputs):
        torch_backend_attend(inputs)
        inputs.value_pool[0, 0, 0, 0] = 1.0

    case = make_case(seq_lens=[33], query_lens=[5])
    for fault, message in ((too_much, "beside `out`"), (into_pool, "the pools changed")):
        monkeypatch.setattr(torch_backend, "attend", fault)
        with pytest.raises(AssertionError, match=message):
            run_attention(case, "torch")


# -- faults in the source of the kernels ----------------------------------------------------------
@functools.cache
def small_cases(dtype: torch.dtype, block_size: int) -> tuple[AttentionCase, ...]:
    """Whole tiles, tails, a partly filled block, current rows; random, needles, low scores."""
    sizes = {
        "block_size": block_size,
        "seq_lens": [2 * 84 + 17],
        "query_lens": [5],
        "current_lens": [3],
        "head_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "layout": "interleaved",
        "dtype": dtype,
        "device": TRITON_DEVICE,
    }
    ragged = sizes | {
        "seq_lens": [84, 0, 169],
        "query_lens": [3, 2, 17],
        "current_lens": [4, 0, 20],
        "head_size": 32,
        "layout": "separate",
    }
    edges = [0, 31, 32, 63, 64, 83, 84, 147, 148, 167, 168, 184, 185, 187]
    return (
        make_case(**sizes),
        make_case(**ragged),
        with_needles(make_case(**sizes), edges),
        make_case(**ragged, score_shift=-30.0, poison=0.0),
    )


def check_small_cases(dtypes: Sequence[torch.dtype], block_size: int) -> None:
    for dtype in dtypes:
        for case in small_cases(dtype, block_size):
            check_attention(case, "triton")


@functools.cache
def case_of_waves() -> AttentionCase:
    """7 tiles of one sequence: one whole for each of 5 programs, and two that they share."""
    return make_case(
        seq_lens=[2 * 84 + 5],
        query_lens=[5],
        block_size=84,
        num_heads=7,
        num_kv_heads=7,
        device=TRITON_DEVICE,
    )


@functools.cache
def case_of_everything(block_size: int) -> AttentionCase:
    """Segments, scales and biases of blocks."""
    return make_case(
        seq_lens=[4 * block_size + 5],
        query_lens=[5],
        current_lens=[3],
        block_size=block_size,
        head_size=32,
        num_heads=4,
        num_kv_heads=2,
        segment_blocks=[[1, 2]],
        fp8=True,
        biased=True,
        device=TRITON_DEVICE,
    )


def run_check(check: str, monkeypatch: pytest.MonkeyPatch, walk: ModuleType) -> None:
    """The check of that name, of the kernels in force, whose module ``walk`` is."""
    if check in ("scatter", "writes of fp8"):
        check_writes() if check == "scatter" else check_fp8_writes()
    elif check in ("segments", "segments of small blocks"):
        check_attention(case_of_everything(84 if check == "segments" else 12), "triton")
    elif check == "walk with descriptors":
        launch = functools.partial(walk.walk, descriptors=True)
        monkeypatch.setattr(walk, "walk", launch)
        check_small_cases([torch.float16], 84)
    elif check == "split walk":
        launch = functools.partial(walk.walk, num_programs=5)
        monkeypatch.setattr(walk, "walk", launch)
        for case in (*small_cases(torch.float32, 84)[1:3], case_of_waves()):
            check_attention(case, "triton")
    else:
        check_small_cases([torch.float32, torch.float16], 12 if check == "gather" else 84)


def check_fp8_writes() -> None:
    """Two blocks are opened, one is added to; K and V differ, some rows are extra rows."""
    pools = make_pools(4, 4, 2, 8, dtype=torch.float8_e4m3fn, device=TRITON_DEVICE)
    rows = torch.randn(2, 9, 2, 8)
    rows[:, 8] *= 900
    rows[:, 7] *= 5
    rows[0, 1, 0, 3], rows[1, 2, 1, 2] = math.nan, -math.inf
    key, value = rows.to(TRITON_DEVICE)
    slots = torch.tensor([8, 9, 10, -1, 1, 0, 15, 2, 6], device=TRITON_DEVICE)
    before = torch.rand(2, 4, 2) + 0.1
    scales = before.clone().to(TRITON_DEVICE)
    extra = (key[:6], value[:6], key[6:], value[6:])
    lens = torch.zeros(1, dtype=torch.int32, device=TRITON_DEVICE)
    starts = torch.tensor([0, 6], dtype=torch.int32, device=TRITON_DEVICE)
    out = torch.zeros(6, 2, 8, device=TRITON_DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=TRITON_DEVICE)
    attention = (table, lens, starts, out, 0.3, "triton")
    ops.write_attend(out, *extra, *pools[:2], slots, *attention, *scales)
    for new, scale, old, pool in zip(rows, scales.cpu(), before, pools, strict=False):
        size = torch.where(new.abs() < math.inf, new.abs(), 0.0).amax(-1)
        expected = old.clone()
        expected[0], expected[2] = size[[4, 5, 7]].amax(0) / 448, size[:3].amax(0) / 448
        torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
        for row, slot in zip(new, slots.tolist(), strict=True):
            if slot >= 0:
                wanted = (row / scale[slot // 4, :, None]).clamp(-448, 448).to(pool.dtype)
                got = pool[slot // 4, slot % 4].float().cpu()
                torch.testing.assert_close(got, wanted.float(), rtol=0, atol=0, equal_nan=True)


def check_writes() -> None:
    pools = make_pools(4, 4, 2, 8, dtype=torch.float32, device=TRITON_DEVICE, layout="slots")
    key, value = torch.randn(2, 5, 2, 8, device=TRITON_DEVICE)
    slots = torch.tensor([15, 3, -1, 6, 0], device=TRITON_DEVICE)
    check_scatter(key, value, pools, slots, "triton")
    # Keys and values of other strides, through the op that also writes extra rows.
    pools = make_pools(4, 4, 2, 8, dtype=torch.float32, device=TRITON_DEVICE)
    lens = torch.tensor([5], dtype=torch.int32, device=TRITON_DEVICE)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device=TRITON_DEVICE)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=TRITON_DEVICE)
    slots = torch.arange(4, 9, device=TRITON_DEVICE)
    rows = (key, key[:3], value[:3], key[3:], value[3:])
    out = torch.full_like(key, math.nan)
    ops.write_attend(*rows, *pools[:2], slots, table, lens, starts, out, 0.3, "triton")
    assert torch.equal(pools[0].flatten(0, 1)[4:9], key)
    assert torch.equal(pools[1].flatten(0, 1)[4:9], value)


WALK_FAULTS = {
    "first tail dropped": (
        "                start = first_entry\n",
        "                start = first_entry + 1\n",
    ),
    "last tail dropped": (
        "                stop = next_entry\n",
        "                stop = next_entry - 1\n",
    ),
    "last block wrong": ("tl.cast(num_whole_blocks, tl.int64) * s", "0 * s"),
    "rest dropped": ("times(stop, REST_N), num_last_rows)", "times(stop, REST_N), 0)"),
    "current rows dropped": ("if key_current_ptr is not None:", "if False:"),
    "current rows from the first": (
        "tl.load(batch.current_start_loc_ptr + seq)",
        "tl.load(batch.current_start_loc_ptr)",
    ),
    "first head of K for all": (
        "key_pool_ptr + kv_head.to(tl.int64) * stride_key.head",
        "key_pool_ptr + 0 * stride_key.head",
    ),
    "first head of V for all": (
        "value_pool_ptr + kv_head.to(tl.int64) * stride_value.head",
        "value_pool_ptr + 0 * stride_value.head",
    ),
    "table of the first sequence for all": (
        "tl.cast(seq, tl.int64) * stride_table.seq",
        "0 * stride_table.seq",
    ),
}
LOOP_FAULTS = {
    "first tile dropped": ("tl.range(first_tile, l", "tl.range(first_tile + 1, l"),
    "last tile dropped": ("last_tile, disallow", "last_tile - 1, disallow"),
    "first block read again": ("entry = i //", "entry = 0 * i //"),
    "first tile of a block read again": ("times(i % TILES, ", "times(0 * i % TILES, "),
    "tail from the start of its block": ("rows = (FIRST_ROW + offs_n)", "rows = offs_n"),
    "tail not masked": ("mask_n,\n            MASKED,", "mask_n,\n            False,"),
    "tail one row short": ("offs_n < NUM_ROWS", "offs_n < NUM_ROWS - 1"),
    "V not masked in the tail": (
        "tl.load(value_tile, mask=mask_n[:, None] & mask_d[None, :]",
        "tl.load(value_tile, mask=mask_d[None, :]",
    ),
    "last row dropped": ("rows < last_row", "rows < last_row - 1"),
    "one row too many": ("rows < last_row", "rows < last_row + 1"),
    "V not masked": (
        "stride_value_row + offs_d[None, :],\n            mask=mask_n[:, None] & mask_d[None, :]",
        "stride_value_row + offs_d[None, :],\n            mask=mask_d[None, :]",
    ),
    "rows of K from the wrong place": ("rows[None, :] * stride_key_row", "rows[None, :] * 0"),
}
DESCRIPTOR_FAULTS = {
    "first head for all": ("kv_head * HEAD_SIZE]", "0 * HEAD_SIZE]"),
    "first block for all": ("[block.to(tl.int32), ", "[block.to(tl.int32) * 0, "),
    "tail from the start of its block": ("FIRST_ROW + row, kv", "row, kv"),
}
BOX_FAULTS = {
    "heads of the pool wrong": ("num_kv_heads * head_size], [*s", "head_size], [*s"),
}
GATHER_FAULTS = {
    "first tile dropped": (
        "tl.range(start, rest, BLOCK_N)",
        "tl.range(start + BLOCK_N, rest, BLOCK_N)",
    ),
    "rest dropped": ("if rest < stop:", "if rest > stop:"),
    "one row too many": ("rest + offs_n < stop", "rest + offs_n <= stop"),
    "one row short": ("rest + offs_n < stop", "rest + offs_n < stop - 1"),
    "rest not masked": (
        "mask_n,\n        MASKED,\n        PER_KEY",
        "mask_n,\n        False,\n        PER_KEY",
    ),
    "first block for all": ("table_ptr + entry * stride_table.entry", "table_ptr + entry * 0"),
    "first slot of each block": ("+= slot * stride_key.slot", "+= slot * 0"),
    "first slot of V of each block": ("+= slot * stride_value.slot", "+= slot * 0"),
    "first block of V for all": ("= block * stride_value.block", "= block * 0"),
    "first head of K and V for all": (
        "key_pool_ptr + kv_head.to(tl.int64) * stride_key.head",
        "key_pool_ptr + 0 * stride_key.head",
    ),
    "current rows dropped": ("if key_current_ptr is not None:", "if False:"),
}
LAUNCH_FAULTS = {
    "scale 1% off": ("_SCALE) * LOG2E.value", "_SCALE) * LOG2E.value * 1.01"),
    "one tile too few": (
        "num_rows // tiles.block_m + num_seqs",
        "num_rows // tiles.block_m + num_seqs - 1",
    ),
}
STEP_FAULTS = {
    "sum not rescaled": (
        "acc * (alpha * acc_scale if HAS_ACC_SCALE else alpha)[:, None]",
        "acc",
    ),
    "denominator not rescaled": ("row_sum * alpha + ", "row_sum + "),
    "scores not masked": ('tl.where(mask_n[None, :], scores, float("-inf"))', "scores"),
    "rows read from the wrong head": ("head * stride_query.head", "0 * stride_query.head"),
    "rows written to the wrong head": ("head * stride_out.head", "0 * stride_out.head"),
    "first head of current K and V for all": ("kv_head.to(tl.int64) * stride.head", "0"),
    "lse in base 2": ("tl.math.log2(safe_sum)) * LN2", "tl.math.log2(safe_sum))"),
    "lse without the maximum": ("(row_max + tl.math", "(0 * row_max + tl.math"),
    "0 / 0 without a key": ("acc / safe_sum[:, None]", "acc / row_sum[:, None]"),
    "sequence one too early": ("BLOCK_M + middle <= tile:", "BLOCK_M + middle < tile:"),
    "tokens of a tile not grouped": ("offs_m // QUERIES_PER_KV", "offs_m // BLOCK_M"),
    "heads of a tile not grouped": ("offs_m % QUERIES_PER_KV", "0 * offs_m"),
    "rows of the next sequence written": (
        "mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :],\n    )\n    if lse",
        "mask=(offs_d < HEAD_SIZE)[None, :],\n    )\n    if lse",
    ),
}
SPLIT_FAULTS = {
    "first item of a share dropped": (
        "first = tl.cdiv(tl.maximum(first_unit - base, 0)",
        "first = 1 + tl.cdiv(tl.maximum(first_unit - base, 0)",
    ),
    "an item in two shares": (
        "last = tl.cdiv(tl.maximum(last_unit - base, 0)",
        "last = 1 + tl.cdiv(tl.maximum(last_unit - base, 0)",
    ),
    "share of the first program for all": (
        "base + tl.program_id(0) * share",
        "base + 0 * share",
    ),
    "whole tiles of the first program for all": (
        "whole_tile = tl.program_id(0)",
        "whole_tile = 0 * tl.program_id(0)",
    ),
    "a share taken for a whole tile": ("piece < num_whole", "piece <= num_whole"),
    "one tile too few": ("last_tile - first_tile + 1, 0", "last_tile - first_tile, 0"),
    "last share short": ("first_unit + share, num_units", "first_unit + share, num_units - 8"),
    "current rows not counted": ("num_rest += tl.cdiv", "num_rest += 0 * tl.cdiv"),
    "first head for all": ("kv_head = inside // num_tiles", "kv_head = 0 * inside"),
}
SPLIT_WALK_FAULTS = {
    "records of a program in one place": (
        "tl.minimum(piece - num_whole, 1)",
        "0 * num_whole",
    ),
    "whole tiles counted for records": (
        "tl.minimum(piece - num_whole, 1)",
        "tl.minimum(piece + 0 * num_whole, 1)",
    ),
}
MERGE_FAULTS = {
    "first record dropped": ("tl.range(first_program, l", "tl.range(first_program + 1, l"),
    "last record dropped": ("last_program + 1)", "last_program)"),
    "records of one program mixed up": ("* share < first_unit)", "* share > first_unit)"),
    "records not rescaled": ("acc * alpha[:, None] + o", "acc + o"),
    "sums not rescaled": ("other_sum * beta", "other_sum"),
    "whole tiles merged": ("(first_program == last_program)", "(first_program > last_program)"),
}
SEGMENT_FAULTS = {
    "first query for all": ("tl.cast(segment, tl.int64) * stride_query.segment", "0"),
    "scale of K of the first head": (
        "kv_head * stride_key_scale.head",
        "0 * stride_key_scale.head",
    ),
    "scale of V of the first block": (
        "block * stride_value_scale.block",
        "0 * stride_value_scale.block",
    ),
    "bias of the first block": ("block * stride_bias.block", "0 * stride_bias.block"),
    "bias in base e": (
        "tl.load(block_bias_ptr + offset) * LOG2E",
        "tl.load(block_bias_ptr + offset)",
    ),
    "bias dropped": ("scores * scale_log2 + bias", "scores * scale_log2 + 0 * bias"),
}
SEGMENT_WALK_FAULTS = {
    "segments one block short": ("first_entry + entries.to", "first_entry - 1 + entries.to"),
    "segments of the next sequence": ("seq * (NUM_SEGMENTS - 1) + segment)", "segment * 0)"),
    "sum left in the unit of the last block": ("acc *= new_unit", "acc *= 1.0"),
    "sum not brought to the unit of the rest": ("acc *= acc_unit / new_unit", "acc *= 1.0"),
}
SEGMENT_LOOP_FAULTS = {
    "sum not brought to the unit of a block": ("acc_unit / new_unit", "new_unit / new_unit"),
}
SEGMENT_GATHER_FAULTS = {
    "V not scaled": ("value.to(tl.float32) * value_scale[:, None]", "value.to(tl.float32)"),
    "first scale for all keys": (
        "scale_log2 = scale_log2[None, :]",
        "scale_log2 = tl.max(scale_log2, 0)",
    ),
    "segments one row long": ("entries.to(tl.int32) * BLOCK_SIZE", "entries.to(tl.int32)"),
}
SCATTER_FAULTS = {
    "slots below 0 written": ("((slot >= 0) & mask_t)", "mask_t"),
    "extra rows dropped": ("key = tl.where(is_token, key, key_extra)", "key = key"),
    "extra rows one off": ("(offs_t - num_tokens)", "(offs_t - num_tokens + 1)"),
    "first slot of each block": ("offset * stride_value_pool.slot", "0 * stride_value_pool.slot"),
    "heads mixed up": ("head * stride_key_pool.head", "0 * head"),
    "last row dropped": ("offs_t < num_tokens + num_extra", "offs_t < num_tokens + num_extra - 1"),
    "K written to V": ("as_stored(value, value_scale", "as_stored(key, value_scale"),
}
FP8_FAULTS = {
    "scale of the first head": ("head[None, :] * stride_value_scale.head", "0 * head[None, :]"),
    "scale of the first block": ("block[:, None] * stride_key_scale.block", "0 * block[:, None]"),
}
SCALE_FAULTS = {
    "not clamped": ("x > LARGEST_E4M3, LARGEST_E4M3,", "x > LARGEST_E4M3, x,"),
    "multiplied by the scale": (
        "tl.math.div_rn(x.to(tl.float32), scale)",
        "x.to(tl.float32) * scale",
    ),
    "every block opened": ("(first % BLOCK_SIZE == 0)", "(first % BLOCK_SIZE >= 0)"),
    "no block opened": ("(first % BLOCK_SIZE == 0)", "(first % BLOCK_SIZE < 0)"),
    "blocks before counted": ("(slot >= first)", "(slot >= 0)"),
    "blocks behind counted": ("(slot < first + BLOCK_SIZE)", "(slot >= 0)"),
    "infinity counted": ('size < float("inf")', 'size <= float("inf")'),
    "extra rows not counted": ("inside & (extra >= 0)", "inside & (extra < 0)"),
    "K counted for V": ("tl.maximum(value / LARGEST", "tl.maximum(key / LARGEST"),
}
# The file they are planted in, the check that must find them, and they.
FAULTS = {
    "walk": ("walk.py", "walk", WALK_FAULTS),
    "loops": ("loops.py", "walk", LOOP_FAULTS),
    "descriptors": ("loops.py", "walk with descriptors", DESCRIPTOR_FAULTS),
    "boxes": ("launch.py", "walk with descriptors", BOX_FAULTS),
    "gather": ("gather.py", "gather", GATHER_FAULTS),
    "launch": ("launch.py", "walk", LAUNCH_FAULTS),
    "step": ("primitives.py", "walk", STEP_FAULTS),
    "split": ("split.py", "split walk", SPLIT_FAULTS),
    "split walk": ("walk.py", "split walk", SPLIT_WALK_FAULTS),
    "merge": ("merge.py", "split walk", MERGE_FAULTS),
    "factors": ("primitives.py", "segments", SEGMENT_FAULTS),
    "segments": ("walk.py", "segments", SEGMENT_WALK_FAULTS),
    "units": ("loops.py", "segments", SEGMENT_LOOP_FAULTS),
    "segments of small blocks": ("gather.py", "segments of small blocks", SEGMENT_GATHER_FAULTS),
    "scatter": ("scatter.py", "scatter", SCATTER_FAULTS),
    "fp8": ("scatter.py", "writes of fp8", FP8_FAULTS),
    "scales": ("scales.py", "writes of fp8", SCALE_FAULTS),
}


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("group", "fault"), [(group, fault) for group in FAULTS for fault in FAULTS[group][2]]
)
def test_kernel_fault_is_found(monkeypatch, tmp_path, group, fault):
    file, check, faults = FAULTS[group]
    load = planted(monkeypatch, tmp_path, file, *faults[fault])
    monkeypatch.setattr(ops, "import_kernel", load)
    with pytest.raises(AssertionError):
        run_check(check, monkeypatch, load("walk"))


@needs_triton
@pytest.mark.parametrize("check", sorted({check for _, check, _ in FAULTS.values()}))
def test_kernels_without_a_fault_pass(monkeypatch, tmp_path, check):
    load = planted(monkeypatch, tmp_path)
    monkeypatch.setattr(ops, "import_kernel", load)
    run_check(check, monkeypatch, load("walk"))
