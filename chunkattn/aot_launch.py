"""Compile what the launchers launch, for a GPU that need not be there.

The launchers run on tensors without data, under a driver that names the target and launches
nothing, so what is compiled is what a call compiles.
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the attention kernels, and of the scatter that precedes it."""

    block_size: int
    head_size: int = 128
    num_tokens: int = 1785
    num_heads: int = 40
    num_kv_heads: int = 40
    dtype: torch.dtype = torch.bfloat16
    every_path: bool = False
    """Three ragged sequences, current rows and lse, not one plain sequence."""
    fp8: bool = False
    """Pools of e4m3 with a scale for each block and head."""
    num_segments: int = 1
    biased: bool = False
    extra: bool = False
    """Extra rows behind the current ones."""


class Launch(NamedTuple):
    """One launch that was compiled and not run."""

    constants: dict[str, Any]  # keyword arguments of the launch, its compile-time sizes among them
    compiled: Any  # triton.compiler.CompiledKernel


def capability(arch: str) -> int:
    """As `launch.arch_of` says it: 0 on an AMD GPU."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


def compile_launches(
    arch: str, launch: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Launch]:
    """Call a launcher and compile what it launches, for a GPU that need not be there.

    Args:
        arch: the target.
        launch: a function that launches Triton kernels.
        args: its arguments, tensors on the ``meta`` device.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    from triton.runtime import JITFunction

    launches = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(kwargs, compiled))
        return compiled

    package, _, _ = launch.__module__.rpartition(".")
    with _target(arch, package), mock.patch.object(JITFunction, "run", compile_only):
        launch(*args, **kwargs)
    if not launches:
        raise RuntimeError("Triton must compile, not interpret: unset TRITON_INTERPRET")
    return launches


def launch(
    kernel: str,
    arch: str,
    shape: Shape,
    *,
    wide: bool = False,
    package: str = "chunkattn.kernels",
    **options: Any,
) -> list[Launch]:
    """Compile what one call launches.

    Args:
        kernel: a key of `CALLS`.
        arch: the target.
        shape: of the call.
        wide: over pools of more than 2**31 elements.
        package: of the kernels.
        options: further arguments of the launcher.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    module, name, arguments = CALLS[kernel]
    launcher = getattr(importlib.import_module(f"{package}.{module}"), name)
    kinds = importlib.import_module(f"{package}.arguments")
    return compile_launches(arch, launcher, *arguments(shape, wide, kinds), **options)


def _attention(shape: Shape, wide: bool, kinds: Any) -> tuple[Any, ...]:
    num_seqs, segments = 3 if shape.every_path else 1, shape.num_segments
    out = _empty(shape.num_tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
    key_current = _empty(64, shape.num_kv_heads, shape.head_size, dtype=shape.dtype)
    lse = _empty(shape.num_tokens, shape.num_heads, dtype=torch.float32)
    starts = _empty(num_seqs + 1, dtype=torch.int32)
    pool, table = _pool(shape, wide), _per_block(shape)
    inputs = kinds.AttentionArguments(
        query=out if segments == 1 else out.expand(segments, -1, -1, -1),
        key_pool=pool,
        value_pool=pool,
        block_table=_empty(num_seqs, 32, dtype=torch.int32),
        seq_lens=_empty(num_seqs, dtype=torch.int32),
        query_start_loc=starts,
        key_current=key_current if shape.every_path else None,
        value_current=key_current if shape.every_path else None,
        current_start_loc=starts if shape.every_path else None,
        segment_blocks=_empty(num_seqs, segments - 1, dtype=torch.int32) if segments > 1 else None,
        key_scale=table if shape.fp8 else None,
        value_scale=table if shape.fp8 else None,
        block_bias=table if shape.biased else None,
        out=out,
        lse=lse if shape.every_path else None,
        softmax_scale=shape.head_size**-0.5,
        key_extra=key_current if shape.extra else None,
        value_extra=key_current if shape.extra else None,
    )
    return (inputs,)


def _scatter(shape: Shape, wide: bool, kinds: Any) -> tuple[Any, ...]:
    """A span's rows, and as many extra rows."""
    rows = _empty(shape.num_tokens, shape.num_kv_heads, shape.head_size, dtype=shape.dtype)
    pool, scale = _pool(shape, wide), _per_block(shape) if shape.fp8 else None
    slots = _empty(2 * shape.num_tokens, dtype=torch.int32)
    return (kinds.ScatterArguments(rows, rows, rows, rows, pool, pool, slots, scale, scale),)


