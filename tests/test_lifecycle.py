"""Sessions that end, fail, run out or are used out of order."""

import contextlib
import weakref

import pytest
import torch

import chunkattn.branch
from chunkattn import (
    ChunkAttnError,
    LifecycleError,
    PoolExhaustedError,
    StaleContextError,
)
from chunkattn.policy import Retrieval, SlidingWindow
from tests.helpers.frames import forward, play
from tests.helpers.rollout import RELATIONS, TG, Rollout, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


def start(num_commits: int = 0, **more) -> Rollout:
    """A rollout with a history."""
    rollout = Rollout(make_cache(**more).open_session("a"), more.get("policy", TG))
    for _ in range(num_commits):
        rollout.forward(commit=True)
    return rollout


# -- exceptions ---------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), ValueError("mine")])
@pytest.mark.parametrize("commit", [False, True])
def test_exceptions_leave_as_they_came(error, commit):
    rollout = start(2)

    def fail():
        with rollout.open(commit=commit) as fwd:
            rollout.write(fwd)
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert rollout.adapter.completed_chunks == 2
    rollout.check_blocks()


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_a_failed_forward_can_be_tried_again(chunk, block):
    """F6: the same forward, after an exception at any layer: same output, history untouched."""
    layers = 3
    good, bad = (start(5, chunk=chunk, block=block, layers=layers) for _ in range(2))
    for fail_at in range(layers + 1):
        again = bad.open(commit=True)
        free, history = bad.cache.num_free_blocks, bad.cache.window_block_ids(bad.adapter)
        with contextlib.suppress(KeyError), again:
            for layer in range(fail_at):
                bad.write(again, layer, noise=3)
            raise KeyError
        assert bad.cache.num_free_blocks == free
        assert bad.cache.window_block_ids(bad.adapter) == history
        bad.check_blocks()
        bad.forward()
        with again:  # the very same object
            outs = [bad.write(again, layer) for layer in range(layers)]
        bad.committed += 1
        bad.check_blocks()
        with good.open(commit=True) as fwd:
            for layer, out in enumerate(outs):
                assert torch.equal(good.write(fwd, layer), out)
        good.committed += 1
        assert bad.cache.num_free_blocks == good.cache.num_free_blocks


@pytest.mark.parametrize("fails", [False, True])
def test_each_try_of_a_forward_writes_its_own_layers(fails):
    """Else layers of an earlier try, whose blocks are gone, count as written in this one."""
    rollout = start(2, layers=2)
    again = rollout.open(commit=True)
    with contextlib.suppress(KeyError), again:
        rollout.write(again, 0)
        if fails:
            raise KeyError
        rollout.write(again, 1)
    rollout.committed = rollout.adapter.completed_chunks
    assert rollout.committed == (2 if fails else 3)
    before = rollout.cache.num_free_blocks
    message = r"a commit must write every layer, got none for layers \[0\]"
    with pytest.raises(LifecycleError, match=message), again:
        rollout.write(again, 1)
    assert rollout.cache.num_free_blocks == before
    rollout.check_blocks()


# -- one forward at a time ----------------------------------------------------------------------
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_second_open_forward_on_a_branch_is_refused(first, second):
    cache = make_cache(local_branches=2)
    session = cache.open_session("a")
    rollout, other = Rollout(session), Rollout(session, branch=1)
    with rollout.open(commit=first) as fwd:
        before = state(cache)
        for again in (rollout.open(commit=second), fwd):
            with pytest.raises(LifecycleError, match="must have no open forward, got a second"):
                again.__enter__()
        assert state(cache) == before
        other.forward(commit=True)
        rollout.write(fwd)
    rollout.committed = int(first)
    rollout.forward(commit=True)
    rollout.check_blocks()


# -- reset and close ----------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["reset", "close"])
@pytest.mark.parametrize("commit", [False, True])
def test_a_forward_that_outlives_its_session_is_stale(end, commit):
    """F2: else it would attend its own chunk twice; the free count is what the end left."""
    rollout = start(4)
    with rollout.open(commit=commit) as fwd:
        rollout.write(fwd)
        getattr(rollout.session, end)()
        before = state(rollout.cache)
        for use in (lambda: rollout.write(fwd), lambda: fwd.mark_layer_written(0)):
            with pytest.raises(StaleContextError, match="session was reset or closed"):
                use()
        assert state(rollout.cache) == before
    assert state(rollout.cache) == before
    assert rollout.cache.num_free_blocks == 40
    rollout.cache.check_integrity()


