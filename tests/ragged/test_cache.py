"""RaggedCache against transformers' own caches, and against itself: nothing may depend on how entries are stored."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids, left_padded
from capture.tiny_models import WINDOW, build
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv.errors import ContourKVError, InvalidInput
from contourkv.ragged import RaggedCache
from contourkv.ragged.layer import CROP_TAKES_LENGTH, RaggedLayer, _visible


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name) for name in ARCHITECTURES}


@torch.no_grad()
def fed(model: transformers.PreTrainedModel, cache: transformers.Cache, tokens: torch.Tensor, *stops: int, **kwargs):
    """Logits of `tokens` fed in pieces that end at `stops` and at the end."""
    pieces, start = [], 0
    for stop in (*stops, tokens.shape[1]):
        pieces.append(model(tokens[:, start:stop], past_key_values=cache, **kwargs).logits)
        start = stop
    return torch.cat(pieces, dim=1)


def random_keep(cache: RaggedCache, share: float, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(*layer.begin.shape, layer.length, generator=generator) < share for layer in cache.layers]


def evicted(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, share: float = 0.3, seed: int = 0
) -> RaggedCache:
    """A cache that read `tokens` and kept a random `share` of the entries."""
    cache = RaggedCache(model.config)
    fed(model, cache, tokens)
    for index, keep in enumerate(random_keep(cache, share, seed)):
        cache.evict(index, keep)
    cache.mark()
    return cache


class TestNothingEvicted:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_logits_are_those_of_a_dynamic_cache(self, models, architecture):
        model, tokens = models[architecture], ids(70)
        ours = fed(model, RaggedCache(model.config), tokens, 40, 60, 61)
        theirs = fed(model, DynamicCache(config=model.config), tokens, 40, 60, 61)
        assert (ours - theirs).abs().max() <= TOLERANCE

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_64_greedy_tokens_are_the_same(self, models, architecture):
        model, tokens = models[architecture], ids(50)
        theirs = model.generate(tokens, max_new_tokens=64, do_sample=False)
        ours = model.generate(tokens, max_new_tokens=64, do_sample=False, past_key_values=RaggedCache(model.config))
        assert theirs.shape[1] == 50 + 64
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
    @pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}])
    def test_sampling_and_beams_are_the_same(self, models, architecture, how):
        model, tokens = models[architecture], ids(40)
        settings_ = {"max_new_tokens": 24, **{"do_sample": False, **how}}
        torch.manual_seed(5)
        theirs = model.generate(tokens, **settings_)
        torch.manual_seed(5)
        ours = model.generate(tokens, past_key_values=RaggedCache(model.config), **settings_)
        assert torch.equal(ours, theirs)

    def test_beams_over_a_filled_cache_share_its_entries(self, models):
        model, context, tokens = models["llama"], ids(40), ids(52)
        tokens[:, :40] = context
        theirs = model.generate(tokens, num_beams=4, do_sample=False, max_new_tokens=10)
        cache = RaggedCache(model.config)
        fed(model, cache, context)
        held = cache.layers[0].frozen_keys.untyped_storage().nbytes()
        cache.batch_repeat_interleave(4)
        ours = model.generate(tokens, num_beams=4, do_sample=False, max_new_tokens=10, past_key_values=cache)
        assert torch.equal(ours, theirs)
        assert cache.layers[0].frozen_keys.untyped_storage().nbytes() == held

    @settings(max_examples=25, deadline=None)
    @given(stops=st.lists(st.integers(1, 69), max_size=5, unique=True).map(sorted), seed=st.integers(0, 10))
    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
    def test_how_a_context_is_cut_in_pieces_does_not_matter(self, models, architecture, stops, seed):
        model, tokens = models[architecture], ids(70, seed)
        whole = fed(model, RaggedCache(model.config), tokens)
        assert (fed(model, RaggedCache(model.config), tokens, *stops) - whole).abs().max() <= TOLERANCE

    @pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float64, 1e-9)])
    def test_other_dtypes(self, dtype, tolerance):
        model, tokens = build("qwen3", dtype), ids(60)
        ours = fed(model, RaggedCache(model.config), tokens, 30, 50, 51, 52)
        theirs = fed(model, DynamicCache(config=model.config), tokens, 30, 50, 51, 52)
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()

    def test_case_13_long_generation_past_a_sliding_window_stays_small(self, models):
        model = models["gemma3_text"]
        cache = RaggedCache(model.config)
        theirs = model.generate(ids(60), max_new_tokens=300, do_sample=False)
        ours = model.generate(ids(60), max_new_tokens=300, do_sample=False, past_key_values=cache)
        assert torch.equal(ours, theirs)
        sliding, full = cache.layers
        assert int(sliding.lengths().max()) <= WINDOW + 64 + 64 < int(full.lengths().max())
        assert len(sliding.frozen_keys) == 0  # the context is behind the window, and nothing returns to it
        cache.crop(-20)
        again = fed(model, cache, ours[:, -21:-1])
        whole = fed(model, DynamicCache(config=model.config), ours[:, :-1])
        assert (again - whole[:, -20:]).abs().max() <= TOLERANCE


class TestEvicted:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_attention_is_that_of_the_full_cache_with_the_evicted_keys_masked(self, models, architecture):
        """The oracle: the model's own eager attention, with -inf where a head lost a key."""
        model, tokens = built(architecture, attn_implementation="eager"), ids(60)
        cache = RaggedCache(model.config)
        fed(model, cache, tokens[:, :40])
        keeps = random_keep(cache, 0.4)
        for index, keep in enumerate(keeps):
            cache.evict(index, keep)
        ours = fed(model, cache, tokens[:, 40:], 10, 11)
        theirs = masked_logits(model, tokens, keeps)
        assert (ours - theirs).abs().max() <= TOLERANCE

    @settings(max_examples=30, deadline=None)
    @given(share=st.floats(0, 1), seed=st.integers(0, 99), stop=st.integers(1, 59))
    def test_evicting_twice_is_evicting_what_both_drop(self, models, share, seed, stop):
        """Also with a tail in between, and down to empty heads."""
        model, tokens = models["gemma3_text"], ids(60)
        cache = RaggedCache(model.config)
        fed(model, cache, tokens[:, :stop])
        fed(model, cache, tokens[:, stop:])
        other = copy.deepcopy(cache)
        first, second = random_keep(cache, share, seed), random_keep(cache, 0.7, seed + 1)
        for index in range(2):
            cache.evict(index, first[index])
            cache.evict(index, second[index])
            other.evict(index, first[index] & second[index])
            for name in ("frozen_keys", "frozen_values", "positions", "begin", "end"):
                assert torch.equal(getattr(cache.layers[index], name), getattr(other.layers[index], name)), name
            for head in range(2):
                kept = cache.kept_positions(index, 0, head)
                wanted = (first[index] & second[index])[0, head].nonzero().squeeze(1)
                window = cache.windows[index]
                assert set(kept.tolist()) <= set(wanted.tolist())
                if window is None:
                    assert torch.equal(kept, wanted)

    def test_case_5_later_tokens_have_their_true_positions(self, models):
        """Keeping everything but counting from the kept entries would shift rotary positions."""
        model, tokens = models["llama"], ids(50)
        cache = evicted(model, tokens[:, :40])
        assert cache.get_seq_length() == 40 > int(cache.entries()[0].max())
        implicit = fed(copy.deepcopy(model), copy.deepcopy(cache), tokens[:, 40:])
        explicit = fed(model, cache, tokens[:, 40:], position_ids=torch.arange(40, 50)[None])
        assert torch.equal(implicit, explicit)
        assert cache.get_seq_length() == 50

    def test_case_4_layers_and_heads_of_unequal_length(self, models):
        model, tokens = models["qwen3"], ids(60)
        cache = RaggedCache(model.config)
        fed(model, cache, tokens[:, :40])
        keep = torch.zeros(1, 2, 40, dtype=torch.bool)
        keep[0, 0, 3] = True  # one entry, and an empty head
        cache.evict(0, keep)
        assert [entry.tolist() for entry in cache.entries()] == [[[1, 0]], [[40, 40]]]
        assert torch.isfinite(fed(model, cache, tokens[:, 40:], 1, 2)).all()

    def test_case_12_generate_appends_to_the_compressed_context(self, models):
        model, tokens = models["llama"], ids(50)
        cache = evicted(model, tokens[:, :40])
        before = int(cache.entries()[0].sum())
        model.generate(tokens, max_new_tokens=7, do_sample=False, past_key_values=cache)
        assert cache.get_seq_length() == 50 + 7 - 1
        assert int(cache.entries()[0].sum()) == before + 2 * (10 + 7 - 1)

    def test_case_15_one_copy_per_kv_head(self, models):
        model = models["qwen3"]
        cache = RaggedCache(model.config)
        fed(model, cache, ids(40))
        layer = cache.layers[0]
        assert layer.frozen_keys.shape == (2 * 40, 16) and model.config.num_attention_heads == 4

    def test_case_16_appending_writes_slots(self, models):
        """Nothing is rebuilt: the frozen part stays where it is, and the tail moves once in many tokens."""
        model, tokens = models["llama"], ids(200)
        cache = evicted(model, tokens[:, :40])
        layer = cache.layers[0]
        frozen, places, slack = layer.frozen_keys.data_ptr(), [], []
        for at in range(40, 200):
            fed(model, cache, tokens[:, at : at + 1])
            places.append((layer.tail_keys.data_ptr(), layer.tail_keys.shape[2]))
            slack.append(layer.tail_keys.shape[2] - layer.tail_length)
        assert layer.frozen_keys.data_ptr() == frozen and layer.tail_length == 160
        moves = sum(one != other for one, other in pairwise(places))
        assert moves <= 10 and max(slack) <= 20


