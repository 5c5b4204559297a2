"""What the compiler makes of the kernels, without a GPU: registers, stack, instructions a loop.

Triton compiles for any target on any machine, and its wheel ships ``cuobjdump``. The counts are
exact and repeatable for one Triton version, so they are the performance evidence of a machine that
has no GPU. What is compiled is what the launchers launch: they run here on tensors without data,
under a driver that names the target and launches nothing.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from chunkattn import sass
from chunkattn.presets import ModelPreset, get_preset

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
}
"""Shared memory of one program: CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; the LDS of a CDNA 3 compute unit.
"""


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


@dataclasses.dataclass
class Row:
    """One kernel compiled for one shape and target."""

    kernel: str
    arch: str
    block_size: int
    head_size: int
    dtype: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    loops: list[sass.Loop]
    padding_waste: float


class Launch(NamedTuple):
    """One launch that was compiled and not run."""

    constants: dict[str, Any]  # keyword arguments of the launch, its compile-time sizes among them
    compiled: Any  # triton.compiler.CompiledKernel


def compile_walk(arch: str, shape: Shape, *, descriptors: bool | None = None) -> Row:
    """Compile the walk.

    Args:
        arch: a target such as ``"sm_90"`` or ``"gfx942"``.
        shape: of the call.
        descriptors: as `kernels.walk.walk`. The row's kernel is ``"walk_pointers"`` where False.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    launch = launch_attention("walk", arch, shape, descriptors=descriptors)
    sizes = launch.constants
    tail_rows = shape.block_size % sizes["BLOCK_N"]
    full, tail = shape.block_size >= sizes["BLOCK_N"], tail_rows > 0
    return row_of(
        "walk_pointers" if descriptors is False else "walk",
        arch,
        shape,
        launch,
        ["full"] * full + ["tail"] * tail + ["rest"] * (2 if shape.every_path else 1),
        (sizes["TAIL_N"] - tail_rows) / shape.block_size if tail else 0.0,
    )


def compile_gather(arch: str, shape: Shape, *, wide: bool = False) -> Row:
    """Compile the gather, with 64-bit offsets if ``wide``; the rest is as in `compile_walk`."""
    launch = launch_attention("gather", arch, shape, wide=wide)
    roles = ["full"] + ["rest"] * shape.every_path
    return row_of("gather64" if wide else "gather", arch, shape, launch, roles)


def compile_scatter(arch: str, shape: Shape) -> Row:
    """Compile the scatter of a call's rows, some of them extra rows; errors as `compile_walk`."""
    return row_of("scatter", arch, shape, launch_scatter(arch, shape), [])


def launch_scatter(arch: str, shape: Shape, package: str = "chunkattn.kernels") -> Launch:
    """The launch that `compile_scatter` reads; arguments and errors as `launch_attention`."""
    rows = _empty(shape.num_tokens, shape.num_kv_heads, shape.head_size, dtype=shape.dtype)
    pool = _pool(shape)
    slots = _empty(2 * shape.num_tokens, dtype=torch.int32)
    launch = importlib.import_module(f"{package}.scatter").scatter
    return compile_launches(arch, launch, rows, rows, rows, rows, pool, pool, slots)[0]


