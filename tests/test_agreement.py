"""Two processes over gloo: they size the same pools; a plan that differs is an error on both."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chunkattn.agreement import agreed_available_bytes, plan_digest
from tests.helpers.rollout import make_cache, page_bytes

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120


def rank_program(rank: int, store: str) -> None:
    """What each process runs; prints a line for each step."""
    import datetime

    import torch.distributed as dist

    from chunkattn import ChunkAttnError
    from chunkattn.agreement import check_same_plan

    limit = datetime.timedelta(seconds=SECONDS // 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    free = (30 + 5 * rank) * page_bytes(4)
    cache = make_cache(available_bytes=agreed_available_bytes(free), device=None)
    print("blocks", cache.num_blocks)
    session = cache.open_session("a")

    def forward(commit: bool) -> None:
        with session.forward(seq_len=4, commit=commit) as fwd:
            check_same_plan(fwd)
            fwd.mark_layer_written(0)

    for _ in range(6):
        forward(False)
        forward(True)
    print("agreed")
    if rank == 1:
        cache.allocate_chunk(cache.begin_request("somebody else's"))
    try:
        forward(True)
    except ChunkAttnError as error:
        print("refused", error)
    print("chunks", session.adapter().completed_chunks)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "tests.test_agreement"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, err
        blocks, agreed, refused, chunks = out.splitlines()[-4:]
        assert (blocks, agreed, chunks) == ("blocks 30", "agreed", "chunks 6")
        assert "another plan than rank 0's on ranks [1] (session 'a', branch 0, chunk 6)" in refused


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


if __name__ == "__main__":
    rank_program(int(sys.argv[1]), sys.argv[2])
