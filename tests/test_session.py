"""What a forward plans, what it refuses before anything changes, and what makes it history."""

import contextlib
import inspect
import re

import pytest
import torch

from chunkattn import (
    CrossAttentionSpec,
    ForwardContext,
    LifecycleError,
    Session,
    StaleContextError,
)
from tests.helpers.rollout import TG, Rollout, Window, make_cache, state

pytestmark = pytest.mark.usefixtures("one_thread")


def start(num_commits: int = 0, **more) -> Rollout:
    """A rollout with a history."""
    cache = make_cache(**more)
    rollout = Rollout(cache.open_session("a"), more.get("policy", TG))
    for _ in range(num_commits):
        rollout.forward(commit=True)
    return rollout


def rows(num: int, heads: int = 1, size: int = 8, **more) -> torch.Tensor:
    return torch.zeros(num, heads, size, **more)


# -- what a forward says ------------------------------------------------------------------------
def test_arguments():
    forward = inspect.signature(Session.forward).parameters
    defaults = {name: p.default for name, p in forward.items() if p.kind is p.KEYWORD_ONLY}
    empty = inspect.Parameter.empty
    assert defaults == {"branch": 0, "seq_len": empty, "commit": False, "action_len": 0}
    attend = [
        p.name if p.default is empty else f"{p.name}={p.default}"
        for p in inspect.signature(ForwardContext.write_attend).parameters.values()
    ]
    named = ["self", "layer", "query", "key", "value", "key_action=None", "value_action=None"]
    assert attend == [*named, "softmax_scale=None", "out=None"]


def test_a_plan_names_its_blocks():
    rollout = start(5, max_scratch_tokens_per_branch=6)
    cache = rollout.cache
    table = cache.block_table(rollout.adapter)
    scratch = cache.scratch_block_ids(False, 0, 4)
    with rollout.open(action_len=6) as fwd:
        assert (fwd.first_chunk, fwd.num_chunks, fwd.seq_len, fwd.action_len) == (5, 1, 4, 6)
        assert (fwd.branch, fwd.commit, fwd.table_block_size) == (0, False, 4)
        assert fwd.history_block_ids == [table[0], table[2], table[3]]  # chunk 2 is out of sight
        assert fwd.span_block_ids == scratch[:1]
        assert fwd.action_block_ids == scratch[1:3]
        assert fwd.kv_len == 3 * 4 + 4 + 6
        blocks = [*fwd.history_block_ids, *scratch[:3]]
        assert fwd.block_table.tolist() == [blocks + [0] * (fwd.block_table.shape[1] - 6)]
        assert fwd.seq_lens.tolist() == [22]
        assert fwd.query_start_loc.tolist() == [0, 10]
        assert fwd.slot_mapping.tolist() == [scratch[0] * 4 + i for i in range(10)]
        for tensor in (fwd.block_table, fwd.seq_lens, fwd.query_start_loc, fwd.slot_mapping):
            assert tensor.dtype == torch.int32
    with rollout.open(commit=True, action_len=6) as fwd:
        (span,) = fwd.span_block_ids
        assert span == cache.block_table(rollout.adapter)[-1]
        assert fwd.slot_mapping.tolist() == [span * 4 + i for i in range(4)] + [
            scratch[0] * 4 + i for i in range(6)
        ]
        rollout.write(fwd)
    rollout.committed += 1
    rollout.check_blocks()


def plan_of(fwd: ForwardContext) -> list[torch.Tensor]:
    return [fwd.block_table, fwd.seq_lens, fwd.query_start_loc, fwd.slot_mapping]


def test_plans_keep_their_addresses():
    """H5, H6: at kv 4, 8 and 16 the same shapes, strides and addresses; only the values change."""
    rollout = start()
    seen, kv_lens = set(), []
    for _ in range(6):
        for commit in (False, False, True):
            with rollout.open(commit=commit) as fwd:
                seen.add(tuple((t.data_ptr(), t.shape, t.stride()) for t in plan_of(fwd)))
                kv_lens.append(int(fwd.seq_lens))
                rollout.write(fwd)
        rollout.committed += 1
    assert len(seen) == 1
    assert kv_lens == [n for n in (4, 8, 12, 16, 16, 16) for _ in range(3)]


