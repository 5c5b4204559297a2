"""vLLM's own Triton attention, compiled for the same shapes: what `chunkattn aot` compares with.

vLLM's launcher runs as it does on a GPU, on tensors without data, so tile sizes, warps and stages
are the installed vLLM's choice.
"""

import importlib.util
import sys
import types

import torch

from chunkattn import aot
from chunkattn.aot_launch import Shape, compile_launches

KERNEL = "vllm_unified_attention"


def is_installed() -> bool:
    """Whether there is a vLLM to compare with."""
    return importlib.util.find_spec("vllm") is not None


def issue_slots_per_score(row: aot.Row) -> float:
    """Instructions that all warps of a program issue for one tile, over the tile's scores.

    Raises:
        ValueError: the row has no loop over full tiles.
    """
    for loop in row.loops:
        if loop.role == "full":
            return loop.instructions * row.num_warps / (row.block_m * row.block_n)
    raise ValueError(f"`row` must have a loop of full tiles, got {row}")


def compile_vllm(arch: str, shape: Shape) -> aot.Row:
    """Compile vLLM's unified attention as vLLM launches it for one sequence, not causal.

    Its tile of keys spans blocks, so ``padding_waste`` is 0.

    Raises:
        RuntimeError: vLLM was imported before, on a machine without a GPU: it has hidden Triton.
    """
    _show_triton_to_vllm()
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    query = torch.empty(
        (shape.num_tokens, shape.num_heads, shape.head_size), dtype=shape.dtype, device="meta"
    )
    sizes = (64, shape.block_size, shape.num_kv_heads, shape.head_size)
    pool = torch.empty(sizes, dtype=shape.dtype, device="meta")
    integers = torch.empty((1, 32), dtype=torch.int32, device="meta")
    launch = compile_launches(
        arch,
        unified_attention,
        q=query,
        k=pool,
        v=pool,
        out=query,
        cu_seqlens_q=integers[0, :2],
        max_seqlen_q=shape.num_tokens,
        seqused_k=integers[0, :1],
        max_seqlen_k=32 * shape.block_size,
        softmax_scale=shape.head_size**-0.5,
        causal=False,
        window_size=(-1, -1),
        block_table=integers,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )[0]
    launch.constants["BLOCK_N"] = launch.constants["TILE_SIZE"]
    return aot.row_of(KERNEL, arch, shape, launch, ["full"])


def _show_triton_to_vllm() -> None:
    """Without a GPU's driver vLLM replaces Triton by a stub, once for the whole process."""
    if "vllm.triton_utils" not in sys.modules:
        importing = types.ModuleType("vllm.triton_utils.importing")
        importing.HAS_TRITON = True  # type: ignore[attr-defined]
        # The stub's classes, imported beside the flag and never used where it is set.
        importing.TritonPlaceholder = None  # type: ignore[attr-defined]
        importing.TritonLanguagePlaceholder = None  # type: ignore[attr-defined]
        sys.modules[importing.__name__] = importing
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise RuntimeError("vLLM has hidden Triton: call this in a process of its own")
