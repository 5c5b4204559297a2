"""Tables and pictures of the README, made from the result files and from nothing else.

    python bench/report.py           # write README.md and docs/*.png
    python bench/report.py --check   # say whether README.md is what the result files give

Between ``<!-- results: NAME -->`` and ``<!-- end -->`` stands the table NAME. Of rows about the
same thing the last one counts. Results of a GPU get the same tables in ``docs/results-CARD.md``.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from timing import RESULTS, ROOT

from chunkattn.capacity import preset_capacity
from chunkattn.presets import PRESETS, get_preset

Row = dict[str, Any]
README, DOCS = ROOT / "README.md", ROOT / "docs"
BEGIN, END = "<!-- results: {} -->\n", "<!-- end -->"
AOT = RESULTS / "aot-triton-3.7.1.json"
SAME_THING = (
    *("benchmark", "preset", "call", "query_rows", "kv_rows", "block_size", "heads", "dtype"),
    *("layers", "sessions"),
)
OURS = "chunkattn"
FULL = ("full window", "span 4, denoise")
"""Calls whose window is full; the second in DreamZero's cycle."""
WIDTH = 8.4  # inches, 110 dots each: as wide as a README
# Okabe and Ito's colours, which stay apart for every kind of colour blindness.
COLOURS = {
    OURS: "#0072B2",
    "vllm-omni": "#D55E00",
    "concat": "#E69F00",
    "concat + sdpa": "#E69F00",
    "roll": "#009E73",
    "gather": "#CC79A7",
    "gather + sdpa": "#CC79A7",
    "sdpa contiguous": "#009E73",
}


# -- rows ------------------------------------------------------------------------------------------
def read_all(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path: Path) -> list[Row]:
    """The rows of a result file; of those about the same thing the last."""
    last: dict[tuple[Any, ...], Row] = {}
    for row in read_all(path):
        key = tuple(row.get(name) for name in SAME_THING)
        last[key] = row
    return list(last.values())


def of(rows: Iterable[Row], benchmark: str) -> list[Row]:
    return [row for row in rows if row["benchmark"] == benchmark]


def markdown(header: list[str], lines: Iterable[list[str]]) -> str:
    """A table: text on the left, numbers on the right."""
    rule = ["---" if not i else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *lines))


# -- tables ----------------------------------------------------------------------------------------
def attention(rows: list[Row]) -> str:
    found = [row for row in of(rows, "attention") if "ratio" in row]
    names: dict[str, None] = {}
    for row in found:
        names |= dict.fromkeys(name for name in row["ratio"] if name != OURS)

    def line(row: Row) -> list[str]:
        return [
            f"{row['preset']}, {row['call']}",
            f"{row['query_rows']} x {row['kv_rows']}",
            f"{row['block_size']}",
            row["dtype"],
            f"{row['share_of_roof'][OURS]:.2f}",
            *(f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in names),
            f"{row['copied_kv_bytes'] / 1e6:.1f}",
        ]

    header = ["model, call", "queries x keys", "block", "K/V", "of the roof", *names, "MB copied"]
    return markdown(header, map(line, found)) + _beside_vllm_omni(found)


def _beside_vllm_omni(rows: list[Row], name: str = "vllm-omni") -> str:
    """What the roof says about the ratio to a reference, and what that is in the models' dtype."""
    by_dtype: dict[str, list[Row]] = {}
    for row in rows:
        if row["call"] in FULL and name in row["ratio"]:
            by_dtype.setdefault(row["dtype"], []).append(row)
    if {"float32", "bfloat16"} - set(by_dtype):
        return ""
    share = statistics.median(row["share_of_roof"][name] for row in by_dtype["float32"])
    ratios = (f"{row['ratio'][name]:.0f} ({row['preset']})" for row in by_dtype["bfloat16"])
    return (
        f"\nIn float32 the median share of the roof of {name}'s reference is {share:.2f} in full "
        f"windows, so what keeps below the roof is at most {1 / share:.1f} times as fast. "
        f"In bfloat16, in which the models run, it takes {' and '.join(ratios)} times as long as "
        "ours.\n"
    )


def scatter(rows: list[Row]) -> str:
    lines = []
    for row in of(rows, "scatter"):
        shape = f"{row['preset']}: {row['rows']} rows of {row['heads']} x {row['head_size']}"
        for name, ratio in row["ratio"].items():
            rate = row["bytes"][name] / row["seconds"][name][0] / 1e9
            lines.append(
                [shape, name, f"{rate:.1f}", f"{row['share_of_roof'][name]:.2f}", f"{ratio:.2f}"]
            )
    return markdown(["span", "variant", "GB/s", "of a large copy", "time over ours"], lines)