def test_the_denoise_forwards_of_a_span_share_one_plan():
    """F10, H5: the very same tensors and lists; the position moves once, at the commit."""
    rollout = start(4)
    plans, values = [], []
    for noise in range(4):
        with rollout.open() as fwd:
            plans.append([*plan_of(fwd), fwd.history_block_ids, fwd.span_block_ids])
            values.append([t.tolist() for t in plan_of(fwd)])
            rollout.write(fwd, noise=noise)
        assert rollout.adapter.completed_chunks == 4
    for plan, value in zip(plans, values, strict=True):
        assert all(a is b for a, b in zip(plan, plans[0], strict=True))
        assert value == values[0]
    rollout.forward(commit=True)
    assert rollout.adapter.completed_chunks == 5
    with rollout.open() as fwd:
        assert fwd.block_table.tolist() != values[0][0]


def test_a_shared_plan_is_not_taken_for_another():
    """Every other forward in between has the branch's plan rewritten, also an aborted commit."""
    rollout = start(4, max_scratch_tokens_per_branch=4)
    for _ in range(2):
        rollout.forward()
        rollout.forward(action_len=3)
        rollout.forward(2)
        with contextlib.suppress(KeyError), rollout.open(commit=True) as fwd:
            rollout.write(fwd)
            raise KeyError
    rollout.session.reset()
    rollout.committed = 0
    rollout.forward()
    with rollout.open() as fwd:
        assert fwd.kv_len == 4
        assert not fwd.block_table[0, 1:].any()


def test_branches_have_scratch_of_their_own():
    """Both guidance sides may be in flight at once, also where another op writes and reads."""
    session = make_cache(local_branches=2).open_session("a")
    for commits in ((False, False), (False, True), (True, True)):
        forwards = [
            session.forward(branch=branch, seq_len=4, commit=commit, action_len=3).__enter__()
            for branch, commit in enumerate(commits)
        ]
        slots = [slot for fwd in forwards for slot in fwd.slot_mapping.tolist()]
        assert len(set(slots)) == 14
        session.reset()


def test_a_plan_follows_commits_from_outside():
    """Chunks that the low-level calls commit on a session's request move its next plan too."""
    rollout = start()
    cache = rollout.cache

    def commit_from_outside(times):
        for _ in range(times):
            cache.allocate_chunk(rollout.adapter)
            first = 4 * rollout.committed
            value = rollout.values(range(first, first + 4)).unsqueeze(0)
            cache.write_chunk_kv(0, value, value, rollout.adapter)
            cache.commit_chunk(rollout.adapter)
            rollout.committed += 1

    for times in (1, 1, 3, 1):
        commit_from_outside(times)
        rollout.forward()
        rollout.check_blocks()
    rollout.session.reset()
    rollout.committed = 0
    keep = cache.begin_request("keep")
    cache.allocate_chunk(keep)  # so that the same position has other blocks
    commit_from_outside(6)
    rollout.forward()


def test_out_scale_and_grouped_heads():
    rollout = start(heads=2)
    query, key, value = torch.randn(4, 6, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    out = torch.full((4, 6, 8), float("nan"))
    with rollout.open() as fwd:
        assert fwd.write_attend(0, query, key, value, softmax_scale=0.7, out=out) is out
        default = fwd.write_attend(0, query, key, value)
    for got, scale in ((out, 0.7), (default, 8**-0.5)):
        k, v = (t.repeat_interleave(3, 1).transpose(0, 1) for t in (key, value))
        scores = (query.transpose(0, 1) @ k.transpose(1, 2) * scale).softmax(-1)
        torch.testing.assert_close(got, (scores @ v).transpose(0, 1), atol=2e-6, rtol=1e-5)


# -- arguments ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 6}, "`seq_len` must be a positive multiple of chunk_size 4, .* got 6"),
        ({"seq_len": 0}, "`seq_len` must be .*, got 0"),
        ({"seq_len": -4}, "`seq_len` must be .*, got -4"),
        ({"seq_len": 16}, "`seq_len` must be .* at most 3 chunks, got 16"),
        ({"seq_len": 4, "action_len": 99}, "`action_len` must be at most 16, .* got 99"),
        ({"seq_len": 4, "action_len": -1}, "`action_len` must not be negative, got -1"),
        ({"seq_len": 4, "branch": 1}, "`branch` must be from 0 to 0, got 1"),
        ({"seq_len": 4, "branch": -1}, "`branch` must be from 0 to 0, got -1"),
    ],
)
@pytest.mark.parametrize("commit", [False, True])
def test_forward_refuses_before_it_allocates(arguments, message, commit):
    """D6, F1: 99 action tokens: nothing is allocated, and the retry is as if never asked."""
    rollout = start(3)
    before = state(rollout.cache)
    with pytest.raises(ValueError, match=message):
        rollout.session.forward(commit=commit, **arguments)
    assert state(rollout.cache) == before
    rollout.forward(commit=True, action_len=16)
    rollout.check_blocks()