def launch_attention(
    kernel: str,
    arch: str,
    shape: Shape,
    *,
    wide: bool = False,
    package: str = "chunkattn.kernels",
    **options: Any,
) -> Launch:
    """Compile one launch of the walk or of the gather.

    Args:
        kernel: ``"walk"`` or ``"gather"``.
        arch: the target.
        shape: of the call.
        wide: over pools of more than 2**31 elements.
        package: of the kernels.
        options: further arguments of the launcher.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    num_seqs = 3 if shape.every_path else 1
    query = _empty(shape.num_tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
    key_current = _empty(64, shape.num_kv_heads, shape.head_size, dtype=shape.dtype)
    lse = _empty(shape.num_tokens, shape.num_heads, dtype=torch.float32)
    starts = _empty(num_seqs + 1, dtype=torch.int32)
    pool = _pool(shape, wide)
    return compile_launches(
        arch,
        getattr(importlib.import_module(f"{package}.{kernel}"), kernel),
        query=query,
        key_pool=pool,
        value_pool=pool,
        block_table=_empty(num_seqs, 32, dtype=torch.int32),
        seq_lens=_empty(num_seqs, dtype=torch.int32),
        query_start_loc=starts,
        key_current=key_current if shape.every_path else None,
        value_current=key_current if shape.every_path else None,
        current_start_loc=starts if shape.every_path else None,
        out=query,
        lse=lse if shape.every_path else None,
        softmax_scale=shape.head_size**-0.5,
        **options,
    )[0]


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


def jobs(archs: Sequence[str], presets: Sequence[str]) -> list[Callable[[], Row]]:
    """One job for each kernel, target and shape of the presets; a job compiles when it is called.

    Where vLLM is installed, its kernel is compiled for the same shapes. A job can be pickled.
    """
    from chunkattn import aot_vllm
    from chunkattn.kernels.tuning import GATHER_BELOW

    # Models of one block size and one grouping of heads share their kernels.
    found: dict[Any, Callable[[], Row]] = {}

    def add(job: Callable[..., Row], arch: str, shape: Shape, **options: bool) -> None:
        group = shape.num_heads // shape.num_kv_heads
        heads = shape.num_kv_heads if job is compile_scatter else group
        key = (job, arch, shape.block_size, shape.head_size, heads, *options.items())
        found.setdefault(key, functools.partial(job, arch, shape, **options))

    for arch, preset in itertools.product(archs, presets):
        shape = shape_of(get_preset(preset))
        if shape.block_size < GATHER_BELOW:
            add(compile_gather, arch, shape)
        else:
            add(compile_walk, arch, shape)
            if capability(arch) >= 90:
                add(compile_walk, arch, shape, descriptors=False)
        for wide in (False, True):  # at vLLM's default block size
            add(compile_gather, arch, dataclasses.replace(shape, block_size=16), wide=wide)
        add(compile_scatter, arch, shape)
        if aot_vllm.is_installed():
            add(aot_vllm.compile_vllm, arch, shape)
    return list(found.values())


def shape_of(preset: ModelPreset) -> Shape:
    """A span of a model with its action and state rows, one chunk a block."""
    return Shape(
        preset.frame_tokens,
        preset.head_size,
        preset.frames_per_span * preset.frame_tokens + preset.action_tokens + preset.state_tokens,
        preset.heads,
        preset.kv_heads,
        getattr(torch, preset.dtype),
    )


def capability(arch: str) -> int:
    """As `launch.arch_of` says it: 0 on an AMD GPU."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


def versions() -> dict[str, str]:
    """The compiler that made the counts."""
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


def _empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _pool(shape: Shape, wide: bool = False) -> torch.Tensor:
    """Of 64 blocks, or of more than 2**31 elements."""
    sizes = (shape.block_size, shape.num_kv_heads, shape.head_size)
    return _empty(2**31 // math.prod(sizes) + 2 if wide else 64, *sizes, dtype=shape.dtype)


def row_of(
    kernel: str,
    arch: str,
    shape: Shape,
    launch: Launch,
    roles: Sequence[str],
    padding_waste: float = 0.0,
) -> Row:
    sizes, compiled = launch.constants, launch.compiled
    return Row(
        kernel,
        arch,
        shape.block_size,
        shape.head_size,
        str(shape.dtype).removeprefix("torch."),
        sizes["BLOCK_T" if kernel == "scatter" else "BLOCK_M"],
        sizes["BLOCK_C" if kernel == "scatter" else "BLOCK_N"],
        compiled.metadata.num_warps,
        compiled.metadata.num_stages,
        *sass.resources(compiled),
        sass.loops(sass.instructions(compiled), roles),
        round(padding_waste, 4),
    )


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
