"""Where the tests run: on a GPU if there is one, else kernels run in Triton's interpreter."""

import os
from collections.abc import Iterator
from typing import NamedTuple

# Read when numpy is first imported. The interpreter's matrices are small, threads would only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.helpers.machine import TRITON_DEVICE, has, needs_triton

HAS_GPU = TRITON_DEVICE == "cuda"

if not HAS_GPU:
    # Read when triton is first imported, and whenever a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    if has("triton"):
        import triton.runtime.interpreter

        from chunkattn.interpreter import patch_bf16, patch_e4m3

        patch_bf16(triton.runtime.interpreter)
        patch_e4m3(triton.runtime.interpreter)

hypothesis.settings.register_profile(
    "chunkattn", deadline=None, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.load_profile("chunkattn")


class Target(NamedTuple):
    """A backend and the device that it runs on."""

    backend: str
    device: str


class WalkTarget(Target):
    """Triton, with the walk for blocks of every size."""


def _targets(*more: Target) -> list:
    targets = [Target("torch", "cpu"), Target("triton", TRITON_DEVICE)]
    if HAS_GPU:
        targets.append(Target("torch", "cuda"))
    return [
        pytest.param(
            t,
            id="-".join(t) + "-walk" * isinstance(t, WalkTarget),
            marks=needs_triton if t.backend == "triton" else (),
        )
        for t in (*targets, *more)
    ]


@pytest.fixture(params=_targets())
def target(request: pytest.FixtureRequest) -> Target:
    """Every backend, each on the device that it is meant for."""
    return request.param


@pytest.fixture(params=_targets(WalkTarget("triton", TRITON_DEVICE)))
def attention_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """`target`, and triton once more with the walk for blocks of every size."""
    if isinstance(request.param, WalkTarget):
        from chunkattn.kernels import tuning

        monkeypatch.setattr(tuning, "GATHER_BELOW", 0)
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False")
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(skip)
