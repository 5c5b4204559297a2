"""The documents: links lead somewhere, code runs, the site builds."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    """A page for every guide and module, public names and no private ones in it."""
    pytest.importorskip("vllm")
    pytest.importorskip("pdoc")
    command = [sys.executable, ROOT / "docs/build.py", "--out", tmp_path / "site"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs/build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert {ROOT / name for name in build.GUIDES} == set(DOCUMENTS)
    page = (tmp_path / "site/chunkattn.html").read_text()
    import chunkattn

    for name in set(chunkattn.__all__) - {"__version__"}:
        assert f'<section id="{name}">' in page, name
    assert 'id="Session.rollback"' in page
    assert "Session._check_open" not in page.replace("self._check_open", "")
    for guide in build.GUIDES:
        text = (tmp_path / f"site/{build.page_of(guide).replace('.', '/')}.html").read_text()
        for link in re.findall(r'href="(?!https?:|#)([^"#]+)', text):
            target = (
                tmp_path / f"site/{build.page_of(guide).replace('.', '/')}.html"
            ).parent / link
            assert target.exists() or (ROOT / link).is_dir(), (guide, link)
