"""The timeline picture: every square says what the records say."""

import dataclasses
from pathlib import Path

import pytest

from chunkattn.timeline import COLOURS, Cell, ForwardRecord, Kind, Layout, describe, draw, lay_out

# Sink 1, window 3, one chunk a span: chunk 1 leaves when chunk 4 has been committed.
SLIDING = [
    ForwardRecord(0, 1, True, (0,), {0: (5,)}),
    ForwardRecord(1, 1, True, (0, 1), {0: (5,), 1: (6,)}),
    ForwardRecord(2, 1, True, (0, 1, 2), {0: (5,), 1: (6,), 2: (7,)}),
    ForwardRecord(3, 1, True, (0, 1, 2, 3), {0: (5,), 1: (6,), 2: (7,), 3: (8,)}),
    ForwardRecord(
        4, 1, False, (0, 2, 3, 4), {0: (5,), 2: (7,), 3: (8,), 4: (90,)}, (), (91,), 0, 4
    ),
    ForwardRecord(4, 1, True, (0, 2, 3, 4), {0: (5,), 2: (7,), 3: (8,), 4: (9,)}, (1,)),
    ForwardRecord(5, 1, True, (0, 3, 4, 5), {0: (5,), 3: (8,), 4: (9,), 5: (6,)}, (2,)),
    ForwardRecord(6, 1, True, (0, 4, 5, 6), {0: (5,), 4: (9,), 5: (6,), 6: (7,)}, (3,)),
]


def column(layout: Layout, number: int) -> dict[str, tuple[Kind, str]]:
    """The squares of one column, by the label of their row."""
    return {
        layout.rows[cell.row]: (cell.kind, cell.text)
        for cell in layout.cells
        if cell.column == number
    }


def test_a_sliding_window_with_a_sink() -> None:
    layout = lay_out(SLIDING, sink_chunks=1)
    assert layout.rows == ("0", "1", "2", "3", "4", "5", "6", "action\n+ state")
    assert column(layout, 0) == {"0": (Kind.IN_FLIGHT, "5")}
    assert column(layout, 3) == {
        "0": (Kind.SINK, "5"),
        "1": (Kind.WINDOW, "6"),
        "2": (Kind.WINDOW, "7"),
        "3": (Kind.IN_FLIGHT, "8"),
    }
    # Denoise: chunk 1 is out of sight but still held, the span and the action rows are scratch.
    assert column(layout, 4) == {
        "0": (Kind.SINK, "5"),
        "1": (Kind.HELD, "6"),
        "2": (Kind.WINDOW, "7"),
        "3": (Kind.WINDOW, "8"),
        "4": (Kind.SCRATCH, "90"),
        "action\n+ state": (Kind.SCRATCH, "91"),
    }
    # Its commit frees chunk 1 when it ends, so the block is free, and named, one column later.
    assert column(layout, 5)["1"] == (Kind.HELD, "6")
    assert column(layout, 5)["4"] == (Kind.IN_FLIGHT, "9")
    assert column(layout, 6)["1"] == (Kind.EVICTED, "(6)")
    assert column(layout, 6)["2"] == (Kind.HELD, "7")
    assert column(layout, 6)["5"] == (Kind.IN_FLIGHT, "6")  # the block is used again
    assert column(layout, 7)["1"] == (Kind.EVICTED, "")
    assert column(layout, 7)["2"] == (Kind.EVICTED, "(7)")
    assert layout.resets == ()


def test_a_hard_reset_frees_everything_and_starts_new_rows() -> None:
    again = [dataclasses.replace(record, rollout=1) for record in SLIDING[:2]]
    layout = lay_out(SLIDING[:3] + again)
    assert layout.rows == ("0", "1", "2", "0", "1")
    assert layout.rollouts == (range(0, 3), range(3, 5))
    assert layout.resets == (3,)
    kinds = {(cell.row, cell.column): (cell.kind, cell.text) for cell in layout.cells}
    assert [kinds[row, 3] for row in range(3)] == [
        (Kind.EVICTED, "(5)"),
        (Kind.EVICTED, "(6)"),
        (Kind.EVICTED, "(7)"),
    ]
    assert kinds[3, 3] == (Kind.IN_FLIGHT, "5")
    assert (4, 3) not in kinds
    assert [kinds[row, 4] for row in range(5)] == [
        (Kind.EVICTED, ""),
        (Kind.EVICTED, ""),
        (Kind.EVICTED, ""),
        (Kind.WINDOW, "5"),
        (Kind.IN_FLIGHT, "6"),
    ]


def test_no_square_is_painted_twice() -> None:
    places = [(cell.row, cell.column) for cell in lay_out(SLIDING, sink_chunks=1).cells]
    assert len(places) == len(set(places))


def test_column_labels() -> None:
    records = [SLIDING[0], SLIDING[4], ForwardRecord(1, 2, False, (0, 1, 2))]
    assert lay_out(records).columns == ("0\ncommit", "4\ndenoise\nx 4", "1-2\ndenoise")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [((), ""), ((3,), "3"), ((3, 4, 5), "3-5"), ((3, 4, 9), "3-4,9"), ((3, 5, 7, 9), "3,..")],
)
def test_block_ids_are_written_short(blocks: tuple[int, ...], text: str) -> None:
    layout = lay_out([ForwardRecord(0, 1, True, (0,), {0: blocks})])
    assert layout.cells == (Cell(0, 0, Kind.IN_FLIGHT, text),)


