"""`Session.rollback`: the last chunks were never committed."""

import numpy as np
import pytest

from chunkattn import LifecycleError, StaleContextError
from tests.helpers.frames import assert_as_fresh, forward, play
from tests.helpers.rollout import RELATIONS, TG, Rollout, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("committed", [1, 2, 4, 5, 9])
def test_as_if_the_last_chunk_had_never_been(chunk, block, committed):
    """Then the real frame takes its place; each output is that of a fresh rollout, bit for bit."""
    cache, fresh = make_cache(chunk, block), make_cache(chunk, block)
    session = cache.open_session("a")
    frames = list(range(committed))
    play(session, [*frames[:-1], 77])
    before = cache.num_free_blocks
    session.rollback(1)
    assert session.adapter().completed_chunks == committed - 1
    assert cache.num_free_blocks >= before
    cache.check_integrity()
    play(session, frames[-1:])
    assert_as_fresh(session, frames, fresh)


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_it_may_cut_a_span(chunk, block, dropped):
    policy, span = Window(5, 1), 3
    cache, fresh = (make_cache(chunk, block, policy, span=span, usable=99) for _ in range(2))
    session = cache.open_session("a")
    play(session, range(9), span=span)
    session.rollback(dropped)
    play(session, range(9 - dropped, 9), span=3)
    assert_as_fresh(session, range(9), fresh, span=span)


def test_blocks_go_back_and_the_history_before_is_untouched():
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    for _ in range(3):
        rollout.forward(commit=True)
    table, free = cache.block_table(rollout.adapter), cache.num_free_blocks
    rollout.session.rollback(2)
    rollout.committed = 1
    assert cache.block_table(rollout.adapter) == table[:1]
    assert cache.num_free_blocks == free + 2
    assert rollout.adapter.absolute_num_computed_tokens == 4
    rollout.check_blocks()
    rollout.session.rollback(0)
    rollout.check_blocks()
    rollout.forward()
    rollout.session.rollback(1)
    assert cache.num_free_blocks == 40


def test_a_plan_made_before_is_not_taken_for_one_made_after():
    """The same position, and other blocks: another request has taken those that went back."""
    cache = make_cache(session_capacity=2)
    rollout, other = (Rollout(cache.open_session(n), tag=t) for n, t in (("a", 0.0), ("b", 0.5)))
    for _ in range(3):
        rollout.forward(commit=True)
    rollout.forward()
    rollout.session.rollback(1)
    other.forward(commit=True)
    rollout.committed = 2
    rollout.forward(commit=True)
    rollout.forward()
    rollout.check_blocks()
    other.check_blocks()


def test_chunks_that_have_left_cannot_be_seen_again():
    """TG, 8 commits: the span after chunk 6 would see chunk 4, which has left."""
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    for _ in range(8):
        rollout.forward(commit=True)
    before = state(cache)
    for num_chunks, left in ((2, r"\[4\]"), (3, r"\[3, 4\]"), (6, r"\[1\]")):
        with pytest.raises(LifecycleError, match=f"must see chunks {left}, which have left"):
            rollout.session.rollback(num_chunks)
        assert state(cache) == before
    rollout.session.rollback(7)  # the sink is all that span 1 sees
    rollout.committed = 1
    rollout.check_blocks()
    rollout.session.rollback(1)
    assert cache.num_free_blocks == 40


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("dropped", range(10))
def test_reset_at_boundary_sees_the_sink_alone(chunk, block, dropped):
    """Any rollback is fine there, also into the middle of what has left."""
    policy = Window(2, 1, True)
    cache, fresh = (make_cache(chunk, block, policy, usable=60) for _ in range(2))
    session = cache.open_session("a")
    play(session, range(9))
    session.rollback(min(dropped, 9))
    cache.check_integrity()
    assert_as_fresh(session, range(9 - min(dropped, 9)), fresh)


def test_a_shorter_span_than_declared_is_checked_when_it_is_planned():
    """Window 4, span 2, 2 dropped: the next span of 2 sees all it must, one of 1 chunk does not."""
    policy = Window(4, 0)
    cache = make_cache(policy=policy, span=2)
    session = cache.open_session("a")
    play(session, range(8), span=2)
    session.rollback(2)
    before = state(cache)
    with pytest.raises(LifecycleError, match=r"must see chunks \[3\], which have left"):
        forward(session, [6])
    assert state(cache) == before
    forward(session, [6, 7])


@pytest.mark.parametrize("num_chunks", [-1, 4, 99])
def test_arguments(num_chunks):
    cache = make_cache()
    session = cache.open_session("a")
    play(session, range(3))
    before = state(cache)
    message = f"`num_chunks` must be from 0 to 3, got {num_chunks}"
    with pytest.raises(ValueError, match=message):
        session.rollback(num_chunks)
    assert state(cache) == before


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1)])
def test_any_integer_will_do(one):
    cache = make_cache()
    session = cache.open_session("a")
    play(session, range(3))
    session.rollback(one)
    assert session.adapter().completed_chunks == 2
    assert type(session.adapter().completed_chunks) is int


@pytest.mark.parametrize("commit", [False, True])
def test_an_open_forward_is_in_the_way(commit):
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    rollout.forward(commit=True)
    with rollout.open(commit=commit) as fwd:
        before = state(cache)
        message = "`rollback` must wait for the open forward on branch 0 of session 'a'"
        with pytest.raises(LifecycleError, match=message):
            rollout.session.rollback(1)
        assert state(cache) == before
        rollout.write(fwd)
    rollout.session.rollback(1)
    with pytest.raises(StaleContextError):
        rollout.write(fwd)
    rollout.session.close()
    with pytest.raises(LifecycleError, match="session 'a' is closed"):
        rollout.session.rollback(0)


def test_every_branch_goes_back():
    """Also to where they agree, when a commit ran on one of them only."""
    cache, fresh = (make_cache(local_branches=2, usable=60) for _ in range(2))
    session = cache.open_session("a")
    play(session, range(3), branches=2)
    forward(session, [5], branch=0)
    session.rollback(1)
    assert [session.adapter(b).completed_chunks for b in (0, 1)] == [3, 3]
    session.rollback(1)
    assert [session.adapter(b).completed_chunks for b in (0, 1)] == [2, 2]
    assert_as_fresh(session, range(2), fresh, branches=2)


def test_the_default_window_is_what_the_visible_sets_say():
    """The policy object's words for the window: visible and kept, against plain Python."""
    from chunkattn.policy import SlidingWindow
    from chunkattn.window import runs

    for window in (TG, Window(1, 0), Window(3, 2), Window(2, 1, True), Window(5, 0)):
        policy = SlidingWindow(*window)
        for first in range(12):
            assert policy.kept((), range(0, first)) == runs(window.resident(first))
            for num in range(1, window.window + 1):
                seen = policy.visible((), range(first, first + num))
                assert seen == runs(set(window.visible(first, num)) - {*range(first, first + num)})
