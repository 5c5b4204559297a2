"""Cross-attention K/V: static pools of a model, and named ones that a session owns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from chunkattn.checks import POOL_DTYPES, check_both, check_shape, check_tensor
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
            check_both(**{names[0]: key, names[1]: value})
            if key is None or value is None:
                continue
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


@dataclass(frozen=True)
class CrossAttentionSpec:
    """A named kind of conditioning tokens, for example text or image.

    Attributes:
        length: the most tokens of it.
        num_kv_heads: K/V heads on this rank, of its own.
    """

    length: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        for name in ("length", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")


class _Filled:
    """K/V of one name and branch, ``(num_layers, 2, length, num_kv_heads, head_size)``."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.rows = 0
        self.owners = 1


class NamedCrossAttention:
    """The named cross-attention K/V of one session: every layer of a name is filled, or none is.

    Args:
        specs: what each name holds.
        num_layers: layers of the model.
        head_size: elements of a head.
        dtype: of the pools.
        device: where they lie; None holds nothing.
    """

    def __init__(
        self,
        specs: Mapping[str, CrossAttentionSpec],
        *,
        num_layers: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        self._specs = specs
        self._num_layers, self._head_size = num_layers, head_size
        self._dtype, self._device = dtype, device
        self._filled: dict[tuple[str, int], _Filled] = {}

    def num_bytes(self, num_branches: int) -> int:
        """Bytes of one session once everything is filled on every branch."""
        rows = sum(spec.length * spec.num_kv_heads for spec in self._specs.values())
        return 2 * num_branches * self._num_layers * rows * self._head_size * self._dtype.itemsize

    def fill(
        self,
        name: str,
        branch: int,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        """Fill all layers of a name on a branch. See `Session.fill_cross_attention`."""
        spec = self._spec(name)
        if self._device is None:
            raise LifecycleError("the cache was built without tensors (device=None)")
        for argument, rows in (("keys", keys), ("values", values)):
            if len(rows) != self._num_layers:
                raise ValueError(
                    f"`{argument}` must have one tensor for each of {self._num_layers} layers, got "
                    f"{len(rows)}"
                )
        check_tensor("keys", keys[0], (3,), POOL_DTYPES)
        num_rows = keys[0].shape[0]
        if not 1 <= num_rows <= spec.length:
            raise ValueError(f"`keys` must have 1 to {spec.length} rows, got {num_rows}")
        shape = (num_rows, spec.num_kv_heads, self._head_size)
        for argument, rows in (("keys", keys), ("values", values)):
            for tensor in rows:
                check_tensor(argument, tensor, (3,), POOL_DTYPES)
                check_shape(argument, tensor, shape, f"rows, and heads of {name!r}")
        filled = self._own(name, branch, spec)
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            for pool, tensor in zip(filled.pool[layer], pair, strict=True):
                pool[:num_rows].copy_(tensor)
        filled.rows = num_rows

    def read(self, name: str, layer: int, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, ``(rows, num_kv_heads, head_size)``, views of the pool."""
        self._spec(name)
        filled = self._filled.get((name, branch))
        if filled is None or not filled.rows:
            raise LifecycleError(
                f"cross-attention K/V {name!r} of branch {branch} must be filled before it is read"
            )
        key, value = filled.pool[layer, :, : filled.rows]
        return key, value

    def share(self, source: "NamedCrossAttention") -> None:
        """Take over what another session has filled; whoever fills it anew makes its own."""
        for filled in source._filled.values():
            filled.owners += 1
        self._filled = dict(source._filled)

    def forget(self) -> None:
        """Count everything as not filled. What is not shared keeps its address."""
        for place, filled in list(self._filled.items()):
            if filled.owners == 1:
                filled.rows = 0
            else:
                self._let_go(place)

    def close(self) -> None:
        """Let everything go."""
        for place in list(self._filled):
            self._let_go(place)

    def _let_go(self, place: tuple[str, int]) -> None:
        self._filled.pop(place).owners -= 1

    def _own(self, name: str, branch: int, spec: CrossAttentionSpec) -> _Filled:
        place = (name, branch)
        if place in self._filled and self._filled[place].owners > 1:
            self._let_go(place)
        if place not in self._filled:
            shape = (self._num_layers, 2, spec.length, spec.num_kv_heads, self._head_size)
            with torch.inference_mode(False):  # a later fill may be outside of it
                pool = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._filled[place] = _Filled(pool)
        return self._filled[place]

    def _spec(self, name: str) -> CrossAttentionSpec:
        if name not in self._specs:
            raise ValueError(
                f"`name` must be one of {sorted(self._specs)}, what the cache was built with, got "
                f"{name!r}"
            )
        return self._specs[name]