class TestRollback:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_case_6_question_after_question_over_one_context(self, models, architecture):
        """The second question must not see the first; each gets what it gets from a fresh compressed cache."""
        model, context = models[architecture], ids(40)
        cache = evicted(model, context)
        fresh = [copy.deepcopy(cache) for _ in range(4)]
        state = [copy.deepcopy(vars(layer)) for layer in cache.layers]
        for question, alone in enumerate(fresh):
            tokens = ids(5 + 30 * question, seed=question)
            assert torch.equal(fed(model, cache, tokens, 3), fed(model, alone, tokens, 3))
            cache.rollback()
            assert cache.get_seq_length() == 40
        for layer, before in zip(cache.layers, state, strict=True):
            for name in ("frozen_keys", "frozen_values", "positions", "begin", "end"):
                assert torch.equal(getattr(layer, name), before[name])
            assert layer.tail_keys is None and layer.tail_length == 0

    def test_returns_from_beams_to_the_one_context(self, models):
        model, context, tokens = models["llama"], ids(40), ids(45)
        cache = evicted(model, context)
        alone = fed(model, copy.deepcopy(cache), tokens[:, 40:])
        cache.batch_repeat_interleave(3)
        model.generate(tokens, num_beams=3, do_sample=False, max_new_tokens=6, past_key_values=cache)
        cache.rollback()
        assert torch.equal(fed(model, cache, tokens[:, 40:]), alone)

    def test_needs_a_mark(self, models):
        cache = RaggedCache(models["llama"].config)
        with pytest.raises(InvalidInput, match="no mark"):
            cache.rollback()
        with pytest.raises(InvalidInput, match="empty"):
            cache.mark()

    def test_mark_keeps_the_tail(self, models):
        model, tokens = models["gemma3_text"], ids(70)
        cache = RaggedCache(model.config)
        fed(model, cache, tokens[:, :60], 10, 50)
        cache.mark()
        assert int(cache.layers[0].lengths().max()) == WINDOW - 1  # what no later token can see is not kept for it
        first = fed(model, cache, tokens[:, 60:])
        cache.rollback()
        assert cache.get_seq_length() == 60
        assert (fed(model, cache, tokens[:, 60:]) - first).abs().max() <= 1e-6


