"""Other ways to compute a case, each a function of the case that returns a call.

A peer that cannot run here raises `Unavailable` with the reason; a benchmark prints that instead of
a time.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from cases import Case, attend

import chunkattn
from chunkattn import MissingDependencyError, flash_backend
from chunkattn.kernels.arguments import AttentionArguments
from chunkattn.kernels.tuning import GATHER_BELOW

Run = Callable[[], torch.Tensor]


class Unavailable(Exception):
    """Why a peer cannot run."""


# -- ours ------------------------------------------------------------------------------------------
def ours(case: Case) -> Run:
    return lambda: chunkattn.paged_window_attention(
        case.query,
        case.key_pool,
        case.value_pool,
        case.block_table,
        case.seq_lens,
        query_start_loc=case.query_start_loc,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
    )


def ours_with(num_programs: int | None) -> Callable[[Case], Run]:
    """The kernel with the keys divided among so many programs; 0: not at all, None: one each SM."""

    def peer(case: Case) -> Run:
        _need_gpu(case)
        from chunkattn.kernels.launch import multiprocessors
        from chunkattn.kernels.walk import walk

        if case.key_pool.shape[1] < GATHER_BELOW:
            raise Unavailable(f"blocks under {GATHER_BELOW} tokens are not split")
        out = torch.empty_like(case.query)
        programs = multiprocessors(case.query.device) if num_programs is None else num_programs
        inputs = AttentionArguments(
            case.query,
            case.key_pool,
            case.value_pool,
            case.block_table,
            case.seq_lens,
            case.query_start_loc,
            key_current=None,
            value_current=None,
            current_start_loc=None,
            segment_blocks=None,
            key_scale=case.key_scale,
            value_scale=case.value_scale,
            block_bias=None,
            out=out,
            lse=None,
            softmax_scale=case.query.shape[-1] ** -0.5,
        )

        def run() -> torch.Tensor:
            walk(inputs, num_programs=programs)
            return out

        return run

    return peer


# -- torch -----------------------------------------------------------------------------------------
def sdpa_contiguous(case: Case) -> Run:
    key, value = case.gathered()
    return lambda: attend(case.query, key, value)


def sdpa_gathered(case: Case) -> Run:
    return lambda: attend(case.query, *case.gathered())


def sdpa_concatenated(case: Case) -> Run:
    """Upstream's way: the history and the span's own rows become one tensor in every layer."""
    past = [(rows[: -case.own_rows], rows[-case.own_rows :].clone()) for rows in case.gathered()]
    return lambda: attend(case.query, *(torch.cat(pair) for pair in past))


def flex_paged(case: Case) -> Run:
    """FlexAttention whose block mask is the block table."""
    _need_gpu(case)  # uncompiled, it computes every score of the pool
    _no_fp8(case)
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    num_blocks, block_size = case.key_pool.shape[:2]
    # Inductor's tile of keys must divide a block of the mask.
    key_tile = next((tile for tile in (128, 64, 32, 16) if block_size % tile == 0), None)
    if key_tile is None:
        raise Unavailable("it needs blocks of a multiple of 16 tokens")
    table, rows, query_block = case.block_table[0], case.query.shape[0], 128
    # Visible rows of each block of the pool.
    limit = torch.zeros(num_blocks, dtype=torch.int32, device=table.device)
    limit[table.long()] = block_size
    limit[table[-1].long()] = case.kv_len - (len(table) - 1) * block_size

    def visible(_batch: Any, _head: Any, _query: Any, key: torch.Tensor) -> torch.Tensor:
        return key % block_size < limit[key // block_size]

    def of_every_row(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query_blocks = -(-rows // query_block)
        padded = torch.nn.functional.pad(blocks, (0, num_blocks - len(blocks)))
        return (
            torch.full((1, 1, query_blocks), len(blocks), dtype=torch.int32, device=table.device),
            padded.expand(1, 1, query_blocks, -1).contiguous(),
        )

    mask = BlockMask.from_kv_blocks(
        *of_every_row(table[-1:]),  # the mask is asked for these
        *of_every_row(table[:-1]),
        BLOCK_SIZE=(query_block, block_size),
        mask_mod=visible,
        seq_lengths=(rows, num_blocks * block_size),
    )
    query, key, value = (
        x.transpose(0, 1).unsqueeze(0)
        for x in (case.query, case.key_pool.flatten(0, 1), case.value_pool.flatten(0, 1))
    )
    flex: Any = flex_attention
    if case.query.device.type == "cuda":
        torch._dynamo.reset()  # one case after the other would reach the limit of recompilations
        flex = torch.compile(flex_attention, dynamic=False)
    grouped = query.shape[1] != key.shape[1]
    options = {"block_mask": mask, "enable_gqa": grouped, "kernel_options": {"BLOCK_N": key_tile}}
    return lambda: flex(query, key, value, **options)[0].transpose(0, 1)


# -- libraries -------------------------------------------------------------------------------------
def vllm_omni(case: Case) -> Run:
    """vllm-omni's paged attention: its reference on a CPU, FlashAttention on a GPU."""
    _no_fp8(case)
    paged = _import(
        "vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention",
        "ar_diffusion_paged_attention",
    )
    return lambda: paged(
        case.query,
        case.key_pool,
        case.value_pool,
        block_table=case.block_table,
        query_start_loc=case.query_start_loc,
        seq_lens=case.seq_lens,
        max_query_len=case.query.shape[0],
        max_seq_len=case.block_table.shape[1] * case.key_pool.shape[1],
        softmax_scale=case.query.shape[-1] ** -0.5,
    )


