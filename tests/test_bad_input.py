"""What does not fit is refused by name, with what it must be and what it is; nothing is written."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import chunkattn
from chunkattn import checks
from chunkattn.testing import make_pools, snapshot
from tests.helpers.machine import needs_interpreter, needs_triton

ROOT = Path(__file__).resolve().parent.parent
BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 3, 4, 2, 4, 8
BACKENDS = [
    "torch",
    pytest.param(
        "triton",
        marks=needs_interpreter,
    ),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on a device that no other argument is on."""
    return tensor.to("meta")


def last_stride_2(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def scatter_arguments() -> dict:
    key_pool, value_pool, _ = make_pools(BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.float32)
    key, value = torch.randn(2, 5, KV_HEADS, SIZE)
    slots = torch.tensor([0, 3, 11, -1, 6])
    return {
        "key": key,
        "value": value,
        "key_pool": key_pool,
        "value_pool": value_pool,
        "slot_mapping": slots,
    }


def attention_arguments() -> dict:
    key_pool, value_pool, _ = make_pools(
        BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.float32, poison=0.5
    )
    return {
        "query": torch.randn(5, HEADS, SIZE),
        "key_pool": key_pool,
        "value_pool": value_pool,
        "block_table": torch.tensor([[1, 2], [0, 7]], dtype=torch.int32),
        "seq_lens": ints(6, 4),
        "query_start_loc": ints(0, 2, 5),
        "key_current": torch.randn(3, KV_HEADS, SIZE),
        "value_current": torch.randn(3, KV_HEADS, SIZE),
        "current_start_loc": ints(0, 3, 3),
        "out": torch.full((5, HEADS, SIZE), math.nan),
        "return_lse": True,
    }


FUNCTIONS = {
    "scatter": (chunkattn.scatter_kv, scatter_arguments),
    "attention": (chunkattn.paged_window_attention, attention_arguments),
}


def check_refused(function: str, backend: str, name: str, change, error=ValueError) -> None:
    """Call with one argument changed; every tensor keeps its bytes."""
    call, make_arguments = FUNCTIONS[function]
    arguments = make_arguments()
    old = arguments.get(name)
    arguments[name] = change(old) if callable(change) else change
    tensors = [
        tensor
        for tensor in arguments.values()
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
    ]
    before = [snapshot(tensor) for tensor in tensors]
    arguments.setdefault("backend", backend)
    with pytest.raises(error, match=rf"^`{name}` must .+, got ") as caught:
        call(**arguments)
    assert type(caught.value) is error
    for tensor, bytes_before in zip(tensors, before, strict=True):
        assert torch.equal(snapshot(tensor), bytes_before)


TENSORS = {
    "scatter": ["key", "value", "key_pool", "value_pool", "slot_mapping"],
    "attention": [
        "query",
        "key_pool",
        "value_pool",
        "block_table",
        "seq_lens",
        "query_start_loc",
        "key_current",
        "value_current",
        "current_start_loc",
        "out",
    ],
}
INDICES = {"slot_mapping", "block_table", "seq_lens", "query_start_loc", "current_start_loc"}
EVERY_TENSOR = [(function, name) for function, names in TENSORS.items() for name in names]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_fit(function, backend):
    """What the other tests change one by one is right to begin with."""
    call, make_arguments = FUNCTIONS[function]
    call(**make_arguments(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "name"), EVERY_TENSOR)
def test_wrong_kind(function, name, backend):
    """Not a tensor, or of a type that the argument never has."""
    is_index = name in INDICES
    for wrong in ([1, 2], 3, "key"):
        check_refused(function, backend, name, wrong, TypeError)
    dtypes = [torch.float32, torch.bool] if is_index else [torch.float64, torch.int32]
    for dtype in dtypes:
        check_refused(function, backend, name, lambda old, d=dtype: old.to(d), TypeError)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("scatter", ["value"]),
        ("scatter", ["value_pool"]),
        ("attention", ["query"]),
        ("attention", ["value_pool"]),
        ("attention", ["key_current", "value_current"]),
        ("attention", ["value_current"]),
        ("attention", ["out"]),
    ],
)
def test_dtypes_that_do_not_go_together(function, names, backend):
    """Only scatter converts, from the rows' dtype to the pools' (E9)."""
    call, make_arguments = FUNCTIONS[function]
    arguments = make_arguments()
    for name in names:
        arguments[name] = arguments[name].to(torch.float16)
    with pytest.raises(TypeError, match=rf"^`{names[0]}` must .+, got torch.float16"):
        call(**arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "name"), EVERY_TENSOR)
def test_wrong_rank(function, name, backend):
    check_refused(function, backend, name, lambda old: old[None, None])
    check_refused(function, backend, name, lambda old: old[(0,) * (old.dim() - 1)].sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "name"), EVERY_TENSOR)
