"""Triton's interpreter stands in for a GPU only if its bfloat16 is that of a GPU (E1)."""

import math

import pytest
import torch

from tests.helpers.machine import needs_triton

pytestmark = needs_triton


def interpreter_guard() -> None:
    """Fail unless Triton's bfloat16 dot and casts are those of a GPU.

    On a CPU that is the interpreter with `chunkattn.interpreter.patch_bf16` in force.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a_ptr, b_ptr, dot_ptr, cast_ptr, wide_ptr, N: tl.constexpr):
        rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        a, b = tl.load(a_ptr + rows), tl.load(b_ptr + rows)
        low = a.to(tl.bfloat16)
        tl.store(cast_ptr + rows, low)
        tl.store(wide_ptr + rows, low.to(tl.float32))
        tl.store(dot_ptr + rows, tl.dot(low, b.to(tl.bfloat16)))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(2, 16, 16, device=device)
    # Ties to even, both ways, and what must survive: NaN, infinities, zeros, the largest.
    a[0, :9] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4e38, -1e-40]
    )
    b[:9] = 0.0
    low, dot, wide = (torch.empty(16, 16, device=device) for _ in range(3))
    low = low.bfloat16()
    kernel[(1,)](a, b, dot, low, wide, N=16)
    expected = a.bfloat16()
    finite = ~expected.isnan()
    assert torch.equal(low.view(torch.int16)[finite], expected.view(torch.int16)[finite])
    assert low[~finite].isnan().all()
    assert torch.equal(wide[finite], expected.float()[finite])
    product = expected[1:].float() @ b.bfloat16().float()
    torch.testing.assert_close(dot[1:], product, atol=1e-5, rtol=0)


def test_bf16_of_the_interpreter():
    """E1: without this, bfloat16 results of the interpreter would prove nothing."""
    interpreter_guard()


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled, not interpreted")
@pytest.mark.parametrize("fault", ("truncating cast", "dot of raw bits"))
def test_guard_finds_a_faulty_interpreter(monkeypatch, fault):
    """E1: the guard sees both faults of Triton's interpreter."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    mended = {"create_dot": builder.create_dot, "cast_impl": builder.cast_impl}

    def dot(self, a, b, d, *rest):
        product = a.data.astype("float32") @ b.data.astype("float32")
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast(self, source, target):
        result = mended["cast_impl"](self, source, target)
        if target.scalar == interpreter.tl.bfloat16:
            result.data = (source.data.view("uint32") >> 16).astype("uint16")
        return result

    if fault == "truncating cast":
        monkeypatch.setattr(builder, "cast_impl", cast)
    else:
        monkeypatch.setattr(builder, "create_dot", dot)
    with pytest.raises(AssertionError):
        interpreter_guard()


def test_e4m3_of_the_interpreter():
    """E1: every finite e4m3 value survives both ways, and the casts round as torch's do."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, fp8_ptr, back_ptr, N: tl.constexpr):
        offs = tl.arange(0, N)
        low = tl.load(x_ptr + offs).to(tl.float8e4nv)
        tl.store(fp8_ptr + offs, low)
        tl.store(back_ptr + offs, low.to(back_ptr.dtype.element_ty))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 below compute capability 8.9")
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    # In between: ties, carries into the next power of two, numbers below the smallest.
    x = torch.cat([values, values * 1.0625, values * 1.09, torch.rand(256) * 2**-9]).to(device)
    x = x.clamp(-448, 448)
    expected = x.to(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fp8 = torch.empty(1024, dtype=torch.float8_e4m3fn, device=device)
        back = torch.empty(1024, dtype=dtype, device=device)
        kernel[(1,)](x, fp8, back, N=1024)
        torch.testing.assert_close(fp8.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(back, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
