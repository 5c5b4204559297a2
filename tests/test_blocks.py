"""Whole-block operations byte by byte: what is written, what is not, what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chunkattn
from chunkattn.testing import LAYOUTS, make_pools, snapshot
from tests.helpers.machine import needs_triton

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.float8_e4m3fn)
SHAPES = [(1, 1, 1), (4, 2, 16), (5, 3, 7), (33, 1, 80), (2, 9, 128)]
"""Block size, heads, head size: smaller and larger than one program's tile, odd ones too."""


def filled_pools(num_blocks, shape, dtype, device, layout="separate", blocks=None):
    """Pools with random ``blocks`` (all of them by default); all other memory is NaN."""
    pools = make_pools(num_blocks, *shape, dtype=dtype, device=device, layout=layout)
    for pool in pools[:2]:
        for block in range(num_blocks) if blocks is None else blocks:
            pool[block] = torch.randn(pool.shape[1:]).to(device, dtype)
    return pools


def ids(*values, dtype=torch.int64, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def clones(pools):
    """The same views of copies of the buffers."""
    key_pool, value_pool, buffers = pools
    copies = [buffer.clone() for buffer in buffers]
    views = [
        copies[i % len(copies)].as_strided(pool.shape, pool.stride(), pool.storage_offset())
        for i, pool in enumerate((key_pool, value_pool))
    ]
    return *views, copies


def assert_same(pools, expected):
    """Every byte of the buffers, guard rows and gaps too."""
    for buffer, wanted in zip(pools[2], expected[2], strict=True):
        wrong = (snapshot(buffer) != snapshot(wanted)).sum()
        assert wrong == 0, f"{wrong} bytes are wrong"


def layouts_of(shape):
    return LAYOUTS if shape[1] == 1 else LAYOUTS[:-1]


# -- copy -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_copy(target, shape, dtype):
    """One source for two targets, ids in no order, both index dtypes, every layout."""
    for layout in layouts_of(shape):
        pools = filled_pools(7, shape, dtype, target.device, layout, blocks=(5, 0))
        expected = clones(pools)
        for pool in expected[:2]:
            for source, block in ((5, 1), (0, 6), (5, 3)):
                pool[block] = pool[source].clone()
        source = ids(5, 0, 5, dtype=torch.int32, device=target.device)
        chunkattn.copy_blocks(
            *pools[:2], source, ids(1, 6, 3, device=target.device), target.backend
        )
        assert_same(pools, expected)


def test_copy_keeps_every_bit(target):
    """Signalling NaN, payloads and subnormals of every 16-bit and every 8-bit pattern."""
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float8_e4m3fn, torch.uint8)):
        pools = make_pools(2, 512, 1, 128, dtype=dtype, device=target.device)
        pools[0][0] = torch.arange(512 * 128).to(bits).view(dtype).reshape(512, 1, 128)
        expected = clones(pools)
        expected[0][1] = expected[0][0]
        one, other = (ids(i, device=target.device) for i in (0, 1))
        chunkattn.copy_blocks(*pools[:2], one, other, backend=target.backend)
        assert_same(pools, expected)


def test_strided_ids(target):
    """Every second id of a longer tensor: the others are not looked at."""
    pools = filled_pools(6, (4, 2, 8), torch.float32, target.device)
    expected = clones(pools)
    for pool in expected[:2]:
        pool[[4, 2]] = pool[[0, 1]]
    source = ids(0, 99, 1, 99, device=target.device)[::2]
    target_ids = ids(4, 99, 2, 99, device=target.device)[::2]
    chunkattn.copy_blocks(*pools[:2], source, target_ids, target.backend)
    assert_same(pools, expected)


