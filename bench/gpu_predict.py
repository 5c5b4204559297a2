"""The model of bench/gpu_model.py: what a launch of an attention kernel costs a GPU.

What a tile of BLOCK_M query rows and N keys costs a multiprocessor, in clocks:

    tensor pipe    4 * BLOCK_M * N * head_size FLOP over the card's rate (Hopper's mma.sync: less)
    softmax        the larger of two: the loop's instructions without the products' (the compiler's
                   count) * warps / 4 schedulers; BLOCK_M * N exponentials over the card's rate
    L2             2 * N * head_size elements over the multiprocessor's share of the bandwidth

Two bounds. ``overlapped`` hides whatever can be hidden: a tile costs the largest of these.
``serial`` hides nothing: tensor pipe + softmax + `STALL_CLOCKS`, or L2 if that is more. ``half`` is
the middle of their times. Unless a kernel is specialised by warp, Triton puts a tile's first
product, softmax and second product one after another: ``serial`` is what to expect of ours.

Programs start one after another, `PROGRAM_SECONDS` each, on the busiest multiprocessor, which has
``ceil(tiles / multiprocessors)`` of them, or as many as any other where the launch is split. No
launch is faster than its bytes of HBM. The clock is the one at which the best public matrix product
of the card would have kept every tensor core busy.
"""

import collections
import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import cases

from chunkattn.kernels.split import split_sizes
from chunkattn.kernels.tuning import (
    GATHER_BELOW,
    WalkTiles,
    gather_tiles,
    split_programs,
    walk_tiles,
)
from chunkattn.presets import get_preset

Counts = dict[tuple[str, str, int, int], dict[str, Any]]

BENCH = Path(__file__).resolve().parent
FACTS = tomllib.loads((BENCH / "cards.toml").read_text())
REPORTS = FACTS.pop("report")
TRITON = "3.7.1"  # made the counts
COUNTS = BENCH / "results" / f"aot-triton-{TRITON}.json"
MORE_COUNTS = BENCH / "results" / f"aot-model-triton-{TRITON}.json"
PEER = "vllm_unified_attention"

# Fitted: the line through six points of the Triton tutorial on an H100 (cards.toml).
STALL_CLOCKS = 189  # of a tile: what its two products and the softmax wait for each other
PROGRAM_SECONDS = 4.17e-6  # of a program: start, query, first keys, result
# Assumed.
LAUNCH_SECONDS = 3e-6
SM_BYTES_PER_CLOCK = 64  # from L2 to one multiprocessor
HBM_SHARE = 0.9  # of the data sheet's bandwidth that reads reach
ELEMENT = 2  # bytes
SCHEDULERS = 4
MMA_SYNC_FLOP = 4096  # of one mma.sync.m16n8k16: one instruction of wgmma does more


class Card(NamedTuple):
    """One GPU; units and sources are cards.toml's."""

    name: str
    device: str
    arch: str
    multiprocessors: int
    flop_per_clock: int
    mma_sync_share: float
    exponentials_per_clock: int
    matmul_tflops: float
    hbm_tbs: float
    l2_tbs: float
    l2_mib: int
    shared_kib: int

    @property
    def clock(self) -> float:
        """Hz."""
        return self.matmul_tflops * 1e12 / (self.multiprocessors * self.flop_per_clock)

    @property
    def capability(self) -> int:
        return int(self.arch.removeprefix("sm_"))


class Call(NamedTuple):
    """One attention call over one sequence."""

    what: str
    query_rows: int
    kv_rows: int
    block_size: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def flop(self) -> int:
        return 4 * self.query_rows * self.kv_rows * self.heads * self.head_size

    @property
    def head_bytes(self) -> int:
        """K and V of one head."""
        return 2 * self.kv_rows * self.head_size * ELEMENT

    @property
    def query_bytes(self) -> int:
        """Query and result."""
        return 2 * self.query_rows * self.heads * self.head_size * ELEMENT


