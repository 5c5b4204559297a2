"""The window's arithmetic, against recorded timelines and against plain sets."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import ARDiffusionKVConfig, chunk_window_skipped_tokens
from chunkattn.window import blocks_per_branch, ceil_div, visible_history
from tests.helpers.rollout import Timeline, Window, timeline_id, timelines


def history(policy: Window, first: int, num_chunks: int) -> list[int]:
    sink, recent = visible_history(
        first,
        num_chunks,
        window_chunks=policy.window,
        sink_chunks=policy.sink,
        reset_at_boundary=policy.reset,
    )
    return [*sink, *recent]


def skipped(tokens: int, policy: Window, chunk: int = 4) -> int:
    return chunk_window_skipped_tokens(
        tokens,
        chunk_size=chunk,
        sliding_window=policy.window * chunk,
        sink_chunks=policy.sink,
        reset_at_boundary=policy.reset,
    )


@pytest.mark.parametrize("case", timelines(), ids=timeline_id)
def test_timelines(case: Timeline):
    """B1: visible and resident sets of every recorded forward."""
    sink = case.window.sink
    for forward in case.forwards:
        first, num = forward["first_chunk"], forward["num_chunks"]
        visible = history(case.window, first, num) + list(range(first, first + num))
        assert visible == forward["visible"]
        assert len(visible) == forward["kv_chunks"]
        gone, odd = divmod(skipped((first + num) * 4, case.window), 4)
        assert odd == 0
        left = [c for c in range(first + num) if c < sink or c >= sink + gone]
        assert left == forward["resident_after_commit"]


def test_the_timelines_are_all_there():
    """B1: the file lost no case, and the plain-Python policy of these tests says the same."""
    cases = timelines()
    assert len(cases) == 11
    assert sum(len(case.forwards) for case in cases) == 79
    assert sum(case.window.reset for case in cases) == 1
    for case in cases:
        resident: list[int] = []
        for forward in case.forwards:
            first, num = forward["first_chunk"], forward["num_chunks"]
            assert forward["history"] == resident
            resident = forward["resident_after_commit"]
            assert case.window.visible(first, num) == forward["visible"]
            assert case.window.resident(first + num) == resident


policies = st.builds(Window, st.integers(1, 12), st.integers(0, 6), st.booleans())


@given(policies, st.integers(0, 40), st.integers(1, 12))
def test_visible_history_is_in_order_and_without_repeats(policy, first, num_chunks):
    num_chunks = min(num_chunks, policy.window)
    chunks = history(policy, first, num_chunks)
    assert chunks == sorted(set(chunks))
    assert [*chunks, *range(first, first + num_chunks)] == policy.visible(first, num_chunks)


@given(policies, st.integers(1, 9), st.integers(0, 300))
def test_skipped_tokens_are_whole_chunks_that_no_span_needs(policy, chunk, tokens):
    """What has left is never visible again, and all that is invisible has left."""
    gone = skipped(tokens, policy, chunk)
    assert gone % chunk == 0
    assert gone >= 0
    committed = tokens // chunk
    dead = set(range(committed)) - set(policy.resident(committed))
    assert set(range(policy.sink, policy.sink + gone // chunk)) == dead
    assert dead.isdisjoint(history(policy, committed, 1))


def test_skipped_tokens_by_hand():
    """Window 3, sink 1, chunk 4: the first chunk leaves once 17 tokens would not fit."""
    assert [skipped(t, Window(3, 1)) for t in (0, 16, 19, 20, 23, 24)] == [0, 0, 0, 4, 4, 8]
    assert [skipped(t, Window(3, 1, True)) for t in (3, 4, 7, 8, 11)] == [0, 0, 0, 4, 4]
    names = list(inspect.signature(chunk_window_skipped_tokens).parameters)
    rest = ["chunk_size", "sliding_window", "sink_chunks", "reset_at_boundary"]
    assert names == ["num_computed_tokens", *rest]


@settings(max_examples=200)
@given(
    policies,
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_blocks_per_branch_are_enough_and_not_more(policy, chunk, block, span):
    """G2: the most blocks that a rollout ever owns fit; whole blocks leave none over."""
    span = min(span, policy.window)
    most = 0
    for first in range(0, 40 * span, span):
        end = (first + span) * chunk
        tokens = [t for c in policy.resident(first) for t in range(c * chunk, (c + 1) * chunk)]
        most = max(most, len({t // block for t in [*tokens, *range(first * chunk, end)]}))
    bound = blocks_per_branch(
        block_size=block,
        chunk_size=chunk,
        window_chunks=policy.window,
        sink_chunks=policy.sink,
        span_chunks=span,
    )
    assert most <= bound
    if not policy.reset and chunk % block == 0:
        assert most == bound
    if not policy.reset:
        assert bound <= most + 3


def test_ceil_div():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_config():
    """The seed's settings and defaults."""
    config = ARDiffusionKVConfig()
    assert config == ARDiffusionKVConfig(False, 0, None, 0, False, 0.1)
    assert list(inspect.signature(ARDiffusionKVConfig).parameters) == [
        "enable",
        "chunk_size",
        "window_chunks",
        "sink_chunks",
        "reset_at_boundary",
        "gpu_memory_fraction",
    ]
    assert config.sliding_window is None
    assert ARDiffusionKVConfig(True, 880, 9).sliding_window == 7920
