"""FlashAttention as a backend: what its functions are called with, and what is made of the results.

The libraries need a GPU, so fakes stand in for them. They have the real signatures and defaults,
check what the real ones check in C++, and attend in float32 over the rows that are visible.
"""

import ast
import importlib
import importlib.util
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import chunkattn
from chunkattn import flash_backend, ops
from chunkattn.flash_backend import Measured, chosen_backend
from chunkattn.testing import check_attention, judge, make_case, run_attention
from tests.helpers.machine import needs_vllm

pytestmark = pytest.mark.usefixtures("one_thread")

LOW = (torch.float16, torch.bfloat16)


# -- the libraries --------------------------------------------------------------------------------
def fake_attention(q, k, v, starts, max_q, lens, max_k, table, scale, no_key, multiple=1):
    """Out, and lse as ``(heads, tokens)``, ``no_key`` where no key is."""
    assert q.dtype in LOW
    assert q.dtype == k.dtype == v.dtype
    for ints in (starts, lens, *([] if table is None else [table])):
        assert ints.dtype == torch.int32
        assert ints.stride(-1) == 1
    num_seqs = starts.shape[0] - 1
    queries = starts.tolist()
    assert max_q >= max(b - a for a, b in zip(queries, queries[1:], strict=False))
    # With one row at most, grouped heads are moved into rows: that needs a row a sequence.
    assert max_q > 1 or q.shape[0] == num_seqs
    if table is None:
        bounds = lens.tolist()
        keys = [torch.arange(*bounds[s : s + 2]) for s in range(num_seqs)]
        k_rows, v_rows = k, v
    else:
        assert k.dim() == 4
        assert table.shape[0] == num_seqs == lens.shape[0]
        size = k.shape[1]
        assert size % multiple == 0
        keys = [
            table[s, torch.arange(n) // size].long() * size + torch.arange(n) % size
            for s, n in enumerate(lens.tolist())
        ]
        k_rows, v_rows = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
    assert max_k >= max(map(len, keys))
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[1], q.shape[0])
    group = q.shape[1] // k.shape[-2]
    for s in range(num_seqs):
        rows = slice(*queries[s : s + 2])
        if not len(keys[s]):
            out[rows], lse[:, rows] = 0, no_key
            continue
        key = k_rows[keys[s]].float().repeat_interleave(group, 1)
        value = v_rows[keys[s]].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), key) * scale
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse


def upstream_fa3(name: str) -> ModuleType:
    """``flash_attn_interface`` and ``fa3_fwd_interface`` have the same two functions."""
    module = ModuleType(name)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
        return_attn_probs=False,
    ):
        assert (seqused_q, seqused_k, causal, window_size) == (None, None, False, (-1, -1))
        module.calls.append("rows")
        lens = (cu_seqlens_k, max_seqlen_k)
        out, lse = fake_attention(
            q, k, v, cu_seqlens_q, max_seqlen_q, *lens, None, softmax_scale, -math.inf
        )
        return (out, lse) if return_attn_probs else out

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        assert (k, v, causal, window_size) == (None, None, False, (-1, -1))
        assert page_table is not None
        module.calls.append("paged")
        lens = (cache_seqlens, page_table.shape[1] * k_cache.shape[1])
        out, lse = fake_attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            max_seqlen_q,
            *lens,
            page_table,
            softmax_scale,
            -math.inf,
        )
        partial = torch.tensor([])  # of split keys
        return (out, lse, partial, partial) if return_softmax_lse else out

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def upstream_fa2(name: str) -> ModuleType:
    module = ModuleType(name)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert (dropout_p, causal, window_size) == (0.0, False, (-1, -1))
        module.calls.append("rows" if block_table is None else "paged")
        lens = cu_seqlens_k
        assert lens.shape == cu_seqlens_q.shape
        if block_table is not None:
            assert lens[0] == 0
            lens = lens.diff()
        out, lse = fake_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            max_seqlen_q,
            lens,
            max_seqlen_k,
            block_table,
            softmax_scale,
            math.inf,
            multiple=256,
        )
        return (out, lse, None) if return_attn_probs else out

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def vllm_flash_attn(versions: tuple[int, ...]) -> ModuleType:
    module = ModuleType("vllm.vllm_flash_attn")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        output_scale=None,
        fa_version=2,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
        mask_mod=None,
        block_sparse_tensors=None,
        aux_tensors=None,
        aux_tensor_leading_dims=None,
        dynamic_causal=None,
    ):
        assert fa_version in versions
        assert (causal, window_size, dropout_p) == (False, None, 0.0)
        assert (cu_seqlens_k is None) == (block_table is not None)
        assert (seqused_k is None) == (block_table is None)
        module.calls.append("rows" if block_table is None else "paged")
        result = fake_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            max_seqlen_q,
            cu_seqlens_k if block_table is None else seqused_k,
            max_seqlen_k,
            block_table,
            softmax_scale,
            math.inf,
            multiple=16 if fa_version == 2 else 1,
        )
        return result if return_softmax_lse else result[0]

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.is_fa_version_supported = lambda version: version in versions
    module.fa_version_unsupported_reason = lambda version: f"FA{version} is not built"
    return module


