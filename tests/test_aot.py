"""`chunkattn aot`: the rows it prints, and what the compiler's counts must not exceed.

The counts are exact for one version of Triton: the budgets of `chunkattn.aot_budgets` are met by
the pinned one. All is compiled in processes of its own, because in this one Triton may be
interpreting.
"""

import dataclasses
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

from chunkattn import aot, sass
from chunkattn.aot_budgets import BUDGETS, RECORDED, Budget, Result
from chunkattn.aot_launch import Shape
from chunkattn.presets import PRESETS
from tests.helpers.machine import needs_triton

ROOT = Path(__file__).resolve().parent.parent
pytestmark = needs_triton

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
# Of one program: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the
# LDS of a CDNA 3 compute unit.
SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
}
# The calls that ask for the most shared memory. Walks of fp32 compile for long.
EXTREMES = [
    ("walk", 128, "bfloat16"),
    ("gather", 128, "bfloat16"),
    ("walk", 256, "bfloat16"),
    ("gather", 256, "bfloat16"),
    ("walk", 256, "float32"),
]
COMPILE = """
import dataclasses, json, sys
import torch
from chunkattn import aot
from chunkattn.aot_launch import Shape

arch = sys.argv[1]
for kernel, head_size, dtype in json.loads(sys.argv[2]):
    is_walk = kernel == "walk"
    compile = aot.compile_walk if is_walk else aot.compile_gather
    row = compile(arch, Shape(880 if is_walk else 16, head_size, dtype=getattr(torch, dtype)))
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


# -- budgets --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def results() -> dict[Budget, dict]:
    lock = (ROOT / "requirements/cpu.txt").read_text()
    pinned = re.search(r"^triton==(.+)$", lock, re.MULTILINE)[1]
    installed = importlib.metadata.version("triton")
    if installed != pinned:
        pytest.skip(
            f"triton {pinned} is pinned, not {installed}: see `make aot TRITON={installed}`"
        )
    rows = json.loads(run("-m", "chunkattn", "aot", "--budgets", "--json"))
    return {Budget(*(row[field] for field in Budget._fields)): row for row in rows}


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: "-".join(map(str, b[:5])))
def test_budgets(results, budget):
    if budget.what == "slots / vLLM's" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    assert results[budget]["verdict"] == "ok", results[budget]


def test_every_budget_of_the_kernels_is_there():
    assert len(set(BUDGETS)) == len(BUDGETS) == 86
    most = {budget[:5]: budget.most for budget in BUDGETS}
    for every_path in (False, True):
        assert most["walk", "sm_90", 880, every_path, "full"] == 505
        assert most["walk", "sm_90", 1560, every_path, "tail"] == 270
        assert most["walk", "sm_90", 880, every_path, "stack"] == 0
    assert most["walk", "sm_90", 880, False, "slots / vLLM's"] == 1 / 9
    assert {budget.arch for budget in BUDGETS if budget.kernel == "scatter"} == set(sass.ARCHS)


def test_a_budget_that_is_missed_says_so():
    full = Budget("walk", "sm_90", 880, False, "full", 505)
    verdicts = [Result(full, n, 520).verdict for n in (505, 506, 520, 521)]
    assert verdicts == ["ok", "recorded", "recorded", "missed"]
    assert Result(full, 506, None).verdict == "missed"
    # Fewer matrix products than expected are others.
    products = full._replace(what="mma", most=16)
    assert [Result(products, n, None).verdict for n in (16, 8)] == ["ok", "missed"]


def test_what_is_recorded_belongs_to_a_budget_that_it_misses():
    most = {budget[:5]: budget.most for budget in BUDGETS}
    for recorded in RECORDED.values():
        for name, reached in recorded.items():
            assert reached > most[name]


# -- tiles ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def extremes() -> dict[str, list[dict]]:
    """The largest tiles of each kernel on each target."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        texts = threads.map(lambda arch: run("-c", COMPILE, arch, json.dumps(EXTREMES)), SHARED_KIB)
        return {
            arch: [json.loads(line) for line in text.splitlines()]
            for arch, text in zip(SHARED_KIB, texts, strict=True)
        }


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_tiles_fit_the_gpu(extremes, arch):
    assert len(extremes[arch]) == len(EXTREMES)
    for row in extremes[arch]:
        name = {key: row[key] for key in ("kernel", "head_size", "dtype")}
        assert 0 < row["shared_bytes"] <= SHARED_KIB[arch] * 1024, name
        assert 0 < row["registers"] <= (512 if arch == "gfx942" else 255), name
        if row["dtype"] == "bfloat16" and row["kernel"] == "walk":
            # sm_120 keeps 8 bytes there for one plain sequence, none with every path.
            assert row["stack_bytes"] <= (8 if arch == "sm_120" else 0), name
            assert [loop["role"] for loop in row["loops"]] == ["full", "tail", "rest"], name


