"""What the compiler makes of the kernels, without a GPU: registers, stack, instructions a loop.

Triton compiles for any target on any machine, and its wheel ships ``cuobjdump``. The counts are
exact and repeatable for one Triton version, so they are the performance evidence of a machine that
has no GPU. What is compiled is what the launchers launch (`aot_launch`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkattn import sass
from chunkattn.aot_launch import Launch, Shape, capability, launch
from chunkattn.kernels.tuning import GATHER_BELOW, padding_waste
from chunkattn.presets import ModelPreset, get_preset


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


def compile_walk(
    arch: str, shape: Shape, *, descriptors: bool | None = None, split: bool = False
) -> Row:
    """Compile the walk.

    Args:
        arch: a target such as ``"sm_90"`` or ``"gfx942"``.
        shape: of the call.
        descriptors: as `kernels.walk.walk`.
        split: over the multiprocessors of an H100.

    Returns:
        The row. Its kernel is ``"walk"``, with ``"_pointers"`` where there are descriptors and they
        are not used, ``"_split"``, ``"_fp8"`` and ``"_segments"`` as the call asks for them.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    num_programs = 132 if split else 0
    found = launch("walk", arch, shape, descriptors=descriptors, num_programs=num_programs)[0]
    block_n, tail_n = found.constants["BLOCK_N"], found.constants["TAIL_N"]
    full, tail = shape.block_size >= block_n, shape.block_size % block_n > 0
    variants = {
        "pointers": descriptors is False,
        "split": split,
        "fp8": shape.fp8,
        "segments": shape.num_segments > 1,
    }
    return row_of(
        "_".join(["walk", *(name for name, is_asked in variants.items() if is_asked)]),
        arch,
        shape,
        found,
        ["full"] * full + ["tail"] * tail + ["rest"] * (2 if shape.every_path else 1),
        padding_waste(shape.block_size, block_n, tail_n),
    )


def compile_gather(arch: str, shape: Shape, *, wide: bool = False) -> Row:
    """Compile the gather, with 64-bit offsets if ``wide``; the rest is as in `compile_walk`."""
    found = launch("gather", arch, shape, wide=wide)[0]
    roles = ["full"] + ["rest"] * shape.every_path
    return row_of("gather64" if wide else "gather", arch, shape, found, roles)


def compile_merge(arch: str, shape: Shape) -> Row:
    """Compile the merge of a split walk; errors as `compile_walk`."""
    found = launch("walk", arch, shape, num_programs=132)[1]
    sizes = found.constants | found.constants["SIZES"]._asdict()
    return row_of("merge", arch, shape, found._replace(constants=sizes), [])


def compile_mover(arch: str, shape: Shape, *, kernel: str) -> Row:
    """Compile a kernel that only moves rows, by its name in `aot_launch.CALLS`, or
    ``"block_scales"``; errors as `compile_walk`.
    """
    if kernel == "block_scales":
        shape = dataclasses.replace(shape, fp8=True)
        return row_of(kernel, arch, shape, launch("scatter", arch, shape)[0], [])
    return row_of(kernel, arch, shape, launch(kernel, arch, shape)[-1], [])


def jobs(archs: Sequence[str], presets: Sequence[str]) -> list[Callable[[], Row]]:
    """One job for each kernel, target and shape of the presets; a job compiles when it is called.

    Where vLLM is installed, its kernel is compiled for the same shapes. A job can be pickled.
    """
    from chunkattn import aot_vllm

    # Models of one block size and one grouping of heads share their kernels.
    found: dict[Any, Callable[[], Row]] = {}

    def add(job: Callable[..., Row], arch: str, shape: Shape, **options: Any) -> None:
        alike = dataclasses.replace(shape, num_tokens=0)
        if job is not compile_mover:  # which is of all heads
            heads = shape.num_heads // shape.num_kv_heads
            alike = dataclasses.replace(alike, num_heads=heads, num_kv_heads=1)
        key = (job, arch, alike, *options.items())
        found.setdefault(key, functools.partial(job, arch, shape, **options))

    for arch, preset in itertools.product(archs, presets):
        shape = shape_of(get_preset(preset))
        if shape.block_size < GATHER_BELOW:
            add(compile_gather, arch, shape)
        else:
            add(compile_walk, arch, shape)
            if capability(arch) >= 90:
                add(compile_walk, arch, shape, descriptors=False)
            add(compile_walk, arch, shape, split=True)
            add(compile_merge, arch, shape)
            add(compile_walk, arch, dataclasses.replace(shape, num_segments=3))
            if has_e4m3(arch):
                add(compile_walk, arch, dataclasses.replace(shape, fp8=True))
        for wide in (False, True):  # at vLLM's default block size
            add(compile_gather, arch, dataclasses.replace(shape, block_size=16), wide=wide)
        movers = ("scatter", "fused", "copy", "blend", "clear")
        for kernel in (*movers, *(["block_scales"] * has_e4m3(arch))):
            add(compile_mover, arch, shape, kernel=kernel)
        if aot_vllm.is_installed():
            add(aot_vllm.compile_vllm, arch, shape)
    return list(found.values())


def has_e4m3(arch: str) -> bool:
    """Whether Triton has e4m3 for a target."""
    return not 0 < capability(arch) < 89


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


def versions() -> dict[str, str]:
    """The compiler that made the counts."""
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


def row_of(
    kernel: str,
    arch: str,
    shape: Shape,
    found: Launch,
    roles: Sequence[str],
    padding_waste: float = 0.0,
) -> Row:
    sizes, compiled = found.constants, found.compiled
    rows = next(name for name in ("BLOCK_M", "BLOCK_T", "BLOCK_H") if name in sizes)
    columns = next(name for name in ("BLOCK_N", "BLOCK_C", "BLOCK_D") if name in sizes)
    return Row(
        kernel,
        arch,
        shape.block_size,
        shape.head_size,
        str(shape.dtype).removeprefix("torch."),
        sizes[rows],
        sizes[columns],
        compiled.metadata.num_warps,
        compiled.metadata.num_stages,
        *sass.resources(compiled),
        sass.loops(sass.instructions(compiled), roles),
        round(padding_waste, 4),
    )
