"""The README's example runs, and its package map names every file."""

import json
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    _, _, rest = README.partition("```python\n")
    example, _, _ = rest.partition("```")
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (128, 4, 64)
    assert torch.isfinite(names["out"]).all()
    assert names["session"].cache.num_free_blocks == names["cache"].num_blocks - 1


def test_the_package_map_is_complete():
    files = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "chunkattn").glob("*.py")]
    missing = [f.name for f in files if f.name not in README and not f.name.startswith("__")]
    assert not missing


def test_the_policy_of_the_documentation():
    """The example of docs/policies.md runs, and keeps what it says."""
    text = (ROOT / "docs/policies.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict = {"__name__": "policies"}
    exec(compile(code, "docs/policies.md", "exec"), names)
    policy = names["EveryTenth"](window=6, most=3)
    seen = [chunk for run in policy.visible((), range(64, 66)) for chunk in run]
    assert seen == [30, 40, 50, 60, 61, 62, 63]
    assert len(seen) + 2 <= policy.capacity_chunks


def test_the_compilers_counts_are_those_of_the_result_file():
    rows = json.loads((ROOT / "bench/results/aot-triton-3.7.1.json").read_text())
    found = {(row["kernel"], row["arch"], row["block_size"]): row for row in rows}
    names = {
        "sm_90, tensor descriptors": ("walk", "sm_90"),
        "sm_90, pointers": ("walk_pointers", "sm_90"),
        "sm_90, keys split over 132 programs": ("walk_split", "sm_90"),
        "sm_100, tensor descriptors": ("walk", "sm_100"),
        "sm_80": ("walk", "sm_80"),
        "sm_90, rows looked up (blocks of 16)": ("gather", "sm_90"),
    }
    table = README.partition("## In the compiler's eyes")[2].partition("## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| sm")]
    assert len(lines) == 7
    for line in lines:
        target, tile, block, full, tail, stack, ratio = (x.strip() for x in line.split("|")[1:-1])
        row = found[(*names[target], int(block))]
        loops = {loop["role"]: loop["instructions"] for loop in row["loops"]}
        assert tile == f"{row['block_m']}x{row['block_n']}"
        assert (int(full), tail) == (loops["full"], str(loops.get("tail", "")))
        assert stack.split()[0] == str(row["stack_bytes"])
        if ratio:
            theirs = found["vllm_unified_attention", "sm_90", 880]
            slots = [
                r["loops"][0]["instructions"] * r["num_warps"] / (r["block_m"] * r["block_n"])
                for r in (row, theirs)
            ]
            assert float(ratio) == round(slots[0] / slots[1], 3)