def _fused(shape: Shape, wide: bool, kinds: Any) -> tuple[Any, ...]:
    """With all of its parts, but for a norm of other ranks' heads."""
    query = _empty(shape.num_tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
    key = _empty(shape.num_tokens, shape.num_kv_heads, shape.head_size, dtype=shape.dtype)
    weights = (_empty(x[0].numel(), dtype=shape.dtype) for x in (query, key))
    angles = _empty(shape.num_tokens, shape.head_size // 2, dtype=torch.float32)
    pool, scales = _pool(shape, wide), _per_block(shape) if shape.fp8 else None
    slots = _empty(shape.num_tokens, dtype=torch.int32)
    rows = (query, key, key, *weights, angles, angles, None, query, pool, pool, slots)
    return (kinds.FusedArguments(*rows, scales, scales, 1e-6, 1, True),)


def _blocks(shape: Shape, wide: bool, kinds: Any, *rest: Any, ids: int = 1) -> tuple[Any, ...]:
    """K and V of some blocks, from one pool to another or in place."""
    pools = (_pool(shape, wide),) * (2 if rest or ids == 1 else 4)
    return (*pools, *(_empty(8, dtype=torch.int64) for _ in range(ids)), *rest)


class Call(NamedTuple):
    """Module and name of a launcher, and what makes its arguments."""

    module: str
    launcher: str
    arguments: Callable[[Shape, bool, Any], tuple[Any, ...]]


CALLS = {
    "walk": Call("walk", "walk", _attention),
    "gather": Call("gather", "gather", _attention),
    "scatter": Call("scatter", "scatter", _scatter),
    "fused": Call("fused", "fused", _fused),
    "copy": Call("blocks", "copy", functools.partial(_blocks, ids=2)),
    "blend": Call("blocks", "blend", lambda *a: _blocks(*a, 0.1, ids=2)),
    "clear": Call("blocks", "clear", lambda *a: _blocks(*a, 0.0)),
}
"""What can be compiled. A split walk also launches its merge, an fp8 scatter first its scales."""


def _empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _pool(shape: Shape, wide: bool = False) -> torch.Tensor:
    """Of 64 blocks, or of more than 2**31 elements."""
    sizes = (shape.block_size, shape.num_kv_heads, shape.head_size)
    dtype = torch.float8_e4m3fn if shape.fp8 else shape.dtype
    return _empty(2**31 // math.prod(sizes) + 2 if wide else 64, *sizes, dtype=dtype)


def _per_block(shape: Shape) -> torch.Tensor:
    """A number for each head of a pool's blocks."""
    return _empty(64, shape.num_kv_heads, dtype=torch.float32)


class _Driver:
    """Stands in for Triton's driver of a GPU: names the target, and compiles once for each."""

    def __init__(self, arch: str):
        self.arch = arch

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.arch.startswith("gfx"):
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", capability(self.arch), 32)


@contextlib.contextmanager
def _target(arch: str, package: str) -> Iterator[None]:
    """Let Triton and the launchers of a package believe that they run on another GPU."""
    from triton.runtime import driver

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(driver, "_active", _Driver(arch)))
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{package}.") and hasattr(module, "arch_of"):
                patches.enter_context(
                    mock.patch.object(module, "arch_of", return_value=capability(arch))
                )
        yield