good = rows(4)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layer": 2}, ValueError, "`layer` must be from 0 to 1, got 2"),
        ({"layer": -1}, ValueError, "`layer` must be from 0 to 1, got -1"),
        ({"key": rows(3)}, ValueError, r"`key` must have shape \(4, 1, 8\) .* got \(3, 1, 8\)"),
        ({"key": rows(4, 2)}, ValueError, r"`key` must have shape .* got \(4, 2, 8\)"),
        ({"key": rows(4, 1, 4)}, ValueError, r"`key` must have shape .* got \(4, 1, 4\)"),
        ({"key": rows(4)[0]}, ValueError, r"`key` must be 3-D, got shape \(1, 8\)"),
        ({"key": None}, ValueError, "`key` must have 4 rows, got None"),
        ({"key": [1]}, TypeError, "`key` must be a torch.Tensor, got list"),
        ({"key": good.int()}, TypeError, "`key` must have one of the dtypes .* got torch.int32"),
        ({"key": good.to("meta")}, ValueError, "`key` must be on cpu, .* got meta"),
        ({"key": rows(4, 1, 16)[..., ::2]}, ValueError, "`key` must have stride 1 in its last"),
        ({"value": rows(5)}, ValueError, r"`value` must have shape .* got \(5, 1, 8\)"),
        ({"value": good.double()}, TypeError, "`value` must have one of .*float64"),
        ({"key_action": rows(1)}, ValueError, r"`key_action` must have shape \(2, 1, 8\)"),
        ({"key_action": None}, ValueError, "`key_action` must have 2 rows, got None"),
        ({"value_action": None}, ValueError, "`value_action` must have 2 rows, got None"),
        ({"value_action": rows(2, 1, 9)}, ValueError, "`value_action` must have shape"),
        ({"query": rows(4)}, ValueError, r"`query` must have shape \(6, 1, 8\) .* got \(4, 1, 8\)"),
        ({"query": rows(6, 0)}, ValueError, "`query` must have a multiple of 1 heads, got 0"),
        ({"query": rows(6)[:, 0]}, ValueError, r"`query` must be 3-D, got shape \(6, 8\)"),
        ({"query": rows(6, dtype=torch.float16)}, TypeError, "`query` must .* float32, got .*16"),
        ({"query": None}, TypeError, "`query` must be a torch.Tensor, got NoneType"),
        ({"out": rows(4)}, ValueError, r"`out` must have shape \(6, 1, 8\)"),
        ({"out": rows(6, dtype=torch.float16)}, TypeError, "`out` must have one of .* float32"),
        ({"softmax_scale": -1.0}, ValueError, "`softmax_scale` must be finite and not neg.* -1.0"),
        ({"softmax_scale": float("nan")}, ValueError, "`softmax_scale` must be finite .* got nan"),
    ],
)
def test_write_attend_refuses_before_it_writes(changed, error, message):
    rollout = start(2, layers=2)
    arguments = {"layer": 0, "query": rows(6), "key": good, "value": good}
    arguments |= {"key_action": rows(2), "value_action": rows(2)}
    fwd = rollout.open(commit=True, action_len=2).__enter__()
    before = state(rollout.cache)
    with pytest.raises(error, match=message):
        fwd.write_attend(**(arguments | changed))
    assert state(rollout.cache) == before
    with pytest.raises(LifecycleError, match=r"got none for layers \[0, 1\]"):
        fwd.__exit__(None, None, None)
    rollout.check_blocks()


def test_action_rows_that_were_not_planned_are_refused():
    rollout = start()
    with rollout.open() as fwd:
        with pytest.raises(ValueError, match=r"`key_action` must have shape \(0, 1, 8\)"):
            fwd.write_attend(0, good, good, good, rows(2), rows(2))
        fwd.write_attend(0, good, good, good, rows(0), rows(0))


