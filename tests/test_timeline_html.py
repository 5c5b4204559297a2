"""The page of a timeline: what it says, and that pointing at it in a browser shows it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chunkattn import timeline_html
from chunkattn.timeline import COLOURS, ForwardRecord, Kind
from tests.test_timeline import SLIDING

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "timeline.html"
    timeline_html.write(SLIDING, path, title="A <title>", subtitle="of a test", sink_chunks=1)
    return path


class Page(HTMLParser):
    """Rows of squares as (class, text), the texts on the side, and the addresses it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str]]] = []
        self.details: list[str] = []
        self.shown: list[int] = []
        self.square = ""
        self.references: list[str] = []
        self._into = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append((values.get("class") or "", ""))
            self._into = tag
        elif tag == "dl":
            self.details.append("")
            if "hidden" not in values:
                self.shown.append(len(self.details) - 1)
        elif tag in ("dt", "dd"):
            self._into = tag
        elif tag == "p":
            self._into = values.get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "dt", "dd", "p"):
            self._into = ""

    def handle_data(self, data: str) -> None:
        if self._into in ("td", "th"):
            kind, text = self.rows[-1][-1]
            self.rows[-1][-1] = kind, f"{text} {data}".strip()
        elif self._into in ("dt", "dd"):
            self.details[-1] += ("\n" if self._into == "dt" else ": ") + data
        elif self._into == "square":
            self.square += data


def in_browser(page: Path, script: str = "", *options: str) -> Page:
    """What the page is after ``script`` has run in it."""
    page.write_text(page.read_text().replace("</html>", f"<script>{script}</script></html>"))
    return Page(chromium(page, "--dump-dom", *options))


def chromium(page: Path, *options: str) -> str:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *options]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_is_the_layout(page: Path) -> None:
    found = Page(page.read_text())
    assert found.rows[0][0] == ("", "chunk")
    assert found.rows[0][5] == ("", "4 denoise x 4")
    column = [row[5] for row in found.rows[1:]]
    assert column == [
        ("sink", "5"),
        ("held", "6"),
        ("window", "7"),
        ("window", "8"),
        ("scratch", "90"),
        ("", ""),
        ("", ""),
        ("scratch", "91"),
    ]
    assert found.rows[2][7] == ("evicted", "(6)")
    assert {len(row) for row in found.rows} == {1 + len(SLIDING)}


def test_the_texts_say_what_a_forward_sees_where_it_lies_and_what_leaves(page: Path) -> None:
    found = Page(page.read_text())
    assert len(found.details) == len(SLIDING)
    assert found.details[4].splitlines()[1:] == [
        "forward: denoise x 4 of chunk 4",
        "sees: chunks 0, 2-4",
        "sink: 0 in block 5",
        "window: 2-3 in blocks 7-8",
        "scratch: 4 in block 90",
        "action + state: block 91",
        "leaves: nothing",
    ]
    assert found.details[5].splitlines()[-2:] == ["in flight: 4 in block 9", "leaves: 1 in block 6"]


def test_it_is_one_file_and_escapes_what_it_is_given(page: Path) -> None:
    text = page.read_text()
    assert Page(text).references == []
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", text)
    assert text.count("A &lt;title&gt;") == 2
    assert "<title>A <" not in text


def test_rollouts_are_named_and_the_reset_is_marked(tmp_path: Path) -> None:
    records = [SLIDING[0], ForwardRecord(0, 1, True, (0,), {0: (6,)}, rollout=1)]
    timeline_html.write(records, tmp_path / "x.html", title="")
    found = Page((tmp_path / "x.html").read_text())
    assert [row[0][1] for row in found.rows[1:]] == ["rollout 1: 0", "rollout 2: 0"]
    assert [row[2][0] for row in found.rows] == ["reset", "evicted reset", "in-flight reset"]
    assert 'aria-label="rollout 2: chunk 0, block 6: in flight' in (tmp_path / "x.html").read_text()
    assert found.details[1].splitlines()[1] == "forward: commit of chunk 0, rollout 2"


@in_chromium
def test_at_first_the_first_forward_is_shown(page: Path) -> None:
    assert in_browser(page).shown == [0]


@in_chromium
@pytest.mark.parametrize(
    ("script", "column", "square"),
    [
        ("point(2, 5)", 4, "chunk 1, block 6: held, but outside this forward's window"),
        ("point(0, 7)", 6, ""),  # a heading of a column stands for the forward
        ("point(6, 1)", 0, ""),  # no square there, but the forward of that column
        (
            "point(2, 5); point(2, 0)",
            4,
            "chunk 1, block 6: held, but outside this forward's window",
        ),
        (
            "press('Right', 'Right', 'Down')",
            2,
            "chunk 0, block 5: sink: history that stays visible",
        ),
        ("press('Down', 'Left', 'Up', 'Up', 'Right')", 1, ""),  # stops at the edges
    ],
)
def test_pointing_and_the_keyboard_show_a_forward(
    script: str, column: int, square: str, page: Path
) -> None:
    found = in_browser(
        page,
        """
        const rows = document.querySelector("table").rows;
        function point(row, column) {
          rows[row].cells[column].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        }
        function press(...keys) {
          document.querySelector("table [tabindex='0']").focus();
          for (const key of keys) document.activeElement.dispatchEvent(
            new KeyboardEvent("keydown", { key: "Arrow" + key, bubbles: true, cancelable: true }));
        }
        """
        + script,
    )
    assert found.shown == [column]
    assert found.square.startswith(square)
    assert bool(found.square) == bool(square)
    marked = {i for row in found.rows for i, (kind, _) in enumerate(row) if "on" in kind.split()}
    assert marked == {column + 1}


@in_chromium
def test_tab_reaches_one_square(page: Path) -> None:
    script = """
    document.querySelector("table").rows[3].cells[2].focus();
    document.title = [...document.querySelectorAll("[tabindex='0']")].map(
      (cell) => [cell.parentNode.rowIndex, cell.cellIndex]).join(" ");
    """
    page.write_text(page.read_text().replace("</html>", f"<script>{script}</script></html>"))
    assert "<title>3,2</title>" in chromium(page, "--dump-dom")


@in_chromium
@pytest.mark.parametrize(("scheme", "paper"), [(1, (255, 255, 255)), (0, (22, 24, 27))])
def test_it_is_painted_in_light_and_dark(
    scheme: int, paper: tuple[int, int, int], page: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = page.with_suffix(".png")
    chromium(
        page,
        f"--screenshot={shot}",
        "--window-size=1200,700",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    picture = image.open(shot).convert("RGB")
    counts = {rgb: count for count, rgb in picture.getcolors(picture.width * picture.height)}
    assert max(counts, key=counts.__getitem__) == paper
    for kind, colour in COLOURS.items():
        if kind is Kind.EVICTED and scheme == 0:
            colour = "#3a3d41"
        assert counts[tuple(bytes.fromhex(colour[1:]))] > 300, kind
