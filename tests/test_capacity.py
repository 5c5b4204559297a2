"""The budget: what it admits, what it refuses, and who has to leave."""

import json
import logging

import pytest
import torch

from chunkattn import LifecycleError, PoolExhaustedError
from chunkattn.capacity import block_size_of, capacity, preset_capacity
from chunkattn.cli import main
from chunkattn.cross_attention import CrossAttentionSpec
from chunkattn.presets import PRESETS, get_preset
from tests.helpers.rollout import TG, Rollout, make_cache, page_bytes, state

PAGE = page_bytes(4)
PER_BRANCH = 1 + 3 + 1  # sink, window, span
WINDOWED = sorted(name for name in PRESETS if PRESETS[name].window_frames is not None)


# -- arithmetic ----------------------------------------------------------------------------------
def test_every_byte_is_counted():
    parts = {
        "page_size_bytes": 100,
        "local_branches": 2,
        "blocks_per_branch": 5,
        "scratch_blocks": 3,
        "static_bytes": 70,
        "cross_attention_bytes": 20,
        "model_owned_bytes": 7,
    }
    needed = (1 + 3) * 100 + 70 + 2 * (2 * 5 * 100 + 20 + 7)
    found = capacity(needed, **parts)
    assert (found.sessions, found.num_blocks) == (2, 2 * 10 + 1)
    assert found.needed(2) == needed
    assert capacity(needed - 1, **parts).sessions == 1
    assert capacity(0, **parts).sessions == 0


def test_block_sizes_divide_chunks():
    for chunk, chunks in ((880, 22), (3600, 24), (50, 22), (7, 1), (1, 1)):
        size = block_size_of(chunk, chunks)
        assert chunk % size == 0
        assert size == 1 or size <= 0.02 * chunk * chunks


@pytest.mark.parametrize("name", WINDOWED)
def test_pools_are_hardly_larger_than_what_they_must_hold(name):
    """Pool over ideal at most 1.02, with one session and with as many as fit."""
    preset = get_preset(name)
    small = preset_capacity(preset, 0)
    assert small["sessions"] == 0
    for budget in (small["fixed"] + small["self_attention"], 141 << 30):
        report = preset_capacity(preset, budget)
        assert report["sessions"] >= 1
        assert report["ideal_bytes"] < report["pool_bytes"] <= 1.02 * report["ideal_bytes"]
        assert report["pool_bytes"] <= budget
    branches = preset.cfg_branches
    tokens = branches * (preset.sink_frames + preset.window_frames + preset.frames_per_span)
    row = 2 * preset.layers * preset.kv_heads * preset.head_size * 2
    assert small["ideal_bytes"] == tokens * preset.frame_tokens * row


