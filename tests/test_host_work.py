"""What a layer asks of the host: its launches and room for its result. Nothing waits for the GPU.

Kernels are replaced by a note that they were launched, and the GPU by its two numbers, so the host
does here what it does in front of an H100.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkattn import ARDiffusionKVCache, ARDiffusionKVConfig, Session, ops
from tests.helpers.machine import needs_interpreter

pytestmark = needs_interpreter
KERNELS = {
    "walk": "_walk_kernel",
    "merge": "_merge_kernel",
    "gather": "_gather_kernel",
    "scatter": "_scatter_kernel",
    "scales": "_block_scales_kernel",
}
CHUNK, HEADS, HEAD_SIZE, ACTION, LAYERS = 64, 2, 64, 5, 2


class Kernel:
    """Notes its launches in place of a kernel."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self._launched.append(self._name)


class HostWork(TorchDispatchMode):
    """Names every operation of torch that is not a view, also within ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is ops.write_attend:
            with self:
                return ops._write_attend(*args)
        if not function.is_view:
            self.names.append(str(function.overloadpacket))
        return function(*args, **kwargs or {})


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    names: list[str] = []
    for module, kernel in KERNELS.items():
        monkeypatch.setattr(ops.import_kernel(module), kernel, Kernel(module, names))
    for module in map(ops.import_kernel, ("walk", "gather")):
        monkeypatch.setattr(module, "arch_of", lambda device: 90)
    monkeypatch.setattr(ops.import_kernel("walk"), "multiprocessors", lambda device: 132)
    return names


def open_session(block_size: int, **more: Any) -> Session:
    cache = ARDiffusionKVCache(
        ARDiffusionKVConfig(enable=True, chunk_size=CHUNK, window_chunks=3),
        **{
            "num_layers": LAYERS,
            "num_kv_heads": HEADS,
            "head_size": HEAD_SIZE,
            "dtype": torch.bfloat16,
            "block_size": block_size,
            "max_model_len": 4096,
            "available_bytes": 1 << 26,
            "device": torch.device("cpu"),
            "num_frame_per_block": 1,
            "max_scratch_tokens_per_branch": ACTION,
            "backend": "triton",
        }
        | more,
    )
    return cache.open_session("a")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HEADS, HEAD_SIZE, dtype=torch.bfloat16)


def layer_work(session: Session, commit: bool, given: bool) -> list[str]:
    """What the layers of a forward do on the host."""
    action = 0 if commit else ACTION
    new = (rows(CHUNK + action), rows(CHUNK), rows(CHUNK))
    extra = (rows(action), rows(action)) if action else ()
    out = torch.empty_like(new[0]) if given else None
    forward = session.forward(seq_len=CHUNK, commit=commit, action_len=action)
    with forward as fwd, HostWork() as work:
        for layer in range(LAYERS):
            fwd.write_attend(layer, *new, *extra, out=out)
    return work.names


@pytest.mark.parametrize("block_size", (64, 16))
@pytest.mark.parametrize(
    "more",
    (
        {},
        {"scratch": False, "memory_budget_bytes": 1 << 26},
        {"dtype": torch.float8_e4m3fn},
    ),
    ids=("scratch", "no scratch", "fp8"),
)
def test_a_layer_launches_and_makes_its_result(launched, block_size, more):
    session = open_session(block_size, **more)
    attention = ["walk", "merge"] if block_size == 64 else ["gather"]
    for commit in (True, False, True, True, False):
        launched.clear()
        work = layer_work(session, commit, given=False)
        writes = ["scales"] * ("dtype" in more) + ["scatter"]
        writes = writes if commit or "scratch" not in more else []
        assert launched == LAYERS * [*writes, *attention]
        # The second one is room for the records of a split launch.
        assert work == LAYERS * ["aten.empty_like", *["aten.empty"] * (block_size == 64)]


@pytest.mark.parametrize("block_size", (64, 16))
def test_a_layer_makes_nothing_where_out_is_given(launched, monkeypatch, block_size):
    monkeypatch.setattr(ops.import_kernel("walk"), "multiprocessors", lambda device: 0)  # unsplit
    session = open_session(block_size)
    for commit in (True, False):
        assert layer_work(session, commit, given=True) == []
    assert launched


def test_a_wait_is_found(launched, monkeypatch):
    walk = ops.import_kernel("walk")
    monkeypatch.setattr(walk, "descriptors_fit", lambda key_pool, _: bool(key_pool[0, 0, 0, 0]))
    assert "aten.is_nonzero" in layer_work(open_session(64), commit=True, given=False)
