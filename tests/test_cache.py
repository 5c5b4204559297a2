"""The cache: what it refuses to be built from, how it is sized, and its scratch."""

import inspect
import logging

import numpy as np
import pytest
import torch

from chunkattn import (
    ARDiffusionKVCache,
    PoolExhaustedError,
    compute_num_blocks,
)
from chunkattn.policy import HardReset
from chunkattn.sizing import DEFAULT_SCRATCH_BLOCKS, SCRATCH_ENV
from tests.helpers.rollout import (
    RELATIONS,
    TG,
    Rollout,
    Window,
    make_cache,
    make_config,
    page_bytes,
)

PAGE = page_bytes(4)


# -- construction --------------------------------------------------------------------------------
def test_constructor_arguments():
    """The seed's keywords with its defaults, then ours, which all have one."""
    empty = inspect.Parameter.empty
    expected = {
        "config": empty,
        "num_layers": empty,
        "num_kv_heads": empty,
        "head_size": empty,
        "dtype": empty,
        "block_size": empty,
        "max_model_len": empty,
        "available_bytes": empty,
        "cross_attn_length": 0,
        "cross_attn_img_length": 0,
        "device": None,
        "local_branches": 2,
        "num_frame_per_block": 1,
        "max_scratch_tokens_per_branch": 0,
        "scratch": True,
        "session_capacity": 1,
        "memory_budget_bytes": None,
        "model_owned_bytes_per_session": 0,
        "backend": "auto",
        "policy": None,
        "cross_attention": None,
        "debug_group": None,
    }
    parameters = inspect.signature(ARDiffusionKVCache).parameters
    assert {name: p.default for name, p in parameters.items()} == expected
    assert list(parameters) == list(expected)
    keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == list(expected)[1:]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("write_cross_kv", ["layer_idx", "is_negative", "k", "v", "k_img=None", "v_img=None"]),
        ("read_cross_kv", ["layer_idx", "is_negative"]),
        ("begin_request", ["request_id", "prefill_prefix_tokens=0"]),
        ("end_request", ["adapter"]),
        ("allocate_chunk", ["adapter"]),
        ("allocate_token_slots", ["adapter", "num_tokens"]),
        ("block_table", ["adapter"]),
        ("chunk_write_slots", ["adapter"]),
        ("scratch_block_ids", ["is_negative", "start", "count"]),
        ("key_cache", ["layer_idx"]),
        ("value_cache", ["layer_idx"]),
        ("window_block_ids", ["adapter"]),
        ("commit_chunk", ["adapter"]),
        ("write_chunk_kv", ["layer_index", "new_k", "new_v", "adapter"]),
        ("open_session", ["session_id", "evict_idle=False"]),
        ("check_integrity", []),
    ],
)
def test_method_arguments(method, arguments):
    parameters = list(inspect.signature(getattr(ARDiffusionKVCache, method)).parameters.values())
    named = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert named == ["self", *arguments]


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"enable": False}, {}, "`config` must be enabled .* got a disabled one"),
        ({"window_chunks": None}, {}, "`window_chunks` must be set: .* bounded, got None"),
        ({"window_chunks": 0}, {}, "`window_chunks` must be at least 1, got 0"),
        ({"chunk_size": 0}, {}, "`chunk_size` must be at least 1, got 0"),
        ({"sink_chunks": -1}, {}, "`sink_chunks` must be at least 0, got -1"),
        ({"gpu_memory_fraction": 0.0}, {}, r"`gpu_memory_fraction` must be in \(0, 1\], got 0.0"),
        ({"gpu_memory_fraction": 1.5}, {}, r"`gpu_memory_fraction` must be in \(0, 1\], got 1.5"),
        ({}, {"local_branches": 0}, "`local_branches` must be 1 or 2, got 0"),
        ({}, {"local_branches": 3}, "`local_branches` must be 1 or 2, got 3"),
        ({}, {"num_frame_per_block": 0}, "`num_frame_per_block` must be at least 1, got 0"),
        ({}, {"num_layers": 0}, "`num_layers` must be at least 1, got 0"),
        ({}, {"num_kv_heads": 0}, "`num_kv_heads` must be at least 1, got 0"),
        ({}, {"head_size": 0}, "`head_size` must be at least 1, got 0"),
        ({}, {"block_size": 0}, "`block_size` must be at least 1, got 0"),
        ({}, {"max_model_len": 0}, "`max_model_len` must be at least 1, got 0"),
        ({}, {"available_bytes": -1}, "`available_bytes` must be at least 0, got -1"),
        ({}, {"cross_attn_length": -1}, "`cross_attn_length` must be at least 0, got -1"),
        ({}, {"cross_attn_img_length": -1}, "`cross_attn_img_length` must be at least 0, got -1"),
        ({}, {"max_scratch_tokens_per_branch": -1}, "`max_scratch_tokens_per_branch` must be at"),
        ({}, {"session_capacity": 0}, "`session_capacity` must be at least 1, got 0"),
        (
            {},
            {"backend": "cuda"},
            "`backend` must be one of auto, torch, triton, fa3, fa2, got 'cuda'",
        ),
    ],
)
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["books", "cpu"])
def test_constructor_refuses(config, more, message, device):
    with pytest.raises(ValueError, match=message):
        make_cache(config=make_config(**config), device=device, **more)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"chunk_size": 4.0}, {}, "`chunk_size` must be an integer, got 4.0"),
        ({"window_chunks": 3.0}, {}, "`window_chunks` must be an integer, got 3.0"),
        ({"sink_chunks": "1"}, {}, "`sink_chunks` must be an integer, got '1'"),
        ({}, {"num_frame_per_block": 1.0}, "`num_frame_per_block` must be an integer, got 1.0"),
        ({}, {"local_branches": 1.0}, "`local_branches` must be an integer, got 1.0"),
        ({}, {"num_layers": 1.0}, "`num_layers` must be an integer, got 1.0"),
        ({}, {"block_size": 4.0}, "`block_size` must be an integer, got 4.0"),
        ({}, {"available_bytes": 1e6}, "`available_bytes` must be an integer, got 1000000.0"),
        ({}, {"session_capacity": None}, "`session_capacity` must be an integer, got None"),
    ],
)
def test_constructor_refuses_what_is_no_integer(config, more, message):
    with pytest.raises(TypeError, match=message):
        make_cache(config=make_config(**config), **more)


