"""What the compiler makes of the kernels, without a GPU: registers, stack, instructions a loop.

Triton compiles for any target on any machine, and its wheel ships ``cuobjdump``. The counts are
exact and repeatable for one Triton version, so they are the performance evidence of a machine that
has no GPU.
"""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from chunkattn.presets import get_preset

_MMA = ("HGMMA", "HMMA", "UTCHMMA")
_STRIDE_1_ARGUMENTS = ("stride_table_block", "stride_slot_mapping")
_POINTER_TYPES = {
    "block_table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "current_start_loc_ptr": "*i32",
    "slot_mapping_ptr": "*i32",
    "lse_ptr": "*fp32",
}


@dataclasses.dataclass
class Loop:
    """One innermost loop with matrix instructions, in the order of the code."""

    role: str
    instructions: int
    mma: int
    tma: int
    async_copies: int


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
    loops: list[Loop]
    padding_waste: float


def compile_walk(
    arch: str,
    block_size: int,
    head_size: int,
    num_query_rows: int,
    *,
    descriptors: bool = False,
    every_path: bool = False,
) -> Row:
    """Compile the walk for bfloat16 heads.

    Args:
        arch: a target such as ``"sm_90"`` or ``"gfx942"``.
        block_size: tokens of a block.
        head_size: elements of a head.
        num_query_rows: query rows of the call, which choose the tile.
        descriptors: read the pools by tensor descriptors; the row's kernel is ``"walk"`` then, and
            ``"walk_pointers"`` where pointers read them although the target has descriptors.
        every_path: ragged sequences, grouped queries, lse and current rows, not one plain sequence.

    Raises:
        RuntimeError: in a process where Triton interprets its kernels.
    """
    from chunkattn.kernels.tuning import padding_waste, walk_tiles
    from chunkattn.kernels.walk import _walk_kernel

    tiles = walk_tiles(_capability(arch), head_size, 2, block_size, num_query_rows)
    constants = _attention_constants(tiles, head_size, every_path) | {
        "BLOCK_SIZE": block_size,
        "TAIL_N": tiles.tail_n,
        "HAS_DESC": descriptors,
        "COUNT_TILES": tiles.count_tiles,
    }
    types = {}
    for name in ("key", "value"):
        for part, rows in (("", tiles.block_n), ("_tail", tiles.tail_n)):
            if descriptors:
                box = f"1, {rows}, {constants['BLOCK_D']}"
                types[f"{name}{part}_desc"] = f"tensordesc<bf16[{box}]>"
            else:
                constants[f"{name}{part}_desc"] = None
    compiled = _compile(_walk_kernel, constants, arch, tiles.num_warps, tiles.num_stages, types)
    full, tail = block_size >= tiles.block_n, block_size % tiles.block_n > 0
    return _row(
        "walk" if descriptors or _capability(arch) < 90 else "walk_pointers",
        arch,
        block_size,
        head_size,
        tiles,
        compiled,
        ["full"] * full + ["tail"] * tail + ["rest"] * (2 if every_path else 1),
        round(padding_waste(block_size, tiles), 4),
    )


def compile_gather(
    arch: str,
    block_size: int,
    head_size: int,
    num_query_rows: int,
    *,
    wide: bool = False,
    every_path: bool = False,
) -> Row:
    """Compile the gather, with 64-bit offsets if ``wide``; the rest is as in `compile_walk`."""
    from chunkattn.kernels.gather import _gather_kernel
    from chunkattn.kernels.tuning import gather_tiles

    tiles = gather_tiles(_capability(arch), head_size, 2, num_query_rows)
    constants = _attention_constants(tiles, head_size, every_path) | {
        "BLOCK_SIZE": block_size,
        "WIDE": wide,
    }
    compiled = _compile(_gather_kernel, constants, arch, tiles.num_warps, tiles.num_stages)
    roles = ["full"] + ["rest"] * every_path
    kernel = "gather64" if wide else "gather"
    return _row(kernel, arch, block_size, head_size, tiles, compiled, roles, 0.0)


