"""ContourKVPress: what it keeps, against definitions in float64; what it leaves behind; what it refuses."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids, left_padded
from capture.tiny_models import WINDOW, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from contourkv import ContourKVPress, RaggedCache, held_bytes
from contourkv.allocator import AdaKV, Contour, Global, Problem, Pyramid, Uniform, allocate
from contourkv.errors import InvalidInput
from contourkv.models import load_model
from contourkv.models.random_source import make_model
from contourkv.press.contour import POSITION_BYTES, TABLE_BYTES
from contourkv.press.observation import value_distances, window_masses


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name) for name in ARCHITECTURES}


def compressed(model: transformers.PreTrainedModel, tokens: torch.Tensor, press: ContourKVPress, **kwargs: object):
    cache = RaggedCache(model.config)
    with press(model) as done:
        model(tokens, past_key_values=cache, **kwargs)
    return cache, done


@torch.no_grad()
def answered(model: transformers.PreTrainedModel, cache: RaggedCache, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, past_key_values=cache).logits
    cache.rollback()
    return logits


def full_entries(cache: RaggedCache, tokens: int) -> int:
    return sum(
        layer.begin.numel() * (tokens if layer.window is None else min(tokens, layer.window - 1))
        for layer in cache.layers
    )


class TestObservation:
    """What the press sees, by plain loops in float64."""

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_case_18_masses_are_means_of_causal_rows(self, data):
        """No row sees a later key."""
        sequences, kv_heads, group = (data.draw(st.integers(1, 2)) for _ in range(3))
        tokens, dim, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 14))
        window = data.draw(st.none() | st.integers(1, 12))
        softcap = data.draw(st.none() | st.floats(0.5, 5))
        pads = [data.draw(st.integers(0, tokens - 1)) for _ in range(sequences)]
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        query = torch.randn(sequences, kv_heads * group, tokens, dim, generator=generator, dtype=torch.float64)
        key = torch.randn(sequences, kv_heads, tokens, dim, generator=generator, dtype=torch.float64)
        sinks = torch.randn(kv_heads * group, generator=generator) if data.draw(st.booleans()) else None
        visible = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        found = window_masses(
            query,
            key,
            rows=rows,
            scaling=0.7,
            window=window,
            softcap=softcap,
            sinks=sinks,
            visible=visible if any(pads) else None,
            held=visible[:, None] if any(pads) else None,
        )
        for b in range(sequences):
            real = list(range(pads[b], tokens))
            for h in range(kv_heads):
                wanted, highest = torch.zeros(2, tokens, dtype=torch.float64)
                observed = real[-rows:]
                for head in range(h * group, (h + 1) * group):
                    for row in observed:
                        seen = [j for j in real if j <= row and (window is None or j > row - window)]
                        scores = torch.stack([query[b, head, row] @ key[b, h, j] * 0.7 for j in seen])
                        if softcap is not None:
                            scores = softcap * torch.tanh(scores / softcap)
                        if sinks is not None:
                            scores = torch.cat([scores, sinks[head].double()[None]])
                        weights = torch.softmax(scores, 0)[: len(seen)]
                        wanted[seen] += weights / (group * len(observed))
                        highest[seen] = torch.maximum(highest[seen], weights)
                assert torch.allclose(found.mean[b, h], wanted, atol=1e-12)
                assert torch.allclose(found.peak[b, h], highest, atol=1e-12)

    def test_distances_are_from_the_mean_output(self):
        generator = torch.Generator().manual_seed(0)
        masses = torch.rand(2, 3, 7, generator=generator, dtype=torch.float64)
        value = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64)
        found = value_distances(masses, value)
        for b in range(2):
            for h in range(3):
                mean = sum(masses[b, h, j] * value[b, h, j] for j in range(7)) / masses[b, h].sum()
                assert torch.allclose(found[b, h], (value[b, h] - mean).norm(dim=-1))


class TestKept:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_is_what_the_allocator_says_of_the_captured_rows(self, models, architecture):
        """Every layer's masses again from queries and keys that plain hooks took, then the allocator on its own."""
        model, tokens = models[architecture], ids(90)
        seen = {}
        former = dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.items())
        own = former[model.config._attn_implementation]

        def noting(module, query, key, value, mask, *args, **kwargs):
            seen[module.layer_idx] = (query, key, value, kwargs)
            return own(module, query, key, value, mask, *args, **kwargs)

        transformers.AttentionInterface.register("noting", noting)
        transformers.AttentionMaskInterface.register(
            "noting", transformers.AttentionMaskInterface()[model.config._attn_implementation]
        )
        plain = copy.deepcopy(model)
        plain.config._attn_implementation = "noting"
        with torch.no_grad():
            plain(tokens, use_cache=False)
        cache, done = compressed(model, tokens, ContourKVPress(0.3, rows=16, recent=8))
        worths, firsts = [], []
        for index, layer in enumerate(cache.layers):
            query, key, value, kwargs = seen[index]
            masses = window_masses(
                query,
                key,
                rows=16,
                scaling=kwargs["scaling"],
                window=layer.window,
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
            )
            first = 0 if layer.window is None else 90 - layer.window + 1
            firsts.append(first)
            worths.append((masses.peak * value_distances(masses.mean, value), masses.mean, first))
        problem = Problem(
            scores=tuple(masses[0, :, first:] for _, masses, first in worths),
            masses=tuple(worth[0, :, first:] for worth, _, first in worths),
            costs=tuple(2 * key.shape[-1] * 4 + POSITION_BYTES for _, key, _, _ in seen.values()),
            budget=done.allocations[0][0].budget,
            recent=8,
        )
        wanted = allocate(problem)
        for index, layer in enumerate(cache.layers):
            for head in range(layer.begin.shape[1]):
                positions = wanted.keep[index][head].nonzero().squeeze(1) + firsts[index]
                assert torch.equal(cache.kept_positions(index, 0, head), positions)

    @settings(max_examples=25, deadline=None)
    @given(share=st.floats(0.02, 1), tokens=st.integers(1, 80), sinks=st.integers(0, 6), recent=st.integers(0, 40))
    def test_case_14_the_budget_is_what_is_held(self, models, share, tokens, sinks, recent):
        """And case 1: at least one entry a head."""
        model = models["gemma3_text"]
        cache, done = compressed(model, ids(tokens), ContourKVPress(share, sinks=sinks, recent=recent))
        held = sum(int(entries.sum()) for entries in cache.entries())
        heads = sum(entries.numel() for entries in cache.entries())
        wanted = max(int(share * full_entries(cache, tokens) + 1e-9), heads)
        assert held == wanted
        assert min(int(entries.min()) for entries in cache.entries()) >= 1
        cost = 2 * 16 * 4 + POSITION_BYTES
        assert held_bytes(cache).total == held * cost + heads * TABLE_BYTES
        assert held_bytes(cache).slack == 0
        assert done.allocations[0][0].bytes == held * cost

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
    def test_by_span_sliding_layers_get_their_share_and_no_more(self, models, share):
        model = models["gemma3_text"]
        cache, done = compressed(model, ids(80), ContourKVPress(share, split="contour_by_span", recent=4))
        of_span: dict[int | None, list[int]] = {}
        for layer, entries in zip(cache.layers, cache.entries(), strict=True):
            available = 80 if layer.window is None else layer.window - 1
            held = of_span.setdefault(layer.window, [0, 0])
            held[0], held[1] = held[0] + int(entries.sum()), held[1] + entries.numel() * available
        assert len(of_span) == 2
        for held, available in of_span.values():
            assert abs(held - share * available) <= 2
        assert done.allocations[0][0].bytes <= done.allocations[0][0].budget

    def test_by_span_is_the_contour_where_every_layer_sees_all(self, models):
        one, other = (
            compressed(models["llama"], ids(60), ContourKVPress(0.3, split=split))[0]
            for split in ("contour", "contour_by_span")
        )
        for layer in range(2):
            for head in range(2):
                assert torch.equal(one.kept_positions(layer, 0, head), other.kept_positions(layer, 0, head))

    @settings(max_examples=15, deadline=None)
    @given(one=st.floats(0.05, 1), other=st.floats(0.05, 1), weight=st.sampled_from(["plain", "spread", "distance"]))
    def test_a_larger_budget_never_drops_what_a_smaller_one_kept(self, models, one, other, weight):
        model = models["qwen3"]
        small, large = (
            compressed(model, ids(60), ContourKVPress(share, weight=weight, recent=6))[0]
            for share in sorted([one, other])
        )
        for layer in range(2):
            for head in range(2):
                kept = set(small.kept_positions(layer, 0, head).tolist())
                assert kept <= set(large.kept_positions(layer, 0, head).tolist())

    def test_case_3_first_and_last_keys_stay_by_rule(self, models):
        """Scores that call them the worst do not evict them."""

        def against(module, hidden_states, keys, values, attentions, kwargs):
            scores = torch.rand(keys.shape[:3], generator=torch.Generator().manual_seed(module.layer_idx))
            scores[..., :4] = scores[..., -8:] = -5
            return scores

        cache, _ = compressed(models["llama"], ids(100), ContourKVPress(0.25, scores=against, sinks=4, recent=8))
        for layer in range(2):
            for head in range(2):
                kept = set(cache.kept_positions(layer, 0, head).tolist())
                assert {0, 1, 2, 3, *range(92, 100)} <= kept

    def test_case_3_all_scores_equal(self, models):
        flat = lambda module, hidden_states, keys, *rest: torch.ones(keys.shape[:3])  # noqa: E731
        once, _ = compressed(models["llama"], ids(100), ContourKVPress(0.25, scores=flat))
        again, _ = compressed(models["llama"], ids(100), ContourKVPress(0.25, scores=flat))
        for one, other in zip(once.layers, again.layers, strict=True):
            assert torch.equal(one.positions, other.positions)
        assert sum(int(entries.sum()) for entries in once.entries()) == 100

    @pytest.mark.parametrize("split", [Uniform(), AdaKV(), Pyramid(), Global(), Contour()], ids=repr)
    def test_case_4_every_split_is_held_and_answers(self, models, split):
        model = models["qwen3"]
        cache, _ = compressed(model, ids(120), ContourKVPress(0.3, split=split, recent=8))
        assert sum(int(entries.sum()) for entries in cache.entries()) <= 0.3 * full_entries(cache, 120)
        assert torch.isfinite(answered(model, cache, ids(9))).all()
        named, _ = compressed(model, ids(120), ContourKVPress(0.3, split=type(split).__name__.lower(), recent=8))
        assert torch.equal(named.layers[0].positions, cache.layers[0].positions)
        if isinstance(split, Uniform):
            assert max(int(e.max()) for e in cache.entries()) - min(int(e.min()) for e in cache.entries()) <= 1

    def test_case_2_float16_neither_overflows_nor_invents_keys(self):
        model = build("llama", torch.float16)
        cache, _ = compressed(model, ids(100), ContourKVPress(0.2))
        assert torch.isfinite(answered(model, cache, ids(20))).all()
        assert cache.layers[0].frozen_keys.dtype == torch.float16

    def test_case_8_bytes_entries_and_ratio(self, models):
        model, cost = models["llama"], 2 * 8 * 4 + POSITION_BYTES
        for budget, entries in (
            ({"budget": 0.25}, 100),
            ({"compression_ratio": 0.75}, 100),
            ({"entries": 123}, 123),
            ({"budget": 123 * cost + 4 * TABLE_BYTES}, 123),
            ({"budget": f"{123 * cost + 4 * TABLE_BYTES} B"}, 123),
            ({"budget": "1MiB"}, 400),
        ):
            cache, _ = compressed(model, ids(100), ContourKVPress(**budget))
            assert sum(int(held.sum()) for held in cache.entries()) == entries, budget
        assert ContourKVPress(compression_ratio=0.75).compression_ratio == 0.75
        assert ContourKVPress("64MiB").compression_ratio is None

    def test_case_8_a_byte_budget_bounds_everything_that_is_owned(self, models):
        cache, _ = compressed(models["gemma3_text"], ids(100), ContourKVPress("10kB"))
        assert 10_000 - 140 < held_bytes(cache).total <= 10_000

    def test_case_13_a_sliding_layer_keeps_keys_of_its_window_only(self, models):
        cache, _ = compressed(models["gemma3_text"], ids(100), ContourKVPress(0.9))
        sliding = next(index for index, layer in enumerate(cache.layers) if layer.window)
        for head in range(2):
            kept = cache.kept_positions(sliding, 0, head)
            assert len(kept) <= WINDOW - 1 and int(kept.min()) > 100 - WINDOW

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_budget_of_everything_changes_nothing(self, models, architecture):
        model, tokens = models[architecture], ids(70)
        cache, _ = compressed(model, tokens[:, :60], ContourKVPress(1.0))
        whole = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :60], past_key_values=whole)
            wanted = model(tokens[:, 60:], past_key_values=whole).logits
        assert (answered(model, cache, tokens[:, 60:]) - wanted).abs().max() <= TOLERANCE


