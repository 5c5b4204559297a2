"""``chunkattn bench``."""

import argparse
import ast
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from chunkattn.commands import CannotRunError, add_parser

FOLDER = Path(__file__).resolve().parent.parent / "bench"


def scripts() -> dict[str, Path]:
    """The benchmarks, by name."""
    return {path.stem[len("bench_") :]: path for path in sorted(FOLDER.glob("bench_*.py"))}


def add(commands: Any) -> None:
    names = sorted(scripts())
    parser = add_parser(
        commands,
        "bench",
        help="run a benchmark, or list them",
        description=(
            "`chunkattn bench NAME ARGS...` is `python bench/bench_NAME.py ARGS...`; the script's "
            "own --help says what it takes and its exit status is the command's. Without NAME the "
            "benchmarks are listed."
        ),
        found="a result is wrong",
    )
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="for the script")
    parser.add_argument("--json", action="store_true", help="list the benchmarks as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        about = {
            name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            for name, path in scripts().items()
        }
        if args.json:
            print(json.dumps(about, indent=2))
        else:
            for name, line in about.items():
                print(f"{name:12} {line}")
        return 0
    path = str(scripts()[args.name])
    before = sys.argv, sys.path
    sys.argv, sys.path = [path, *args.args], [str(FOLDER), *sys.path]
    try:
        runpy.run_path(path, run_name="__main__")
    except ModuleNotFoundError as error:
        raise CannotRunError(f"{args.name} needs {error.name}") from error
    finally:
        sys.argv, sys.path = before
    return 0