def rollout(rows: list[Row]) -> str:
    found = of(rows, "rollout")
    names: dict[str, None] = {}
    for row in found:
        names |= dict.fromkeys(name for name in row["ratio"] if name != OURS)
    return markdown(
        ["model", "sessions", "forwards", "layers x heads", "seconds", *names],
        (
            [
                row["preset"],
                *(f"{row[name]}" for name in ("sessions", "forwards")),
                f"{row['layers']} x {row['heads']}",
                f"{row['seconds'][OURS]:.2f}",
                *(f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in names),
            ]
            for row in found
        ),
    )


def plan(rows: list[Row]) -> str:
    flat = [
        f"{row['preset']} {row['flat'][OURS]:.2f} (span {list(row['by_span'][OURS])[-1]})"
        for row in of(rows, "plan")
    ]
    table = markdown(
        ["model, forward", "chunkattn µs", "vllm-omni µs", "theirs / ours"],
        (
            [
                f"{row['preset']}, {kind}",
                f"{1e6 * row['seconds'][OURS][kind][0]:.0f}",
                f"{1e6 * row['seconds']['vllm-omni'][kind][0]:.0f}",
                f"{ratio:.1f}",
            ]
            for row in of(rows, "plan")
            for kind, ratio in row["ratio"].items()
        ),
    )
    return f"{table}\nA late span over span 100, chunkattn: {', '.join(flat)}.\n"


def memory(rows: list[Row]) -> str:
    ways = (OURS, "concat", "roll", "gather")
    return markdown(
        ["model", "visible GB", *(f"{way} holds" for way in ways), *(f"{w} copies" for w in ways)],
        (
            [
                row["preset"],
                f"{row['visible_bytes'] / 1e9:.2f}",
                *(f"{row['held_bytes'][way] / 1e9:.2f}" for way in ways),
                *(f"{row['copied_bytes'][way] / 1e9:.1f}" for way in ways),
            ]
            for row in of(rows, "memory")
        ),
    )


def capacity(_rows: list[Row], budget_gib: int = 141) -> str:
    """Arithmetic, not a measurement."""
    lines = []
    for name in PRESETS:
        preset = get_preset(name)
        if preset.window_frames is None:
            continue
        found = preset_capacity(preset, budget_gib << 30)
        one = preset_capacity(preset, found["fixed"] + found["self_attention"])
        fp8 = preset_capacity(preset, budget_gib << 30, kv_dtype="fp8")
        lines.append(
            [
                name,
                f"{found['block_size']}",
                f"{found['self_attention'] / 1e9:.2f}",
                f"{one['pool_over_ideal']:.4f}",
                f"{found['sessions']}",
                f"{fp8['sessions']}",
                f"{found['bytes_read_per_forward'] / 1e9:.2f}",
            ]
        )
    sessions = f"sessions in {budget_gib} GiB"
    header = ["model", "block", "GB per session", "pool / ideal", sessions, "with fp8"]
    return markdown([*header, "GB read per forward"], lines)


def compiler(_rows: list[Row]) -> str:
    """Of the compiler's counts, not of a run."""
    found = {(r["kernel"], r["arch"], r["block_size"]): r for r in json.loads(AOT.read_text())}
    theirs = _issue_slots(found["vllm_unified_attention", "sm_90", 880])
    shown = (
        ("sm_90, tensor descriptors", "walk", "sm_90", 880),
        ("sm_90, tensor descriptors", "walk", "sm_90", 1560),
        ("sm_90, pointers", "walk_pointers", "sm_90", 880),
        ("sm_90, keys split over 132 programs", "walk_split", "sm_90", 880),
        ("sm_100, tensor descriptors", "walk", "sm_100", 880),
        ("sm_80", "walk", "sm_80", 880),
        ("sm_90, rows looked up", "gather", "sm_90", 16),
    )

    def line(target: str, *key: Any) -> list[str]:
        row = found[key]
        loops = {loop["role"]: loop["instructions"] for loop in row["loops"]}
        return [
            target,
            f"{row['block_m']}x{row['block_n']}",
            f"{row['block_size']}",
            *(f"{loops.get(role, '')}" for role in ("full", "tail")),
            f"{row['stack_bytes']}",
            f"{_issue_slots(row) / theirs:.3f}" if key == ("walk", "sm_90", 880) else "",
        ]

    header = ["target", "tile", "block", "full tiles", "last tile", "stack bytes"]
    return markdown([*header, "issue slots a score, of vLLM's"], (line(*key) for key in shown))