class TestContexts:
    @pytest.mark.parametrize("tokens", [1, 2, 3])
    def test_cases_1_and_9_the_shortest_contexts(self, models, tokens):
        for architecture in ("llama", "gemma3_text"):
            cache, _ = compressed(models[architecture], ids(tokens), ContourKVPress(0.1))
            assert [entries.tolist() for entries in cache.entries()] == [[[1, 1]], [[1, 1]]]
            assert torch.isfinite(answered(models[architecture], cache, ids(4))).all()

    def test_case_9_an_empty_context(self, models):
        with pytest.raises(InvalidInput, match="context is empty"), ContourKVPress(0.5)(models["llama"]):
            models["llama"](torch.zeros(1, 0, dtype=torch.long), past_key_values=RaggedCache(models["llama"].config))

    def test_case_7_longer_than_the_window_of_the_model(self):
        model = build("llama", max_position_embeddings=64)
        with pytest.raises(InvalidInput, match="65 tokens, the window of llama holds 64"):
            compressed(model, ids(65), ContourKVPress(0.5))

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
    def test_case_7_chunks_are_compressed_as_they_come(self, models, architecture):
        """The budget holds after each chunk; a chunk that holds everything is the press on its own."""
        model, press = models[architecture], ContourKVPress(0.25, recent=8)
        cache = RaggedCache(model.config)
        done = press.prefill(model, ids(200), cache, chunk_size=64)
        assert len(done.allocations) == 4
        for step, (allocation,) in enumerate(done.allocations):
            read = min(64 * (step + 1), 200)
            assert allocation.bytes <= 0.25 * full_entries(cache, read) * (
                allocation.bytes / sum(int(entries.sum()) for entries in allocation.entries)
            )
        assert sum(int(entries.sum()) for entries in cache.entries()) == int(0.25 * full_entries(cache, 200))
        assert cache.get_seq_length() == 200
        assert torch.isfinite(answered(model, cache, ids(9))).all()
        one = RaggedCache(model.config)
        press.prefill(model, ids(200), one, chunk_size=500)
        alone, _ = compressed(model, ids(200), press)
        for ours, theirs in zip(one.layers, alone.layers, strict=True):
            assert torch.equal(ours.positions, theirs.positions)
            assert torch.equal(ours.frozen_keys, theirs.frozen_keys)

    def test_chunks_that_drop_nothing_are_the_full_context(self, models):
        for architecture in ("llama", "gemma3_text"):
            model, cache, tokens = models[architecture], RaggedCache(models[architecture].config), ids(100)
            ContourKVPress(1.0).prefill(model, tokens[:, :90], cache, chunk_size=31)
            whole = DynamicCache(config=model.config)
            with torch.no_grad():
                model(tokens[:, :90], past_key_values=whole)
                wanted = model(tokens[:, 90:], past_key_values=whole).logits
            assert (answered(model, cache, tokens[:, 90:]) - wanted).abs().max() <= TOLERANCE

    def test_case_10_each_sequence_gets_what_it_gets_alone(self):
        """In float64, where summation order cannot move a level."""
        for architecture in ("llama", "gemma3_text"):
            model = build(architecture, torch.float64)
            texts = [ids(length, seed=length) for length in (80, 57, 71)]
            batch, mask = left_padded(texts)
            press = ContourKVPress(0.3, recent=8)
            together, done = compressed(model, batch, press, attention_mask=mask)
            chunked = RaggedCache(model.config)
            press.prefill(model, batch, chunked, chunk_size=100, attention_mask=mask)
            assert len(done.allocations[0]) == 3  # case 17: every sequence has its record
            for row, text in enumerate(texts):
                alone, single = compressed(model, text, press)
                assert done.allocations[0][row].bytes == single.allocations[0][0].bytes
                shift = 80 - text.shape[1]
                for layer in range(2):
                    for head in range(2):
                        kept = alone.kept_positions(layer, 0, head) + shift
                        assert torch.equal(together.kept_positions(layer, row, head), kept)
                        assert torch.equal(chunked.kept_positions(layer, row, head), kept)

    def test_case_10_answers_over_a_padded_batch_are_those_alone(self, models):
        """The press gives the positions that `generate` continues from, and chunks may be all padding for some."""
        for architecture in ("llama", "gemma3_text"):
            model = models[architecture]
            contexts, questions = [ids(80, 1), ids(31, 2)], torch.cat([ids(5, 3), ids(5, 4)])
            batch, mask = left_padded(contexts)
            asked = torch.cat([batch, questions], dim=1)
            full_mask = torch.cat([mask, torch.ones_like(questions)], dim=1)
            given = {"max_new_tokens": 10, "do_sample": False}
            for chunk in (None, 20):
                cache = RaggedCache(model.config)
                if chunk is None:
                    with ContourKVPress(1.0)(model):
                        model(batch, attention_mask=mask, past_key_values=cache)
                else:
                    ContourKVPress(1.0).prefill(model, batch, cache, chunk_size=chunk, attention_mask=mask)
                found = model.generate(asked, attention_mask=full_mask, past_key_values=cache, **given)
                for row in range(2):
                    alone = torch.cat([contexts[row], questions[row : row + 1]], dim=1)
                    assert torch.equal(found[row, -10:], model.generate(alone, **given)[0, -10:])

    def test_a_cache_that_was_reset_is_compressed_again(self, models):
        model, cache = models["llama"], RaggedCache(models["llama"].config)
        with ContourKVPress(0.5)(model) as done:
            model(ids(40), past_key_values=cache)
            cache.reset()
            model.model(ids(60), past_key_values=cache)  # the decoder itself, too
        assert sum(int(entries.sum()) for entries in cache.entries()) == 120
        assert len(done.allocations) == 2

    def test_case_17_every_sample_of_a_run_is_compressed_and_recorded(self, models):
        model, press = models["llama"], ContourKVPress(0.5)
        caches = [RaggedCache(model.config) for _ in range(3)]
        with press(model) as done:
            for seed, cache in enumerate(caches):
                model(ids(40, seed), past_key_values=cache)
        assert [int(cache.entries()[0].sum() + cache.entries()[1].sum()) for cache in caches] == [80, 80, 80]
        assert len(done.allocations) == 3

    def test_case_12_generate_inside_the_block_compresses_once_and_appends(self, models):
        model, cache = models["llama"], RaggedCache(models["llama"].config)
        with ContourKVPress(0.25)(model) as done:
            made = model.generate(ids(80), max_new_tokens=10, do_sample=False, past_key_values=cache)
        assert made.shape[1] == 90 and cache.get_seq_length() == 89
        assert len(done.allocations) == 1
        assert sum(int(entries.sum()) for entries in cache.entries()) == 80 + 4 * 9

    def test_case_6_the_example_of_the_readme(self, models):
        model, context = models["llama"], ids(80)
        cache, _ = compressed(model, context, ContourKVPress(0.25))
        answers = []
        for _ in range(2):
            for seed in (1, 2):
                asked = torch.cat([context, ids(6, seed)], dim=-1)
                answers.append(model.generate(asked, max_new_tokens=8, do_sample=False, past_key_values=cache))
                cache.rollback()
        assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])
        assert not torch.equal(answers[0][:, -8:], answers[1][:, -8:])

    def test_case_28_only_the_last_logits_are_computed(self, models):
        model = models["llama"]
        with ContourKVPress(0.5)(model):
            assert model(ids(40), past_key_values=RaggedCache(model.config)).logits.shape[1] == 1
            asked = model(ids(40), past_key_values=RaggedCache(model.config), logits_to_keep=5)
            assert asked.logits.shape[1] == 5

    def test_embeddings_instead_of_ids(self, models):
        model = models["llama"]
        wanted, _ = compressed(model, ids(60), ContourKVPress(0.3))
        cache = RaggedCache(model.config)
        with ContourKVPress(0.3)(model):
            model(inputs_embeds=model.get_input_embeddings()(ids(60)), past_key_values=cache)
        assert torch.equal(cache.layers[1].positions, wanted.layers[1].positions)

    def test_case_27_every_layer_stays_on_its_device(self):
        """There is one real device here; the other holds shapes alone, and a mix-up of the two raises."""
        from contourkv.ragged.layer import RaggedLayer

        layers = [RaggedLayer(0), RaggedLayer(1)]
        for layer, device in zip(layers, ("cpu", "meta"), strict=True):
            keys = torch.zeros(1, 2, 10, 4, device=device)
            layer.update(keys, keys)
            layer._append(keys[:, :, :3], keys[:, :, :3])
            for kind, tensor, _ in layer.held_parts():
                table = tensor is layer.begin or tensor is layer.end
                assert tensor.device.type == ("cpu" if table else device), kind