class TestTake:
    @given(count=st.integers(1, 4), tokens=st.integers(1, 9), more=st.integers(0, 5), seed=st.integers(0, 2**31 - 1))
    @settings(deadline=None, max_examples=40)
    def test_kept_sets_of_one_context_are_as_those_of_as_many_copies(self, count, tokens, more, seed):
        generator = torch.Generator().manual_seed(seed)
        keys, values = torch.randn(2, 1, 2, tokens, 4, generator=generator)
        keep = torch.rand(count, 2, tokens, generator=generator) < 0.6
        shared, copies = RaggedLayer(0), RaggedLayer(0)
        shared.take(keys, values, keep, tokens + more)
        copies.take(keys.repeat(count, 1, 1, 1), values.repeat(count, 1, 1, 1), keep, tokens + more)
        for name in ("frozen_keys", "frozen_values", "positions", "begin", "end"):
            assert torch.equal(getattr(shared, name), getattr(copies, name))
        assert shared.frozen_keys.untyped_storage().nbytes() == int(keep.sum()) * 4 * keys.element_size()

    def test_kept_sets_of_several_contexts_must_be_as_many(self):
        keys = torch.zeros(2, 2, 5, 4)
        with pytest.raises(InvalidInput, match="do not belong together"):
            RaggedLayer(0).take(keys, keys, torch.ones(3, 2, 5, dtype=torch.bool), 5)


