"""What the compiler's counts must not exceed, and what versions of Triton make of it.

``chunkattn aot --budgets`` compiles and compares; `tests/test_aot.py` runs it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chunkattn import aot, aot_vllm, sass
from chunkattn.aot import Row
from chunkattn.aot_launch import Shape, launch


class Budget(NamedTuple):
    """One count of one compilation, and the most that may come out."""

    kernel: str
    arch: str
    block_size: int
    every_path: bool
    what: str
    most: float

    @property
    def compilation(self) -> tuple[str, str, int, bool]:
        """What has to be compiled for it."""
        return self[:4]


class Result(NamedTuple):
    """A budget, what came out, and what an earlier run with this Triton has recorded."""

    budget: Budget
    reached: float
    recorded: float | None

    @property
    def verdict(self) -> str:
        """``ok``, ``recorded`` (missed, by no more than was known) or ``missed``."""
        # Fewer matrix products or TMA loads than expected would be others.
        met = self.reached <= self.budget.most
        if self.budget.what in ("mma", "tma"):
            met = self.reached == self.budget.most
        if met:
            return "ok"
        known = self.recorded is not None and self.reached <= self.recorded
        return "recorded" if known else "missed"


# Instructions a warp of the full and of the tail loop, bytes of stack; matrix products and TMA
# loads of the full loop, which must be exactly these. Each for one plain sequence and with ragged
# sequences, grouped queries, current rows and lse.
_LOOPS: dict[tuple[str, str, int], tuple[int | None, ...]] = {
    ("walk", "sm_90", 880): (505, 490, 0, 16, 2),
    ("walk", "sm_90", 1560): (505, 270, 0, 16, 2),
    # A split launch keeps some numbers of its outer loop on the stack; its loops are no longer.
    ("walk_split", "sm_90", 880): (505, 490, None, 16, 2),
    ("walk_pointers", "sm_90", 880): (545, None, 0, 16, 0),
    ("walk", "sm_100", 880): (510, 530, 32, 16, 2),
    ("walk", "sm_80", 880): (515, None, 64, 128, 0),
    ("gather", "sm_90", 16): (590, None, 0, 16, 0),
    ("gather64", "sm_90", 16): (655, None, 0, 16, 0),
}
_PADDING = {880: 0.019, 1560: 0.006, 3600: 0.003}
_PATHS = (False, True)
_WHAT = ("full", "tail", "stack", "mma", "tma")

BUDGETS = (
    *(
        Budget(*compilation, every_path, what, most)
        for compilation, limits in _LOOPS.items()
        for every_path in _PATHS
        for what, most in zip(_WHAT, limits, strict=True)
        if most is not None
    ),
    *(
        Budget("scatter", arch, 880, False, what, 0)
        for arch in sass.ARCHS
        for what in ("stack", "narrow accesses")
    ),
    *(Budget("walk", "sm_90", block, False, "padding", most) for block, most in _PADDING.items()),
    Budget("walk", "sm_90", 880, False, "slots / vLLM's", 1 / 9),
)

# What is missed with a version of Triton, the larger count of plain calls and of every path; 3.7.1,
# which is pinned, meets every budget. 3.9.0 makes about 20 more instructions of each loop on sm_90.
_MISSED = {
    "3.6.0": (("walk", "sm_100", 880, "full", 529), ("walk", "sm_100", 880, "tail", 540)),
    "3.8.0": (("walk", "sm_90", 1560, "tail", 271),),
    "3.9.0": (
        ("walk", "sm_90", 880, "full", 528),
        ("walk", "sm_90", 880, "tail", 507),
        ("walk", "sm_90", 1560, "full", 528),
        ("walk", "sm_90", 1560, "tail", 287),
        ("walk_split", "sm_90", 880, "full", 529),
        ("walk_split", "sm_90", 880, "tail", 508),
        ("walk_pointers", "sm_90", 880, "full", 555),
    ),
}
RECORDED: dict[str, dict[tuple[str, str, int, bool, str], float]] = {
    version: {
        (kernel, arch, block_size, every_path, what): reached
        for kernel, arch, block_size, what, reached in missed
        for every_path in _PATHS
    }
    for version, missed in _MISSED.items()
}


def jobs() -> dict[tuple[str, str, int, bool], Callable[[], Any]]:
    """What to compile, by `Budget.compilation`: each job gives what `results` asks for."""
    found: dict[tuple[str, str, int, bool], Callable[[], Any]] = {}
    for budget in BUDGETS:
        found.setdefault(budget.compilation, functools.partial(_compile, *budget.compilation))
    if aot_vllm.is_installed():
        key = (aot_vllm.KERNEL, "sm_90", 880, False)
        found[key] = functools.partial(aot_vllm.compile_vllm, "sm_90", Shape(880))
    return found


def results(rows: Mapping[tuple[str, str, int, bool], Any]) -> list[Result]:
    """Compare what `jobs` gave, each under its key, with the budgets."""
    recorded = RECORDED.get(aot.versions()["triton"], {})
    return [
        Result(budget, _reached(budget, rows), recorded.get(budget[:5]))
        for budget in BUDGETS
        if budget.what != "slots / vLLM's" or aot_vllm.is_installed()
    ]


def _compile(kernel: str, arch: str, block_size: int, every_path: bool) -> tuple[Row, int]:
    """One compilation, and how many accesses to rows and pools are of less than 16 bytes."""
    heads = 8 if every_path else 40
    shape = Shape(block_size, num_kv_heads=heads, every_path=every_path)
    if kernel == "scatter":
        code = sass.instructions(launch("scatter", arch, shape)[0].compiled)
        loads, _, stores, narrow = sass.accesses(code)
        # Two tensors are written and, with the extra rows, four are read; slots one by one.
        narrow += 2 * stores - loads
        return aot.compile_mover(arch, shape, kernel=kernel), narrow
    if kernel.startswith("gather"):
        return aot.compile_gather(arch, shape, wide=kernel == "gather64"), 0
    descriptors = False if kernel == "walk_pointers" else None
    split = kernel == "walk_split"
    return aot.compile_walk(arch, shape, descriptors=descriptors, split=split), 0


def _reached(budget: Budget, rows: Mapping[tuple[str, str, int, bool], Any]) -> float:
    row: Row
    row, narrow_accesses = rows[budget.compilation]
    loops = {loop.role: loop for loop in reversed(row.loops)}
    match budget.what:
        case "full" | "tail":
            return loops[budget.what].instructions
        case "mma":
            return loops["full"].mma
        case "tma":
            return loops["full"].tma
        case "stack":
            return row.stack_bytes
        case "padding":
            return row.padding_waste
        case "narrow accesses":
            return float(narrow_accesses)
    theirs = rows[aot_vllm.KERNEL, budget.arch, budget.block_size, budget.every_path]
    return aot_vllm.issue_slots_per_score(row) / aot_vllm.issue_slots_per_score(theirs)
