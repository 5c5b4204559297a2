"""The model of the GPU (bench/gpu_model.py): its arithmetic, its limits, its stated error."""

import collections
import heapq
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import gpu_model
import gpu_predict
import pytest
import torch
from gpu_predict import Call, calls_of, card_of, load_counts, predict, predict_call, tiles_of

ROOT = Path(__file__).resolve().parent.parent
COUNTS = load_counts()
H100 = card_of("H100")
DOC = (ROOT / "docs/gpu_model.md").read_text()


def call_of(preset, what):
    return next(call for call in calls_of(preset) if call.what == what)


def walk_row(card=H100, kernel="walk", block_size=880, block_m=128):
    return COUNTS[kernel, card.arch, block_size, block_m]


def tile_by_tile(kv_rows, block_size, n, tail_n, rest_n):
    """The walk's tiles, one at a time, as its three loops take them."""
    found = collections.Counter()
    for start in range(0, kv_rows - block_size + 1, block_size):
        row = start
        while row + n <= start + block_size:
            found["full", n] += 1
            row += n
        if row < start + block_size:
            found["tail", tail_n] += 1
    row = kv_rows // block_size * block_size
    while row < kv_rows:
        found["rest", rest_n] += 1
        row += rest_n
    return found


@pytest.mark.parametrize("kv_rows", [25, 880, 905, 1759, 7945])
def test_tiles_of_a_program(kv_rows):
    call = Call("", 128, kv_rows, 880, 1, 1, 128)
    loops = gpu_predict.loops_of(walk_row(), tiles_of(H100, call), call)
    found = {(loop["role"], keys): count for loop, keys, count in loops}
    assert found == tile_by_tile(kv_rows, 880, 128, 128, 32)


def test_tiles_of_a_block_that_ends_in_a_short_tile():
    call = Call("", 128, 3 * 1560 + 33, 1560, 1, 1, 128)
    loops = gpu_predict.loops_of(walk_row(block_size=1560), tiles_of(H100, call), call)
    assert [(loop["role"], keys, n) for loop, keys, n in loops] == [
        ("full", 128, 36),
        ("tail", 32, 3),
        ("rest", 32, 2),
    ]


