"""Two processes: results equal those of one, and a rank that fails leaves no other hanging.

gloo on the CPU. The functions that the ranks run are those without ``test`` in their name.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import chunkattn
from chunkattn import functional
from chunkattn.presets import get_preset
from chunkattn.testing import AttentionCase, judge, make_case
from tests.helpers import processes
from tests.helpers.machine import needs_vllm_omni
from tests.helpers.rollout import HEAD_SIZE, Window, make_cache

POLICY = Window(sink=1, window=3)
HEADS, TOKENS, ACTION, LAYERS, SPANS = 4, 8, 2, 2, 6  # blocks and chunks of 4 tokens


# -- sequence parallel -----------------------------------------------------------------------------
def spans() -> list[tuple[bool, torch.Tensor]]:
    """Q, K and V, ``(3, tokens, heads, head_size)``, of a denoise and a commit forward a span."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(commit, TOKENS + (0 if commit else ACTION)) for commit in (False, True)] * SPANS
    return [(c, torch.randn(3, n, HEADS, HEAD_SIZE, generator=generator)) for c, n in lengths]


def play(heads: int, split: Callable, join: Callable) -> dict[str, Any]:
    """A rollout in which ``split`` makes a rank's rows out of all, and ``join`` undoes it."""
    cache = make_cache(
        policy=POLICY, span=2, layers=LAYERS, heads=heads, max_scratch_tokens_per_branch=ACTION
    )
    session, outs, plans = cache.open_session("a"), [], []
    for commit, rows in spans():
        action = rows.shape[1] - TOKENS
        with session.forward(seq_len=TOKENS, commit=commit, action_len=action) as fwd:
            plans.append((fwd.block_table.tolist(), fwd.slot_mapping.tolist(), fwd.kv_len))
            for layer in range(LAYERS):
                query, key, value = (split(part * (layer + 1)) for part in rows)
                extra = (key[TOKENS:], value[TOKENS:]) if action else (None, None)
                out = fwd.write_attend(layer, query, key[:TOKENS], value[:TOKENS], *extra)
                outs.append(join(out))
    cache.check_integrity()
    return {"outs": outs, "plans": plans, "free": cache.num_free_blocks, "bytes": pool_bytes(cache)}


def pool_bytes(cache: chunkattn.ARDiffusionKVCache) -> int:
    return sum(pool.nbytes for pool in cache.pools)


def exchange(rows: torch.Tensor, give: int, take: int) -> torch.Tensor:
    """One all-to-all: split dimension ``give`` among the ranks, gather dimension ``take``."""
    parts = torch.stack(rows.chunk(dist.get_world_size(), give))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(received.unbind(), take)


