"""The static cross-attention K/V of a model: text and image tokens, both guidance branches, all
layers.
"""

import torch

from chunkattn.checks import POOL_DTYPES, check_tensor
from chunkattn.errors import LifecycleError


class CrossAttention:
    """K/V of the conditioning tokens: written once a prompt, read in every forward.

    Args:
        text_length: text tokens; 0 for no such half.
        image_length: image tokens; 0 for no such half.
        num_layers: layers, each with pools of its own.
        num_kv_heads: K/V heads on this rank.
        head_size: elements of a head.
        dtype: of the pools.
        device: where they lie; None allocates nothing.
    """

    def __init__(
        self,
        text_length: int,
        image_length: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        self._text, self._image = (
            _Half(
                length,
                num_layers=num_layers,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
                device=device,
            )
            for length in (text_length, image_length)
        )
        self.num_bytes = self._text.num_bytes + self._image.num_bytes

    def write(
        self,
        layer: int,
        branch: int,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        k_img: torch.Tensor | None,
        v_img: torch.Tensor | None,
    ) -> None:
        """Write one layer's halves that are given; all or nothing. See `cache.write_cross_kv`."""
        halves = []
        for names, half, key, value in (
            (("k", "v"), self._text, k, v),
            (("k_img", "v_img"), self._image, k_img, v_img),
        ):
            if key is None and value is None:
                continue
            if key is None or value is None:
                missing = names[0] if key is None else names[1]
                raise ValueError(f"`{missing}` must be given together with its partner, got None")
            if not half:
                raise ValueError(
                    f"`{names[0]}` must be None: the cache has no such pool, got a tensor"
                )
            half.check(names, key, value)
            halves.append((half, key, value))
        for half, key, value in halves:
            half.write(layer, branch, key, value)

    def read(self, layer: int, branch: int) -> dict[str, torch.Tensor]:
        """``k`` and ``v``, and with an image half ``k_img`` and ``v_img``. See
        `cache.read_cross_kv`.
        """
        if not self._text:
            raise LifecycleError("the cache has no cross-attention pool (cross_attn_length is 0)")
        found = dict(zip(("k", "v"), self._text.read(layer, branch), strict=True))
        if self._image:
            found |= zip(("k_img", "v_img"), self._image.read(layer, branch), strict=True)
        return found

    def forget(self) -> None:
        """Count everything as unwritten."""
        for half in (self._text, self._image):
            half.forget()


class _Half:
    """Static K/V of one kind of conditioning tokens (text or image): every layer, both branches.

    Written once a prompt, read in every forward. ``length`` 0 is a pool that does not exist.
    """

    def __init__(
        self,
        length: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        self.num_bytes = 2 * 2 * num_layers * length * num_kv_heads * head_size * dtype.itemsize
        self._written: set[tuple[int, int]] = set()
        self._shape = (length, num_kv_heads, head_size)
        self._pools: list[torch.Tensor] = []
        if device is not None and length > 0:
            shape = (2, 2, *self._shape)  # K or V, branch, then the rows
            self._pools = [
                torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)
            ]

    def check(self, names: tuple[str, str], key: torch.Tensor, value: torch.Tensor) -> None:
        """Refuse what is not ``(batch, length, num_kv_heads, head_size)``, floating."""
        for name, tensor in zip(names, (key, value), strict=True):
            check_tensor(name, tensor, (4,), POOL_DTYPES)
            if tensor.shape[0] < 1 or tuple(tensor.shape[1:]) != self._shape:
                raise ValueError(
                    f"`{name}` must have shape (batch, {', '.join(map(str, self._shape))}), "
                    f"got {tuple(tensor.shape)}"
                )

    def write(self, layer: int, branch: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copy batch entry 0 of checked K and V into the pool."""
        self._pools[layer][0, branch].copy_(key[0])
        self._pools[layer][1, branch].copy_(value[0])
        self._written.add((layer, branch))

    def read(self, layer: int, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer and branch, ``(1, length, num_kv_heads, head_size)``, views of the
        pool.
        """
        if (layer, branch) not in self._written:
            raise LifecycleError(
                f"cross-attention K/V of layer {layer}, branch {branch} must be written before it "
                "is read"
            )
        key, value = self._pools[layer][:, branch].unsqueeze(1)
        return key, value

    def forget(self) -> None:
        """Count every layer as unwritten."""
        self._written.clear()

    def __bool__(self) -> bool:
        return bool(self._pools)
