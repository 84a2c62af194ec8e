"""Asking caches: `generate` and float64 logits of the whole sequence as references."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, built, ids
from capture.tiny_models import EAGER
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationConfig

from contourkv.benchmark import answering
from contourkv.benchmark.answering import LOGIT_BYTES, answers, ending_tokens, most_at_once, nats
from contourkv.benchmark.choosing import Chosen
from contourkv.benchmark.reading import Reading
from contourkv.benchmark.storing import FullStorage, PagedStorage, RaggedStorage, Storage

TOKENS = 50  # longer than the window of the sliding layers
NEVER = frozenset()
SINGLE = ("gpt_oss",)  # its experts take no float64
EXACT = {
    name: 1e-5 if name in EAGER else 1e-9 for name in ARCHITECTURES
}  # eager attention takes its softmax in float32


@functools.cache
def model_of(architecture: str) -> transformers.PreTrainedModel:
    return built(architecture, dtype=torch.float32 if architecture in SINGLE else torch.float64)


@functools.cache
def reading_of(architecture: str) -> Reading:
    return Reading.of(model_of(architecture), ids(TOKENS))


def storages(architecture: str) -> list[Storage]:
    """All that hold the whole context."""
    reading = reading_of(architecture)
    every = [torch.ones(layer.keys.shape[1], TOKENS, dtype=torch.bool) for layer in reading.layers]
    return [
        FullStorage(reading, [Chosen([], 0.0)]),
        RaggedStorage(reading, [Chosen(every, 0.0)] * 3),
        PagedStorage(reading, [1.0, 1.0]),
    ]


def differing(architecture: str, count: int) -> RaggedStorage:
    """Sequences that keep different halves of the context, so that they answer differently."""
    reading, generator = reading_of(architecture), torch.Generator().manual_seed(4)
    keeps = [
        [torch.rand(layer.keys.shape[1], TOKENS, generator=generator) < 0.5 for layer in reading.layers]
        for _ in range(count)
    ]
    return RaggedStorage(reading, [Chosen(keep, 0.0) for keep in keeps])


def own_answer(architecture: str, question: list[int], most: int, ends: list[int] | None = None) -> list[int]:
    """What transformers generates behind context and question, the ending token left out."""
    model, whole = model_of(architecture), torch.cat([ids(TOKENS), torch.tensor([question])], dim=1)
    given = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    cache = DynamicCache(config=model.config)
    found = model.generate(whole, attention_mask=torch.ones_like(whole), past_key_values=cache, **given)
    return [token for token in found[0, whole.shape[1] :].tolist() if ends is None or token not in ends]


@pytest.fixture
def calls():
    """How often a model is called inside the test."""
    counted, hooks = {}, []

    def watch(model: transformers.PreTrainedModel) -> dict:
        counted["calls"] = 0
        hooks.append(model.register_forward_hook(lambda *_: counted.update(calls=counted["calls"] + 1)))
        return counted

    yield watch
    for hook in hooks:
        hook.remove()


class TestAnswers:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize("question", [1, 6])
    def test_are_what_generate_gives(self, architecture, question):
        asked = ids(question, seed=7)[0].tolist()
        wanted = own_answer(architecture, asked, 12)
        for storage in storages(architecture):
            found = answers(model_of(architecture), storage.cache, asked, TOKENS, storage.count, 12, NEVER)
            assert found == [wanted] * storage.count

    @settings(max_examples=25)
    @given(architecture=st.sampled_from(ARCHITECTURES), seed=st.integers(0, 99), place=st.integers(0, 8))
    def test_end_before_the_ending_token(self, architecture, seed, place):
        """As generate does with the same ending tokens; they are no part of the answer."""
        asked = ids(3, seed=seed)[0].tolist()
        whole = own_answer(architecture, asked, 9)
        ends = sorted({whole[place], 96})
        found = answers(model_of(architecture), storages(architecture)[1].cache, asked, TOKENS, 3, 9, frozenset(ends))
        first = min(at for at, token in enumerate(whole) if token in ends)
        assert found == [whole[:first]] * 3
        assert found[0] == own_answer(architecture, asked, 9, ends)

    @settings(max_examples=15)
    @given(architecture=st.sampled_from(ARCHITECTURES), seed=st.integers(0, 99))
    def test_sequences_end_each_for_itself(self, architecture, seed):
        storage, asked = differing(architecture, 4), ids(3, seed=seed)[0].tolist()
        model = model_of(architecture)
        whole = answers(model, storage.cache, asked, TOKENS, 4, 8, NEVER)
        assert [len(row) for row in whole] == [8] * 4
        ends = frozenset({whole[0][2], whole[1][5]})
        storage.forget()
        found = answers(model, storage.cache, asked, TOKENS, 4, 8, ends)
        stops = [next((at for at, token in enumerate(row) if token in ends), 8) for row in whole]
        assert found == [row[:stop] for row, stop in zip(whole, stops, strict=True)]

    def test_cost_a_call_a_token_and_none_after_the_last_end(self, calls):
        asked = [5, 9, 2]
        storage = differing("llama", 3)
        model = model_of("llama")
        counted = calls(model)
        whole = answers(model, storage.cache, asked, TOKENS, 3, 8, NEVER)
        assert counted["calls"] == 8
        ends = frozenset(row[2] for row in whole)
        last = max(next(at for at, token in enumerate(row) if token in ends) for row in whole)
        storage.forget()
        counted["calls"] = 0
        answers(model, storage.cache, asked, TOKENS, 3, 8, ends)
        assert counted["calls"] == last + 1 < 8
        for most in (1, 2):
            storage.forget()
            counted["calls"] = 0
            rows = answers(model, storage.cache, asked, TOKENS, 3, most, NEVER)
            assert counted["calls"] == most and rows == [row[:most] for row in whole]


class TestNats:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @settings(max_examples=8)
    @given(question=st.integers(1, 7), gold=st.integers(1, 9), seed=st.integers(0, 99))
    def test_are_those_of_the_whole_sequence_without_a_cache(self, architecture, question, gold, seed):
        model = model_of(architecture)
        asked, answer = ids(question, seed)[0].tolist(), ids(gold, seed + 100)[0].tolist()
        whole = torch.cat([ids(TOKENS), torch.tensor([asked + answer])], dim=1)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, -gold - 1 : -1]
        each = torch.log_softmax(logits, dim=-1)[torch.arange(gold), torch.tensor(answer)]
        for storage in storages(architecture):
            found = nats(model, storage.cache, asked, answer, TOKENS, storage.count)
            assert found == pytest.approx([-float(each.mean())] * storage.count, abs=EXACT[architecture])

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_in_float32_too(self, architecture):
        model, asked, answer = built(architecture), [5, 9, 2], [17, 60, 3, 3]
        whole = torch.cat([ids(TOKENS), torch.tensor([asked + answer])], dim=1)
        with torch.no_grad():
            logits = model_of(architecture)(whole, use_cache=False).logits[0, -5:-1]
        wanted = -float(torch.log_softmax(logits, dim=-1)[torch.arange(4), torch.tensor(answer)].mean())
        reading = Reading.of(model, ids(TOKENS))
        found = nats(model, reading.full_cache(), asked, answer, TOKENS, 1)
        assert found == pytest.approx([wanted], abs=1e-5)
        with torch.no_grad():  # of its own logits, nothing is lost
            logits = model(torch.tensor([asked + answer[:-1]]), past_key_values=reading.full_cache()).logits[0, -4:]
        each = logits.double() - torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        assert found == pytest.approx([-float(each[torch.arange(4), torch.tensor(answer)].mean())], abs=1e-12)

    def test_are_the_mean_over_tokens_fed_one_by_one(self):
        """Over kept sets that differ: each sequence its own, by single steps and products of probabilities."""
        model, asked, answer, storage = model_of("qwen3"), [5, 9], [17, 60, 3], differing("qwen3", 3)
        found = nats(model, storage.cache, asked, answer, TOKENS, 3)
        storage.forget()
        likelihood = torch.ones(3, dtype=torch.float64)
        at = TOKENS
        for token, target in zip([*asked, *answer[:-1]], [None, *answer], strict=True):
            places = torch.full((3, 1), at)
            with torch.no_grad():
                logits = model(torch.full((3, 1), token), past_key_values=storage.cache, position_ids=places).logits
            if target is not None:
                likelihood *= torch.softmax(logits[:, -1], dim=-1)[:, target]
            at += 1
        assert found == pytest.approx((-likelihood.log() / 3).tolist(), abs=1e-9)
        assert len(set(found)) == 3

    def test_a_likely_answer_costs_little_and_another_much(self):
        model, asked = model_of("llama"), [5, 9, 2]
        greedy = own_answer("llama", asked, 1)
        cache = reading_of("llama").full_cache()
        best = nats(model, cache, asked, greedy, TOKENS, 1)[0]
        for other in set(range(97)) - set(greedy):
            assert nats(model, reading_of("llama").full_cache(), asked, [other], TOKENS, 1)[0] > best >= 0


class TestEndingTokens:
    @pytest.mark.parametrize(("named", "wanted"), [(7, {7}), ([7, 3], {3, 7}), (None, set()), ([], set())])
    def test_are_those_of_the_generation_configuration(self, named, wanted):
        model = built("llama")
        model.generation_config = GenerationConfig(eos_token_id=named)
        assert ending_tokens(model) == frozenset(wanted)

    def test_are_none_without_one(self):
        model = built("llama")
        model.generation_config = None
        assert ending_tokens(model) == NEVER


@given(gold=st.integers(0, 10**7))
def test_as_many_sequences_as_logits_fit(gold):
    most, each = most_at_once(model_of("llama"), gold), 4 * 97 * max(gold, 1)
    assert most >= 1
    assert most == 1 or most * each <= LOGIT_BYTES < (most + 1) * each


def test_the_end_of_a_sequence_is_looked_for_in_every_token():
    rows = [torch.tensor([[1], [2]]), torch.tensor([[3], [9]])]
    assert answering._all_ended(rows, frozenset({1, 9})) and not answering._all_ended(rows, frozenset({1}))
    assert not answering._all_ended(rows, NEVER)