def test_constructor_takes_integers_of_numpy():
    rollout = Rollout(make_cache(local_branches=np.int64(1), block=np.int32(4)).open_session("a"))
    rollout.forward(commit=True)


def test_a_budget_does_not_excuse_a_fraction():
    config = make_config(gpu_memory_fraction=7.0)
    with pytest.raises(ValueError, match=r"`gpu_memory_fraction` must be in \(0, 1\], got 7.0"):
        make_cache(config=config, memory_budget_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_constructor_refuses_a_dtype(dtype):
    with pytest.raises(NotImplementedError, match=f"`dtype` must be .*, got {dtype}"):
        make_cache(dtype=dtype)


def test_a_window_shorter_than_the_span_is_refused():
    """B7: sink 1, window 1, span 3 would lose the middle of its own span."""
    with pytest.raises(ValueError, match="`window_chunks` must hold the span of 3 chunks, got 1"):
        make_cache(policy=Window(1, 1), span=3)
    make_cache(policy=Window(3, 1), span=3)


def test_the_window_in_force_is_logged_once(caplog):
    """B9: the numbers are in the log, and checkable on the spec."""
    with caplog.at_level(logging.INFO, "chunkattn.cache"):
        cache = make_cache(12, 4, Window(7, 2), span=3)
    (record,) = [r for r in caplog.records if "window in force" in r.message]
    assert record.levelno == logging.INFO
    for part in ("chunk 12 tokens", "window 7 chunks", "sink 2", "span 3", "block 4 tokens"):
        assert part in record.message
    spec = cache.spec
    assert (spec.chunk_size, spec.window_chunks, spec.sink_chunks) == (12, 7, 2)
    assert (spec.sliding_window, spec.block_size, spec.reset_at_boundary) == (84, 4, False)


def test_the_policy_in_force_is_logged(caplog):
    """In place of the config's sink and reset, which it replaces."""
    with caplog.at_level(logging.INFO, "chunkattn.cache"):
        make_cache(12, 4, Window(7, 2, True), policy_object=HardReset(5))
    assert "chunk 12 tokens, HardReset(window_chunks=5), span 1; block 4 tokens" in caplog.text
    assert "sink" not in caplog.text
    assert "reset_at_boundary" not in caplog.text


def test_debug_lines_name_the_request(caplog):
    """Every step of a request leaves a line for those who look for it, and prints nothing."""
    cache = make_cache()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "chunkattn.cache"):
        adapter = cache.begin_request("robot-7")
        cache.allocate_chunk(adapter)
        chunk = torch.zeros(1, 4, 1, 8)
        cache.write_chunk_kv(0, chunk, chunk, adapter)
        cache.commit_chunk(adapter)
        cache.end_request(adapter)
    lines = [r.message for r in caplog.records if "req=robot-7" in r.message]
    names = [line.split(":")[0] for line in lines]
    assert names == ["begin_request", "allocate_chunk", "write_chunk_kv", "commit", "end_request"]


