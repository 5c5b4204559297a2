"""What the compiler makes of the kernels, without a GPU: address widths, precision, spills.

Run as a program it compiles the kernels of a folder and prints the results as JSON. The tests do
that in a process of their own, because in this one Triton may be interpreting.
"""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POOLS = {"key_pool_ptr", "value_pool_ptr"}
INDICES = {"block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "current_start_loc_ptr"}
GPUS = ("sm_80", "sm_90", "gfx942")
DREAMZERO = {"block_size": 880, "head_size": 128, "rows": 1785, "dtype": "bf16"}
# Tiles, tail, padded heads, ragged sequences: every path of the kernel in one small compilation.
EVERY_PATH = {"block_size": 40, "head_size": 20, "rows": 16, "dtype": "fp32", "every_path": True}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


# -- the program ---------------------------------------------------------------------------------
def compile_kernel(kernel, constants: dict, types: dict, target, num_warps: int, num_stages: int):
    """Compile as a launch does whose pointers and strides are multiples of 16."""
    import triton
    from triton.compiler import ASTSource

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        return types.get(name, types["*"] if name.endswith("_ptr") else "i32")

    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and (name.startswith("stride_") or name.endswith("_ptr"))
    }
    signature = {name: type_of(name) for name in kernel.arg_names}
    return triton.compile(
        ASTSource(kernel, signature, constants, multiples),
        target=target,
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )


