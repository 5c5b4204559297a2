"""A picture of a rollout: which chunk lies in which block, forward by forward.

Chunks run down, forwards run across. ``lay_out`` turns a plain list of records into cells, without
drawing anything; ``draw`` paints those cells with matplotlib.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Kind(Enum):
    """What a chunk is to the forward of a column; the value is its line in the legend."""

    SINK = "sink: history that stays visible for ever"
    WINDOW = "window: history that this forward sees"
    IN_FLIGHT = "in flight: written by this forward, then history"
    SCRATCH = "scratch: written by this forward, then overwritten"
    HELD = "held, but outside this forward's window"
    EVICTED = "evicted: the block (in brackets) is free again"


# Okabe and Ito's colours, which stay apart for every kind of colour blindness.
COLOURS = {
    Kind.SINK: "#009E73",
    Kind.WINDOW: "#56B4E9",
    Kind.IN_FLIGHT: "#E69F00",
    Kind.SCRATCH: "#F0E442",
    Kind.HELD: "#CC79A7",
    Kind.EVICTED: "#E4E4E4",
}


@dataclass(frozen=True)
class ForwardRecord:
    """One column of the picture: a forward, or several that had the very same plan.

    Attributes:
        first_chunk: first chunk of the span, counted from the last reset.
        num_chunks: chunks of the span.
        commit: the span's K/V become history when the forward ends.
        visible_chunks: every chunk attended, the span included.
        block_ids: blocks of each visible chunk; a chunk may be missing where none are known.
        evicted_chunks: chunks that had lost a block when the forward had ended.
        action_block_ids: scratch blocks of the action and state rows, if any came along.
        rollout: hard resets before this forward. A reset frees every chunk before it.
        forwards: how many forwards in a row this column stands for.
    """

    first_chunk: int
    num_chunks: int
    commit: bool
    visible_chunks: tuple[int, ...]
    block_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    evicted_chunks: tuple[int, ...] = ()
    action_block_ids: tuple[int, ...] = ()
    rollout: int = 0
    forwards: int = 1

    @property
    def span(self) -> range:
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True)
class Cell:
    """One coloured square: row and column count from the top left."""

    row: int
    column: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class Layout:
    """Everything ``draw`` needs, as plain data.

    Attributes:
        rows: label of each row: the chunks, then one row for action and state if they came along.
        columns: label of each column, one per record.
        cells: the squares, at most one for each row and column.
        rollouts: the rows of each rollout, from one hard reset to the next.
        resets: columns before which everything was freed at once.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    rollouts: tuple[range, ...]
    resets: tuple[int, ...]


def lay_out(
    records: Sequence[ForwardRecord], *, sink_chunks: int = 0, join: bool = False
) -> Layout:
    """Decide what every square of the picture shows.

    Args:
        records: the forwards of one guidance branch, in order.
        sink_chunks: how many first chunks count as sink.
        join: give the chunks of a span one row, where those of each look alike in every column.

    Raises:
        ValueError: ``records`` is empty.
    """
    if not records:
        raise ValueError("`records` must hold at least one forward, got none")
    every = sorted({(r.rollout, chunk) for r in records for chunk in (*r.span, *r.visible_chunks)})
    rows = [[key] for key in every]
    if join:
        alike = _runs([_looks(records, *key, sink_chunks) for key in every])
        spans = {(record.rollout, record.first_chunk) for record in records}
        if all(every[run.start] in spans for run in alike):
            rows = [every[run.start : run.stop] for run in alike]
    labels = [_numbers([chunk for _, chunk in row]) for row in rows]
    cells: list[Cell] = []
    blocks: dict[tuple[int, int], tuple[int, ...]] = {}  # of every chunk committed so far
    freed: set[tuple[int, int]] = set()
    announced: set[int] = set()  # rows that were evicted, and their block ids written once
    for column, record in enumerate(records):
        freed.update(key for key in blocks if key[0] < record.rollout)
        for number, row in enumerate(rows):
            key = rollout, chunk = row[0]
            if rollout == record.rollout and chunk in record.visible_chunks:
                kind = _visible_kind(record, chunk, sink_chunks)
                ids = [i for _, c in row for i in record.block_ids.get(c, ())]
                cells.append(Cell(number, column, kind, _ids(ids)))
            elif key in blocks:
                kind = Kind.EVICTED if key in freed else Kind.HELD
                text = _ids([i for k in row for i in blocks[k]])
                if kind is Kind.EVICTED:
                    text = f"({text})" if text and number not in announced else ""
                    announced.add(number)
                cells.append(Cell(number, column, kind, text))
        if record.action_block_ids:
            text = _ids(record.action_block_ids)
            cells.append(Cell(len(rows), column, Kind.SCRATCH, text))
        if record.commit:
            for chunk in record.span:
                blocks[record.rollout, chunk] = tuple(record.block_ids.get(chunk, ()))
        freed.update((record.rollout, chunk) for chunk in record.evicted_chunks)
    if any(record.action_block_ids for record in records):
        labels.append("action\n+ state")
    return Layout(
        rows=tuple(labels),
        columns=tuple(_column_label(record) for record in records),
        cells=tuple(cells),
        rollouts=_runs([row[0][0] for row in rows]),
        resets=tuple(run.start for run in _runs([r.rollout for r in records])[1:]),
    )


