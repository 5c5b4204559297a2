"""The checks of `norm_rope_scatter` find faults in its kernel: one planted after the other."""

import pytest
import torch

import chunkattn
from chunkattn import fused
from tests.helpers.fused import FP8, check, make_inputs
from tests.helpers.machine import TRITON_DEVICE, needs_triton
from tests.helpers.planting import planted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_triton,
]


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
    "sums of Q for K": ("sum_offset + stride_sum_squares.which", "sum_offset"),
    "sums of the first token": ("token * stride_sum_squares.token", "0"),
    "sums given are not used": ("        rows.sum_squares,\n", "        None,\n"),
    "mean of one rank": ("tp_size * NUM_HEADS * HEAD", "NUM_HEADS * HEAD"),
    "mean over padded heads": ("tp_size * NUM_KV_HEADS * HEAD_SIZE", "BLOCK_KV_H * BLOCK_D"),
    "eps dropped": ("/ norm_size + eps", "/ norm_size"),
    "norm not rounded": (").to(x.dtype)\n    out", ")\n    out"),
    "weight not rounded": ("out = out.to(x.dtype).to(tl.float32)", "out = out"),
    "weight rounded": ("if weight.dtype == x.dtype:", "if True:"),
    "weight of the first head": ("kv_head * HEAD_SIZE + offs_d", "0 * kv_head + offs_d"),
    "rotation backwards": (
        "even * cos - odd * sin, even * sin + odd * cos",
        "even * cos + odd * sin, odd * cos - even * sin",
    ),
    "halves, not pairs": (
        "tl.reshape(pairs, (BLOCK_H, BLOCK_D))",
        "tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_H, BLOCK_D))",
    ),
    "angles of the first token": ("token * stride_cos ", "0"),
    "angles of another token": (
        "sin_ptr + token * stride_sin ",
        "sin_ptr + (token ^ 1) * stride_sin ",
    ),
    "last angle dropped": ("offs_p < HEAD_SIZE // 2", "offs_p < HEAD_SIZE // 2 - 1"),
    "K turned when it must not be": ("ROTATE_KEY=rows.rotate_key", "ROTATE_KEY=True"),
    "heads of Q one short": ("head < NUM_HEADS)", "head < NUM_HEADS - 1)"),
    "padding written": (
        "(kv_head < NUM_KV_HEADS) & (offs_d < HEAD_SIZE)",
        "(kv_head < NUM_KV_HEADS) & (offs_d <= HEAD_SIZE)",
    ),
    "slots below 0 written": ("if slot >= 0:", "if slot >= -9:"),
    "first slot of each block": ("offset * stride_value_pool.slot", "0 * stride_value_pool.slot"),
    "first block": ("block * stride_key_pool.block", "0 * stride_key_pool.block"),
    "heads mixed up": (
        "kv_head * stride_value_pool.head",
        "(NUM_KV_HEADS - 1 - kv_head) * stride_value_pool.head",
    ),
    "K to V": ("as_stored(value,", "as_stored(key_rows,"),
    "scale of the first head": ("+ kv_head * stride_key_scale.head", "+ 0 * kv_head"),
    "scale of the first block": ("block * stride_value_scale.block", "0"),
    "scales of K for V": ("as_stored(value, value_scale_ptr", "as_stored(value, key_scale_ptr"),
    "K not rounded to its dtype": ("key_rows = key.to(key_ptr.dtype.element_ty)", "key_rows = key"),
}


def test_kernel_without_a_fault_passes():
    check_all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_kernel_fault_is_found(monkeypatch, tmp_path, fault):
    load = planted(monkeypatch, tmp_path, "fused.py", *FAULTS[fault])
    monkeypatch.setattr(fused, "import_kernel", load)
    with pytest.raises(AssertionError):
        check_all()