def test_a_stale_forward_does_not_touch_its_successor():
    """F2: it is left while the new history's forward is open."""
    rollout = start(4)
    old = rollout.open(commit=True)
    old.__enter__()
    rollout.session.reset()
    rollout.committed = 0
    with rollout.open(commit=True) as fwd:
        old.__exit__(None, None, None)
        with pytest.raises(StaleContextError):
            rollout.write(old)
        rollout.write(fwd)
    rollout.committed = 1
    rollout.check_blocks()


def test_reset_and_close_again_and_again():
    """F11: 6 commits, reset, 1 commit: history empty, kv 4; reset twice, close twice: no-ops."""
    rollout = start(6)
    session, cache = rollout.session, rollout.cache
    for _ in range(2):
        session.reset()
        assert cache.num_free_blocks == 40
        assert session.adapter().completed_chunks == 0
        assert session.adapter().num_computed_tokens == 0
    rollout.committed = 0
    with rollout.open(commit=True) as fwd:
        assert fwd.kv_len == 4
        assert fwd.history_block_ids == []
        rollout.write(fwd)
    for _ in range(2):
        session.close()
        assert state(cache) == state(cache)
        assert cache.num_free_blocks == 40
        assert cache._sessions == {}
        assert cache._adapters == {}
    cache.check_integrity()


def test_a_closed_session_is_not_started_anew():
    """F7: each use says that it is closed; none begins a fresh history in silence."""
    rollout = start(3)
    session, ready = rollout.session, rollout.open()
    session.close()
    for use in (
        lambda: session.forward(seq_len=4),
        lambda: session.adapter(),
        lambda: session.reset(),
        lambda: ready.__enter__(),
    ):
        with pytest.raises(LifecycleError, match="session 'a' is closed"):
            use()
    assert rollout.cache.num_free_blocks == 40
    assert rollout.cache._adapters == {}


def test_close_leaves_others_alone():
    cache = make_cache(session_capacity=2)
    a, b = (Rollout(cache.open_session(name), tag=t) for name, t in (("a", 0.0), ("b", 0.5)))
    for _ in range(5):
        a.forward(commit=True)
        b.forward(commit=True)
    a.session.close()
    b.check_blocks()
    a.session.close()
    successor = Rollout(cache.open_session("a"))
    successor.forward(commit=True)
    a.session.close()  # the old one: not its successor's business
    successor.check_blocks()
    b.forward(commit=True)
    b.check_blocks()


def test_a_reset_under_an_id_keeps_it():
    rollout = start(2)
    rollout.session.reset()
    with pytest.raises(LifecycleError, match="`session_id` must be new, got 'a', which is open"):
        rollout.cache.open_session("a")


# -- ids and capacity ---------------------------------------------------------------------------
def test_open_session_refuses_a_live_id():
    """F3."""
    cache = make_cache(session_capacity=3, local_branches=2)
    cache.open_session("a")
    before = state(cache)
    with pytest.raises(LifecycleError, match="`session_id` must be new, got 'a', which is open"):
        cache.open_session("a")
    assert state(cache) == before