def test_query_heads_are_a_multiple():
    rollout = start(heads=2)
    message = "`query` must have a multiple of 2 heads, got 3"
    with rollout.open() as fwd, pytest.raises(ValueError, match=message):
        fwd.write_attend(0, rows(4, 3), rows(4, 2), rows(4, 2))


# -- commit -------------------------------------------------------------------------------------
def test_a_commit_of_three_chunks_is_all_or_nothing():
    """B6: it fails at the second layer."""
    policy = Window(4, 1)
    rollout = start(policy=policy, span=3, layers=3)
    rollout.forward(3, commit=True)
    rollout.check_blocks()
    cache = rollout.cache
    before, free = cache.block_table(rollout.adapter), cache.num_free_blocks
    with contextlib.suppress(ZeroDivisionError), rollout.open(3, commit=True) as fwd:
        rollout.write(fwd, 0)
        assert cache.num_free_blocks == free - 3
        raise ZeroDivisionError
    assert cache.block_table(rollout.adapter) == before
    assert cache.num_free_blocks == free
    assert rollout.adapter.completed_chunks == 3
    rollout.check_blocks()
    rollout.forward(3, commit=True)
    rollout.check_blocks()
    assert rollout.adapter.completed_chunks == 6


def test_a_commit_needs_every_layer():
    """F1, F4: with no write, or with one layer missing, no chunk becomes history."""
    rollout = start(2, layers=3)
    before = state(rollout.cache)
    for layers, missing in (([], [0, 1, 2]), ([0, 2, 2], [1])):
        fwd = rollout.open(commit=True).__enter__()
        for layer in layers:
            rollout.write(fwd, layer)
        message = rf"must write every layer, got none for layers {missing}"
        with pytest.raises(LifecycleError, match=re.escape(message)):
            fwd.__exit__(None, None, None)
        after = state(rollout.cache)
        assert after["requests"] == before["requests"]
        assert after["free"] == before["free"]
        rollout.check_blocks()
    rollout.forward(commit=True)
    rollout.check_blocks()


def test_layers_that_another_op_wrote():
    rollout = start(layers=2)
    with rollout.open(commit=True) as fwd:
        rollout.write(fwd, 0)
        with pytest.raises(ValueError, match="`layer` must be from 0 to 1, got 2"):
            fwd.mark_layer_written(2)
        value = rollout.values(range(4), 1)
        rollout.cache.flat_key_pool(1)[fwd.slot_mapping] = value
        rollout.cache.flat_value_pool(1)[fwd.slot_mapping] = value
        fwd.mark_layer_written(1)
    rollout.committed = 1
    rollout.check_blocks()
    with pytest.raises(StaleContextError):
        fwd.mark_layer_written(0)


def test_a_forward_commits_once():
    """F4: leaving a forward again, or using it after its end, changes nothing."""
    rollout = start(1)
    fwd = rollout.open(commit=True)
    with fwd:
        rollout.write(fwd)
    before = state(rollout.cache)
    assert rollout.adapter.completed_chunks == 2
    fwd.__exit__(None, None, None)
    with pytest.raises(StaleContextError, match="has ended"):
        rollout.write(fwd)
    assert state(rollout.cache) == before


def test_branches_commit_by_themselves():
    cache = make_cache(local_branches=2)
    session = cache.open_session("a")
    positive, negative = (Rollout(session, branch=b, tag=b / 8) for b in (0, 1))
    positive.forward(commit=True)
    negative.forward(commit=True)
    positive.forward(commit=True)
    assert session.adapter().completed_chunks == 2
    assert session.adapter(1).completed_chunks == 1
    with pytest.raises(ValueError, match="`branch` must be from 0 to 1, got 2"):
        session.adapter(2)
    negative.forward()
    negative.forward(commit=True)
    for rollout in (positive, negative):
        rollout.forward()
        rollout.check_blocks()


@pytest.mark.parametrize("name", ["branch", "seq_len", "action_len"])
def test_a_forward_refuses_what_is_no_integer(name):
    cache = make_cache(local_branches=2)
    session = cache.open_session("a")
    before = state(cache)
    with pytest.raises(TypeError, match=f"`{name}` must be an integer, got 1.0"):
        session.forward(**({"seq_len": 4} | {name: 1.0}))
    assert state(cache) == before