def compile_scatter(arch: str, block_size: int, num_kv_heads: int, head_size: int) -> Row:
    """Compile the scatter of bfloat16 rows with extra rows; errors as `compile_walk`."""
    from chunkattn.kernels.scatter import _scatter_kernel
    from chunkattn.kernels.tuning import scatter_tile

    block_t, block_c = scatter_tile(num_kv_heads * head_size)
    constants = {
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_T": block_t,
        "BLOCK_C": block_c,
        "HAS_EXTRA": True,
    }
    compiled = _compile(_scatter_kernel, constants, arch, 4, 1)
    sizes = (block_size, head_size, "bfloat16", block_t, block_c, 4, 1)
    return Row("scatter", arch, *sizes, *_resources(compiled), [], 0.0)


def compile_fused(arch: str, block_size: int, num_heads: int, head_size: int) -> Row:
    """Compile `norm_rope_scatter` of bfloat16 rows, with all of its parts; errors as
    `compile_walk`.
    """
    from chunkattn.kernels.tuning import fused_tile

    compiled = fused_code(arch, block_size, num_heads, head_size)
    block_h, block_d, num_warps = fused_tile(num_heads, head_size)
    sizes = (block_size, head_size, "bfloat16", block_h, block_d, num_warps, 1)
    return Row("fused", arch, *sizes, *_resources(compiled), [], 0.0)


def fused_code(
    arch: str, block_size: int, num_heads: int, head_size: int, *, fp8: bool = False
) -> Any:
    """What Triton compiles for `compile_fused`, or for pools of fp8 with tables of scales."""
    from chunkattn.kernels.fused import _fused_kernel
    from chunkattn.kernels.tuning import fused_tile, next_power_of_2

    block_h, block_d, num_warps = fused_tile(num_heads, head_size)
    constants: dict[str, Any] = {
        "BLOCK_SIZE": block_size,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_H": block_h,
        "BLOCK_KV_H": next_power_of_2(num_heads),
        "BLOCK_D": block_d,
        "HAS_QUERY_NORM": True,
        "HAS_KEY_NORM": True,
        "HAS_SUM_SQUARES": False,
        "ROTATE_QUERY": True,
        "ROTATE_KEY": True,
        "HAS_KEY_SCALES": fp8,
        "HAS_VALUE_SCALES": fp8,
        "sum_squares_ptr": None,
    }
    if not fp8:
        constants |= dict.fromkeys(("key_scales_ptr", "value_scales_ptr"))
    types = dict.fromkeys(("cos_ptr", "sin_ptr", "key_scales_ptr", "value_scales_ptr"), "*fp32")
    types |= dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32")
    if fp8:
        types |= dict.fromkeys(("key_pool_ptr", "value_pool_ptr"), "*fp8e4nv")
    return _compile(_fused_kernel, constants, arch, num_warps, 1, types)


def jobs(archs: Sequence[str], presets: Sequence[str]) -> list[Callable[[], Row]]:
    """One job for each kernel, target and preset; a job compiles when it is called."""
    found: list[Callable[[], Row]] = []
    for arch in archs:
        for preset in (get_preset(name) for name in presets):
            span = preset.frames_per_span * preset.frame_tokens + preset.action_tokens
            rows = span * preset.heads // preset.kv_heads
            block, size = preset.frame_tokens, preset.head_size
            for descriptors in (True, False) if _capability(arch) >= 90 else (False,):
                job = functools.partial(compile_walk, arch, block, size, rows)
                found.append(functools.partial(job, descriptors=descriptors))
            found.append(functools.partial(compile_scatter, arch, block, preset.kv_heads, size))
            found.append(functools.partial(compile_fused, arch, block, preset.heads, size))
        for wide in (False, True):
            found.append(functools.partial(compile_gather, arch, 16, size, rows, wide=wide))
    return found