class TestCrop:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    @pytest.mark.parametrize("count", [1, 4])
    def test_a_few_tokens_can_be_taken_back(self, models, architecture, count):
        model, tokens = models[architecture], ids(70)
        cache = RaggedCache(model.config)
        fed(model, cache, tokens[:, :60])
        fed(model, cache, ids(count, seed=9))
        cache.crop(-count)
        assert cache.get_seq_length() == 60
        whole = fed(model, RaggedCache(model.config), tokens)
        assert (fed(model, cache, tokens[:, 60:]) - whole[:, 60:]).abs().max() <= TOLERANCE

    def test_positive_numbers_mean_what_the_installed_transformers_means(self, models):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(60))
        if CROP_TAKES_LENGTH:
            cache.crop(25)
            assert cache.get_seq_length() == 25
            cache.crop(99)
            assert cache.get_seq_length() == 25
        else:
            with pytest.raises(InvalidInput, match="negative count"):
                cache.crop(25)

    def test_into_the_context_drops_its_last_positions(self, models):
        model = models["llama"]
        cache = evicted(model, ids(40))
        cache.crop(-15)
        assert cache.get_seq_length() == 25
        assert max(int(cache.kept_positions(0, 0, head).max()) for head in range(2)) < 25
        with pytest.raises(InvalidInput, match="no mark"):
            cache.rollback()

    def test_behind_a_sliding_window_is_refused(self, models):
        cache = RaggedCache(models["gemma3_text"].config)
        fed(models["gemma3_text"], cache, ids(60))
        with pytest.raises(InvalidInput, match="sliding window of 24"):
            cache.crop(-20)
        assert cache.get_seq_length() == 60

    def test_more_than_there_is_is_refused(self, models):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(10))
        with pytest.raises(InvalidInput, match="cannot remove 11 tokens of 10"):
            cache.crop(-11)


