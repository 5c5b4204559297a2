"""Policies: what each shows and keeps, played to the token; and how small a new one is."""

from dataclasses import dataclass

import pytest
import torch

import chunkattn.requests
from chunkattn import ChunkAttnError, LifecycleError, PoolExhaustedError
from chunkattn.policy import (
    FloatingSink,
    HardReset,
    PartialCommit,
    PerLayer,
    PinnedChunks,
    Policy,
    Retrieval,
    SlidingWindow,
)
from chunkattn.window import common, count, merged, runs, whole_block_gaps
from tests.helpers.frames import assert_as_fresh, forward, play
from tests.helpers.rollout import RELATIONS, TG, Rollout, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


def start(
    policy: Policy | None, chunk: int = 4, block: int = 4, window: int = 9, **more
) -> Rollout:
    """A rollout under a policy, on a cache whose config allows spans of up to ``window``."""
    config = Window(window, 0)
    cache = make_cache(chunk, block, config, usable=150, policy_object=policy, **more)
    return Rollout(cache.open_session("a"), config)


def step(rollout: Rollout, num: int, history: list[int], resident: list[int]) -> None:
    """Denoise and commit a span; then exactly these chunks are resident."""
    span = [*range(rollout.committed, rollout.committed + num)]
    visible = sorted({*history, *span})
    rollout.forward(num, visible=visible, noise=1)
    rollout.forward(num, visible=visible, commit=True)
    assert [c for run in rollout.adapter.resident for c in run] == resident
    rollout.check_blocks(resident)


# -- each policy against plain Python -----------------------------------------------------------
@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("window", [TG, Window(2, 0), Window(3, 2), Window(2, 1, True)])
def test_the_window_as_an_object(chunk, block, window):
    """The default, given by name: the same sets, through the same path as any other policy."""
    rollout = start(SlidingWindow(*window), chunk, block, window.window)
    for number in range(12):
        history = [c for c in window.visible(number, 1) if c != number]
        step(rollout, 1, history, window.resident(number + 1))


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_hard_reset(chunk, block):
    """DreamZero: 1, then spans of 2 up to 5 frames; what no longer fits begins anew."""
    rollout = start(HardReset(5), chunk, block, span=2)
    resident: list[int] = []
    for num in (1, 2, 2, 2, 2, 1, 2, 2, 2):
        span = [*range(rollout.committed, rollout.committed + num)]
        history = resident if len(resident) + num <= 5 else []
        resident = [*history, *span]
        step(rollout, num, history, resident)


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize(("window", "sink", "period"), [(3, 1, 4), (3, 2, 5), (2, 2, 2), (4, 1, 1)])
def test_floating_sink(chunk, block, window, sink, period):
    rollout = start(FloatingSink(window, sink, period), chunk, block)

    def sinks(committed: int) -> set[int]:
        whole = [p for p in range(0, committed, period) if p + sink <= committed] or [0]
        return {*range(whole[-1], whole[-1] + sink)} & {*range(committed)}

    for number in range(14):
        history = sinks(number) | {*range(max(0, number + 1 - window), number)}
        resident = sinks(number + 1) | {*range(max(0, number + 1 - window), number + 1)}
        step(rollout, 1, sorted(history), sorted(resident))


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_pinned_chunks(chunk, block):
    """Kept and seen for ever, wherever they lie."""
    rollout = start(PinnedChunks(SlidingWindow(3, 1), (2, 5, 6)), chunk, block)
    for number in range(14):
        pinned = {c for c in (2, 5, 6) if c <= number}
        history = {c for c in TG.visible(number, 1) if c != number} | pinned - {number}
        step(rollout, 1, sorted(history), sorted({*TG.resident(number + 1), *pinned}))


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_partial_commit(chunk, block):
    """The first chunk of three is history, the rest as if it had only been denoised."""
    rollout = start(PartialCommit(SlidingWindow(5, 1), 1), chunk, block, span=3)
    window = Window(5, 1)
    for number in range(12):
        free = rollout.cache.num_free_blocks
        history = [c for c in window.visible(number, 3) if c < number]
        rollout.forward(3, visible=[*history, number, number + 1, number + 2], commit=True)
        rollout.committed = number + 1
        rollout.check_blocks(window.resident(number + 1))
        assert rollout.adapter.completed_chunks == number + 1
    assert rollout.cache.num_free_blocks <= free + 1


