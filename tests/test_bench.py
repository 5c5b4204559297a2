"""The benchmarks judge before they time, and the README's tables are those of the result files."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import bench_attention
import bench_scatter
import cases
import peers
import pytest
import report
import timing
import torch

from chunkattn import torch_backend
from chunkattn.presets import get_preset

BENCH = Path(__file__).resolve().parent.parent / "bench"
CPU = torch.device("cpu")
SMALL = dataclasses.replace(
    get_preset("dreamzero_14b"),
    layers=2,
    heads=4,
    kv_heads=4,
    head_size=16,
    frame_tokens=40,
    frames_per_span=2,
    window_frames=5,
    sink_frames=0,
    action_tokens=3,
    state_tokens=0,
)
SINK = dataclasses.replace(SMALL, kv_heads=2, sink_frames=1, window_frames=4, action_tokens=0)


# -- arithmetic ------------------------------------------------------------------------------------
def test_ratios_are_medians_over_rounds():
    ours, theirs = [1.0, 2.0, 1.0, 8.0], [2.0, 4.0, 2.0, 8.0]  # one slow round
    assert timing.speed_ratio(theirs, ours) == 2.0
    # Half the work of the roof's in the same time.
    assert timing.share_of_roof(5.0, ours, 10.0, ours) == 0.5
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [3.5, 2.0, 5.0]


def test_variants_take_turns_with_cold_caches_and_the_budget_ends_them(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.Tensor, "zero_", lambda rows: calls.append("flush"))
    variants = {name: lambda n=name: calls.append(n) for name in "ab"}
    seconds = timing.interleaved(variants, CPU, rounds=10, budget=0.0)
    warm_up, timed = ["a", "b"], ["flush", "a", "flush", "b"]
    assert calls == warm_up + timed * timing.FEWEST_ROUNDS
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("ab", 3)


def test_a_cycle_has_the_calls_that_dreamzero_makes():
    found = cases.calls_of(get_preset("dreamzero_14b"), True)
    shapes = [(call.query_rows, call.kv_rows) for call in found]
    denoise = [(1785, kv) for kv in (2665, 4425, 6185, 7945)]
    commits = [(1760, kv) for kv in (2640, 4400, 6160, 7920)]
    pairs = [shape for pair in zip(denoise, commits, strict=True) for shape in pair]
    assert shapes == [(880, 880), *pairs, (25, 7945)]


# -- attention -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("block_size", [None, 16])
def test_every_peer_is_right(dtype, block_size, monkeypatch):
    pytest.importorskip("vllm_omni")
    flex = peers.PEERS["flex paged"]

    def eager_flex(case):
        with monkeypatch.context() as patch:
            patch.setattr(peers, "_need_gpu", lambda case: None)
            return flex(case)

    monkeypatch.setitem(peers.PEERS, "flex paged", eager_flex)
    torch.manual_seed(0)
    for call in cases.calls_of(SMALL, True):
        case = cases.make_case(SMALL, call, 4, dtype, CPU, block_size)
        right, reasons = bench_attention.checked(case)
        wanted = {"chunkattn", "sdpa contiguous", "gather + sdpa", "concat + sdpa"}
        wanted |= set() if dtype == "fp8" else {"vllm-omni"}
        wanted |= set() if dtype == "fp8" or block_size is None else {"flex paged"}
        assert wanted == set(right), reasons
        assert not [reason for reason in reasons.values() if reason.startswith("wrong")]


def test_a_wrong_peer_gets_no_number(monkeypatch, capsys):
    monkeypatch.setattr(bench_attention, "get_preset", lambda name: SMALL)
    off_by_little = peers.PEERS["sdpa contiguous"]
    monkeypatch.setitem(
        peers.PEERS, "gather + sdpa", lambda case: lambda: off_by_little(case)() + 1e-4
    )
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", "--json", "--rounds", "3"])
    assert bench_attention.main() == 1
    row = json.loads(capsys.readouterr().out)
    assert row["reasons"]["gather + sdpa"].startswith("wrong")
    assert "gather + sdpa" not in row["seconds"]
    assert {"chunkattn", "sdpa contiguous", bench_attention.ROOF} <= set(row["seconds"])
    assert row["ratio"]["chunkattn"] == 1.0


def test_a_wrong_result_of_ours_ends_all_numbers(monkeypatch, capsys):
    monkeypatch.setattr(bench_attention, "get_preset", lambda name: SMALL)
    attend = torch_backend._attend_part

    def nan(*arguments, **keywords):
        out, lse = attend(*arguments, **keywords)
        return out * math.nan, lse

    monkeypatch.setattr(torch_backend, "_attend_part", nan)
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", "--json"])
    assert bench_attention.main() == 1
    assert "seconds" not in json.loads(capsys.readouterr().out)


# -- the write -------------------------------------------------------------------------------------
def test_every_write_is_right_in_16_bits():
    torch.manual_seed(0)
    span = bench_scatter.Span(get_preset("dreamzero_5b"), torch.bfloat16, CPU)
    writes, _ = bench_scatter.writes_of(span)
    assert all(bench_scatter.right(span, run, prepared=False) for run in writes.values())
    layers = bench_scatter.layers_of(span)
    assert all(bench_scatter.right(span, run, prepared=True) for run in layers.values())


@pytest.mark.parametrize("fault", ["slot", "elsewhere", "query"])
def test_a_wrong_write_is_seen(fault):
    torch.manual_seed(0)
    span = bench_scatter.Span(SMALL, torch.float32, CPU)
    writes, _ = bench_scatter.writes_of(span)
    layers = bench_scatter.layers_of(span)
    assert all(bench_scatter.right(span, run, prepared=False) for run in writes.values())
    assert all(bench_scatter.right(span, run, prepared=True) for run in layers.values())
    prepared = fault == "query"
    good = layers[bench_scatter.FUSED] if prepared else writes[bench_scatter.OURS]

    def bad():
        out = good()
        if fault == "query":
            return out + 1e-3
        slot = int(span.slots[3]) if fault == "slot" else (int(span.slots.max()) + 1) % 160
        span.pools()[1][slot, 0, 0] += 1
        return out

    assert not bench_scatter.right(span, bad, prepared)


# -- rollouts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", [SMALL, SINK], ids=["first frame", "sink"])
def test_every_way_sees_the_window(preset):
    pytest.importorskip("vllm")
    import bench_rollout
    import ways

    torch.manual_seed(0)
    geometry = ways.geometry_of(preset, 2, 4, torch.float32, CPU)
    steps = ways.rollout_of(geometry, spans=6, denoise_steps=2)
    play = bench_rollout.Play(geometry, steps, sessions=2)
    assert set(play.ways) == {"chunkattn", "concat", "roll", "gather"}
    # One that forgets nothing sees too much as soon as the window slides.
    hoarder = ways.Concat(geometry)
    hoarder.kept = lambda key, value: torch.stack([key, value])
    play.ways["hoarder"] = [hoarder]
    wrong = play.check()
    assert list(wrong) == ["hoarder"]
    times = play.times(rounds=2, budget=60)
    assert {len(of_way) for of_way in times.values()} == {2}
    assert all(len(rollout) == len(steps) for of_way in times.values() for rollout in of_way)


def test_the_ledger_counts_copies_and_what_lives():
    pytest.importorskip("vllm")
    from bench_memory import Ledger

    ledger = Ledger()
    outer = torch.zeros(100)
    with ledger:
        first = torch.zeros(100)
        joined = torch.cat([first, outer])
        view = joined[10:]
        assert (ledger.live, ledger.copied) == (1200, 800)
        del joined
        assert ledger.live == 1200  # the view holds it
        del view
        assert (ledger.live, ledger.peak) == (400, 1200)
        outer[:5] = first[:5]
        outer.view(10, 10)[torch.tensor([1, 2])]
        outer.index_put_((torch.tensor([1, 2]),), torch.zeros(2))
        outer[None].expand(3, -1).contiguous()
    assert ledger.copied == 800 + 20 + 80 + 8 + 1200


def test_memory_of_a_small_model():
    pytest.importorskip("vllm")
    from bench_memory import measure

    row = measure("small", dataclasses.replace(SMALL, denoise_forwards=3), 0)
    assert row["copied_bytes"]["chunkattn"] == row["span_bytes"]  # a commit writes its own rows
    # Each layer of each forward joins history and span, and then the action rows; a stack hands
    # the last three chunks back.
    token = row["span_bytes"] / 80
    joined, kept = 5 * 40, 3 * 40
    assert row["copied_bytes"]["concat"] == token * (4 * (joined + kept) + 3 * (joined + 3))


# -- the report ------------------------------------------------------------------------------------
def test_the_readme_is_what_the_results_give(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 0
    text = report.README.read_text()
    for name in report.TABLES:
        assert report.BEGIN.format(name) in text
    old = text.replace("| dreamzero_14b |", "| dreamzero_15b |")
    assert old != text
    assert report.filled(old, report.read(report.RESULTS / "cpu.jsonl")) == text


def test_results_say_where_they_come_from():
    for path in (BENCH / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert {"benchmark", "commit", "torch"} <= set(row)
            assert not row["commit"].endswith("-dirty")


def test_the_last_row_about_a_thing_counts(tmp_path):
    rows = [
        {"benchmark": "plan", "preset": "a", "n": 1},
        {"benchmark": "plan", "preset": "b", "n": 2},
        {"benchmark": "plan", "preset": "a", "n": 3},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["n"] for row in report.read(path)] == [3, 2]


def test_rows_append_and_print(tmp_path, capsys):
    args = argparse.Namespace(json=True, append=tmp_path / "new" / "x.jsonl")
    for n in range(2):
        timing.record({"n": n}, args, timing.table_of("t", "a"))
    assert args.append.read_text() == '{"n": 0}\n{"n": 1}\n' == capsys.readouterr().out