# -- size -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(("policy", "span"), [(TG, 1), (Window(4, 1), 3), (Window(9, 0), 2)])
def test_exactly_enough_blocks_work_for_ever(policy, span, branches, caplog):
    """G2: sink + window + span usable blocks; with one fewer it is refused at the start."""
    usable = branches * (policy.sink + policy.window + span)
    build = {"policy": policy, "span": span, "local_branches": branches}
    cache = make_cache(usable=usable, **build)
    assert cache.managed_num_blocks == cache.num_blocks == usable + 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    session = cache.open_session("a")
    rollouts = [Rollout(session, policy, branch=b, tag=b / 8) for b in range(branches)]
    for _ in range(30):
        for rollout in rollouts:
            rollout.forward(span)
            rollout.forward(span, commit=True)
            rollout.check_blocks()
    fewer = f"at least {usable + 1} blocks of {PAGE} bytes .* got {usable * PAGE} bytes .* {usable}"
    with pytest.raises(ValueError, match=f"`available_bytes` must hold {fewer} blocks"):
        make_cache(usable=usable - 1, **build)


@pytest.mark.parametrize(("chunk", "block"), RELATIONS)
@pytest.mark.parametrize("policy", [TG, Window(3, 2), Window(2, 0)], ids=["S1", "S2", "S0"])
def test_the_floor_is_enough_where_chunks_are_not_blocks(chunk, block, policy):
    """G2, B16: the smallest pool that is accepted plays a rollout for ever."""
    with pytest.raises(ValueError, match="`available_bytes` must hold at least"):
        make_cache(chunk, block, policy, usable=1)
    usable = next(n for n in range(2, 99) if _accepts(chunk, block, policy, n))
    cache = make_cache(chunk, block, policy, usable=usable)
    rollout = Rollout(cache.open_session("a"), policy)
    for _ in range(20):
        rollout.forward(commit=True)
        rollout.check_blocks()


def _accepts(chunk: int, block: int, policy: Window, usable: int) -> bool:
    try:
        make_cache(chunk, block, policy, usable=usable, device=None)
    except ValueError:
        return False
    return True


def test_a_fraction_too_small_is_raised_with_one_warning(caplog):
    """G4: memory for one session at fraction 0.1; the warning names both numbers."""
    config = make_config(gpu_memory_fraction=0.1)
    cache = make_cache(config=config, usable=9)
    assert cache.managed_num_blocks == 1 * (1 + 3 + 1) + 2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "0.1 gives 1 blocks; raised to the 7 that a rollout needs" in record.message
    two = make_cache(config=config, usable=30, local_branches=2)
    assert two.managed_num_blocks == 2 * (1 + 3 + 1) + 2
    caplog.clear()
    assert make_cache(config=config, usable=99).managed_num_blocks == 10
    assert not caplog.records


def test_memory_below_one_session_is_refused_with_both_numbers():
    """G4: no fraction can help."""
    config = make_config(gpu_memory_fraction=0.1)
    message = rf"at least 6 blocks .* \({6 * PAGE} bytes\) .* got {5 * PAGE} bytes"
    with pytest.raises(ValueError, match=message):
        make_cache(config=config, usable=4)
    with pytest.raises(ValueError, match="got 0 bytes"):
        make_cache(available_bytes=0)


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["books", "cpu"])
def test_cross_attention_comes_off_the_memory_first(device):
    """Both pools, both branches, all layers; what is left goes by the fraction."""
    cross = 2 * 2 * 2 * (32 + 16) * 8 * 4  # K and V, branches, layers, tokens, elements, bytes
    build = {"layers": 2, "cross_attn_length": 32, "cross_attn_img_length": 16, "device": device}
    page = page_bytes(4, layers=2)
    cache = make_cache(available_bytes=cross + 20 * page + 1, **build)
    assert cache.num_blocks == 20
    half = make_config(gpu_memory_fraction=0.5)
    assert make_cache(config=half, available_bytes=cross + 40 * page, **build).num_blocks == 20
    with pytest.raises(ValueError, match=f"got {5 * page} bytes after cross-attention"):
        make_cache(available_bytes=cross + 5 * page, **build)