def test_a_plan_without_block_ids_can_be_laid_out() -> None:
    records = [ForwardRecord(0, 1, True, (0,)), ForwardRecord(1, 1, True, (1,), {}, (0,))]
    records.append(ForwardRecord(2, 1, True, (2,)))
    layout = lay_out(records)
    assert column(layout, 1) == {"0": (Kind.HELD, ""), "1": (Kind.IN_FLIGHT, "")}
    assert column(layout, 2)["0"] == (Kind.EVICTED, "")


def test_no_records_are_refused() -> None:
    with pytest.raises(ValueError, match="`records` must hold at least one forward"):
        lay_out([])


def test_the_picture_has_each_square_in_its_colour(tmp_path: Path) -> None:
    """Counts pixels: a square painted in the wrong colour or place would change a count."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    layout = lay_out(SLIDING, sink_chunks=1)
    layout = dataclasses.replace(
        layout, cells=tuple(dataclasses.replace(cell, text="") for cell in layout.cells)
    )
    path = tmp_path / "timeline.png"
    draw(layout, path, title="A title")
    picture = image.open(path).convert("RGB")
    assert picture.width == 1440
    counts = {rgb: count for count, rgb in picture.getcolors(picture.width * picture.height)}
    rgb_of = {kind: tuple(bytes.fromhex(colour[1:])) for kind, colour in COLOURS.items()}
    squares = {kind: sum(cell.kind is kind for cell in layout.cells) for kind in Kind}
    assert all(squares.values())  # the case has every kind
    # The legend adds one small patch of each colour.
    area = sum(counts[rgb_of[kind]] for kind in Kind) / sum(squares.values())
    for kind in Kind:
        assert counts[rgb_of[kind]] / area == pytest.approx(squares[kind], abs=0.35), kind
    # The square of the sink in the last column, well inside the picture's right edge.
    middle = max(
        y
        for y in range(picture.height)
        if any(picture.getpixel((x, y)) == rgb_of[Kind.SINK] for x in range(1200, 1400, 20))
    )
    assert picture.getpixel((1380, middle)) == rgb_of[Kind.SINK]


def test_colours_are_all_different() -> None:
    assert set(COLOURS) == set(Kind)
    assert len(set(COLOURS.values())) == len(Kind)


# Spans of two chunks, window 4: both chunks of a span leave together. With window 3 they do not.
WHOLE_SPANS = [
    ForwardRecord(0, 2, True, (0, 1), {0: (1,), 1: (2,)}),
    ForwardRecord(2, 2, True, (0, 1, 2, 3), {0: (1,), 1: (2,), 2: (3,), 3: (7,)}),
    ForwardRecord(4, 2, True, (2, 3, 4, 5), {2: (3,), 3: (7,), 4: (4,), 5: (5,)}, (0, 1)),
    ForwardRecord(6, 2, True, (4, 5, 6, 7), {4: (4,), 5: (5,), 6: (1,), 7: (2,)}, (2, 3)),
]


def test_the_chunks_of_a_span_can_share_a_row() -> None:
    layout = lay_out(WHOLE_SPANS, join=True)
    assert layout.rows == ("0-1", "2-3", "4-5", "6-7")
    assert column(layout, 3) == {
        "0-1": (Kind.EVICTED, "(1-2)"),
        "2-3": (Kind.HELD, "3,7"),
        "4-5": (Kind.WINDOW, "4-5"),
        "6-7": (Kind.IN_FLIGHT, "1-2"),
    }
    cut = dataclasses.replace(WHOLE_SPANS[3], visible_chunks=(3, *range(4, 8)), evicted_chunks=(2,))
    apart = [*WHOLE_SPANS[:3], cut]
    assert lay_out(apart, join=True) == lay_out(apart)
    assert len(lay_out(apart).rows) == 8
    # A sink that ends inside a span keeps its chunks apart.
    assert lay_out(WHOLE_SPANS, sink_chunks=1, join=True).rows == tuple("01234567")


def test_a_forward_in_words() -> None:
    assert describe(WHOLE_SPANS)[2] == [
        ("forward", "commit of chunks 4-5"),
        ("sees", "chunks 2-5"),
        ("window", "2-3 in blocks 3, 7"),
        ("in flight", "4-5 in blocks 4-5"),
        ("leaves", "0-1 in blocks 1-2"),
    ]
    told = describe(SLIDING, sink_chunks=1)[4]
    assert told[0] == ("forward", "denoise x 4 of chunk 4")
    assert told[2:] == [
        ("sink", "0 in block 5"),
        ("window", "2-3 in blocks 7-8"),
        ("scratch", "4 in block 90"),
        ("action + state", "block 91"),
        ("leaves", "nothing"),
    ]
    # A block that two chunks share is named once; blocks that nobody knows are not named.
    shared = ForwardRecord(0, 2, True, (0, 1), {0: (1, 2), 1: (2, 3)})
    assert describe([shared])[0][2] == ("in flight", "0-1 in blocks 1-3")
    assert describe([ForwardRecord(0, 1, True, (0,))])[0][2] == ("in flight", "0")