class TestObserve:
    """One prefill for several budgets."""

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    @pytest.mark.parametrize("scores", ["mass", "snapkv"])
    def test_cuts_are_what_the_press_keeps(self, models, architecture, scores):
        if scores != "mass":
            pytest.importorskip("kvpress")
        model, tokens, cache = models[architecture], ids(100), RaggedCache(models[architecture].config)
        seen = ContourKVPress(0.5, scores=scores).observe(model, tokens, cache)
        for press in (
            ContourKVPress(0.2, scores=scores),
            ContourKVPress(0.4, scores=scores, split=AdaKV()),
            ContourKVPress(0.3, scores=scores, weight="plain", curve="mean"),
        ):
            cut, allocations = seen.cut(press)
            alone, done = compressed(model, tokens, press)
            assert repr(allocations) == repr(done.allocations[0])
            for ours, theirs in zip(cut.layers, alone.layers, strict=True):
                assert torch.equal(ours.positions, theirs.positions)
                assert torch.equal(ours.frozen_values, theirs.frozen_values)
            answered(model, cut, ids(4))
        assert sum(int(entries.sum()) for entries in cache.entries()) == full_entries(cache, 100)
        assert torch.isfinite(answered(model, cache, ids(4))).all()
        cache.reset()
        model(ids(30), past_key_values=cache)  # what the cache reads next is nothing to the observation
        assert torch.equal(seen.cut(press)[0].layers[0].positions, cut.layers[0].positions)

    def test_other_scores_than_those_observed_are_refused(self, models):
        seen = ContourKVPress(0.5).observe(models["llama"], ids(50), RaggedCache(models["llama"].config))
        with pytest.raises(InvalidInput, match="observed were scores 'mass' and the last 64 rows"):
            seen.cut(ContourKVPress(0.5, rows=8))
        with pytest.raises(InvalidInput, match="expected a ContourKVPress, got float"):
            seen.cut(0.3)


