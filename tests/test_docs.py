"""The documents: links lead somewhere, code runs, the site builds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import chunkattn
from chunkattn.kernels.tuning import padding_waste, walk_tiles

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that a renderer gives to headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def broken_links(path: Path) -> list[str]:
    """Links of a document to files, or to headings of documents, that are not there."""
    broken = []
    for link in LINK.findall(CODE.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links(path):
    assert broken_links(path) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# One heading\n[x](b.md) [y](#one-heading) [z](#two) [](a.md#2)"
    )
    assert broken_links(tmp_path / "a.md") == ["b.md", "#two", "a.md#2"]


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if CODE.search(path.read_text())],
    ids=lambda path: path.name,
)
def test_code_runs(path, monkeypatch):
    """The blocks of a document are one program."""
    pytest.importorskip("vllm")
    monkeypatch.setattr("builtins.print", lambda *_: None)
    names: dict = {"__name__": path.stem}
    for match in CODE.finditer(path.read_text()):
        line = path.read_text()[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(path), "exec"), names)


def test_the_guides_have_the_code():
    assert {path.name for path in DOCUMENTS if CODE.search(path.read_text())} >= {
        "README.md",
        "integrating.md",
        "policies.md",
        "scaling.md",
    }


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Every document and public name has its place, and links between pages lead somewhere."""
    pytest.importorskip("vllm")
    pytest.importorskip("pdoc")
    command = [sys.executable, ROOT / "docs/build.py", "--out", tmp_path]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    for document in DOCUMENTS:
        page = document.relative_to(ROOT).with_suffix(".html")
        assert (Path("index.html") if page.stem == "README" else page) in pages
    for name in set(chunkattn.__all__) - {"__version__"}:
        assert f'<section id="{name}">' in pages[Path("chunkattn.html")], name
    for page, text in pages.items():
        for link in re.findall(r'href="(?!https?:|#|\$)([^"#]+)', text):
            assert (tmp_path / page.parent / link).exists(), (page, link)


def test_padding_in_the_guide_and_in_its_picture():
    """The guide says what the table of tiles gives; else run `docs/draw_tiles.py` again, too."""
    text = " ".join((ROOT / "docs/kernels.md").read_text().split())
    said = re.findall(r"(\d+) pay (\d+)(?: columns each)?, ([\d.]+) %", text)
    assert len(said) == 2
    for block_size, columns, share in said:
        tiles = walk_tiles(90, 128, 2, int(block_size), 128)
        waste = padding_waste(int(block_size), tiles.block_n, tiles.tail_n)
        assert round(waste * int(block_size)) == int(columns)
        assert round(100 * waste, 1) == float(share)


def test_the_citation_names_this_version():
    assert f"version: {chunkattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
