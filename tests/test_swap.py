"""`Session.swap_out` and `swap_in`: the history waits in host memory."""

import pytest
import torch

from chunkattn import LifecycleError, PoolExhaustedError, requests
from chunkattn.pool import HostCopy, copy_blocks
from tests.helpers.frames import assert_as_fresh, play
from tests.helpers.rollout import RELATIONS, Rollout, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("committed", [0, 1, 3, 7])
@pytest.mark.parametrize("branches", [1, 2])
def test_it_comes_back_as_it_left(chunk, block, committed, branches):
    """Other blocks, whose bytes another session has overwritten meanwhile; the same outputs."""
    arguments = {"local_branches": branches, "usable": 99}
    cache = make_cache(chunk, block, session_capacity=2, **arguments)
    session = cache.open_session("a")
    play(session, range(committed), branches=branches)
    session.swap_out()
    assert cache.num_free_blocks == 99
    cache.check_integrity()
    other = cache.open_session("other")
    play(other, range(900, 905), branches=branches)
    session.swap_in()
    cache.check_integrity()
    fresh = make_cache(chunk, block, **arguments)
    assert_as_fresh(session, range(committed), fresh, branches=branches)
    assert_as_fresh(other, range(900, 905), fresh, branches=branches)


def test_a_swapped_session_refuses_to_run():
    cache = make_cache(session_capacity=2)
    rollout = Rollout(cache.open_session("a"))
    rollout.forward(commit=True)
    session, ready = rollout.session, rollout.open()
    session.swap_out()
    session.swap_out()
    before = state(cache)
    for use in (
        lambda: rollout.open(),
        lambda: ready.__enter__(),
        lambda: session.fork("b"),
        lambda: session.rollback(1),
        lambda: session.switch_prompt("keep"),
    ):
        with pytest.raises(LifecycleError, match=r"session 'a' is swapped out: call swap_in\(\)"):
            use()
    assert state(cache) == before
    assert session.adapter().completed_chunks == 1
    session.swap_in()
    session.swap_in()
    rollout.check_blocks()
    rollout.forward()


def test_no_room_leaves_it_swapped_out():
    cache = make_cache(usable=6, session_capacity=2)
    a, b = (Rollout(cache.open_session(name), tag=t) for name, t in (("a", 0.0), ("b", 0.5)))
    for _ in range(3):
        a.forward(commit=True)
    a.session.swap_out()
    for _ in range(4):
        b.forward(commit=True)
    before = state(cache)
    message = "2 free blocks are too few for the 3 of what was swapped out"
    with pytest.raises(PoolExhaustedError, match=message):
        a.session.swap_in()
    assert state(cache) == before
    with pytest.raises(LifecycleError, match="is swapped out"):
        a.open()
    b.session.close()
    a.session.swap_in()
    a.check_blocks()
    a.forward(commit=True)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_it_may_end_in_host_memory(end):
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    for _ in range(3):
        rollout.forward(commit=True)
    rollout.session.swap_out()
    getattr(rollout.session, end)()
    assert cache.num_free_blocks == 40
    cache.check_integrity()
    if end == "reset":
        rollout.committed = 0
        rollout.forward(commit=True)
        rollout.check_blocks()
    else:
        for call in (rollout.session.swap_in, rollout.session.swap_out):
            with pytest.raises(LifecycleError, match="session 'a' is closed"):
                call()


def test_a_fork_and_its_swapped_parent():
    """What was shared is not any more; the fork never notices."""
    cache = make_cache(4, 16, session_capacity=2)
    fresh = make_cache(4, 16)
    parent = cache.open_session("parent")
    play(parent, range(5))
    child = parent.fork("child")
    parent.swap_out()
    play(child, [50])
    parent.swap_in()
    assert_as_fresh(child, [*range(5), 50], fresh)
    assert_as_fresh(parent, range(5), fresh)


def test_no_host_memory_leaves_every_branch_in_its_blocks(monkeypatch):
    """The copy of the second branch fails: else the first one's table was empty, its bytes lost."""
    cache = make_cache(local_branches=2)
    session = cache.open_session("a")
    play(session, range(3), branches=2)
    before = state(cache)
    made: list[int] = []

    class ShortOfMemory(HostCopy):
        def __init__(self, pools, block_ids):
            if made:
                raise RuntimeError("cannot pin host memory")
            made.append(1)
            super().__init__(pools, block_ids)

    with monkeypatch.context() as patched:
        patched.setattr(requests, "HostCopy", ShortOfMemory)
        with pytest.raises(RuntimeError, match="cannot pin host memory"):
            session.swap_out()
    assert state(cache) == before
    fresh = make_cache(local_branches=2)
    assert_as_fresh(session, range(3), fresh, branches=2)
    session.swap_out()
    session.swap_in()
    assert cache.num_free_blocks == 40 - 2 * 4


def test_an_open_forward_is_in_the_way():
    cache = make_cache()
    rollout = Rollout(cache.open_session("a"))
    with rollout.open(commit=True) as fwd:
        with pytest.raises(LifecycleError, match="`swap_out` must wait for the open forward"):
            rollout.session.swap_out()
        rollout.write(fwd)
    rollout.committed = 1
    rollout.check_blocks()


def test_books_without_tensors():
    cache = make_cache(device=None)
    session = cache.open_session("a")
    with session.forward(seq_len=4, commit=True) as fwd:
        fwd.mark_layer_written(0)
    session.swap_out()
    assert cache.num_free_blocks == 40
    session.swap_in()
    assert cache.num_free_blocks == 39
    cache.check_integrity()


def test_bytes_of_blocks():
    """NaN and all, to other blocks, and nothing beside them."""
    pools = [torch.randn(7, 2, 1, 4) for _ in range(2)]
    pools[0][3] = float("nan")
    before = [pool.clone() for pool in pools]
    copy = HostCopy(pools, [3, 1])
    copy_blocks(pools, [(5, 1), (6, 3)])
    copy_blocks(pools, [])
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[[1, 3]], old[[5, 6]])
    copy.restore(pools, [2, 6])
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[[2, 6]].view(torch.int32), old[[3, 1]].view(torch.int32))
        assert torch.equal(pool[[0, 4, 5]], old[[0, 4, 5]])
