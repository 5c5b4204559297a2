"""Faults of vllm-omni 0.30.0's K/V manager, beside ours: ``-m chunkattn.integrations.faults``.

Both managers are driven by the same calls, through the methods that vllm-omni's runner and models
use. vllm-omni accepts each sequence, and history or attention is wrong afterwards; ours refuses.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from chunkattn.errors import ChunkAttnError

CHUNK = 4
HEADS, HEAD_SIZE, LAYERS = 1, 8, 2


class Manager(NamedTuple):
    """The classes of one manager."""

    cache: Any
    state: Any

    def build(self, *, window: int = 3, sink: int = 1, span: int = 2) -> Any:
        """A cache of one branch, blocks as large as a chunk."""
        from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec
        from vllm_omni.experimental.ar_diffusion.kv_cache.config import ARDiffusionKVConfig

        return self.cache(
            ARDiffusionKVConfig(
                enable=True, chunk_size=CHUNK, window_chunks=window, sink_chunks=sink
            ),
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            block_size=CHUNK,
            max_model_len=1 << 20,
            available_bytes=1 << 20,
            kv_branches=(ARDiffusionKVBranchSpec("main", 0),),
            session_capacity=2,
            device=torch.device("cpu"),
            frames_per_block=span,
            max_scratch_tokens_per_branch=2 * CHUNK,
        )

    def open(self, cache: Any) -> Any:
        """A session, as the runner opens it."""
        adapters = {"main": cache.begin_request("ar::robot::main")}
        return self.state(cache, "robot", adapters, num_layers=LAYERS)


def prepare(state: Any, chunks: int, action_len: int = 0) -> Any:
    """A commit forward, planned; no layer has run."""
    forward = state.get_kv_caches("main", chunks * CHUNK, True)[0].forward_ctx
    forward.prepare(torch.device("cpu"), action_len, chunks * CHUNK + action_len)
    return forward


def run_layers(forward: Any) -> None:
    """Call the op for every layer, as the model does."""
    from vllm_omni.experimental.ar_diffusion.kv_cache.paged_attention import paged_write_attn

    rows = torch.ones(forward.seq_len, HEADS, HEAD_SIZE)
    for layer in range(LAYERS):
        paged_write_attn(forward.layer_inputs(layer), rows, rows, rows, None, None, 1.0)


# Each returns what is wrong after the calls were accepted, or None where nothing is.
def short_window(manager: Manager) -> str | None:
    """B7: a window of 1 chunk and a sink of 1, for spans of 3 chunks."""
    forward = prepare(manager.open(manager.build(window=1, sink=1, span=3)), 3)
    seen = forward.kv_len // CHUNK
    return f"the span sees {seen} of its own 3 chunks" if seen != 3 else None


def history_of_the_uncommitted(manager: Manager) -> str | None:
    """B15: two chunks allocated, one committed."""
    cache = manager.build()
    adapter = cache.begin_request("request")
    cache.allocate_token_slots(adapter, 2 * CHUNK)
    cache.commit_chunk(adapter)
    blocks = cache.window_block_ids(adapter)
    return f"1 chunk is committed, blocks {blocks} are history" if len(blocks) != 1 else None


def failed_forward_is_committed(manager: Manager) -> str | None:
    """F1: a commit forward with 99 action rows fails, is tried again, and is committed."""
    state = manager.open(manager.build())
    for _ in range(2):
        try:
            prepare(state, 2, action_len=99)
        except (RuntimeError, ValueError):
            continue
        raise AssertionError("99 action rows must not fit")
    state.commit_paged_context("main")
    return f"{state.adapter('main').completed_chunks} chunks that nobody wrote are history"


def context_kept_across_reset(manager: Manager) -> str | None:
    """F2: contexts are asked for, the session is reset, the model runs."""
    state = manager.open(manager.build())
    forward = prepare(state, 1)
    run_layers(forward)
    state.commit_paged_context("main")
    stale = state.get_kv_caches("main", CHUNK, True)[0].forward_ctx
    state.reset()
    stale.prepare(torch.device("cpu"), 0, CHUNK)
    return f"its block table is {stale.block_table.tolist()} for {stale.kv_len} keys"


def live_request_begins_again(manager: Manager) -> str | None:
    """F3: a request begins under the id of one that lives."""
    cache = manager.build()
    adapter = cache.begin_request("request")
    cache.allocate_chunk(adapter)
    cache.commit_chunk(adapter)
    second = cache.begin_request("request")
    blocks = cache.window_block_ids(second)
    return f"at position {second.num_computed_tokens} it sees blocks {blocks} of the first"


def commit_twice(manager: Manager) -> str | None:
    """F4: one chunk is allocated and committed, and committed once more."""
    cache = manager.build()
    adapter = cache.begin_request("request")
    cache.allocate_chunk(adapter)
    cache.commit_chunk(adapter)
    cache.commit_chunk(adapter)
    return f"1 chunk was written, {adapter.completed_chunks} are history"


def commit_without_a_write(manager: Manager) -> str | None:
    """F4: a forward is planned and committed, and no layer has run."""
    state = manager.open(manager.build())
    prepare(state, 2)
    state.commit_paged_context("main")
    return f"{state.adapter('main').completed_chunks} chunks that nobody wrote are history"


FAULTS: tuple[Callable[[Manager], str | None], ...] = (
    short_window,
    history_of_the_uncommitted,
    failed_forward_is_committed,
    context_kept_across_reset,
    live_request_begins_again,
    commit_twice,
    commit_without_a_write,
)


class Verdict(NamedTuple):
    """What a manager made of a fault.

    Attributes:
        accepted: something is wrong now, and nobody said so.
        says: what is wrong, or the error that was raised, in words.
    """

    accepted: bool
    says: str


def judge(fault: Callable[[Manager], str | None], manager: Manager) -> Verdict:
    """Drive one manager through one fault."""
    try:
        wrong = fault(manager)
    except (ChunkAttnError, ValueError) as error:
        return Verdict(False, f"refuses: {type(error).__name__}: {error}")
    return Verdict(wrong is not None, "is right" if wrong is None else f"accepts: {wrong}")


def managers() -> tuple[Manager, Manager]:
    """vllm-omni's and ours. The plug-in must not have replaced the first."""
    from vllm_omni.experimental.ar_diffusion.kv_cache.manager import ARDiffusionKVCache
    from vllm_omni.experimental.ar_diffusion.kv_cache.state import ARDiffusionKVState

    from chunkattn.integrations import omni_cache, omni_state, vllm_omni

    if vllm_omni.active == "full":
        raise RuntimeError(f"`{vllm_omni.ENV}` must not be full here: nothing is left to compare")
    vllm_omni.serve_op()
    ours = Manager(omni_cache.ARDiffusionKVCache, omni_state.ARDiffusionKVState)
    return Manager(ARDiffusionKVCache, ARDiffusionKVState), ours


def main() -> int:
    """Print what both make of every fault; 0 where ours lets none pass."""
    theirs, ours = managers()
    passed = 0
    for fault in FAULTS:
        print(fault.__doc__)
        for name, manager in (("vllm-omni", theirs), ("chunkattn", ours)):
            verdict = judge(fault, manager)
            passed += verdict.accepted and manager is ours
            print(f"    {name} {verdict.says}")
    return int(passed > 0)


if __name__ == "__main__":
    sys.exit(main())