def model(_rows: list[Row]) -> str:
    """Predicted, not measured: milliseconds with nothing overlapped (with everything)."""
    found = [r for r in read_all(RESULTS / "model.jsonl") if r.get("is_default")]
    cards = list(dict.fromkeys(row["card"] for row in found))
    times: dict[str, dict[str, str]] = {}
    for row in found:
        if row["call"] in FULL or (row["preset"] == "dreamzero_14b" and "one" in row["call"]):
            shape = f"{row['query_rows']} x {row['kv_rows']}"
            serial, overlapped = (1e3 * row["seconds"][b] for b in ("serial", "overlapped"))
            line = times.setdefault(f"{row['preset']}, {row['call']}, {shape}", {})
            line[row["card"]] = f"{serial:.3g} ({overlapped:.3g})"
    table = markdown(
        ["model, call, queries x keys", *cards],
        ([what, *(line.get(card, "") for card in cards)] for what, line in times.items()),
    )
    return f"{table}\nPredicted over reported speed: {'; '.join(_errors())}.\n"


def _errors() -> list[str]:
    """How far the model is off each public figure that it was not fitted to."""
    errors: dict[str, list[float]] = {}
    for row in read_all(RESULTS / "model.jsonl"):
        if row["benchmark"] == "attention model error" and not row["fitted"]:
            what = f"{row['what']} on {row['card'].split()[0]} ({row['bound']})"
            errors.setdefault(what, []).append(1 + row["error"])
    return [
        f"{what} {' to '.join(f'{e:.2f}' for e in sorted({min(found), max(found)}))}"
        for what, found in errors.items()
    ]


def _issue_slots(row: Row) -> float:
    full = next(loop for loop in row["loops"] if loop["role"] == "full")
    return full["instructions"] * row["num_warps"] / (row["block_m"] * row["block_n"])


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "attention": attention,
    "rollout": rollout,
    "scatter": scatter,
    "plan": plan,
    "memory": memory,
    "capacity": capacity,
    "compiler": compiler,
    "model": model,
}
MEASURED = ("attention", "rollout", "scatter", "plan", "memory")


def filled(text: str, rows: list[Row]) -> str:
    """The text with every table made anew."""
    for name, make in TABLES.items():
        begin = BEGIN.format(name)
        head, found, rest = text.partition(begin)
        if found:
            text = head + begin + make(rows) + END + rest.partition(END)[2]
    return text


def page(rows: list[Row]) -> str:
    """All tables of a GPU's results."""
    card, versions = rows[-1]["card"], f"torch {rows[-1]['torch']}"
    parts = [f"# {card}\n\nMade by `bench/report.py`; {versions}, commit {rows[-1]['commit']}.\n"]
    parts += [f"## {name}\n\n{TABLES[name](rows)}" for name in MEASURED if of(rows, name)]
    return "\n".join(parts)


