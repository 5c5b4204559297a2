"""What a rollout sees and what it leaves behind, played through sessions. See `helpers.rollout`."""

import pytest
import torch

from chunkattn import ARDiffusionKVCache
from tests.helpers.rollout import (
    RELATIONS,
    TG,
    Rollout,
    Timeline,
    Window,
    make_cache,
    timeline_id,
    timelines,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TIMELINES = timelines()


def usable_blocks(chunk: int, block: int, chunks: int) -> int:
    return -(-chunks * chunk // block) + 4


def play(case: Timeline, chunk: int, block: int, denoise: int = 2, **more) -> None:
    """Every forward of a timeline: denoise twice, commit, and compare with the oracle."""
    chunks = case.window.sink + case.window.window + 2 * case.span
    usable = usable_blocks(chunk, block, chunks)
    cache = make_cache(chunk, block, case.window, span=case.span, usable=usable, **more)
    rollout = Rollout(cache.open_session("a"), case.window)
    for forward in case.forwards:
        assert rollout.committed == forward["first_chunk"]
        rollout.check_blocks(forward["history"])
        num, visible = forward["num_chunks"], forward["visible"]
        for step in range(denoise):
            rollout.forward(num, visible=visible, noise=step + 1)
            rollout.check_blocks(forward["history"])
        rollout.forward(num, visible=visible, commit=True)
        rollout.check_blocks(forward["resident_after_commit"])


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("case", TIMELINES, ids=timeline_id)
def test_timelines(case, chunk, block):
    """B1, B3: each forward sees exactly the oracle's chunks, and owns exactly their blocks."""
    play(case, chunk, block)


@pytest.mark.parametrize(("chunk", "block"), [(4, 4), (6, 4)])
@pytest.mark.parametrize("case", [TIMELINES[0], TIMELINES[5], TIMELINES[9]], ids=timeline_id)
def test_timelines_on_every_backend(target, case, chunk, block):
    """B1: the plan is the same tensors for whichever kernels read it."""
    play(case, chunk, block, 1, backend=target.backend, device=torch.device(target.device))


def test_exactly_one_chunk_leaves():
    """B2: nothing for span 3, chunk 1 for span 4."""
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    for _ in range(4):
        rollout.forward(commit=True)
    table = cache.block_table(rollout.adapter)
    assert len(table) == 4
    rollout.forward(commit=True)
    assert cache.block_table(rollout.adapter)[:3] == [table[0], *table[2:]]


def test_the_mean_of_what_is_visible():
    """B3: V is the chunk's index and Q is 0, span 6: the mean of {0, 4, 5, 6}."""
    rollout = Rollout(make_cache().open_session("a"))
    for _ in range(6):
        rollout.forward(commit=True)
    for _ in range(3):
        out = rollout.forward()
        torch.testing.assert_close(out[..., 0], torch.full((4, 1), 3.75))
    out = rollout.forward(commit=True)
    torch.testing.assert_close(out[..., 0], torch.full((4, 1), 3.75))


def test_a_rollout_may_last_for_ever(monkeypatch):
    """B10: 2,000 spans. The work of a span is counted in table entries, not timed."""
    policy, span = Window(4, 1), 2
    cache = make_cache(policy=policy, span=span, device=None)
    session = cache.open_session("a")
    most = policy.sink + policy.window + span
    entries: list[int] = []
    read = ARDiffusionKVCache.block_table

    def block_table(self, adapter):
        table = read(self, adapter)
        entries.append(len(table))
        return table

    monkeypatch.setattr(ARDiffusionKVCache, "block_table", block_table)
    free, work = set(), set()
    for number in range(2000):
        entries.clear()
        for commit in (False, True):
            with session.forward(seq_len=4 * span, commit=commit) as fwd:
                assert len(read(cache, session.adapter())) <= most
                assert len(fwd.history_block_ids) <= policy.sink + policy.window - span
                if commit:
                    fwd.mark_layer_written(0)
        if number > most:
            free.add(cache.num_free_blocks)
            work.add((len(entries), sum(entries)))
    assert free == {40 - policy.sink - policy.window}
    assert len(work) == 1
    adapter = session.adapter()
    assert adapter.completed_chunks == 4000
    assert adapter.absolute_num_computed_tokens == 16000
    assert adapter.num_computed_tokens == 4 * (policy.sink + policy.window)
    assert len(cache._window_manager.req_to_blocks[adapter.request_id]) == 5
    cache.check_integrity()


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_the_sink_after_a_reset(chunk, block):
    """B14: 6 commits, reset, 6 commits: the sink is the new first chunk."""
    cache = make_cache(chunk, block)
    session = cache.open_session("a")
    for tag in (0.0, 0.5):
        rollout = Rollout(session, tag=tag)
        for _ in range(6):
            rollout.forward(commit=True)
            rollout.check_blocks()
        assert rollout.adapter.completed_chunks == 6
        session.reset()
        assert cache.num_free_blocks == 40


def test_a_block_of_two_chunks():
    """B16: block 16, chunk 24: a block with the end of one chunk and the start of the next."""
    policy = Window(1, 0)
    cache = make_cache(24, 16, policy)
    rollout = Rollout(cache.open_session("a"), policy)
    rollout.forward(commit=True)
    first = cache.block_table(rollout.adapter)
    assert len(first) == 2  # tokens 0-15, and 16-23 with room for 8 more
    rollout.forward(commit=True)
    second = cache.block_table(rollout.adapter)
    assert second[0] == first[1]  # chunk 0 is dead, the start of chunk 1 is not
    assert len(second) == 2
    rollout.forward(commit=True)
    third = cache.block_table(rollout.adapter)
    assert first[1] not in third
    rollout.check_blocks()


@pytest.mark.parametrize(("chunk", "block"), [(24, 16), (1560, 16), (1560, 880), (880, 1560)])
@pytest.mark.parametrize("policy", [Window(2, 1), Window(3, 0)], ids=["S1W2", "S0W3"])
def test_visible_to_the_token(chunk, block, policy):
    """B16, A12: window edges inside blocks, at sizes that models have."""
    cache = make_cache(chunk, block, policy, usable=usable_blocks(chunk, block, 8))
    rollout = Rollout(cache.open_session("a"), policy)
    for _ in range(7):
        rollout.forward(noise=1, action_len=3)
        rollout.forward(commit=True, action_len=3)
        rollout.check_blocks()


def test_dreamzero():
    """The first frame, then spans of two; the first of these has 3 * 880 + 25 keys."""
    policy = Window(9, 0)
    cache = make_cache(
        880, 880, policy, span=2, usable=22, local_branches=2, max_scratch_tokens_per_branch=25
    )
    session = cache.open_session("a")
    branches = [Rollout(session, policy, branch=b, tag=b / 8) for b in (0, 1)]
    for num_chunks in (1, 2, 2, 2, 2, 2):
        for rollout in branches:
            for action_len, commit in ((25, False), (25, False), (0, True)):
                rollout.forward(num_chunks, action_len=action_len, commit=commit)
            rollout.check_blocks()
            if rollout.committed == 1:
                with rollout.open(2, action_len=25) as fwd:
                    assert fwd.kv_len == int(fwd.seq_lens) == 2665
                    assert fwd.slot_mapping.shape == (1785,)


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_action_rows_are_seen_and_forgotten(chunk, block):
    """C9: rows that follow the span: visible to the forward, never history; behind them is NaN."""
    cache = make_cache(chunk, block, max_scratch_tokens_per_branch=7)
    rollout = Rollout(cache.open_session("a"))
    for action_len in (7, 1, 0, 3, 7):
        rollout.forward(action_len=action_len, noise=2)
        rollout.forward(action_len=action_len, commit=True)
        rollout.check_blocks()


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_a_denoise_span_longer_than_declared_borrows_blocks(chunk, block, monkeypatch):
    """It fits no scratch, so it takes managed blocks for the time of the forward."""
    monkeypatch.setenv("AR_DIFFUSION_KV_SCRATCH_BLOCKS_PER_BRANCH", "1")
    policy = Window(5, 1)
    cache = make_cache(chunk, block, policy, usable=usable_blocks(chunk, block, 12))
    rollout = Rollout(cache.open_session("a"), policy)
    for num_chunks in (1, 5, 3, 5, 2):
        free, table = cache.num_free_blocks, cache.block_table(rollout.adapter)
        long = num_chunks * chunk > cache.scratch_blocks_per_branch * block
        for noise in (1, 2):
            rollout.forward(num_chunks, noise=noise)
            with rollout.open(num_chunks) as fwd:
                rollout.write(fwd)
                scratch = cache.scratch_block_ids(False, 0, cache.scratch_blocks_per_branch)
                assert set(fwd.span_block_ids).isdisjoint(scratch) is long
            assert cache.num_free_blocks == free
            assert cache.block_table(rollout.adapter) == table
            rollout.check_blocks()
        rollout.forward(num_chunks, commit=True)
        rollout.check_blocks()


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_nobody_reads_what_a_closed_session_left(chunk, block):
    """C4: session a commits NaN and closes; b gets its blocks and its scratch."""
    cache = make_cache(chunk, block, usable=usable_blocks(chunk, block, 6))
    used = set()
    a = cache.open_session("a")
    nan = torch.full((chunk, 1, 8), float("nan"))
    extra = nan[:1]
    for step in range(6):
        for commit in (False, True):
            with a.forward(seq_len=chunk, commit=commit, action_len=1) as fwd:
                fwd.write_attend(0, torch.cat([nan, extra]), nan, nan, extra, extra)
                used |= set(fwd.span_block_ids) | set(fwd.action_block_ids)
        assert a.adapter().completed_chunks == step + 1
    a.close()
    b = Rollout(cache.open_session("b"))
    mine = set()
    for _ in range(6):
        b.forward(noise=1, action_len=1)
        b.forward(commit=True)
        b.check_blocks()
        mine |= set(cache.block_table(b.adapter))
    assert mine & used


def _random_rollout(cache) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    session = cache.open_session("real")
    outs = []
    for _ in range(6):
        for commit in (False, False, True):
            q, k, v = torch.randn(3, 6, 1, 8, generator=generator)
            with session.forward(seq_len=4, commit=commit, action_len=2) as fwd:
                outs.append(fwd.write_attend(0, q, k[:4], v[:4], k[4:], v[4:]))
    session.close()
    return outs


@pytest.mark.parametrize("block", [4, 2, 16])
def test_a_warm_up_changes_nothing(block):
    """C10: the first session of a cache, one after a warm-up with other block ids, bit for bit."""
    fresh = _random_rollout(make_cache(4, block))
    cache = make_cache(4, block)
    warm = Rollout(cache.open_session("warm"))
    for _ in range(5):
        warm.forward(commit=True, action_len=3)
    before = cache.block_table(warm.adapter)
    warm.session.close()
    after = _random_rollout(cache)
    assert before
    assert all(torch.equal(a, b) for a, b in zip(fresh, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fresh, _random_rollout(cache), strict=True))


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_sessions_and_branches_are_disjoint(chunk, block):
    """I5: two sessions of two branches, interleaved; each sees its own tokens only."""
    cache = make_cache(chunk, block, local_branches=2, session_capacity=2, usable=99)
    sessions = [cache.open_session(name) for name in ("a", "b")]
    rollouts = [
        Rollout(session, TG, branch=branch, tag=(2 * s + branch) / 8)
        for s, session in enumerate(sessions)
        for branch in (0, 1)
    ]
    for step in range(7):
        for rollout in rollouts[step % 2 :] + rollouts[: step % 2]:
            rollout.forward(noise=1)
            rollout.forward(commit=True, action_len=1)
        tables = [cache.block_table(rollout.adapter) for rollout in rollouts]
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned))
        assert cache.null_block_id not in owned
        for rollout in rollouts:
            rollout.check_blocks()
    sessions[0].close()
    assert cache.num_free_blocks == 99 - sum(len(t) for t in tables[2:])
    for rollout in rollouts[2:]:
        rollout.forward(commit=True)
        rollout.check_blocks()


def test_open_forwards_of_two_sessions_share_no_slot():
    """I5: both forwards are open, and their layers take turns; scratch is one layer's at a time."""
    cache = make_cache(layers=3, session_capacity=2)
    a, b = (Rollout(cache.open_session(name), tag=tag) for name, tag in (("a", 0.0), ("b", 0.5)))
    for commit in (False, True, False, True):
        with a.open(commit=commit) as fwd_a, b.open(commit=commit) as fwd_b:
            for layer in range(3):
                out_a, out_b = a.write(fwd_a, layer), b.write(fwd_b, layer)
                torch.testing.assert_close(out_b - out_a, torch.full_like(out_a, 0.5))
        if commit:
            a.committed += 1
            b.committed += 1
            a.check_blocks()
            b.check_blocks()
