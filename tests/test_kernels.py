"""The attention kernels called by name: descriptors, small blocks, rows packed into tiles, bits."""

import dataclasses
import functools
import inspect

import pytest
import torch

from chunkattn import ops
from chunkattn.testing import AttentionCase, check_attention, make_case, run_attention
from tests.helpers.machine import TRITON_DEVICE as DEVICE
from tests.helpers.machine import needs_triton

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_triton,
]

LOW = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, dict]]:
    """What the triton backend launches from now on: kernel and arguments by name."""
    from chunkattn.kernels import gather, walk

    seen: list[tuple[str, dict]] = []

    class Recorded:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            def launch(*args, **options):
                names = inspect.signature(self.kernel.fn).parameters
                seen.append((self.name, dict(zip(names, args, strict=False)) | options))
                return self.kernel[grid](*args, **options)

            return launch

    for name, module in (("walk", walk), ("gather", gather)):
        kernel = f"_{name}_kernel"
        monkeypatch.setattr(module, kernel, Recorded(name, getattr(module, kernel)))
    return seen


@pytest.fixture(params=["walk", "descriptors", "gather"])
def kernel(request, monkeypatch) -> str:
    """One kernel for blocks of every size."""
    from chunkattn.kernels import gather, walk

    launch = {
        "walk": functools.partial(walk.walk, descriptors=False),
        "descriptors": functools.partial(walk.walk, descriptors=True),
        "gather": gather.gather,
    }[request.param]
    monkeypatch.setattr(ops, "_attention_kernel", lambda block_size: launch)
    return request.param


def use_descriptors(monkeypatch) -> None:
    """What the launcher chooses on sm_90, tiles included."""
    from chunkattn.kernels import walk

    monkeypatch.setattr(walk, "arch_of", lambda device: 90)


# -- descriptors ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("head_size", (16, 32, 64, 128))
@pytest.mark.parametrize("layout", ("separate", "interleaved", "slots"))
@pytest.mark.parametrize("block_size", (64, 70, 144))
def test_descriptors(monkeypatch, launches, dtype, head_size, layout, block_size):
    """Whole tiles, tails and both; blocks and slots with strides, K and V in one buffer."""
    use_descriptors(monkeypatch)
    case = make_case(
        seq_lens=[2 * block_size + 1, 0, block_size],
        query_lens=[9, 2, 5],
        current_lens=[3, 4, 0],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        head_size=head_size,
        layout=layout,
        dtype=dtype,
        device=DEVICE,
    )
    check_attention(case, "triton")
    assert [(name, options["key_desc"] is None) for name, options in launches] == [("walk", False)]


def test_descriptors_give_the_bits_of_pointers(monkeypatch, launches):
    use_descriptors(monkeypatch)
    from chunkattn.kernels import walk

    case = make_case(
        seq_lens=[300], query_lens=[20], block_size=144, dtype=torch.float16, device=DEVICE
    )
    results = [run_attention(case, "triton")]
    monkeypatch.setattr(walk, "descriptors_fit", lambda *pools: False)
    results.append(run_attention(case, "triton"))
    assert [options["key_desc"] is None for _, options in launches] == [False, True]
    assert all(map(torch.equal, *results))


def test_descriptors_fit():
    """What a descriptor cannot describe is refused, of K as of V."""
    from chunkattn.kernels.launch import descriptors_fit

    def pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    good = pool(3, 5, 2, 32)
    storage = pool(3, 5, 3, 40)
    flat = pool(4000)
    fits = {
        "plain": good,
        "blocks in turns": pool(3, 2, 5, 2, 32)[:, 1],
        "slots in turns": pool(3, 5, 2, 2, 32)[:, :, 1],
        "one head of many": pool(3, 5, 2, 32)[:, :, 1:],
        "every second block": pool(6, 5, 2, 32)[::2],
        "later blocks": pool(6, 5, 2, 32)[2:],
        "fp8": pool(3, 5, 2, 32).to(torch.float8_e4m3fn),
        "one head, its stride odd": flat.as_strided((3, 5, 1, 32), (160, 32, 7, 1)),
    }
    refused = {
        "fp32": pool(3, 5, 2, 32, dtype=torch.float32),
        "fp8 of 8 columns": pool(3, 5, 2, 8).to(torch.float8_e4m3fn),
        "head size 24": pool(3, 5, 2, 24),
        "head size 8": pool(3, 5, 2, 8),
        "head size 256": pool(3, 5, 2, 256),
        "gaps between heads": storage[:, :, :2, :32],
        "heads before rows": pool(3, 2, 5, 32).transpose(1, 2),
        "odd stride of slots": flat.as_strided((3, 5, 2, 32), (5 * 65, 65, 32, 1)),
        "stride of slots 4 elements over": flat.as_strided((3, 5, 2, 32), (5 * 68, 68, 32, 1)),
        "blocks half a slot off": flat.as_strided((3, 5, 2, 32), (5 * 64 + 32, 64, 32, 1)),
        "base 2 bytes off": flat[1:].as_strided((3, 5, 2, 32), (320, 64, 32, 1), 1),
        "blocks expanded": pool(1, 5, 2, 32).expand(3, -1, -1, -1),
        "slots expanded": pool(3, 1, 2, 32).expand(-1, 5, -1, -1),
        "heads expanded": pool(3, 5, 1, 32).expand(-1, -1, 2, -1),
        "no block": pool(0, 5, 2, 32),
    }
    for name, other in fits.items():
        assert descriptors_fit(other, other), name
    for name, other in refused.items():
        assert not descriptors_fit(other, good), name
        assert not descriptors_fit(good, other), name


