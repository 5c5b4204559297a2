"""`scatter_kv` byte by byte, and the slots that it is given."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkattn
from chunkattn.testing import LAYOUTS, check_scatter, make_pools, make_rows, snapshot
from tests.helpers.machine import TRITON_DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def random_rows(
    num_rows: int, heads: int, head_size: int, dtype: torch.dtype, device: str, **options: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V between NaN rows."""
    key, value = (
        make_rows(num_rows, heads, head_size, dtype=dtype, device=device, **options)
        for _ in range(2)
    )
    for rows in (key, value):
        rows.copy_(torch.randn(rows.shape))
    return key, value


def slots_between_others(slots: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Slots whose neighbours in memory are valid too: reading too far would write there."""
    return torch.tensor([0, 1, *slots, 2, 3], dtype=dtype, device=device)[2:-2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block_size", (1, 6, 12, 16, 880, 1560))
def test_block_sizes(target, dtype, block_size):
    """A12: rows land in their slots bit for bit, across the edges of blocks."""
    rows = min(2 * block_size + 1, 40)
    start = 3 * block_size - rows + 1
    key, value = random_rows(rows, 2, 16, dtype, target.device)
    pools = make_pools(4, block_size, 2, 16, dtype=dtype, device=target.device)
    slots = torch.arange(start, start + rows, device=target.device)
    check_scatter(key, value, pools, slots, target.backend)


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
def test_negative_slots_are_skipped(target, index_dtype):
    """A7: slots below 0 skip their row and nothing else; all of them may."""
    key, value = random_rows(4, 2, 4, torch.float32, target.device)
    pools = make_pools(3, 4, 2, 4, dtype=torch.float32, device=target.device)
    before = [snapshot(buffer) for buffer in pools[2]]
    none = slots_between_others([-1, -1, -7, -1], index_dtype, target.device)
    check_scatter(key, value, pools, none, target.backend)
    assert all(torch.equal(snapshot(b), old) for b, old in zip(pools[2], before, strict=True))
    some = slots_between_others([10, -1, 5, -1], index_dtype, target.device)
    check_scatter(key, value, pools, some, target.backend)
    assert torch.equal(pools[0].flatten(0, 1)[10], key[0])


def test_no_rows(target):
    """A8: no rows and no slots change nothing."""
    key, value = random_rows(0, 2, 4, torch.float32, target.device)
    pools = make_pools(3, 4, 2, 4, dtype=torch.float32, device=target.device)
    check_scatter(key, value, pools, slots_between_others([], torch.int64, target.device), "auto")


@pytest.mark.parametrize("rows_dtype", FLOATS)
@pytest.mark.parametrize("pool_dtype", FLOATS)
def test_rounding_is_torch_s(target, rows_dtype, pool_dtype):
    """E9: ties, subnormals, overflow, signed zeros and infinities, rounded as torch rounds."""
    key, value = random_rows(40, 2, 16, rows_dtype, target.device)
    special = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 7e4]
    special += [-0.0, 0.0, math.inf, -math.inf, 1e-8, -3e-8, 1e-40, 3.39e38, 2**-24]
    key[0, 0] = torch.tensor(special).to(rows_dtype)
    value[-1, 1] = -torch.tensor(special).to(rows_dtype)
    pools = make_pools(6, 8, 2, 16, dtype=pool_dtype, device=target.device)
    slots = torch.randperm(48)[:40].to(target.device)
    check_scatter(key, value, pools, slots, target.backend)


def test_nan_stays_nan(target):
    """E9: in each conversion, and as the same bits where nothing is converted."""
    for rows_dtype in FLOATS:
        for pool_dtype in FLOATS:
            key = torch.full((3, 1, 8), math.nan, dtype=rows_dtype, device=target.device)
            pools = make_pools(2, 4, 1, 8, dtype=pool_dtype, device=target.device, poison=0.0)
            slots = torch.tensor([1, 6, 3], device=target.device)
            chunkattn.scatter_kv(key, key, *pools[:2], slots, backend=target.backend)
            assert pools[0].flatten(0, 1)[slots].isnan().all()
            assert pools[1].isnan().sum() == 3 * 8


def test_payload_bits_survive(target):
    """A pure copy moves bits: signalling NaN, payloads and subnormals of every 16-bit pattern."""
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        key = patterns.reshape(64, 8, 128).to(target.device)
        pools = make_pools(5, 16, 8, 128, dtype=dtype, device=target.device)
        slots = torch.arange(8, 72, device=target.device)
        check_scatter(key, key.flip(0), pools, slots, target.backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", (False, True))
def test_strided_rows_and_pools(target, layout, padded):
    """A4 among others: K and V in one buffer, gaps between heads, an odd stride of one head."""
    heads = 1 if layout == "odd" else 3
    key, value = random_rows(9, heads, 12, torch.float16, target.device, padded=padded)
    pools = make_pools(4, 4, heads, 12, dtype=torch.float16, device=target.device, layout=layout)
    slots = slots_between_others([15, 3, 0, -1, 8, 7, 4, 1, 9], torch.int32, target.device)
    check_scatter(key, value, pools, slots, target.backend)


def test_rows_of_many_views(target):
    """Rows that lie backwards in their heads, broadcast over tokens, and K and V in one tensor."""
    rows = torch.randn(2, 3, 5, 8, device=target.device)  # K or V, head, token, element
    one = torch.randn(1, 3, 8, device=target.device)
    slots = torch.tensor([4, 2, 9, 0, 7], device=target.device)
    for key, value in (
        (rows[0].transpose(0, 1), rows[1].transpose(0, 1)),
        (one.expand(5, 3, 8), rows[0].transpose(0, 1)),
    ):
        pools = make_pools(3, 4, 3, 8, dtype=torch.float32, device=target.device)
        check_scatter(key, value, pools, slots, target.backend)


@pytest.mark.parametrize("layout", ("separate", "padded", "slots"))
def test_flat_pool(target, layout):
    """``(num_slots, heads, head_size)`` is the same pool."""
    key, value = random_rows(5, 2, 8, torch.float32, target.device)
    pools = make_pools(3, 4, 2, 8, dtype=torch.float32, device=target.device, layout=layout)
    slots = torch.tensor([11, 0, -1, 6, 3], device=target.device)
    check_scatter(key, value, pools, slots, target.backend, flat=True)


@pytest.mark.parametrize("step", (2, 3))
def test_strided_slots(target, step):
    """Every second slot of a longer tensor: the others are not read."""
    wide = torch.arange(8 * step, device=target.device) % 8
    wide[::step] = torch.tensor([11, 3, -1, 14, 8, 9, 15, 10])
    key, value = random_rows(8, 2, 8, torch.float32, target.device)
    pools = make_pools(4, 4, 2, 8, dtype=torch.float32, device=target.device)
    check_scatter(key, value, pools, wide[::step], target.backend)


@pytest.mark.parametrize(("heads", "head_size"), [(1, 1), (3, 5), (40, 128), (17, 80)])
def test_row_sizes(target, heads, head_size):
    """Rows shorter and longer than one program's share, no power of two among them."""
    key, value = random_rows(7, heads, head_size, torch.bfloat16, target.device)
    pools = make_pools(3, 4, heads, head_size, dtype=torch.bfloat16, device=target.device)
    slots = torch.tensor([0, 11, 5, 6, -1, 2, 9], device=target.device)
    check_scatter(key, value, pools, slots, target.backend)


def test_writing_twice_is_writing_once(target):
    """H4: the same write again leaves the same pool."""
    key, value = random_rows(5, 2, 8, torch.float32, target.device)
    pools = make_pools(3, 4, 2, 8, dtype=torch.float32, device=target.device)
    slots = torch.tensor([11, 0, -1, 6, 3], device=target.device)
    check_scatter(key, value, pools, slots, target.backend)
    first = [snapshot(buffer) for buffer in pools[2]]
    check_scatter(key, value, pools, slots, target.backend)
    assert all(torch.equal(snapshot(b), old) for b, old in zip(pools[2], first, strict=True))


def test_slots_cross_blocks():
    """A11: positions 6 to 9 of table [5, 2, 7] in blocks of 4, for three heads."""
    slots = chunkattn.compute_slot_mapping([5, 2, 7], torch.arange(6, 10), 4)
    assert slots.tolist() == [10, 11, 28, 29]
    key, value = random_rows(4, 3, 8, torch.float32, "cpu")
    check_scatter(key, value, make_pools(8, 4, 3, 8, dtype=torch.float32), slots, "torch")


@pytest.mark.parametrize(
    ("table", "positions", "block_size", "name"),
    [
        ([3, 3], [0, 4], 4, "positions"),  # A10: both are slot 12
        ([5, 2], [1, 1], 4, "positions"),  # A10
        ([5, 2], [8], 4, "positions"),
        ([5, 2], [-1], 4, "positions"),
        ([5, -1], [4], 4, "block_ids"),  # A9
        ([], [0], 4, "positions"),
        ([5, 2], [0], 0, "block_size"),
    ],
)
def test_mapping_is_refused(table, positions, block_size, name):
    """A9, A10: where the mapping is built, duplicates and foreign blocks are refused."""
    with pytest.raises(ValueError, match=rf"`{name}` must .*, got "):
        chunkattn.compute_slot_mapping(table, positions, block_size)


@pytest.mark.parametrize("slots", ([3, 3, 1], [0, 1, 12], [60, 61, 62]))
def test_slots_are_refused(target, monkeypatch, slots):
    """A6, A10: slots named twice, or made for a larger block than the pool has; nothing changes."""
    monkeypatch.setenv("CHUNKATTN_DEBUG", "1")  # a GPU's values are not looked at otherwise
    backend, device = target
    key, value = random_rows(3, 2, 8, torch.float32, device)
    key_pool, value_pool, buffers = make_pools(3, 4, 2, 8, dtype=torch.float32, device=device)
    before = [snapshot(buffer) for buffer in buffers]
    slots = torch.tensor(slots, device=device)
    with pytest.raises(ValueError, match=r"`slot_mapping` must .*, got "):
        chunkattn.scatter_kv(key, value, key_pool, value_pool, slots, backend=backend)
    assert all(torch.equal(snapshot(b), old) for b, old in zip(buffers, before, strict=True))


@st.composite
def writes(draw):
    blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    slots = draw(st.permutations(range(blocks * block_size)))
    rows = draw(st.integers(0, len(slots)))
    skipped = draw(st.sets(st.integers(0, max(0, rows - 1))))
    heads = draw(st.integers(1, 3))
    return {
        "pool": (blocks, block_size, heads, draw(st.integers(1, 20))),
        "slots": [-1 if i in skipped else slot for i, slot in enumerate(slots[:rows])],
        "dtypes": (draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))),
        "layout": draw(st.sampled_from(LAYOUTS if heads == 1 else LAYOUTS[:-1])),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "padded": draw(st.booleans()),
    }


