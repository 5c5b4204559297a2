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


def test_the_demos_table_is_that_of_the_report():
    report = json.loads((ROOT / "docs/demo/report.json").read_text())
    shown = README.partition("$ make demo")[2].partition("$ make test")[0]
    copied, peak = report["copied_kv_bytes_per_forward"], report["peak_kv_bytes"]
    sizes = [*copied.values(), *peak.values(), report["reserved_kv_bytes"]]
    assert all(f" {size / 1e6:.2f} MB " in shown for size in sizes)
    seconds = report["seconds"]
    for name in ("chunkattn", "upstream"):
        assert f" {seconds[name]:.1f} " in shown
    assert f" {seconds['median_ratio']:.2f} " in shown
    assert f"of {report['outputs']} outputs: {report['largest_difference']:.2g}, below" in shown
    assert f"{report['forwards']} forwards each way" in shown


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
