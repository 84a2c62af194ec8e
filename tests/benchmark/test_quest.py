"""Quest against plain loops over heads and pages, against eager attention under a mask, and against the full cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids, left_padded
from capture.tiny_models import WINDOW, build
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from contourkv import held_bytes
from contourkv.benchmark import quest
from contourkv.benchmark.quest import PAGE, QuestCache, QuestLayer, chosen_pages, page_bounds, page_count, page_scores
from contourkv.errors import InvalidInput
from contourkv.models import load_model, load_tokenizer
from contourkv.models.eager import eager_attention

ROOT = Path(__file__).parents[2]
EXACT = 1e-9  # float64 logits, where no two pages' scores are near enough to change places
IN_FLOAT64 = tuple(name for name in ARCHITECTURES if name != "gpt_oss")  # whose experts know no float64


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def exact_models() -> dict[str, transformers.PreTrainedModel]:
    return {name: built(name, dtype=torch.float64) for name in IN_FLOAT64}


@torch.no_grad()
def fed(model: transformers.PreTrainedModel, cache: transformers.Cache, tokens: torch.Tensor, *stops: int, **given):
    """Logits of `tokens` fed in pieces that end at `stops` and at the end."""
    pieces, start = [], 0
    for stop in (*stops, tokens.shape[1]):
        pieces.append(model(tokens[:, start:stop], past_key_values=cache, **given).logits)
        start = stop
    return torch.cat(pieces, dim=1)


def sealed(
    model: transformers.PreTrainedModel, context: torch.Tensor, budgets: int | list[int], dense_layers: int = 0
) -> QuestCache:
    cache = QuestCache(model.config, dense_layers=dense_layers)
    fed(model, cache, context, logits_to_keep=1)
    cache.seal(budgets)
    return cache


def dense_logits(model: transformers.PreTrainedModel, context: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """Logits of the question's tokens behind the context over the full cache."""
    cache = DynamicCache(config=model.config)
    fed(model, cache, context.expand(len(question), -1), logits_to_keep=1)
    return fed(model, cache, question)


def pages_of(tokens: int) -> list[slice]:
    return [slice(start, min(start + 16, tokens)) for start in range(0, tokens, 16)]