def vllm_triton(case: Case) -> Run:
    """vLLM's unified Triton attention."""
    _need_gpu(case)
    _no_fp8(case)
    if case.key_pool.shape[1] % 16:
        raise Unavailable("it needs blocks of a multiple of 16 tokens")
    unified = _import("vllm.v1.attention.ops.triton_unified_attention", "unified_attention")
    out = torch.empty_like(case.query)

    def run() -> torch.Tensor:
        unified(
            q=case.query,
            k=case.key_pool,
            v=case.value_pool,
            out=out,
            cu_seqlens_q=case.query_start_loc,
            max_seqlen_q=case.query.shape[0],
            seqused_k=case.seq_lens,
            max_seqlen_k=case.kv_len,
            softmax_scale=case.query.shape[-1] ** -0.5,
            causal=False,
            window_size=(-1, -1),
            block_table=case.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out

    return run


def flash(name: str, *, paged: bool, gather: bool = False) -> Callable[[Case], Run]:
    """FlashAttention-3 or -2 on the pool, or on contiguous K and V, with or without the gather."""

    def peer(case: Case) -> Run:
        _need_gpu(case)
        _no_fp8(case)
        size, pool = case.query.shape[-1], case.key_pool
        block_size = pool.shape[1] if paged else None
        try:
            flash_backend.check(name, case.query.device, size, pool.dtype, block_size)
            library, module = flash_backend.load(name)
        except (NotImplementedError, MissingDependencyError) as error:
            raise Unavailable(str(error)) from None
        rows = case.query.shape[0]
        lengths, table, most = case.seq_lens, case.block_table, case.kv_len
        if not paged:
            lengths, table = torch.nn.functional.pad(lengths, (1, 0)), None
        held = None if gather else (pool, case.value_pool) if paged else case.gathered()

        def run() -> torch.Tensor:
            key, value = held or case.gathered()
            start = case.query_start_loc
            operands = (module, case.query, key, value, start, rows, lengths, most, table)
            return library.attend(*operands, size**-0.5)[0]

        return run

    return peer


def flashinfer_paged(case: Case) -> Run:
    _need_gpu(case)
    _no_fp8(case)
    wrapper_of = _import("flashinfer", "BatchPrefillWithPagedKVCacheWrapper")
    wrapper = wrapper_of(torch.empty(128 << 20, dtype=torch.uint8, device=case.query.device), "NHD")
    num_blocks, block_size, kv_heads, head_size = case.key_pool.shape
    entries = case.block_table.shape[1]
    integers = {"dtype": torch.int32, "device": case.query.device}
    wrapper.plan(
        case.query_start_loc,
        torch.tensor([0, entries], **integers),
        case.block_table[0].contiguous(),
        torch.tensor([case.kv_len - (entries - 1) * block_size], **integers),
        case.query.shape[1],
        kv_heads,
        head_size,
        block_size,
        causal=False,
        q_data_type=case.query.dtype,
    )
    return lambda: wrapper.run(case.query, (case.key_pool, case.value_pool))


def _import(module: str, name: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from None
    return found


def _need_gpu(case: Case) -> None:
    if case.query.device.type != "cuda":
        raise Unavailable("needs a GPU")


def _no_fp8(case: Case) -> None:
    if case.fp8:
        raise Unavailable("not with a scale a block and head")


OURS = "chunkattn"
PEERS: dict[str, Callable[[Case], Run]] = {
    OURS: ours,
    "chunkattn, not split": ours_with(0),
    "chunkattn, split": ours_with(None),
    "sdpa contiguous": sdpa_contiguous,
    "gather + sdpa": sdpa_gathered,
    "concat + sdpa": sdpa_concatenated,
    "vllm-omni": vllm_omni,
    "fa3 paged": flash("fa3", paged=True),
    "fa3 contiguous": flash("fa3", paged=False),
    "gather + fa3": flash("fa3", paged=False, gather=True),
    "fa2 paged": flash("fa2", paged=True),
    "flashinfer paged": flashinfer_paged,
    "vllm triton": vllm_triton,
    "flex paged": flex_paged,
}