def test_wrong_device(function, name, backend):
    if name == "key_pool":
        name, message = "query" if function == "attention" else "key", "key_pool"
        call, make_arguments = FUNCTIONS[function]
        arguments = make_arguments()
        arguments[message] = elsewhere(arguments[message])
        with pytest.raises(ValueError, match=rf"^`{name}` must be on meta, .+, got cpu"):
            call(**arguments, backend=backend)
    else:
        check_refused(function, backend, name, elsewhere)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "name"),
    [pair for pair in EVERY_TENSOR if pair[1] not in INDICES],
)
def test_last_stride_is_one(function, name, backend):
    check_refused(function, backend, name, last_stride_2)


WRONG_VALUES = [
    # A8: one slot a row
    ("scatter", "slot_mapping", lambda old: old[:-1]),
    ("scatter", "slot_mapping", lambda old: torch.cat([old, old])),
    # A6, A9, A10: slots of another pool, named twice
    ("scatter", "slot_mapping", torch.tensor([0, 1, 2, 3, BLOCKS * BLOCK_SIZE])),
    ("scatter", "slot_mapping", torch.tensor([0, 1, 2, 3, 1])),
    ("scatter", "key", torch.zeros(5, KV_HEADS + 1, SIZE)),
    ("scatter", "key", torch.zeros(5, KV_HEADS, SIZE + 1)),
    ("scatter", "value", torch.zeros(5, KV_HEADS, SIZE - 1)),
    ("scatter", "value", torch.zeros(4, KV_HEADS, SIZE)),
    ("scatter", "value_pool", torch.zeros(BLOCKS + 1, BLOCK_SIZE, KV_HEADS, SIZE)),
    ("scatter", "value_pool", torch.zeros(BLOCKS * BLOCK_SIZE, KV_HEADS, SIZE)),
    # head counts
    ("attention", "query", torch.zeros(5, 3, SIZE)),
    ("attention", "query", torch.zeros(5, 0, SIZE)),
    ("attention", "query", torch.zeros(5, 1, SIZE)),
    ("attention", "query", torch.zeros(5, HEADS, SIZE + 1)),
    ("attention", "value_pool", torch.zeros(BLOCKS, BLOCK_SIZE + 1, KV_HEADS, SIZE)),
    ("attention", "key_current", torch.zeros(3, KV_HEADS + 1, SIZE)),
    ("attention", "value_current", torch.zeros(2, KV_HEADS, SIZE)),
    # A9: blocks that the pool does not have
    ("attention", "block_table", torch.tensor([[1, 99], [0, 0]], dtype=torch.int32)),
    ("attention", "block_table", torch.tensor([[1, -1], [0, 0]], dtype=torch.int32)),
    ("attention", "block_table", torch.tensor([[1, 2], [BLOCKS, 0]])),
    ("attention", "block_table", ints(1, 2).unsqueeze(0)),
    # lengths; D2: more rows than the table holds
    ("attention", "seq_lens", ints(6, -1)),
    ("attention", "seq_lens", ints(2 * BLOCK_SIZE + 1, 4)),
    ("attention", "seq_lens", ints()),
    ("attention", "block_table", lambda old: old[:1]),
    ("attention", "query_start_loc", ints(0, 2)),
    ("attention", "query_start_loc", ints(0, 2, 4)),
    ("attention", "query_start_loc", ints(1, 2, 5)),
    ("attention", "query_start_loc", ints(0, 6, 5)),
    ("attention", "query_start_loc", ints(0, -1, 5)),
    ("attention", "query_start_loc", None),
    ("attention", "current_start_loc", ints(0, 3)),
    ("attention", "current_start_loc", ints(0, 4, 3)),
    ("attention", "current_start_loc", ints(0, 1, 4)),
    ("attention", "current_start_loc", None),
    ("attention", "key_current", None),
    ("attention", "value_current", None),
    ("attention", "out", torch.zeros(4, HEADS, SIZE)),
    ("attention", "out", torch.zeros(5, SIZE, HEADS)),
    # memory that several elements share cannot be written
    ("attention", "out", torch.zeros(1, HEADS, SIZE).expand(5, -1, -1)),
    ("scatter", "key_pool", lambda old: old[:, :, :1].expand(-1, -1, KV_HEADS, -1)),
    ("scatter", "value_pool", lambda old: old[:1].expand(BLOCKS, -1, -1, -1)),
    ("attention", "softmax_scale", -1.0),
    ("attention", "softmax_scale", math.nan),
    ("attention", "softmax_scale", math.inf),
    # E4: scales belong to fp8 pools
    ("scatter", "key_scale", 0.5),
    ("scatter", "value_scale", torch.ones(1)),
    ("attention", "key_scale", torch.ones(1)),
    ("attention", "value_scale", 2.0),
    ("scatter", "backend", "cuda"),
    ("scatter", "backend", ""),
    ("attention", "backend", "Triton"),
    ("attention", "backend", None),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "name", "change"),
    WRONG_VALUES,
    ids=[f"{function}-{name}" for function, name, _ in WRONG_VALUES],
)
def test_wrong_values(function, name, change, backend):
    check_refused(function, backend, name, change)


