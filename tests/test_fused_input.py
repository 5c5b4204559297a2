"""`norm_rope_scatter`: what it refuses, and what torch knows of it."""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

import chunkattn
import chunkattn.fused
from chunkattn.testing import snapshot
from tests.helpers.fused import EPS, FP8, check, make_inputs
from tests.helpers.machine import TRITON_DEVICE

pytestmark = pytest.mark.usefixtures("one_thread")


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
    ("value_pool", lambda x: x.to(FP8), TypeError),
    ("key_scale", lambda x: 1.0, ValueError),
    ("value_scale", lambda x: torch.ones(4, 3), ValueError),
    ("tp_size", lambda x: 2, ValueError),
    ("sum_squares", lambda x: torch.ones(8, 2), ValueError),
    ("query_out", lambda x: torch.empty(8, 3, 8), ValueError),
    ("query_out", lambda x: torch.empty(1, 3, 24).expand(8, -1, -1), ValueError),
    ("query_out", lambda x: torch.empty(8, 3, 24).half(), TypeError),
    ("backend", lambda x: "cutlass", ValueError),
]  # fmt: skip
FP8_REFUSED = [
    ("key_scale", 0.0, ValueError),
    ("key_scale", -1.0, ValueError),
    ("value_scale", math.inf, ValueError),
    ("value_scale", "1", TypeError),
    ("key_scale", torch.ones(4, 2), ValueError),
    ("key_scale", torch.ones(4, 3), ValueError),  # the other one is a number
    ("value_scale", torch.ones(4), ValueError),
    ("value_scale", torch.tensor(0.0), ValueError),
    ("value_scale", torch.ones(4, 3).half(), TypeError),
    ("key_scale", torch.ones(4, 3, device="meta"), ValueError),
    ("value_pool", torch.zeros(4, 4, 3, 24), TypeError),
    ("value_pool", torch.zeros(4, 4, 3, 23).to(FP8), ValueError),
    ("key_pool", torch.zeros(4, 0, 3, 24).to(FP8), ValueError),
]
# The message may name the argument that does not fit to the one that was changed.
PARTNERS = {
    "cos": "cos|sin",
    "key_scale": "key_scale|value_scale",
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
@pytest.mark.parametrize("pool_dtype", (torch.float32, FP8))
def test_opcheck(pool_dtype):
    """Schema, fake kernel and declared mutations; torch compares no fp8 tensors for the first."""
    inputs = make_inputs(dtype=torch.float32, pool_dtype=pool_dtype).arguments
    del inputs["eps"]
    query, key, value, *tables, key_pool, value_pool, slots = inputs.values()
    checks = ["test_faketensor"]
    if pool_dtype != FP8:
        checks += ["test_schema", "test_aot_dispatch_dynamic"]
    some = chunkattn.qk_sum_squares(query, key), torch.ones(4, 3)
    for sums, scales in (some, (None, None)):
        torch.library.opcheck(
            torch.ops.chunkattn.norm_rope_scatter.default,
            (
                *(query, key, value, *tables, sums, torch.zeros_like(query)),
                *(key_pool, value_pool, slots, scales, scales),
                *(EPS, 1, True, "torch"),
            ),
            test_utils=checks,
        )


def test_gradients_are_not_tracked(target):
    inputs = make_inputs(device=target.device)
    for name in ("query", "key", "value", "query_weight", "key_weight"):
        inputs.arguments[name].requires_grad_()
    out = chunkattn.norm_rope_scatter(**inputs.arguments, backend=target.backend)
    assert not out.requires_grad
    assert not inputs.arguments["key_pool"].requires_grad