def compile_walk(
    kernels: str,
    target,
    arch: int,
    *,
    block_size,
    head_size,
    rows,
    dtype,
    every_path=False,
    descriptors=False,
):
    tuning = importlib.import_module(f"{kernels}.tuning")
    walk = importlib.import_module(f"{kernels}.walk")
    size = 4 if dtype == "fp32" else 2
    tiles = tuning.walk_tiles(arch, head_size, size, block_size, rows)
    if every_path:
        tiles = tiles._replace(block_m=16, block_n=16, tail_n=16, rest_n=16)
    constants = {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "QUERIES_PER_KV": 2 if every_path else 1,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": tuning.next_power_of_2(head_size),
        "TAIL_N": tiles.tail_n,
        "REST_N": tiles.rest_n,
        # What the launcher passes; `test_precision` looks at it.
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "ONE_SEQ": not every_path,
        "HAS_CURRENT": every_path,
        "HAS_LSE": every_path,
        "HAS_DESC": descriptors,
        "COUNT_TILES": tiles.count_tiles,
    }
    if not every_path:
        absent = ("key_current_ptr", "value_current_ptr", "current_start_loc_ptr", "lse_ptr")
        constants |= dict.fromkeys(absent)
    types = dict.fromkeys(INDICES, "*i32")
    types |= {"*": f"*{dtype}", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    for name in ("key", "value"):
        for part, rows in (("", tiles.block_n), ("_tail", tiles.tail_n)):
            if descriptors:
                box = f"1, {rows}, {constants['BLOCK_D']}"
                types[f"{name}{part}_desc"] = f"tensordesc<{dtype}[{box}]>"
            else:
                constants[f"{name}{part}_desc"] = None
    return compile_kernel(
        walk._walk_kernel, constants, types, target, tiles.num_warps, tiles.num_stages
    )


def compile_gather(kernels: str, target, arch: int, wide: bool, *, every_path=False):
    tuning = importlib.import_module(f"{kernels}.tuning")
    gather = importlib.import_module(f"{kernels}.gather")
    head_size = 20 if every_path else 128
    tiles = tuning.gather_tiles(arch, head_size, 2, 16 if every_path else 1785)
    constants = {
        "BLOCK_SIZE": 6 if every_path else 16,
        "HEAD_SIZE": head_size,
        "QUERIES_PER_KV": 2 if every_path else 1,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": tuning.next_power_of_2(head_size),
        "REST_N": tiles.rest_n,
        "PRECISION": "tf32",
        "ONE_SEQ": not every_path,
        "HAS_CURRENT": every_path,
        "HAS_LSE": every_path,
        "WIDE": wide,
    }
    if not every_path:
        absent = ("key_current_ptr", "value_current_ptr", "current_start_loc_ptr", "lse_ptr")
        constants |= dict.fromkeys(absent)
    types = dict.fromkeys(INDICES, "*i32")
    types |= {"*": "*bf16", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    return compile_kernel(
        gather._gather_kernel, constants, types, target, tiles.num_warps, tiles.num_stages
    )


def compile_scatter(kernels: str, target, *, block_size, head_size, heads, dtype):
    tuning = importlib.import_module(f"{kernels}.tuning")
    scatter = importlib.import_module(f"{kernels}.scatter")
    block_t, block_c = tuning.scatter_tile(heads * head_size)
    constants = {
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": heads,
        "HEAD_SIZE": head_size,
        "BLOCK_T": block_t,
        "BLOCK_C": block_c,
        "HAS_EXTRA": True,
    }
    types = {"*": f"*{dtype}", "slot_mapping_ptr": "*i32"}
    return compile_kernel(scatter._scatter_kernel, constants, types, target, 4, 1)


def resources(compiled) -> dict[str, int]:
    """Bytes of local memory a thread, and its loads and stores in loops of matrix products."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        stack = int(re.search(r"\.private_segment_fixed_size: +(\d+)", text)[1])
        return {"stack": stack, "in_loops": int(re.search(r"\.vgpr_spill_count: +(\d+)", text)[1])}
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

    def dump(flag: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [tool, flag, cubin.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    code = [
        (int(match[1], 16), match[2], match[3])
        for match in re.finditer(
            r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)([^;]*);",
            dump("-sass"),
            re.MULTILINE,
        )
    ]
    loops = []
    for address, opcode, rest in code:
        jump = re.search(r"0x([0-9a-f]+)", rest) if opcode == "BRA" else None
        if jump and int(jump[1], 16) < address:
            span = range(int(jump[1], 16), address + 1)
            if any("MMA" in op for at, op, _ in code if at in span):
                loops.append(span)
    # A jump back from code moved out of the way spans whole loops.
    inner = [
        loop
        for loop in loops
        if not any(o is not loop and o[0] in loop and o[-1] in loop for o in loops)
    ]
    return {
        "stack": int(re.search(r"STACK:(\d+)", dump("-res-usage"))[1]),
        "in_loops": sum(
            op in ("LDL", "STL") for at, op, _ in code if any(at in loop for loop in inner)
        ),
        "matrix_loops": len(inner),
    }


def main(kernels: str, *names: str) -> None:
    from triton.backends.compiler import GPUTarget

    # "walk" asks for every path of that kernel, "walk sm_90" for DreamZero's shapes on that GPU.
    rows = {"block_size": 880, "head_size": 128, "heads": 40, "dtype": "bf16"}
    few_rows = {"block_size": 40, "head_size": 20, "heads": 3, "dtype": "fp16"}
    result = {}
    for name in names:
        kernel, _, gpu = name.partition(" ")
        arch = int(gpu.removeprefix("sm_")) if gpu.startswith("sm_") else 0
        target = GPUTarget("cuda", arch or 80, 32)
        if gpu.startswith("gfx"):
            target = GPUTarget("hip", gpu, 64)
        if kernel in ("walk", "descriptors"):
            shapes = (DREAMZERO if gpu else EVERY_PATH) | {"descriptors": kernel == "descriptors"}
            compiled = compile_walk(kernels, target, arch, **shapes)
        elif kernel in ("gather", "gather64"):
            wide = kernel == "gather64"
            compiled = compile_gather(kernels, target, arch, wide, every_path=not gpu)
        else:
            compiled = compile_scatter(kernels, target, **(rows if gpu else few_rows))
        result[name] = {"ttir": compiled.asm["ttir"]} | (resources(compiled) if gpu else {})
    print(json.dumps(result))


# -- the tests -----------------------------------------------------------------------------------
def compile_all(kernels: str, *names: str, path: Path = ROOT) -> dict:
    """Compile in a new process the kernels of a package that lies in ``path``."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, kernels, *names],
        env=env | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled() -> dict:
    """The kernels with every path, and at DreamZero's shapes for each GPU."""
    halves = (
        ["walk sm_80", "walk sm_90", "scatter", "gather64", "gather", "gather sm_80"],
        ["walk", "walk gfx942", "descriptors sm_90", *(f"scatter {gpu}" for gpu in GPUS)],
    )
    with ThreadPoolExecutor() as threads:
        results = threads.map(lambda names: compile_all("chunkattn.kernels", *names), halves)
        return {name: kernel for result in results for name, kernel in result.items()}


def narrow_multiplies(ttir: str) -> set[str]:
    """Multiplies of less than 64 bits that an address in a pool is computed from.

    Follows values from the arguments on: what each is computed from, through loads too, because
    a block id or a slot was loaded from an address. No pointer may be carried around a loop.
    """
    behind: dict[str, set[str]] = {}
    faults: set[str] = set()
    found: set[str] = set()
    for line in ttir.splitlines():
        line = line.partition(" loc(")[0].strip()
        result, text = re.fullmatch(r"(?:(%\w+)(?::\d+)? = )?(.*)", line).groups()
        access = re.search(r"tt\.(?:load|store) (%[\w#]+)", text)
        # Of what is loaded, the address; masks only say whether.
        operands = [access[1]] if access else re.findall(r"%[\w#]+", text)
        origin = {name.removeprefix("%") for name in operands}
        for name in operands:
            origin |= behind.get(name, behind.get(name.partition("#")[0], set()))
        if "arith.muli" in text and not re.search(r"\b(?:\w+x)*i64>?$", text):
            origin.add(line)
        if "scf.for" in text:
            assert "tt.ptr" not in text, "a pointer is carried around a loop"
            for name, start in re.findall(r"(%\w+) = (%[\w#]+)", text):
                behind[name] = {start.removeprefix("%")} | behind.get(start, set())
        if result:
            behind[result] = origin
        if access and POOLS & origin:
            found |= POOLS & origin
            faults |= {value for value in origin if "muli" in value}
    assert found == POOLS, "the addresses of the pools were not found"
    return faults


def test_addresses_are_64_bit(compiled):
    """A1: in every kernel, for every path and at DreamZero's shapes."""
    for name, kernel in compiled.items():
        if name.partition(" ")[0] == "gather":
            # Launched only where the last offset of both pools fits 32 bits, and narrow for that.
            assert narrow_multiplies(kernel["ttir"]), name
        else:
            assert narrow_multiplies(kernel["ttir"]) == set(), name


def test_precision(compiled):
    """E5: float32 is multiplied as float32."""
    dots = re.findall(r"tt\.dot .*", compiled["walk"]["ttir"])
    # Two matrix products in the loops of tiles, tails, last rows and current rows.
    assert len(dots) == 8
    assert all("inputPrecision = ieee" in dot or "inputPrecision" not in dot for dot in dots)
    assert all(re.search(r"tensor<\w+xf32> \* tensor<\w+xf32>", dot) for dot in dots)
    dots = re.findall(r"tt\.dot .*", compiled["walk sm_90"]["ttir"])
    assert len(dots) == 6
    assert all(re.search(r"tensor<\w+xbf16> \* tensor<\w+xbf16> -> .*xf32>", dot) for dot in dots)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_launch_asks_for_that_precision(monkeypatch, dtype):
    """E5: what the launcher passes is what was compiled above."""
    import torch

    from chunkattn.kernels import walk

    seen = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.update(options)

    monkeypatch.setattr(walk, "_walk_kernel", Kernel())
    rows = torch.zeros(1, 1, 16, dtype=getattr(torch, dtype))
    lens = torch.ones(2, dtype=torch.int32)
    none = [None] * 3
    walk.walk(rows, rows[None], rows[None], lens[None], lens[:1], lens, *none, rows, None, 1.0)
    assert (seen["PRECISION"] == "ieee") == (dtype == "float32")
    assert "enable_fp_fusion" in seen


@pytest.mark.parametrize("arch", GPUS)
def test_no_spills_in_loops(compiled, arch):
    """Registers suffice for the loops; a few values may wait on the stack while they run."""
    for kernel in ("walk", "scatter", "descriptors", "gather"):
        result = compiled.get(f"{kernel} {arch}")
        if result is None:
            assert kernel in ("descriptors", "gather")
            continue
        assert result["in_loops"] == 0
        assert result["stack"] == 0
    if arch.startswith("sm_"):
        assert compiled[f"walk {arch}"]["matrix_loops"] >= 3


def test_amd_gpus_get_the_small_tiles(monkeypatch):
    """ROCm calls its GPUs cuda and gfx942's capability 9.4, but sm_90's tiles spill there."""
    import torch

    from chunkattn.kernels.launch import arch_of

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert arch_of.__wrapped__(torch.device("cuda", 0)) == 0
    monkeypatch.setattr(torch.version, "hip", None)
    assert arch_of.__wrapped__(torch.device("cuda", 0)) == 94


def test_each_narrow_multiply_is_found(compiled):
    """A1: narrow any multiply behind the pools in the compiler's output, and the check says so."""
    for kernel, at_least in (("walk", 20), ("gather64", 12), ("scatter", 8)):
        lines = compiled[kernel]["ttir"].splitlines()
        found = []
        for i, line in enumerate(lines):
            if "arith.muli" in line and "i64" in line:
                narrow = line.replace("i64 loc(", "i32 loc(").replace("xi64> loc(", "xi32> loc(")
                faulty = "\n".join([*lines[:i], narrow, *lines[i + 1 :]])
                found += narrow_multiplies(faulty)
        assert len(found) >= at_least
        names = " ".join(fault.partition(" ")[0] for fault in found)
        assert "key_" in names
        assert "value_" in names


def test_missing_casts_are_found(tmp_path):
    """A1: taking a cast out of the source makes the check fail."""
    casts = {
        "walk": (
            "block = block.to(tl.int64)\n                slot =",
            "block = block.to(tl.int32)\n                slot =",
        ),
        "gather64": ("block = block.to(tl.int64)", "block = block.to(tl.int32)"),
        "scatter": ("other=-1).to(\n        tl.int64\n    )", "other=-1)"),
    }
    shutil.copytree(ROOT / "kernels", tmp_path / "faulty", ignore=shutil.ignore_patterns("_*"))
    for kernel, (right, wrong) in casts.items():
        file = tmp_path / "faulty" / f"{kernel.removesuffix('64')}.py"
        source = file.read_text()
        assert source.count(right) == 1, f"{file.name} no longer has one {right!r}"
        file.write_text(source.replace(right, wrong))
    result = compile_all("faulty", *casts, path=tmp_path)
    for kernel in casts:
        assert narrow_multiplies(result[kernel]["ttir"]), kernel


if __name__ == "__main__":
    main(*sys.argv[1:])
