"""`Session.fork`: two futures from one past, on shared blocks."""

import pytest

from chunkattn import LifecycleError, PoolExhaustedError
from tests.helpers.frames import assert_as_fresh, forward, play
from tests.helpers.rollout import RELATIONS, Rollout, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


def tables(cache) -> dict[str, list[int]]:
    return {name: cache.block_table(adapter) for name, adapter in cache._adapters.items()}


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("committed", [0, 1, 3, 6])
@pytest.mark.parametrize("first", ["parent", "child"])
def test_both_go_on_as_fresh_rollouts_would(chunk, block, committed, first):
    """Bit for bit, whoever writes first into the block that both are filling."""
    cache = make_cache(chunk, block, session_capacity=2, usable=99)
    fresh = make_cache(chunk, block)
    parent = cache.open_session("parent")
    play(parent, range(committed))
    before = cache.num_free_blocks
    child = parent.fork("child")
    cache.check_integrity()
    assert cache.num_free_blocks == before  # nothing is copied yet
    assert child.adapter().completed_chunks == committed
    one, two = (parent, child) if first == "parent" else (child, parent)
    past = list(range(committed))
    play(one, [50])
    play(two, [60])
    play(one, [51])
    assert_as_fresh(two, [*past, 60], fresh)
    assert_as_fresh(one, [*past, 50, 51], fresh)
    one.close()
    assert_as_fresh(two, [*past, 60, *range(100, 106)], fresh)
    two.close()
    assert cache.num_free_blocks == 99
    cache.check_integrity()


def test_full_blocks_stay_shared_until_both_let_go():
    cache = make_cache(session_capacity=3)
    a = Rollout(cache.open_session("a"))
    for _ in range(4):
        a.forward(commit=True)
    b = Rollout(a.session.fork("b"))
    c = Rollout(b.session.fork("c"))
    b.committed = c.committed = 4
    assert cache.num_free_blocks == 36
    assert len({tuple(table) for table in tables(cache).values()}) == 1
    a.forward(commit=True)  # a lets chunk 1 go; the others hold it
    assert cache.num_free_blocks == 35
    a.session.close()
    assert cache.num_free_blocks == 36
    for rollout in (b, c):
        rollout.check_blocks()
    b.session.close()
    c.forward(commit=True)
    assert cache.num_free_blocks == 36
    c.check_blocks()
    c.session.close()
    assert cache.num_free_blocks == 40


def test_a_partly_filled_block_is_copied_by_the_first_that_writes():
    cache = make_cache(4, 16, session_capacity=2, layers=2)
    a = Rollout(cache.open_session("a"))
    a.forward(commit=True)
    b = Rollout(a.session.fork("b"))
    b.committed = 1
    b.forward()  # scratch: nothing is copied
    assert tables(cache)["a::branch0"] == tables(cache)["b::branch0"]
    b.forward(commit=True)
    assert tables(cache)["a::branch0"] != tables(cache)["b::branch0"]
    table = tables(cache)["a::branch0"]
    a.forward(commit=True)  # alone in it now
    assert tables(cache)["a::branch0"] == table
    a.check_blocks()
    b.check_blocks()


def test_a_rolled_back_fork_writes_into_its_own_block():
    """Rollback makes a full shared block a partly filled one."""
    cache = make_cache(4, 16, Window(9, 0), session_capacity=2)
    fresh = make_cache(4, 16, Window(9, 0))
    a = cache.open_session("a")
    play(a, range(8))
    b = a.fork("b")
    b.rollback(3)
    play(b, [30])
    assert_as_fresh(a, range(8), fresh)
    assert_as_fresh(b, [0, 1, 2, 3, 4, 30], fresh)


def test_no_room_for_the_copy_changes_nothing():
    cache = make_cache(4, 8, usable=4, session_capacity=2)
    a = Rollout(cache.open_session("a"))
    a.forward(commit=True)
    b = Rollout(a.session.fork("b"))
    b.committed = 1
    hold = cache.begin_request("hold")
    cache.allocate_token_slots(hold, 24)
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match="0 free blocks are too few"):
        b.open(commit=True).__enter__()
    assert state(cache) == before
    cache.end_request(hold)
    b.forward(commit=True)
    a.forward(commit=True)
    a.check_blocks()
    b.check_blocks()


def test_every_branch_is_shared():
    cache = make_cache(local_branches=2, session_capacity=2, usable=99)
    fresh = make_cache(local_branches=2, usable=60)
    a = cache.open_session("a")
    play(a, range(6), branches=2)
    b = a.fork("b")
    play(b, [50], branches=2)
    forward(a, [60], branch=0)
    forward(a, [60], branch=1)
    assert_as_fresh(b, [*range(6), 50], fresh, branches=2)
    assert_as_fresh(a, [*range(6), 60], fresh, branches=2)


def test_refusals():
    cache = make_cache(session_capacity=2)
    a = Rollout(cache.open_session("a"))
    a.forward(commit=True)
    with a.open(commit=True) as fwd:
        before = state(cache)
        with pytest.raises(LifecycleError, match="`fork` must wait for the open forward"):
            a.session.fork("b")
        assert state(cache) == before
        a.write(fwd)
    with pytest.raises(LifecycleError, match="`session_id` must be new, got 'a'"):
        a.session.fork("a")
    cache.begin_request("x::branch0")
    before = state(cache)
    with pytest.raises(LifecycleError, match="`request_id` must be new"):
        a.session.fork("x")
    assert state(cache) == before
    b = a.session.fork("b")
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match=r"`session_capacity` is 2 and \['a', 'b'\]"):
        a.session.fork("c")
    assert state(cache) == before
    b.close()
    with pytest.raises(LifecycleError, match="session 'b' is closed"):
        b.fork("c")
    cache.check_integrity()
