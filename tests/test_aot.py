"""`chunkattn aot`: the rows it prints, and what the compiler's counts must not exceed.

The counts are exact for one version of Triton, so the budgets hold for the pinned one alone. They
are compiled in processes of their own, because in this one Triton may be interpreting.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chunkattn.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

ROW = {
    "kernel": str,
    "arch": str,
    "block_size": int,
    "head_size": int,
    "dtype": str,
    "block_m": int,
    "block_n": int,
    "num_warps": int,
    "num_stages": int,
    "registers": int,
    "stack_bytes": int,
    "shared_bytes": int,
    "loops": list,
    "padding_waste": float,
}
LOOP = {"role": str, "instructions": int, "mma": int, "tma": int, "async_copies": int}
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}

# What `aot` compiles (kernel, target, tokens of a block, with ragged sequences, grouped queries,
# lse and current rows), and the most that may come out: instructions a warp of the full and of the
# tail loop, bytes of stack, and exactly how many matrix products and TMA loads the full loop has.
BUDGETS = {
    ("walk", "sm_90", 880, False): (505, 490, 0, 16, 2),
    ("walk", "sm_90", 880, True): (505, 490, 0, 16, 2),
    ("walk", "sm_90", 1560, True): (505, 270, 0, 16, 2),
    # The budget of the full loop is 545; 549 is what there is.
    ("walk_pointers", "sm_90", 880, True): (549, 545, 0, 16, 0),
    # The budget of the tail loop is 530; 544 is what there is.
    ("walk", "sm_100", 880, True): (510, 544, 0, 16, 2),
    ("walk", "sm_80", 880, True): (515, 515, 0, 128, 0),
    ("gather", "sm_90", 16, True): (590, None, 0, 16, 0),
    ("gather64", "sm_90", 16, True): (655, None, 0, 16, 0),
}
# No budget but these: what fits the target's shared memory, and nearly no stack.
OTHERS = [
    ("walk", "sm_120", 880, True),
    ("walk", "gfx942", 880, True),
    ("gather", "gfx942", 16, True),
    ("gather64", "sm_80", 16, True),
]

COMPILE = """
import dataclasses, json, sys
from chunkattn import aot

for kernel, arch, block_size, every_path in json.loads(sys.argv[1]):
    if kernel.startswith("gather"):
        compile, options = aot.compile_gather, {"wide": kernel == "gather64"}
    else:
        descriptors = kernel == "walk" and arch in ("sm_90", "sm_100", "sm_120")
        compile, options = aot.compile_walk, {"descriptors": descriptors}
    row = compile(arch, block_size, 128, 5 * 1785, every_path=every_path, **options)
    print(json.dumps(dataclasses.asdict(row)))
"""


def run(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows() -> dict[tuple, dict]:
    names = [*BUDGETS, *OTHERS]
    with ThreadPoolExecutor() as threads:
        halves = [names[::2], names[1::2]]
        texts = threads.map(lambda half: run("-c", COMPILE, json.dumps(half)), halves)
        found = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return {
        name: row for half, rows in zip(halves, found, strict=True)
        for name, row in zip(half, rows, strict=True)
    }  # fmt: skip


@pytest.fixture(scope="module")
def needs_the_pinned_triton() -> None:
    lock = (ROOT / "requirements/cpu.txt").read_text()
    pinned = re.search(r"^triton==(.+)$", lock, re.MULTILINE)[1]
    installed = importlib.metadata.version("triton")
    if installed != pinned:
        pytest.skip(f"the budgets are of triton {pinned}, not {installed}")


@pytest.mark.usefixtures("needs_the_pinned_triton")
@pytest.mark.parametrize("name", BUDGETS, ids=lambda name: "-".join(map(str, name)))
def test_budgets(rows, name):
    row = rows[name]
    full, tail, stack, mma, tma = BUDGETS[name]
    loops = {loop["role"]: loop for loop in row["loops"]}
    assert set(loops) == ({"full", "rest"} if tail is None else {"full", "tail", "rest"})
    assert loops["full"]["instructions"] <= full
    assert (loops["full"]["mma"], loops["full"]["tma"]) == (mma, tma)
    assert row["stack_bytes"] <= stack
    if tail is not None:
        assert loops["tail"]["instructions"] <= tail
        assert loops["tail"]["tma"] == tma


def test_rows_say_what_was_compiled(rows):
    for name, row in rows.items():
        assert (row["kernel"], row["arch"], row["block_size"]) == name[:3]
        assert (row["head_size"], row["dtype"]) == (128, "bfloat16")


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_tiles_fit_the_gpu(rows, arch):
    found = [row for name, row in rows.items() if name[1] == arch]
    assert found
    for row in found:
        assert row["shared_bytes"] <= SHARED_KIB[arch] * 1024
        assert row["stack_bytes"] <= 64
        assert 0 < row["registers"] <= 256
        assert bool(row["loops"]) == arch.startswith("sm_")


@pytest.mark.parametrize(("block_size", "most"), [(880, 0.019), (1560, 0.006), (3600, 0.003)])
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_padding_waste(arch, block_size, most):
    """Keys computed over keys visible, recounted tile by tile."""
    from chunkattn.kernels.tuning import padding_waste, walk_tiles

    tiles = walk_tiles(arch, 128, 2, block_size, 1785)
    computed = block_size // tiles.block_n * tiles.block_n
    if computed < block_size:
        assert tiles.tail_n >= block_size - computed
        computed += tiles.tail_n
    assert padding_waste(block_size, tiles) == pytest.approx(computed / block_size - 1)
    assert 0 <= padding_waste(block_size, tiles) <= most


def test_json_of_the_command():
    """Keys and types of the rows, as other programs read them."""
    text = run("-m", "chunkattn", "aot", "--arch", "sm_90", "--preset", "dreamzero_14b", "--json")
    rows = json.loads(text)
    kernels = ["fused", "gather", "gather64", "scatter", "walk", "walk_pointers"]
    assert sorted(row["kernel"] for row in rows) == kernels
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == ROW
        for loop in row["loops"]:
            assert {key: type(value) for key, value in loop.items()} == LOOP
            assert loop["role"] in ("full", "tail", "rest")
    walk = next(row for row in rows if row["kernel"] == "walk")
    assert walk["block_size"] == PRESETS["dreamzero_14b"].frame_tokens
    assert walk["padding_waste"] == 0.0182
    assert [loop["role"] for loop in walk["loops"]] == ["full", "tail", "rest"]
    assert all(loop["tma"] == 2 for loop in walk["loops"][:2])
