"""Argument checks of the public functions. Every message reads "`name` must ..., got ..."."""

import math
import numbers
import os
from typing import Any

import torch

POOL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def refuse(name: str, must: str, got: object) -> ValueError:
    return ValueError(f"`{name}` must {must}, got {got}")


def check_int(name: str, number: Any, least: int | None = None) -> None:
    if not isinstance(number, (int, numbers.Integral)):
        raise TypeError(f"`{name}` must be an integer, got {number!r}")
    if least is not None and number < least:
        raise refuse(name, f"be at least {least}", number)


def check_fraction(fraction: Any) -> None:
    if not isinstance(fraction, numbers.Real):
        raise TypeError(f"`gpu_memory_fraction` must be a number, got {fraction!r}")
    if not 0.0 < float(fraction) <= 1.0:
        raise refuse("gpu_memory_fraction", "be in (0, 1]", fraction)


def check_tensor(
    name: str, tensor: Any, dims: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Type, rank, dtype, and a last dimension without gaps where rows are read."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() not in dims:
        ranks = " or ".join(f"{d}-D" for d in dims)
        raise refuse(name, f"be {ranks}", f"shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"`{name}` must have one of the dtypes {names}, got {tensor.dtype}")
    if tensor.dim() >= 3:
        check_dense(name, tensor)


def check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise refuse(name, "have stride 1 in its last dimension", f"strides {tensor.stride()}")


def check_both(**pair: Any) -> None:
    """Both are given, or neither."""
    missing = [name for name, given in pair.items() if given is None]
    if len(missing) == 1:
        raise refuse(missing[0], "be given together with its partner", None)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], because: str) -> None:
    if tuple(tensor.shape) != shape:
        raise refuse(name, f"have shape {shape} ({because})", tuple(tensor.shape))


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise refuse(name, f"be on {device}, where `key_pool` is", tensor.device)


def check_pools(key_pool: Any, value_pool: Any, dims: tuple[int, ...]) -> None:
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        if isinstance(pool, torch.Tensor) and pool.dtype == torch.float8_e5m2:
            raise NotImplementedError(
                f"`{name}` must be float32, float16, bfloat16 or float8_e4m3fn, got {pool.dtype}"
            )
        check_tensor(name, pool, dims, (*POOL_DTYPES, torch.float8_e4m3fn))
    check_shape("value_pool", value_pool, tuple(key_pool.shape), "that of `key_pool`")
    if value_pool.dtype != key_pool.dtype:
        raise TypeError(
            f"`value_pool` must have the dtype of `key_pool`, {key_pool.dtype}, "
            f"got {value_pool.dtype}"
        )
    if 0 in key_pool.shape[1:]:
        raise refuse(
            "key_pool", "have no empty dimension but the first", f"shape {tuple(key_pool.shape)}"
        )