# -- swap -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swap(target, shape, dtype):
    """Out and in again, in runs and alone, between pools of other layouts and sizes."""
    host_device = {"pin_memory": True} if target.device == "cuda" else {}
    for layout in layouts_of(shape):
        pools = filled_pools(8, shape, dtype, target.device, layout)
        host = [torch.empty(10, *shape, dtype=dtype, **host_device) for _ in range(2)]
        for pool in host:
            pool.copy_(torch.full(pool.shape, math.nan))
        # Runs of both: (2, 3, 4) to (7, 8, 9); of the source only: (6, 7) to (1, 0).
        source, there = [2, 3, 4, 6, 7], [7, 8, 9, 1, 0]
        chunkattn.swap_blocks(*pools[:2], *host, source, ids(*there), target.backend)
        if target.device == "cuda":
            torch.cuda.synchronize()
        for pool, copy in zip(pools[:2], host, strict=True):
            expected = torch.full(copy.shape, math.nan).to(dtype)
            expected[there] = pool[source].cpu()
            assert torch.equal(snapshot(copy), snapshot(expected))
        expected = clones(pools)
        for pool, copy in zip(expected[:2], host, strict=True):
            pool[[5, 1]] = copy[[8, 1]].to(pool.device)
        chunkattn.swap_blocks(*host, *pools[:2], (8, 1), [5, 1], target.backend)
        assert_same(pools, expected)