def oracle_pages(query: torch.Tensor, keys: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Chosen pages (B, Hq, Q, P) by loops, in float64."""
    query, keys = query.double(), keys.double()
    group, pages = query.shape[1] // keys.shape[1], pages_of(keys.shape[2])
    chosen = torch.zeros(*query.shape[:3], len(pages), dtype=torch.bool)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for row in range(query.shape[2]):
                q, bounds = query[b, h, row], []
                for page in pages:
                    k = keys[b, h // group, page]
                    least, largest = k.min(dim=0).values, k.max(dim=0).values
                    bounds.append(float(torch.maximum(q * least, q * largest).sum()))
                best = sorted(range(len(pages)), key=lambda page, bounds=bounds: (-bounds[page], page))
                chosen[b, h, row, best[: counts[b]]] = True
    return chosen


def oracle_mask(chosen: torch.Tensor, context: int, appended: int) -> torch.Tensor:
    """Which of `context` + `appended` tokens the last rows see, bool (B, Hq, Q, N), from their chosen pages."""
    rows = chosen.shape[2]
    seen = torch.zeros(*chosen.shape[:3], context + appended, dtype=torch.bool)
    for index, page in enumerate(pages_of(context)):
        seen[..., page] = chosen[..., index, None]
    for row in range(rows):
        seen[:, :, row, context : context + appended - rows + row + 1] = True
    return seen


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(keys: torch.Tensor, values: torch.Tensor, counts: tuple[int, ...]) -> QuestLayer:
    """A sealed layer that selects pages."""
    layer = QuestLayer(0, None, True, "llama", 1)
    layer.fill(keys, values, keys.shape[2])
    layer.seal(counts)
    return layer


class TestPages:
    @given(seed=st.integers(0, 10**6), tokens=st.integers(1, 70), sharpness=st.sampled_from([0.1, 1.0, 100.0]))
    def test_no_key_of_a_page_scores_above_its_bound(self, seed, tokens, sharpness):
        query, keys = sharpness * drawn(seed, 2, 6, 3, 5), drawn(seed + 1, 2, 3, tokens, 5)
        bounds = page_scores(query, page_bounds(keys))
        scores = query @ keys.repeat_interleave(2, dim=1).transpose(2, 3)
        for index, page in enumerate(pages_of(tokens)):
            assert (scores[..., page].amax(-1) <= bounds[..., index] + 1e-12 * sharpness).all()

    @given(seed=st.integers(0, 10**6))
    def test_the_bound_of_a_single_key_is_its_score(self, seed):
        query, keys = drawn(seed, 1, 4, 2, 5), drawn(seed + 1, 1, 2, 33, 5)
        scores = query @ keys.repeat_interleave(2, dim=1).transpose(2, 3)
        last = page_scores(query, page_bounds(keys))[..., 2]  # keys 0-15, 16-31, and 32 alone
        assert torch.allclose(last, scores[..., 32], rtol=0, atol=1e-12)

    @settings(max_examples=60)
    @given(
        seed=st.integers(0, 10**6),
        tokens=st.integers(1, 90),
        group=st.integers(1, 3),
        rows=st.integers(1, 3),
        counts=st.lists(st.integers(1, 6), min_size=2, max_size=2),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        shared=st.booleans(),
    )
    def test_pages_are_those_of_plain_loops(self, seed, tokens, group, rows, counts, dtype, shared):
        query = drawn(seed, 2, 2 * group, rows, 5).to(dtype)
        keys = drawn(seed + 1, 1 if shared else 2, 2, tokens, 5).to(dtype)
        chosen = chosen_pages(query, page_bounds(keys), counts)
        assert torch.equal(chosen, oracle_pages(query, keys.expand(2, -1, -1, -1), counts))

    @settings(max_examples=60)
    @given(seed=st.integers(0, 10**6), tokens=st.integers(17, 150), count=st.integers(1, 9))
    def test_of_equal_bounds_the_earlier_page_is_taken(self, seed, tokens, count):
        """Small whole numbers: bounds are exact and many are equal."""
        query, keys = drawn(seed, 1, 2, 2, 2).round(), drawn(seed + 1, 1, 1, tokens, 2).round()
        assert torch.equal(chosen_pages(query, page_bounds(keys), [count]), oracle_pages(query, keys, [count]))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_keeps_bounds_exact_and_scores_in_float32(self, dtype):
        query, keys = drawn(1, 1, 4, 2, 8).to(dtype), drawn(2, 1, 2, 100, 8).to(dtype)
        bounds = page_bounds(keys)
        assert bounds.dtype == dtype
        assert torch.equal(bounds.double(), page_bounds(keys.double()))
        scores = page_scores(query, bounds)
        assert scores.dtype == torch.float32
        assert torch.allclose(scores.double(), page_scores(query.double(), bounds.double()), rtol=0, atol=1e-5)

    @given(budget=st.integers(1, 300), tokens=st.integers(1, 200))
    def test_a_budget_buys_whole_pages_at_least_one_and_all_only_with_all_tokens(self, budget, tokens):
        count, pages = page_count(budget, tokens), len(pages_of(tokens))
        assert 1 <= count <= pages
        assert count == 1 or count * 16 <= budget or budget >= tokens
        assert (count + 1) * 16 > budget or count == pages
        assert count == pages if budget >= tokens else True


class TestAttention:
    @settings(max_examples=80)
    @given(
        seed=st.integers(0, 10**6),
        tokens=st.integers(1, 150),
        group=st.integers(1, 3),
        rows=st.integers(1, 4),
        earlier=st.integers(0, 5),
        counts=st.lists(st.integers(1, 10), min_size=2, max_size=2),
        shared=st.booleans(),
        softcap=st.sampled_from([None, 2.0]),
        sinks=st.booleans(),
    )
    def test_output_is_eager_attention_with_minus_infinity_outside_the_chosen_pages(
        self, seed, tokens, group, rows, earlier, counts, shared, softcap, sinks
    ):
        contexts, appended = 1 if shared else 2, earlier + rows
        query = 2 * drawn(seed, 2, 2 * group, rows, 5)
        keys, values = drawn(seed + 1, contexts, 2, tokens, 5), drawn(seed + 2, contexts, 2, tokens, 3)
        tail_keys, tail_values = drawn(seed + 3, 2, 2, appended, 5), drawn(seed + 4, 2, 2, appended, 3)
        sink = drawn(seed + 5, 2 * group) if sinks else None
        layer = filled(keys, values, tuple(min(count, len(pages_of(tokens))) for count in counts))
        if earlier:
            layer.update(tail_keys[:, :, :earlier], tail_values[:, :, :earlier])
        layer.update(tail_keys[:, :, earlier:], tail_values[:, :, earlier:])
        ours = layer.attend(query, scaling=0.7, softcap=softcap, sinks=sink)

        chosen = oracle_pages(query, keys.expand(2, -1, -1, -1), counts)
        all_keys, all_values = (
            torch.cat([old.expand(2, -1, -1, -1), new], dim=2).repeat_interleave(group, dim=1)
            for old, new in ((keys, tail_keys), (values, tail_values))
        )
        scores = 0.7 * query @ all_keys.transpose(2, 3)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores[~oracle_mask(chosen, tokens, appended)] = -torch.inf
        if sink is not None:
            scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, -1, rows, 1)], dim=-1)
        theirs = scores.softmax(-1)[..., : tokens + appended] @ all_values
        assert torch.allclose(ours.transpose(1, 2), theirs, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
    def test_pages_that_no_head_chose_are_not_read(self, counts):
        """Numbers that would spoil every sum stand there."""
        query, keys, values = drawn(1, 2, 4, 1, 8), drawn(2, 2, 2, 600, 8), drawn(3, 2, 2, 600, 8)
        new = drawn(4, 2, 2, 1, 8)
        layer = filled(keys, values, counts)
        layer.update(new, new)
        expected = layer.attend(query, scaling=1.0)
        needed = oracle_pages(query, keys, list(counts)).unflatten(1, (2, 2)).any(dim=2)[:, :, 0]
        unread = ~needed.repeat_interleave(PAGE, dim=-1)[..., :600]
        keys[unread], values[unread] = torch.nan, torch.nan
        assert torch.equal(layer.attend(query, scaling=1.0), expected)

    @pytest.mark.parametrize("counts", [(2, 30), (1, 1)])
    def test_rows_in_blocks_and_pages_gathered_or_in_place_are_the_same(self, counts, monkeypatch):
        query, keys, new = drawn(1, 2, 4, 7, 8), drawn(2, 2, 2, 600, 8), drawn(4, 2, 2, 9, 8)
        outputs, reads = [], []
        for scores, gathered in ((2**23, 0.25), (1, 0.25), (2**23, 0.0), (2**23, 1.0), (20000, 1.0)):
            monkeypatch.setattr(quest, "SCORES", scores)
            monkeypatch.setattr(quest, "GATHERED", gathered)
            layer = filled(keys, keys + 1, counts)
            layer.update(new, new)
            outputs.append(layer.attend(query, scaling=1.0))
            reads.append(layer.read)
        for output, read in zip(outputs, reads, strict=True):
            assert torch.allclose(output, outputs[0], rtol=0, atol=1e-12)
            assert read == reads[0]

    @pytest.mark.parametrize("dense_layers", [0, 1])
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_model_attends_as_by_its_own_eager_attention_under_the_mask_of_plain_loops(
        self, models, architecture, dense_layers
    ):
        model, tokens = models[architecture], ids(78)
        cache = sealed(model, tokens[:, :70], 32, dense_layers)
        ours = fed(model, cache, tokens[:, 70:], 6, 7)
        theirs = paged_logits(model, tokens, 70, 2, dense_layers)
        assert (ours - theirs).abs().max() <= 1e-6
        if any(layer.bounds is not None for layer in cache.layers):
            assert (ours - dense_logits(model, tokens[:, :70], tokens[:, 70:])).abs().max() > 1e-5
        else:
            assert (architecture, dense_layers) == ("qwen2", 1)  # its second layer slides


@torch.no_grad()
def paged_logits(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, context: int, count: int, dense_layers: int
) -> torch.Tensor:
    """Logits of what follows a context of which each head and row sees `count` pages, by the full eager attention."""
    windows = [layer.window for layer in QuestCache(model.config).layers]

    def paging(module, query, key, value, attention_mask, **given):
        bias = torch.zeros(1, query.shape[1], query.shape[2], key.shape[2], dtype=query.dtype)
        if module.layer_idx >= dense_layers and windows[module.layer_idx] is None:
            chosen = oracle_pages(query[:, :, context:], key[:, :, :context], [count])
            seen = oracle_mask(chosen, context, key.shape[2] - context)
            bias[:, :, context:].masked_fill_(~seen, -torch.inf)
        return eager_attention(module)(module, query, key, value, bias + attention_mask, **given)

    transformers.AttentionInterface.register("paging", paging)
    transformers.AttentionMaskInterface.register("paging", transformers.masking_utils.eager_mask)
    former = model.config._attn_implementation
    model.config._attn_implementation = "paging"
    try:
        return model(tokens, use_cache=False).logits[:, context:]
    finally:
        model.config._attn_implementation = former


class TestWholeBudget:
    @settings(max_examples=8)
    @given(
        context=st.integers(1, 90),
        stops=st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted),
        more=st.integers(0, 100),
        dense_layers=st.integers(0, 2),
    )
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_logits_are_those_of_the_full_cache(self, models, architecture, context, stops, more, dense_layers):
        model, tokens = models[architecture], ids(context + 12)
        cache = sealed(model, tokens[:, :context], context + more, dense_layers)
        ours = fed(model, cache, tokens[:, context:], *stops)
        theirs = dense_logits(model, tokens[:, :context], tokens[:, context:])
        assert (ours - theirs).abs().max() <= TOLERANCE

    @pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float64, 1e-9)])
    def test_other_dtypes(self, dtype, tolerance):
        model, tokens = build("qwen3", dtype), ids(60)
        ours = fed(model, sealed(model, tokens[:, :50], 50), tokens[:, 50:], 6, 7)
        theirs = dense_logits(model, tokens[:, :50], tokens[:, 50:])
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_generate_goes_on_from_the_sealed_context(self, models, architecture):
        """In transformers' convention for a filled cache: the ids of everything."""
        model, tokens = models[architecture], ids(50)
        theirs = model.generate(tokens, max_new_tokens=40, do_sample=False)
        cache = sealed(model, tokens[:, :44], 44)
        assert torch.equal(model.generate(tokens, max_new_tokens=40, do_sample=False, past_key_values=cache), theirs)


class TestFeeding:
    @settings(max_examples=10)
    @given(
        stops=st.lists(st.integers(1, 11), max_size=11, unique=True).map(sorted),
        budget=st.integers(1, 80),
        seed=st.integers(0, 99),
    )
    @pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
    def test_a_question_fed_at_once_is_one_fed_token_by_token(self, exact_models, architecture, stops, budget, seed):
        model, tokens = exact_models[architecture], ids(82, seed)
        cache = sealed(model, tokens[:, :70], budget)
        once, read = fed(model, cache, tokens[:, 70:]), cache.read_bytes()
        cache.rollback()
        assert (fed(model, cache, tokens[:, 70:], *stops) - once).abs().max() <= EXACT
        assert cache.read_bytes() == read

    @pytest.mark.parametrize("architecture", IN_FLOAT64)
    def test_a_context_may_be_fed_in_pieces(self, exact_models, architecture):
        model, tokens = exact_models[architecture], ids(80)
        whole = fed(model, sealed(model, tokens[:, :70], 32), tokens[:, 70:])
        cache = QuestCache(model.config, dense_layers=0)
        fed(model, cache, tokens[:, :70], 30, 68, 69)
        cache.seal(32)
        assert (fed(model, cache, tokens[:, 70:]) - whole).abs().max() <= EXACT

    @settings(max_examples=10)
    @given(budgets=st.lists(st.integers(1, 90), min_size=1, max_size=5), seed=st.integers(0, 99))
    @pytest.mark.parametrize("architecture", ["qwen2", "olmo2", "gemma3_text"])
    def test_several_budgets_of_one_context_are_as_each_alone(self, exact_models, architecture, budgets, seed):
        model, context = exact_models[architecture], ids(70, seed)
        questions = torch.cat([ids(6, seed + 1 + row) for row in range(len(budgets))])
        cache = sealed(model, context, budgets)
        together, read = fed(model, cache, questions, 4, 5), cache.read_bytes()
        for row, budget in enumerate(budgets):
            alone = sealed(model, context, budget)
            assert (fed(model, alone, questions[row : row + 1], 4, 5) - together[row]).abs().max() <= EXACT
            assert alone.read_bytes() == [read[row]]

    @pytest.mark.parametrize("architecture", IN_FLOAT64)
    def test_several_contexts_are_as_each_alone(self, exact_models, architecture):
        model, tokens = exact_models[architecture], torch.cat([ids(80, seed) for seed in range(3)])
        budgets = [16, 70, 33]
        cache = sealed(model, tokens[:, :70], budgets)
        together, read = fed(model, cache, tokens[:, 70:], 4, 5), cache.read_bytes()
        for row, budget in enumerate(budgets):
            alone = sealed(model, tokens[row : row + 1, :70], budget)
            assert (fed(model, alone, tokens[row : row + 1, 70:], 4, 5) - together[row]).abs().max() <= EXACT
            assert alone.read_bytes() == [read[row]]

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_rollback_returns_to_the_context_bit_for_bit(self, models, architecture):
        model, context = models[architecture], ids(70)
        cache = sealed(model, context, 32)
        before, first = held_bytes(cache), fed(model, cache, ids(9, 5), 7, 8)
        read = cache.read_bytes()
        assert held_bytes(cache).payload > before.payload
        for _ in range(2):
            cache.rollback()
            assert (held_bytes(cache), cache.get_seq_length()) == (before, 70)
            fed(model, cache, ids(20, 6))
            cache.rollback()
            assert torch.equal(fed(model, cache, ids(9, 5), 7, 8), first)
            assert cache.read_bytes() == read

    def test_a_sealed_context_can_be_sealed_with_other_budgets(self, models):
        model, context = models["llama"], ids(70)
        cache = sealed(model, context, 16)
        bounds = cache.layers[0].bounds
        cache.seal([48, 70])
        assert cache.pages == (3, 5)
        assert cache.layers[0].bounds is bounds
        ours = fed(model, cache, ids(5, 4).expand(2, -1))
        assert torch.equal(ours, fed(model, sealed(model, context, [48, 70]), ids(5, 4).expand(2, -1)))

    def test_an_interrupted_forward_pass_is_noticed_and_rolled_back(self, models):
        model, cache = models["llama"], sealed(models["llama"], ids(70), 32)
        expected = fed(model, cache, ids(5, 4))
        cache.rollback()
        cache.layers[0].update(*(torch.zeros(1, 2, 1, 8),) * 2)
        with pytest.raises(InvalidInput, match="interrupted"):
            fed(model, cache, ids(5, 4))
        cache.rollback()
        assert torch.equal(fed(model, cache, ids(5, 4)), expected)


class TestGivenKeys:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_cache_of_given_keys_is_one_that_was_fed(self, models, architecture):
        """Sliding layers of transformers' own cache hold no more than the next token can see."""
        model, context, question = models[architecture], ids(70), ids(6, 4).expand(3, -1)
        full = DynamicCache(config=model.config)
        fed(model, full, context)
        keys, values = [layer.keys for layer in full.layers], [layer.values for layer in full.layers]
        cache = QuestCache.of(model.config, keys, values, [16, 40, 70], dense_layers=1)
        ours, theirs = fed(model, cache, question, 5), fed(model, sealed(model, context, [16, 40, 70], 1), question, 5)
        assert (ours - theirs).abs().max() <= TOLERANCE

    def test_storage_is_shared_with_the_giver_and_between_sequences(self, models):
        model, context = models["gemma3_text"], ids(70)
        whole = DynamicCache()
        fed(model, whole, context)
        keys, values = [layer.keys for layer in whole.layers], [layer.values for layer in whole.layers]
        cache = QuestCache.of(model.config, keys, values, [16] * 5, dense_layers=0)
        sliding, paged = cache.layers
        assert (paged.keys.data_ptr(), paged.values.data_ptr()) == (keys[1].data_ptr(), values[1].data_ptr())
        assert torch.equal(sliding.keys, keys[0][:, :, -(WINDOW - 1) :])
        entry = 2 * 2 * 16 * 4  # keys and values, 2 KV heads of 16, float32
        held = held_bytes(cache)
        assert held.payload == entry * (70 + WINDOW - 1)
        assert (held.slack, held.metadata) == (0, entry * 5)
        fed(model, cache, ids(3, 4).expand(5, -1))
        assert held_bytes(cache).payload == entry * (70 + WINDOW - 1 + 2 * 5 * 3)
        assert keys[1].shape[2] == 70

    def test_a_longer_true_length_moves_the_positions(self, exact_models):
        """All layers slide: what they hold does not say how long the context was."""
        model = build("qwen2", torch.float64, max_window_layers=0, layer_types=["sliding_attention"] * 2)
        context, question = ids(70), ids(6, 4)
        full = DynamicCache(config=model.config)
        fed(model, full, context)
        keys, values = [layer.keys for layer in full.layers], [layer.values for layer in full.layers]
        assert keys[0].shape[2] == WINDOW - 1
        cache = QuestCache.of(model.config, keys, values, 16, length=70)
        assert (fed(model, cache, question, 3) - dense_logits(model, context, question)).abs().max() <= EXACT


class TestBytes:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_everything_is_held_and_the_bounds_on_top(self, models, architecture):
        model = models[architecture]
        cache = sealed(model, ids(70), 16, 1)
        held, entry = held_bytes(cache), 2 * 2 * cache.layers[0].keys.shape[3] * 4
        tokens = [70 if layer.window is None else min(70, WINDOW - 1) for layer in cache.layers]
        assert held.payload == entry * sum(tokens)
        assert held.slack == 0
        assert held.metadata == (entry * 5 if cache.layers[1].window is None else 0)  # a page costs as an entry does

    def test_read_bytes_by_hand(self):
        """Two query heads of a KV head choose pages 0 and 2, 2 and 4: three are read, the last of 6 tokens."""
        axes = torch.eye(4, dtype=torch.float64)
        keys = torch.zeros(1, 1, 70, 4, dtype=torch.float64)
        for page, axis in ((0, 0), (2, 1), (4, 2)):
            keys[0, 0, 16 * page + 1] = axes[axis]
        values = torch.zeros(1, 1, 70, 3, dtype=torch.float64)
        layer = filled(keys, values, (2,))
        layer.update(keys[:, :, :1], values[:, :, :1])
        layer.attend(torch.stack([axes[0] + axes[1], axes[1] + axes[2]]).view(1, 2, 1, 4), scaling=1.0)
        assert layer.read == [(16 + 16 + 6) * (4 + 3) * 8]
        layer.update(keys[:, :, :1], values[:, :, :1])
        layer.attend(torch.stack([axes[1] + axes[2]] * 2).view(1, 2, 1, 4), scaling=1.0)
        assert layer.read == [(16 + 16 + 6 + 16 + 6) * (4 + 3) * 8]

    @settings(max_examples=15)
    @given(seed=st.integers(0, 10**6), count=st.integers(1, 5), rows=st.integers(1, 4))
    def test_read_bytes_of_a_layer_are_those_of_plain_loops(self, seed, count, rows):
        query, keys = drawn(seed, 1, 6, rows, 4), drawn(seed + 1, 1, 2, 70, 4)
        layer = filled(keys, keys, (count,))
        layer.update(*(drawn(seed + 2, 1, 2, rows, 4),) * 2)
        layer.attend(query, scaling=1.0)
        chosen, tokens = oracle_pages(query, keys, [count]), 0
        for head in range(2):
            for row in range(rows):
                for index, page in enumerate(pages_of(70)):
                    if chosen[0, 3 * head : 3 * head + 3, row, index].any():
                        tokens += page.stop - page.start
        assert layer.read == [tokens * 2 * 4 * 8]

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_with_every_page_a_token_reads_all_that_it_sees_of_the_context(self, models, architecture):
        model = models[architecture]
        cache = sealed(model, ids(70), [70, 16])
        fed(model, cache, ids(3, 4).expand(2, -1), 2)
        entry = 2 * 2 * cache.layers[0].keys.shape[3] * 4
        seen = [70 if layer.window is None else WINDOW - 2 for layer in cache.layers]  # of 23, 22 and 21 the mean
        whole, part = cache.read_bytes()
        assert whole == entry * sum(seen)
        assert part < whole


class TestManners:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_nothing_is_left_on_the_model(self, models, architecture):
        model, tokens = models[architecture], ids(80)
        before = fed(model, DynamicCache(config=model.config), tokens)
        state = [(sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
        fed(model, sealed(model, tokens[:, :70], 16), tokens[:, 70:], 5)
        assert state == [(sorted(vars(module)), len(module._forward_pre_hooks)) for module in model.modules()]
        assert torch.equal(fed(model, DynamicCache(config=model.config), tokens), before)

    def test_beside_kvpress_which_wraps_every_attention_function(self, exact_models, monkeypatch):
        kvpress = pytest.importorskip("kvpress")
        model, tokens = exact_models["llama"], ids(80)
        before = fed(model, sealed(model, tokens[:, :70], 32), tokens[:, 70:], 5)
        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
        kvpress.attention_patch.patch_attention_functions()  # once more: around what recognises our keys
        assert torch.equal(fed(model, sealed(model, tokens[:, :70], 32), tokens[:, 70:], 5), before)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_padding_is_refused_in_the_context_and_after_it(self, implementation):
        model = built("llama", attn_implementation=implementation)
        batch, mask = left_padded([ids(40), ids(37)])
        with pytest.raises(InvalidInput, match="padding"):
            fed(model, QuestCache(model.config), batch, attention_mask=mask)
        cache = sealed(model, ids(40).expand(2, -1), 16)
        whole = torch.ones(2, 45, dtype=torch.long)
        whole[1, 40] = 0
        with pytest.raises(InvalidInput, match="padding"):
            fed(model, cache, ids(5).expand(2, -1), attention_mask=whole)
        cache.rollback()
        logits = fed(model, cache, ids(5).expand(2, -1), attention_mask=torch.ones(2, 45, dtype=torch.long))
        cache.rollback()
        assert torch.equal(logits, fed(model, cache, ids(5).expand(2, -1)))

    @pytest.mark.parametrize(
        "call, said",
        [
            (lambda c: QuestCache(c.config, dense_layers=-1), "dense_layers"),
            (lambda c: QuestCache("llama"), "config"),
            (lambda c: QuestCache(c.config).seal(16), "empty"),
            (lambda c: QuestCache(c.config).rollback(), "not sealed"),
            (lambda c: QuestCache(c.config).read_bytes(), "no token"),
            (lambda c: QuestCache(c.config).pages, "not sealed"),
            (lambda c: c.cache.seal(0), "budgets"),
            (lambda c: c.cache.seal(0.5), "budgets"),
            (lambda c: c.cache.seal("16"), "budgets"),
            (lambda c: c.cache.seal([16, True]), "budgets"),
            (lambda c: c.cache.seal([]), "budgets"),
            (lambda c: c.pair.seal([16, 16, 16]), "3 for 2"),
            (lambda c: c.cache.crop(3), "rollback"),
            (lambda c: c.cache.batch_repeat_interleave(2), "seal"),
            (lambda c: fed(c.model, c.cache, ids(4).expand(2, -1)), "1 sequence"),
            (lambda c: fed(c.other, c.cache, ids(4)), "KV heads|made for"),
            (lambda c: QuestCache.of(c.config, c.keys[:1], c.keys, 16), "1 and 2 layers"),
            (lambda c: QuestCache.of(c.config, [c.keys[0][0]] * 2, c.keys, 16), "layer 0"),
            (lambda c: QuestCache.of(c.config, [c.keys[0], c.keys[1][:, :, 1:]], c.keys, 16), "layer 1"),
            (lambda c: QuestCache.of(c.config, c.keys, c.keys, 16, length=71), "layer 0 has those of 70"),
            (lambda c: QuestCache.of(c.config, [key.long() for key in c.keys], c.keys, 16), "float32"),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_clear_line(self, models, call, said):
        class Case:
            model, other, config = models["llama"], models["qwen3"], models["llama"].config
            cache = sealed(models["llama"], ids(70), 16)
            pair = sealed(models["llama"], ids(70).expand(2, -1), 16)
            keys = [torch.zeros(1, 2, 70, 8)] * 2

        with pytest.raises(InvalidInput, match=said) as caught:
            call(Case)
        assert "\n" not in str(caught.value)

    def test_tokens_behind_the_seal_must_be_rolled_back_before_another(self, models):
        cache = sealed(models["llama"], ids(70), 16)
        fed(models["llama"], cache, ids(2))
        with pytest.raises(InvalidInput, match="rollback"):
            cache.seal(32)

    def test_training_is_refused(self):
        model = build("llama").train()
        with pytest.raises(InvalidInput, match="eval"):
            model(ids(4), past_key_values=QuestCache(model.config))


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models_read_little_and_lose_little(name):
    """At every page the logits of the full cache; at a quarter of them a loss within a twentieth of it."""
    folder = ROOT / "resources" / "models" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not prepared: snakemake --cores 2 models_all")
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("|", "!", " ", "make", "snakemake")))
    tokens = load_tokenizer(folder)(text, return_tensors="pt").input_ids[:, :650]
    model = load_model(folder, dtype="float32")
    context, rest = tokens[:, :600], tokens[:, 600:]
    cache = sealed(model, context, [600, 150], quest.DENSE_LAYERS)
    whole, part = fed(model, cache, rest.expand(2, -1), 49)
    full = dense_logits(model, context, rest)[0]
    assert (whole - full).abs().max() <= 1e-4
    losses = [float(torch.nn.functional.cross_entropy(logits[:-1], rest[0, 1:])) for logits in (full, part)]
    assert abs(losses[1] - losses[0]) <= 0.05 * losses[0]
    read_whole, read_part = (
        sum(read) for read in zip(*(layer.read for layer in cache.layers if layer.bounds is not None), strict=True)
    )
    assert read_part < 0.8 * read_whole