def test_a_partial_commit_keeps_what_its_span_saw():
    """A span of two that no longer fits begins anew: it sees nothing, and its commit keeps nothing,
    though the one chunk that is committed would have fitted.
    """
    rollout = start(PartialCommit(HardReset(3), 1), span=2)
    resident: list[int] = []
    for number in range(9):
        resident = resident if len(resident) + 2 <= 3 else []
        rollout.forward(2, visible=[*resident, number, number + 1], commit=True)
        rollout.committed = number + 1
        resident = [*resident, number]
        rollout.check_blocks(resident)


def test_branches_agree_under_a_partial_commit():
    rollout = start(PartialCommit(SlidingWindow(5, 1), 2), span=3, local_branches=2)
    for frame in range(0, 8, 2):
        play(rollout.session, [frame, frame + 1, frame + 2], span=3, branches=2)
    assert [rollout.session.adapter(b).completed_chunks for b in (0, 1)] == [8, 8]


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_layers_with_windows_of_their_own(chunk, block):
    """Layer 0 sees 2 chunks, layer 1 sees 5 and a sink, layer 2 what layer 0 sees."""
    narrow, wide = Window(2, 0), Window(5, 1)
    policy = PerLayer((SlidingWindow(*narrow), SlidingWindow(*wide)), (0, 1, 0))
    rollout = start(policy, chunk, block, layers=3, window=2)
    assert policy.capacity_chunks == 6
    for number in range(10):
        for commit in (False, True):
            with rollout.open(commit=commit) as fwd:
                for layer, window in enumerate((narrow, wide, narrow)):
                    out = rollout.write(fwd, layer)
                    seen = rollout.tokens(window.visible(number, 1))
                    mean = rollout.values(seen, layer).double().mean(0).float()
                    torch.testing.assert_close(out, mean.expand_as(out), atol=2e-5, rtol=1e-5)
                    assert fwd.layer_plan(layer).kv_len == len(seen)
        rollout.committed += 1
        rollout.check_blocks(wide.resident(number + 1))
    with pytest.raises(ValueError, match="`layer` must be from 0 to 2, got 3"), rollout.open() as f:
        f.layer_plan(3)


def test_groups_of_layers_are_what_a_policy_says_they_are():
    """Of a policy of one's own, `layers` was checked, and then every layer saw the first view."""

    class Mine(SlidingWindow):
        layers = (0, 1)

        def views(self):
            return (SlidingWindow(1), self)

    rollout = start(Mine(4), layers=2, window=4)
    assert rollout.cache.view_of_layer == [0, 1]


# -- retrieval ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("branches", [1, 2])
def test_retrieved_chunks(chunk, block, branches):
    """Resident and long gone ones, beside the window, until told otherwise."""
    policy = Retrieval(SlidingWindow(3, 1), 2)
    first = start(policy, chunk, block, local_branches=branches)
    others = [Rollout(first.session, first.policy, branch=1, tag=0.5)] * (branches - 1)
    shown: set[int] = set()
    for number in range(14):
        if number in (4, 6, 9, 11):
            shown = {4: {1, 2}, 6: {1, 4}, 9: {7}, 11: set()}[number]
            first.session.retrieve(sorted(shown))
        visible = sorted({*TG.visible(number, 1), *shown})
        for rollout in (first, *others):
            rollout.forward(visible=visible, noise=1, action_len=2)
            rollout.forward(visible=visible, commit=True)
            first.cache.check_integrity()
    for rollout in (first, *others):
        rollout.check_blocks(TG.resident(14))
    assert first.cache.num_free_blocks == 150 - branches * len(first.live_blocks(TG.resident(14)))


def test_a_retrieved_chunk_that_is_resident_is_pinned():
    rollout = start(Retrieval(SlidingWindow(3, 0), 1))
    for _ in range(3):
        rollout.forward(commit=True)
    rollout.session.retrieve([1])
    for number in range(3, 9):
        step(
            rollout, 1, [1, *range(number - 2, number)], sorted({1, *range(number - 2, number + 1)})
        )
    rollout.session.retrieve([])
    step(rollout, 1, [7, 8], [7, 8, 9])


