"""The wheel and the sdist of ``dist/`` in an environment that holds nothing else: ``make dist``.

The environment lies in a temporary folder and is made by pip from the pins of the lock. The wheel
is installed there and tried, then removed; the sdist must build and install the same files.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Two sequences over blocks of 80 tokens whose dead slots are NaN, on both backends.
SMOKE = """
import sys

import torch

import chunkattn

assert sys.prefix in chunkattn.__file__, chunkattn.__file__
torch.manual_seed(0)
for backend in ("torch", "triton"):
    key_pool, value_pool = (torch.full((6, 80, 2, 32), float("nan")) for _ in range(2))
    query, key, value = (torch.randn(n, heads, 32) for n, heads in ((20, 4), (230, 2), (230, 2)))
    table = torch.tensor([[5, 2], [1, 4]], dtype=torch.int32)
    slots = torch.cat([torch.arange(80) + 80 * block for block in (5, 2, 1, 4)])
    lens = (100, 130)
    slots = torch.cat([slots[:100], slots[160:290]])
    chunkattn.scatter_kv(key, value, key_pool, value_pool, slots, backend=backend)
    out = chunkattn.paged_window_attention(
        query, key_pool, value_pool, table, torch.tensor(lens, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 7, 20], dtype=torch.int32), backend=backend,
    )
    for rows, keys in ((slice(0, 7), slice(0, 100)), (slice(7, 20), slice(100, 230))):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (query[rows], key[keys], value[keys])), enable_gqa=True
        )
        torch.testing.assert_close(out[rows], expected.transpose(0, 1), rtol=0, atol=2e-6)
try:
    chunkattn.ARDiffusionKVCache
except chunkattn.MissingDependencyError as error:
    assert "pip install 'chunkattn[vllm]'" in str(error), error
else:
    raise AssertionError("a cache without vLLM must name what is missing")
print("attention is that of SDPA on both backends")
"""


def check_contents(wheel: Path, sdist: Path) -> None:
    """One package and its metadata, and the files without which it does not work or may not go."""
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{wheel.name.rsplit('-', 3)[0]}.dist-info"
    assert {name.split("/")[0] for name in names} == {"chunkattn", info}, names
    kernels = {f"chunkattn/{path.relative_to(ROOT)}" for path in ROOT.glob("kernels/*.py")}
    missing = {f"{info}/licenses/LICENSE", "chunkattn/py.typed", *kernels} - set(names)
    assert not missing, missing
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = {"LICENSE", "kernels/walk.py", "tests/check_dist.py", "docs/kernels.md"} - held
    assert not missing, missing


def run(*command: str | Path, cwd: Path, most: int = 0, **env: str) -> str:
    """What a command prints, away from the checkout and from what the caller's Python sees.

    Args:
        command: to run.
        cwd: the folder to run it in.
        most: the largest exit status that is right.
        env: set beside the caller's environment.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options = {"cwd": cwd, "env": clean | env, "stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, **options)
    if done.returncode > most:
        raise SystemExit(f"{command} exits with {done.returncode}: {done.stdout}")
    return done.stdout


def installed_files(site: Path) -> set[str]:
    """What pip put there for us, bytecode aside."""
    (found,) = importlib.metadata.distributions(name="chunkattn", path=[str(site)])
    return {str(file) for file in found.files or () if file.suffix != ".pyc"} - {
        f"chunkattn-{found.version}.dist-info/direct_url.json"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="the pins of torch and what it needs")
    lock = parser.parse_args().lock.resolve()
    (wheel,), (sdist,) = (ROOT.glob(f"dist/*{kind}") for kind in (".whl", ".tar.gz"))
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
        site = folder / f"venv/lib/python3.{sys.version_info.minor}/site-packages"
        files = []
        for archive in (wheel, sdist):
            run(*pip, "install", "-q", "--no-compile", "-c", lock, archive, cwd=folder)
            files.append(installed_files(site))
            # Its status is 1 as long as something is missing: here vLLM, and nothing else.
            found = json.loads(
                run(folder / "venv/bin/chunkattn", "doctor", "--json", cwd=folder, most=1)
            )
            problems = {finding["what"] for finding in found if finding["problem"]}
            assert problems == {"vllm"}, found
            print(run(python, "-c", SMOKE, cwd=folder, TRITON_INTERPRET="1"), end="")
            run(*pip, "uninstall", "-q", "-y", "chunkattn", cwd=folder)
            assert not (site / "chunkattn").exists()
    assert files[0] == files[1], files[0] ^ files[1]
    print(f"{wheel.name} and {sdist.name} install the same {len(files[0])} files and work")


if __name__ == "__main__":
    main()