def card_of(name: str) -> Card:
    """Raises ValueError for a card without facts."""
    if name not in FACTS:
        raise ValueError(f"`card` must be one of {', '.join(FACTS)}, got {name!r}")
    facts = {key: value for key, value in FACTS[name].items() if key != "sources"}
    return Card(name, **facts)


def calls_of(preset_name: str, block_size: int | None = None) -> list[Call]:
    """The full window's call; of models with action rows every call of a cycle, and those alone.

    Args:
        preset_name: a model that has a window.
        block_size: tokens of a block; None: one frame's.
    """
    preset = get_preset(preset_name)
    if preset.window_frames is None:
        raise ValueError(f"`preset` must have a window, got {preset_name!r}")
    frame, full = preset.frame_tokens, preset.sink_frames + preset.window_frames
    shapes = [call[:3] for call in cases.calls_of(preset, preset.action_tokens > 0)]
    shapes.append(("one frame, full window", frame, full * frame))
    heads = (preset.heads, preset.kv_heads, preset.head_size)
    return [Call(*shape, block_size or frame, *heads) for shape in shapes]


def tiles_of(card: Card, call: Call) -> WalkTiles:
    """What `tuning` says of this call."""
    rows = call.query_rows * call.heads // call.kv_heads
    if call.block_size < GATHER_BELOW:
        return gather_tiles(card.capability, call.head_size, ELEMENT, rows)
    return walk_tiles(card.capability, call.head_size, ELEMENT, call.block_size, rows)


def chosen_split(card: Card, call: Call) -> int:
    """Programs that the launcher divides the keys among; 0: it does not."""
    if call.block_size < GATHER_BELOW:
        return 0
    tiles = num_tiles_of(tiles_of(card, call).block_m, call)
    return split_programs(tiles, card.multiprocessors)


def kernel_of(call: Call, num_split: int) -> str:
    """The name that the counts have for our kernel."""
    if call.block_size < GATHER_BELOW:
        return "gather"
    return "walk_split" if num_split else "walk"


def load_counts() -> Counts:
    """The compiler's counts by kernel, target, block size and BLOCK_M."""
    paths = (path for path in (COUNTS, MORE_COUNTS) if path.exists())
    rows = [row for path in paths for row in json.loads(path.read_text())]
    return {(r["kernel"], r["arch"], r["block_size"], r["block_m"]): r for r in rows}


class Schedule(NamedTuple):
    """How a launch lies on the card, in tiles of query rows."""

    programs: int
    resident: int  # programs that share a multiprocessor
    even: float  # tiles of a multiprocessor if all had the same
    busiest: float  # of the one that has most
    starts: int  # of programs one after another, or of pieces of a split launch's program
    launch_seconds: float
    passes: dict[str, int]  # over the K and V of a head, read from HBM; by bound


class Prediction(NamedTuple):
    """Seconds of each part of a call, by bound."""

    parts: dict[str, dict[str, float]]
    schedule: Schedule

    @property
    def seconds(self) -> dict[str, float]:
        overlapped, serial = (sum(self.parts[bound].values()) for bound in ("overlapped", "serial"))
        return {"overlapped": overlapped, "half": (overlapped + serial) / 2, "serial": serial}

    def limiter(self, bound: str = "serial") -> str:
        """The part that takes most of the time."""
        return max(self.parts[bound], key=self.parts[bound].__getitem__)