FAKES = {
    "flash_attn_interface": lambda: upstream_fa3("flash_attn_interface"),
    "fa3_fwd_interface": lambda: upstream_fa3("fa3_fwd_interface"),
    "flash_attn": lambda: upstream_fa2("flash_attn"),
    "vllm.vllm_flash_attn": lambda: vllm_flash_attn((2, 3)),
}
INSTALLED = [
    ("fa3", "flash_attn_interface"),
    ("fa3", "vllm.vllm_flash_attn"),
    ("fa3", "fa3_fwd_interface"),
    ("fa2", "flash_attn"),
    ("fa2", "vllm.vllm_flash_attn"),
]
BLOCK_SIZE = {("fa2", "flash_attn"): 256, ("fa2", "vllm.vllm_flash_attn"): 16}
"""The smallest that FlashAttention-2 can do; FlashAttention-3 can do any."""


@pytest.fixture
def install(monkeypatch):
    """Make these the only libraries, and the CPU a device that they run on."""
    flash_backend.load.cache_clear()
    monkeypatch.setattr(flash_backend, "_check_device", lambda name, device: None)

    def only(*modules: ModuleType) -> None:
        for name in FAKES:
            monkeypatch.setitem(sys.modules, name, None)  # an import raises ImportError
        for module in modules:
            module.calls = []
            monkeypatch.setitem(sys.modules, module.__name__, module)

    yield only
    flash_backend.load.cache_clear()


@pytest.fixture(params=INSTALLED, ids="-".join)
def library(request, install):
    """A backend, a block size that it can do, and the one module that is installed."""
    name, module_name = request.param
    module = FAKES[module_name]()
    install(module)
    return name, BLOCK_SIZE.get(request.param, 6), module


# -- results --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
def test_ragged_batch(library, dtype, index_dtype, heads):
    """Sequences without queries and without keys; grouped heads; dead slots are NaN."""
    name, block_size, module = library
    case = make_case(
        seq_lens=[2 * block_size + 1, 0, 37, 5],
        query_lens=[5, 3, 0, 9],
        block_size=block_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=24,
        dtype=dtype,
        index_dtype=index_dtype,
    )
    check_attention(case, name)
    assert module.calls == ["paged"]


@pytest.mark.parametrize("layout", ("separate", "interleaved", "slots", "padded"))
def test_layouts(library, layout):
    """Pools and rows are handed over as they lie."""
    name, block_size, _ = library
    case = make_case(
        seq_lens=[block_size + 3],
        query_lens=[7],
        block_size=block_size,
        num_kv_heads=2,
        layout=layout,
        dtype=torch.float16,
    )
    check_attention(case, name)


@pytest.mark.parametrize("dtype", LOW)
def test_current_rows_are_merged(library, dtype):
    """Paged rows only, current rows only, both, neither: in one batch."""
    name, block_size, module = library
    case = make_case(
        seq_lens=[3 * block_size, 0, 11, 0],
        query_lens=[6, 4, 5, 2],
        current_lens=[13, 7, 0, 0],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        dtype=dtype,
    )
    check_attention(case, name)
    assert module.calls == ["paged", "rows"]