def check_writable(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise refuse(
                name,
                "have memory for every element",
                f"an expanded view, strides {tensor.stride()}",
            )


def check_scales(
    key_pool: torch.Tensor, key_scale: Any, value_scale: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales as tensors on the pool's device; None where both are 1."""
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    if key_pool.dtype != torch.float8_e4m3fn:
        for name, scale in scales.items():
            if scale is not None:
                must = f"be None for a pool of {key_pool.dtype}: only fp8 pools have scales"
                raise refuse(name, must, scale)
        return None, None
    if key_scale is None and value_scale is None:
        return None, None
    found = {name: _scale(name, scale, key_pool) for name, scale in scales.items()}
    if found["key_scale"].dim() != found["value_scale"].dim():
        name, other = (
            ("key_scale", "value_scale") if key_scale is None else ("value_scale", "key_scale")
        )
        raise refuse(
            name,
            f"be of the kind of `{other}`: of all rows, or of each block and head",
            None if scales[name] is None else f"shape {tuple(found[name].shape)}",
        )
    return found["key_scale"], found["value_scale"]


def _scale(name: str, value: Any, key_pool: torch.Tensor) -> torch.Tensor:
    value = 1.0 if value is None else value
    if isinstance(value, numbers.Real):
        if not 0 < float(value) < math.inf:
            raise refuse(name, "be finite and above 0", value)
        value = torch.full((), float(value), dtype=torch.float32, device=key_pool.device)
    check_tensor(name, value, (0, 1, 2), (torch.float32,))
    scale: torch.Tensor = value
    check_device(key_pool.device, **{name: scale})
    if scale.dim() == 2:
        if key_pool.dim() == 3:
            raise refuse(name, "have one element for a flat pool", f"shape {tuple(scale.shape)}")
        shape = (key_pool.shape[0], key_pool.shape[2])
        check_shape(name, scale, shape, "the blocks and heads of `key_pool`")
        return scale
    if scale.numel() != 1:
        must = "have one element, or one for each block and head"
        raise refuse(name, must, f"shape {tuple(scale.shape)}")
    if values_visible(scale.device) and not 0 < float(scale) < math.inf:
        raise refuse(name, "be finite and above 0", float(scale))
    return scale.reshape(())


def check_block_values(
    name: str,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    size: int,
    negative: bool = False,
) -> None:
    """Look at the scales or biases of visible blocks of ``size`` tokens; others may be anything."""
    entries = torch.arange(block_table.shape[1], device=block_table.device)
    visible = block_table[entries < ((seq_lens + size - 1) // size).unsqueeze(1)].long()
    found = values[visible]
    wrong = ~(found.isfinite() & (negative | (found >= 0)))
    if bool(wrong.any()):
        must = f"be finite{'' if negative else ' and not negative'} for every visible block"
        raise refuse(name, must, float(found[wrong][0]))


def check_block_bias(block_bias: Any, key_pool: torch.Tensor) -> torch.Tensor:
    """The bias as ``(num_blocks, num_kv_heads)``."""
    check_tensor("block_bias", block_bias, (1, 2), (torch.float32,))
    bias: torch.Tensor = block_bias
    num_blocks, _, num_kv_heads, _ = key_pool.shape
    if bias.dim() == 1:
        check_shape("block_bias", bias, (num_blocks,), "the blocks of `key_pool`")
        return bias.unsqueeze(1).expand(-1, num_kv_heads)
    shape = (num_blocks, num_kv_heads)
    check_shape("block_bias", bias, shape, "the blocks and heads of `key_pool`")
    return bias


def check_segment_blocks(segment_blocks: Any, query: torch.Tensor, num_seqs: int) -> None:
    num_segments = query.shape[0]
    if not 1 <= num_segments <= 3:
        raise refuse("query", "have one to three segments", f"shape {tuple(query.shape)}")
    check_tensor("segment_blocks", segment_blocks, (2,), INDEX_DTYPES)
    shape = (num_seqs, num_segments - 1)
    check_shape("segment_blocks", segment_blocks, shape, "num_seqs, and the segments but the last")


def check_key_value(prefix: str, key: Any, value: Any, heads: int, head_size: int) -> None:
    key_name, value_name = f"key{prefix}", f"value{prefix}"
    check_tensor(key_name, key, (3,), POOL_DTYPES)
    check_tensor(value_name, value, (3,), POOL_DTYPES)
    check_shape(
        key_name,
        key,
        (key.shape[0], heads, head_size),
        "num_tokens, and the pool's heads and head size",
    )
    check_shape(value_name, value, tuple(key.shape), f"that of `{key_name}`")
    if value.dtype != key.dtype:
        raise TypeError(
            f"`{value_name}` must have the dtype of `{key_name}`, {key.dtype}, got {value.dtype}"
        )


def check_start_loc(name: str, start_loc: Any, num_seqs: int) -> None:
    check_tensor(name, start_loc, (1,), INDEX_DTYPES)
    check_shape(name, start_loc, (num_seqs + 1,), "num_seqs + 1")


def check_softmax_scale(scale: Any) -> None:
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"`softmax_scale` must be a number or None, got {type(scale).__name__}")
    if not (math.isfinite(scale) and float(scale) >= 0):
        raise refuse("softmax_scale", "be finite and not negative", scale)


def values_visible(device: torch.device) -> bool:
    """Whether values may be looked at: never while torch.compile traces, which has none; always on
    the CPU; on a GPU (where it costs a sync) only when debugging.
    """
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or os.environ.get("CHUNKATTN_DEBUG", "0") == "1"


def check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    written = slot_mapping[slot_mapping >= 0]
    if written.numel() == 0:
        return
    if int(written.max()) >= num_slots:
        raise refuse("slot_mapping", f"stay below the pool's {num_slots} slots", int(written.max()))
    slots, times = written.unique(return_counts=True)
    if slots.numel() != written.numel():
        slot, count = slots[times > 1][0], times[times > 1][0]
        got = f"slot {int(slot)} {int(count)} times"
        raise refuse("slot_mapping", "name each slot at most once", got)


def check_start_loc_values(name: str, start_loc: torch.Tensor, num_rows: int) -> None:
    values = start_loc.tolist()
    if values[0] != 0 or values[-1] != num_rows or values != sorted(values):
        raise refuse(name, f"rise from 0 to {num_rows}, the number of rows", values)


def check_table_values(
    block_table: torch.Tensor, seq_lens: torch.Tensor, num_blocks: int, block_size: int
) -> None:
    capacity = block_table.shape[1] * block_size
    for seq, seq_len in enumerate(seq_lens.tolist()):
        if not 0 <= seq_len <= capacity:
            raise refuse(
                "seq_lens",
                f"be between 0 and {capacity}, what the {block_table.shape[1]} entries hold",
                seq_len,
            )
        used = block_table[seq, : -(-seq_len // block_size)].tolist()
        if used and not 0 <= min(used) <= max(used) < num_blocks:
            wrong = next(block for block in used if not 0 <= block < num_blocks)
            raise refuse(
                "block_table", f"name blocks from 0 to {num_blocks - 1} for {seq_len} rows", wrong
            )
