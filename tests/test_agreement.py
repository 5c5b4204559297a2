"""Two processes over gloo: they size the same pools; a plan that differs is an error on both."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chunkattn import Session
from chunkattn.agreement import agreed_available_bytes, check_same_plan, plan_digest
from tests.helpers import processes
from tests.helpers.rollout import make_cache, page_bytes

LIMIT = timedelta(seconds=2)


def run_forward(session: Session, *, commit: bool = True, by_hand: bool = False) -> str:
    """One forward without tensors; how it ended."""
    try:
        with session.forward(seq_len=4, commit=commit) as fwd:
            if by_hand:
                check_same_plan(fwd)
            fwd.mark_layer_written(0)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def two_ranks(rank: int) -> dict[str, Any]:
    """What each process has found."""
    free = (30 + 5 * rank) * page_bytes(4)
    available = agreed_available_bytes(free)
    found: dict[str, Any] = {"ended": []}
    for group in (None, dist.group.WORLD):
        cache = make_cache(available_bytes=available, device=None, debug_group=group)
        session = cache.open_session("a")
        for commit in (False, True) * 6:
            found["ended"].append(run_forward(session, commit=commit, by_hand=group is None))
        if rank == 1:
            cache.allocate_chunk(cache.begin_request("somebody else's"))
        found[group is None] = run_forward(session, by_hand=group is None)
        found["ended"].append(session.adapter().completed_chunks)
        cache.check_integrity()
    found["blocks"] = cache.num_blocks
    # The first rank has no blocks, then the second has none, then the second does not come.
    for index in range(2):
        if rank == index:
            greedy = cache.begin_request("greedy")
            cache.allocate_token_slots(greedy, 4 * cache.num_free_blocks)
        found["exhausted", index] = run_forward(session), cache.num_free_blocks
        if rank == index:
            cache.end_request(greedy)
    cache.debug_group = dist.new_group(timeout=LIMIT)
    if rank == 0:
        started = time.monotonic()
        found["alone"] = run_forward(session), cache.num_free_blocks
        found["seconds"] = time.monotonic() - started
    dist.barrier()
    cache.check_integrity()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    return processes.run(two_ranks, tmp_path_factory.mktemp("ranks"), seconds=120)


def test_ranks_size_the_same_pool(ranks):
    """G6: the smaller memory decides."""
    assert [rank["blocks"] for rank in ranks] == [30, 30]


def test_a_plan_that_differs_is_an_error_on_every_rank(ranks):
    """By hand, and in the cache's debug mode, which gives the blocks back."""
    message = "another plan than rank 0's on ranks [1] (session 'a', branch 0, chunk 6)"
    for rank in ranks:
        assert rank["ended"] == 2 * [*["ok"] * 12, 6]
        for by_hand in (True, False):
            assert rank[by_hand].startswith("ChunkAttnError: ")
            assert message in rank[by_hand]


@pytest.mark.parametrize("index", (0, 1))
def test_a_rank_without_a_plan_is_an_error_on_every_rank(ranks, index):
    ended, free = ranks[index]["exhausted", index]
    assert ended.startswith("PoolExhaustedError: ")
    assert free == 0
    ended, free = ranks[1 - index]["exhausted", index]
    assert "another plan than rank 0's on ranks [1]" in ended
    assert free > 0


def test_a_rank_that_does_not_come_is_an_error_in_time(ranks):
    ended, free = ranks[0]["alone"]
    assert ended.startswith("RuntimeError: ")
    assert free == ranks[0]["exhausted", 1][1]  # what was allocated is given back
    assert 1 < ranks[0]["seconds"] / LIMIT.total_seconds() < 5


def test_a_digest_says_everything():
    cache = make_cache(session_capacity=2)
    session = cache.open_session("a")

    def digest(**more) -> bytes:
        with session.forward(seq_len=4, **more) as fwd:
            query = torch.zeros(4 + fwd.action_len, 1, 8)
            fwd.write_attend(0, query, *rows, *action[fwd.action_len])
            return plan_digest(fwd)

    rows = [torch.zeros(4, 1, 8)] * 2
    action = {0: (), 1: [torch.zeros(1, 1, 8)] * 2}
    first = digest()
    assert digest() == first
    assert len({first, digest(action_len=1), digest(commit=True), digest()}) == 4


def test_negative_memory_is_refused():
    with pytest.raises(ValueError, match="`available_bytes` must not be negative, got -1"):
        agreed_available_bytes(-1)
