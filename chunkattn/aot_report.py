"""The tables that `chunkattn aot` prints."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chunkattn import aot, aot_vllm
from chunkattn.aot import Row
from chunkattn.aot_budgets import Result

_LEFT = ("kernel", "arch", "what", "paths", "verdict")


def print_rows(rows: Sequence[Row], as_json: bool) -> None:
    """Print what was compiled.

    Args:
        rows: of `aot.jobs`.
        as_json: a list of rows and nothing else. vLLM's kernel is among them, so a ratio to it is
            instructions * num_warps / (block_m * block_n) of one over the other's.
    """
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    theirs = {
        (row.arch, row.block_size): aot_vllm.issue_slots_per_score(row)
        for row in rows
        if row.kernel == aot_vllm.KERNEL and row.loops
    }
    headings = ("kernel", "arch", "block", "tile", "warps", "regs", "stack", "shared", "full")
    table = _table("instructions a warp of each loop", *headings, "tail", "rest", "waste", "/ vLLM")
    for row in rows:
        loops = {loop.role: str(loop.instructions) for loop in row.loops}
        ratio = ""
        if "full" in loops and row.kernel != aot_vllm.KERNEL:
            slots = theirs.get((row.arch, row.block_size))
            ratio = f"{aot_vllm.issue_slots_per_score(row) / slots:.3f}" if slots else ""
        table.add_row(
            row.kernel,
            row.arch,
            str(row.block_size),
            f"{row.block_m}x{row.block_n}",
            str(row.num_warps),
            str(row.registers),
            str(row.stack_bytes),
            str(row.shared_bytes),
            *(loops.get(role, "") for role in ("full", "tail", "rest")),
            f"{row.padding_waste:.2%}" if row.kernel.startswith("walk") else "",
            ratio,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if theirs:
        print("/ vLLM: issue slots a score of full tiles, over those of vLLM's Triton attention")


def print_budgets(results: Sequence[Result], as_json: bool) -> int:
    """Print each budget, what came out and the verdict; 1 when one is missed that was not known."""
    missed = any(result.verdict == "missed" for result in results)
    if as_json:
        rows = [
            result.budget._asdict() | {"reached": result.reached, "verdict": result.verdict}
            for result in results
        ]
        print(json.dumps(rows, indent=2))
        return int(missed)
    headings = ("kernel", "arch", "block", "paths", "what", "budget", "reached", "verdict")
    table = _table("budgets", *headings)
    for result in results:
        budget = result.budget
        table.add_row(
            budget.kernel,
            budget.arch,
            str(budget.block_size),
            "every" if budget.every_path else "plain",
            budget.what,
            f"{budget.most:.4g}",
            f"{result.reached:.4g}",
            result.verdict,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return int(missed)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=f"{title}; {', '.join(map(' '.join, aot.versions().items()))}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    return table