@pytest.mark.parametrize("arch", (0, 80, 89, 90, 100, 120))
def test_descriptors_from_sm_90_on(monkeypatch, launches, arch):
    from chunkattn.kernels import walk

    monkeypatch.setattr(walk, "arch_of", lambda device: arch)
    for layout in ("separate", "padded"):
        case = make_case(
            seq_lens=[70],
            query_lens=[3],
            block_size=64,
            num_kv_heads=2,
            layout=layout,
            dtype=torch.float16,
            device=DEVICE,
        )
        check_attention(case, "triton")
    assert [options["key_desc"] is None for _, options in launches] == [arch < 90, True]


# -- gather ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("block_size", range(1, 64))
def test_gather_block_sizes(launches, block_size):
    """Every size under 64, in turn in every dtype and layout."""
    dtype = (torch.float32, torch.float16, torch.bfloat16)[block_size % 3]
    layout = ("separate", "interleaved", "slots", "padded")[block_size % 4]
    case = make_case(
        seq_lens=[2 * block_size + 1, 0, 3 * block_size, 66],
        query_lens=[5, 1, 2, 9],
        current_lens=[2, 3, 0, 1],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        head_size=16 if block_size % 2 else 24,
        layout=layout,
        dtype=dtype,
        device=DEVICE,
    )
    check_attention(case, "triton")
    assert [name for name, _ in launches] == ["gather"]


@pytest.mark.parametrize("block_size", (63, 64, 65))
def test_gather_is_for_small_blocks(launches, block_size):
    case = make_case(
        seq_lens=[2 * block_size + 1], query_lens=[3], block_size=block_size, device=DEVICE
    )
    check_attention(case, "triton")
    assert [name for name, _ in launches] == ["gather" if block_size < 64 else "walk"]


@pytest.mark.parametrize("layout", ("separate", "interleaved", "padded"))
@pytest.mark.parametrize("block_size", (1, 12, 16))
def test_gather_wide_offsets_give_the_same_bits(monkeypatch, launches, block_size, layout):
    """64-bit offsets, forced where 32 bits suffice."""
    from chunkattn.kernels import gather

    case = make_case(
        seq_lens=[50, 7],
        query_lens=[5, 3],
        block_size=block_size,
        layout=layout,
        dtype=torch.float16,
        device=DEVICE,
    )
    check_attention(case, "triton")
    results = [run_attention(case, "triton")]
    monkeypatch.setattr(gather, "_last_offset", lambda pool: 2**31)
    results.append(run_attention(case, "triton"))
    assert [options["WIDE"] for _, options in launches] == [False, False, True]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("over", "wide"), [(0, False), (1, True)])
def test_gather_offsets_at_the_edge_of_32_bits(launches, over, wide):
    """The last element of V at offset 2**31 - 1 and one further; nearly all is never touched."""
    size, heads, head_size = 4, 1, 16
    row = heads * head_size
    block = torch.randn(2, size, heads, head_size).to(DEVICE, torch.float16)
    storage = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE)
    # Two blocks: the first at the start, the second with its last element where it is to be.
    stride = 2**31 - 1 + over - (size * row - 1)
    value_pool = storage.as_strided((2, size, heads, head_size), (stride, row, head_size, 1))
    key_pool = torch.randn(2, size, heads, head_size).to(DEVICE, torch.float16)
    value_pool.copy_(block)
    case = AttentionCase(
        query=torch.randn(3, 2, head_size).to(DEVICE, torch.float16),
        key_pool=key_pool,
        value_pool=value_pool,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([7], dtype=torch.int32, device=DEVICE),
    )
    check_attention(case, "triton")
    assert [(name, options["WIDE"]) for name, options in launches] == [("gather", wide)]


# -- every kernel ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(5, 1), (6, 2), (16, 1), (3, 3)])
def test_ragged_grouped_rows_cross_tiles(kernel, num_heads, num_kv_heads):
    """Rows of a token's heads lie in two tiles, and tiles end within sequences of any length."""
    case = make_case(
        seq_lens=[81, 0, 17, 160, 1],
        query_lens=[27, 3, 0, 41, 1],
        current_lens=[3, 0, 4, 0, 2],
        block_size=80,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=torch.float16,
        device=DEVICE,
    )
    out = check_attention(case, "triton")
    # A sequence's result is the same bits alone as beside others, whatever tile its rows are in.
    for seq in (0, 3):
        rows = case.query_rows(seq)
        alone = dataclasses.replace(
            case,
            query=case.query[rows],
            query_start_loc=None,
            key_current=None,
            value_current=None,
            current_start_loc=None,
            block_table=case.block_table[seq : seq + 1],
            seq_lens=case.seq_lens[seq : seq + 1],
        )
        if seq == 3:
            assert torch.equal(run_attention(alone, "triton")[0], out[rows])
        else:
            check_attention(alone, "triton")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("block_size", (16, 80, 144))
def test_same_bytes_at_other_block_ids(kernel, dtype, block_size):
    """A permuted table gives the bits of the contiguous one, and of any other."""
    case = make_case(
        seq_lens=[4 * block_size + 3],
        query_lens=[9],
        current_lens=[5],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        device=DEVICE,
    )
    expected = run_attention(case, "triton")
    for order in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3, 0, 5, 1, 4]):
        table = torch.tensor([order], dtype=torch.int32, device=DEVICE)
        key_pool, value_pool = (torch.full_like(p, torch.nan) for p in (case.key_pool,) * 2)
        for source, target in ((case.key_pool, key_pool), (case.value_pool, value_pool)):
            target[table[0].long()] = source[case.block_table[0, :5].long()]
        moved = dataclasses.replace(
            case, key_pool=key_pool, value_pool=value_pool, block_table=table, buffers=()
        )
        assert all(map(torch.equal, expected, run_attention(moved, "triton")))
