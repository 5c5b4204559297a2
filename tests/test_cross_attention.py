"""Cross-attention K/V: the static pools, text and image halves, and named ones of a session."""

import pytest
import torch

from chunkattn import CrossAttentionSpec, LifecycleError
from tests.helpers.rollout import make_cache, page_bytes


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
    with pytest.raises(ValueError, match=f"`layer_idx` must be from 0 to 1, got {layer}"):
        cache.write_cross_kv(layer, False, good, good)
    with pytest.raises(ValueError, match=f"`layer_idx` must be from 0 to 1, got {layer}"):
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


# -- named, one for each session ----------------------------------------------------------------
SPECS = {"text": CrossAttentionSpec(5, 2), "image": CrossAttentionSpec(3, 1)}


def named(**more):
    arguments = {"session_capacity": 3, "cross_attention": SPECS, "available_bytes": 1 << 20}
    return make_cache(layers=2, heads=2, **(arguments | more))


def layers(length: int, heads: int, count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(length, heads, 8) for _ in range(count)]


def check(session, name: str, keys, values, branch: int = 0) -> None:
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        read = session.cross_attention(name, layer, branch=branch)
        for got, expected in zip(read, pair, strict=True):
            assert torch.equal(got, expected)


def test_sessions_and_branches_have_their_own():
    cache = named(local_branches=2)
    sessions = [cache.open_session(name) for name in ("a", "b")]
    written = {}
    for session in sessions:
        for branch in (0, 1):
            for name, heads in (("text", 2), ("image", 1)):
                pair = layers(3, heads), layers(3, heads)
                session.fill_cross_attention(name, *pair, branch=branch)
                written[session, name, branch] = pair
    for (session, name, branch), pair in written.items():
        check(session, name, *pair, branch)


def test_a_shorter_prompt_keeps_the_address():
    session = named().open_session("a")
    session.fill_cross_attention("text", layers(5, 2), layers(5, 2))
    address = session.cross_attention("text", 1)[0].data_ptr()
    pair = layers(2, 2), layers(2, 2)
    session.fill_cross_attention("text", *pair)
    check(session, "text", *pair)
    assert session.cross_attention("text", 1)[0].data_ptr() == address


def test_a_fork_shares_until_one_of_them_fills():
    cache = named()
    a = cache.open_session("a")
    old, new = ((layers(4, 2), layers(4, 2)) for _ in range(2))
    a.fill_cross_attention("text", *old)
    b, c = a.fork("b"), a.fork("c")
    assert b.cross_attention("text", 0)[0].data_ptr() == a.cross_attention("text", 0)[0].data_ptr()
    a.fill_cross_attention("text", *new)
    check(a, "text", *new)
    check(b, "text", *old)
    c.switch_prompt("keep")
    with pytest.raises(LifecycleError, match="'text' of branch 0 must be filled"):
        c.cross_attention("text", 0)
    check(b, "text", *old)
    address = b.cross_attention("text", 0)[0].data_ptr()
    a.close()
    c.close()
    b.fill_cross_attention("text", *new)  # alone with it now
    assert b.cross_attention("text", 0)[0].data_ptr() == address


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("audio", layers(3, 2), layers(3, 2)), ValueError, "`name` must be one of .'image', 'te"),
        (("text", layers(3, 2, 1), layers(3, 2)), ValueError, "`keys` must have one .* 2 layers"),
        (("text", layers(3, 2), layers(3, 2, 3)), ValueError, "`values` must have .*, got 3"),
        (("text", layers(6, 2), layers(6, 2)), ValueError, "`keys` must have 1 to 5 rows, got 6"),
        (("text", layers(0, 2), layers(0, 2)), ValueError, "`keys` must have 1 to 5 rows, got 0"),
        (("text", layers(3, 1), layers(3, 1)), ValueError, r"`keys` must have shape \(3, 2, 8\)"),
        (
            ("text", layers(3, 2), layers(4, 2)),
            ValueError,
            r"`values` must have .* got \(4, 2, 8\)",
        ),
        (
            ("text", [layers(3, 2)[0], layers(2, 2)[0]], layers(3, 2)),
            ValueError,
            r"`keys` must have shape \(3, 2, 8\) .* got \(2, 2, 8\)",
        ),
        (("text", layers(3, 2), [None, None]), TypeError, "`values` must be a torch.Tensor, got N"),
    ],
)
def test_all_layers_or_none(arguments, error, message):
    session = named().open_session("a")
    with pytest.raises(error, match=message):
        session.fill_cross_attention(*arguments)
    with pytest.raises(LifecycleError, match="must be filled before it is read"):
        session.cross_attention("text", 0)
    pair = layers(5, 2), layers(5, 2)
    session.fill_cross_attention("text", *pair)
    with pytest.raises(error, match=message):
        session.fill_cross_attention(*arguments)
    check(session, "text", *pair)


