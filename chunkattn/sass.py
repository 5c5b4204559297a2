"""What is in a compiled kernel: its resources, its instructions, its loops of matrix products."""

import collections
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
"""The targets that kernels are compiled for unless others are named."""

_MMA = re.compile(r"HGMMA|HMMA|UTCHMMA|v_mfma|v_wmma")
_TMA = re.compile(r"UTMALDG")
_ASYNC_COPY = re.compile(r"LDGSTS|\w+_load_\w+_lds|\w+_load_lds_")
_END = re.compile(r"EXIT|s_endpgm")


@dataclasses.dataclass
class Loop:
    """One innermost loop with matrix instructions, in the order of the code."""

    role: str
    instructions: int
    mma: int
    tma: int
    async_copies: int


class Instruction(NamedTuple):
    """One instruction of a warp, such as ``LDG.E.128`` or ``global_load_dwordx4``."""

    address: int
    opcode: str
    target: int | None  # address that a branch goes to


def resources(compiled: Any) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread, bytes of shared memory a program."""
    if "amdgcn" in compiled.asm:
        # A lane's vector registers, and its private segment, which also holds what is spilled.
        pattern = r"\.(vgpr_count|private_segment_fixed_size): +(\d+)"
        found = dict(re.findall(pattern, compiled.asm["amdgcn"]))
        usage = found["vgpr_count"], found["private_segment_fixed_size"]
    else:
        usage = re.findall(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", compiled))[0]
    return int(usage[0]), int(usage[1]), int(compiled.metadata.shared)


def instructions(compiled: Any) -> list[Instruction]:
    """The code of a kernel."""
    if "amdgcn" in compiled.asm:
        return parse_amdgcn(compiled.asm["amdgcn"])
    return parse_sass(_cuobjdump("-sass", compiled))


def loops(code: Sequence[Instruction], roles: Sequence[str]) -> list[Loop]:
    """Innermost loops with matrix instructions: the code between a backward branch and its target.

    Args:
        code: of one kernel.
        roles: of the loops that its source has, in their order. Where the compiler made other
            loops of them, all are ``"rest"``.
    """
    found: list[tuple[int, int, list[str]]] = []
    for branch in code:
        if branch.target is not None and branch.target < branch.address:
            span = (branch.target, branch.address)
            body = [op for address, op, _ in code if span[0] <= address <= span[1]]
            if any(map(_MMA.match, body)) and not any(map(_END.match, body)):
                found.append((*span, body))
    inner = [
        body
        for start, stop, body in sorted(found)
        if not any((start, stop) != o[:2] and start <= o[0] and o[1] <= stop for o in found)
    ]
    if len(inner) != len(roles):
        roles = ["rest"] * len(inner)
    patterns = (_MMA, _TMA, _ASYNC_COPY)
    return [
        Loop(role, len(body), *(sum(map(bool, map(p.match, body))) for p in patterns))
        for role, body in zip(roles, inner, strict=True)
    ]


def accesses(code: Sequence[Instruction]) -> tuple[int, int, int, int]:
    """Loads and stores of global memory: those of 16 bytes a thread, and those of fewer.

    Returns:
        Wide loads, narrow loads, wide stores, narrow stores.
    """
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    for _, opcode, _ in code:
        if match := re.match(r"(?:LDG|STG)\.|(?:global|buffer|flat)_(?:load|store)_", opcode):
            kind = "store" if match[0].startswith("STG") or "store" in match[0] else "load"
            found[kind, opcode.endswith((".128", "_dwordx4"))] += 1
    return (
        found["load", True],
        found["load", False],
        found["store", True],
        found["store", False],
    )


def parse_sass(text: str) -> list[Instruction]:
    """The code that ``cuobjdump -sass`` prints."""
    code = []
    for line in text.splitlines():
        match = re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", line)
        if match:
            jump = re.search(r"0x([0-9a-f]+)", match[3]) if match[2].startswith("BRA") else None
            code.append(
                Instruction(int(match[1], 16), match[2], int(jump[1], 16) if jump else None)
            )
    return code


def parse_amdgcn(text: str) -> list[Instruction]:
    """The code of AMD's assembly text. Addresses count instructions: it is not assembled yet."""
    lines: list[tuple[str, re.Match[str] | None]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(lines)
        elif match := re.match(r"\t([a-z]\w+)(.*)", line):
            lines.append((match[1], re.search(r"\.LBB\w+", match[2])))
    return [
        Instruction(i, opcode, labels[jump[0]] if jump and "branch" in opcode else None)
        for i, (opcode, jump) in enumerate(lines)
    ]


def _cuobjdump(flag: str, compiled: Any) -> str:
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tool), flag, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