def limits_of(
    card: Card, row: dict[str, Any], loop: dict[str, Any], n: int, running: int
) -> dict[str, float]:
    """Clocks that one tile of ``n`` keys takes of each part of a multiprocessor.

    Args:
        card: the GPU.
        row: counts of the kernel.
        loop: counts of the loop that the tile belongs to.
        n: keys.
        running: multiprocessors that share L2.
    """
    flop = 4 * row["block_m"] * n * row["head_size"]
    is_async = flop > 1.5 * MMA_SYNC_FLOP * loop["mma"] * row["num_warps"]
    rate = card.flop_per_clock * (1.0 if is_async else card.mma_sync_share)
    l2_rate = min(SM_BYTES_PER_CLOCK, card.l2_tbs * 1e12 / card.clock / running)
    return {
        "tensor pipe": flop / rate,
        "issue slots": (loop["instructions"] - loop["mma"]) * row["num_warps"] / SCHEDULERS,
        "exponentials": row["block_m"] * n / card.exponentials_per_clock,
        "L2": 2 * n * row["head_size"] * ELEMENT / l2_rate,
    }


def tile_parts(limits: dict[str, float], bound: str, resident: int = 1) -> dict[str, float]:
    """What the clocks of a tile are spent on; other programs hide their share of the stalls."""
    if bound == "overlapped":
        name = max(limits, key=limits.__getitem__)
        return {name: limits[name]}
    softmax = max("issue slots", "exponentials", key=limits.__getitem__)
    parts = {name: limits[name] for name in ("tensor pipe", softmax)}
    parts["stalls"] = STALL_CLOCKS / resident
    return parts if sum(parts.values()) > limits["L2"] else {"L2": limits["L2"]}