def test_max_model_len_never_ends_a_rollout():
    """B12: a limit of 8 tokens, 6 spans of 4 and more."""
    cache = make_cache(max_model_len=8)
    rollout = Rollout(cache.open_session("a"))
    for _ in range(12):
        rollout.forward(commit=True)
        rollout.check_blocks()


# -- scratch --------------------------------------------------------------------------------------
def test_scratch_lies_behind_the_managed_blocks(monkeypatch):
    monkeypatch.delenv(SCRATCH_ENV, raising=False)
    assert DEFAULT_SCRATCH_BLOCKS == 4
    cache = make_cache(usable=20, local_branches=2)
    assert (cache.scratch_blocks_per_branch, cache.scratch_num_blocks) == (4, 8)
    assert cache.num_blocks_total == cache.managed_num_blocks + 8 == 29
    assert cache.scratch_block_ids(False, 0, 4) == [21, 22, 23, 24]
    assert cache.scratch_block_ids(True, 1, 2) == [26, 27]
    assert cache.scratch_block_ids(True, 4, 0) == []
    assert cache.key_cache(0).shape == cache.value_cache(0).shape == (29, 4, 1, 8)


def test_one_branch_has_one_scratch():
    """Whichever guidance side it is: a rank that runs the negative one has no dead first slot."""
    cache = make_cache(usable=20, local_branches=1)
    assert cache.scratch_num_blocks == cache.scratch_blocks_per_branch
    assert cache.scratch_block_ids(True, 0, 2) == cache.scratch_block_ids(False, 0, 2) == [21, 22]


@pytest.mark.parametrize(
    ("value", "span", "action", "blocks"),
    [
        (None, 1, 0, 4),
        ("0", 1, 0, 1),
        ("0", 3, 5, 5),
        ("1", 1, 0, 1),
        ("9", 1, 0, 9),
        ("1", 3, 5, 5),
        (None, 3, 5, 5),
        ("6", 3, 5, 6),
    ],
)
def test_scratch_size(monkeypatch, value, span, action, blocks):
    """The environment's number, but never less than the span and the declared tokens need."""
    monkeypatch.delenv(SCRATCH_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(SCRATCH_ENV, value)
    cache = make_cache(span=span, max_scratch_tokens_per_branch=action)
    assert cache.scratch_blocks_per_branch == blocks


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5"])
def test_scratch_environment_is_checked(monkeypatch, value):
    monkeypatch.setenv(SCRATCH_ENV, value)
    with pytest.raises(
        ValueError, match=f"`{SCRATCH_ENV}` must be an integer from 0 on, got '{value}'"
    ):
        make_cache()


def test_scratch_ids_are_bounded():
    cache = make_cache()
    with pytest.raises(
        PoolExhaustedError, match=r"scratch blocks exhausted: a branch has 4, .*\[3, 5\)"
    ):
        cache.scratch_block_ids(False, 3, 2)
    with pytest.raises(ValueError, match="`start` and `count` must not be negative, got -1 and 1"):
        cache.scratch_block_ids(False, -1, 1)
    with pytest.raises(ValueError, match="`start` and `count` must not be negative, got 0 and -1"):
        cache.scratch_block_ids(False, 0, -1)


@pytest.mark.parametrize("config", ({"enable": True}, "window"))
def test_what_is_no_config(config):
    with pytest.raises(TypeError, match="^`config` must be an ARDiffusionKVConfig, got "):
        make_cache(config=config)


def test_a_fraction_is_a_number():
    with pytest.raises(TypeError, match="^`gpu_memory_fraction` must be a number, got 'x'"):
        make_cache(config=make_config(gpu_memory_fraction="x"))
    with pytest.raises(TypeError, match="^`gpu_memory_fraction` must be a number, got 'x'"):
        compute_num_blocks(1 << 20, "x", 1)


@pytest.mark.parametrize("session_id", (["x"], None, 3))
def test_a_session_id_is_a_string(session_id):
    cache = make_cache()
    with pytest.raises(TypeError, match="^`session_id` must be a str, got "):
        cache.open_session(session_id)
    cache.open_session("a")
