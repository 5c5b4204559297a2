"""Which tiles of keys one tile of query rows reads, to scale: ``python docs/draw_tiles.py``."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from chunkattn.kernels.tuning import walk_tiles

# Okabe and Ito's colours, which are told apart with any colour vision.
FULL, LAST, REST = "#56B4E9", "#E69F00", "#CC79A7"
LAST_BLOCK, CURRENT = 200, 25  # rows of the partly filled block, rows that are not in the pool
ROWS = 128


def draw_tile(axes, left, width, rows, colour) -> int:
    """A tile of ``width`` keys of which ``rows`` are visible, and its right edge."""
    axes.add_patch(Rectangle((left, 0), width, ROWS, facecolor=colour, edgecolor="white", lw=0.8))
    if rows < width:
        edge = {"facecolor": "white", "edgecolor": colour, "hatch": "/////", "lw": 0}
        axes.add_patch(Rectangle((left + rows, 4), width - rows - 4, ROWS - 8, **edge))
    return left + width


def draw_window(axes, block_size: int, num_blocks: int) -> int:
    """One program's keys in the columns of its tiles, and how many columns there are."""
    tiles = walk_tiles(90, 128, 2, block_size, ROWS)
    at, tail = 0, block_size % tiles.block_n
    for block in range(num_blocks):
        start = at
        for _ in range(block_size // tiles.block_n):
            at = draw_tile(axes, at, tiles.block_n, tiles.block_n, FULL)
        at = draw_tile(axes, at, tiles.tail_n, tail, LAST)
        label(axes, start, at, f"block {block + 1}: {block_size} keys")
    start = at
    for rows in (LAST_BLOCK, CURRENT):
        for first in range(0, rows, tiles.rest_n):
            at = draw_tile(axes, at, tiles.rest_n, min(tiles.rest_n, rows - first), REST)
    label(axes, start, at, f"{LAST_BLOCK} + {CURRENT}")
    keys = num_blocks * block_size + LAST_BLOCK + CURRENT
    axes.set_title(
        f"block_size {block_size}: full tiles of {tiles.block_n}, a last tile of {tail} keys in "
        f"{tiles.tail_n} columns; {keys} keys in {at} columns",
        loc="left",
        fontsize=9,
    )
    return at


def label(axes, start: int, stop: int, text: str) -> None:
    axes.plot([start + 8, stop - 8], [-22, -22], color="black", lw=1)
    axes.text((start + stop) / 2, -40, text, ha="center", va="top", fontsize=8)


def main() -> None:
    figure, panels = plt.subplots(2, 1, figsize=(8.3, 2.9), sharex=True)
    widths = [draw_window(panels[0], 880, 3), draw_window(panels[1], 1560, 2)]
    for axes in panels:
        axes.set_xlim(-10, max(widths) + 10)
        axes.set_ylim(-110, ROWS)
        axes.set_aspect("equal")
        axes.set_yticks([0, ROWS], ["", "128"], fontsize=8)
        axes.set_ylabel("query\nrows", fontsize=8, y=0.75)
        axes.tick_params(axis="x", labelsize=8, labelbottom=True)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("columns of keys that the program computes", fontsize=8)
    texts = (
        (FULL, "", "loop 1: full tiles, no mask"),
        (LAST, "", "loop 2: the last tile of each whole block"),
        (REST, "", "loop 3: the partly filled block, current rows"),
        ("white", "/////", "masked"),
    )
    keys = [
        Rectangle((0, 0), 1, 1, fc=colour, ec="grey", hatch=hatch) for colour, hatch, _ in texts
    ]
    figure.legend(
        keys, [t for _, _, t in texts], loc="lower center", ncols=4, fontsize=7.5, frameon=False
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(Path(__file__).with_name("tiles.png"), dpi=200)


if __name__ == "__main__":
    main()