def describe(
    records: Sequence[ForwardRecord], *, sink_chunks: int = 0
) -> list[list[tuple[str, str]]]:
    """Say in words what each forward sees, which blocks hold it and what leaves.

    Args:
        records, sink_chunks: as for `lay_out`.

    Returns:
        For each record, lines of a heading and a text.
    """
    told = []
    known: dict[int, tuple[int, ...]] = {}  # blocks of the chunks committed last
    for record in records:
        span, visible = record.span, record.visible_chunks
        rollout = f", rollout {record.rollout + 1}" if records[-1].rollout else ""
        what = "commit" if record.commit else f"denoise x {record.forwards}"
        lines = [("forward", f"{what} of {_named('chunk', span)}{rollout}")]
        lines.append(("sees", _named("chunk", visible)))
        for kind in (Kind.SINK, Kind.WINDOW, Kind.IN_FLIGHT, Kind.SCRATCH):
            chunks = [c for c in visible if _visible_kind(record, c, sink_chunks) is kind]
            if chunks:
                lines.append((kind.name.lower().replace("_", " "), _held(chunks, record.block_ids)))
        if record.action_block_ids:
            lines.append(("action + state", _named("block", record.action_block_ids)))
        if record.commit:
            known.update(record.block_ids)
        leaves = _held(record.evicted_chunks, known) if record.evicted_chunks else "nothing"
        lines.append(("leaves", leaves))
        told.append(lines)
    return told


def _runs(values: Sequence[object]) -> tuple[range, ...]:
    """Where equal values lie side by side, as ranges of positions."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return tuple(map(range, starts, [*starts[1:], len(values)]))


def _visible_kind(record: ForwardRecord, chunk: int, sink_chunks: int) -> Kind:
    if chunk in record.span:
        return Kind.IN_FLIGHT if record.commit else Kind.SCRATCH
    return Kind.SINK if chunk < sink_chunks else Kind.WINDOW


def _column_label(record: ForwardRecord) -> str:
    first, last = record.span[0], record.span[-1]
    span = str(first) if first == last else f"{first}-{last}"
    if record.commit:
        return f"{span}\ncommit"
    return f"{span}\ndenoise" + (f"\nx {record.forwards}" if record.forwards > 1 else "")


def _looks(
    records: Sequence[ForwardRecord], rollout: int, chunk: int, sink_chunks: int
) -> tuple[object, ...]:
    """What is the same for two chunks that look alike in every column."""
    places = [
        (chunk in r.span, chunk in r.visible_chunks, chunk in r.evicted_chunks)
        for r in records
        if r.rollout == rollout
    ]
    return rollout, chunk < sink_chunks, *places


def _words(numbers: Sequence[int]) -> list[str]:
    """Runs of numbers, as ``3-7``."""
    runs: list[list[int]] = []
    for number in dict.fromkeys(numbers):  # two chunks may share a block
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(_words(numbers))


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {_numbers(numbers)}"


def _held(chunks: Sequence[int], block_ids: Mapping[int, tuple[int, ...]]) -> str:
    ids = {i: None for chunk in chunks for i in block_ids.get(chunk, ())}
    return _numbers(chunks) + (f" in {_named('block', list(ids))}" if ids else "")


def _ids(block_ids: Sequence[int]) -> str:
    """Write block ids short: no more than two runs."""
    words = _words(block_ids)
    return ",".join(words) if len(words) <= 2 else f"{words[0]},.."


def draw(layout: Layout, path: Path, *, title: str, subtitle: str = "") -> None:
    """Paint a layout as a PNG file.

    Args:
        layout: what ``lay_out`` returned.
        path: file to write.
        title: first line over the picture.
        subtitle: smaller lines under the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    num_columns, num_rows = len(layout.columns), len(layout.rows)
    above, below, before, after = 1.05, 1.45, 1.0, 0.15  # margins in inches
    longest = max(len(cell.text) for cell in layout.cells)
    column_width = max(0.47, 0.08 * longest + 0.08)
    width = max(9.6, before + after + column_width * num_columns)
    height = above + below + 0.29 * num_rows
    left = before / width
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes(
        (left, below / height, 1 - left - after / width, 1 - (above + below) / height)
    )

    for cell in layout.cells:
        square = Rectangle(
            (cell.column, cell.row), 1, 1, facecolor=COLOURS[cell.kind], edgecolor="white"
        )
        axes.add_patch(square)
        if not cell.text:
            continue
        axes.text(
            cell.column + 0.5,
            cell.row + 0.53,
            cell.text,
            ha="center",
            va="center",
            fontsize=8.5,
            color="#555555" if cell.kind is Kind.EVICTED else "black",
        )
    for column in layout.resets:
        axes.axvline(column, color="black", linewidth=1.5, linestyle=(0, (4, 2)))
        axes.text(column, -0.15, "hard reset", ha="center", va="bottom", fontsize=8.5)
    if len(layout.rollouts) > 1:
        for number, rows in enumerate(layout.rollouts, 1):
            middle = (rows.start + rows.stop) / 2
            axes.annotate(
                f"rollout {number}",
                (0, middle),
                xytext=(-28, 0),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="center",
                fontsize=8.5,
            )

    axes.set_xlim(0, num_columns)
    axes.set_ylim(num_rows, 0)
    axes.set_xticks([column + 0.5 for column in range(num_columns)], layout.columns, fontsize=7.5)
    axes.set_yticks([row + 0.5 for row in range(num_rows)], layout.rows, fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("forward: the chunks it generates, and whether it keeps them", fontsize=9.5)
    axes.set_ylabel("chunk (one latent frame)", fontsize=9.5)
    axes.yaxis.set_label_coords(-0.8 * before / (width - before - after), 0.5)

    used = {cell.kind for cell in layout.cells}
    handles = [
        Patch(facecolor=colour, edgecolor="#999999", label=kind.value)
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    figure.text(left, 1 - 0.12 / height, title, fontsize=12, weight="bold", va="top")
    figure.text(left, 1 - 0.38 / height, subtitle, fontsize=8.5, va="top", color="#333333")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 0.68 / height),
        ncols=2,
        fontsize=8.5,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
    )
    figure.savefig(path)
