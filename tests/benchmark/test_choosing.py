"""Kept sets: kvpress's own presses run for real as the reference, ContourKV's too, and bytes that a budget pays for."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, built, ids
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv import ContourKVPress, RaggedCache, held_bytes
from contourkv.benchmark.answering import answers
from contourkv.benchmark.choosing import ROWS, SCORES, Chooser, Chosen, _ratio_for, ratio_of, with_recent, with_sinks
from contourkv.benchmark.costs import published_press
from contourkv.benchmark.methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, RECTANGULAR, Method
from contourkv.benchmark.reading import Reading
from contourkv.benchmark.running import Cell
from contourkv.benchmark.storing import MaskedStorage, RaggedStorage, RectangularStorage, Storage
from contourkv.errors import InvalidInput
from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model
from contourkv.press.contour import TABLE_BYTES, entry_bytes
from contourkv.press.scores import PressScorer, attention_modules, untouched

KVPRESS = importlib.util.find_spec("kvpress") is not None
needs_kvpress = pytest.mark.skipif(not KVPRESS, reason="kvpress is not installed")
logging.getLogger("kvpress").setLevel(logging.ERROR)

SEED, TOKENS = 5, 200
EQUAL = [name for name, method in METHODS.items() if method.keeps == "equal"]
HEADS = [name for name, method in METHODS.items() if method.keeps == "heads"]
CONTOUR = [name for name, method in METHODS.items() if method.keeps == "ragged"]
CONTEXT = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(3))
QUESTION = [40, 7, 201, 66, 93]
TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<m>{% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, transformers.PreTrainedModel]:
    """Tiny models with a tokenizer, "chat" one with a chat template."""
    found = {}
    for name in ("llama", "qwen2", "qwen3", "gemma3_text", "chat"):
        folder = tmp_path_factory.mktemp(name)
        make_model({"architecture": "llama" if name == "chat" else name, "seed": 3}, folder, name)
        if name == "chat":
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        found[name] = load_model(folder)
    return found


@pytest.fixture(scope="module")
def readings(models) -> dict[str, Reading]:
    return {name: Reading.of(model, CONTEXT) for name, model in models.items()}


def chooser_of(reading: Reading, seed: int = SEED) -> Chooser:
    return Chooser(reading, held_bytes(reading.full_cache()).payload, seed)


@pytest.fixture(scope="module")
def choosers(readings) -> dict[str, Chooser]:
    return {name: chooser_of(reading) for name, reading in readings.items()}


def stored(reading: Reading, method: Method, storage: str, budget: float, *chosen: Chosen) -> Storage:
    return Cell(method, storage, AGNOSTIC, budget).kind(reading, chosen)


@contextmanager
def seeded(model: torch.nn.Module) -> Iterator[None]:
    """Draws in a layer's attention and after it start from the seed that a chooser gives that layer."""

    def seed(module: torch.nn.Module, args: tuple) -> None:
        torch.manual_seed(SEED * 100_003 + module.layer_idx)

    hooks = [module.register_forward_pre_hook(seed) for module in attention_modules(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def compressed(model, press, context: torch.Tensor, eager: bool = False) -> Iterator[DynamicCache]:
    """What the press, run for real, leaves in a cache and on the modules; afterwards the model is as it was."""
    cache, former = DynamicCache(), model.config._attn_implementation
    try:
        if eager:
            model.set_attn_implementation("eager")
        with torch.no_grad(), untouched(model):
            with seeded(model), press(model):
                model.model(input_ids=context, past_key_values=cache)
            model.set_attn_implementation(former)
            yield cache
    finally:
        model.set_attn_implementation(former)


def asked(model, cache, tokens: int, question: list[int] = QUESTION) -> torch.Tensor:
    places = torch.arange(tokens, tokens + len(question)).unsqueeze(0)
    with torch.no_grad():
        return model(torch.tensor([question]), past_key_values=cache, position_ids=places).logits


def assert_as_published(reading: Reading, method: Method, budget: float, chosen: Chosen) -> None:
    """The same tensors as the real press leaves, the same keys dropped, the same logits and answer over them."""
    model, tokens = reading.model, reading.tokens
    rounding = 1e-5 if method.name == "h2o" else 0  # its press attends eagerly
    with compressed(model, published_press(method, ratio_of(budget)), reading.ids, method.name == "h2o") as real:
        dropped = [getattr(module, "masked_key_indices", None) for module in attention_modules(model)]
        storage = stored(reading, method, PUBLISHED, budget, chosen)
        assert type(storage) is (MaskedStorage if method.keeps == "heads" else RectangularStorage)
        for index, (layer, theirs) in enumerate(zip(storage.cache.layers, real.layers, strict=True)):
            (mine,) = [layer] if method.keeps == "heads" else layer.rectangles
            torch.testing.assert_close(mine.keys, theirs.keys, atol=rounding, rtol=0)
            torch.testing.assert_close(mine.values, theirs.values, atol=rounding, rtol=0)
            if method.keeps == "heads":
                assert dropped[index] is not None
                own = {tuple(at) for at in torch.stack(storage.masks[index], dim=1).tolist()}
                assert own == {tuple(at) for at in torch.stack(dropped[index], dim=1).tolist()}
                assert own == {(0, *at) for at in (~chosen.keep[index]).nonzero().tolist()}
        wanted = asked(model, real, tokens)
        for layer in real.layers:
            layer.keys, layer.values = (part[:, :, : -len(QUESTION)] for part in (layer.keys, layer.values))
        answer = answers(model, real, QUESTION, tokens, 1, 6, frozenset())
    with storage.ready():
        torch.testing.assert_close(asked(model, storage.cache, tokens), wanted, atol=10 * rounding, rtol=0)
        storage.forget()
        assert answers(model, storage.cache, QUESTION, tokens, 1, 6, frozenset()) == answer


@needs_kvpress
class TestAsPublished:
    @pytest.mark.parametrize("name", [*EQUAL, *HEADS])
    @pytest.mark.parametrize("budget", [0.25, 0.5, 0.9])
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    def test_is_what_the_real_press_leaves(self, readings, choosers, architecture, budget, name):
        chosen = choosers[architecture].choose(METHODS[name], PUBLISHED, budget)
        assert_as_published(readings[architecture], METHODS[name], budget, chosen)

    @pytest.mark.parametrize(
        ("tokens", "name"),
        [
            *((30, name) for name in ("streaming_llm", "knorm", "tova", "h2o", "compactor", "random")),
            *((120, name) for name in ("streaming_llm", "tova", "snapkv", "h2o", "compactor", "adakv_snapkv")),
        ],
    )
    def test_also_with_sliding_layers(self, models, tokens, name):
        """Within their window and beyond: kvpress compresses a cache that holds every key of them."""
        reading = Reading.of(models["gemma3_text"], CONTEXT[:, :tokens])
        assert_as_published(reading, METHODS[name], 0.5, chooser_of(reading).choose(METHODS[name], PUBLISHED, 0.5))

    @settings(max_examples=25)
    @given(
        name=st.sampled_from([*EQUAL, *HEADS]),
        tokens=st.integers(66, 190),
        percent=st.integers(3, 97),
    )
    def test_at_any_length_and_budget(self, models, name, tokens, percent):
        reading, budget = Reading.of(models["llama"], CONTEXT[:, :tokens]), percent / 100
        chosen = chooser_of(reading).choose(METHODS[name], PUBLISHED, budget)
        assert_as_published(reading, METHODS[name], budget, chosen)

    @pytest.mark.parametrize("budget", [0.1, 0.5])
    def test_kvzip_behind_a_chat_template(self, models, readings, choosers, budget):
        """kvpress does not replay the template: its keys score 0, and the first four stay by rule."""
        assert float(choosers["chat"]._scores("kvzip")[0][0][..., :3].abs().sum()) == 0
        chosen = choosers["chat"].choose(METHODS["kvzip"], PUBLISHED, budget)
        assert_as_published(readings["chat"], METHODS["kvzip"], budget, chosen)
        for storage in METHODS["kvzip"].storages:
            assert all(keep[:, :4].all() for keep in choosers["chat"].choose(METHODS["kvzip"], storage, budget).keep)

    @pytest.mark.parametrize("name", [*EQUAL, *HEADS])
    def test_the_whole_budget_keeps_everything(self, choosers, name):
        chosen = choosers["llama"].choose(METHODS[name], PUBLISHED, 1.0)
        assert all(keep.all() and keep.shape == (2, TOKENS) for keep in chosen.keep)

    @pytest.mark.parametrize("architecture", ["llama", "qwen3"])
    def test_h2o_keeps_the_heavy_half_of_observed_attention_and_the_last(
        self, models, readings, choosers, architecture
    ):
        import kvpress

        model, count = models[architecture], 60
        with compressed(model, kvpress.ObservedAttentionPress(0.7), CONTEXT, eager=True) as real:
            assert real.get_seq_length() == count
        scores = choosers[architecture]._scores("observed_attention")[0]
        chosen = choosers[architecture].choose(METHODS["h2o"], PUBLISHED, 0.3)
        for index, (layer, score) in enumerate(zip(readings[architecture].layers, scores, strict=True)):
            heavy = with_recent(score, 0).topk(count, dim=-1).indices[0]
            mine = layer.keys[0][torch.arange(2)[:, None], heavy]
            torch.testing.assert_close(mine, real.layers[index].keys[0], atol=1e-5, rtol=0)
            assert chosen.keep[index].sum(dim=1).tolist() == [count] * 2
            assert chosen.keep[index][:, TOKENS - count // 2 :].all()
            others = score[0, :, : TOKENS - count // 2].topk(count // 2, dim=-1).indices
            assert chosen.keep[index].gather(1, others).all()

    @pytest.mark.parametrize("name", ["adakv_snapkv", "adakv_expected_attention"])
    @pytest.mark.parametrize("budget", [0.1, 0.25, 0.8])
    def test_a_rectangle_is_the_choice_of_equal_counts_by_the_same_scores(self, choosers, name, budget):
        rectangle = choosers["llama"].choose(METHODS[name], RECTANGULAR, budget)
        equal = choosers["llama"].choose(METHODS[METHODS[name].scores], ENFORCED, budget)
        assert all(map(torch.equal, rectangle.keep, equal.keep)) and rectangle.order is None

    @pytest.mark.parametrize("architecture", ["llama", "chat"])
    @pytest.mark.parametrize("budget", [0.1, 0.25, 0.8])
    def test_kvzips_rectangle_has_its_sinks_and_its_largest_scores(self, choosers, architecture, budget):
        chooser = choosers[architecture]
        chosen = chooser.choose(METHODS["kvzip"], RECTANGULAR, budget)
        count = int(chooser.choose(METHODS["knorm"], ENFORCED, budget).keep[0][0].sum())
        for keep, score in zip(chosen.keep, chooser._scores("kvzip")[0], strict=True):
            assert keep.sum(dim=1).tolist() == [count] * 2 and keep[:, :4].all()
            rest, left = score[0, :, 4:], keep[:, 4:]
            dropped = rest.masked_fill(left, -1).amax(dim=1)
            assert (rest.masked_fill(~left, 2).amin(dim=1) >= dropped).all()


def counts(chosen: Chosen) -> list[list[int]]:
    return [keep.sum(dim=1).tolist() for keep in chosen.keep]


def assert_paid(reading: Reading, method: Method, budget: float, chosen: Chosen, nominal: int) -> None:
    """Within the bytes, every one that buys another entry spent, and nothing kept that a window cannot show."""
    storage = RaggedStorage(reading, [chosen])
    held = held_bytes(storage.cache)
    assert held.total <= nominal and held.slack == 0
    assert storage.held() == [held]
    tokens = reading.tokens
    available = [tokens - layer.first for layer in reading.layers]
    for keep, layer in zip(chosen.keep, reading.layers, strict=True):
        assert not keep[:, : layer.first].any()
    heads = [layer.keys.shape[1] for layer in reading.layers]
    cost = entry_bytes(reading.layers[0].keys, reading.layers[0].values)
    kept = [sum(layer) for layer in counts(chosen)]
    assert sum(kept) == storage.entries()[0]
    if sum(kept) == sum(h * n for h, n in zip(heads, available, strict=True)):
        return
    if method.keeps == "ragged" or method.scores == "kvzip":
        assert nominal - held.total < cost
        return
    # One share of what is available, in all layers: no layer has an entry a head less than it.
    per_head = [each / h for each, h in zip(kept, heads, strict=True)]
    share = (nominal - TABLE_BYTES * sum(heads)) / sum(h * n * cost for h, n in zip(heads, available, strict=True))
    for each, most in zip(per_head, available, strict=True):
        assert each == math.floor(Fraction(share).limit_denominator(10**9) * most)
    if method.keeps == "equal":
        assert all(len(set(layer)) == 1 for layer in counts(chosen))


@functools.cache
def own_model(architecture: str) -> transformers.PreTrainedModel:
    return built(architecture)


@functools.cache
def own_reading(architecture: str, tokens: int) -> Reading:
    return Reading.of(own_model(architecture), ids(tokens))


class TestEnforced:
    @needs_kvpress
    @settings(max_examples=100)
    @given(
        name=st.sampled_from([*EQUAL, *HEADS, *CONTOUR]),
        tokens=st.integers(1, 180),
        budget=st.integers(1, 100).map(lambda percent: percent / 100),
        architecture=st.sampled_from(["llama", "qwen3", "gemma3_text"]),
    )
    def test_the_bytes_pay_for_it(self, models, name, tokens, budget, architecture):
        assume(not (architecture == "gemma3_text" and METHODS[name].scores == "kvzip"))
        reading, method = Reading.of(models[architecture], CONTEXT[:, :tokens]), METHODS[name]
        chooser = chooser_of(reading)
        nominal = chooser.nominal_bytes(budget)
        try:
            chosen = chooser.choose(method, ENFORCED, budget)
        except InvalidInput as error:
            assert "not hold one entry in each" in str(error) and "\n" not in str(error)
            available = [tokens - layer.first for layer in reading.layers]
            least = entry_bytes(reading.layers[0].keys, reading.layers[0].values)
            share = (nominal - TABLE_BYTES * 6) / (2 * least * sum(available))
            assert min(share * each for each in available) < 1 + 1e-9
            return
        assert_paid(reading, method, budget, chosen, nominal)

    @settings(max_examples=60)
    @given(
        tokens=st.integers(1, 120),
        budget=st.integers(1, 100).map(lambda percent: percent / 100),
        architecture=st.sampled_from(ARCHITECTURES),
    )
    def test_contourkv_by_its_own_mass_needs_no_kvpress(self, tokens, budget, architecture):
        reading = own_reading(architecture, tokens)
        chooser = chooser_of(reading)
        try:
            chosen = chooser.choose(METHODS["contour"], ENFORCED, budget)
        except InvalidInput as error:
            assert "does not hold one entry in each of 4 KV heads" in str(error)
            least = entry_bytes(reading.layers[0].keys, reading.layers[0].values) + TABLE_BYTES
            assert chooser.nominal_bytes(budget) < 4 * least
            return
        assert_paid(reading, METHODS["contour"], budget, chosen, chooser.nominal_bytes(budget))

    @needs_kvpress
    @pytest.mark.parametrize("name", [name for name in EQUAL if name != "h2o"])
    def test_keeps_of_what_is_published_the_best(self, choosers, name):
        """The same scores, cut a little earlier, for positions and tables have to be paid."""
        for budget in (0.4, 0.6, 0.9):  # SnapKV's window, whose keys score the same, is a third of the context
            published = choosers["llama"].choose(METHODS[name], PUBLISHED, budget)
            enforced = choosers["llama"].choose(METHODS[name], ENFORCED, budget)
            for wide, narrow in zip(published.keep, enforced.keep, strict=True):
                assert 0 < int(narrow[0].sum()) < int(wide[0].sum()) and not (narrow & ~wide).any()
            if name == "streaming_llm":  # its scores are those of one count
                continue
            for score, keep in zip(choosers["llama"]._scores(name, ratio_of(budget))[0], enforced.keep, strict=True):
                dropped = score[0].masked_fill(keep, -torch.inf).amax(dim=1)
                assert (score[0].masked_fill(~keep, torch.inf).amin(dim=1) >= dropped).all()

    @needs_kvpress
    @pytest.mark.parametrize("storage", [PUBLISHED, ENFORCED])
    @pytest.mark.parametrize("name", [name for name in EQUAL if name not in ("h2o", "compactor")])
    def test_a_larger_budget_keeps_what_a_smaller_one_does(self, choosers, name, storage):
        """Not so of H2O, whose recent half grows, and of Compactor, which scores by the budget."""
        keeps = [choosers["qwen3"].choose(METHODS[name], storage, b).keep for b in (0.4, 0.5, 0.7, 0.95)]
        for smaller, larger in pairwise(keeps):
            assert not any((small & ~large).any() for small, large in zip(smaller, larger, strict=True))

    @needs_kvpress
    @pytest.mark.parametrize(
        ("architecture", "name"),
        [*(("qwen2", name) for name in HEADS), *(("gemma3_text", name) for name in HEADS if name != "kvzip")],
    )
    def test_a_rectangle_too_is_within_the_nominal_bytes(self, readings, choosers, architecture, name):
        chooser = choosers[architecture]
        for budget in (0.1, 0.33, 0.75):
            chosen = chooser.choose(METHODS[name], RECTANGULAR, budget)
            held = held_bytes(stored(readings[architecture], METHODS[name], RECTANGULAR, budget, chosen).cache)
            assert held.total <= chooser.nominal_bytes(budget)
            assert all(len(set(layer)) == 1 for layer in counts(chosen))


def kept_by(press: ContourKVPress, model: transformers.PreTrainedModel, context: torch.Tensor) -> list[torch.Tensor]:
    cache = RaggedCache(model.config)
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    keeps = []
    for index, entries in enumerate(cache.entries()):
        keep = torch.zeros(entries.shape[1], context.shape[1], dtype=torch.bool)
        for head in range(entries.shape[1]):
            keep[head, cache.kept_positions(index, 0, head)] = True
        keeps.append(keep)
    return keeps


class TestContour:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("budget", [0.1, 0.4, 1.0])
    def test_by_its_own_mass_it_is_what_its_press_keeps(self, architecture, budget):
        model, context = own_model(architecture), ids(90)
        chooser = chooser_of(Reading.of(model, context))
        press = ContourKVPress(chooser.nominal_bytes(budget), rows=ROWS)
        chosen = chooser.choose(METHODS["contour"], ENFORCED, budget)
        assert all(map(torch.equal, chosen.keep, kept_by(press, model, context)))

    @needs_kvpress
    @pytest.mark.parametrize("name", [name for name in CONTOUR if name != "contour"])
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text", "chat"])
    def test_by_borrowed_scores_too(self, models, choosers, architecture, name):
        import kvpress

        method, model = METHODS[name], models[architecture]
        for budget in (0.1, 0.5):
            scores = getattr(kvpress, SCORES[method.scores])()
            if method.scores == "kvzip":
                if architecture == "gemma3_text":
                    with pytest.raises(InvalidInput, match="not supported for Gemma3ForCausalLM"):
                        choosers[architecture].choose(method, ENFORCED, budget)
                    continue
            else:  # with the seed and the ratio of a chooser
                scores = PressScorer(scores, method.scores, SEED, ratio_of(budget))
            press = ContourKVPress(choosers[architecture].nominal_bytes(budget), scores=scores, rows=ROWS)
            chosen = choosers[architecture].choose(method, ENFORCED, budget)
            assert all(map(torch.equal, chosen.keep, kept_by(press, model, CONTEXT)))


CELLS = [
    (name, storage)
    for name, method in METHODS.items()
    if method.keeps not in ("all", "pages")
    for storage in method.storages
]


class TestChooser:
    @needs_kvpress
    @settings(max_examples=15)
    @given(
        asked=st.lists(
            st.tuples(st.sampled_from(CELLS), st.sampled_from([0.1, 0.25, 0.6])), min_size=2, max_size=5, unique=True
        )
    )
    def test_a_choice_does_not_depend_on_those_before(self, models, readings, asked):
        """Scores are shared, and what kvpress writes into them is not."""
        together = chooser_of(readings["llama"])
        for (name, storage), budget in asked:
            after = together.choose(METHODS[name], storage, budget)
            alone = chooser_of(readings["llama"]).choose(METHODS[name], storage, budget)
            assert all(map(torch.equal, after.keep, alone.keep))
            assert (after.order is None) == (alone.order is None)
            assert after.order is None or all(map(torch.equal, after.order, alone.order))

    @needs_kvpress
    @pytest.mark.parametrize("architecture", ["llama", "qwen3", "chat"])
    def test_model_reading_and_generator_are_left_as_they_were(self, models, architecture):
        model = models[architecture]
        reading = Reading.of(model, CONTEXT)
        before = [
            [part.clone() for part in (layer.hidden, layer.query, layer.keys, layer.values, *layer.embeddings)]
            for layer in reading.layers
        ]
        hung = [(name, sorted(vars(module)), sorted(module._modules)) for name, module in model.named_modules()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        state, chooser = torch.get_rng_state(), chooser_of(reading)
        for name, storage in CELLS:
            chooser.choose(METHODS[name], storage, 0.3)
        assert torch.equal(torch.get_rng_state(), state)
        assert hung == [(name, sorted(vars(module)), sorted(module._modules)) for name, module in model.named_modules()]
        assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        for layer, parts in zip(reading.layers, before, strict=True):
            after = (layer.hidden, layer.query, layer.keys, layer.values, *layer.embeddings)
            assert all(map(torch.equal, after, parts))

    @needs_kvpress
    @pytest.mark.parametrize("name", ["random", "compactor"])
    def test_draws_are_of_the_seed(self, readings, name):
        drawn = [chooser_of(readings["llama"], seed)._scores(name, 0.7)[0] for seed in (1, 1, 2, 3)]
        assert all(map(torch.equal, drawn[0], drawn[1]))
        assert not any(map(torch.equal, drawn[0], drawn[2])) and not any(map(torch.equal, drawn[2], drawn[3]))
        inside = [score[..., 8:-4] for score in drawn[0]]  # all but Compactor's fillers
        assert not any(map(torch.equal, inside, inside[1:]))

    @needs_kvpress
    @pytest.mark.parametrize("name", ["kvzip", "contour_kvzip", "h2o", "compactor", "expected_attention", "contour"])
    def test_shared_scores_count_for_each_budget(self, models, name):
        """Else the second budget would look free."""
        long = torch.randint(3, 250, (1, 1200), generator=torch.Generator().manual_seed(4))
        chooser, method = chooser_of(Reading.of(models["llama"], long)), METHODS[name]
        first, second = (chooser.choose(method, method.storages[0], budget).seconds for budget in (0.2, 0.3))
        shared = sum(seconds for key, (_, seconds) in chooser._scored.items() if len(key) == 1)
        assert min(first, second) > shared > 0
        if method.scores in ("kvzip", "observed_attention"):  # where the scores are most of it
            assert second > first / 2

    @given(full=st.integers(1, 10**12), digits=st.integers(1, 999))
    def test_nominal_bytes_are_a_budgets_decimal_digits(self, full, digits):
        """0.3 of ten bytes is three."""
        reading = own_reading("llama", 8)
        wanted = digits * full // 1000
        assert Chooser(reading, full, 0).nominal_bytes(digits / 1000) == wanted
        assert ratio_of(digits / 1000) == (1000 - digits) / 1000

    @needs_kvpress
    @given(tokens=st.integers(1, 200_000), share=st.floats(0, 1))
    def test_any_count_can_be_said_as_a_ratio_of_kvpress(self, tokens, share):
        from kvpress.utils import compute_n_kept

        count = min(tokens, 1 + int(share * tokens))
        assert compute_n_kept(tokens, _ratio_for(count, tokens)) == count

    def test_rules_lift_what_they_name_above_all_else(self):
        scores = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
        for lifted, at in ((with_recent(scores, 3), slice(6, 9)), (with_sinks(scores, 2), slice(0, 2))):
            assert (lifted[..., at] > scores.amax()).all()
            others = torch.ones(9, dtype=torch.bool)
            others[at] = False
            assert torch.equal(lifted[..., others], scores[..., others])
        assert torch.equal(with_recent(scores, 0), scores)


class TestRefused:
    @needs_kvpress
    @pytest.mark.parametrize("name", ["kvzip", "contour_kvzip"])
    def test_kvzip_without_a_tokenizer(self, name):
        chooser = chooser_of(own_reading("llama", 60))
        with pytest.raises(InvalidInput, match=r"^[^\n]*kvpress reads the tokenizer from the folder[^\n]*$"):
            chooser.choose(METHODS[name], ENFORCED, 0.5)

    @needs_kvpress
    @pytest.mark.parametrize("storage", METHODS["kvzip"].storages)
    def test_kvzip_on_gemma_3_by_kvpress_itself(self, choosers, storage):
        with pytest.raises(InvalidInput, match=r"^[^\n]*KVzipPress is not supported for Gemma3ForCausalLM$"):
            choosers["gemma3_text"].choose(METHODS["kvzip"], storage, 0.5)

    @needs_kvpress
    @pytest.mark.parametrize("name", [*EQUAL, *HEADS])
    def test_bytes_for_less_than_an_entry_a_head(self, choosers, name):
        line = r"^budget 0.004: [\d,]+ bytes do not hold one entry in each KV head$"
        with pytest.raises(InvalidInput, match=line):
            choosers["llama"].choose(METHODS[name], ENFORCED, 0.004)
        with pytest.raises(InvalidInput, match=line):
            choosers["llama"].enforced_ratio(METHODS[name], 0.004)

    @pytest.mark.skipif(KVPRESS, reason="kvpress is installed")
    @pytest.mark.parametrize("name", [*EQUAL, *HEADS, "contour_snapkv", "contour_kvzip"])
    def test_without_kvpress_one_line_says_how_to_get_it(self, name):
        chooser = chooser_of(own_reading("llama", 60))
        with pytest.raises(InvalidInput, match=r"^[^\n]*pip install 'contourkv\[benchmark\]'$"):
            chooser.choose(METHODS[name], METHODS[name].storages[0], 0.5)

    def test_every_score_named_by_a_method_is_one_of_kvpress(self):
        borrowed = {method.scores for method in METHODS.values()} - {"", "mass"}
        assert borrowed == set(SCORES)
        if KVPRESS:
            import kvpress

            assert all(hasattr(kvpress, press) for press in SCORES.values())
