"""The README's example runs, and its package map names every file."""

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