def ulysses(rank: int) -> dict[str, Any]:
    """Each rank owns half of the tokens of all heads; around attention, all tokens of half."""

    def split(rows: torch.Tensor) -> torch.Tensor:
        own = rows.chunk(2)[rank]
        return exchange(own, give=1, take=0)

    def join(out: torch.Tensor) -> torch.Tensor:
        own = exchange(out, give=0, take=1)
        everyone = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(everyone, own)
        return torch.cat(everyone)

    return play(HEADS // 2, split, join)


# -- context parallel ------------------------------------------------------------------------------
CONTEXTS: dict[str, dict[str, Any]] = {
    "even": {"seq_lens": [61, 30], "query_lens": [5, 3]},
    "one rank sees nothing": {"seq_lens": [4, 0], "query_lens": [3, 2], "block_size": 4},
    "action rows": {"seq_lens": [33], "query_lens": [5], "current_lens": [3]},
    "bf16": {"seq_lens": [640], "query_lens": [9], "dtype": torch.bfloat16, "block_size": 64},
}


def share(case: AttentionCase, rank: int) -> AttentionCase:
    """Every other block of each sequence, in pools that hold no others; current rows on rank 0."""
    block_size = case.key_pool.shape[1]
    counts = (-(-case.seq_lens // block_size)).tolist()
    tables, lens, kept = [], [], [0]
    for seq, count in enumerate(counts):
        own = list(range(rank, count, 2))
        rest = int(case.seq_lens[seq]) - (count - 1) * block_size
        lens.append(sum(rest if i == count - 1 else block_size for i in own))
        tables.append(range(len(kept), len(kept) + len(own)))
        kept += [int(case.block_table[seq, i]) for i in own]
    table = torch.zeros(len(counts), max(1, *map(len, tables)), dtype=torch.int32)
    for seq, ids in enumerate(tables):
        table[seq, : len(ids)] = torch.tensor(list(ids), dtype=torch.int32)
    names = ("key_current", "value_current", "current_start_loc")
    return dataclasses.replace(
        case,
        key_pool=case.key_pool[kept].clone(),
        value_pool=case.value_pool[kept].clone(),
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        buffers=(),
        **(dict.fromkeys(names) if rank else {}),
    )


def context_parallel(rank: int) -> dict[str, Any]:
    """Each rank attends over its blocks; one all-gather of out and lse, side by side in float32."""
    found = {}
    for name, options in CONTEXTS.items():
        own = share(make_case(**options), rank)
        out, lse = functional.paged_window_attention(**own.arguments(), return_lse=True)
        packed = torch.cat([out.float(), lse.unsqueeze(-1)], -1)
        gathered = torch.empty(2, *packed.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), packed)
        states = gathered[..., :-1].to(out.dtype), gathered[..., -1]
        found[name] = chunkattn.merge_states(*states)
    return found


def sequence_and_context(rank: int) -> dict[str, Any]:
    return {"ulysses": ulysses(rank), "context": context_parallel(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks has found; one start of two processes for all of it."""
    return processes.run(sequence_and_context, tmp_path_factory.mktemp("ranks"))


def test_ulysses(ranks):
    """Tokens become heads and back: results and plans of one process, half of the pool a rank."""
    alone = play(HEADS, lambda rows: rows, lambda out: out)
    for rank in ranks:
        found = rank["ulysses"]
        assert found["plans"] == alone["plans"]
        assert found["free"] == alone["free"]
        assert found["bytes"] * 2 == alone["bytes"]
        for own, expected in zip(found["outs"], alone["outs"], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_parallel(ranks, name):
    """Merged by their lse, the parts are the whole window: held to the same error as one call."""
    case = make_case(**CONTEXTS[name])
    for rank in ranks:
        judge(case, *rank["context"][name])
    for mine, theirs in zip(*(rank["context"][name] for rank in ranks), strict=True):
        assert torch.equal(mine, theirs)


# -- merge_states ----------------------------------------------------------------------------------
def test_merge_of_empty_states():
    """C7: two empties give 0 and -inf, an empty one counts for nothing, whatever its out holds."""
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    lse[0, 0], lse[:, 1] = -math.inf, -math.inf
    out[0, 0], out[:, 1] = math.nan, math.inf
    merged, merged_lse = chunkattn.merge_states(out, lse)
    assert torch.equal(merged[0], out[1, 0])
    assert torch.equal(merged_lse[0], lse[1, 0])
    assert (merged[1] == 0).all()
    assert (merged_lse[1] == -math.inf).all()
    weights = torch.softmax(lse[:, 2], 0).unsqueeze(-1)
    torch.testing.assert_close(merged[2], (weights * out[:, 2]).sum(0))


@pytest.mark.parametrize(
    "outs, lses, message",
    [
        ([], [], r"`lses` must have one state for each of `outs`, 0, got 0"),
        ([(3, 2, 8)], [], r"`lses` must have one state for each of `outs`, 1, got 0"),
        ([(3, 2, 8), (4, 2, 8)], [(3, 2)] * 2, r"`outs\[1\]` must have shape \(3, 2, 8\)"),
        ([(3, 2, 8)], [(2, 3)], r"`lses\[0\]` must have shape \(3, 2\)"),
    ],
)
def test_states_that_do_not_fit(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        chunkattn.merge_states([torch.zeros(s) for s in outs], [torch.zeros(s) for s in lses])


# -- a rank that fails -----------------------------------------------------------------------------
def one_rank_fails(rank: int) -> dict[str, Any]:
    """Rank 1 fails between two layers of a commit and ends; what each of the two then has."""
    session = make_cache(layers=LAYERS, heads=2).open_session("a")
    free = session.cache.num_free_blocks
    rows = torch.randn(3, 4, 2, HEAD_SIZE)
    started, error = time.monotonic(), None
    try:
        with session.forward(seq_len=4, commit=True) as fwd:
            for layer in range(LAYERS):
                if rank == layer == 1:
                    raise RuntimeError("rank 1 has failed")
                dist.all_reduce(fwd.write_attend(layer, *rows))
    except RuntimeError as raised:
        error = str(raised)
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "committed": session.adapter().completed_chunks,
        "leaked": free - session.cache.num_free_blocks,
    }


def test_a_rank_that_fails(tmp_path):
    """The other gets an error within its time limit, not a hang; both forwards are undone."""
    survivor, failed = processes.run(one_rank_fails, tmp_path)
    assert failed["error"] == "rank 1 has failed"
    assert survivor["error"] not in (None, failed["error"])
    assert survivor["seconds"] < processes.COLLECTIVE.total_seconds() + 5
    for rank in (survivor, failed):
        assert rank["committed"] == rank["leaked"] == 0


# -- the page about it -----------------------------------------------------------------------------
def test_figures_of_the_page(capsys):
    """The example of docs/scaling.md prints what its comments say, and so does the text above."""
    page = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(example, "docs/scaling.md", "exec"), {})
    printed = capsys.readouterr().out.split()
    assert printed == re.findall(r"^print\(.*# ([\d.]+)$", example, re.MULTILINE)
    assert f"holds {printed[0]} GiB" in page
    assert f"v2, {printed[4]} GiB" in page
    preset = get_preset("dreamzero_14b")
    rows = 2 * preset.frame_tokens + preset.action_tokens + preset.state_tokens
    size, ranks = rows * preset.heads * preset.head_size * 2, 2  # bytes of Q in bfloat16
    all_reduce = 2 * (ranks - 1) / ranks * size
    all_to_all = 4 * size / ranks * (ranks - 1) / ranks
    all_gather = rows * preset.heads * (preset.head_size + 1) * 4 * (ranks - 1)
    found = re.findall(r"\| ([\d.]+) MB: (\S+)", page)
    assert [(float(n), name) for n, name in found] == [
        (round(all_reduce / 1e6, 1), "all-reduce"),
        (round(all_to_all / 1e6, 1), "all-to-all"),
        (round(all_gather / 1e6, 1), "all-gather"),
    ]


# -- tensor and guidance parallel, in the real model -----------------------------------------------


def dreamzero(rank: int) -> dict[str, Any]:
    from tests.helpers.dreamzero import split_model

    return split_model(rank)


@pytest.mark.slow
@needs_vllm_omni
def test_dreamzero(tmp_path: Path):
    """vllm-omni's transformer, its heads split by vLLM's own layers, then one branch a rank: the
    outputs of one process that runs all heads of both branches.
    """
    from tests.helpers.dreamzero import GEOMETRY, difference, largest

    ranks = processes.run(dreamzero, tmp_path)
    for found in ranks:
        whole, tensor, cfg = (found[name] for name in ("whole", "tensor", "cfg"))
        assert 1 < largest(whole) < 100
        assert found["heads"] * 2 == GEOMETRY.heads
        assert difference(tensor, whole) < 2e-5
        assert tensor.records == whole.records  # the plans, block for block
        assert (tensor.num_blocks, tensor.pool_bytes * 2) == (whole.num_blocks, whole.pool_bytes)
        assert difference(cfg, whole) < 2e-5
        assert cfg.pool_bytes * 2 - whole.pool_bytes == whole.pool_bytes // whole.num_blocks
        for mine, theirs in zip(cfg.records, whole.records, strict=True):
            assert mine.visible_chunks == theirs.visible_chunks
    assert ranks[0]["cfg"].records == ranks[1]["cfg"].records
    assert [*ranks[0]["cfg"].outs, *ranks[1]["cfg"].outs] == [0, 1]
