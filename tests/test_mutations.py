"""The checks of this suite fail when a kernel is wrong: one planted fault after the other.

A fault that no check notices here would pass unnoticed elsewhere too.
"""

import functools
import importlib
import importlib.util
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

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

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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

    def changed(query, key_pool, value_pool, table, seq_lens, *rest):
        *rest, scale = rest
        table, seq_lens, scale = change(table, seq_lens, scale, key_pool.shape[1])
        attend(query, key_pool, value_pool, table, seq_lens, *rest, scale)

    return changed


def unmasked_value(query, key_pool, value_pool, table, seq_lens, *rest):
    """Weights of dead rows are 0, but their values are multiplied all the same."""
    torch_backend_attend(query, key_pool, value_pool, table, seq_lens, *rest)
    out = rest[4]
    last = int(seq_lens[0]) // key_pool.shape[1]
    out += 0 * value_pool[table[0, last]].sum()


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
    def too_much(*arguments):
        torch_backend_attend(*arguments)
        arguments[9].as_strided((1,), (1,), 0).zero_()

    def into_pool(*arguments):
        torch_backend_attend(*arguments)
        arguments[2][0, 0, 0, 0] = 1.0

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


def run_check(check: str, monkeypatch: pytest.MonkeyPatch, kernels: ops.Kernels) -> None:
    """The check of that name of the kernels in force."""
    if check == "scatter":
        check_writes()
    elif check == "walk with descriptors":
        launch = functools.partial(kernels.walk.walk, descriptors=True)
        monkeypatch.setattr(kernels.walk, "walk", launch)
        check_small_cases([torch.float16], 84)
    else:
        check_small_cases([torch.float32, torch.float16], 12 if check == "gather" else 84)


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
    "first tile dropped": ("tl.range(0, num_whole_blocks * T", "tl.range(1, num_whole_blocks * T"),
    "last tile dropped": ("num_whole_blocks * TILES_PER_BLOCK)", "num_whole_blocks - 1)"),
    "first block read again": ("entry = i //", "entry = 0 * i //"),
    "first tile of a block read again": ("tile = i %", "tile = 0 * i %"),
    "first tail dropped": ("tl.range(0, num_whole_blocks, d", "tl.range(1, num_whole_blocks, d"),
    "tail of the wrong block": (
        "for entry in tl.range(0, n",
        "entry = 0\n        for _ in tl.range(0, n",
    ),
    "tail not masked": ("scale_log2, mask_t, True", "scale_log2, mask_t, False"),
    "tail one row short": ("offs_t < TAIL_ROWS", "offs_t < TAIL_ROWS - 1"),
    "V not masked in the tail": ("mask=mask_t[:, None] & mask_d[None, :]", "mask=mask_d[None, :]"),
    "last block wrong": ("tl.cast(num_whole_blocks, tl.int64)", "0"),
    "first head of K and V for all": (
        "key_pool_ptr + kv_head.to(tl.int64) * stride_key_head",
        "key_pool_ptr + 0 * stride_key_head",
    ),
    "rows read from the wrong head": ("head * stride_query_head", "0 * stride_query_head"),
    "rows written to the wrong head": ("head * stride_out_head", "0 * stride_out_head"),
}
DESCRIPTOR_FAULTS = {
    "first head of K for all": (
        "[block, slot, column]).reshape(BLOCK_N, BLOCK_D)\n                value",
        "[block, slot, 0]).reshape(BLOCK_N, BLOCK_D)\n                value",
    ),
    "first block for all": (
        "                first = [block, T",
        "                first = [block * 0, T",
    ),
    "tail from the start of its block": ("[block, TAIL_START, column]", "[block, 0, column]"),
    "heads of the pool wrong": ("num_kv_heads * head_size], [*s", "head_size], [*s"),
    "strides of K for V": (
        "for pool in (key_pool, value_pool))\n        tail",
        "for pool in (key_pool, key_pool))\n        tail",
    ),
}
GATHER_FAULTS = {
    "first tile dropped": (
        "tl.range(0, num_full, BLOCK_N)",
        "tl.range(BLOCK_N, num_full, BLOCK_N)",
    ),
    "rest dropped": ("if num_full < seq_len:", "if num_full > seq_len:"),
    "one row too many": (
        "mask_n = num_full + offs_n < seq_len",
        "mask_n = num_full + offs_n <= seq_len",
    ),
    "one row short": (
        "mask_n = num_full + offs_n < seq_len",
        "mask_n = num_full + offs_n < seq_len - 1",
    ),
    "rest not masked": ("scale_log2, mask_n, True", "scale_log2, mask_n, False"),
    "first block for all": ("table_ptr + entry * stride_table_block", "table_ptr + entry * 0"),
    "first slot of each block": ("+ slot * stride_key_slot", "+ slot * 0"),
    "first slot of V of each block": ("+ slot * stride_value_slot", "+ slot * 0"),
    "first block of V for all": (
        "return key, block * stride_value_block",
        "return key, 0 * stride_value_block",
    ),
    "first head of K and V for all": (
        "key_pool_ptr + kv_head.to(tl.int64) * stride_key_head",
        "key_pool_ptr + 0 * stride_key_head",
    ),
}
LAUNCH_FAULTS = {
    "current rows dropped": ('"HAS_CURRENT": key_current is not None', '"HAS_CURRENT": False'),
    "scale 1% off": ("_SMALLEST_SCALE) * LOG2E", "_SMALLEST_SCALE) * LOG2E * 1.01"),
    "one tile too few": ("num_rows // block_m + num_seqs", "num_rows // block_m + num_seqs - 1"),
}
STEP_FAULTS = {
    "sum not rescaled": ("acc * alpha[:, None]", "acc"),
    "denominator not rescaled": ("row_sum * alpha + ", "row_sum + "),
    "last row dropped": ("rows < num_rows", "rows < num_rows - 1"),
    "one row too many": ("rows < num_rows", "rows < num_rows + 1"),
    "V not masked": ("mask=mask_n[:, None] & mask_d[None, :]", "mask=mask_d[None, :]"),
    "scores not masked": ('tl.where(mask_n[None, :], scores, float("-inf"))', "scores"),
    "rows of K from the wrong place": ("rows[None, :] * stride_key_row", "rows[None, :] * 0"),
    "current rows from the first": ("+ start * stride_key_token", "+ 0"),
    "first head of current K for all": ("+ kv_head * stride_key_head", "+ 0"),
    "lse in base 2": ("tl.math.log2(safe_sum)) * LN2", "tl.math.log2(safe_sum))"),
    "lse without the maximum": ("(row_max + tl.math", "(0 * row_max + tl.math"),
    "0 / 0 without a key": ("acc / safe_sum[:, None]", "acc / row_sum[:, None]"),
    "sequence one too early": ("BLOCK_M + middle <= tile:", "BLOCK_M + middle < tile:"),
    "tokens of a tile not grouped": ("offs_m // QUERIES_PER_KV", "offs_m // BLOCK_M"),
    "heads of a tile not grouped": ("offs_m % QUERIES_PER_KV", "0 * offs_m"),
    "rows of the next sequence written": (
        "mask=mask_m[:, None] & (offs_d < HEAD_SIZE)[None, :],",
        "mask=(offs_d < HEAD_SIZE)[None, :],",
    ),
}
SCATTER_FAULTS = {
    "slots below 0 written": ("((slot >= 0) & mask_t)", "mask_t"),
    "extra rows dropped": ("HAS_EXTRA=num_extra > 0", "HAS_EXTRA=False"),
    "extra rows one off": ("(offs_t - num_tokens)", "(offs_t - num_tokens + 1)"),
    "first slot of each block": ("offset * stride_value_slot", "0 * stride_value_slot"),
    "heads mixed up": ("head[None, :] * stride_key_pool_head", "0 * head[None, :]"),
    "last row dropped": ("offs_t < num_tokens + num_extra", "offs_t < num_tokens + num_extra - 1"),
    "K written to V": ("        value.to(value_pool", "        key.to(value_pool"),
}
# By the check that must find them: the file they are planted in, and they.
FAULTS = {
    "walk": ("walk.py", WALK_FAULTS),
    "walk with descriptors": ("walk.py", DESCRIPTOR_FAULTS),
    "gather": ("gather.py", GATHER_FAULTS),
    "launch": ("launch.py", LAUNCH_FAULTS),
    "step": ("primitives.py", STEP_FAULTS),
    "scatter": ("scatter.py", SCATTER_FAULTS),
}