# -- pictures --------------------------------------------------------------------------------------
def draw_all(rows: list[Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "savefig.dpi": 110})
    for name, draw in PICTURES.items():
        figure = draw(rows)
        if figure.get_layout_engine() is None:
            figure.tight_layout()
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def peers_picture(rows: list[Row]) -> Any:
    """How long the peers take over ours, a group of bars a call."""
    from matplotlib import pyplot

    full: dict[tuple[str, int], Row] = {}  # the last span of a cycle, or the only call
    for row in of(rows, "attention"):
        if "ratio" in row and row["dtype"] == "float32" and row["call"] in FULL:
            full[row["preset"], row["block_size"]] = row
    calls = list(full.values())
    names = [name for name in calls[0]["ratio"] if name != OURS]
    figure, axis = pyplot.subplots(figsize=(WIDTH, 3.6))
    step = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [number + (i - (len(names) - 1) / 2) * step for number in range(len(calls))]
        heights = [row["ratio"].get(name, 0) for row in calls]
        axis.bar(at, heights, step * 0.92, color=COLOURS[name], label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    labels = [f"{row['preset']}\nblock {row['block_size']}" for row in calls]
    axis.set_xticks(range(len(calls)), labels, rotation=28, ha="right", fontsize=8)
    axis.set_ylabel("time over chunkattn's")
    axis.set_title(f"Attention over a full window, {calls[0]['card']}, float32", loc="left")
    axis.legend(ncols=len(names), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    axis.set_ylim(0, 1.25 * max(max(row["ratio"].values()) for row in calls))
    return figure


def window_picture(rows: list[Row]) -> Any:
    """Time of a denoise forward against the keys that it sees, as DreamZero's window grows."""
    from matplotlib import pyplot

    calls = [
        row
        for row in of(rows, "attention")
        if row["preset"] == "dreamzero_14b" and row.get("call", "").endswith("denoise")
    ]
    figure, axis = pyplot.subplots(figsize=(WIDTH, 3.4))
    for name in calls[0]["ratio"]:
        median, p20, p80 = ([1e3 * row["seconds"][name][i] for row in calls] for i in range(3))
        keys = [row["kv_rows"] for row in calls]
        axis.plot(keys, median, marker="o", markersize=4, color=COLOURS[name], label=name)
        axis.fill_between(keys, p20, p80, color=COLOURS[name], alpha=0.15, linewidth=0)
    axis.set(xlabel="visible keys", ylabel="ms a layer")
    axis.set_xlim(0)
    axis.set_ylim(0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    row = calls[0]
    axis.set_title(
        f"A denoise forward of DreamZero as its window grows: {row['query_rows']} queries, "
        f"{row['heads']} heads, {row['card']}",
        loc="left",
    )
    return figure


def plan_picture(rows: list[Row]) -> Any:
    """Host time of a span against its number: both systems, one panel a model."""
    from matplotlib import pyplot

    models = of(rows, "plan")
    figure, axes = pyplot.subplots(1, len(models), figsize=(WIDTH, 3), sharey=True, squeeze=False)
    for axis, row in zip(axes[0], models, strict=True):
        for name, marker in (("vllm-omni", "s"), (OURS, "o")):
            spans = [int(span) for span in row["by_span"][name]]
            median = [1e6 * times[0] for times in row["by_span"][name].values()]
            axis.plot(spans, median, marker=marker, color=COLOURS[name], label=name)
        axis.set(xscale="log", title=row["preset"], xlabel="span number")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("host µs, denoise + commit")
    axes[0][0].set_ylim(0)
    axes[0][0].legend(loc="center right", frameon=False)
    return figure


def memory_picture(rows: list[Row]) -> Any:
    """What each way holds and copies, over the K/V that a forward sees."""
    from matplotlib import pyplot

    models = of(rows, "memory")
    ways = (OURS, "concat", "roll", "gather")
    shape = {"figsize": (WIDTH, 3.8), "sharey": True, "layout": "constrained"}
    figure, (held, copied) = pyplot.subplots(1, 2, **shape)
    for i, way in enumerate(ways):
        at = [number + (i - 1.5) * 0.2 for number in range(len(models))]
        style = {"height": 0.18, "color": COLOURS[way]}
        held.barh(
            at, [r["held_bytes"][way] / r["visible_bytes"] for r in models], label=way, **style
        )
        copied.barh(at, [row["copied_bytes"][way] / 1e9 for row in models], **style)
    held.set(title="K/V held at most", xlabel="over the K/V that a forward sees")
    held.axvline(1, color="black", linewidth=0.8)
    copied.set(title="K/V copied in a span", xlabel="GB, one branch", xscale="log")
    for panel in (held, copied):
        panel.grid(axis="x", alpha=0.3)
    held.set_yticks(range(len(models)), [row["preset"] for row in models])
    held.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(ways), frameon=False)
    return figure


PICTURES: dict[str, Callable[[list[Row]], Any]] = {
    "peers": peers_picture,
    "window_length": window_picture,
    "plan_cost": plan_picture,
    "memory": memory_picture,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if README.md is old")
    args = parser.parse_args()
    rows = read(RESULTS / "cpu.jsonl")
    text = README.read_text()
    new = filled(text, rows)
    if args.check:
        if new != text:
            print("README.md is not what bench/results gives: python bench/report.py")
        return int(new != text)
    README.write_text(new)
    draw_all(rows, DOCS)
    for path in RESULTS.glob("*.jsonl"):
        if path.stem not in ("cpu", "model"):
            (DOCS / f"results-{path.stem}.md").write_text(page(read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
