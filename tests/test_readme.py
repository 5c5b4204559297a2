"""The README's example runs, and its package map names every file."""

import json
import re
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
    rows = README.partition("## Package map\n")[2].partition("\n## ")[0].splitlines()
    named = []
    for row in rows:
        folder = ""  # of the name before, in a row
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            named.append(f"{folder}/{name.rpartition('/')[2]}")
    files = [
        f"{folder}/{file.name}"
        for folder in ("kernels", "chunkattn", "chunkattn/integrations", "bench")
        for file in (ROOT / folder).glob("*.py")
        if not file.name.startswith("__")
    ]
    assert sorted(named) == sorted(files)
