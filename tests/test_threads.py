"""Sessions in different threads, and blocks that go from one CUDA stream to another."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from chunkattn import ARDiffusionKVCache, ForwardContext, PoolExhaustedError, requests, streams
from chunkattn.policy import Retrieval, SlidingWindow
from chunkattn.streams import Settling, Turn
from tests.helpers.frames import play
from tests.helpers.rollout import Rollout, make_cache

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*work: Callable[[], None]) -> None:
    """Run each in a thread of its own, and raise what any of them raises."""
    failed: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.usefixtures("eager_switches")
def test_two_threads_open_and_close_a_thousand_sessions():
    """I6: no block has two owners at any time, and none is lost."""
    cache = make_cache(device=None, session_capacity=4, usable=60)
    owner: dict[int, str] = {}

    def work(name: str) -> None:
        for number in range(500):
            session = cache.open_session(f"{name}-{number}")
            mine: list[int] = []
            for _ in range(1 + number % 3):
                with session.forward(seq_len=4, commit=True) as fwd:
                    for block in fwd.span_block_ids:
                        assert owner.setdefault(block, name) == name
                        mine.append(block)
                    fwd.mark_layer_written(0)
            for block in mine:
                del owner[block]
            if number % 5 == 0:
                fork = session.fork(f"{name}-fork")
                session.rollback(1)
                session.swap_out()
                session.swap_in()
                fork.close()
            if number % 50 == 0:
                cache.check_integrity()
            session.close()

    in_threads(lambda: work("a"), lambda: work("b"))
    assert cache.num_free_blocks == 60
    assert not cache._adapters
    cache.check_integrity()


@pytest.mark.usefixtures("eager_switches")
def test_sessions_run_beside_each_other():
    """Each output is right to the token, though all denoise in the same scratch blocks."""
    cache = make_cache(16, 8, layers=3, session_capacity=3, usable=99)

    def work(tag: float) -> None:
        for number in range(3):
            rollout = Rollout(cache.open_session(f"{tag}-{number}"), tag=tag)
            for _ in range(12):
                rollout.forward(noise=1, action_len=2)
                rollout.forward(commit=True, action_len=2)
            rollout.check_blocks()
            rollout.session.close()

    in_threads(*(lambda tag=tag: work(tag) for tag in (0.0, 0.25, 0.5)))
    assert cache.num_free_blocks == 99


@pytest.mark.parametrize("during", ["_plan", "commit_chunks"])
def test_a_forward_that_opens_or_commits_is_not_idle(during, monkeypatch):
    """Else another thread evicts its session there, and its plan reads blocks of others."""
    cache = make_cache(session_capacity=1)
    rollout = Rollout(cache.open_session("a"))
    rollout.forward(commit=True)
    refused: list[PoolExhaustedError] = []

    def evict() -> None:
        try:
            cache.open_session("b", evict_idle=True)
        except PoolExhaustedError as error:
            refused.append(error)

    other = threading.Thread(target=evict)
    owner = ForwardContext if during == "_plan" else type(cache)
    method = getattr(owner, during)

    def and_another_evicts(*arguments):
        if other.ident is None:
            other.start()
            other.join(0.2)
            assert other.is_alive()  # it waits
        return method(*arguments)

    monkeypatch.setattr(owner, during, and_another_evicts)
    with rollout.open(commit=True) as fwd:
        if during == "_plan":
            other.join()
            assert "['a'] are open" in str(refused.pop())
        rollout.write(fwd)
    other.join()
    assert not refused
    assert rollout.session.is_closed == (during == "commit_chunks")
    cache.check_integrity()


# -- streams, without a GPU: what waits for what ---------------------------------------------------
class FakeStream:
    def __init__(self, name: str) -> None:
        self.name, self.waits = name, []

    def wait_event(self, event: "FakeEvent") -> None:
        self.waits.append(event.recorded)

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append((other.name, "now"))


class FakeEvent:
    done = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream.name

    def query(self) -> bool:
        return self.done


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeStream]:
    now = {"stream": FakeStream("one")}
    monkeypatch.setattr(streams.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(streams.torch.cuda, "current_stream", lambda device: now["stream"])
    monkeypatch.setattr(FakeEvent, "done", False)
    return now


def test_blocks_are_reused_behind_their_readers(fake_cuda):
    """I1: another stream waits for the forward that read them, its own does not."""
    settling = Settling(torch.device("cuda"))
    one, two = settling.stream(), FakeStream("two")
    settling.freed(one)
    settling.reused()
    assert one.waits == []
    fake_cuda["stream"] = two
    settling.reused()
    assert two.waits == ["one"]
    settling.freed(two)
    fake_cuda["stream"] = one
    settling.reused()
    assert one.waits == ["two"]
    FakeEvent.done = True  # both have got there
    settling.reused()
    FakeEvent.done = False
    fake_cuda["stream"] = FakeStream("three")
    settling.reused()
    assert fake_cuda["stream"].waits == []


def test_scratch_goes_from_stream_to_stream():
    one, two, turn = FakeStream("one"), FakeStream("two"), Turn()
    for stream in (one, one, two, two, one):
        turn.take(stream)
    assert (one.waits, two.waits) == ([("two", "now")], [("one", "now")])
    turn.take(None)


def test_a_cpu_has_nothing_to_wait_for():
    settling = Settling(torch.device("cpu"))
    assert settling.stream() is None
    settling.freed(None)
    settling.reused()


def test_every_call_that_frees_or_takes_blocks_says_so(monkeypatch):
    """I1, in the cache: commit, abort, rollback, swap, close free; commit, swap and a copy take."""
    said: list[str] = []
    monkeypatch.setattr(Settling, "freed", lambda self, reader: said.append(f"freed {reader}"))
    monkeypatch.setattr(Settling, "reused", lambda self: said.append("reused"))
    monkeypatch.setattr(Settling, "stream", lambda self: "mine")
    cache = make_cache(device=None, session_capacity=2, block=16)
    session = cache.open_session("a")

    def commit(one) -> None:
        with one.forward(seq_len=4, commit=True) as fwd:
            fwd.mark_layer_written(0)

    def heard() -> list[str]:
        words, said[:] = list(said), []
        return words

    commit(session)
    assert heard() == ["reused", "freed mine"]
    fork = session.fork("b")
    assert heard() == []
    commit(fork)  # copies the block that both are filling
    assert heard() == ["reused", "reused", "freed mine", "freed mine"]
    session.rollback(1)
    assert heard() == ["freed mine"]
    fork.swap_out()
    assert heard() == ["freed mine", "freed mine"]
    fork.swap_in()
    assert heard() == ["reused"]
    fork.close()
    assert heard() == ["freed mine"]


@pytest.fixture
def streamed(fake_cuda) -> ARDiffusionKVCache:
    """A cache on a CPU that believes its work runs on ``fake_cuda["stream"]``."""
    policy = Retrieval(SlidingWindow(3), 2)
    cache = make_cache(session_capacity=2, scratch=False, policy_object=policy)
    cache.settling._on_gpu = True
    return cache


def waited(stream: FakeStream) -> list[str]:
    """The streams that this one has waited for since it was last asked."""
    names = [wait[0] for wait in stream.waits if isinstance(wait, tuple)]
    stream.waits.clear()
    return names


def watch(monkeypatch: pytest.MonkeyPatch, stream: FakeStream) -> list[str]:
    """What ``stream`` has waited for when bytes are copied to host memory; filled when they are."""
    names: list[str] = []

    class Watched(requests.HostCopy):
        def __init__(self, *arguments):
            names.extend(waited(stream))
            super().__init__(*arguments)

    monkeypatch.setattr(requests, "HostCopy", Watched)
    return names


def test_a_session_may_change_streams(fake_cuda, streamed):
    """Else it reads K/V, and rewrites a plan, that the other stream is still at."""
    one, two = fake_cuda["stream"], FakeStream("two")
    session = streamed.open_session("a")
    play(session, range(2))
    assert waited(one) == []
    fake_cuda["stream"] = two
    rollout = Rollout(session)
    rollout.committed = 2
    for expected in (["one"], []):
        with rollout.open():
            assert waited(two) == expected
    fake_cuda["stream"] = one
    play(session, [2])
    assert waited(one) == ["two"]


def test_a_fork_waits_for_its_parent(fake_cuda, streamed):
    one, two = fake_cuda["stream"], FakeStream("two")
    parent = streamed.open_session("a")
    play(parent, range(2))
    child = parent.fork("b")
    fake_cuda["stream"] = two
    play(child, [2])
    assert waited(two) == ["one"]
    fake_cuda["stream"] = one
    play(parent, [2])
    assert waited(one) == []


def test_bytes_leave_behind_their_writer_and_are_read_behind_their_return(
    fake_cuda, streamed, monkeypatch
):
    """Swapped out and in on other streams than the forwards'."""
    one, two, three = fake_cuda["stream"], FakeStream("two"), FakeStream("three")
    session = streamed.open_session("a")
    play(session, range(2))
    before_the_copy = watch(monkeypatch, two)
    fake_cuda["stream"] = two
    session.swap_out()
    assert before_the_copy == ["one"]
    fake_cuda["stream"] = three
    session.swap_in()
    fake_cuda["stream"] = one
    waited(one)
    play(session, [2])
    assert waited(one) == ["three"]


