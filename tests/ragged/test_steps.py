"""Steps against feeding the model itself, and against what a CUDA graph cannot hold: a wait for the device."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids, left_padded
from capture.tiny_models import WINDOW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contourkv import held_bytes
from contourkv.errors import InvalidInput
from contourkv.ragged import RaggedCache, Steps, attention


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name) for name in ARCHITECTURES}


@torch.no_grad()
def compressed(model: transformers.PreTrainedModel, tokens: int = 40, copies: int = 1) -> RaggedCache:
    """A cache that read a context and kept a random half of it."""
    cache = RaggedCache(model.config)
    model(ids(tokens).repeat(copies, 1), past_key_values=cache)
    generator = torch.Generator().manual_seed(2)
    for index, layer in enumerate(cache.layers):
        keep = torch.rand(*layer.begin.shape, layer.length, generator=generator) < 0.5
        cache.evict(index, keep)
    cache.mark()
    return cache


def assert_same(ours: RaggedCache, theirs: RaggedCache) -> None:
    """Both hold the same keys and values of the same positions."""
    assert ours.get_seq_length() == theirs.get_seq_length()
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        last = min(other.window or other.length, other.length)  # of what lies behind its window a layer holds any part
        for a, b in zip(one.rectangle(), other.rectangle(), strict=True):
            if a.dim() == 1:
                visible = [p > other.length - last for p in (a, b)]
                assert torch.equal(a[visible[0]], b[visible[1]])
            else:
                a, b = a[:, :, visible[0]], b[:, :, visible[1]]
                assert torch.equal(a, b) if a.dtype == torch.bool else (a - b).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_step_is_a_forward_pass(models, architecture: str, tokens: int) -> None:
    model = models[architecture]
    ours, theirs = compressed(model), compressed(model)
    fed = ids(tokens * 5, seed=8).view(5, 1, tokens)
    with Steps(model, ours, room=tokens * 5, tokens=tokens) as step:
        for piece in fed:
            expected = model(piece, past_key_values=theirs).logits
            assert (step(piece) - expected).abs().max() <= TOLERANCE
            assert ours.get_seq_length() == theirs.get_seq_length()
    assert_same(ours, theirs)
    after = [model(ids(2, seed=9), past_key_values=cache).logits for cache in (ours, theirs)]
    assert (after[0] - after[1]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_far_beyond_a_window_and_in_several_goes(models) -> None:
    model = models["gemma3_text"]
    ours, theirs = compressed(model), compressed(model)
    model(ids(2), past_key_values=ours), model(ids(2), past_key_values=theirs)  # a tail is there already
    for seed in (1, 2):
        with Steps(model, ours, room=4 * WINDOW) as step:
            for token in ids(4 * WINDOW, seed).T:
                expected = model(token[None], past_key_values=theirs).logits
                assert (step(token[None]) - expected).abs().max() <= TOLERANCE
    assert_same(ours, theirs)


@torch.no_grad()
def test_a_padded_batch_goes_on_from_its_own_positions(models) -> None:
    model = models["llama"]
    batch, mask = left_padded([ids(30), ids(21, 1)])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for steps in (True, False):
        cache = RaggedCache(model.config)
        model(batch, attention_mask=mask, position_ids=places, past_key_values=cache)
        new, at = torch.tensor([[5], [6]]), mask.sum(1, keepdim=True)
        if steps:
            with Steps(model, cache, room=2, position_ids=at) as step:
                logits.append(torch.cat([step(new).clone(), step(new).clone()], 1))
        else:
            masks = [torch.nn.functional.pad(mask, (0, n), value=1) for n in (1, 2)]
            logits.append(
                torch.cat(
                    [
                        model(new, attention_mask=m, position_ids=at + n, past_key_values=cache).logits
                        for n, m in enumerate(masks)
                    ],
                    1,
                )
            )
    assert (logits[0] - logits[1]).abs().max() <= TOLERANCE


def test_no_token_of_a_step_is_padding(models) -> None:
    """Also where an earlier turn was padded, so that the tail has a mask."""
    model = models["llama"]
    cache = compressed(model, copies=2)
    with torch.no_grad():
        mask = torch.ones(2, 43, dtype=torch.long)
        mask[1, 40:42] = 0
        model(ids(3).repeat(2, 1), attention_mask=mask, past_key_values=cache)
    with Steps(model, cache, room=2) as step:
        step(torch.tensor([[1], [2]]))
    assert cache.layers[0].tail_visible[:, :4].tolist() == [[True] * 4, [False, False, True, True]]


def test_what_changes_the_cache_is_refused_while_steps_are_open(models) -> None:
    model, cache = models["llama"], None
    cache = compressed(model)
    keep = torch.ones(1, 2, 40, dtype=torch.bool)
    with Steps(model, cache, room=4) as step:
        step(torch.tensor([[3]]))
        for change in (
            lambda: cache.evict(0, keep),
            cache.mark,
            cache.rollback,
            cache.reset,
            lambda: cache.layers[0].crop_to(3),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: Steps(model, cache, room=4),
            lambda: model(torch.tensor([[3]]), past_key_values=cache),
        ):
            with pytest.raises(InvalidInput, match="close it first"):
                change()
        twin = cache.copy()
        twin.rollback()
        assert cache.get_seq_length() == 41 and twin.get_seq_length() == 40
        assert held_bytes(cache).total > held_bytes(twin).total
    cache.rollback()
    assert cache.get_seq_length() == 40


def test_a_step_that_fails_leaves_the_cache_as_it_was(models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = models["llama"], compressed(models["llama"])
    last = model.model.layers[-1].mlp
    with Steps(model, cache, room=4) as step:
        before = step(torch.tensor([[3]])).clone()
        with monkeypatch.context() as patch:
            patch.setattr(last, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(torch.tensor([[4]]))
        with pytest.raises(InvalidInput, match="closed"):
            step(torch.tensor([[4]]))
    assert cache.get_seq_length() == 41
    cache.rollback()
    with Steps(model, cache, room=1) as step:
        assert torch.equal(step(torch.tensor([[3]])), before)


def test_bad_arguments(models) -> None:
    model = models["llama"]
    cache = compressed(model)
    for message, make in (
        ("RaggedCache", lambda: Steps(model, transformers.DynamicCache(config=model.config), room=2)),
        ("has read a context", lambda: Steps(model, RaggedCache(model.config), room=2)),
        ("room", lambda: Steps(model, cache, room=1, tokens=2)),
        ("room", lambda: Steps(model, cache, room=0)),
        ("position_ids", lambda: Steps(model, cache, room=2, position_ids=torch.zeros(2, 1, dtype=torch.long))),
        ("position_ids", lambda: Steps(model, cache, room=2, position_ids=torch.zeros(1, 1))),
        ("position_ids", lambda: Steps(model, cache, room=2, position_ids=[0])),
        ("position_ids", lambda: Steps(model, cache, room=2, position_ids=torch.tensor([[-1]]))),
        ("room: no memory", lambda: Steps(model, cache, room=10**12)),
        ("model: ", lambda: Steps("llama", cache, room=2)),
        ("one device", lambda: Steps(torch.nn.Linear(1, 1, device="meta").eval(), cache, room=2)),
        ("eval", lambda: Steps(torch.nn.Linear(1, 1), cache, room=2)),
    ):
        with pytest.raises(InvalidInput, match=message):
            make()
    with Steps(model, cache, room=2) as step:
        for message, fed in (
            ("ids", ids(2)),
            ("ids", torch.zeros(1, 1)),
            ("ids", ids(1).repeat(2, 1)),
            ("ids", 3),
            ("ids", torch.tensor([[10**6]])),
        ):
            with pytest.raises(InvalidInput, match=message):
                step(fed)
        step(ids(1)), step(ids(1))
        with pytest.raises(InvalidInput, match="room"):
            step(ids(1))


def test_a_cache_that_is_watched_is_refused(models) -> None:
    """As after a pass under a press that was interrupted."""
    model = models["llama"]
    cache = compressed(model)
    cache.layers[1].watcher = object()
    with pytest.raises(InvalidInput, match="press"):
        Steps(model, cache, room=2)
    assert all(layer.clock is None for layer in cache.layers)


# ---------------------------------------------------------------------- nothing waits


class NoWaiting(TorchDispatchMode):
    """Raises where numbers go from the device to the host; a meta tensor itself has none that could be read."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {a.device.type for a in tree_leaves((args, result)) if isinstance(a, torch.Tensor) and a.dim()}
        if {"cpu", "meta"} <= devices:
            raise AssertionError(f"{func} goes between the host and the device in a step")
        return result


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device "meta" in the place of a GPU: shapes without numbers; the kernel gives its output's shape."""
    calls: list[int] = []

    def shaped(query: torch.Tensor, held: attention.Contents, *args: object) -> torch.Tensor:
        assert held.begin.device == held.end.device == query.device
        assert isinstance(held.tail_length, torch.Tensor)
        calls.append(query.shape[2])
        return query.new_empty(*query.shape[:3], held.values.shape[1])

    way = types.SimpleNamespace(fits=lambda query, held: True, attend=shaped)
    monkeypatch.setattr(attention, "triton_way", lambda: way)
    for place in ("contourkv.ragged.attention", "contourkv.ragged.layer"):
        monkeypatch.setattr(f"{place}.takes_triton", lambda device: device.type == "meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know the device
    return calls


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_nothing_waits_for_the_device(taken: list[int], architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(architecture).to("meta", torch.bfloat16)  # of experts in float32 meta knows nothing
    cache = RaggedCache(model.config)
    with monkeypatch.context() as patch:  # reading a context may look at its mask
        patch.setattr("contourkv.ragged.layer._visible", lambda *_, **__: None)
        model(torch.zeros(1, WINDOW - 4, dtype=torch.long, device="meta"), past_key_values=cache)
    step = Steps(model, cache, room=2)
    for layer in cache.layers:
        layer._runs()  # what a first step copies once
    with NoWaiting():
        logits = step._forward()
    assert logits.shape[:2] == (1, 1) and taken == [1] * len(cache.layers)


def test_a_wait_is_seen() -> None:
    """The test above can fail."""
    number = torch.zeros(1, device="meta")
    with NoWaiting():
        with pytest.raises(RuntimeError, match="item"):
            int(number)
        with pytest.raises(NotImplementedError, match="meta"):
            number.cpu()
        with pytest.raises(Exception, match="nonzero"):
            (number > 0).nonzero()
        with pytest.raises(AssertionError, match="between"):
            torch.zeros(3).to("meta")