def loops_of(row: dict[str, Any], tiles: WalkTiles, call: Call) -> list[tuple[Any, int, int]]:
    """The tiles of one program: counts of their loop, keys of a tile, how many."""
    roles, n = {loop["role"]: loop for loop in row["loops"]}, row["block_n"]
    if not row["kernel"].startswith("walk"):  # tiles span blocks
        return [(roles["full"], n, -(-call.kv_rows // n))]
    whole, rest = divmod(call.kv_rows, call.block_size)
    tails = whole if call.block_size % n else 0
    found = [
        ("full", n, whole * (call.block_size // n)),
        ("tail", tiles.tail_n, tails),
        ("rest", tiles.rest_n, -(-rest // tiles.rest_n)),
    ]
    return [(roles[role], keys, count) for role, keys, count in found if count]


def resident_of(card: Card, row: dict[str, Any]) -> int:
    """Programs that fit a multiprocessor's 64 Ki registers and its shared memory."""
    registers = -(-row["registers"] // 8) * 8 * 32 * row["num_warps"]
    shared = row["shared_bytes"] + 1024
    return min(65536 // registers, (card.shared_kib << 10) // shared, 32)


def num_tiles_of(block_m: int, call: Call) -> int:
    """Tiles of query rows, of all K/V heads."""
    rows = call.query_rows * call.heads // call.kv_heads
    return -(-rows // block_m) * call.kv_heads


def heads_read(num_tiles: int, num_running: int, per_head: int) -> int:
    """Passes over a head's K and V: the tiles of one head that run together read them once."""
    return len({(i // num_running, i // per_head) for i in range(num_tiles)})


def pieces_of(num_units: int, num_tiles: int, num_programs: int) -> int:
    """The most tiles, of ``num_units`` each, that one program takes part in (`kernels.split`)."""
    num_whole, num_rest = divmod(num_tiles, num_programs)
    total = num_units * num_rest
    share = max(1, -(-total // num_programs))
    shares = ((s, min(s + share, total) - 1) for s in range(0, total, share))
    touched = (last // num_units - first // num_units + 1 for first, last in shares)
    return num_whole + max(touched, default=0)


def schedule_of(
    card: Card, row: dict[str, Any], tiles: WalkTiles, call: Call, num_split: int
) -> Schedule:
    """How a launch lies on the card; arguments as `predict`."""
    num_tiles, fit = num_tiles_of(row["block_m"], call), resident_of(card, row)
    per_head = num_tiles // call.kv_heads
    fits_l2 = call.kv_heads * call.head_bytes <= card.l2_mib << 20
    if not num_split:
        busiest = -(-num_tiles // card.multiprocessors)
        running = card.multiprocessors * fit
        reads = call.kv_heads if fits_l2 else heads_read(num_tiles, running, per_head)
        return Schedule(
            programs=num_tiles,
            resident=min(fit, busiest),
            even=num_tiles / card.multiprocessors,
            busiest=busiest,
            starts=-(-busiest // fit),
            launch_seconds=LAUNCH_SECONDS,
            passes={"overlapped": reads, "serial": reads},
        )
    sizes = split_sizes(tiles, call.block_size, call.heads // call.kv_heads)
    whole, rest = divmod(call.kv_rows, call.block_size)
    units = whole * sizes.UNITS_PER_BLOCK + -(-rest // tiles.rest_n) * tiles.rest_n // 16
    even = num_tiles / num_split
    # Programs that share the tiles after the last whole wave start at different keys of a head: at
    # best they read it together, at worst each for itself.
    num_rest = num_tiles % num_split
    whole_waves = heads_read(num_tiles - num_rest, num_split, per_head)
    passes = {
        "overlapped": heads_read(num_tiles, num_split, per_head),
        "serial": whole_waves + num_rest,
    }
    records = 2 * num_split * row["block_m"] * (row["head_size"] + 2) * 4
    return Schedule(
        programs=num_split,
        resident=1,
        even=even,
        busiest=even,
        starts=pieces_of(units, num_tiles, num_split),
        launch_seconds=2 * (LAUNCH_SECONDS + records / (card.l2_tbs * 1e12)),  # and `merge`
        passes=dict.fromkeys(passes, call.kv_heads) if fits_l2 else passes,
    )


def predict(
    card: Card, row: dict[str, Any], tiles: WalkTiles, call: Call, num_split: int = 0
) -> Prediction:
    """Predict one launch, and the merge of a split one.

    Args:
        card: the GPU.
        row: the compiler's counts of the kernel.
        tiles: tile sizes of the walk.
        call: what is computed.
        num_split: programs that divide the keys of all tiles; 0: one program a tile.
    """
    plan = schedule_of(card, row, tiles, call, num_split)
    running = min(card.multiprocessors, plan.programs)
    parts: dict[str, dict[str, float]] = {}
    for bound in ("overlapped", "serial"):
        tile: collections.Counter[str] = collections.Counter()
        for loop, keys, count in loops_of(row, tiles, call):
            limits = limits_of(card, row, loop, keys, running)
            for part, clocks in tile_parts(limits, bound, plan.resident).items():
                tile[part] += count * clocks / card.clock
        parts[bound] = {part: plan.even * seconds for part, seconds in tile.items()}
        parts[bound]["waves"] = (plan.busiest - plan.even) * sum(tile.values())
        parts[bound]["launch"] = plan.starts * PROGRAM_SECONDS
        hbm = call.query_bytes + plan.passes[bound] * call.head_bytes
        hbm_seconds = hbm / (HBM_SHARE * card.hbm_tbs * 1e12)
        if hbm_seconds > sum(parts[bound].values()):
            parts[bound] = {"HBM": hbm_seconds, "launch": 0.0}
        parts[bound]["launch"] += plan.launch_seconds
    return Prediction(parts, plan)


def predict_call(
    card: Card, counts: Counts, call: Call, num_split: int = 0, kernel: str | None = None
) -> Prediction:
    """Predict a call as our kernels, or another of the counts, compute it.

    Raises:
        ValueError: the kernel was not compiled for this call (``--compile``).
    """
    tiles = tiles_of(card, call)
    kernel = kernel or kernel_of(call, num_split)
    block_m = 16 if kernel == PEER else tiles.block_m
    key = (kernel, card.arch, call.block_size, block_m)
    if key not in counts:
        raise ValueError(f"`counts` must have kernel, target, block size and rows, got no {key}")
    return predict(card, counts[key], tiles, call, num_split)
