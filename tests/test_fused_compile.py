"""What the compiler makes of `norm_rope_scatter`: widths of accesses and addresses, the stack.

Run as a program it compiles the kernel and prints the results as JSON, because in the tests' own
process Triton may be interpreting.
"""

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.machine import needs_triton
from tests.test_compile_only import narrow_multiplies

ROOT = Path(__file__).resolve().parent.parent
# DreamZero's heads on one GPU, and on each of eight.
SHAPES = {"all": (880, 40, 128), "eighth": (880, 5, 128)}
GPUS = ("sm_80", "sm_90", "sm_100")

pytestmark = needs_triton


def main() -> None:
    from chunkattn import sass
    from chunkattn.aot_launch import Shape, launch

    result = {}
    for arch, shape, fp8 in (
        *((arch, shape, False) for arch in GPUS for shape in SHAPES),
        ("sm_90", "all", True),
    ):
        block_size, heads, head_size = SHAPES[shape]
        call = Shape(block_size, head_size, num_heads=heads, num_kv_heads=heads, fp8=fp8)
        compiled = launch("fused", arch, call)[0].compiled
        memory = re.compile(r"(LDG|STG|LDL|STL|LDS|STS)\b")
        opcodes = [code.opcode for code in sass.instructions(compiled) if memory.match(code.opcode)]
        registers, stack, shared = sass.resources(compiled)
        result[f"{arch} {shape}{' fp8' * fp8}"] = {
            "ttir": compiled.asm["ttir"],
            "opcodes": collections.Counter(opcodes),
            "registers": registers,
            "stack": stack,
            "shared": shared,
        }
    print(json.dumps(result))


@pytest.fixture(scope="module")
def compiled() -> dict:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_move_in_16_bytes(compiled):
    """Every store, and of the loads all of Q, K, V, the weights and the angles."""
    for name, kernel in compiled.items():
        accesses = kernel["opcodes"]
        wide = {op for op in accesses if op.startswith(("LDG", "STG")) and ".128" in op}
        stores = [op for op in accesses if op.startswith("STG")]
        assert wide >= {"LDG.E.128", "STG.E.128"}, name
        assert all(op in wide for op in stores), name
        if name == "sm_90 all":
            # 40 heads of 128 are three accesses a thread: of Q, K, V and both weights; the angles.
            assert accesses["LDG.E.128"] == 5 * 3 + 2
            assert accesses["STG.E.128"] == 3 * 3
            assert sum(n for op, n in accesses.items() if op.startswith("LDG")) == 18


def test_rows_stay_in_registers(compiled):
    """No stack, and shared memory for the sums alone: the pairs are turned where they lie."""
    for name, kernel in compiled.items():
        assert kernel["stack"] == 0, name
        assert not any(op.startswith(("LDL", "STL")) for op in kernel["opcodes"]), name
        if "fp8" not in name:
            assert kernel["shared"] <= 64, name
        # Two programs of eight warps at once.
        assert kernel["registers"] <= 128, name


def test_addresses_are_64_bit(compiled):
    """A1."""
    for name, kernel in compiled.items():
        assert narrow_multiplies(kernel["ttir"]) == set(), name


def test_each_narrow_multiply_is_found(compiled):
    """A1: narrow any multiply behind the pools in the compiler's output, and the check says so."""
    lines = compiled["sm_90 all"]["ttir"].splitlines()
    found = set()
    for i, line in enumerate(lines):
        if "arith.muli" in line and "i64" in line:
            narrow = line.replace("i64 loc(", "i32 loc(").replace("xi64> loc(", "xi32> loc(")
            found |= narrow_multiplies("\n".join([*lines[:i], narrow, *lines[i + 1 :]]))
    assert len(found) >= 6


if __name__ == "__main__":
    main()
