"""What tests of `norm_rope_scatter` share: the model's own steps, random inputs, a judge."""

from types import SimpleNamespace

import torch

import chunkattn
from chunkattn.testing import assert_nan_beside, make_pools, make_rows

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
EPS = 0.05  # large enough to be seen


def rope_params(rows: int, dim: int) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(rows).double(), 10000 ** -(torch.arange(0, dim, 2).double() / dim)
    )
    return torch.polar(torch.ones_like(angles), angles)


def modules(x, weight, freqs, eps=EPS):
    """The model's RMSNorm and rotation, with its roundings; ``freqs`` complex128."""
    if weight is not None:
        x_float = x.flatten(1).float()
        mean = x_float.pow(2).sum(-1, keepdim=True) / weight.numel()
        normed = (x_float * torch.rsqrt(mean + eps)).type_as(x) * weight
        normed = normed.view(x.shape)
    else:
        normed = x
    if freqs is not None:
        pairs = torch.view_as_complex(normed.double().unflatten(-1, (-1, 2)).contiguous())
        normed = torch.view_as_real(pairs * freqs.unsqueeze(1)).flatten(2)
    return normed.type_as(x)


def steps(x: torch.Tensor) -> torch.Tensor:
    """Places of 16-bit or 8-bit floats among all of their dtype; both zeros have the same."""
    kind, bits = (torch.int16, 15) if x.element_size() == 2 else (torch.int8, 7)
    codes = x.contiguous().view(kind).int()
    return torch.where(codes < 0, -(codes + 2**bits), codes)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same roundings: one step off on few elements, where float32 fell on another side."""
    assert got.dtype == want.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
        return
    assert not got.float().isnan().any()
    off = (steps(got) - steps(want)).abs()
    for least, one_in in ((2, 1000), (1, 100)):
        count = (off >= least).sum()
        assert count <= off.numel() / one_in, f"{count} of {off.numel()} are {least} or more off"


def quantised(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def make_inputs(
    slots=(4, 9, -1, 10, 2, 0, 7, 15),
    *,
    heads: int = 3,
    kv_heads: int | None = None,
    head_size: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    pool_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "separate",
    padded: bool = False,
    index_dtype: torch.dtype = torch.int64,
) -> SimpleNamespace:
    """Arguments by name, the complex angles, and the poisoned buffers of the pools."""
    kv_heads, num_tokens = kv_heads or heads, len(slots)
    rows = {}
    for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
        rows[name] = make_rows(
            num_tokens, count, head_size, dtype=dtype, device=device, padded=padded
        )
        rows[name].copy_(torch.randn(num_tokens, count, head_size))
    freqs = rope_params(997, head_size)[torch.randint(997, (num_tokens,))].to(device)
    cos, sin = chunkattn.rope_tables(freqs)
    weights = [
        (1 + torch.randn(count * head_size) / 4).to(device, weight_dtype or dtype)
        for count in (heads, kv_heads)
    ]
    key_pool, value_pool, buffers = make_pools(
        4, 4, kv_heads, head_size, dtype=pool_dtype or dtype, device=device, layout=layout
    )
    arguments = {
        **rows,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "cos": cos,
        "sin": sin,
        "key_pool": key_pool,
        "value_pool": value_pool,
        # Neighbours in memory are valid slots: reading too far would write there.
        "slot_mapping": torch.tensor([1, *slots, 3], dtype=index_dtype, device=device)[1:-1],
        "eps": EPS,
    }
    return SimpleNamespace(arguments=arguments, freqs=freqs, buffers=buffers)


def check(inputs: SimpleNamespace, backend: str, **options) -> None:
    """Call, compare Q and the written rows with `modules`, and every other byte with before."""
    arguments = inputs.arguments | options
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    freqs = inputs.freqs if arguments["cos"] is not None else None
    want = modules(query, arguments["query_weight"], freqs)
    raw = not arguments.get("rotate_key", True)
    want_key = modules(key, arguments["key_weight"], None if raw else freqs)
    before = [buffer.view(torch.uint8).clone() for buffer in inputs.buffers]
    out = make_rows(*query.shape, dtype=query.dtype, device=str(query.device), padded=True)
    got = chunkattn.norm_rope_scatter(**arguments, query_out=out, backend=backend)
    assert got is out
    assert_near(out, want)
    assert_nan_beside("query_out", out)

    slots = arguments["slot_mapping"]
    written = slots >= 0
    for i, rows in enumerate((want_key, value)):
        name = ("key", "value")[i]
        pool, scale = arguments[f"{name}_pool"], arguments.get(f"{name}_scale", 1.0)
        at = (slots[written] // pool.shape[1], slots[written] % pool.shape[1])
        bits = torch.uint8 if pool.dtype == FP8 else pool.dtype  # torch indexes no fp8
        stored = pool.view(bits)[at].view(pool.dtype)
        if pool.dtype == FP8:
            factor = scale[at[0], :, None] if getattr(scale, "ndim", 0) == 2 else scale
            assert_near(stored, quantised(rows[written], factor))
        elif name == "value":
            assert torch.equal(stored, rows[written].to(pool.dtype))
        else:
            assert_near(stored, rows[written].to(pool.dtype))
        # What was written is zero now on both sides; the rest must be as it was.
        buffer = i % len(inputs.buffers)
        for whole in (inputs.buffers[buffer].view(torch.uint8), before[buffer]):
            view = whole.view(bits).as_strided(pool.shape, pool.stride(), pool.storage_offset())
            view[at] = 0
    for buffer, old in zip(inputs.buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), old), "something else in the pools changed"
