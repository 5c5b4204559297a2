"""``chunkattn doctor``."""

import argparse
import json
from typing import Any

from chunkattn.commands import add_parser


def add(commands: Any) -> None:
    parser = add_parser(
        commands,
        "doctor",
        help="say what is installed and what would run here",
        description=(
            "Print versions, the GPU, the backend that would run and the optional libraries that "
            "were found."
        ),
        found="something is missing or not supported",
    )
    parser.add_argument("--json", action="store_true", help="print a list of findings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from chunkattn.doctor import findings

    found = findings()
    if args.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        for what, value, problem in found:
            print(f"{what:20} {value}{f'  <- {problem}' if problem else ''}")
    return int(any(finding.problem for finding in found))
