"""Plant every fault that the suite knows and print which check caught it: ``make mutants``.

The faults are those of `test_mutations`, and each test there passes when its fault is caught. The
exit status is 1 when one survives. Arguments are passed on to pytest.
"""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from test_mutations import FAULTS

TESTS = Path(__file__).resolve().parent
KERNEL_TEST = "test_mutations.py::test_kernel_fault_is_found"

# What must be caught in any case: where it is planted, and the tests that plant it, by the
# beginning of their names.
LISTED = {
    "a chunk dropped": (
        "the block table",
        "test_mutations.py::test_error_rule_finds[a chunk dropped",
    ),
    "the sink dropped": (
        "the block table",
        "test_mutations.py::test_error_rule_finds[the sink dropped",
    ),
    "a chunk counted twice": (
        "the block table",
        "test_mutations.py::test_error_rule_finds[a chunk counted twice",
    ),
    "one 16-token block dropped": (
        "the block table",
        "test_mutations.py::test_error_rule_finds[one 16-token block dropped",
    ),
    "a tail not masked": (
        "seq_lens",
        "test_mutations.py::test_low_scores_and_poison_find_a_tail_not_masked",
    ),
    "the last key dropped": (
        "seq_lens",
        "test_mutations.py::test_needles_find_the_last_key_dropped",
    ),
    "the scale 1% off": (
        "softmax_scale",
        "test_mutations.py::test_error_rule_finds[the scale 1% off",
    ),
    "a 32-bit address": (
        "loops.py, gather.py, scatter.py",
        "test_compile_only.py::test_missing_casts_are_found",
    ),
    "V not masked": (
        "the torch backend",
        "test_mutations.py::test_poison_finds_values_not_masked",
    ),
    "a commit without a write": (
        "the layers of a forward",
        "test_session.py::test_a_commit_needs_every_layer",
    ),
}


class Outcomes:
    """A pytest plugin: what became of each test, by ``file.py::name``."""

    def __init__(self):
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            file, _, name = report.nodeid.partition("::")
            self.found[f"{Path(file).name}::{name}"] = report.outcome

    def of(self, name: str) -> list[str]:
        return [outcome for test, outcome in self.found.items() if test.startswith(name)]


def main(*arguments: str) -> int:
    outcomes = Outcomes()
    names = sorted({KERNEL_TEST, *(name.partition("[")[0] for _, name in LISTED.values())})
    tests = [str(TESTS / name) for name in names]
    pytest.main(["-q", "--no-header", *arguments, *tests], plugins=[outcomes])

    rows = [
        (fault, where, name.partition("[")[0].replace("::", " "), outcomes.of(name))
        for fault, (where, name) in LISTED.items()
    ]
    for group, (file, check, faults) in FAULTS.items():
        for fault in faults:
            found = outcomes.of(f"{KERNEL_TEST}[{group}-{fault}]")
            rows.append((fault, file, f"cases of {check}", found))
    table = Table("mutation", "planted in", "by", "caught", title="mutations")
    for fault, where, check, found in rows:
        table.add_row(fault, where, check, _verdict(found))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    survived = [fault for fault, _, _, found in rows if _verdict(found) != "yes"]
    print(
        f"{len(rows)} mutations, {len(survived)} not caught{': ' * bool(survived)}"
        f"{', '.join(survived)}"
    )
    return int(bool(survived))


def _verdict(outcomes: list[str]) -> str:
    if not outcomes:
        return "NOT RUN"
    return "yes" if set(outcomes) == {"passed"} else "NO"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
