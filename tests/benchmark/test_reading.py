"""A reading against the model itself: what its modules saw, its own weights, its own cache, and reading it at once."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids
from capture.tiny_models import WINDOW, WINDOWS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv import ContourKVPress, RaggedCache, held_bytes
from contourkv.benchmark.reading import LayerReading, Reading
from contourkv.errors import InvalidInput
from contourkv.press.scores import attention_modules

CONTEXT = 60  # longer than the window of the sliding layers
FIELDS = ("hidden", "query", "keys", "values")


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def readings(models) -> dict[str, Reading]:
    return {name: Reading.of(model, ids(CONTEXT)) for name, model in models.items()}


def state_of(model: torch.nn.Module) -> list[tuple]:
    """Everything that hangs on the modules of a model."""
    return [
        (name, sorted(set(vars(module)) - {"masked_key_indices"}), sorted(module._modules))
        + (len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


def parts(layer: LayerReading) -> dict[str, torch.Tensor]:
    """All tensors of a layer's reading, and what ContourKV sees of it."""
    seen = layer.seen(16)
    found = {name: getattr(layer, name) for name in FIELDS}
    found |= {name: getattr(seen, name) for name in ("scores", "mean", "peak", "distances", "positions")}
    return found | dict(zip(("cos", "sin"), layer.embeddings, strict=True))


def assert_same(one: Reading, other: Reading, tolerance: float) -> None:
    assert torch.equal(one.ids, other.ids) and one.tokens == other.tokens
    assert len(one.layers) == len(other.layers)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert mine.module is theirs.module
        assert {name: how for name, how in mine.how.items() if name != "sinks"} == {
            name: how for name, how in theirs.how.items() if name != "sinks"
        }
        for name, part in parts(theirs).items():
            torch.testing.assert_close(parts(mine)[name], part, atol=tolerance, rtol=tolerance, msg=name)


class TestExtended:
    @settings(max_examples=30)
    @given(
        architecture=st.sampled_from(ARCHITECTURES),
        context=st.integers(1, 70),
        question=st.integers(1, 40),
        seed=st.integers(0, 9),
    )
    def test_is_what_is_read_of_the_whole_at_once(self, models, architecture, context, question, seed):
        model, whole = models[architecture], ids(context + question, seed)
        extended = Reading.of(model, whole[:, :context]).extended(whole[:, context:])
        assert_same(extended, Reading.of(model, whole), TOLERANCE)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_can_be_extended_again(self, models, architecture):
        model, whole = models[architecture], ids(90)
        piecewise = Reading.of(model, whole[:, :40])
        for start, stop in ((40, 41), (41, 75), (75, 90)):
            piecewise = piecewise.extended(whole[:, start:stop])
        assert_same(piecewise, Reading.of(model, whole), TOLERANCE)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_leaves_the_context_as_it_was(self, models, architecture):
        model = models[architecture]
        reading, untouched = Reading.of(model, ids(CONTEXT)), Reading.of(model, ids(CONTEXT))
        first = reading.extended(ids(9, seed=5))
        assert_same(reading, untouched, 0)
        reading.extended(ids(30, seed=6))
        assert_same(reading.extended(ids(9, seed=5)), first, 0)


