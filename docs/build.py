"""The site of the documentation: the guides and, from the docstrings, the API. ``make docs``.

Pages lie where their sources lie, so that the relative links of a guide hold; what a guide links to
besides is copied. A warning and a link to nothing are errors.
"""

import argparse
import importlib
import re
import shutil
import types
import warnings
from pathlib import Path

import pdoc

import chunkattn

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (
    "README.md",
    "docs/integrating.md",
    "docs/kernels.md",
    "docs/policies.md",
    "docs/numerics.md",
    "docs/scaling.md",
    "docs/gpu.md",
    "docs/gpu_model.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
PUBLIC = ("session", "requests", "policy", "presets", "capacity", "testing", "interpreter")
MODULES = ("chunkattn", *(f"chunkattn.{name}" for name in PUBLIC))
KERNELS = tuple(f"chunkattn.kernels.{path.stem}" for path in sorted(ROOT.glob("kernels/*.py")))
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def page_of(source: str) -> str:
    """The name of a guide's page, with dots for slashes: pdoc's names are those of modules."""
    return "index" if source == "README.md" else source.removesuffix(".md").replace("/", ".")


def guide(source: str, site: Path) -> pdoc.doc.Module:
    """A guide as a module that has nothing but a docstring; copies the files that it links to."""

    def target(match: re.Match) -> str:
        path = (ROOT / source).parent / match[1]
        name = path.resolve().relative_to(ROOT).as_posix()
        if name in GUIDES:
            return match[1].replace("README.md", "index.md").removesuffix(".md") + ".html"
        if path.is_file():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, site / name)
        elif not path.is_dir():
            raise SystemExit(f"{source} links to {match[1]}, which is not there")
        return match[1]

    page = types.ModuleType(page_of(source))
    page.__doc__ = LINK.sub(target, (ROOT / source).read_text())
    page.__docformat__ = "markdown"
    return pdoc.doc.Module(page)


def build(site: Path) -> None:
    """Write the site into a folder; what else is there stays."""
    for name in (*MODULES, *KERNELS):
        importlib.import_module(name)  # others' warnings at import are not about our pages
    for name in chunkattn.__all__:
        getattr(chunkattn, name)  # imported when first asked for
    pages = {page_of(source): guide(source, site) for source in GUIDES}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Fields that vLLM's spec declares, with annotations that only vLLM's module can resolve.
        warnings.filterwarnings("ignore", r"Error parsing type annotation .*ChunkWindowSpec")
        pages |= {name: pdoc.doc.Module.from_name(name) for name in (*MODULES, *KERNELS)}
        pdoc.render.configure(
            docformat="google",
            include_undocumented=False,
            template_directory=ROOT / "docs/theme",
        )
        for name, page in pages.items():
            path = site / f"{name.replace('.', '/')}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pdoc.render.html_module(page, pages))
        (site / "search.js").write_text(pdoc.render.search_index(pages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out/docs", help="default: out/docs")
    site = parser.parse_args().out
    build(site)
    print(f"{site / 'index.html'}: {len(list(site.rglob('*.html')))} pages")


if __name__ == "__main__":
    main()
