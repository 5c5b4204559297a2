"""Sessions over fp8 pools: half the bytes; a scale for each table entry and head goes along."""

import pytest
import torch

from chunkattn.cross_attention import CrossAttentionSpec
from chunkattn.policy import Retrieval, SlidingWindow
from tests.helpers.machine import needs_interpreter
from tests.helpers.rollout import HEAD_SIZE, TG, make_cache, page_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
BACKENDS = ("torch", pytest.param("triton", marks=needs_interpreter))


def cache_of(dtype, chunk=4, block=4, **more):
    return make_cache(chunk, block, TG, dtype=dtype, **more)


def play(session, chunks, *, seed=0, span=1, action_len=2):
    """Denoise and commit random spans of values of many sizes; returns all outputs."""
    outs = []
    chunk = session.cache.spec.chunk_size
    for i in chunks:
        generator = torch.Generator().manual_seed(100 * seed + i)
        rows = [torch.randn(n, 1, HEAD_SIZE, generator=generator) for n in (span * chunk,) * 2]
        rows[1] *= 10.0**i
        action = [torch.randn(action_len, 1, HEAD_SIZE, generator=generator) for _ in range(2)]
        query = torch.randn(span * chunk + action_len, 2, HEAD_SIZE, generator=generator)
        for commit in (False, True):
            with session.forward(seq_len=span * chunk, commit=commit, action_len=action_len) as fwd:
                outs.append(fwd.write_attend(0, query, *rows, *action))
    return outs


@pytest.mark.parametrize("scratch", (True, False))
@pytest.mark.parametrize(("chunk", "block"), ((4, 4), (4, 8), (6, 4), (64, 64)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_within_the_rounding_of_fp8(backend, chunk, block, scratch):
    """V grows tenfold with each chunk: one scale for all of them would show."""
    more = {"backend": backend, "scratch": scratch, "max_scratch_tokens_per_branch": 2}
    exact = play(cache_of(torch.float32, chunk, block, **more).open_session("a"), range(4))
    rounded = play(cache_of(FP8, chunk, block, **more).open_session("a"), range(4))
    for expected, out in zip(exact, rounded, strict=True):
        assert out.dtype == torch.float32
        error = (out - expected).abs().max() / expected.abs().max()
        assert error < 0.08
    assert max((a - b).abs().max() for a, b in zip(exact, rounded, strict=True)) > 0


def test_pools_are_half_as_large():
    cache = cache_of(FP8, usable=10)
    half = cache_of(torch.bfloat16, usable=10)
    assert cache.key_cache(0).dtype == FP8
    per_block = 4 * HEAD_SIZE
    assert cache.key_cache(0)[0].nbytes == per_block == half.key_cache(0)[0].nbytes // 2
    # The same bytes hold as many blocks as the scales allow: K and V of a head, 4 bytes each.
    bytes_there = 11 * page_bytes(4)
    assert cache.num_blocks == bytes_there // (2 * per_block + 2 * 4)
    for scale in cache.table_scales[0]:
        assert scale.shape == (cache.num_blocks_total, 1)
        assert scale[0].eq(1).all()  # all others are poisoned, as the blocks are


@pytest.mark.parametrize(("chunk", "block"), ((4, 4), (4, 8), (6, 4)))
def test_scales_go_where_their_blocks_go(chunk, block):
    """Fork, swap and rollback: bit for bit what a rollout that did none of it gives."""
    fresh = play(cache_of(FP8, chunk, block).open_session("a"), range(5))
    cache = cache_of(FP8, chunk, block, session_capacity=3)
    a = cache.open_session("a")
    outs = play(a, range(3))
    b = a.fork("b")
    play(b, range(2), seed=7)  # copies what it writes to
    a.swap_out()
    play(cache.open_session("c"), range(3), seed=9)  # in the blocks that a had
    b.close()
    a.swap_in()
    outs += play(a, range(3, 4))
    play(a, range(1), seed=5)
    a.rollback(1)
    outs += play(a, range(4, 5))
    for expected, out in zip(fresh, outs, strict=True):
        assert torch.equal(out, expected)


def test_scales_come_back_with_retrieved_chunks():
    policy = Retrieval(SlidingWindow(2), 1)
    outs = []
    for leave in (False, True):
        cache = cache_of(FP8, policy_object=policy if leave else SlidingWindow(9), usable=60)
        session = cache.open_session("a")
        play(session, range(4))
        if leave:
            session.retrieve([0])
        outs.append([scale.clone() for scale in cache.table_scales[0]])
        if leave:
            with session.forward(seq_len=4) as fwd:
                block = fwd.history_block_ids[-1]
            for found, kept in zip(outs[1], outs[0], strict=True):
                assert found[block] == kept[1]  # the first block that a rollout gets


def test_what_fp8_does_not_do_is_refused_by_name():
    cache = cache_of(FP8, cross_attention={"text": CrossAttentionSpec(3, 1)})
    session = cache.open_session("a")
    rows = torch.zeros(4, 1, HEAD_SIZE)
    with session.forward(seq_len=4) as fwd:
        with pytest.raises(TypeError, match="`query` must have one of the dtypes float32"):
            fwd.write_attend(0, rows.to(FP8), rows, rows)
        with pytest.raises(TypeError, match="`out` must have one of the dtypes float32"):
            fwd.write_attend(0, rows, rows, rows, out=rows.bfloat16())
    request = cache.begin_request("low")
    cache.allocate_chunk(request)
    with pytest.raises(NotImplementedError, match="`dtype` must be .* for write_chunk_kv, got"):
        cache.write_chunk_kv(0, rows[None], rows[None], request)
    with pytest.raises(NotImplementedError, match="`dtype` must be .* got torch.float8_e5m2"):
        cache_of(torch.float8_e5m2)
    text = [torch.ones(3, 1, HEAD_SIZE)]
    session.fill_cross_attention("text", text, text)
    assert session.cross_attention("text", 0)[0].dtype == torch.bfloat16