def test_a_chunk_leaves_behind_its_writer(fake_cuda, streamed, monkeypatch):
    """A commit that ends on another stream copies what leaves to host memory."""
    two = FakeStream("two")
    session = streamed.open_session("a")
    play(session, range(3))
    rollout = Rollout(session)
    rollout.committed = 3
    before_the_copy = watch(monkeypatch, two)
    with rollout.open(commit=True) as fwd:
        rollout.write(fwd)
        fake_cuda["stream"] = two
    assert before_the_copy == ["one"]


def test_a_retrieved_chunk_is_read_behind_its_return_and_freed_by_its_reader(fake_cuda, streamed):
    one, two = fake_cuda["stream"], FakeStream("two")
    session = streamed.open_session("a")
    play(session, range(6))
    fake_cuda["stream"] = two
    session.retrieve([0])
    fake_cuda["stream"] = one
    waited(one)
    play(session, [6])
    assert waited(one) == ["two"]
    streamed.settling._freed.clear()
    session.retrieve([])
    assert list(streamed.settling._freed) == [one]


def test_a_shared_block_is_copied_behind_its_writer(fake_cuda, streamed, monkeypatch):
    """For a replay, which rewrites what a fork still reads."""
    one, two = fake_cuda["stream"], FakeStream("two")
    session = streamed.open_session("a")
    play(session, range(2))
    session.fork("b")
    before_the_copy: list[str] = []
    monkeypatch.setattr(requests, "copy_blocks", lambda *_: before_the_copy.extend(waited(two)))
    fake_cuda["stream"] = two
    session.switch_prompt("recache")
    assert before_the_copy == ["one"]
    fake_cuda["stream"] = one
    waited(one)
    play(session, [0])
    assert waited(one) == ["two"]