class TestAgainstTheModel:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, CONTEXT])
    def test_inputs_keys_and_values_are_those_of_its_forward_pass(self, models, architecture, tokens):
        model, seen, cache = models[architecture], {}, DynamicCache()
        hooks = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: seen.update({module.layer_idx: kwargs}), with_kwargs=True
            )
            for module in attention_modules(model)
        ]
        with torch.no_grad():
            model(ids(tokens), past_key_values=cache)
        for hook in hooks:
            hook.remove()
        reading = Reading.of(model, ids(tokens))
        assert len(reading.layers) == len(cache.layers)
        for index, layer in enumerate(reading.layers):
            assert layer.module is attention_modules(model)[index]
            torch.testing.assert_close(layer.hidden, seen[index]["hidden_states"], atol=1e-5, rtol=0)
            torch.testing.assert_close(layer.keys, cache.layers[index].keys, atol=1e-5, rtol=0)
            torch.testing.assert_close(layer.values, cache.layers[index].values, atol=1e-5, rtol=0)
            for mine, theirs in zip(layer.embeddings, seen[index]["position_embeddings"], strict=True):
                torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
            assert layer.given == {"position_embeddings": layer.embeddings}

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("tokens", [1, WINDOW, CONTEXT])
    def test_attentions_are_its_own_eager_weights(self, models, architecture, tokens):
        eager = copy.deepcopy(models[architecture])
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            own = eager(ids(tokens), output_attentions=True, use_cache=False).attentions
        for layer, weights in zip(Reading.of(models[architecture], ids(tokens)).layers, own, strict=True):
            torch.testing.assert_close(layer.attentions(), weights, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_attentions_of_an_extended_context_too(self, models, architecture):
        eager, whole = copy.deepcopy(models[architecture]), ids(CONTEXT + 12)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            own = eager(whole, output_attentions=True, use_cache=False).attentions
        extended = Reading.of(models[architecture], whole[:, :CONTEXT]).extended(whole[:, CONTEXT:])
        for layer, weights in zip(extended.layers, own, strict=True):
            torch.testing.assert_close(layer.attentions(), weights, atol=TOLERANCE, rtol=0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_queries_give_these_weights_with_the_keys(self, readings, architecture):
        """The softmax again, in plain operations; sinks and soft caps are left to the test above."""
        for layer in readings[architecture].layers:
            if layer.how["sinks"] is not None or layer.how["softcap"] is not None:
                continue
            group = layer.query.shape[1] // layer.keys.shape[1]
            scores = layer.query.double() @ layer.keys.double().repeat_interleave(group, dim=1).transpose(2, 3)
            row, key = torch.arange(CONTEXT)[:, None], torch.arange(CONTEXT)
            seen = key <= row if layer.window is None else (key <= row) & (key > row - layer.window)
            weights = torch.softmax((scores * layer.how["scaling"]).masked_fill(~seen, -torch.inf), dim=-1)
            torch.testing.assert_close(layer.attentions().double(), weights, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_window_and_first_position_are_what_a_ragged_cache_holds(self, models, readings, architecture):
        windows = WINDOWS.get(architecture, [None, None])
        cache = RaggedCache(models[architecture].config)
        with torch.no_grad():
            models[architecture](ids(CONTEXT), past_key_values=cache)
        for index, layer in enumerate(readings[architecture].layers):
            assert layer.window == windows[index]
            assert layer.first == int(cache.kept_positions(index, 0, 0)[0])

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("rows", [1, 16, 64])
    def test_contour_sees_what_its_press_observes(self, models, readings, architecture, rows):
        model = models[architecture]
        observed = ContourKVPress(0.5, rows=rows).observe(model, ids(CONTEXT), RaggedCache(model.config))
        for layer, theirs in zip(readings[architecture].layers, observed._layers, strict=True):
            seen = layer.seen(rows)
            for name in ("scores", "mean", "peak", "distances", "positions"):
                torch.testing.assert_close(getattr(seen, name), getattr(theirs, name), atol=1e-6, rtol=1e-5, msg=name)
            assert (seen.cost, seen.window, seen.present) == (theirs.cost, theirs.window, theirs.present)

    def test_given_scores_take_the_place_of_the_mass(self, readings):
        layer = readings["gemma3_text"].layers[0]
        scores = torch.arange(2.0 * CONTEXT).view(1, 2, CONTEXT)
        seen = layer.seen(8, scores)
        assert torch.equal(seen.scores, scores[:, :, CONTEXT - WINDOW + 1 :])
        assert torch.equal(seen.mean, layer.seen(8).mean)


class TestCaches:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, CONTEXT])
    def test_the_full_cache_is_transformers_own(self, models, architecture, tokens):
        model, question = models[architecture], ids(4, seed=9)
        own, cache = DynamicCache(config=model.config), Reading.of(model, ids(tokens)).full_cache()
        with torch.no_grad():
            model(ids(tokens), past_key_values=own)
        assert cache.get_seq_length() == own.get_seq_length() == tokens
        assert [type(layer) for layer in cache.layers] == [type(layer) for layer in own.layers]
        for mine, theirs in zip(cache.layers, own.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=0)
            torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=0)
        assert held_bytes(cache) == held_bytes(own)
        with torch.no_grad():
            for token in question[0]:
                logits = [model(token.view(1, 1), past_key_values=each).logits for each in (cache, own)]
                torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_what_a_full_cache_reads_later_is_not_the_contexts(self, models, architecture):
        model = models[architecture]
        reading, before = Reading.of(model, ids(CONTEXT)), Reading.of(model, ids(CONTEXT))
        cache = reading.full_cache()
        with torch.no_grad():
            model(ids(5, seed=9), past_key_values=cache)
        for layer in cache.layers:
            layer.keys.zero_()
        assert_same(reading, before, 0)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_the_plain_cache_shows_every_key_and_copies_none(self, readings, architecture):
        reading = readings[architecture]
        cache = reading.plain_cache()
        assert cache.get_seq_length() == CONTEXT
        for mine, layer in zip(cache.layers, reading.layers, strict=True):
            assert mine.keys.data_ptr() == layer.keys.data_ptr() and torch.equal(mine.keys, layer.keys)
            assert mine.values.data_ptr() == layer.values.data_ptr() and torch.equal(mine.values, layer.values)


class TestTheModelAfterwards:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_nothing_is_left_on_it(self, models, architecture):
        model = models[architecture]
        before = state_of(model)
        reading = Reading.of(model, ids(CONTEXT))
        extended = reading.extended(ids(5))
        assert state_of(model) == before
        assert all(layer.watcher is None for each in (reading, extended) for layer in each._cache.layers)

    def test_nor_after_a_pass_that_failed(self, models):
        model, outside = models["llama"], torch.tensor([[5, 10**6]])
        before, reading = state_of(model), Reading.of(model, ids(20))
        with pytest.raises(IndexError):
            Reading.of(model, outside)
        with pytest.raises(IndexError):
            reading.extended(outside)
        assert state_of(model) == before
        assert_same(reading.extended(ids(7)), Reading.of(model, torch.cat([ids(20), ids(7)], dim=1)), TOLERANCE)

    def test_no_gradient_is_recorded(self, models):
        reading = Reading.of(models["llama"], ids(20))
        for layer in reading.extended(ids(4)).layers:
            assert not any(part.requires_grad for part in parts(layer).values())


@pytest.mark.parametrize("wrong", [torch.zeros(1, 0), torch.zeros(2, 5), torch.zeros(5)], ids=["empty", "two", "flat"])
def test_anything_but_one_context_is_refused(models, wrong):
    with pytest.raises(InvalidInput, match=r"^ids: expected one context of at least one token, \(1, N\), got"):
        Reading.of(models["llama"], wrong.long())