def test_retrieval_lives_through_everything_else():
    policy = Retrieval(SlidingWindow(3, 1), 2)
    rollout = start(policy, session_capacity=2)
    for number in range(9):
        rollout.forward(commit=True, visible=TG.visible(number, 1))
    session, cache = rollout.session, rollout.cache
    session.retrieve([2, 7])
    visible = [0, 2, 7, 8, 9]
    rollout.forward(visible=visible)
    session.swap_out()
    cache.check_integrity()
    assert cache.num_free_blocks == 150
    session.swap_in()
    rollout.forward(visible=visible)
    fork = Rollout(session.fork("b"), rollout.policy)
    fork.committed = 9
    cache.check_integrity()
    session.rollback(1)
    rollout.committed = 8
    rollout.forward(visible=[0, 2, 6, 7, 8])
    fork.forward(visible=visible, commit=True)
    fork.check_blocks([0, 7, 8, 9])
    with pytest.raises(LifecycleError, match=r"must see chunks \[5\], which have left"):
        session.rollback(1)
    session.rollback(8)  # behind both retrieved chunks
    assert session.adapter().retrieved == ()
    cache.check_integrity()
    session.close()
    fork.session.close()
    assert cache.num_free_blocks == 150


@pytest.mark.parametrize("around", [False, True])
def test_the_archive_has_a_bound(around):
    """The oldest go, but for what is shown; a rollout of days fits into host memory."""
    policy = Retrieval(SlidingWindow(2), 2, archive_chunks=3)
    rollout = start(PinnedChunks(policy, ()) if around else policy, session_capacity=2)
    session = rollout.session
    for number in range(20):
        if number == 4:
            session.retrieve([0, 1])
        shown = [0, 1] if number >= 4 else []
        rollout.forward(commit=True, visible=sorted({*shown, max(0, number - 1), number}))
    assert sorted(rollout.adapter.archive) == [15, 16, 17]
    session.retrieve([1, 16])  # one is shown still, one is kept
    rollout.forward(visible=[1, 16, 19, 20])
    fork = Rollout(session.fork("b"), rollout.policy)
    fork.committed = 20
    session.rollback(1)
    rollout.committed = 19
    rollout.forward(visible=[1, 16, 18, 19])
    session.retrieve([])
    before = state(rollout.cache)
    message = "committed chunks, from 0 to 18, resident or of the last 3 that left, got 1"
    with pytest.raises(ValueError, match=message):
        session.retrieve([1])
    assert state(rollout.cache) == before
    fork.forward(visible=[1, 16, 19, 20])
    rollout.cache.check_integrity()


def test_an_archive_is_not_negative():
    with pytest.raises(ValueError, match="`archive_chunks` must be at least 0, got -1"):
        Retrieval(SlidingWindow(2), 1, -1)


def test_retrieval_refuses():
    rollout = start(Retrieval(SlidingWindow(3, 1), 2), local_branches=2)
    play(rollout.session, range(8), branches=2)
    session, cache = rollout.session, rollout.cache
    before = state(cache)
    with pytest.raises(ValueError, match="`chunks` must name at most 2 chunks"):
        session.retrieve([1, 2, 3])
    for chunk in (8, -1):
        message = f"`chunks` must name committed chunks, from 0 to 7, got {chunk}"
        with pytest.raises(ValueError, match=message):
            session.retrieve([1, chunk])
    hold = cache.begin_request("hold")
    cache.allocate_token_slots(hold, 4 * (cache.num_free_blocks - 1))
    full = state(cache)
    with pytest.raises(PoolExhaustedError, match="1 free blocks are too few for the 2 of the chun"):
        session.retrieve([1])
    assert state(cache) == full
    cache.end_request(hold)
    assert state(cache) == before
    with pytest.raises(ValueError, match="`chunks` must name at most 0 chunks"):
        start(None).session.retrieve([0])


def test_a_refused_retrieval_keeps_what_a_fork_shares():
    """Blocks of a fetched chunk that a fork owns as well are not freed by giving it back: counted
    in, the refusal came after the chunk had been given up, whose blocks then had other owners.
    """
    rollout = start(Retrieval(SlidingWindow(3), 1), session_capacity=2)
    play(rollout.session, range(8))
    session, cache = rollout.session, rollout.cache
    session.retrieve([1])
    fork = session.fork("b")
    hold = cache.begin_request("hold")
    cache.allocate_token_slots(hold, 4 * cache.num_free_blocks)
    (out,) = forward(session, [8], commit=False)
    before = state(cache)
    with pytest.raises(PoolExhaustedError, match="0 free blocks are too few for the 1 of the"):
        session.retrieve([2])
    assert state(cache) == before
    assert torch.equal(forward(session, [8], commit=False)[0], out)
    cache.check_integrity()
    fork.close()
    session.retrieve([2])  # in the blocks of chunk 1, which are its own now
    cache.check_integrity()