def test_merge_of_unequal_parts(library):
    """Nearly all of the weight on one side, then on the other."""
    name, block_size, _ = library
    for shift in (-30.0, 30.0):
        case = make_case(
            seq_lens=[40],
            query_lens=[8],
            current_lens=[9],
            block_size=block_size,
            dtype=torch.bfloat16,
        )
        case.key_current[..., 0] += shift
        case.query[..., 0] = 4.0
        check_attention(case, name)


def test_no_paged_rows_at_all(library):
    name, block_size, module = library
    case = make_case(
        seq_lens=[0], query_lens=[4], current_lens=[6], block_size=block_size, dtype=torch.float16
    )
    arguments = case.arguments() | {"block_table": case.block_table[:, :0]}
    out, lse = chunkattn.paged_window_attention(**arguments, return_lse=True, backend=name)
    judge(case, out, lse)
    assert module.calls == ["rows"]
    for current in (None, case.key_current[:0]):
        loc = None if current is None else torch.zeros(2, dtype=torch.int32)
        more = {"key_current": current, "value_current": current, "current_start_loc": loc}
        out, lse = chunkattn.paged_window_attention(
            **arguments | more, return_lse=True, backend=name
        )
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_no_query_rows(library):
    name, block_size, module = library
    case = make_case(seq_lens=[5], query_lens=[0], block_size=block_size, dtype=torch.float16)
    out, lse = run_attention(case, name)
    assert out.shape[0] == lse.shape[0] == 0
    assert module.calls == []


def test_one_query_row_of_two_sequences(library):
    """The bound of the query lengths must not say that each sequence has one row."""
    name, block_size, _ = library
    case = make_case(
        seq_lens=[5, 8],
        query_lens=[1, 0],
        num_heads=4,
        block_size=block_size,
        dtype=torch.float16,
    )
    check_attention(case, name)


@pytest.mark.parametrize("scale", (0.0, 0.5))
def test_scale(library, scale):
    name, block_size, module = library
    case = make_case(
        seq_lens=[9],
        query_lens=[3],
        block_size=block_size,
        dtype=torch.float16,
        softmax_scale=scale,
    )
    check_attention(case, name)
    case = make_case(seq_lens=[9], query_lens=[3], block_size=block_size, dtype=torch.float16)
    out = chunkattn.paged_window_attention(**case.arguments(), backend=name)
    judge(case, out)
    assert len(module.calls) == 2


def test_a_scale_of_zero_is_not_handed_over(install):
    """-inf times 0 is NaN in the kernels."""
    seen = []
    module = upstream_fa3("flash_attn_interface")
    attend = module.flash_attn_with_kvcache

    def spy(*args, softmax_scale, **options):
        seen.append(softmax_scale)
        return attend(*args, softmax_scale=softmax_scale, **options)

    module.flash_attn_with_kvcache = spy
    install(module)
    case = make_case(seq_lens=[9], query_lens=[3], dtype=torch.float16, softmax_scale=0.0)
    check_attention(case, "fa3")
    assert 0 < seen[0] < 1e-20


def test_write_runs_on_the_device_s_default(library, monkeypatch):
    """FlashAttention only attends: the same launch, and the same bytes, as without the name."""
    name, _, module = library
    launches = []
    scatter = ops.torch_backend.scatter

    def counted(*arguments):
        launches.append("torch")
        scatter(*arguments)

    monkeypatch.setattr(ops.torch_backend, "scatter", counted)
    key, value = torch.randn(2, 5, 2, 8)
    pools = [torch.full((3, 4, 2, 8), math.nan) for _ in range(4)]
    slots = torch.tensor([0, 11, -1, 3, 6])
    chunkattn.scatter_kv(key, value, *pools[:2], slots, backend=name)
    chunkattn.scatter_kv(key, value, *pools[2:], slots)
    assert torch.equal(pools[0].view(torch.int32), pools[2].view(torch.int32))
    assert torch.equal(pools[1].view(torch.int32), pools[3].view(torch.int32))
    assert launches == ["torch", "torch"]
    assert module.calls == []