@pytest.mark.parametrize("num_programs", [1, 3, 7, 40])
@pytest.mark.parametrize("num_tiles", [1, 4, 9, 14])
def test_pieces_of_a_split(num_tiles, num_programs):
    """Against the takers of every single unit."""
    num_units, num_whole = 10, num_tiles // num_programs * num_programs
    tiles_of_program = collections.defaultdict(set)
    for tile in range(num_whole):
        tiles_of_program[tile % num_programs].add(tile)
    owners = [tile for tile in range(num_whole, num_tiles) for _ in range(num_units)]
    for unit, tile in enumerate(owners):
        tiles_of_program[unit // math.ceil(len(owners) / num_programs)].add(tile)
    most = max(map(len, tiles_of_program.values()))
    assert gpu_predict.pieces_of(num_units, num_tiles, num_programs) == most


def test_heads_are_read_once_a_wave():
    # 4 heads of 3 tiles, 4 at a time: 0001 1122 2333
    assert gpu_predict.heads_read(12, 4, 3) == 2 + 2 + 2
    assert gpu_predict.heads_read(12, 12, 3) == 4
    assert gpu_predict.heads_read(12, 1, 3) == 12


@pytest.mark.parametrize("query_rows", [128, 384, 1785])
def test_heads_read_by_a_split(query_rows):
    """A program of a whole wave reads with its neighbours; of the rest, each tile is read apart."""
    call = Call("", query_rows, 7945, 880, 40, 40, 128)
    row = walk_row(kernel="walk_split")
    found = gpu_predict.schedule_of(H100, row, tiles_of(H100, call), call, 132)
    num_tiles = -(-query_rows // 128) * 40
    heads = [i // (num_tiles // 40) for i in range(num_tiles)]
    waves = [heads[i : i + 132] for i in range(0, num_tiles, 132)]
    together = [len(set(wave)) for wave in waves]
    apart = [n if len(wave) == 132 else len(wave) for n, wave in zip(together, waves, strict=True)]
    assert found.passes == {"overlapped": sum(together), "serial": sum(apart)}


@pytest.mark.parametrize(
    ("query_rows", "heads"), [(1, 40), (128, 40), (880, 40), (1785, 40), (128, 132), (250, 66)]
)
def test_waves_against_a_queue_of_programs(query_rows, heads):
    """An idle multiprocessor takes the next program: when is the last one done?"""
    card = H100._replace(hbm_tbs=1000.0)
    call = Call("", query_rows, 880, 880, heads, heads, 128)
    row = walk_row()
    parts = predict(card, row, tiles_of(card, call), call).parts["serial"]
    one = predict(card, row, tiles_of(card, call), call._replace(query_rows=1, heads=1, kv_heads=1))
    seconds = sum(one.parts["serial"].values()) - gpu_predict.LAUNCH_SECONDS
    free = [0.0] * card.multiprocessors
    for _ in range(-(-query_rows // 128) * heads):
        heapq.heapreplace(free, free[0] + seconds)
    assert sum(parts.values()) == pytest.approx(max(free) + gpu_predict.LAUNCH_SECONDS)


def test_bytes_are_those_of_the_tensors():
    call = Call("", 5, 33, 16, 6, 2, 128)
    query = torch.empty(5, 6, 128, dtype=torch.bfloat16)
    pool = torch.empty(33, 2, 128, dtype=torch.bfloat16)
    assert call.query_bytes == 2 * query.nbytes
    assert call.kv_heads * call.head_bytes == 2 * pool.nbytes


def test_registers_and_shared_memory_limit_the_programs_of_a_multiprocessor():
    row = {"registers": 96, "num_warps": 4, "shared_bytes": 21760}
    assert gpu_predict.resident_of(H100, row) == 5  # of 12288 registers each
    assert gpu_predict.resident_of(H100, row | {"shared_bytes": 100 << 10}) == 2
    assert gpu_predict.resident_of(H100, row | {"registers": 97}) == 4  # 104 are taken


def test_counted_products_are_the_tiles_work():
    """mma.sync is 4096 FLOP: the compiler's count gives the FLOP that the model starts from."""
    for (kernel, arch, _, block_m), row in COUNTS.items():
        loop = row["loops"][0] if row["loops"] else {"role": ""}
        if arch == "sm_80" and kernel in ("walk", "gather", gpu_predict.PEER):
            assert loop["role"] == "full"
            flop = 4 * block_m * row["block_n"] * row["head_size"]
            assert loop["mma"] * row["num_warps"] * gpu_predict.MMA_SYNC_FLOP == flop


@pytest.mark.parametrize("name", gpu_predict.FACTS)
@pytest.mark.parametrize("kernel", ["walk", "walk_split", "gather", gpu_predict.PEER])
def test_more_keys_are_never_faster(name, kernel):
    """More whole blocks, or more rows of the last one, whose small tiles cost more than a whole.

    A share of a split launch may touch one tile fewer, and save its start.
    """
    card = card_of(name)
    split = card.multiprocessors if kernel == "walk_split" else 0
    block_size = 50 if kernel == "gather" else 880
    whole = range(block_size, 40 * block_size, block_size)
    for lengths in (whole, range(2 * block_size, 3 * block_size, 7)):
        calls = (Call("", 1785, kv_rows, block_size, 40, 40, 128) for kv_rows in lengths)
        times = [predict_call(card, COUNTS, call, split, kernel).seconds for call in calls]
        for bound in ("overlapped", "half", "serial"):
            found = [seconds[bound] for seconds in times]
            slack = gpu_predict.PROGRAM_SECONDS if split else 0.0
            assert all(b - a >= -slack for a, b in itertools.pairwise(found))
            assert found[-1] > found[0]


@pytest.mark.parametrize("name", gpu_predict.FACTS)
def test_no_call_beats_the_roofs(name):
    card = card_of(name)
    for preset in ("dreamzero_14b", "dreamzero_5b", "lingbot_world_720p", "longlive_2_5b"):
        for row in gpu_model.rows_of(card, preset, COUNTS):
            call = call_of(preset, row["call"])
            best, half, worst = row["seconds"].values()
            assert best <= half <= worst
            assert call.flop / best <= card.matmul_tflops * 1e12
            once = call.query_bytes + call.kv_heads * call.head_bytes
            assert once / best <= card.hbm_tbs * 1e12
            assert 1e6 * worst == pytest.approx(sum(row["microseconds_of"].values()), rel=2e-3)


def test_limiter():
    """Each limit where it must be the one."""
    full = call_of("dreamzero_14b", "span 4, denoise")
    action = call_of("dreamzero_14b", "action rows alone")

    def limiter(card, call, split=0, bound="serial"):
        return predict_call(card, COUNTS, call, split).limiter(bound)

    assert limiter(H100, full) == "tensor pipe"
    assert limiter(H100, action) == "waves"  # 40 programs on 132 multiprocessors
    assert limiter(H100, action, 132) == "HBM"
    assert limiter(H100, full._replace(query_rows=128, heads=1, kv_heads=1, kv_rows=25)) == "launch"
    fast = H100._replace(flop_per_clock=4 * 4096, matmul_tflops=4 * 794.5)
    assert limiter(fast._replace(l2_tbs=100.0), full) == "exponentials"
    assert limiter(fast._replace(l2_tbs=100.0, exponentials_per_clock=64), full) == "issue slots"
    assert limiter(H100._replace(l2_tbs=2.0), full) == "L2"
    assert limiter(H100._replace(hbm_tbs=0.1), full) == "HBM"


def test_wgmma_is_told_from_mma_sync():
    """vLLM's kernel runs mma.sync, which Hopper runs at 62.9 % of its rate."""
    row = COUNTS[gpu_predict.PEER, "sm_90", 880, 16]
    slow = gpu_predict.limits_of(H100, row, row["loops"][0], 32, 132)["tensor pipe"]
    assert slow == pytest.approx(4 * 16 * 32 * 128 / 4096 / 0.629)
    row = walk_row()
    fast = gpu_predict.limits_of(H100, row, row["loops"][0], 128, 132)["tensor pipe"]
    assert fast == 4 * 128 * 128 * 128 / 4096


def test_a_split_helps_where_waves_are_lost_and_hbm_has_room():
    call = call_of("dreamzero_14b", "one frame, full window")
    card = card_of("H200")
    whole = predict_call(card, COUNTS, call)
    split = predict_call(card, COUNTS, call, card.multiprocessors)
    assert split.seconds["serial"] < 0.8 * whole.seconds["serial"]
    assert whole.parts["serial"]["waves"] > 0 == split.parts["serial"]["waves"]


def test_an_unknown_card_is_refused():
    with pytest.raises(ValueError, match=r"`card` must be one of H100, H200, A100, B200, got 'T4'"):
        card_of("T4")
    with pytest.raises(ValueError, match="`preset` must have a window, got 'magi_1_24b'"):
        calls_of("magi_1_24b")
    for arguments, message in {
        ("--card", "T4"): "invalid choice: 'T4'",
        ("--block-size", "4096"): "see --compile",
    }.items():
        command = [sys.executable, "bench/gpu_model.py", *arguments]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 2
        assert message in found.stderr


def test_every_number_of_a_card_has_a_source():
    for facts in gpu_predict.FACTS.values():
        numbers = {key for key, value in facts.items() if isinstance(value, (int, float))}
        assert numbers == set(facts["sources"])
    assert all(report["source"] for report in gpu_predict.REPORTS)


def test_the_documented_errors():
    """The error table of docs/gpu_model.md, recomputed from the reports."""
    found = collections.defaultdict(list)
    for row in gpu_model.error_rows(COUNTS):
        name = row["what"] + (" (fitted)" if row["fitted"] else "")
        found[name, row["card"], row["bound"]].append(100 * row["error"])
    table = DOC.partition("error of the model |")[2].partition("\n\n")[0]
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(lines) == len(found)
    for what, card, bound, points, error in lines:
        errors = found[what, card, bound]
        assert int(points) == len(errors)
        stated = [float(x) for x in re.findall(r"[-+]?[\d.]+", error)]
        assert (stated[0], stated[-1]) == pytest.approx((min(errors), max(errors)))


def test_the_row_by_hand():
    """Every result of the worked row of docs/gpu_model.md."""
    call = call_of("dreamzero_14b", "span 4, denoise")
    found = predict_call(H100, COUNTS, call)
    loops = gpu_predict.loops_of(walk_row(), tiles_of(H100, call), call)
    tiles = [
        sum(
            gpu_predict.tile_parts(
                gpu_predict.limits_of(H100, walk_row(), *x, 132), "serial"
            ).values()
        )
        for x in ((loop, keys) for loop, keys, _ in loops)
    ]
    clocks = sum(tile * count for tile, (_, _, count) in zip(tiles, loops, strict=True))
    parts = {part: 1e6 * s for part, s in found.parts["serial"].items()}
    results = {
        r"each: ([\d.]+) GHz": H100.clock / 1e9,
        r"of stalls: (\d+)": tiles[0],
        r"the same, (\d+) clocks": tiles[1],
        r"last rows (\d+)": tiles[2],
        r"action rows: (\d+) clocks": clocks,
        r"clocks, ([\d.]+) us": 1e6 * clocks / H100.clock,
        r"are (\d+) programs": found.schedule.programs,
        r"programs, ([\d.]+) waves": found.schedule.even,
        r"takes 3 us: ([\d.]+) us": 1e6 * found.seconds["serial"],
        r"us, ([\d.]+) TFLOP/s": call.flop / found.seconds["serial"] / 1e12,
        r"the call ([\d.]+) us": 1e6 * found.seconds["overlapped"],
        r"tensor pipe takes (\d+)": parts["tensor pipe"],
        r"softmax (\d+), waves": parts["exponentials"] + parts["issue slots"],
        r"not full (\d+)": parts["waves"],
        r"stalls (\d+) and": parts["stalls"],
        r"starts (\d+)\.": parts["launch"],
        r"would take (\d+) us": 1e6 * found.seconds["half"],
    }
    text = " ".join(DOC.split())
    for pattern, result in results.items():
        stated = re.findall(pattern, text)[0]
        decimals = len(stated.partition(".")[2])
        assert abs(float(stated) - result) <= 0.501 * 10**-decimals, pattern


def test_the_documented_times():
    """The table of docs/gpu_model.md, from the committed rows."""
    lines = (ROOT / "bench/results/model.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("is_default")]
    table = DOC.partition("| call | queries x keys |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 9
    for line in table:
        call, shape, *cells = (x.strip() for x in line.split("|")[1:-1])
        query_rows, kv_rows = map(int, shape.split(" x "))
        for facts, cell in zip(gpu_predict.FACTS.values(), cells, strict=True):
            (row,) = (
                r
                for r in rows
                if (r["card"], r["query_rows"], r["kv_rows"])
                == (facts["device"], query_rows, kv_rows)
            )
            ms = [1e3 * row["seconds"][bound] for bound in ("serial", "overlapped")]
            split = " s" if row["kernel"] == "walk_split" else ""
            assert cell == f"{ms[0]:.4g} ({ms[1]:.4g}){split}", call


def test_the_fitted_constants():
    """Least squares through the reports that say so: seconds of a program against its tiles."""
    (report,) = (report for report in gpu_predict.REPORTS if report["fitted"])
    tiles, seconds = [], []
    for tokens, heads, tflops in report["points"]:
        programs_in_turn = -(-tokens * heads // 128 // H100.multiprocessors)
        total = 4 * tokens**2 * heads * 128 / tflops / 1e12 - gpu_predict.LAUNCH_SECONDS
        tiles.append(tokens // 128)
        seconds.append(total / programs_in_turn)
    slope, start = statistics.linear_regression(tiles, seconds)
    # The rest of a tile: two products, and the exponentials.
    stall = slope * H100.clock - 4 * 128**3 / 4096 - 128 * 128 / 16
    assert start == pytest.approx(gpu_predict.PROGRAM_SECONDS, rel=0.1)
    assert stall == pytest.approx(gpu_predict.STALL_CLOCKS, rel=0.1)


def test_committed_rows_are_what_the_model_says():
    """bench/results/model.jsonl is made again when the model, the counts or the tiles change."""
    lines = (ROOT / "bench/results/model.jsonl").read_text().splitlines()
    stored = [json.loads(line) for line in lines]
    assert all(row["label"] == "model, not measured" for row in stored)
    made_by = ("triton", "commit", "torch", "python")
    known = [{k: v for k, v in row.items() if k not in made_by} for row in stored]
    fresh = list(gpu_model.error_rows(COUNTS))
    for name in gpu_predict.FACTS:
        for preset in sorted(p for p, facts in gpu_model.PRESETS.items() if facts.window_frames):
            fresh += gpu_model.rows_of(card_of(name), preset, COUNTS)
    assert known == fresh


def test_a_measurement_is_shown_beside_the_model(tmp_path, monkeypatch, capsys):
    row = next(r for r in gpu_model.rows_of(H100, "krea_realtime_14b", COUNTS) if r["is_default"])
    serial = row["seconds"]["serial"]
    other = row | {"benchmark": "attention", "seconds": {"chunkattn": [serial / 2, 0.0, 0.0]}}
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "h100.jsonl"
    path.write_text(json.dumps(other | {"kv_rows": 1}) + "\n")
    monkeypatch.setattr(gpu_model, "BENCH", tmp_path)
    assert gpu_model.measured(row) is None  # of another call
    path.write_text(json.dumps(other) + "\n")
    gpu_model.show([row], "title")
    shown = capsys.readouterr().out
    assert "model, not measured" in shown
    assert f"{1e3 * serial / 2:.3f}" in shown
    assert "+100%" in shown


def test_figures(tmp_path):
    from gpu_figures import draw

    draw(COUNTS, tmp_path)
    for name in ("gpu_model_roofline.png", "gpu_model_window.png"):
        width = int.from_bytes((tmp_path / name).read_bytes()[16:20], "big")
        assert width >= 800
