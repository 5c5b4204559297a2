"""The op that writes and attends at once, and what all ops have in common."""

import contextlib
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import chunkattn
from chunkattn import ops
from chunkattn.testing import (
    AttentionCase,
    check_attention,
    make_case,
    make_rows,
    run_attention,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SCALE = 0.25


def write_attend_arguments(
    dtype: torch.dtype, device: str, backend: str, extra: int
) -> tuple[list, AttentionCase]:
    """Six old rows in blocks of four, then seven new ones, of which ``extra`` come separately."""
    case = make_case(
        seq_lens=[13],
        query_lens=[7],
        block_size=4,
        softmax_scale=SCALE,
        dtype=dtype,
        device=device,
    )
    key, value, *_ = case.visible(0)
    table = case.block_table[0].tolist()
    slots = torch.tensor([table[i // 4] * 4 + i % 4 for i in range(6, 13)], device=device)
    for pool in (case.key_pool, case.value_pool):
        pool.flatten(0, 1)[slots] = math.nan
    arguments = [
        case.query,
        key[6 : 13 - extra],
        value[6 : 13 - extra],
        key[13 - extra :] if extra else None,
        value[13 - extra :] if extra else None,
        case.key_pool,
        case.value_pool,
        slots,
        case.block_table,
        case.seq_lens,
        case.query_start_loc,
        make_rows(7, 2, 16, dtype=dtype, device=device),
        SCALE,
        backend,
    ]
    return arguments, case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("extra", (0, 1, 2, 6))
def test_write_attend(target, dtype, extra):
    """C9: the rows and the extra rows are written, then seen; the rest of their block is NaN."""
    arguments, case = write_attend_arguments(dtype, *reversed(target), extra)
    assert ops.write_attend(*arguments) is None
    out = check_attention(case, target.backend)
    assert torch.equal(arguments[11], out)


def test_auto_is_the_backend_of_the_device(target):
    """J1: `backend="auto"` is triton on a GPU and torch on the CPU."""
    case = make_case(seq_lens=[33], query_lens=[5], device=target.device)
    expected, _ = run_attention(case, "torch" if target.device == "cpu" else "triton")
    assert torch.equal(chunkattn.paged_window_attention(**case.arguments()), expected)


def test_gradients_are_not_tracked(target):
    """Outside `torch.no_grad` too, a pool must not hold on to the graph of all that wrote to it."""
    arguments, case = write_attend_arguments(torch.float32, *reversed(target), 2)
    for rows in arguments[:5]:
        rows.requires_grad_()
    ops.write_attend(*arguments)
    public = chunkattn.paged_window_attention(**case.arguments(), backend=target.backend)
    assert not any(tensor.requires_grad for tensor in (*arguments[5:7], arguments[11], public))
    assert torch.equal(public, arguments[11])


def test_an_op_runs_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, which need not be theirs."""
    entered = []

    @contextlib.contextmanager
    def enter(device):
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    op = ops.on_their_device(lambda *arguments: entered.append(len(arguments)))
    with FakeTensorMode():  # tensors of GPUs that are not there
        op(0.5, torch.empty(2), torch.empty(2, device="cuda:1"))
    op(torch.empty(2), "torch")
    assert entered == [torch.device("cuda", 1), 3, 2]