def test_write_attend(library):
    """The session's op: the write, then the attention over what was written."""
    name, block_size, module = library
    case = make_case(seq_lens=[7], query_lens=[7], block_size=block_size, dtype=torch.bfloat16)
    key, value, *_ = case.visible(0)
    slots = case.block_table[0, torch.arange(7) // block_size] * block_size
    slots = slots + torch.arange(7) % block_size
    for pool in (case.key_pool, case.value_pool):
        pool.view(-1, *pool.shape[2:])[slots.long()] = math.nan
    out = torch.empty_like(case.query)
    ops.write_attend(
        case.query,
        key[:4],
        value[:4],
        key[4:],
        value[4:],
        case.key_pool,
        case.value_pool,
        slots,
        case.block_table,
        case.seq_lens,
        case.query_start_loc,
        out,
        case.scale(),
        name,
    )
    judge(case, out)
    assert module.calls == ["paged"]


@pytest.fixture
def manager():
    """Imported before the fakes are there: vLLM's dependencies look for FlashAttention too."""
    pytest.importorskip("vllm")
    importlib.import_module("chunkattn.manager")


def test_session(manager, library):
    """A rollout of two spans, the second one with action rows, as on the torch backend."""
    name, block_size, module = library

    def make_cache(
        backend: str, dtype: torch.dtype = torch.bfloat16, chunk_size: int = 2 * block_size
    ) -> chunkattn.ARDiffusionKVCache:
        return chunkattn.ARDiffusionKVCache(
            chunkattn.ARDiffusionKVConfig(enable=True, chunk_size=chunk_size, window_chunks=3),
            num_layers=1,
            num_kv_heads=2,
            head_size=16,
            dtype=dtype,
            block_size=block_size,
            max_model_len=4096,
            available_bytes=1 << 24,
            device=torch.device("cpu"),
            max_scratch_tokens_per_branch=5,
            backend=backend,
        )

    sessions = [make_cache(b).open_session("robot") for b in (name, "torch")]
    for commit, action_len in ((True, 0), (False, 5)):
        lens = (2 * block_size, action_len)
        query = torch.randn(sum(lens), 4, 16, dtype=torch.bfloat16)
        rows = [torch.randn(2, n, 2, 16, dtype=torch.bfloat16) for n in lens if n]
        outs = []
        for session in sessions:
            with session.forward(
                branch=0, seq_len=lens[0], commit=commit, action_len=action_len
            ) as fwd:
                outs.append(fwd.write_attend(0, query, *(r for pair in rows for r in pair)))
        torch.testing.assert_close(*outs, rtol=2**-7, atol=2**-8)
    assert module.calls == ["paged", "paged"]
    with pytest.raises(NotImplementedError, match="^`dtype` must"):
        make_cache(name, torch.float32)
    if name == "fa2":  # plans name parts of blocks where a chunk ends inside one
        with pytest.raises(NotImplementedError, match="^`block_size` must .*, got 4$"):
            make_cache(name, chunk_size=12)


# -- what is refused ------------------------------------------------------------------------------
def refused(name: str, case, message: str) -> None:
    out = torch.full_like(case.query, 7.0)
    with pytest.raises(NotImplementedError, match=rf"^{message}"):
        chunkattn.paged_window_attention(**case.arguments(), out=out, backend=name)
    assert (out == 7).all()


def test_shapes_are_refused(library):
    name, block_size, module = library
    shape = {"seq_lens": [3], "query_lens": [2], "block_size": block_size}
    case = make_case(**shape, dtype=torch.float32)
    refused(
        name, case, f"`dtype` must be float16 or bfloat16 for backend '{name}', got torch.float32"
    )
    for size in (20, 264):
        case = make_case(**shape, head_size=size, dtype=torch.float16)
        refused(name, case, f"`head_size` must be a multiple of 8 and at most 256 .*, got {size}$")
    if name == "fa2":
        size = block_size + 8
        case = make_case(**shape | {"block_size": size}, dtype=torch.float16)
        refused(name, case, f"`block_size` must be a multiple of {block_size} .*, got {size}$")
    assert module.calls == []


def test_odd_strides_are_refused(library):
    name, block_size, module = library
    case = make_case(seq_lens=[3], query_lens=[2], block_size=block_size, dtype=torch.float16)
    for argument in ("query", "key_pool", "value_pool"):
        tensor = getattr(case, argument)
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
        arguments = case.arguments() | {argument: wide[..., :-1]}
        with pytest.raises(NotImplementedError, match=rf"^`{argument}` must .*, got strides"):
            chunkattn.paged_window_attention(**arguments, backend=name)
        shifted = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        arguments = case.arguments() | {argument: shifted}
        with pytest.raises(NotImplementedError, match=rf"^`{argument}` must start"):
            chunkattn.paged_window_attention(**arguments, backend=name)
    assert module.calls == []


def test_what_a_build_lacks_is_refused(install):
    """fa3-fwd says so itself when it is called: it has no fp16, nor pages that TMA cannot fetch."""
    module = upstream_fa3("fa3_fwd_interface")
    install(module)
    case = make_case(seq_lens=[3], query_lens=[2], dtype=torch.float16)

    def lacking(*args, **options):
        raise RuntimeError("This flash attention build does not support paged KV.\nat flash_api")

    module.flash_attn_with_kvcache = lacking
    refused(
        "fa3",
        case,
        "`backend` must have a build for this call, got 'fa3' by fa3_fwd_interface: "
        "This flash attention build does not support paged KV.$",
    )

    def failing(*args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    module.flash_attn_with_kvcache = failing
    with pytest.raises(RuntimeError, match="illegal memory access"):
        chunkattn.paged_window_attention(**case.arguments(), backend="fa3")


@pytest.mark.parametrize("name", flash_backend.NAMES)
def test_cpu_tensors_are_refused(name):
    case = make_case(seq_lens=[3], query_lens=[2], dtype=torch.float16)
    refused(
        name, case, f"`backend` must be 'torch' or 'triton' .*, got '{name}' for tensors on cpu"
    )


@pytest.mark.parametrize(
    ("name", "arch", "fits"),
    [
        ("fa3", 75, False),
        ("fa3", 80, True),
        ("fa3", 90, True),
        ("fa3", 100, False),
        ("fa3", 120, False),
        ("fa2", 75, False),
        ("fa2", 80, True),
        ("fa2", 120, True),
    ],
)
def test_old_and_new_gpus_are_refused(monkeypatch, name, arch, fits):
    monkeypatch.setattr(flash_backend, "_arch_of", lambda device: arch)
    monkeypatch.setattr(torch.version, "hip", None)
    if fits:
        flash_backend._check_device(name, torch.device("cuda", 0))
        return
    with pytest.raises(NotImplementedError, match=rf"^`backend` must .* sm_{arch}, got '{name}'$"):
        flash_backend._check_device(name, torch.device("cuda", 0))


def test_amd_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotImplementedError, match="^`backend` must"):
        flash_backend._check_device("fa2", torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "package"), [("fa3", "pip install fa3-fwd"), ("fa2", "pip install flash-attn")]
)
def test_missing_package(install, name, package):
    """Named, with what to install and why each was not taken; never another backend in silence."""
    install(vllm_flash_attn(()))
    case = make_case(seq_lens=[3], query_lens=[2], dtype=torch.float16)
    with pytest.raises(chunkattn.MissingDependencyError, match=package) as error:
        chunkattn.paged_window_attention(**case.arguments(), backend=name)
    assert f"vllm.vllm_flash_attn: FA{name[-1]} is not built" in str(error.value)
    assert error.value.args[0].count("import of ") >= 1