def use_kernels(monkeypatch: pytest.MonkeyPatch, package: Path) -> ops.Kernels:
    """Let the triton backend run the kernels of another folder."""
    monkeypatch.syspath_prepend(package.parent)
    modules = (importlib.import_module(f"{package.name}.{name}") for name in ops.Kernels._fields)
    kernels = ops.Kernels(*modules)
    monkeypatch.setattr(ops, "_triton_kernels", lambda: kernels)
    return kernels


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("check", "fault"), [(check, fault) for check in FAULTS for fault in FAULTS[check][1]]
)
def test_kernel_fault_is_found(monkeypatch, tmp_path, check, fault):
    file, faults = FAULTS[check]
    right, wrong = faults[fault]
    package = tmp_path / tmp_path.name  # a name that no other test has
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / file).read_text()
    assert source.count(right) == 1, f"{file} has {source.count(right)} of {right!r}, must have one"
    (package / file).write_text(source.replace(right, wrong))
    kernels = use_kernels(monkeypatch, package)
    with pytest.raises(AssertionError):
        run_check(check, monkeypatch, kernels)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("check", FAULTS)
def test_kernels_without_a_fault_pass(monkeypatch, tmp_path, check):
    package = tmp_path / tmp_path.name
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = use_kernels(monkeypatch, package)
    run_check(check, monkeypatch, kernels)
