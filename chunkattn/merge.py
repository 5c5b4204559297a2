"""Results of attention over different keys, made one: what context parallelism gathers."""

import math
from collections.abc import Sequence

import torch

from chunkattn.checks import POOL_DTYPES, check_shape, check_tensor, refuse


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention of the same queries over different keys, as if all keys were attended at
    once. Computed in float32 and rounded once; no host sync.

    Each state is a result of `paged_window_attention` with ``return_lse=True``, over a part of the
    keys: of another rank, another pool, another library. A row whose lse is -inf has seen no key
    and counts for nothing, whatever its out holds. As FlashInfer's function of that name, but
    states come first and logarithms are natural.

    Args:
        outs: ``(num_states, num_tokens, num_heads, head_size)``, or a sequence of the states;
            float32, float16 or bfloat16.
        lses: ``(num_states, num_tokens, num_heads)`` float32, or a sequence of them.

    Returns:
        ``out`` ``(num_tokens, num_heads, head_size)`` in the dtype of ``outs``, and ``lse``
        ``(num_tokens, num_heads)`` float32. A row that no state has a key for is 0 and -inf.

    Raises:
        TypeError, ValueError: no state, or states that do not fit each other.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise refuse("lses", f"have one state for each of `outs`, {len(outs)}", len(lses))
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(f"outs[{i}]", out, (3,), (outs[0].dtype,) if i else POOL_DTYPES)
        check_shape(f"outs[{i}]", out, tuple(outs[0].shape), "that of `outs[0]`")
        check_tensor(f"lses[{i}]", lse, (2,), (torch.float32,))
        check_shape(f"lses[{i}]", lse, tuple(outs[0].shape[:2]), "the rows and heads of `outs`")
    merged_lse = torch.logsumexp(torch.stack(lses), 0)
    merged = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, lse in zip(outs, lses, strict=True):
        # -inf - -inf is NaN where no state has a key.
        weight = (lse - merged_lse).exp().masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
        merged += torch.where(weight > 0, out.float() * weight, 0.0)
    return merged.to(outs[0].dtype), merged_lse