def test_order_of_preference(install):
    """A full build of FlashAttention-3, vLLM's, then fa3-fwd."""
    full, vllm, small = (FAKES[name]() for _, name in INSTALLED[:3])
    for modules, wanted in (
        ((full, vllm, small), full),
        ((vllm, small), vllm),
        ((vllm_flash_attn((2,)), small), small),
    ):
        install(*modules)
        flash_backend.load.cache_clear()
        assert flash_backend.load("fa3")[1] is wanted


# -- auto -----------------------------------------------------------------------------------------
ROWS = (
    Measured(90, 128, torch.bfloat16, 880, 1000, "fa3", "h200.jsonl"),
    Measured(90, 128, torch.bfloat16, 880, 64, "fa2", "h200.jsonl"),
    Measured(80, 128, torch.bfloat16, 256, 1, "fa2", "a100.jsonl"),
)


def test_choice(monkeypatch):
    """The row with the largest bound below the query rows; triton where nothing was measured."""
    assert chosen_backend(90, 128, torch.bfloat16, 880, 1785) == "triton"
    monkeypatch.setattr(flash_backend, "MEASURED", ROWS)
    for shape, wanted in (
        ((90, 128, torch.bfloat16, 880, 1785), "fa3"),
        ((90, 128, torch.bfloat16, 880, 1000), "fa3"),
        ((90, 128, torch.bfloat16, 880, 999), "fa2"),
        ((90, 128, torch.bfloat16, 880, 63), "triton"),
        ((90, 128, torch.float16, 880, 1785), "triton"),
        ((90, 64, torch.bfloat16, 880, 1785), "triton"),
        ((90, 128, torch.bfloat16, 1560, 1785), "triton"),
        ((100, 128, torch.bfloat16, 880, 1785), "triton"),
        ((80, 128, torch.bfloat16, 256, 1), "fa2"),
    ):
        assert chosen_backend(*shape) == wanted, shape