@pytest.mark.parametrize("scale", ("0.5", [0.5], torch.tensor(0.5)))
def test_softmax_scale_is_a_number(scale):
    check_refused("attention", "torch", "softmax_scale", scale, TypeError)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fp8_pool(function):
    """e4m3 is the fp8 format of pools; the other one is refused by name."""
    call, make_arguments = FUNCTIONS[function]
    arguments = make_arguments()
    for name in ("key_pool", "value_pool"):
        arguments[name] = arguments[name].to(torch.float8_e5m2)
    with pytest.raises(NotImplementedError, match=r"^`key_pool` must be .+, got torch.float8"):
        call(**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dim", (1, 2, 3))
def test_pool_with_an_empty_dimension(function, dim):
    call, make_arguments = FUNCTIONS[function]
    arguments = make_arguments()
    shape = [BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE]
    shape[dim] = 0
    arguments["key_pool"] = arguments["value_pool"] = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^`key_pool` must .+, got shape"):
        call(**arguments)


@pytest.mark.parametrize("start_loc", (ints(0, 3, 3), [0, 3, 3]), ids=("tensor", "list"))
def test_current_start_loc_alone(start_loc):
    arguments = attention_arguments() | {"current_start_loc": start_loc}
    arguments["key_current"] = arguments["value_current"] = None
    with pytest.raises(ValueError, match=r"^`current_start_loc` must be None .+, got "):
        chunkattn.paged_window_attention(**arguments)


def test_values_of_other_devices_are_not_looked_at(monkeypatch):
    """On a GPU a look costs a sync, so only `CHUNKATTN_DEBUG=1` takes it."""
    monkeypatch.delenv("CHUNKATTN_DEBUG", raising=False)
    assert checks.values_visible(torch.device("cpu"))
    assert not checks.values_visible(torch.device("cuda"))
    monkeypatch.setenv("CHUNKATTN_DEBUG", "1")
    assert checks.values_visible(torch.device("cuda"))


@pytest.mark.gpu
def test_values_on_a_gpu_in_debug_mode(monkeypatch):
    monkeypatch.setenv("CHUNKATTN_DEBUG", "1")
    arguments = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in attention_arguments().items()
    }
    arguments["block_table"][0, 1] = 99
    with pytest.raises(ValueError, match=r"^`block_table` must .+, got "):
        chunkattn.paged_window_attention(**arguments)


@given(
    seq_lens=st.lists(st.integers(-2, 12), min_size=2, max_size=2),
    table=st.lists(st.integers(-2, 5), min_size=4, max_size=4),
)
def test_any_table(seq_lens, table):
    """A9, D2: refused exactly when a block that is needed is not there."""
    arguments = attention_arguments()
    arguments["seq_lens"] = ints(*seq_lens)
    arguments["block_table"] = ints(*table).reshape(2, 2)
    fits = all(
        0 <= seq_len <= 2 * BLOCK_SIZE
        and all(0 <= block < BLOCKS for block in row[: -(-seq_len // BLOCK_SIZE)])
        for seq_len, row in zip(seq_lens, (table[:2], table[2:]), strict=True)
    )
    if fits:
        out, _ = chunkattn.paged_window_attention(**arguments)
        assert out.isfinite().all()
        return
    with pytest.raises(ValueError, match=r"^`(seq_lens|block_table)` must .+, got "):
        chunkattn.paged_window_attention(**arguments)
    assert arguments["out"].isnan().all()


CALLS = """
import sys
import torch

{prelude}
import chunkattn
from chunkattn.errors import MissingDependencyError

pools = torch.zeros(2, 3, 4, 1, 8)
rows = torch.zeros(4, 1, 8)
table, seq_lens = torch.ones(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
for call, arguments in (
    (chunkattn.scatter_kv, (rows + 1, rows + 1, *pools, torch.arange(4))),
    (chunkattn.paged_window_attention, (rows, *pools, table, seq_lens)),
):
    try:
        call(*arguments, backend="triton")
    except Exception as error:
        print(type(error).__name__, "|", error)
    assert not pools.any()
    call(*arguments)  # the default runs all the same
    pools.zero_()
"""
BLOCKER = """
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def messages(prelude: str) -> list[str]:
    """What both functions say to ``backend="triton"`` in a process that interprets nothing."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS.format(prelude=prelude)],
        env=env | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    return lines


def test_triton_is_not_installed():
    """J1: asked for by name, it is missed by name, with what to install; no fallback."""
    for line in messages(BLOCKER):
        assert line.startswith("MissingDependencyError | ")
        assert "pip install triton" in line


@needs_triton
def test_triton_cannot_run_on_a_cpu():
    """Compiled kernels are refused for tensors in host memory, before anything is written."""
    for line in messages(""):
        assert line.startswith("ValueError | `backend` must be 'torch' for tensors on the CPU")
        assert line.endswith("got 'triton'")