def test_books_that_are_wrong_are_noticed():
    """By the recount, and by a plan before it reads blocks of others."""
    rollout = start(Retrieval(SlidingWindow(3), 1))
    play(rollout.session, range(8))
    session, cache, adapter = rollout.session, rollout.cache, rollout.adapter
    resident = adapter.resident
    for wrong in ((range(4, 8),), (range(6, 8),), (range(5, 9),)):
        adapter.resident = wrong
        with pytest.raises(ChunkAttnError, match="'a::branch0' .* resident chunks"):
            cache.check_integrity()
    adapter.resident = resident
    session.retrieve([1])
    cache.check_integrity()
    cache.end_request(session.requests()[1])
    with pytest.raises(ChunkAttnError, match="'a::branch0::chunk1' has ended"):
        cache.check_integrity()
    with pytest.raises(ChunkAttnError, match="a plan must lie in owned blocks, got"):
        forward(session, [8])
    assert session.is_idle


@pytest.mark.parametrize("fails", ["kept", "committed", "archive"])
def test_a_commit_that_fails_commits_nothing(fails, monkeypatch):
    """Code of the policy's author, or host memory that has run out; then the same frame again."""

    def fail(*_):
        raise MemoryError(fails)

    rollout = start(Retrieval(SlidingWindow(2), 1))
    for number in range(2):
        rollout.forward(commit=True, visible=[*range(number + 1)])
    before = state(rollout.cache)["requests"], rollout.adapter.resident
    with monkeypatch.context() as patch:
        if fails == "archive":
            patch.setattr(chunkattn.requests, "HostCopy", fail)
        else:
            patch.setattr(Retrieval, fails, fail)
        with pytest.raises(MemoryError, match=fails), rollout.open(commit=True) as fwd:
            rollout.write(fwd)
    assert (state(rollout.cache)["requests"], rollout.adapter.resident) == before
    assert rollout.adapter.archive == {}
    rollout.check_blocks([0, 1])
    rollout.forward(commit=True, visible=[1, 2])
    rollout.check_blocks([1, 2])


# -- policies around policies -------------------------------------------------------------------
RETRIEVAL = Retrieval(SlidingWindow(3), 2)


@pytest.mark.parametrize(
    ("policy", "most", "visible"),
    [
        (PinnedChunks(RETRIEVAL, (0,)), 2, [0, 1, 3, 6, 7, 8]),
        (PartialCommit(RETRIEVAL, 1), 2, [1, 3, 6, 7, 8]),
        (Retrieval(RETRIEVAL, 1), 3, [1, 3, 6, 7, 8]),
    ],
    ids=lambda p: type(p).__name__,
)
def test_a_retrieval_inside_another_policy(policy, most, visible):
    """It retrieves nonetheless."""
    assert policy.retrieved_chunks == most
    rollout = start(policy)
    for number in range(8):
        recent = {*range(max(0, number - 2), number + 1)}
        rollout.forward(commit=True, visible=sorted(recent | {*visible} & {0}))
    rollout.session.retrieve([1, 3])
    rollout.forward(visible=visible)


@pytest.mark.parametrize(
    "window",
    [
        PartialCommit(SlidingWindow(4), 1),
        PinnedChunks(PartialCommit(SlidingWindow(4), 3), (7,)),
        Retrieval(SlidingWindow(4), 2),
    ],
    ids=str,
)
def test_layers_commit_and_retrieve_alike(window):
    """Around `PerLayer` it has a meaning, and works; inside it was dropped in silence."""
    message = "`windows` must neither commit in part nor retrieve.*around PerLayer.*, got"
    with pytest.raises(ValueError, match=message):
        PerLayer((SlidingWindow(4), window), (0, 1))
    PerLayer((PartialCommit(SlidingWindow(4), 4),), (0,))  # commits whatever it takes
    policy = PartialCommit(Retrieval(PerLayer((SlidingWindow(4), SlidingWindow(3)), (0, 1)), 1), 1)
    assert policy.committed(3) == policy.retrieved_chunks == 1
    rollout = start(policy, layers=2, span=3)
    play(rollout.session, range(9), span=3)
    assert rollout.adapter.completed_chunks == 3