class TestTwoPasses:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
    def test_keeps_what_one_pass_keeps(self, models, architecture):
        model = models[architecture]
        one, first = compressed(model, ids(120), ContourKVPress(0.25))
        two, second = compressed(model, ids(120), ContourKVPress(0.25, two_passes=True))
        assert repr(first.allocations) == repr(second.allocations)
        for ours, theirs in zip(two.layers, one.layers, strict=True):
            for name in ("frozen_keys", "frozen_values", "positions", "begin", "end"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name))
        question = ids(9, seed=1)
        assert torch.equal(answered(model, two, question), answered(model, one, question))


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensor storages made inside that are alive, and their peak: exact, as a process's size is not."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, storage: int, count: int) -> None:
        self.known.discard(storage)
        self.live -= count


class TestPeakMemory:
    """Eviction compacts one layer at a time."""

    LAYERS, TOKENS = 8, 1500

    def model(self) -> transformers.PreTrainedModel:
        return build("llama", num_hidden_layers=self.LAYERS, num_attention_heads=4, head_dim=64)

    def one_layer(self) -> int:
        return 2 * 2 * self.TOKENS * 64 * 4

    def test_evicting_needs_no_more_than_a_layer_beside_what_it_frees(self):
        model = self.model()
        cache = RaggedCache(model.config)
        with torch.no_grad():
            model(ids(self.TOKENS), past_key_values=cache, logits_to_keep=1)
        before = held_bytes(cache).total
        keeps = [torch.rand(*layer.begin.shape, self.TOKENS) < 0.25 for layer in cache.layers]
        with _LiveBytes() as memory:
            for index, keep in enumerate(keeps):
                cache.evict(index, keep)
        assert held_bytes(cache).total < 0.27 * before
        # what eviction made and kept, and the most it had on the way beyond that
        assert memory.peak - held_bytes(cache).total <= self.one_layer()

    def test_two_passes_never_hold_more_than_the_result_and_one_layer(self):
        """Of keys and values: the activations of a layer, which every prefill has, are measured apart."""
        model, press = self.model(), ContourKVPress(0.25, two_passes=True, rows=8)
        held = []
        cache = RaggedCache(model.config)
        hooks = [
            layer.register_forward_hook(lambda *_: held.append(held_bytes(cache).payload))
            for layer in model.model.layers
        ]
        try:
            with press(model):
                model(ids(self.TOKENS), past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        final = held_bytes(cache).total
        assert held[: self.LAYERS] == [0] * self.LAYERS  # the first pass: another cache, emptied as it goes
        assert held[-1] == max(held) == held_bytes(cache).payload
        full = self.LAYERS * self.one_layer()
        with _LiveBytes() as memory:
            compressed(model, ids(self.TOKENS), press)
        with _LiveBytes() as bare, torch.no_grad():
            model(ids(self.TOKENS), use_cache=False, logits_to_keep=1)
        assert memory.peak - bare.peak <= final + self.one_layer() < 0.5 * full


class TestNothingIsLeft:
    def state(self, model: transformers.PreTrainedModel) -> dict[str, set[str]]:
        return {
            name: {*vars(module), *map(str, module._forward_hooks), *map(str, module._forward_pre_hooks)}
            for name, module in model.named_modules()
        }

    @pytest.mark.parametrize("scores", ["mass", "snapkv", "compactor"])
    def test_case_11_the_model_is_as_it_was(self, models, scores):
        model, tokens = models["llama"], ids(100)
        if scores != "mass":
            pytest.importorskip("kvpress")
        press = ContourKVPress(0.3, scores=scores)
        with torch.no_grad():
            plain = model(tokens).logits  # kvpress, once imported, leaves an empty mask in every forward pass
        before = self.state(model)
        compressed(model, tokens, press)
        assert self.state(model) == before
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, plain)

    @pytest.mark.parametrize("scores", ["mass", "knorm"])
    def test_an_exception_in_the_middle_of_a_context(self, models, scores):
        """The model comes back unpatched, the cache empty."""
        if scores != "mass":
            pytest.importorskip("kvpress")
        model, cache = copy.deepcopy(models["llama"]), RaggedCache(models["llama"].config)
        before = self.state(model)

        def failing(*_):
            raise KeyError("in the middle")

        hook = model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(KeyError), ContourKVPress(0.3, scores=scores)(model):
            model(ids(50), past_key_values=cache)
        hook.remove()
        assert self.state(model) == before
        assert cache.get_seq_length() == 0 and all(layer.watcher is None for layer in cache.layers)
        again, _ = compressed(model, ids(50), ContourKVPress(0.3, scores=scores))
        with ContourKVPress(0.3, scores=scores)(model):
            model(ids(50), past_key_values=cache)
        assert torch.equal(cache.layers[0].positions, again.layers[0].positions)

    def test_an_exception_in_a_later_chunk_leaves_the_cache_empty(self, models):
        model, cache = copy.deepcopy(models["llama"]), RaggedCache(models["llama"].config)
        calls = []

        def failing(*_):
            calls.append(1)
            if len(calls) == 3:
                raise KeyError("in the middle")

        model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(KeyError):
            ContourKVPress(0.3).prefill(model, ids(90), cache, chunk_size=20)
        assert cache.get_seq_length() == 0

    def test_gradients_are_recorded_again_afterwards(self, models):
        with ContourKVPress(0.3)(models["llama"]):
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


