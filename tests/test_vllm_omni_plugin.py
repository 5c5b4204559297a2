"""The plug-in's switch: what it refuses, what it replaces and where, what it says.

And the faults of vllm-omni's manager, which ours refuses.
"""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from chunkattn import ARDiffusionKVCache
from chunkattn.integrations import vllm_omni as plugin
from tests.helpers.machine import needs_vllm_omni
from tests.helpers.omni import plugged

ROOT = Path(__file__).resolve().parent.parent


def test_off_imports_nothing():
    code = (
        "import sys; from chunkattn.integrations import vllm_omni; vllm_omni.register(); "
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'triton', 'vllm', "
        "'vllm_omni'} or 'nothing', vllm_omni.active)"
    )
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}  # the switch is not set
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "nothing off", done.stderr


def test_the_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["chunkattn"].partition(":")
    assert module == plugin.__name__
    assert getattr(plugin, name) is plugin.register


@needs_vllm_omni
def test_unknown_modes_are_refused(monkeypatch):
    monkeypatch.setenv(plugin.ENV, "on")
    with pytest.raises(ValueError, match=r"must be one of off, kernels, full, got 'on'"):
        plugin.register()
    monkeypatch.setenv(plugin.ENV, "kernels")
    monkeypatch.setenv("CHUNKATTN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"`CHUNKATTN_BACKEND` must be one of .* got 'cuda'"):
        plugin.register()
    monkeypatch.setattr(plugin, "active", "full")
    with pytest.raises(RuntimeError, match="must stay 'full' in this process, got 'kernels'"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.0"])
def test_unknown_versions_are_refused(version, monkeypatch):
    monkeypatch.setenv(plugin.ENV, "full")
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: version)
    with pytest.raises(NotImplementedError, match=rf"must be 0\.30\.0 .* got {version}"):
        plugin.register()
    assert plugin.active == "off"


def test_a_missing_vllm_omni_is_named(monkeypatch):
    def missing(name: str) -> str:
        raise plugin.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv(plugin.ENV, "kernels")
    monkeypatch.setattr(plugin.importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="needs vllm-omni 0.30.0"):
        plugin.register()


@needs_vllm_omni
def test_changed_signatures_are_refused(monkeypatch):
    from vllm_omni.experimental.ar_diffusion import runner
    from vllm_omni.experimental.ar_diffusion.kv_cache import manager, state

    from chunkattn.integrations import omni_op

    def changed(self: Any, kv_branch: str, seq_len: int = 0, commit_current: bool = False) -> None:
        pass

    def write_attend(query: torch.Tensor) -> torch.Tensor:
        return query

    before = [vars(module).copy() for module in (runner, manager, state)]
    for where, name, value, message in (
        (state.ARDiffusionKVState, "get_kv_caches", changed, "get_kv_caches must take"),
        (manager.ARDiffusionKVCache, "defragment", changed, "ARDiffusionKVCache.defragment is new"),
        (omni_op, "write_attend", write_attend, "the op must be"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(plugin.ENV, "full")
            patch.setattr(where, name, value, raising=False)
            patch.setattr(omni_op, "MUTATED", ()) if where is omni_op else None
            serve = mock.Mock()
            patch.setattr(plugin, "serve_op", serve)
            with pytest.raises(NotImplementedError, match=message):
                plugin.register()
            serve.assert_not_called()
        assert plugin.active == "off"
    assert [vars(module) for module in (runner, manager, state)] == before


@needs_vllm_omni
def test_one_line_says_what_is_active():
    with mock.patch.object(plugin.logger, "info") as info, plugged("full", "auto"):
        plugin.register()  # again: vLLM may load a plug-in more than once
    (call,) = info.call_args_list
    message = call.args[0] % call.args[1:]
    backend = "triton" if torch.cuda.is_available() else "torch"
    for part in ("vllm-omni 0.30.0", f"{plugin.ENV}=full", f"backend {backend} (auto)"):
        assert part in message
    assert torch.__version__ in message


@needs_vllm_omni
def test_modules_imported_after_the_plugin_find_ours(monkeypatch):
    runner = "vllm_omni.experimental.ar_diffusion.runner"
    # An import sets it in its package as well: the module of the other tests comes back.
    monkeypatch.setattr(runner, importlib.import_module(runner))
    with mock.patch.dict(sys.modules), plugged("full"):
        sys.modules.pop(runner, None)
        later = importlib.import_module(runner)
        assert issubclass(later.ARDiffusionKVCache, ARDiffusionKVCache)
        assert later.ARDiffusionKVState.__module__ == "chunkattn.integrations.omni_state"


@needs_vllm_omni
def test_slots_that_are_neighbours_are_not_copied():
    from chunkattn.integrations.omni_op import _joined

    slots = torch.arange(10, dtype=torch.int32)
    joined = _joined(slots[2:5], slots[5:9])
    assert joined.data_ptr() == slots[2:].data_ptr()
    assert joined.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert _joined(slots[2:4], slots[5:7]).tolist() == [2, 3, 5, 6]
    assert _joined(slots[:2], slots.long()[2:4]).tolist() == [0, 1, 2, 3]


@needs_vllm_omni
def test_faults_side_by_side(capsys):
    from chunkattn.integrations import faults

    with plugged("kernels"), torch.no_grad():
        theirs, ours = faults.managers()
        assert [faults.judge(fault, theirs).accepted for fault in faults.FAULTS] == [True] * 7
        verdicts = [faults.judge(fault, ours) for fault in faults.FAULTS]
        assert [verdict.accepted for verdict in verdicts] == [False] * 7
        assert sum(verdict.says.startswith("refuses: ") for verdict in verdicts) == 6
        assert faults.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("vllm-omni accepts: ") == 7
    assert printed.count("chunkattn ") == 7
    with plugged("full"), pytest.raises(RuntimeError, match="must not be full here"):
        faults.managers()


@needs_vllm_omni
def test_the_op_refuses_a_query_of_another_dtype():
    pool, slots = torch.zeros(8, 1, 8), torch.arange(4, dtype=torch.int32)
    rows, ends = torch.ones(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    plan = (slots, slots[:0], torch.zeros(1, 2, dtype=torch.int32), ends, ends[1:], 4, 4, 1.0)
    with plugged("kernels"):
        op = torch.ops.vllm_omni.ar_diffusion_paged_write_attn
        for query in (rows.half(), rows.double()):
            with pytest.raises(TypeError, match="`query` must have the dtype of the pools"):
                op(
                    query,
                    rows,
                    rows,
                    None,
                    None,
                    pool,
                    pool.clone(),
                    4,
                    *plan,
                    None,
                    None,
                    False,
                    0,
                )
        assert not pool.any()
        out = op(rows, rows, rows, None, None, pool, pool.clone(), 4, *plan, None, None, False, 0)
    assert torch.allclose(out, rows)
    assert pool[:4].all()
