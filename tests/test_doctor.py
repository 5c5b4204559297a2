"""`chunkattn doctor`: what it finds here, and what it says of a machine that lacks something."""

import importlib.metadata
import json

import pytest
import torch

from chunkattn import cli, doctor

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="says something else with a GPU")


def found() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.findings()}


@CPU_ONLY
def test_json_of_the_command(capsys):
    status = cli.main(["doctor", "--json"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["found"] == torch.__version__
    assert rows["GPU"]["found"] == "none"
    assert rows["backend='auto'"]["found"] == "torch"
    assert rows["backend='torch'"]["found"] == "yes"
    assert "without an NVIDIA GPU" in rows["backend='fa3'"]["found"]
    assert rows["CHUNKATTN_VLLM_OMNI"]["found"] == "off, vllm-omni is as it is"
    assert status == int(any(row["problem"] for row in rows.values()))


def test_text_of_the_command(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("vllm", "0.1", "too old")])
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.split() == ["vllm", "0.1", "<-", "too", "old"]
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("vllm", "0.30.0")])
    assert cli.main(["doctor"]) == 0


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.30.0", ""),
        ("0.28.1+cpu", ""),
        ("0.27.0", "tested are 0.28 to 0.33"),
        ("0.34.0", "tested are 0.28 to 0.33"),
        ("1.0.0", "tested are 0.28 to 0.33"),
        (None, "sessions need it: pip install 'chunkattn[vllm]'"),
    ],
)
def test_vllm_versions(monkeypatch, version, problem):
    monkeypatch.setattr(doctor, "_version", lambda *names: version)
    assert found()["vllm"].problem == problem


@CPU_ONLY
def test_kernels_that_cannot_be_imported(monkeypatch):
    def fail(name: str):
        raise ImportError("no such file")

    pytest.importorskip("triton")
    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    assert "no such file" in doctor._triton().problem


def test_versions_of_what_is_installed():
    assert doctor._version("no-such-package", "torch") == importlib.metadata.version("torch")
    assert doctor._version("no-such-package") is None


@pytest.mark.parametrize(
    ("mode", "installed", "found", "problem"),
    [
        ("off", False, "off, vllm-omni is as it is", ""),
        ("kernels", True, "kernels, active", ""),
        ("full", False, "full", "the entry point is not installed: install chunkattn again"),
        ("on", True, "on", "must be one of off, kernels, full"),
    ],
)
def test_the_plugin(monkeypatch, mode, installed, found, problem):
    monkeypatch.setenv("CHUNKATTN_VLLM_OMNI", mode)
    points = ["chunkattn"] if installed else []
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: points)
    assert doctor._plugin() == doctor.Finding("CHUNKATTN_VLLM_OMNI", found, problem)
