"""The timeline as one HTML file that needs nothing else: hover or focus a square and read.

The table and every text are in the page; the script only says which of the texts is shown.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from chunkattn.timeline import COLOURS, ForwardRecord, Kind, describe, lay_out

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --gone: #555; --evicted: $evicted }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e8e8e8; --gone: #bbb; --evicted: #3a3d41 }
}
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
  margin: 1.5rem; display: grid; grid-template-columns: minmax(0, 1fr) 22rem; gap: 0 1.5rem }
header { grid-column: 1 / -1 }
h1 { font-size: 1.2rem; margin: 0 }
p { margin: .3rem 0 }
ul { list-style: none; padding: 0; margin: .6rem 0; display: flex; flex-wrap: wrap; gap: 0 1.5rem }
i { display: inline-block; width: .9em; height: .9em; margin-right: .5em; vertical-align: -.1em }
main { overflow: auto; max-height: 85vh }
table { border-spacing: 2px }
th { background: var(--paper); font-weight: normal; font-size: 12px; white-space: nowrap }
thead th { position: sticky; top: 0; vertical-align: bottom; z-index: 1 }
tbody th { position: sticky; left: 0; text-align: right; padding: 0 .5rem }
td { min-width: 2.4rem; height: 1.6rem; padding: 0 .3rem; text-align: center; white-space: nowrap;
  font-variant-numeric: tabular-nums }
td[class] { color: #000 }
td.evicted { color: var(--gone) }
$kinds
.reset { border-left: 2px dashed var(--ink) }
.on { box-shadow: -2px 0 var(--ink), 2px 0 var(--ink) }
thead .on { box-shadow: none; text-decoration: underline }
td, thead th { scroll-margin: 4rem 1rem 1rem 8rem }
td:focus, thead th:focus { outline: 3px solid var(--ink); outline-offset: -1px }
aside { position: sticky; top: 1rem; align-self: start; max-height: 85vh; overflow: auto }
#square { min-height: 3em }
dl { margin: 0 0 .8rem }
dt { font-weight: bold; margin-top: .5rem }
dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 60rem) {
  body { display: block; margin: 1rem }
  aside { top: auto; bottom: 0; height: 15rem; background: var(--paper); padding-top: .5rem;
    border-top: 1px solid var(--ink) }
}
</style>
<header>
<h1>$title</h1>
<p>$subtitle</p>
<ul>$legend</ul>
<p>Point at a square, or reach the table with Tab and walk it with the arrow keys.</p>
</header>
<main>
<table>
<thead><tr><th scope="col">chunk</th>$columns</tr></thead>
<tbody>
$rows
</tbody>
</table>
</main>
<aside aria-live="polite">
<p id="square"></p>
$details
</aside>
<script>
"use strict";
const table = document.querySelector("table");
const details = document.querySelectorAll("dl");
const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
let stop = table.rows[0].cells[1];

function show(event) {
  const cell = event.target.closest("td, thead th");
  if (!cell || cell.cellIndex === 0) return;
  table.querySelectorAll(".on").forEach((other) => other.classList.remove("on"));
  for (const row of table.rows) row.cells[cell.cellIndex].classList.add("on");
  details.forEach((lines, column) => { lines.hidden = column !== cell.cellIndex - 1; });
  document.getElementById("square").textContent = cell.getAttribute("aria-label") || "";
}

function move(event) {
  const step = steps[event.key];
  const cell = event.target.closest("td, thead th");
  if (!step || !cell) return;
  const row = table.rows[cell.parentNode.rowIndex + step[0]];
  const next = row && row.cells[cell.cellIndex + step[1]];
  event.preventDefault();
  if (next && next.cellIndex > 0) next.focus();
}

function keep(event) {  // the one square that Tab reaches is the last that had the focus
  stop.tabIndex = -1;
  stop = event.target;
  stop.tabIndex = 0;
  show(event);
}

for (const row of table.rows) for (const cell of row.cells) if (cell.cellIndex) cell.tabIndex = -1;
stop.tabIndex = 0;
table.addEventListener("mouseover", show);
table.addEventListener("focusin", keep);
table.addEventListener("keydown", move);
show({ target: stop });
</script>
</html>
""")


def write(
    records: Sequence[ForwardRecord],
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    sink_chunks: int = 0,
    join: bool = False,
) -> None:
    """Write the timeline of a rollout as a page.

    Args:
        records, sink_chunks, join: as for `timeline.lay_out`.
        path: file to write.
        title: heading of the page.
        subtitle: a line under it.

    Raises:
        ValueError: ``records`` is empty.
    """
    layout = lay_out(records, sink_chunks=sink_chunks, join=join)
    cells = {(cell.row, cell.column): cell for cell in layout.cells}
    rollout_of = {row: n for n, rows in enumerate(layout.rollouts, 1) for row in rows}
    resets = [' class="reset"' if c in layout.resets else "" for c in range(len(layout.columns))]
    rows = []
    for row, label in enumerate(layout.rows):
        what = f"chunk {label}" if row in rollout_of else label
        if len(layout.rollouts) > 1 and row in rollout_of:
            label, what = (f"rollout {rollout_of[row]}: {text}" for text in (label, what))
        squares = []
        for column, reset in enumerate(resets):
            cell = cells.get((row, column))
            if cell is None:
                squares.append(f"<td{reset}></td>")
                continue
            name = f"{what}, block {cell.text}" if cell.text else what
            squares.append(
                f'<td class="{_name(cell.kind)}{" reset" if reset else ""}" '
                f'aria-label="{_html(name)}: {_html(cell.kind.value)}">{_html(cell.text)}</td>'
            )
        rows.append(f'<tr><th scope="row">{_html(label)}</th>{"".join(squares)}</tr>')
    used = {cell.kind for cell in layout.cells}
    paint = COLOURS | {Kind.EVICTED: "var(--evicted)"}  # which is another in the dark
    page = _PAGE.substitute(
        title=_html(title),
        subtitle=_html(subtitle),
        evicted=COLOURS[Kind.EVICTED],
        kinds="\n".join(f".{_name(kind)} {{ background: {paint[kind]} }}" for kind in Kind),
        legend="".join(
            f'<li><i class="{_name(kind)}"></i>{_html(kind.value)}</li>'
            for kind in Kind
            if kind in used
        ),
        columns="".join(
            f'<th scope="col"{reset}>{_html(label)}</th>'
            for label, reset in zip(layout.columns, resets, strict=True)
        ),
        rows="\n".join(rows),
        details="\n".join(
            "<dl hidden>"
            + "".join(f"<dt>{_html(name)}</dt><dd>{_html(text)}</dd>" for name, text in lines)
            + "</dl>"
            for lines in describe(records, sink_chunks=sink_chunks)
        ),
    )
    path.write_text(page, encoding="utf-8")


def _name(kind: Kind) -> str:
    return kind.name.lower().replace("_", "-")


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")