@pytest.mark.parametrize("arch", (0, 80, 86, 89, 90, 100, 103, 120, 121))
def test_there_are_tiles_for_every_call(arch):
    from chunkattn.kernels.tuning import gather_tiles, walk_tiles

    for head_size in (8, 80, 128, 256):
        for element_size in (1, 2, 4):
            for num_rows in (1, 25, 100, 1785):
                gather = gather_tiles(arch, head_size, element_size, num_rows)
                walk = walk_tiles(arch, head_size, element_size, 880, num_rows)
                for tiles in (gather, walk):
                    assert tiles.block_m <= max(16, 2 * num_rows)
                    assert tiles.num_warps in (4, 8)
                    assert tiles.num_stages in (1, 2)
                assert walk.tail_n >= 880 % walk.block_n


@pytest.mark.parametrize(("block_size", "most"), [(880, 0.019), (1560, 0.006), (3600, 0.003)])
@pytest.mark.parametrize("arch", (0, 80, 90, 100, 120))
def test_padding_waste(arch, block_size, most):
    """Keys computed over keys visible, recounted tile by tile."""
    from chunkattn.kernels.tuning import padding_waste, walk_tiles

    tiles = walk_tiles(arch, 128, 2, block_size, 1785)
    computed = block_size // tiles.block_n * tiles.block_n
    if computed < block_size:
        assert tiles.tail_n >= block_size - computed
        computed += tiles.tail_n
    waste = padding_waste(block_size, tiles.block_n, tiles.tail_n)
    assert waste == pytest.approx(computed / block_size - 1)
    assert 0 <= waste <= most


# -- jobs ------------------------------------------------------------------------------------------
def test_nothing_is_compiled_twice():
    """Movers were: `functools.partial` hashes by identity, so none was the same as another."""

    def seen_by(job, argument):
        if not isinstance(argument, Shape):
            return argument
        heads, kv_heads = argument.num_heads, argument.num_kv_heads
        if job.func is not aot.compile_mover:
            heads, kv_heads = heads // kv_heads, 1
        return dataclasses.replace(argument, num_tokens=0, num_heads=heads, num_kv_heads=kv_heads)

    jobs = aot.jobs(sass.ARCHS, PRESETS)
    keys = [
        (job.func, *(seen_by(job, argument) for argument in job.args), *job.keywords.items())
        for job in jobs
    ]
    assert len(set(keys)) == len(jobs)


# -- the command ----------------------------------------------------------------------------------
def test_json_of_the_command():
    """Keys and types of the rows, as other programs read them."""
    command = ("-m", "chunkattn", "aot", "--preset", "dreamzero_14b", "--json")
    rows = json.loads(run(*command, "--arch", "sm_90", "gfx942"))
    with_vllm = ["vllm_unified_attention"] * (importlib.util.find_spec("vllm") is not None)
    movers = ["block_scales", "blend", "clear", "copy", "fused", "scatter"]
    walks = ["walk", "walk_fp8", "walk_segments", "walk_split"]
    kernels = ["gather", "gather64", "merge", *movers, *walks, *with_vllm]
    found = [(row["arch"], row["kernel"]) for row in rows]
    assert sorted(found) == sorted(
        [("sm_90", kernel) for kernel in [*kernels, "walk_pointers"]]
        + [("gfx942", kernel) for kernel in kernels]
    )
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == ROW
        for loop in row["loops"]:
            assert {key: type(value) for key, value in loop.items()} == LOOP
            assert loop["role"] in ("full", "tail", "rest")
    for row in rows:
        if row["kernel"] == "walk":
            assert row["block_size"] == PRESETS["dreamzero_14b"].frame_tokens
            assert row["padding_waste"] == 0.0182
            assert [loop["role"] for loop in row["loops"]] == ["full", "tail", "rest"]
            tma = 2 if row["arch"] == "sm_90" else 0
            assert all(loop["tma"] == tma and loop["mma"] for loop in row["loops"][:2])


# -- the reading of code --------------------------------------------------------------------------
SASS = """
        /*0000*/                   LDG.E R2, desc[UR4][R2.64] ;    /* 0x01 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R4.64] ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24 ;
        /*0030*/              @!P1 LDGSTS.E.BYPASS.128 [R41], desc[UR44][R2.64], !P1 ;
        /*0040*/               @P1 BRA 0x20 ;
        /*0050*/                   UTMALDG.3D [UR8], [UR4] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0070*/               @P0 BRA 0x50 ;
        /*0080*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0090*/               @P2 BRA 0x10 ;
        /*00a0*/                   EXIT ;
"""
AMDGCN = """
\tglobal_load_dwordx4 v[0:3], v1, s[2:3]
.LBB0_1:
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\tbuffer_store_dword v0, off, s[0:3], 0
\ts_endpgm
"""


def test_loops_and_accesses_of_sass():
    code = sass.parse_sass(SASS)
    assert len(code) == 11
    assert sass.loops(code, ["full", "tail"]) == [
        sass.Loop("full", 3, 1, 0, 1),
        sass.Loop("tail", 3, 1, 1, 0),
    ]
    assert [loop.role for loop in sass.loops(code, ["full"])] == ["rest", "rest"]
    assert sass.accesses(code) == (1, 1, 0, 1)


def test_loops_and_accesses_of_amdgcn():
    code = sass.parse_amdgcn(AMDGCN)
    assert sass.loops(code, ["full"]) == [sass.Loop("full", 2, 1, 0, 0)]
    assert sass.accesses(code) == (1, 0, 0, 1)