def test_open_session_refuses_a_live_request_of_its_name():
    """F3: a low-level request holds the name of the second branch; the first is not left behind."""
    cache = make_cache(session_capacity=3, local_branches=2)
    name = cache.open_session("x").adapter(1).request_id.replace("x", "a")
    cache.begin_request(name)
    before = state(cache)
    with pytest.raises(LifecycleError, match="`request_id` must be new"):
        cache.open_session("a")
    assert state(cache) == before


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("how", ["open", "fork", "adopt"])
def test_a_session_that_cannot_begin_leaves_nothing(how, fails_at, monkeypatch):
    """Memory runs out at either branch's buffers. Requests that a caller began stay his."""
    cache = make_cache(session_capacity=2, local_branches=2)
    source = cache.open_session("source")
    play(source, range(3), branches=2)
    begun = [cache.begin_request(f"host{i}") for i in range(2)] if how == "adopt" else []
    begin = {
        "open": lambda: cache.open_session("a"),
        "fork": lambda: source.fork("a"),
        "adopt": lambda: cache.admit_session("a", adapters=begun),
    }[how]
    buffers, calls = chunkattn.branch.PlanBuffers, []

    def fail(**arguments):
        calls.append(arguments)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return buffers(**arguments)

    before = state(cache)
    with monkeypatch.context() as patch:
        patch.setattr(chunkattn.branch, "PlanBuffers", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            begin()
    assert state(cache) == before
    cache.check_integrity()
    forward(begin(), [3] if how == "fork" else [0])
    cache.check_integrity()


def test_a_fork_that_cannot_share_a_fetched_chunk_leaves_nothing():
    """A low-level request holds the name of that chunk's; the fork's own request is ended."""
    cache = make_cache(session_capacity=2, policy_object=Retrieval(SlidingWindow(3), 1))
    session = cache.open_session("a")
    play(session, range(6))
    session.retrieve([1])
    cache.begin_request(session.requests()[1].request_id.replace("a::", "b::"))
    before = state(cache)
    with pytest.raises(LifecycleError, match="`request_id` must be new, got 'b::branch0::chunk1'"):
        session.fork("b")
    assert state(cache) == before
    cache.check_integrity()


def test_capacity():
    """G7: a runs, b arrives: b is refused, a untouched. A low-level request is no session."""
    rollout = start(5)
    cache = rollout.cache
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match=r"`session_capacity` is 1 and \['a'\] are open"):
        cache.open_session("b")
    assert state(cache) == before
    rollout.forward(commit=True)
    rollout.check_blocks()
    cache.allocate_chunk(cache.begin_request("low-level"))
    rollout.session.close()
    cache.open_session("b")


def test_a_full_pool_leaves_nothing_pending():
    """G1: 6 free blocks; b runs out; a closes; then the same call succeeds."""
    cache = make_cache(usable=6, session_capacity=2)
    a, b = (Rollout(cache.open_session(name), tag=t) for name, t in (("a", 0.0), ("b", 0.5)))
    for _ in range(4):
        a.forward(commit=True)
    for _ in range(2):
        b.forward(commit=True)
    before = state(cache)
    fwd = b.open(commit=True)
    for _ in range(2):
        with pytest.raises(PoolExhaustedError, match="0 free blocks are too few for 4 more tokens"):
            fwd.__enter__()
        assert state(cache) == before
    b.forward()  # a denoise forward needs no block
    a.session.close()
    with fwd:
        b.write(fwd)
    b.committed += 1
    b.check_blocks()


def test_many_sessions():
    """I6: opened, played and closed; no block is lost, no book grows."""
    cache = make_cache(session_capacity=3)
    open_sessions = []
    last = None
    for number in range(300):
        if len(open_sessions) == 3:
            open_sessions.pop(number % 3).session.close()
        rollout = Rollout(cache.open_session(f"robot-{number}"), tag=number % 5 / 8)
        for _ in range(number % 7):
            rollout.forward(commit=True)
        open_sessions.append(rollout)
        last = weakref.ref(open_sessions[0].session)
    for rollout in open_sessions:
        rollout.check_blocks()
        rollout.session.close()
    assert cache.num_free_blocks == 40
    assert not cache._sessions
    assert not cache._adapters
    window = cache._window_manager
    for book in (window.req_to_blocks, window.num_cached_block, window._gaps):
        assert len(book) == 0
    del open_sessions, rollout
    assert last() is None


def test_books_without_tensors():
    """``device=None``: a session plans and commits what others write, and refuses to attend."""
    policy = Window(3, 1)
    cache = make_cache(layers=2, device=None)
    session = cache.open_session("a")
    for number in range(6):
        with session.forward(seq_len=4, commit=True) as fwd:
            zeros = torch.zeros(4, 1, 8)
            with pytest.raises(LifecycleError, match=r"built without tensors \(device=None\)"):
                fwd.write_attend(0, zeros, zeros, zeros)
            assert fwd.kv_len == 4 * len(policy.visible(number, 1))
            fwd.mark_layer_written(0)
            fwd.mark_layer_written(1)
        assert len(cache.block_table(session.adapter())) == len(policy.resident(number + 1))
    cache.check_integrity()


def test_every_error_is_ours():
    assert issubclass(PoolExhaustedError, ChunkAttnError)
    assert issubclass(StaleContextError, LifecycleError)
    assert issubclass(LifecycleError, ChunkAttnError)
    assert issubclass(ChunkAttnError, RuntimeError)