class TestRefused:
    @pytest.mark.parametrize(
        "given_, message",
        [
            ({"budget": 0}, "budget: expected a whole number of at least 1, got 0"),
            ({"budget": 0.0}, "budget: expected a fraction above 0"),
            ({"budget": -0.5}, "budget: expected a fraction above 0"),
            ({"budget": 1.5}, "budget: expected a fraction above 0 and up to 1"),
            ({"compression_ratio": 1.0}, "under 1, got 1.0"),
            ({"compression_ratio": 1.5}, "under 1, got 1.5"),
            ({}, "exactly one of them, got none"),
            ({"budget": 0.5, "entries": 9}, "exactly one of them, got budget and entries"),
            ({"budget": 0.5, "weight": "heavy"}, "weight: expected one of plain"),
            ({"budget": 0.5, "split": "even"}, "split: expected one of contour, contour_by_span, uniform"),
            ({"budget": 0.5, "rows": 0}, "rows: expected a whole number of at least 1"),
            ({"budget": 0.5, "curve": "flat"}, "curve: expected one of peak"),
            ({"budget": 0.5, "curve": "scores", "scores": print}, "curve: scores 'print' are no masses"),
            ({"budget": 0.5, "sinks": -1}, "sinks: expected"),
            ({"budget": 0.5, "recent": 1.5}, "recent: expected"),
            ({"budget": 0.5, "floor": 9, "cap": 3}, "cap: expected a whole number of at least 9"),
            ({"budget": 0.5, "scores": "best"}, "scores: unknown name 'best'"),
            ({"budget": 0.5, "scores": lambda keys: keys}, "scores: expected a function of module, hidden_states"),
            ({"budget": 0.5, "weight": [1]}, "weight: expected one of plain"),
            ({"budget": 0.5, "curve": [1]}, "curve: expected one of peak"),
            ({"budget": 0.5, "two_passes": "yes"}, "two_passes: expected True or False"),
        ],
    )
    def test_arguments_at_construction(self, given_, message):
        with pytest.raises(InvalidInput, match=message):
            ContourKVPress(**given_)

    @pytest.mark.parametrize("given_", [torch.zeros(1, 9), torch.full((1, 9), 10**6), torch.full((1, 9), -1)])
    def test_ids_that_are_none(self, models, given_):
        with pytest.raises(InvalidInput, match="ids: expected int64 or int32 token ids from 0"):
            ContourKVPress(0.5).prefill(models["llama"], given_, RaggedCache(models["llama"].config))

    @pytest.mark.parametrize("budget", [{"budget": "100 B"}, {"entries": 3}])
    def test_less_than_an_entry_a_head(self, models, budget):
        with pytest.raises(InvalidInput, match="each of 4 KV heads"):
            compressed(models["llama"], ids(50), ContourKVPress(**budget))

    @pytest.mark.parametrize(
        "made, message",
        [
            (lambda keys: torch.full(keys.shape[:3], torch.nan), "expected finite numbers, key 0 of KV head 0"),
            (lambda keys: torch.ones(1, 2, 7), r"expected shape \(1, 2, 50\)"),
            (lambda keys: [1.0], "expected a tensor"),
        ],
    )
    def test_scores_that_are_none(self, models, made, message):
        scores = lambda module, hidden_states, keys, *rest: made(keys)  # noqa: E731
        cache = RaggedCache(models["llama"].config)
        with pytest.raises(InvalidInput, match=message), ContourKVPress(0.5, scores=scores)(models["llama"]):
            models["llama"](ids(50), past_key_values=cache)
        assert cache.get_seq_length() == 0

    def test_a_cache_that_holds_another_context(self, models):
        cache, _ = compressed(models["llama"], ids(40), ContourKVPress(0.5))
        with pytest.raises(InvalidInput, match="holds 40 tokens of another context"):
            with ContourKVPress(0.5)(models["llama"]):
                models["llama"](ids(20), past_key_values=cache)
        assert cache.get_seq_length() == 40 and cache.layers[0].marked_length == 40

    @pytest.mark.parametrize("name", ["dynamic", "static", "none"])
    def test_case_22_other_caches(self, models, name):
        model = models["llama"]
        cache = {
            "dynamic": lambda: DynamicCache(),
            "static": lambda: transformers.StaticCache(model.config, max_cache_len=90),
            "none": lambda: None,
        }[name]()
        with pytest.raises(InvalidInput, match=r"expected past_key_values=RaggedCache\(model\.config\), got"):
            with ContourKVPress(0.5)(model):
                model(ids(20), past_key_values=cache)

    def test_a_model_in_training_mode(self):
        model = built("llama").train()
        with pytest.raises(InvalidInput, match=r"model\.eval\(\)"):
            compressed(model, ids(20), ContourKVPress(0.5))

    def test_two_presses_at_once(self, models):
        model, cache = models["llama"], RaggedCache(models["llama"].config)
        with pytest.raises(InvalidInput, match="another press is compressing this cache"):
            with ContourKVPress(0.5)(model), ContourKVPress(0.25)(model):
                model(ids(50), past_key_values=cache)
        assert cache.get_seq_length() == 0 and all(layer.watcher is None for layer in cache.layers)

    def test_what_is_no_model(self):
        with pytest.raises(InvalidInput, match="expected a transformers model, got Linear"):
            with ContourKVPress(0.5)(torch.nn.Linear(2, 2)):
                pass

    def test_case_21_kvzip_on_a_batch(self, tmp_path):
        pytest.importorskip("kvpress")
        make_model({"architecture": "llama", "seed": 2}, tmp_path, "llama")
        model = load_model(tmp_path)
        press = ContourKVPress(0.5, scores="kvzip")
        assert (press.curve, ContourKVPress(0.5).curve) == ("scores", "peak")
        with pytest.raises(InvalidInput, match="batch of 2"):
            compressed(model, ids(60).repeat(2, 1), press)
        cache, _ = compressed(model, ids(60), press)
        assert sum(int(entries.sum()) for entries in cache.entries()) == full_entries(cache, 60) // 2
        assert torch.isfinite(answered(model, cache, ids(5))).all()

    @pytest.mark.parametrize(
        "mask, message",
        [
            (torch.tensor([[1] * 30 + [0] * 20]), "padding on the left"),
            (torch.ones(1, 40), r"shape \(1, 50\), as the ids, got \(1, 40\)"),
            (torch.zeros(1, 50), "sequence 0 is all padding"),
        ],
    )
    def test_padding_that_is_not_on_the_left(self, models, mask, message):
        cache = RaggedCache(models["llama"].config)
        with pytest.raises(InvalidInput, match=message):
            compressed(models["llama"], ids(50), ContourKVPress(0.5), attention_mask=mask)
        with pytest.raises(InvalidInput, match=message):
            ContourKVPress(0.5).prefill(models["llama"], ids(50), cache, attention_mask=mask)

    def test_ids_of_one_dimension(self, models):
        with pytest.raises(InvalidInput, match=r"expected input_ids \(B, N\)"):
            compressed(models["llama"], ids(50)[0], ContourKVPress(0.5))

    def test_a_cache_of_another_model(self, models):
        with pytest.raises(InvalidInput, match="the cache has 2 layers, the model 3"):
            model = built("llama", num_hidden_layers=3)
            with ContourKVPress(0.5)(model):
                model(ids(9), past_key_values=RaggedCache(models["llama"].config))

    def test_chunks_need_what_can_be_observed(self, models):
        flat = lambda module, hidden_states, keys, *rest: torch.ones(keys.shape[:3])  # noqa: E731
        cache = RaggedCache(models["llama"].config)
        with pytest.raises(InvalidInput, match='expected scores="mass"'):
            ContourKVPress(0.5, scores=flat).prefill(models["llama"], ids(50), cache)
        with pytest.raises(InvalidInput, match="expected the split Contour"):
            ContourKVPress(0.5, split=Uniform()).prefill(models["llama"], ids(50), cache)
        with pytest.raises(InvalidInput, match="ids: expected token ids"):
            ContourKVPress(0.5).prefill(models["llama"], ids(50)[0], cache)