@pytest.mark.parametrize("keep", [None, True, False])
def test_reset_keeps_the_prompt_or_does_not(keep):
    cache = named(cross_attn_length=5)
    session = cache.open_session("a")
    pair = layers(5, 2), layers(5, 2)
    session.fill_cross_attention("text", *pair)
    cache.write_cross_kv(0, False, rows(5), rows(5))
    session.reset(**({} if keep is None else {"keep_cross_attention": keep}))
    if keep is False:
        with pytest.raises(LifecycleError, match="'text' of branch 0 must be filled"):
            session.cross_attention("text", 0)
        with pytest.raises(LifecycleError, match="layer 0, branch 0 must be written"):
            cache.read_cross_kv(0, False)
    else:
        check(session, "text", *pair)
        cache.read_cross_kv(0, False)


@pytest.mark.parametrize("history", ["keep", "recache", "reset"])
def test_a_new_prompt_forgets_the_old_one(history):
    """The static pools too, unless they are another session's as well."""
    cache = named(cross_attn_length=5)
    a, b = cache.open_session("a"), cache.open_session("b")
    a.fill_cross_attention("text", layers(5, 2), layers(5, 2))
    b.fill_cross_attention("text", layers(5, 2), layers(5, 2))
    cache.write_cross_kv(0, False, rows(5), rows(5))
    a.switch_prompt(history)
    with pytest.raises(LifecycleError, match="'text' of branch 0 must be filled"):
        a.cross_attention("text", 0)
    b.cross_attention("text", 0)
    cache.read_cross_kv(0, False)
    b.close()
    a.switch_prompt(history)
    with pytest.raises(LifecycleError, match="layer 0, branch 0 must be written"):
        cache.read_cross_kv(0, False)


def test_named_ones_come_off_the_memory_for_every_session():
    one = 2 * 2 * 2 * (5 * 2 + 3 * 1) * 8 * 4  # K and V, branches, layers, rows, elements, bytes
    page = page_bytes(4, layers=2, heads=2)
    cache = named(local_branches=2, available_bytes=3 * one + 20 * page)
    assert cache.num_blocks == 20
    for name in "abc":
        session = cache.open_session(name)
        for branch in (0, 1):
            session.fill_cross_attention("text", layers(5, 2), layers(5, 2), branch=branch)
    with pytest.raises(ValueError, match=f"got {5 * page} bytes after cross-attention"):
        named(local_branches=2, available_bytes=3 * one + 5 * page)


def test_named_ones_of_a_closed_session_and_of_books_without_tensors():
    session = named(device=None).open_session("a")
    with pytest.raises(LifecycleError, match="built without tensors"):
        session.fill_cross_attention("text", layers(5, 2), layers(5, 2))
    session.close()
    for call in (
        lambda: session.fill_cross_attention("text", layers(5, 2), layers(5, 2)),
        lambda: session.cross_attention("text", 0),
    ):
        with pytest.raises(LifecycleError, match="session 'a' is closed"):
            call()
    live = named().open_session("a")
    with pytest.raises(ValueError, match="`layer` must be from 0 to 1, got 2"):
        live.cross_attention("text", 2)
    for fields in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            CrossAttentionSpec(*fields)