def check_write(write: dict, backend: str, device: str) -> None:
    rows_dtype, pool_dtype = write["dtypes"]
    heads, head_size = write["pool"][2:]
    padded = write["padded"]
    key, value = random_rows(
        len(write["slots"]), heads, head_size, rows_dtype, device, padded=padded
    )
    pools = make_pools(*write["pool"], dtype=pool_dtype, device=device, layout=write["layout"])
    slots = torch.tensor(write["slots"], dtype=write["index_dtype"], device=device)
    check_scatter(key, value, pools, slots, backend)


@given(writes())
@settings(max_examples=100)
def test_any_write_torch(write):
    check_write(write, "torch", "cpu")


@needs_triton
@given(writes())
@settings(max_examples=50)
def test_any_write_triton(write):
    check_write(write, "triton", TRITON_DEVICE)


@given(
    table=st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=6),
    block_size=st.integers(1, 9),
    data=st.data(),
)
def test_any_mapping(table, block_size, data):
    """`compute_slot_mapping` is the definition, position by position."""
    capacity = len(table) * block_size
    positions = data.draw(st.lists(st.integers(0, capacity - 1), unique=True))
    slots = chunkattn.compute_slot_mapping(table, positions, block_size)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        table[p // block_size] * block_size + p % block_size for p in positions
    ]