class TestBatches:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_case_10_each_sequence_of_a_padded_batch_gets_what_it_gets_alone(self, models, architecture):
        model = models[architecture]
        texts = [ids(length, seed=length) for length in (50, 31, 44)]
        batch, mask = left_padded(texts)
        together = model.generate(
            batch, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=RaggedCache(model.config)
        )
        for row, text in zip(together, texts, strict=True):
            alone = model.generate(text, max_new_tokens=12, do_sample=False, past_key_values=RaggedCache(model.config))
            assert torch.equal(row[-12:], alone[0, -12:])

    def test_case_10_padding_is_not_held(self, models):
        model = models["llama"]
        batch, mask = left_padded([ids(50), ids(31, seed=1)])
        cache = RaggedCache(model.config)
        with torch.no_grad():
            model(batch, attention_mask=mask, past_key_values=cache)
        assert cache.entries()[0].tolist() == [[50, 50], [31, 31]]
        assert cache.kept_positions(0, 1, 0).tolist() == list(range(19, 50))

    def test_padding_inside_a_later_turn_is_not_seen(self, models):
        """Questions of unequal length over contexts of unequal length."""
        model = models["llama"]
        contexts, questions = [ids(40), ids(28, 1)], [ids(3, 2), ids(7, 4)]
        cache = RaggedCache(model.config)
        together = two_turns(model, cache, contexts, questions)
        for index, (context, question) in enumerate(zip(contexts, questions, strict=True)):
            whole = fed(model, RaggedCache(model.config), torch.cat([context, question], dim=1))
            assert (together[index, -1] - whole[0, -1]).abs().max() <= TOLERANCE
        cache.mark()
        assert cache.entries()[0].tolist() == [[43, 43], [35, 35]]

    def test_padding_inside_a_window_counts_as_it_does_in_transformers(self, models):
        """A sliding window is a number of places in the sequence that was fed, padding included."""
        model = models["gemma3_text"]
        turns = [ids(40), ids(28, 1)], [ids(3, 2), ids(7, 4)]
        ours = two_turns(model, RaggedCache(model.config), *turns)
        theirs = two_turns(model, DynamicCache(config=model.config), *turns)
        assert (ours[:, -1] - theirs[:, -1]).abs().max() <= TOLERANCE

    @pytest.mark.parametrize("kind", ["two dimensions", "bool", "float"])
    def test_a_mask_need_not_be_looked_at(self, kind):
        """On a GPU later blocks take it as it is: to ask whether all tokens are real would be to wait."""
        causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
        padded = causal.clone()
        padded[1, :, :, 0] = False
        for mask, real in ((causal, [[True] * 3] * 2), (padded, [[True] * 3, [False, True, True]])):
            if kind == "two dimensions":
                mask = torch.tensor(real).int()
            elif kind == "float":
                mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            assert _visible(mask, 3, look=False).tolist() == real
            looked = _visible(mask, 3, look=True)
            assert (looked is None) == all(map(all, real)) and (looked is None or looked.tolist() == real)
        assert _visible(None, 3, look=False) is None

    def test_another_batch_size_is_refused(self, models):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(10))
        with pytest.raises(InvalidInput, match=r"holds 1 sequence\(s\), the model was given 2"):
            fed(models["llama"], cache, ids(4).repeat(2, 1))
        assert cache.get_seq_length() == 10

    def test_selected_sequences_go_on_alone(self, models):
        model = models["llama"]
        batch = torch.cat([ids(30, 1), ids(30, 2), ids(30, 3)])
        cache = RaggedCache(model.config)
        fed(model, cache, batch)
        cache.batch_select_indices(torch.tensor([2, 0]))
        more = torch.cat([ids(5, 7), ids(5, 8)])
        other = RaggedCache(model.config)
        fed(model, other, batch[[2, 0]])
        assert (fed(model, cache, more) - fed(model, other, more)).abs().max() <= 1e-6


