"""Queries of their own for segments of the keys, for keys whose position is relative to the window.

The pool holds keys without a temporal rotation; a query is rotated once for each segment. Judged by
rotating every key in float64.
"""

import dataclasses
import functools

import pytest
import torch

import chunkattn
from chunkattn import ops
from chunkattn.testing import check_attention, make_case, run_attention
from tests.helpers.machine import needs_triton

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]

ALL_THE_REST = [[1, 2**31 - 1], [2**30, 3], [0, 2**31 - 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", (6, 80))
@pytest.mark.parametrize(
    "segments", ([[1, 2], [0, 1], [9, 0]], [[2], [0], [1]], [[], [], []], ALL_THE_REST)
)
def test_segments(attention_target, dtype, block_size, segments):
    """One to three queries; segments that are empty, or longer than what is seen."""
    target = attention_target
    case = make_case(
        seq_lens=[4 * block_size + 5, block_size, 2 * block_size + 1],
        query_lens=[9, 2, 5],
        current_lens=[3, 0, 2],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        device=target.device,
        segment_blocks=segments,
    )
    check_attention(case, target.backend)


@pytest.mark.parametrize("layout", ("padded", "slots"))
def test_segments_with_scales_and_biases(attention_target, layout):
    target = attention_target
    case = make_case(
        seq_lens=[4 * 64 + 5],
        query_lens=[9],
        current_lens=[3],
        block_size=64,
        dtype=torch.float16,
        device=target.device,
        layout=layout,
        segment_blocks=[[1, 2]],
        fp8=True,
        biased=True,
    )
    check_attention(case, target.backend)


@needs_triton
@pytest.mark.parametrize("num_programs", (2, 5))
def test_segments_of_a_split_launch(monkeypatch, num_programs):
    """Shares that begin and end within segments."""
    from chunkattn.kernels import walk

    launch = functools.partial(walk.walk, num_programs=num_programs)
    monkeypatch.setattr(ops, "_attention_kernel", lambda block_size: launch)
    case = make_case(
        seq_lens=[4 * 72 + 5, 72],
        query_lens=[9, 2],
        current_lens=[3, 1],
        block_size=72,
        num_heads=4,
        num_kv_heads=2,
        segment_blocks=[[1, 2], [0, 0]],
        fp8=True,
        biased=True,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    check_attention(case, "triton")


def test_same_query_for_every_segment(attention_target):
    """Then the segments do not matter: the same result as without them."""
    target = attention_target
    case = make_case(
        seq_lens=[3 * 64 + 5],
        query_lens=[9],
        current_lens=[3],
        block_size=64,
        device=target.device,
        segment_blocks=[[1, 1]],
    )
    query = case.query[1].clone()
    case = dataclasses.replace(case, query=query.expand(3, -1, -1, -1))
    plain = dataclasses.replace(case, query=query, segment_blocks=None)
    out, lse = run_attention(case, target.backend)
    plain_out, plain_lse = run_attention(plain, target.backend)
    torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-6)


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Temporal rotary embedding of rows ``(n, heads, d)`` at ``position``, in float64."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(
        2
    )


# Where frame f stands for the model while `current` is generated, of `window` frames in all with
# `sink` of them kept; both rules bound every position by the window, however long the rollout is.
def longlive_2(f: int, current: int, sink: int, window: int) -> int:
    """The window is counted from its first frame: the sink, the recent frames, the current one."""
    first_recent = max(sink, current + 1 - (window - sink))
    return f if f < sink else sink + f - first_recent


def infinity_rope(f: int, current: int, sink: int, window: int) -> int:
    """The current frame stands at the end of the trained range; earlier ones move back with it, the
    sink to its start."""
    shift = max(0, current - (window - 1))
    return f if f < sink else f - shift


@pytest.mark.parametrize("rule", (longlive_2, infinity_rope))
@pytest.mark.parametrize("current", (3, 7, 40))
def test_rotated_queries_are_rotated_keys(attention_target, rule, current):
    """The pool holds raw keys and never changes; every key rotated in float64 is the judge."""
    target, tokens, heads, size = attention_target, 64, 2, 16
    sink, window = 2, 6
    recent = range(max(sink, current + 1 - (window - sink)), current)
    frames = [*range(min(sink, current)), *recent]
    raw_key, value = torch.randn(2, (len(frames) + 1) * tokens, heads, size)
    raw_query = torch.randn(tokens, heads, size)
    place = {f: rule(f, current, sink, window) for f in (*frames, current)}

    # A key rotated by its place and a query by its own: only the difference counts, and within a
    # segment every key lies as many frames from its own rotation by its frame number.
    position = torch.tensor([place[f] for f in (*frames, current)]).repeat_interleave(tokens)
    key = rotated(raw_key, position)
    query = rotated(raw_query, torch.full((tokens,), place[current]))
    scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())

    # Keys of a frame are cached with the rotation of the frame number that they were made at, as
    # models do that cache rotated keys; a segment's query is turned by what its frames have moved.
    def cached(f: int) -> torch.Tensor:
        at = slice((*frames, current).index(f) * tokens, None)
        return rotated(raw_key[at][:tokens], torch.full((tokens,), f)).float()

    key_pool, value_pool = torch.full((2, len(frames) + 2, tokens, heads, size), torch.nan)
    table = torch.randperm(len(frames) + 1)[: len(frames)]
    for i, f in enumerate(frames):
        key_pool[table[i]] = cached(f)
        value_pool[table[i]] = value[i * tokens : (i + 1) * tokens]
    moved = {f: f - place[f] for f in (*frames, current)}
    num_sink = sum(f < sink for f in frames)
    shifts = [moved[frames[0]], moved[frames[-1]], moved[current]]
    assert {moved[f] for f in frames[:num_sink]} <= {shifts[0]}
    assert {moved[f] for f in frames[num_sink:]} <= {shifts[1]}
    queries = torch.stack(
        [rotated(raw_query, torch.full((tokens,), place[current] + s)).float() for s in shifts]
    )
    before = key_pool.clone()
    out = chunkattn.paged_window_attention(
        queries.to(target.device),
        key_pool.to(target.device),
        value_pool.to(target.device),
        table[None].int().to(target.device),
        torch.tensor([len(frames) * tokens], device=target.device),
        segment_blocks=torch.tensor([[num_sink, len(frames) - num_sink]], device=target.device),
        key_current=cached(current).to(target.device),
        value_current=value[len(frames) * tokens :].to(target.device),
        backend=target.backend,
    )
    assert torch.equal(before.nan_to_num(7.0), key_pool.nan_to_num(7.0))
    assert (out.cpu().double() - expected).abs().max() < 5e-6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"segment_blocks": torch.zeros(1, 1, dtype=torch.int32)}, "`segment_blocks` must have sh"),
        ({"segment_blocks": torch.zeros(1, 2)}, "`segment_blocks` must have one of the dtypes"),
        ({"segment_blocks": torch.tensor([[1, -1]])}, "`segment_blocks` must not be negative"),
        ({"segment_blocks": None}, "`query` must be 3-D"),
        ({"query": torch.zeros(2, 1, 8)}, "`query` must be 4-D"),
        ({"query": torch.zeros(4, 2, 1, 8)}, "`query` must have one to three segments"),
        ({"query": torch.zeros(3, 2, 1, 9)}, "`query` must have shape"),
        ({"out": torch.zeros(3, 2, 1, 8)}, "`out` must be 3-D"),
    ],
)
def test_refused(changed, message):
    arguments = {
        "query": torch.zeros(3, 2, 1, 8),
        "key_pool": torch.zeros(2, 4, 1, 8),
        "value_pool": torch.zeros(2, 4, 1, 8),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([4]),
        "segment_blocks": torch.tensor([[1, 0]]),
    }
    chunkattn.paged_window_attention(**arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        chunkattn.paged_window_attention(**arguments | changed)
