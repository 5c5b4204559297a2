"""The static cross-attention pools: text and image halves of both guidance branches."""

import pytest
import torch

from chunkattn import LifecycleError
from tests.helpers.rollout import make_cache


def make(text: int = 5, image: int = 3, layers: int = 2, **more):
    return make_cache(
        layers=layers,
        heads=2,
        usable=9,
        cross_attn_length=text,
        cross_attn_img_length=image,
        available_bytes=1 << 20,
        **more,
    )


def rows(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, 2, 8)


def pools(cache) -> list[torch.Tensor]:
    cross = cache._cross_attention
    return [p.clone() for half in (cross._text, cross._image) for p in half._pools]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


def test_both_halves_of_both_branches_come_back():
    cache = make()
    written = {}
    for layer in range(2):
        for negative in (False, True):
            four = [rows(5, 2), rows(5, 2), rows(3), rows(3)]
            cache.write_cross_kv(layer, negative, *four)
            written[layer, negative] = [tensor[:1] for tensor in four]  # batch entry 0
    for (layer, negative), four in written.items():
        read = cache.read_cross_kv(layer, negative)
        assert list(read) == ["is_init", "k", "v", "k_img", "v_img"]
        assert read["is_init"] is True
        for name, tensor in zip(("k", "v", "k_img", "v_img"), four, strict=True):
            assert torch.equal(read[name], tensor)


def test_a_read_is_a_view():
    """Read in every layer of every forward: no copy."""
    cache = make()
    cache.write_cross_kv(0, False, rows(5), rows(5), rows(3), rows(3))
    first, second = cache.read_cross_kv(0, False), cache.read_cross_kv(0, False)
    for name in ("k", "v", "k_img", "v_img"):
        assert first[name].data_ptr() == second[name].data_ptr()
        assert first[name].is_contiguous()


def test_none_skips_a_half():
    """A restarted window rewrites the image's K/V and keeps the text's."""
    cache = make()
    k, v = rows(5), rows(5)
    cache.write_cross_kv(1, True, k, v, rows(3), rows(3))
    k_img, v_img = rows(3), rows(3)
    cache.write_cross_kv(1, True, None, None, k_img, v_img)
    read = cache.read_cross_kv(1, True)
    for name, tensor in (("k", k), ("v", v), ("k_img", k_img), ("v_img", v_img)):
        assert torch.equal(read[name], tensor)
    before = pools(cache)
    cache.write_cross_kv(1, True, None, None)
    assert same(pools(cache), before)


def test_text_alone():
    cache = make(image=0)
    k, v = rows(5), rows(5)
    cache.write_cross_kv(0, False, k, v)
    read = cache.read_cross_kv(0, False)
    assert list(read) == ["is_init", "k", "v"]
    assert torch.equal(read["k"], k)
    assert torch.equal(read["v"], v)


def test_what_was_not_written_is_not_read():
    """C3: not the other branch, not the other layer, not the other half."""
    cache = make()
    cache.write_cross_kv(0, False, rows(5), rows(5))
    for layer, negative in ((0, True), (1, False), (0, False)):
        with pytest.raises(
            LifecycleError, match=f"layer {layer}, branch {int(negative)} must be wr"
        ):
            cache.read_cross_kv(layer, negative)
    cache.write_cross_kv(0, False, None, None, rows(3), rows(3))
    cache.read_cross_kv(0, False)
    with pytest.raises(LifecycleError, match="no cross-attention pool"):
        make_cache().read_cross_kv(0, False)


good, image = rows(5), rows(3)


@pytest.mark.parametrize(
    ("k", "v", "k_img", "v_img", "error", "message"),
    [
        (rows(4), good, None, None, ValueError, r"`k` must have shape \(batch, 5, 2, 8\), got"),
        (good, rows(6), None, None, ValueError, r"`v` must have shape \(batch, 5, 2, 8\), got"),
        (good[0], good, None, None, ValueError, r"`k` must be 4-D, got shape \(5, 2, 8\)"),
        (good[:0], good, None, None, ValueError, r"`k` must .*, got \(0, 5, 2, 8\)"),
        (good[:, :, :1], good, None, None, ValueError, r"`k` must .*, got \(1, 5, 1, 8\)"),
        (good, None, None, None, ValueError, "`v` must be given together with its partner"),
        (None, good, None, None, ValueError, "`k` must be given together with its partner"),
        # The second half is at fault, and the first is not written either.
        (good, good, good, image, ValueError, r"`k_img` must have shape \(batch, 3, 2, 8\)"),
        (good, good, image, good, ValueError, r"`v_img` must have shape \(batch, 3, 2, 8\)"),
        (good, good, image, None, ValueError, "`v_img` must be given together"),
        (good.int(), good, None, None, TypeError, "`k` must have one of .*, got torch.int32"),
        ([1], good, None, None, TypeError, "`k` must be a torch.Tensor, got list"),
    ],
)
def test_write_refuses_before_anything_changes(k, v, k_img, v_img, error, message):
    cache = make()
    cache.write_cross_kv(0, False, good, good)
    before = pools(cache)
    with pytest.raises(error, match=message):
        cache.write_cross_kv(0, False, k, v, k_img, v_img)
    assert same(pools(cache), before)
    with pytest.raises(LifecycleError):
        cache.read_cross_kv(0, False)  # the image half still counts as unwritten


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_are_bounded(layer):
    cache = make()
    with pytest.raises(ValueError, match=f"`layer` must be from 0 to 1, got {layer}"):
        cache.write_cross_kv(layer, False, good, good)
    with pytest.raises(ValueError, match=f"`layer` must be from 0 to 1, got {layer}"):
        cache.read_cross_kv(layer, False)


def test_a_pool_that_is_not_there():
    cache = make(image=0)
    with pytest.raises(ValueError, match="`k_img` must be None: the cache has no such pool"):
        cache.write_cross_kv(0, False, good, good, image, image)
    with pytest.raises(LifecycleError):
        cache.read_cross_kv(0, False)
    with pytest.raises(ValueError, match="`k` must be None: the cache has no such pool"):
        make_cache().write_cross_kv(0, False, good, good)
    with pytest.raises(ValueError, match="`k` must be None: the cache has no such pool"):
        make(device=None).write_cross_kv(0, False, good, good)


def test_the_pool_rounds_as_torch_does():
    """E9: float32 K/V in a float16 pool."""
    cache = make(image=0, dtype=torch.float16)
    cache.write_cross_kv(0, False, good, good)
    assert torch.equal(cache.read_cross_kv(0, False)["k"], good.half())