class TestState:
    def test_case_11_nothing_of_a_cache_is_on_the_model(self, models):
        model = models["llama"]
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        cache = evicted(model, ids(40))
        alone = fed(model, RaggedCache(model.config), ids(20, seed=8))
        fed(model, cache, ids(5))
        assert torch.equal(fed(model, RaggedCache(model.config), ids(20, seed=8)), alone)
        assert before == {name: set(vars(module)) for name, module in model.named_modules()}

    def test_a_copy_goes_its_own_way(self, models):
        model = models["gemma3_text"]
        cache = evicted(model, ids(40))
        fed(model, cache, ids(5))
        twin = cache.copy()
        alone = fed(model, copy.deepcopy(cache), ids(6, seed=2), 3)
        fed(model, twin, ids(30, seed=9))
        twin.evict(0, random_keep(twin, 0.5)[0])
        assert torch.equal(fed(model, cache, ids(6, seed=2), 3), alone)
        assert twin.layers[1].frozen_keys is cache.layers[1].frozen_keys

    def test_reset_forgets_everything(self, models):
        model = models["gemma3_text"]
        cache = evicted(model, ids(40))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.is_initialized
        assert all(not list(layer.held_parts()) for layer in cache.layers)
        again = fed(model, cache, ids(33, seed=2), 30)
        assert torch.equal(again, fed(model, RaggedCache(model.config), ids(33, seed=2), 30))

    def test_case_14_compaction_gives_storage_back(self, models):
        """A slice would keep the whole storage alive."""
        cache = evicted(models["llama"], ids(64), share=0.25)
        for layer in cache.layers:
            for kind, tensor, used in layer.held_parts():
                assert tensor.untyped_storage().nbytes() == used, kind

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_save_and_load(self, models, architecture, tmp_path):
        model = models[architecture]
        cache = evicted(model, ids(40))
        fed(model, cache, ids(6, seed=5), 2)
        path = tmp_path / "context.safetensors"
        cache.save(path)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        loaded = RaggedCache.load(path, model.config)
        assert repr(loaded) == repr(cache)
        assert torch.equal(fed(model, loaded, ids(9, seed=6), 4), fed(model, cache, ids(9, seed=6), 4))
        loaded.rollback()
        cache.rollback()
        assert torch.equal(fed(model, loaded, ids(9, seed=6), 4), fed(model, cache, ids(9, seed=6), 4))

    def test_saving_again_gives_the_same_bytes(self, models, tmp_path):
        cache = evicted(models["llama"], ids(40))
        cache.save(tmp_path / "a")
        RaggedCache.load(tmp_path / "a", models["llama"].config).save(tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_what_cannot_be_loaded_is_said(self, models, tmp_path):
        config = models["llama"].config
        cache = evicted(models["llama"], ids(40))
        path = tmp_path / "cache.safetensors"
        cache.save(path)
        with pytest.raises(InvalidInput, match="no such file"):
            RaggedCache.load(tmp_path / "none", config)
        with pytest.raises(InvalidInput, match="holds the cache of a llama"):
            RaggedCache.load(path, models["qwen3"].config)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InvalidInput, match="damaged"):
            RaggedCache.load(path, config)
        path.write_bytes(b"no safetensors")
        with pytest.raises(InvalidInput, match="damaged"):
            RaggedCache.load(path, config)
        with pytest.raises(InvalidInput, match="empty"):
            RaggedCache(config).save(path)
        with pytest.raises(InvalidInput, match="no folder"):
            cache.save(tmp_path / "none" / "x")
        with pytest.raises(InvalidInput, match="not a file"):
            cache.save(tmp_path)
        cache.save(path)
        other = copy.deepcopy(config)
        other.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
        with pytest.raises(InvalidInput, match="was made with rope_parameters"):
            RaggedCache.load(path, other)
        for device in ("meta", "nowhere"):
            with pytest.raises(InvalidInput, match=r"device: .* cannot be used here"):
                RaggedCache.load(path, config, device)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_a_flipped_bit_is_found(self, models, data, tmp_path_factory):
        path = tmp_path_factory.mktemp("saved") / "cache"
        evicted(models["llama"], ids(20)).save(path)
        held = bytearray(path.read_bytes())
        at = data.draw(st.integers(len(held) // 2, len(held) - 1))
        held[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(held)
        with pytest.raises(InvalidInput, match="damaged"):
            RaggedCache.load(path, models["llama"].config)

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_runs_of_a_saved_cache_are_not_believed(self, models, data, tmp_path_factory):
        """Attention reads runs without looking: tables that point elsewhere must not get that far."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        from contourkv.ragged.cache import _digest

        cache = evicted(models["llama"], ids(20))
        path = tmp_path_factory.mktemp("saved") / "cache"
        cache.save(path)
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        name = data.draw(st.sampled_from([name for name in tensors if name.endswith(("end", "positions"))]))
        flat = tensors[name].view(-1)
        index = data.draw(st.integers(0, len(flat) - 1))
        value = data.draw(st.sampled_from([-1, 10**6]))
        flat[index] = value
        described = {**json.loads(metadata["cache"]), "digest": _digest(tensors)}
        save_file(tensors, path, metadata={"cache": json.dumps(described)})
        with pytest.raises(InvalidInput, match=r"layer . is damaged"):
            RaggedCache.load(path, models["llama"].config)


class TestRefused:
    def test_case_22_by_name_at_construction(self):
        config = transformers.AutoConfig.for_model
        for architecture, settings_, message in (
            ("t5", {}, "encoder-decoder|registry"),
            ("mamba", {}, "registry|attention"),
            ("bloom", {}, "bloom does not attend through"),
            ("llama4_text", {}, "chunked_attention|chunks"),
            ("gemma3n_text", {}, "shares keys"),
        ):
            with pytest.raises(InvalidInput, match=message):
                RaggedCache(config(architecture, **settings_))
        for wrong in (None, {}, "llama"):
            with pytest.raises(InvalidInput, match=r"model\.config"):
                RaggedCache(wrong)

    def test_case_22_quantized_keys(self, models):
        cache = RaggedCache(models["llama"].config)
        keys = torch.zeros(1, 2, 4, 8, dtype=torch.int8)
        with pytest.raises(InvalidInput, match="quantized"):
            cache.update(keys, keys, 0)

    def test_a_model_in_training_mode(self):
        model = built("llama").train()
        with pytest.raises(InvalidInput, match=r"model\.eval\(\)"):
            model(ids(10), past_key_values=RaggedCache(model.config))

    def test_attention_registered_after_the_context_was_read(self):
        """It would take the new keys for all keys there are."""
        model = built("llama")
        cache = RaggedCache(model.config)
        fed(model, cache, ids(10))
        sdpa = transformers.integrations.sdpa_attention.sdpa_attention_forward
        transformers.AttentionInterface.register("late", sdpa)
        transformers.AttentionMaskInterface.register("late", transformers.masking_utils.sdpa_mask)
        model.config._attn_implementation = "late"
        with pytest.raises(ContourKVError, match="outside transformers' attention registry"):
            fed(model, cache, ids(4))
        whole = fed(model, DynamicCache(config=model.config), ids(14))
        assert (fed(model, RaggedCache(model.config), ids(14), 10) - whole).abs().max() <= TOLERANCE

    def test_a_function_registered_again_under_its_name_is_the_one_that_is_called(self):
        model, calls = built("llama"), []
        sdpa = transformers.integrations.sdpa_attention.sdpa_attention_forward

        def counting(number):
            def attention(*args, **kwargs):
                calls.append(number)
                return sdpa(*args, **kwargs)

            return attention

        transformers.AttentionMaskInterface.register("twice", transformers.masking_utils.sdpa_mask)
        model.config._attn_implementation = "twice"
        for number in (1, 2):
            transformers.AttentionInterface.register("twice", counting(number))
            fed(model, RaggedCache(model.config), ids(4))
        assert calls == [1, 1, 2, 2]

    def test_rectangular_keys_are_not_there(self):
        with pytest.raises(AttributeError, match="enforce"):
            _ = RaggedLayer(0).keys

    def test_an_interrupted_forward_pass_is_noticed(self, models):
        """Layers that hold different numbers of tokens would attend to different texts."""
        model = copy.deepcopy(models["llama"])
        cache = evicted(model, ids(40))
        wanted = fed(model, cache.copy(), ids(6, 2))

        def failing(*_):
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(KeyboardInterrupt):
            fed(model, cache, ids(7))
        hook.remove()
        with pytest.raises(InvalidInput, match="hold 40 and 47 tokens, so a forward pass was interrupted; rollback"):
            fed(model, cache, ids(7))
        cache.rollback()
        assert torch.equal(fed(model, cache, ids(6, 2)), wanted)

    def test_another_model_than_it_was_made_for(self, models):
        for other in (models["qwen3"], built("llama", num_hidden_layers=1), built("llama", num_hidden_layers=3)):
            with pytest.raises(InvalidInput, match=r"made for a llama of 2 layers|has 2 layers, the model has more"):
                fed(other, RaggedCache(models["llama"].config), ids(9))

    def test_an_empty_cache_says_so(self, models):
        cache = RaggedCache(models["llama"].config)
        for asked in (cache.entries, lambda: cache.kept_positions(0, 0, 0), lambda: cache.evict(0, None)):
            with pytest.raises(InvalidInput, match="is empty; feed it a context"):
                asked()

    @pytest.mark.parametrize("count", ["a", None, 1.5, True])
    def test_cropping_by_what_is_no_number(self, models, count):
        cache = evicted(models["llama"], ids(10))
        with pytest.raises(InvalidInput, match="crop: expected a whole number"):
            cache.crop(count)

    def test_a_mask_of_four_dimensions_over_held_keys(self, models):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(10))
        with pytest.raises(InvalidInput, match="2D mask"):
            fed(models["llama"], cache, ids(4), attention_mask=torch.ones(1, 1, 4, 14, dtype=torch.bool))

    @pytest.mark.parametrize(
        ("call", "named"),
        [
            (lambda cache: cache.kept_positions(9, 0, 0), "kept_positions: layer"),
            (lambda cache: cache.kept_positions(0, 1, 0), "kept_positions: got sequence 1"),
            (lambda cache: cache.kept_positions(0, 0, -1), "kv_head"),
            (lambda cache: cache.evict("first", None), "evict: layer"),
            (lambda cache: cache.reorder_cache([0]), "reorder_cache"),
            (lambda cache: cache.reorder_cache(torch.tensor([1])), "reorder_cache"),
            (lambda cache: cache.reorder_cache(torch.tensor([0.0])), "reorder_cache"),
            (lambda cache: cache.batch_select_indices(torch.tensor([-1])), "reorder_cache"),
            (lambda cache: cache.batch_repeat_interleave(1.5), "batch_repeat_interleave: repeats"),
            (lambda cache: cache.batch_repeat_interleave(0), "batch_repeat_interleave: repeats"),
            (lambda cache: cache.save(None), "save: expected a path"),
            (lambda cache: RaggedCache.load(None, None), "load: expected a path"),
        ],
    )
    def test_arguments_that_cannot_be_are_named(self, models, call, named):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(10))
        with pytest.raises(InvalidInput, match=named):
            call(cache)
        assert cache.get_seq_length() == 10 and cache.layers[0].begin.shape[0] == 1

    @pytest.mark.parametrize("keep", [torch.ones(1, 2, 9, dtype=torch.bool), torch.ones(1, 2, 10)])
    def test_a_keep_mask_that_does_not_fit(self, models, keep):
        cache = RaggedCache(models["llama"].config)
        fed(models["llama"], cache, ids(10))
        with pytest.raises(InvalidInput, match="evict: keep"):
            cache.evict(0, keep)


@torch.no_grad()
def two_turns(
    model: transformers.PreTrainedModel,
    cache: transformers.Cache,
    contexts: list[torch.Tensor],
    questions: list[torch.Tensor],
) -> torch.Tensor:
    """Logits of padded questions over padded contexts."""
    batch, first = left_padded(contexts)
    more, second = left_padded(questions)
    mask = torch.cat([first, second], dim=1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model(batch, attention_mask=first, position_ids=places[:, : batch.shape[1]], past_key_values=cache)
    return model(more, attention_mask=mask, position_ids=places[:, batch.shape[1] :], past_key_values=cache).logits


@torch.no_grad()
def masked_logits(model: transformers.PreTrainedModel, tokens: torch.Tensor, keeps: list[torch.Tensor]) -> torch.Tensor:
    """Logits of what follows a context of which each head keeps `keeps`, by masking the full eager attention."""
    context = keeps[0].shape[2]
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def attention(module, query, key, value, attention_mask, **kwargs):
        bias = torch.zeros(1, query.shape[1], query.shape[2], key.shape[2])
        gone = ~keeps[module.layer_idx].repeat_interleave(group, dim=1)
        bias[:, :, context:, :context].masked_fill_(gone[:, :, None], -torch.inf)
        return eager(module, query, key, value, bias + attention_mask, **kwargs)

    from contourkv.models.eager import eager_attention

    eager = eager_attention(model.model.layers[0].self_attn)
    transformers.AttentionInterface.register("evicting", attention)
    transformers.AttentionMaskInterface.register("evicting", transformers.masking_utils.eager_mask)
    former = model.config._attn_implementation
    model.config._attn_implementation = "evicting"
    try:
        return model(tokens, use_cache=False).logits[:, context:]
    finally:
        model.config._attn_implementation = former
