"""Triton's interpreter, mended: what it makes of bfloat16 and of e4m3 is not what a GPU makes.

The tests run kernels in it where there is no GPU; both patches are for one process.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np
import torch


def patch_bf16(interpreter: ModuleType) -> None:
    """Mend bfloat16 in Triton's interpreter (3.6 to 3.9), for this process.

    It keeps bfloat16 as raw 16-bit integers: a dot multiplies those, a cast to bfloat16
    truncates. Afterwards both widen first, and a cast rounds to nearest even as a GPU does.

    Args:
        interpreter: the module ``triton.runtime.interpreter``.
    """
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    create_dot, handle = builder.create_dot, interpreter.TensorHandle
    numpy_dtype = interpreter._get_np_dtype

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle(bf16_to_fp32(operand.data), tl.float32)

    # A GPU says nothing of an overflow or of a NaN.
    @np.errstate(all="ignore")
    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    @np.errstate(all="ignore")
    def cast(self: Any, source: Any, target: Any) -> Any:
        data = widened(source).data
        if target.scalar == tl.bfloat16:
            return handle(fp32_to_bf16(data.astype(np.float32)), tl.bfloat16)
        return handle(data.astype(numpy_dtype(target)), target.scalar)

    builder.create_dot, builder.cast_impl = dot, cast


def patch_e4m3(interpreter: ModuleType) -> None:
    """Mend casts to and from e4m3 in Triton's interpreter (3.6 to 3.9), for this process.

    Its own lose carries and NaN. What is too large becomes NaN, as in the format's own rules: a
    kernel that needs the hardware to saturate is wrong on other hardware.

    Args:
        interpreter: the module ``triton.runtime.interpreter``, after `patch_bf16`.
    """
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    handle, fp8 = interpreter.TensorHandle, torch.float8_e4m3fn
    create_fp_to_fp = builder.create_fp_to_fp

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar == tl.float8e4nv:
            wide = torch.from_numpy(self.cast_impl(source, tl.float32).data)
            codes = wide.masked_fill(wide.abs() > 464, math.nan).to(fp8).view(torch.uint8)
            return handle(codes.numpy(), target.scalar)
        if source.dtype.scalar == tl.float8e4nv:
            values = torch.from_numpy(source.data).view(fp8).float().numpy()
            return self.cast_impl(handle(values, tl.float32), target)
        return create_fp_to_fp(self, source, target, rounding)

    builder.create_fp_to_fp = fp_to_fp


def bf16_to_fp32(bits: Any) -> Any:
    """A uint16 array that holds bfloat16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: Any) -> Any:
    """A float32 array rounded to the nearest bfloat16, ties to even, as a uint16 array."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