def test_what_a_dreamzero_span_reads():
    report = preset_capacity(get_preset("dreamzero_14b"), 141 << 30)
    row = 2 * 40 * 40 * 128 * 2
    assert report["bytes_read_per_forward"] == 2 * 7945 * row
    assert report["bytes_read_per_span"] == 5 * 2 * 7945 * row
    half = preset_capacity(get_preset("dreamzero_14b"), 141 << 30, tp=2, cfg=2)
    assert 4 * half["bytes_read_per_forward"] == report["bytes_read_per_forward"]
    fp8 = preset_capacity(get_preset("dreamzero_14b"), 141 << 30, kv_dtype="fp8")
    assert 2 * fp8["bytes_read_per_forward"] == report["bytes_read_per_forward"]
    assert fp8["sessions"] == 2 * report["sessions"] + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3}, "`tp` must divide the 40 K/V heads, got 3"),
        ({"cfg": 3}, "`cfg` must divide the 2 branches, got 3"),
        ({"kv_dtype": "int8"}, "`kv_dtype` must be one of .* got 'int8'"),
        ({"block_size": 900}, "`block_size` must divide the 880 tokens of a chunk, got 900"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        preset_capacity(get_preset("dreamzero_14b"), 1 << 30, **arguments)


# -- the command ---------------------------------------------------------------------------------
def test_the_command_prints_a_table_and_json(capsys):
    command = ["capacity", "--preset", "dreamzero_14b", "--memory-gib", "141", "--kv-dtype", "fp8"]
    assert main([*command, "--tp", "2", "--cfg", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = preset_capacity(PRESETS["dreamzero_14b"], 141 << 30, tp=2, cfg=2, kv_dtype="fp8")
    assert report == expected
    assert main(command) == 0
    assert "session(s) in 141 GiB" in capsys.readouterr().out
    assert main([*command, "--tp", "7"]) == 2
    assert "`tp` must divide" in capsys.readouterr().err


# -- the cache -----------------------------------------------------------------------------------
def budgeted(sessions: int, spare: int = 0, **more):
    """A cache whose budget holds so many sessions and ``spare`` bytes more."""
    cross = 2 * 3 * 2 * 8 * 4  # K and V, rows, heads, head size, bytes
    fixed, each = (1 + 4) * PAGE, PER_BRANCH * PAGE + cross + 100
    return make_cache(
        session_capacity=sessions,
        memory_budget_bytes=fixed + sessions * each + spare,
        model_owned_bytes_per_session=100,
        cross_attention={"text": CrossAttentionSpec(3, 2)},
        **more,
    )


@pytest.mark.parametrize("sessions", (1, 3))
def test_a_budget_is_hard(sessions, caplog):
    """To the byte: as many sessions as declared, each with a forward in flight; one byte less is
    refused with both numbers.
    """
    with caplog.at_level(logging.INFO, logger="chunkattn"):
        cache = budgeted(sessions)
    (line,) = [r.getMessage() for r in caplog.records if "admits" in r.getMessage()]
    assert f"admits {sessions} session(s)" in line
    for part in (5 * PAGE, PER_BRANCH * PAGE, 384, 100):
        assert str(part) in line
    assert cache.managed_num_blocks == sessions * PER_BRANCH + 1
    with pytest.raises(ValueError, match=r"must be at least \d+ .* got \d+, which admits"):
        budgeted(sessions, -1)
    rollouts = [Rollout(cache.open_session(str(i)), TG, tag=i) for i in range(sessions)]
    for _ in range(6):
        for rollout in rollouts:
            rollout.forward(commit=True)
    opened = [rollout.open(commit=True).__enter__() for rollout in rollouts]
    assert cache.num_free_blocks == 0
    for fwd in opened:
        fwd.__exit__(ValueError, ValueError(), None)


def test_no_scratch_leaves_room(caplog):
    assert budgeted(1, -4 * PAGE, scratch=False).num_blocks_total == PER_BRANCH + 1
    with pytest.raises(ValueError, match="`model_owned_bytes_per_session` must be at least 0"):
        make_cache(model_owned_bytes_per_session=-1)


def test_the_least_recently_used_idle_session_leaves_when_asked():
    cache = make_cache(session_capacity=2)
    a, b = cache.open_session("a"), cache.open_session("b")
    Rollout(b, tag=1).forward(commit=True)
    Rollout(a).forward(commit=True)
    with pytest.raises(PoolExhaustedError, match="`session_capacity` is 2"):
        cache.open_session("c")
    c = cache.open_session("c", evict_idle=True)
    with pytest.raises(LifecycleError, match="'b' is closed"):
        b.forward(seq_len=4)
    Rollout(a).session.forward(seq_len=4)
    with a.forward(seq_len=4), c.forward(seq_len=4):
        with pytest.raises(PoolExhaustedError, match="`session_capacity` is 2"):
            cache.open_session("d", evict_idle=True)
        with pytest.raises(LifecycleError, match="must be new"):
            cache.open_session("a", evict_idle=True)
    cache.check_integrity()


def test_a_refused_session_evicts_nobody():
    """A low-level request has the name of its branch."""
    cache = make_cache()
    a = Rollout(cache.open_session("a"))
    a.forward(commit=True)
    name = a.adapter.request_id.replace("a::", "b::")
    request = cache.begin_request(name)
    before = state(cache)
    with pytest.raises(LifecycleError, match=f"`request_id` must be new, got '{name}'"):
        cache.open_session("b", evict_idle=True)
    assert state(cache) == before
    a.forward(commit=True)
    a.check_blocks()
    cache.end_request(request)
    cache.open_session("b", evict_idle=True)
    assert a.session.is_closed
    assert sorted(cache._sessions) == ["b"]


def test_books_without_tensors_are_sized_alike():
    assert budgeted(2, device=None).num_blocks_total == budgeted(2).num_blocks_total
    assert isinstance(budgeted(1).key_cache(0), torch.Tensor)
