"""Reset, and the three ways to go on with another prompt: keep, recache, reset."""

import contextlib

import pytest

from chunkattn import LifecycleError, PoolExhaustedError
from tests.helpers.frames import assert_as_fresh, forward, play
from tests.helpers.rollout import RELATIONS, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_recache_is_a_fresh_rollout_of_the_replayed_frames(chunk, block):
    """F12: the same slots, in order; nothing of the old prompt is left."""
    cache, fresh = make_cache(chunk, block), make_cache(chunk, block)
    session = cache.open_session("a")
    play(session, range(3))
    table, free = cache.block_table(session.adapter()), cache.num_free_blocks
    assert session.switch_prompt("recache") == [0, 1, 2]
    play(session, [40, 41, 42])
    assert cache.block_table(session.adapter()) == table
    assert cache.num_free_blocks == free
    assert session.adapter().completed_chunks == 3
    assert_as_fresh(session, [40, 41, 42], fresh)


@pytest.mark.parametrize(("chunk", "block"), [(4, 4), (4, 16), (6, 4)])
def test_recache_replays_what_is_resident(chunk, block):
    """TG, 8 commits: chunks 0, 5, 6, 7; a replayed chunk sees those before it and no other."""
    cache = make_cache(chunk, block)
    session = cache.open_session("a")
    play(session, range(8))
    assert session.switch_prompt("recache") == [0, 5, 6, 7]
    for position, seen in ((0, 0), (5, 1), (6, 2), (7, 3)):
        with session.forward(seq_len=chunk, commit=True) as fwd:
            assert fwd.first_chunk == position
            assert fwd.kv_len == (seen + 1) * chunk
            fwd.mark_layer_written(0)
    with session.forward(seq_len=chunk) as fwd:
        assert fwd.first_chunk == 8
        assert fwd.kv_len == 4 * chunk


def test_recache_in_spans_and_on_every_branch():
    policy = Window(4, 1)
    cache, fresh = (
        make_cache(policy=policy, span=2, local_branches=2, usable=60) for _ in range(2)
    )
    session = cache.open_session("a")
    play(session, range(4), span=2, branches=2)
    assert session.switch_prompt("recache") == [0, 1, 2, 3]
    play(session, range(40, 44), span=2, branches=2)
    assert_as_fresh(session, range(40, 44), fresh, span=2, branches=2)


def test_a_failed_replay_is_tried_again():
    cache, fresh = make_cache(layers=2), make_cache(layers=2)
    session = cache.open_session("a")
    play(session, range(2))
    session.switch_prompt("recache")
    for frame in (40, 41):
        with contextlib.suppress(KeyError), session.forward(seq_len=4, commit=True) as fwd:
            fwd.mark_layer_written(0)
            raise KeyError
        with pytest.raises(LifecycleError, match=r"got none for layers \[0, 1\]"):
            session.forward(seq_len=4, commit=True).__enter__().__exit__(None, None, None)
        forward(session, [frame])
    assert_as_fresh(session, [40, 41], fresh)


def test_recache_copies_what_a_fork_shares():
    cache = make_cache(session_capacity=2)
    fresh = make_cache()
    a = cache.open_session("a")
    play(a, range(3))
    b = a.fork("b")
    hold = cache.begin_request("hold")
    cache.allocate_token_slots(hold, 35 * 4)
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match="2 free blocks are too few for the 3 of blocks"):
        b.switch_prompt("recache")
    assert state(cache) == before
    cache.end_request(hold)
    b.switch_prompt("recache")
    play(b, [40, 41, 42])
    assert_as_fresh(a, range(3), fresh)
    assert_as_fresh(b, [40, 41, 42], fresh)


def test_a_replay_must_end_before_anything_else():
    cache = make_cache(session_capacity=2)
    session = cache.open_session("a")
    play(session, range(6))
    session.switch_prompt("recache")
    before = state(cache)
    for call in (
        lambda: session.rollback(1),
        lambda: session.fork("b"),
        lambda: session.swap_out(),
        lambda: session.switch_prompt("keep"),
    ):
        with pytest.raises(LifecycleError, match="must wait for the replay on branch 0"):
            call()
    with pytest.raises(LifecycleError, match="`commit` must be True while session 'a' replays"):
        forward(session, [9], commit=False)
    with pytest.raises(LifecycleError, match="a replayed span must lie in resident chunks"):
        forward(session, [9, 9])  # chunk 0 is resident, chunk 1 is not
    assert state(cache) == before
    session.reset()
    assert_as_fresh(session, [], make_cache())


def test_keep_and_reset():
    cache = make_cache(session_capacity=2)
    session = cache.open_session("a")
    play(session, range(6))
    before = state(cache)
    assert session.switch_prompt("keep") == []
    assert state(cache) == before
    assert_as_fresh(session, range(6), make_cache())
    assert session.switch_prompt("reset") == []
    assert cache.num_free_blocks == 40
    assert_as_fresh(session, [], make_cache())
    assert session.adapter().completed_chunks == 6
    for word in ("", "clear", None):
        with pytest.raises(ValueError, match="`history` must be keep, recache or reset, got"):
            session.switch_prompt(word)


def test_an_empty_history_has_nothing_to_replay():
    cache = make_cache()
    session = cache.open_session("a")
    assert session.switch_prompt("recache") == []
    play(session, range(4))
    assert_as_fresh(session, range(4), make_cache())


# -- branches -----------------------------------------------------------------------------------
def two_branches(commits: int):
    cache = make_cache(local_branches=2, usable=60)
    session = cache.open_session("a")
    play(session, range(commits), branches=2)
    return cache, session


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("commit", [False, True])
def test_branches_that_disagree_are_an_error_at_the_next_plan(ahead, commit):
    """A commit ran on one branch of two: the other may run that very span, and nothing else may."""
    cache, session = two_branches(2)
    forward(session, [2], branch=ahead)
    before = state(cache)
    message = "branches must agree: branch . of session 'a' would run chunks 3 to 3, and branch"
    with pytest.raises(LifecycleError, match=message):
        forward(session, [3], branch=ahead, commit=commit)
    with pytest.raises(LifecycleError, match="would run chunks 2 to 3"):
        forward(session, [2, 3], branch=1 - ahead, commit=commit)
    assert state(cache) == before
    forward(session, [2], branch=1 - ahead, commit=False)
    forward(session, [2], branch=1 - ahead)
    assert_as_fresh(session, range(3), make_cache(local_branches=2, usable=60), branches=2)


def test_a_denoise_forward_counts_as_having_run():
    _, session = two_branches(0)
    forward(session, [0], branch=0, commit=False)
    forward(session, [0], branch=1, commit=False)
    forward(session, [0], branch=0)
    with pytest.raises(LifecycleError, match="branch 1 stands at chunk 0"):
        forward(session, [1], branch=0, commit=False)


@pytest.mark.parametrize("only", [0, 1])
def test_a_branch_that_never_runs_is_not_asked(only):
    """It works for ever; the other one, begun late, would see too little and is refused."""
    _, session = two_branches(0)
    for frame in range(30):
        forward(session, [frame], branch=only, commit=False)
        forward(session, [frame], branch=only)
    with pytest.raises(LifecycleError, match=f"branch {only} stands at chunk 30"):
        forward(session, [30], branch=1 - only)
    forward(session, [30], branch=only)
    session.reset()
    forward(session, [0], branch=1 - only)
