"""What the compiler makes of the kernels, without a GPU: address widths, precision, spills.

Run as a program it compiles the kernels of a folder and prints the results as JSON. The tests do
that in a process of their own, because in this one Triton may be interpreting.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.machine import needs_triton

ROOT = Path(__file__).resolve().parent.parent
GPUS = ("sm_80", "sm_90", "gfx942")
pytestmark = needs_triton


# -- the program ---------------------------------------------------------------------------------
class Call(NamedTuple):
    """Where to find a kernel: a call of `aot_launch`, which of its launches, the pools' names."""

    call: str
    launch: int = 0
    shape: dict = {}
    options: dict = {}
    pools: tuple[str, str] = ("key_pool_ptr", "value_pool_ptr")


SCALES = ("key_scale_ptr", "value_scale_ptr")
CALLS = {
    "walk": Call("walk", options={"descriptors": False}),
    "descriptors": Call("walk", options={"descriptors": True}),
    "segments": Call("walk", shape={"num_segments": 3, "fp8": True, "biased": True}),
    "split": Call("walk", options={"num_programs": 7}),
    "extra": Call("walk", shape={"extra": True}, pools=("key_extra_ptr", "value_extra_ptr")),
    "merge": Call("walk", 1, options={"num_programs": 7}, pools=("workspace_ptr",) * 2),
    "gather": Call("gather"),
    "gather64": Call("gather", options={"wide": True}),
    "scatter": Call("scatter"),
    "scatter fp8": Call("scatter", 1, shape={"fp8": True}),
    "block_scales": Call("scatter", shape={"fp8": True}, pools=SCALES),
    "fused": Call("fused", shape={"fp8": True}),
    "copy": Call("copy"),
    "blend": Call("blend"),
    "clear": Call("clear"),
}


def compile_one(package: str, kernel: str, gpu: str) -> dict:
    """DreamZero's shapes for a GPU; without one, every path of the kernel at small, odd sizes."""
    import torch

    from chunkattn import aot_launch, sass

    call = CALLS[kernel]
    block_size = 6 if call.call == "gather" else 40
    dtype = torch.float32 if call.call == "walk" else torch.float16
    odd = {"head_size": 20, "num_tokens": 16, "num_heads": 6, "num_kv_heads": 3, "every_path": True}
    shape = aot_launch.Shape(block_size, **odd, dtype=dtype)
    if gpu:
        shape = aot_launch.Shape(16 if call.call == "gather" else 880)
    shape = dataclasses.replace(shape, **call.shape)
    target = gpu or ("sm_89" if shape.fp8 else "sm_80")
    found = aot_launch.launch(call.call, target, shape, package=package, **call.options)
    compiled = found[call.launch].compiled
    return {
        "ttir": compiled.asm["ttir"],
        "stack": sass.resources(compiled)[1],
        "matrix_loops": len(sass.loops(sass.instructions(compiled), [])),
    }


def main(package: str, *names: str) -> None:
    # "walk" asks for every path of that kernel, "walk sm_90" for DreamZero's shapes on that GPU.
    result = {}
    for name in names:
        kernel, _, gpu = name.rpartition(" ")
        kernel, gpu = (kernel, gpu) if gpu in GPUS else (name, "")
        result[name] = compile_one(package, kernel, gpu)
    print(json.dumps(result))


# -- the tests -----------------------------------------------------------------------------------
def compile_all(kernels: str, *names: str, path: Path = ROOT) -> dict:
    """Compile in a new process the kernels of a package that lies in ``path``."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, kernels, *names],
        env=env | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled() -> dict:
    """The kernels with every path, and at DreamZero's shapes for each GPU."""
    on_gpus = ["walk sm_80", "walk sm_90", "gather sm_80", "walk gfx942", "descriptors sm_90"]
    # Descriptors of three heads of 20 elements there are none.
    names = [*on_gpus, *(f"scatter {gpu}" for gpu in GPUS), *sorted({*CALLS} - {"descriptors"})]
    halves = (names[::2], names[1::2])
    with ThreadPoolExecutor() as threads:
        results = threads.map(lambda names: compile_all("chunkattn.kernels", *names), halves)
        return {name: kernel for result in results for name, kernel in result.items()}


def narrow_multiplies(ttir: str, pools: tuple[str, str] = CALLS["walk"].pools) -> set[str]:
    """Multiplies of less than 64 bits that an address in a pool is computed from.

    Follows values from the arguments on: what each is computed from, through loads too, because
    a block id or a slot was loaded from an address. No pointer may be carried around a loop.
    """
    wanted = set(pools)
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
        if access and wanted & origin:
            found |= wanted & origin
            faults |= {value for value in origin if "muli" in value}
    assert found == wanted, "the addresses of the pools were not found"
    return faults


def test_addresses_are_64_bit(compiled):
    """A1: in every kernel, for every path and at DreamZero's shapes."""
    for name, kernel in compiled.items():
        if name.partition(" ")[0] == "gather":
            # Launched only where the last offset of both pools fits 32 bits, and narrow for that.
            assert narrow_multiplies(kernel["ttir"]), name
        else:
            pools = CALLS[name if name in CALLS else name.rpartition(" ")[0]].pools
            assert narrow_multiplies(kernel["ttir"], pools) == set(), name


def test_no_kernel_is_left_out(compiled):
    """Whoever adds a kernel adds it to the program above."""
    kernels = {
        kernel
        for file in (ROOT / "kernels").glob("*.py")
        for kernel in re.findall(r"def _(\w+)_kernel\(", file.read_text())
    }
    variants = {"descriptors", "extra", "gather64", "segments", "split"}
    assert {name.partition(" ")[0] for name in compiled} - variants == kernels


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
    from chunkattn.kernels.arguments import AttentionArguments

    seen = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.update(options)

    monkeypatch.setattr(walk, "_walk_kernel", Kernel())
    rows = torch.zeros(1, 1, 16, dtype=getattr(torch, dtype))
    lens = torch.ones(2, dtype=torch.int32)
    none = [None] * 7
    walk.walk(
        AttentionArguments(
            rows, rows[None], rows[None], lens[None], lens[:1], lens, *none, rows, None, 1.0
        )
    )
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
    for kernel, at_least in (("walk", 18), ("gather64", 12), ("scatter", 8)):
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
    files = {"walk": "loops", "gather64": "gather"}
    casts = {
        "walk": (
            "block = block.to(tl.uint32).to(tl.int64)",
            "block = block.to(tl.int32)",
        ),
        "gather64": ("block = block.to(tl.int64)", "block = block.to(tl.int32)"),
        "scatter": ("other=-1).to(\n        tl.int64\n    )", "other=-1)"),
    }
    shutil.copytree(ROOT / "kernels", tmp_path / "faulty", ignore=shutil.ignore_patterns("_*"))
    for kernel, (right, wrong) in casts.items():
        file = tmp_path / "faulty" / f"{files.get(kernel, kernel)}.py"
        source = file.read_text()
        assert source.count(right) == 1, f"{file.name} no longer has one {right!r}"
        file.write_text(source.replace(right, wrong))
    result = compile_all("faulty", *casts, path=tmp_path)
    for kernel in casts:
        assert narrow_multiplies(result[kernel]["ttir"]), kernel


if __name__ == "__main__":
    main(*sys.argv[1:])