# -- hosts that begin requests themselves, or cannot use `with` -----------------------------------
def test_a_session_takes_over_requests():
    cache = make_cache(local_branches=2, session_capacity=2)
    begun = [cache.begin_request(f"host::{name}") for name in ("positive", "negative")]
    with pytest.raises(ValueError, match="one for each of 2 local branches, got 1"):
        cache.admit_session("a", adapters=begun[:1])
    prefixed = cache.begin_request("prefixed", prefill_prefix_tokens=8)
    with pytest.raises(ValueError, match="`adapters` must have no prefill prefix, .* 8 tokens"):
        cache.admit_session("a", adapters=[begun[0], prefixed])
    cache.end_request(prefixed)
    session = cache.admit_session("a", adapters=begun)
    assert [session.adapter(branch) for branch in (0, 1)] == begun
    session.reset()
    assert [session.adapter(branch).request_id for branch in (0, 1)] == [
        "host::positive",
        "host::negative",
    ]
    with pytest.raises(LifecycleError, match="'host::positive' has ended"):
        cache.admit_session("b", adapters=begun)
    session.close()
    cache.check_integrity()
    assert not cache._adapters


def test_abort_is_what_an_exception_does():
    rollout = start(1, layers=2)
    cache, before = rollout.cache, state(rollout.cache)
    fwd = rollout.session.forward(seq_len=4, commit=True).__enter__()
    assert fwd.missing_layers == list(range(cache.num_layers))
    fwd.mark_layer_written(0)
    assert fwd.missing_layers == list(range(1, cache.num_layers))
    assert state(cache) != before
    fwd.abort()
    assert state(cache) == before
    with pytest.raises(StaleContextError):
        fwd.mark_layer_written(1)
    fwd.abort()  # a no-op


# -- refusals found by a reviewer ------------------------------------------------------------------
@pytest.mark.parametrize("layer", (0.5, 1.0, "0", None))
def test_a_layer_is_an_integer(layer):
    """F1: else a commit passed with a layer that nobody wrote, marked as "0.5"."""
    rollout = start(layers=2)
    with rollout.open() as fwd:
        before = state(rollout.cache)
        for use in (
            lambda: fwd.mark_layer_written(layer),
            lambda: fwd.layer_plan(layer),
            lambda: fwd.write_attend(layer, rows(4), rows(4), rows(4)),
            lambda: rollout.cache.key_cache(layer),
        ):
            with pytest.raises(TypeError, match=r"^`layer(_idx)?` must be an integer, got "):
                use()
        assert fwd.missing_layers == [0, 1]
        assert state(rollout.cache) == before


def test_an_out_without_memory_is_refused_before_the_write():
    rollout = start()
    with rollout.open(commit=True) as fwd:
        before = state(rollout.cache)
        with pytest.raises(ValueError, match="^`out` must have memory for every element, got "):
            fwd.write_attend(0, *(rows(4) for _ in range(3)), out=rows(1).expand(4, 1, 8))
        assert state(rollout.cache) == before
        rollout.write(fwd)


def test_a_forward_that_has_not_begun_has_no_plan():
    forward = start().open()
    for name in ("block_table", "kv_len", "slot_mapping", "history_block_ids"):
        with pytest.raises(StaleContextError, match="is not open"):
            getattr(forward, name)


@pytest.mark.parametrize("number", (1.0, "1", None))
def test_rollback_by_what_is_no_integer(number):
    rollout = start(3)
    before = state(rollout.cache)
    with pytest.raises(TypeError, match="^`num_chunks` must be an integer, got "):
        rollout.session.rollback(number)
    assert state(rollout.cache) == before


@pytest.mark.parametrize("made, used", ((True, False), (False, True), (True, True)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float8_e4m3fn))
def test_inference_mode(made, used, dtype):
    """A tensor made in inference mode could not be written outside of it."""
    named, text = {"text": CrossAttentionSpec(3, 2)}, [rows(3, 2)]
    with torch.inference_mode(made):
        cache = make_cache(layers=1, dtype=dtype, cross_attention=named)
        session = cache.open_session("a")
        session.fill_cross_attention("text", text, text)
    with torch.inference_mode(used):
        session.fill_cross_attention("text", text, text)
        for commit in (False, True):
            with session.forward(seq_len=4, commit=commit) as fwd:
                fwd.write_attend(0, rows(4), rows(4), rows(4))
    assert session.adapter().completed_chunks == 1
