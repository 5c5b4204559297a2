"""A cache without scratch: what a forward attends where the model left it, and what it writes."""

import pytest
import torch

from chunkattn import PoolExhaustedError
from chunkattn.ops import AttentionArguments, _attend
from chunkattn.policy import PerLayer, SlidingWindow
from chunkattn.testing import make_case, run_attention
from tests.helpers.machine import needs_interpreter
from tests.helpers.rollout import HEAD_SIZE, TG, Rollout, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("torch", pytest.param("triton", marks=needs_interpreter))


# -- the kernels ---------------------------------------------------------------------------------
@pytest.mark.parametrize("num_extra", (1, 16, 25))
@pytest.mark.parametrize(
    ("backend", "block_size", "num_programs"),
    [
        ("torch", 16, 0),
        *(
            pytest.param("triton", block_size, num_programs, marks=needs_interpreter)
            for block_size, num_programs in ((16, 0), (80, 0), (80, 1), (80, 7))
        ),
    ],
)
def test_extra_rows_are_current_rows(backend, block_size, num_programs, num_extra):
    """Two pairs of tensors give what one holding both gives; poison lies around and in the pool."""
    case = make_case(
        seq_lens=[2 * block_size + 7],
        query_lens=[20],
        current_lens=[33 + num_extra],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        device="cpu",
    )
    expected, expected_lse = run_attention(case, backend)
    out, lse = torch.full_like(expected, float("nan")), torch.full_like(expected_lse, float("nan"))
    inputs = AttentionArguments(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_table,
        case.seq_lens,
        case.query_start_loc,
        case.key_current[:33],
        case.value_current[:33],
        torch.tensor([0, 33], dtype=torch.int32),
        *[None] * 4,
        out,
        lse,
        case.key_pool.shape[3] ** -0.5,
        case.key_current[33:],
        case.value_current[33:],
    )
    if num_programs:
        from chunkattn.kernels import walk

        walk.walk(inputs, num_programs=num_programs)
    else:
        _attend(inputs, backend)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


# -- sessions ------------------------------------------------------------------------------------
GEOMETRIES = (  # chunk, block, span
    (4, 4, 1),
    (4, 8, 2),  # blocks larger than chunks
    (6, 4, 2),  # edges inside blocks
    (64, 64, 1),  # the walk
)


@pytest.mark.parametrize(("chunk", "block", "span"), GEOMETRIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout_sees_what_it_must(backend, chunk, block, span):
    """Denoise forwards write nothing, whatever lies in the pool."""
    cache = make_cache(chunk, block, TG, span=span, backend=backend, scratch=False)
    rollout = Rollout(cache.open_session("a"))
    for _ in range(3 if chunk == 64 else 7):
        before = state(cache)
        for noise in (1.0, 2.0):
            rollout.forward(span, noise=noise, action_len=3)
            rollout.forward(span, noise=noise)
        assert state(cache) == before
        rollout.forward(span, commit=True, action_len=3)
        rollout.check_blocks()


@pytest.mark.parametrize("action_len", (0, 1, 5))
@pytest.mark.parametrize(("chunk", "block", "span"), GEOMETRIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_output_as_with_scratch(backend, chunk, block, span, action_len):
    """Random rows, grouped queries, two layers that see different windows."""
    torch.manual_seed(0)
    policy = PerLayer((SlidingWindow(3, 1), SlidingWindow(2, 0)), (0, 1))
    sessions = [
        make_cache(
            chunk,
            block,
            TG,
            span=span,
            layers=2,
            backend=backend,
            scratch=scratch,
            max_scratch_tokens_per_branch=action_len,
            policy_object=policy,
        ).open_session("a")
        for scratch in (True, False)
    ]
    num = span * chunk
    for _ in range(2 if chunk == 64 else 5):
        for commit in (False, False, True):
            rows = [torch.randn(num, 1, HEAD_SIZE) for _ in range(2)]
            action = [torch.randn(action_len, 1, HEAD_SIZE) if action_len else None] * 2
            query = torch.randn(num + action_len, 2, HEAD_SIZE)
            outs = []
            for session in sessions:
                with session.forward(seq_len=num, commit=commit, action_len=action_len) as fwd:
                    outs.append([fwd.write_attend(i, query, *rows, *action) for i in range(2)])
                    outs[-1].append(torch.tensor([fwd.kv_len]))
            for with_scratch, without in zip(*outs, strict=True):
                torch.testing.assert_close(without, with_scratch, atol=3e-6, rtol=1e-5)


def test_what_is_planned():
    rollout = Rollout(make_cache(scratch=False).open_session("a"))
    cache = rollout.cache
    assert (cache.scratch_blocks_per_branch, cache.scratch_num_blocks) == (0, 0)
    assert cache.num_blocks_total == cache.managed_num_blocks == cache.key_cache(0).shape[0]
    assert cache.scratch_block_ids(False, 0, 0) == []
    with pytest.raises(PoolExhaustedError, match="a branch has 0"):
        cache.scratch_block_ids(False, 0, 1)
    for _ in range(5):
        rollout.forward(commit=True)
    free, table = cache.num_free_blocks, cache.block_table(rollout.adapter)
    with rollout.open(action_len=6) as fwd:
        assert fwd.history_block_ids == [table[0], table[2], table[3]]
        assert (fwd.span_block_ids, fwd.action_block_ids) == ([], [])
        assert (fwd.kv_len, fwd.seq_lens.tolist()) == (12 + 4 + 6, [12])
        assert fwd.slot_mapping.shape == (0,)
        assert cache.num_free_blocks == free
    address = fwd.block_table.data_ptr()
    with rollout.open(commit=True, action_len=6) as fwd:
        (block,) = fwd.span_block_ids
        assert fwd.action_block_ids == []
        assert (fwd.kv_len, fwd.seq_lens.tolist()) == (12 + 4 + 6, [16])
        assert fwd.slot_mapping.tolist() == [block * 4 + i for i in range(4)]
        assert fwd.block_table.data_ptr() == address
        rollout.write(fwd)


def test_rows_of_another_dtype_are_rounded_as_the_pool_rounds():
    """fp32 rows beside a bf16 pool: attended in bf16, written or not."""
    torch.manual_seed(0)
    key, value = (torch.randn(4, 1, HEAD_SIZE) for _ in range(2))
    query = torch.randn(4, 1, HEAD_SIZE).bfloat16()
    outs = []
    for scratch in (True, False):
        session = make_cache(scratch=scratch, dtype=torch.bfloat16).open_session("a")
        with session.forward(seq_len=4) as fwd:
            outs.append(fwd.write_attend(0, query, key, value))
    assert torch.equal(*outs)