# -- the rest of a session's life under a policy ------------------------------------------------
def test_hard_reset_goes_back_no_further_than_its_last_reset():
    rollout = start(HardReset(4))
    for _ in range(6):  # 0 1 2 3 | 4 5
        rollout.forward(
            commit=True, visible=[*range(4 * (rollout.committed // 4), rollout.committed + 1)]
        )
    with pytest.raises(
        LifecycleError, match="can go back to chunk 5, where a chunk has left, got 4"
    ):
        rollout.session.rollback(2)
    rollout.session.rollback(1)
    rollout.committed = 5
    rollout.forward(visible=[4, 5])
    rollout.session.rollback(5)
    rollout.committed = 0
    rollout.forward(commit=True, visible=[0])


POLICIES = [
    SlidingWindow(3, 1),
    FloatingSink(3, 1, 4),
    PinnedChunks(SlidingWindow(3, 1), (2, 5)),
    Retrieval(SlidingWindow(3, 1), 2),
    HardReset(5),
]


@pytest.mark.parametrize(("chunk", "block"), [(4, 4), (4, 16), (6, 4)])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_after_each_change_as_a_fresh_rollout(chunk, block, policy):
    """Rollback, fork and swap, bit for bit."""
    rollout = start(policy, chunk, block, session_capacity=2)
    session = rollout.session
    fresh = start(policy, chunk, block).cache
    fresh._sessions["a"].close()
    play(session, range(8))
    session.rollback(1)
    play(session, [70])
    child = session.fork("child")
    play(child, [80])
    session.swap_out()
    session.swap_in()
    assert_as_fresh(session, [*range(7), 70], fresh)
    assert_as_fresh(child, [*range(7), 70, 80], fresh)


def test_a_policy_of_ones_own():
    """Every second chunk, the last one, and whatever else is short."""

    @dataclass(frozen=True)
    class EveryOther(Policy):
        capacity_chunks: int = 8
        positional = True

        def visible(self, resident, span):
            return runs({*range(0, span.start, 2), *range(max(0, span.start - 1), span.start)})

        def kept(self, resident, span):
            return self.visible(resident, range(span.stop, span.stop))

    rollout = start(EveryOther())
    for number in range(13):
        history = sorted({*range(0, number, 2), *range(max(0, number - 1), number)})
        resident = sorted({*range(0, number + 1, 2), number})
        step(rollout, 1, history, resident)


def test_a_policy_that_shows_what_has_left_is_refused():
    @dataclass(frozen=True)
    class Forgetful(Policy):
        capacity_chunks: int = 2

        def visible(self, resident, span):
            return (range(span.start),) if span.start else ()

        def kept(self, resident, span):
            return (range(span.stop - 1, span.stop),)

    rollout = start(Forgetful())
    play(rollout.session, range(2))
    before = state(rollout.cache)
    with pytest.raises(LifecycleError, match=r"must see chunks \[0\], which have left"):
        forward(rollout.session, [2])
    assert state(rollout.cache) == before


@pytest.mark.parametrize(
    "policy",
    [
        SlidingWindow(2),
        Retrieval(HardReset(2), 1),
        PerLayer((SlidingWindow(5), FloatingSink(2, 1, 4)), (1,)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_a_span_is_no_longer_than_the_shortest_window(policy):
    """Whatever the config's window is, 9 chunks here."""
    rollout = start(policy)
    before = state(rollout.cache)
    message = "`seq_len` must be a positive multiple of chunk_size 4, at most 2 chunks, got 12"
    with pytest.raises(ValueError, match=message):
        rollout.open(3, commit=True)
    assert state(rollout.cache) == before
    rollout.forward(2, commit=True, visible=[0, 1])


def test_a_plan_that_fails_gives_its_blocks_back():
    """A policy that sees more than it says: the plan has no room. Nor is half of it used again."""

    @dataclass(frozen=True)
    class Modest(Policy):
        capacity_chunks: int = 9

        def visible(self, resident, span):
            return resident if len(span) > 1 else ()

        def kept(self, resident, span):
            return (range(span.stop),)

        def most_visible(self, num_chunks):
            return 3

    layers = PerLayer((SlidingWindow(9), Modest()), (0, 1))
    rollout = start(layers, layers=2, scratch=False)
    for number in range(3):
        with rollout.open(commit=True) as fwd:
            rollout.write(fwd, 0)
            rollout.write(fwd, 1)
        rollout.committed = number + 1

    def denoise() -> torch.Tensor:
        with rollout.open() as fwd:
            return rollout.write(fwd, 0)

    out = denoise()
    before = state(rollout.cache)
    with pytest.raises(ValueError, match="could not broadcast"):
        rollout.open(2, commit=True).__enter__()
    assert rollout.session.is_idle
    assert state(rollout.cache) == before
    assert torch.equal(denoise(), out)


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("window", TypeError, "`policy` must be a Policy or None, got str"),
        (SlidingWindow(1, 1), ValueError, "`policy` must have windows that hold the span of 2"),
        (HardReset(1), ValueError, "`policy` must have windows that hold the span of 2"),
        (
            PinnedChunks(SlidingWindow(1), (7,)),
            ValueError,
            "`policy` must have windows that hold the span of 2",
        ),
        (
            Retrieval(PerLayer((SlidingWindow(4), FloatingSink(1, 1, 9)), (0,)), 1),
            ValueError,
            "`policy` must have windows that hold the span of 2",
        ),
        (
            PerLayer((HardReset(3),), (0, 0)),
            ValueError,
            "`policy` must name a window for each of 1",
        ),
        (PerLayer((HardReset(3),), (1,)), ValueError, "`policy` must name a window for each of 1"),
        (
            PinnedChunks(PerLayer((HardReset(3),), (0, 0)), (7,)),
            ValueError,
            "`policy` must name a window for each of 1",
        ),
    ],
)
def test_the_cache_refuses_a_policy(policy, error, message):
    with pytest.raises(error, match=message):
        start(policy, span=2)


@pytest.mark.parametrize("sink", [0, 4, -1])
def test_a_floating_sink_fits_its_window_and_period(sink):
    with pytest.raises(ValueError, match=f"`sink_chunks` must be from 1 to .*, got {sink}"):
        FloatingSink(3, sink, 9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), "`window_chunks` must be at least 1, got 0"),
        (lambda: SlidingWindow(3, -1), "`sink_chunks` must be at least 0, got -1"),
        (lambda: HardReset(0), "`window_chunks` must be at least 1, got 0"),
        (lambda: PinnedChunks(HardReset(3), (2, -1)), "`pinned` must be at least 0, got -1"),
        (lambda: PartialCommit(HardReset(3), 0), "`num_chunks` must be at least 1, got 0"),
        (lambda: PartialCommit(HardReset(3), -1), "`num_chunks` must be at least 1, got -1"),
        (lambda: Retrieval(HardReset(3), -1), "`num_chunks` must be at least 0, got -1"),
        (lambda: PerLayer((), ()), r"`windows` must name at least one policy, got \(\)"),
    ],
)
def test_a_policy_refuses_its_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
def test_the_floor_is_enough(policy, chunk, block):
    """The smallest pool that is accepted plays for ever, whatever is kept."""

    def cache(usable):
        window = Window(3, 1)
        return make_cache(chunk, block, window, usable=usable, policy_object=policy, device=None)

    def accepted(usable):
        try:
            cache(usable)
        except ValueError:
            return False
        return True

    session = cache(next(n for n in range(1, 99) if accepted(n))).open_session("a")
    for _ in range(30):
        with session.forward(seq_len=chunk, commit=True) as fwd:
            fwd.mark_layer_written(0)


# -- the arithmetic of runs ---------------------------------------------------------------------
def test_runs():
    assert runs([5, 1, 2, 2, 9]) == (range(1, 3), range(5, 6), range(9, 10))
    assert runs([]) == ()
    assert merged([range(0, 2), range(4, 3), range(2, 4), range(6, 7)]) == (
        range(0, 4),
        range(6, 7),
    )
    assert common([range(0, 5), range(8, 9)], (range(3, 9),)) == (range(3, 5), range(8, 9))
    assert count((range(3), range(5, 7))) == 5


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 3], [], [1], [2, 3]])
@pytest.mark.parametrize("start", [0, 3])
def test_gaps_are_the_whole_blocks_without_a_kept_token(chunk, block, kept, start):
    end = start + 4 * chunk
    gaps = whole_block_gaps(runs(kept), start, end, chunk_size=chunk, block_size=block)
    live = {t for t in range(start)} | {
        start + t for c in kept for t in range(c * chunk, (c + 1) * chunk)
    }
    dead = [b for b in range(end // block) if not live & {*range(b * block, (b + 1) * block)}]
    assert [t for gap in gaps for t in gap] == [
        t for b in dead for t in range(b * block, (b + 1) * block)
    ]