def test_swap_merges_runs(monkeypatch):
    """One copy a run of consecutive blocks, in K and in V."""
    pools = [torch.randn(9, 2, 1, 4) for _ in range(4)]
    calls = []
    copy_ = torch.Tensor.copy_

    def counted(self, source, non_blocking=False):
        calls.append((self.shape[0], non_blocking))
        return copy_(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    chunkattn.swap_blocks(*pools, [0, 1, 2, 5, 6], [3, 4, 5, 6, 8])
    assert calls == [(3, True)] * 2 + [(1, True)] * 4


# -- blend ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight", (0.1, 0.5, 1 / 3))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blend(target, shape, dtype, weight):
    """Within the one rounding of the pool's dtype; the same bits on both backends."""
    for layout in layouts_of(shape):
        pools = filled_pools(6, shape, dtype, target.device, layout, blocks=(0, 2, 3, 5))
        expected = clones(pools)
        for pool in expected[:2]:
            old, new = pool[[2, 5]].float(), pool[[3, 3]].float()
            # float32 products and sum, each rounded, then the pool's rounding.
            pool[[2, 5]] = (old * (1 - weight) + new * weight).to(dtype)
        source, to = (ids(*i, device=target.device) for i in ((3, 3), (2, 5)))
        before = pools[0][[2, 5]].double(), pools[0][[3, 3]].double()
        chunkattn.blend_blocks(*pools[:2], source, to, weight, target.backend)
        assert_same(pools, expected)
        exact = before[0] * (1 - weight) + before[1] * weight
        scale = before[0].abs() + before[1].abs()
        bound = 0.5 * torch.finfo(dtype).eps * exact.abs() + 2**-22 * scale + 1e-7
        assert ((pools[0][[2, 5]].double() - exact).abs() <= bound).all()


def test_blend_at_the_ends(target):
    """Weight 0 changes no bit and weight 1 copies; NaN and infinities stay where they are."""
    for weight in (0, 1, 0.0, 1.0):
        pools = filled_pools(4, (4, 2, 8), torch.float16, target.device)
        pools[0][0, 0, 0, :2] = torch.tensor([math.nan, math.inf])
        pools[0][1, 1, 1, :3] = torch.tensor([math.nan, -math.inf, -0.0])
        expected = clones(pools)
        if weight:
            for pool in expected[:2]:
                pool[1] = pool[0]
        one, other = (ids(i, device=target.device) for i in (0, 1))
        chunkattn.blend_blocks(*pools[:2], one, other, weight, target.backend)
        assert_same(pools, expected)


# -- clear ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_clear(target, shape, dtype):
    values = (0.0, -0.0, 1, 0.3, -2.5, math.inf, math.nan)
    for i, layout in enumerate(layouts_of(shape)):
        for value in values if i == 0 else (values[i],):
            pools = filled_pools(5, shape, dtype, target.device, layout)
            expected = clones(pools)
            for pool in expected[:2]:
                for block in (4, 1):
                    pool[block] = torch.full(shape, float(value)).to(dtype)
            to = ids(4, 1, 4, dtype=torch.int32, device=target.device)
            chunkattn.clear_blocks(*pools[:2], to, value, target.backend)
            assert_same(pools, expected)


# -- all ------------------------------------------------------------------------------------------
CALLS = {
    "copy": lambda key, value, source, to, backend: chunkattn.copy_blocks(
        key, value, source, to, backend
    ),
    "blend": lambda key, value, source, to, backend: chunkattn.blend_blocks(
        key, value, source, to, 0.5, backend
    ),
    "clear": lambda key, value, source, to, backend: chunkattn.clear_blocks(
        key, value, to, 1.0, backend
    ),
    "swap": lambda key, value, source, to, backend: chunkattn.swap_blocks(
        *(torch.zeros(key.shape, dtype=key.dtype, pin_memory=key.is_cuda) for _ in range(2)),
        key,
        value,
        source.cpu(),
        to.cpu(),
        backend,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_ids(target, call):
    pools = filled_pools(3, (4, 2, 8), torch.float32, target.device)
    expected = clones(pools)
    none = ids(device=target.device)
    CALLS[call](*pools[:2], none, none, target.backend)
    assert_same(pools, expected)


@pytest.mark.parametrize("call", CALLS)
def test_no_blocks(target, call):
    empty = torch.empty(0, 4, 2, 8, device=target.device)
    none = ids(device=target.device)
    CALLS[call](empty, empty.clone(), none, none, target.backend)


@pytest.mark.parametrize("call", ("copy", "blend", "clear"))
def test_offsets_beyond_32_bits(target, call):
    """A1: the last block starts behind element 2**31; nearly all of the pool is never touched."""
    shape, stride = (2, 1, 16), 2**30 + 64
    storage = torch.empty(2 * stride + 64, dtype=torch.float16, device=target.device)
    key_pool = storage.as_strided((3, *shape), (stride, 16, 16, 1))
    value_pool = storage[32:].as_strided((3, *shape), (stride, 16, 16, 1), 32)
    for pool in (key_pool, value_pool):
        pool.copy_(torch.randn(pool.shape))
    expected = [pool.clone() for pool in (key_pool, value_pool)]
    for pool in expected:
        pool[2] = {"copy": pool[0], "blend": (pool[2].float() + pool[0].float()) / 2}.get(call, 1)
    one, other = (ids(i, device=target.device) for i in (0, 2))
    CALLS[call](key_pool, value_pool, one, other, target.backend)
    for pool, wanted in zip((key_pool, value_pool), expected, strict=True):
        assert torch.equal(pool, wanted)


REFUSED = {
    "repeated target": ("target_block_ids", ids(0, 1), ids(3, 3)),
    "target is a source": ("target_block_ids", ids(0, 1), ids(3, 0)),
    "target outside": ("target_block_ids", ids(0, 1), ids(3, 4)),
    "target below 0": ("target_block_ids", ids(0, 1), ids(3, -1)),
    "source outside": ("source_block_ids", ids(0, 4), ids(3, 2)),
    "source below 0": ("source_block_ids", ids(-1, 0), ids(3, 2)),
    "more sources": ("target_block_ids", ids(0, 1), ids(3)),
    "2-D ids": ("source_block_ids", ids(0, 1)[None], ids(3, 2)),
}


# A swap's ids name blocks of other pools; a clearing has no sources, and may repeat a block.
REFUSALS = [(call, case) for call in ("copy", "blend") for case in REFUSED]
REFUSALS += [("swap", case) for case in REFUSED if case != "target is a source"]
REFUSALS += [("clear", case) for case in ("target outside", "target below 0")]


@pytest.mark.parametrize(("call", "case"), REFUSALS)
def test_ids_are_refused(target, monkeypatch, call, case):
    """A9, A10: never clamped, never written twice; nothing changes."""
    name, source, to = REFUSED[case]
    monkeypatch.setenv("CHUNKATTN_DEBUG", "1")  # a GPU's values are not looked at otherwise
    pools = filled_pools(4, (2, 1, 4), torch.float32, target.device)
    expected = clones(pools)
    name = "block_ids" if call == "clear" else name
    with pytest.raises(ValueError, match=rf"^`{name}` must .*, got "):
        CALLS[call](*pools[:2], source.to(target.device), to.to(target.device), target.backend)
    assert_same(pools, expected)


def test_arguments_are_refused():
    pool, other = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
    one, two = ids(0), ids(1)
    fp8 = pool.to(torch.float8_e4m3fn)
    for error, name, call, arguments in (
        (TypeError, "key_pool", "copy_blocks", ([1], other, one, two)),
        (ValueError, "key_pool", "copy_blocks", (pool[0], other, one, two)),
        (ValueError, "key_pool", "copy_blocks", (pool[:1].expand(3, -1, -1, -1), other, one, two)),
        (TypeError, "key_pool", "copy_blocks", (pool.long(), other.long(), one, two)),
        (TypeError, "value_pool", "copy_blocks", (pool, other.half(), one, two)),
        (ValueError, "value_pool", "copy_blocks", (pool, other[:2], one, two)),
        (ValueError, "value_pool", "copy_blocks", (pool, other.to("meta"), one, two)),
        (TypeError, "source_block_ids", "copy_blocks", (pool, other, [0], two)),
        (TypeError, "source_block_ids", "copy_blocks", (pool, other, one.float(), two)),
        (ValueError, "source_block_ids", "copy_blocks", (pool, other, one.to("meta"), two)),
        (ValueError, "backend", "copy_blocks", (pool, other, one, two, "fa3")),
        (TypeError, "key_pool", "blend_blocks", (fp8, fp8.clone(), one, two, 0.5)),
        (ValueError, "weight", "blend_blocks", (pool, other, one, two, -0.1)),
        (ValueError, "weight", "blend_blocks", (pool, other, one, two, 1.1)),
        (ValueError, "weight", "blend_blocks", (pool, other, one, two, math.nan)),
        (TypeError, "weight", "blend_blocks", (pool, other, one, two, "1")),
        (TypeError, "value", "clear_blocks", (pool, other, one, None)),
        (ValueError, "target_key", "swap_blocks", (pool, other, pool, pool + 1, [0], [1])),
        (ValueError, "target_value", "swap_blocks", (pool, other, pool + 1, other[:], [0], [1])),
        (
            ValueError,
            "target_key",
            "swap_blocks",
            (pool, other, *[torch.zeros(3, 4, 1, 4) for _ in range(2)], [0], [1]),
        ),
        (TypeError, "target_key", "swap_blocks", (pool, other, fp8, fp8.clone(), [0], [1])),
        (
            TypeError,
            "source_block_ids",
            "swap_blocks",
            (pool, other, pool + 1, pool + 2, [0.0], [1]),
        ),
        (
            TypeError,
            "target_block_ids",
            "swap_blocks",
            (pool, other, pool + 1, pool + 2, [0], None),
        ),
        (
            ValueError,
            "source_block_ids",
            "swap_blocks",
            (pool, other, pool + 1, pool + 2, [3], [1]),
        ),
    ):
        with pytest.raises(error, match=rf"^`{name}` must .*, got "):
            getattr(chunkattn, call)(*arguments)
    assert (pool == 0).all()
    assert (other == 0).all()


@pytest.mark.gpu
def test_pageable_memory_is_refused():
    pools = [torch.zeros(2, 2, 1, 4, device="cuda") for _ in range(2)]
    host = [torch.zeros(2, 2, 1, 4) for _ in range(2)]
    with pytest.raises(ValueError, match=r"^`target_key` must lie in pinned memory"):
        chunkattn.swap_blocks(*pools, *host, [0], [1])


@pytest.mark.parametrize("name", ("copy", "swap", "blend", "clear"))
def test_registration(target, name):
    """The schema names what changes, and fake tensors pass."""
    key, value, _ = filled_pools(4, (3, 2, 8), torch.float16, target.device)
    one, two = ids(0, device=target.device), ids(2, device=target.device)
    arguments = {
        "copy": (key, value, one, two, target.backend),
        "swap": (key.clone(), value.clone(), key, value, one, two, target.backend),
        "blend": (key, value, one, two, 0.5, target.backend),
        "clear": (key, value, one, 1.0, target.backend),
    }[name]
    op = getattr(torch.ops.chunkattn, f"{name}_blocks").default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


# -- what the compiler makes of them --------------------------------------------------------------
COMPILE = """
import json
from chunkattn.aot_launch import Shape, launch

names = ("copy", "blend", "clear")
launches = {name: launch(name, "sm_90", Shape(880))[0] for name in names}
print(json.dumps({name: found.compiled.asm["ptx"] for name, found in launches.items()}))
"""


@needs_triton
def test_accesses_are_16_bytes_wide():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name, ptx in json.loads(done.stdout).items():
        assert "st.global.v4" in ptx, name
        assert name == "clear" or "ld.global.v4" in ptx, name