def _capability(arch: str) -> int:
    """As `launch.arch_of` says it: 0 on an AMD GPU."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0


def _attention_constants(tiles: Any, head_size: int, every_path: bool) -> dict[str, Any]:
    from chunkattn.kernels.tuning import next_power_of_2

    constants = {
        "HEAD_SIZE": head_size,
        "QUERIES_PER_KV": 5 if every_path else 1,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": max(16, next_power_of_2(head_size)),
        "REST_N": tiles.rest_n,
        "PRECISION": "tf32",
        "ONE_SEQ": not every_path,
        "HAS_CURRENT": every_path,
        "HAS_LSE": every_path,
    }
    absent = ("key_current_ptr", "value_current_ptr", "current_start_loc_ptr", "lse_ptr")
    return constants if every_path else constants | dict.fromkeys(absent)


def _row(
    kernel: str,
    arch: str,
    block_size: int,
    head_size: int,
    tiles: Any,
    compiled: Any,
    roles: list[str],
    padding_waste: float,
) -> Row:
    sizes = (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)
    return Row(
        kernel,
        arch,
        block_size,
        head_size,
        "bfloat16",
        *sizes,
        *_resources(compiled),
        _loops(compiled, roles),
        padding_waste,
    )


def _compile(
    kernel: Any,
    constants: dict[str, Any],
    arch: str,
    warps: int,
    stages: int,
    types: dict[str, str] | None = None,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("Triton must compile, not interpret: unset TRITON_INTERPRET")
    constants = constants | {n: 1 for n in kernel.arg_names if n in _STRIDE_1_ARGUMENTS}
    signature = {n: _type_of(n) for n in kernel.arg_names} | (types or {})
    signature |= {n: "constexpr" for n in constants}
    # As a launch specialises them: pointers and strides are multiples of 16.
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(kernel.arg_names)
        if n not in constants and (n.endswith("_ptr") or n.startswith("stride_"))
    }
    source = ASTSource(kernel, signature, constants, multiples)
    target = GPUTarget("cuda", _capability(arch), 32)
    if arch.startswith("gfx"):
        target = GPUTarget("hip", arch, 64)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def _type_of(name: str) -> str:
    if name == "scale_log2":
        return "fp32"
    return _POINTER_TYPES.get(name, "*bf16") if name.endswith("_ptr") else "i32"


def _cuobjdump(flag: str, compiled: Any) -> str:
    import triton.backends.nvidia as nvidia

    tool = Path(os.path.dirname(nvidia.__file__)) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tool), flag, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(compiled: Any) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread, bytes of shared memory a program."""
    if "amdgcn" in compiled.asm:
        # A lane's vector registers, and its private segment, which also holds what is spilled.
        found = [
            re.search(rf"\.{name}: +(\d+)", compiled.asm["amdgcn"])
            for name in ("vgpr_count", "private_segment_fixed_size")
        ]
        registers, stack = (int(match[1]) if match else -1 for match in found)
        return registers, stack, int(compiled.metadata.shared)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", compiled))
    if usage is None:
        raise RuntimeError("cuobjdump printed no resource usage")
    return int(usage[1]), int(usage[2]), int(compiled.metadata.shared)


def _loops(compiled: Any, roles: list[str]) -> list[Loop]:
    """Innermost loops that hold matrix instructions: the code between a backward branch and its
    target. None for an AMD target, whose code is not read.
    """
    if "amdgcn" in compiled.asm:
        return []
    code = []
    for line in _cuobjdump("-sass", compiled).splitlines():
        match = re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)([^;]*);", line)
        if match:
            code.append((int(match[1], 16), match[2], match[3]))
    spans = []
    for address, opcode, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if opcode == "BRA" else None
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    found: list[tuple[int, int, collections.Counter[str]]] = []
    for start, stop in sorted(spans):
        count = collections.Counter(op for address, op, _ in code if start <= address <= stop)
        if sum(count[op] for op in _MMA) and not count["EXIT"]:
            found.append((start, stop, count))
    inner = [
        loop
        for loop in found
        if not any(o is not loop and loop[0] <= o[0] and o[1] <= loop[1] for o in found)
    ]
    if len(inner) != len(roles):
        roles = ["?"] * len(inner)
    return [
        Loop(
            role,
            sum(count.values()),
            sum(count[op] for op in _MMA),
            count["UTMALDG"],
            count["LDGSTS"],
        )
        for role, (_, _, count) in zip(roles, inner, strict=True)
    ]


def versions() -> dict[str, str]:
    """The compiler that made the counts."""
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}