def test_every_measured_row_names_its_result():
    results = Path(__file__).resolve().parent.parent / "bench" / "results"
    for row in flash_backend.MEASURED:
        assert (results / row.result).is_file()


def test_auto(install, monkeypatch):
    """Auto takes what was measured where it can run, and triton elsewhere; the CPU stays torch."""
    monkeypatch.setattr(flash_backend, "_arch_of", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    shape = (128, torch.bfloat16, 880, 1785)
    install(upstream_fa3("flash_attn_interface"))
    assert ops.resolve_backend("auto", gpu, *shape) == "triton"
    monkeypatch.setattr(flash_backend, "MEASURED", ROWS)
    assert ops.resolve_backend("auto", gpu, *shape) == "fa3"
    assert ops.resolve_backend("auto", gpu, *shape[:3]) == "triton"  # as a cache asks
    assert ops.resolve_backend("auto", gpu, 128) == "triton"  # as a write asks
    assert ops.resolve_backend("auto", torch.device("cpu"), *shape) == "torch"
    # 880 is no multiple of 256.
    install(upstream_fa2("flash_attn"))
    flash_backend.load.cache_clear()
    assert ops.resolve_backend("auto", gpu, *shape[:3], 64) == "triton"
    assert ops.resolve_backend("auto", gpu, *shape) == "triton"


# -- the real ones --------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "block_size"), [("fa3", 880), ("fa2", 256)])
def test_on_a_gpu(name, block_size):
    """Dead slots hold 0 and not NaN, which FlashAttention-3 would let through."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    try:
        flash_backend.check(name, gpu, 128, torch.bfloat16, block_size)
    except (NotImplementedError, chunkattn.MissingDependencyError) as reason:
        pytest.skip(str(reason))
    case = make_case(
        seq_lens=[2 * block_size + 25, 0, block_size],
        query_lens=[300, 3, 200],
        current_lens=[25, 0, 7],
        block_size=block_size,
        num_heads=4,
        num_kv_heads=2,
        head_size=128,
        dtype=torch.bfloat16,
        device="cuda",
        poison=0.0,
    )
    check_attention(case, name)


# -- the fakes are like the real ones -------------------------------------------------------------
@needs_vllm
def test_vllm_s_signature():
    """The installed vLLM's function begins as the fake does and takes the names that we pass."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    tree = ast.parse((root / "vllm_flash_attn" / "flash_attn_interface.py").read_text())
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    )
    real = [argument.arg for argument in function.args.args]
    fake = list(inspect.signature(vllm_flash_attn(()).flash_attn_varlen_func).parameters)
    assert real[:6] == fake[:6]
    passed = {"cu_seqlens_k", "seqused_k", "softmax_scale", "block_table", "return_softmax_lse"}
    assert passed | {"fa_version"} <= set(real)
