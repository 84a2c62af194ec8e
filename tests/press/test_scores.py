"""Borrowed scores: kvpress's own numbers, for each sequence what it gets alone, and a model left as it was."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv.errors import InvalidInput
from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model
from contourkv.press.budget import Budget
from contourkv.press.scores import (
    PRESSES,
    ContextScorer,
    LayerScorer,
    PressScorer,
    ReplayScorer,
    WindowMass,
    attention_modules,
    resolve,
)

kvpress = pytest.importorskip("kvpress")
logging.getLogger("kvpress").setLevel(logging.ERROR)

LAYER_NAMES = sorted(set(PRESSES) - {"kvzip"})
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "olmo2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for architecture in ARCHITECTURES:
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make_model({"architecture": architecture, "seed": 2}, made[architecture], architecture)
    return made


@pytest.fixture(scope="module")
def models(folders):
    return {architecture: load_model(folder) for architecture, folder in folders.items()}


def ids_of(length: int, batch: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def observe(model, function, ids, **given) -> None:
    """Prefill, and call function(module, hidden_states, keys, values, attentions, kwargs) after every attention."""
    cache = DynamicCache()

    def hook(module, inputs, kwargs, output):
        layer = cache.layers[module.layer_idx]
        function(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)

    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in attention_modules(model)]
    try:
        with torch.no_grad():
            model(ids, past_key_values=cache, **given)
    finally:
        for handle in hooks:
            handle.remove()


def scored(model, scorer, ids, visible=None, **given) -> list[torch.Tensor]:
    found = {}

    def note(module, *seen):
        found[module.layer_idx] = scorer.score(module, *seen, visible=visible)

    with scorer.on(model):
        observe(model, note, ids, **given)
    return [found[layer] for layer in sorted(found)]


def replayed(model, scorer, ids) -> list[torch.Tensor]:
    cache = DynamicCache()
    with torch.no_grad(), scorer.on(model):
        model(ids, past_key_values=cache)
        return scorer.score_context(model, ids, cache)


def state_of(model) -> list:
    """Everything that hangs on the modules of a model: attributes, submodules, hooks."""
    return [
        (
            name,
            sorted(vars(module)),
            sorted(module._modules),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


# Properties


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("name", LAYER_NAMES)
def test_scores_are_what_kvpress_computes(models, architecture, name):
    model, ids, own = models[architecture], ids_of(150), {}
    press = getattr(kvpress, PRESSES[name])(compression_ratio=0.6)
    scorer = resolve(name, seed=7, kept=Budget.of(compression_ratio=0.6))

    def note(module, *seen):
        torch.manual_seed(7 * 100_003 + module.layer_idx)
        own[module.layer_idx] = press.score(module, *seen)

    with scorer.on(model):
        observe(model, note, ids)
    first, last = scorer.protected(150)
    for ours, layer in zip(scored(model, scorer, ids), sorted(own), strict=True):
        inside = slice(first, 150 - last)
        assert ours.shape == (1, 2, 150) and ours.dtype == torch.float32
        torch.testing.assert_close(ours[..., inside], own[layer][..., inside].float(), rtol=0, atol=0)


@settings(max_examples=12)
@given(pads=st.lists(st.integers(0, 60), min_size=2, max_size=3), name=st.sampled_from(LAYER_NAMES), left=st.booleans())
def test_case_10_each_sequence_of_a_padded_batch_gets_what_it_gets_alone(models, pads, name, left):
    model, length = models["llama"], 140
    rows, visible = ids_of(length, len(pads)), torch.ones(len(pads), length, dtype=torch.bool)
    for row, pad in enumerate(pads):
        visible[row, slice(0, pad) if left else slice(length - pad, length)] = False
    positions = (visible.cumsum(1) - 1).clamp(min=0)
    scorer = resolve(name, kept=Budget.of(0.5))
    together = scored(model, scorer, rows, visible, attention_mask=visible.long(), position_ids=positions)
    for row in range(len(pads)):
        alone = scored(model, scorer, rows[row : row + 1, visible[row]])
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[row : row + 1, :, visible[row]], theirs, rtol=2e-3, atol=2e-3)
            padding = ours[row][:, ~visible[row]]
            assert (padding <= theirs[0].amin(dim=-1, keepdim=True) + 2e-3).all()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 12, 13, 64, 65])
@pytest.mark.parametrize("name", [*LAYER_NAMES, "kvzip"])
def test_case_9_short_contexts_are_defined(models, name, length):
    scorer = resolve(name, kept=Budget.of(0.5))
    found = (replayed if name == "kvzip" else scored)(models["llama"], scorer, ids_of(length))
    assert all(scores.shape == (1, 2, length) for scores in found)
    assert length > 1 or name == "kvzip" or all(scores.unique().numel() == 1 for scores in found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_kvzip_scores_are_kvpresss_own(models, architecture):
    model, ids = models[architecture], ids_of(90)
    press = kvpress.KVzipPress(0.5, chunk_size=40)  # three chunks
    own, compress = [], press.compress_post
    press.compress_post = lambda given: (own.append(press.score_val.clone()), compress(given))
    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache())
    for module in attention_modules(model):
        del module.masked_key_indices
    ours = replayed(model, resolve(kvpress.KVzipPress(0.0, chunk_size=40)), ids)
    torch.testing.assert_close(torch.stack(ours), own[0], rtol=0, atol=0)
    assert torch.stack(ours).min() >= 0 and torch.stack(ours).max() <= 1


def test_random_scores_follow_the_seed_and_leave_the_generator_alone(models):
    model, ids = models["llama"], ids_of(80)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first, again, other = (
        torch.stack(scored(model, resolve("compactor", seed=seed, kept=Budget.of(0.5)), ids)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("name", LAYER_NAMES)
def test_case_11_nothing_is_left_on_the_model(models, architecture, name):
    model = models[architecture]
    before = state_of(model)
    scored(model, resolve(name, kept=Budget.of(0.5)), ids_of(80))
    observe(model, lambda *_: None, ids_of(20))
    # kvpress's attention patch, global since its import, sets this to None in every prefill of any model
    for module in model.modules():
        vars(module).pop("masked_key_indices", None)
    assert state_of(model) == before


@pytest.mark.parametrize("raises", [False, True])
def test_case_11_kvzip_leaves_neither_model_nor_cache_changed(folders, raises):
    model, ids, cache = load_model(folders["llama"]), ids_of(60), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    modules = attention_modules(model)
    marks = [(torch.tensor([0]), torch.tensor([1]), torch.tensor([layer])) for layer in range(len(modules))]
    for module, mark in zip(modules, marks, strict=True):
        module.masked_key_indices = mark  # another press's, which would write fake keys during the replay
    before, tensors = state_of(model), [(layer.keys, layer.values) for layer in cache.layers]
    copies = [(keys.clone(), values.clone()) for keys, values in tensors]
    scorer = resolve("kvzip")
    if raises:
        scorer.press.score_kvzip = lambda *_: 1 / 0
        with pytest.raises(InvalidInput, match="scores 'kvzip': kvpress refuses: division by zero"):
            scorer.score_context(model, ids, cache)
    else:
        scorer.score_context(model, ids, cache)
    assert state_of(model) == before
    assert all(module.masked_key_indices is mark for module, mark in zip(modules, marks, strict=True))
    for layer, (keys, values), (key_copy, value_copy) in zip(cache.layers, tensors, copies, strict=True):
        assert layer.keys is keys and layer.values is values
        assert torch.equal(keys, key_copy) and torch.equal(values, value_copy)


def test_an_exception_in_the_block_gives_model_and_press_back(models):
    model, press = models["llama"], kvpress.StreamingLLMPress(0.3)
    before, scorer = state_of(model), resolve(press, kept=Budget.of(0.25))
    assert scorer.ratio == 0.75
    with pytest.raises(ZeroDivisionError), scorer.on(model):
        observe(model, lambda *seen: scorer.score(*seen), ids_of(20))
        raise ZeroDivisionError
    for module in model.modules():
        vars(module).pop("masked_key_indices", None)
    assert state_of(model) == before and press.compression_ratio == 0.3


# What is a mass, what is a filler


@pytest.mark.parametrize("length", [10, 200])
def test_snapkv_masses_are_masses_and_its_window_is_protected(models, length):
    scorer = resolve("snapkv")
    window = scorer.protected(length)[1]
    assert scorer.is_mass and scorer.protected(length) == (0, min(64, length // 2))
    for scores in scored(models["llama"], scorer, ids_of(length)):
        kept = scores[..., :-window]
        assert kept.min() >= 0 and kept.max() <= 1
        assert torch.equal(scores[..., -window:], kept.amax(-1, keepdim=True).expand(1, 2, window))


@pytest.mark.parametrize(
    ("name", "fillers"),
    [
        ("expected_attention", (4, 0)),
        ("compactor", (8, 4)),
        ("tova", (0, 1)),
        ("streaming_llm", (4, 0)),
        ("knorm", (0, 0)),
    ],
)
def test_fillers_are_named(name, fillers):
    scorer = resolve(name)
    assert scorer.protected(500) == fillers and not scorer.is_mass


def test_masses_observed_need_nothing():
    scorer, masses = resolve("mass"), torch.rand(1, 2, 5)
    assert isinstance(scorer, WindowMass) and scorer.is_mass and scorer.of(masses) is masses
    assert resolve(scorer) is scorer and resolve("kvzip").is_mass and not isinstance(scorer, LayerScorer)


def test_functions_score_too(models):
    def last_first(module, hidden_states, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2], dtype=torch.float64).expand(keys.shape[:3])

    last_first.is_mass = True
    scorer = resolve(last_first)
    found = scored(models["llama"], scorer, ids_of(9, batch=2))
    assert scorer.name == "last_first" and scorer.is_mass
    assert all(torch.equal(scores, torch.arange(9.0).double().expand(2, 2, 9)) for scores in found)


def test_presses_that_split_give_the_scores_they_split():
    inner = kvpress.SnapKVPress(0.5)
    for wrapper in (
        kvpress.AdaKVPress(inner),
        kvpress.DMSPress(inner, threshold=0.0),
        kvpress.PerLayerCompressionPress(inner, [0.1, 0.2, 0.3]),
        kvpress.LUKVPress(inner, compression_ratio=0.5),
    ):
        scorer = resolve(wrapper)
        assert isinstance(scorer, PressScorer) and scorer.press is inner
    assert isinstance(resolve(kvpress.CriticalKVPress(inner)), PressScorer)
    assert isinstance(resolve(kvpress.KVgradPress()), ReplayScorer) and issubclass(ReplayScorer, ContextScorer)


# What is refused


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ("snap", "unknown name 'snap'; expected compactor, expected_attention, .*, a kvpress press or a function"),
        (kvpress.SnapKVPress, r"got the class SnapKVPress; give an instance, SnapKVPress\(\)"),
        (kvpress.CriticalAdaKVPress(kvpress.KnormPress()), "CriticalAdaKVPress gives no score .*scores=KnormPress"),
        (kvpress.ThinKPress(), "ThinKPress gives no score for each key"),
        (kvpress.ComposedPress([kvpress.KnormPress()]), "ComposedPress gives no score for each key"),
        (kvpress.DuoAttentionPress(), "DuoAttentionPress gives no score"),
        (kvpress.RestoreKVPress(), "RestoreKVPress gives no score"),
        (3.5, "expected a name .* a kvpress press or a function, got float"),
    ],
)
def test_what_scores_nothing_is_refused_by_name(scores, message):
    with pytest.raises(InvalidInput, match=message) as error:
        resolve(scores)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda keys: keys[..., 0] * torch.nan, "layer 0: expected finite numbers, key 0 of KV head 0 scores nan"),
        (lambda keys: keys[..., 0].clone().index_fill_(2, torch.tensor(3), torch.inf), "key 3 of KV head 0 scores inf"),
        (lambda keys: keys[..., :1, 0], r"expected shape \(1, 2, 9\) .*got \(1, 2, 1\)"),
        (lambda keys: keys[:, 0, :, 0], r"expected shape \(1, 2, 9\) .*got \(1, 9\)"),
        (lambda keys: keys[..., 0] > 0, "expected real numbers, got torch.bool"),
        (lambda keys: [1.0], "expected a tensor of shape .*, got list"),
    ],
)
def test_scores_that_are_none_are_refused_with_scorer_and_layer(models, made, message):
    def odd(module, hidden_states, keys, values, attentions, kwargs):
        return made(keys)

    with pytest.raises(InvalidInput, match=f"scores 'odd', layer 0: .*{message.removeprefix('layer 0: ')}"):
        scored(models["llama"], resolve(odd), ids_of(9))


def test_kvpresss_asserts_become_one_line(models):
    message = r"scores 'ObservedAttentionPress', layer 0: kvpress refuses: Set attn_implementation=\"eager\""
    with pytest.raises(InvalidInput, match=message):
        scored(models["llama"], resolve(kvpress.ObservedAttentionPress()), ids_of(9))


def test_a_function_of_the_user_raises_its_own_error(models):
    def broken(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scored(models["llama"], resolve(broken), ids_of(9))


@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "compactor", "kvzip"])
def test_queries_that_kvpress_would_rebuild_wrongly_are_refused(models, name):
    with pytest.raises(InvalidInput, match=f"scores '{name}': .*norm that Olmo2Attention applies.*use scores='mass'"):
        with resolve(name).on(models["olmo2"]):
            pytest.fail("the block was entered")


def test_padding_inside_a_sequence_is_refused(models):
    visible = torch.ones(1, 9, dtype=torch.bool)
    visible[0, 4] = False
    with pytest.raises(InvalidInput, match="attention_mask: sequence 0 has padding between its tokens"):
        scored(models["llama"], resolve("knorm"), ids_of(9), visible)
    with pytest.raises(InvalidInput, match="attention_mask: sequence 0 is all padding"):
        scored(models["llama"], resolve("knorm"), ids_of(9), torch.zeros_like(visible))


def test_case_21_kvzip_refuses_a_batch_by_name(models):
    cache = DynamicCache()
    with torch.no_grad():
        models["llama"](ids_of(20, batch=2), past_key_values=cache)
    with pytest.raises(InvalidInput, match="kvzip: got a batch of 2; kvpress's implementation takes one sequence"):
        resolve("kvzip").score_context(models["llama"], ids_of(20, batch=2), cache)


def test_kvzip_needs_the_whole_context_in_the_cache(models):
    cache = DynamicCache()
    with torch.no_grad():
        models["llama"](ids_of(20), past_key_values=cache)
    cache.crop(-10)
    with pytest.raises(InvalidInput, match=r"layer 0 of the cache holds 10 of 20 keys; expected all of them"):
        resolve("kvzip").score_context(models["llama"], ids_of(20), cache)


def test_case_20_kvzip_says_at_once_that_there_is_no_tokenizer(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders["llama"] / file).read_bytes())
    model = load_model(tmp_path)
    with pytest.raises(InvalidInput, match=rf"kvzip: .*\({tmp_path}\): there is none; load .* tokenizer files"):
        with resolve("kvzip").on(model):
            pytest.fail("the block was entered")
    model.config.name_or_path = ""
    with pytest.raises(InvalidInput, match=r"kvzip: .*\(it names none\): "):
        with resolve("kvzip").on(model):
            pytest.fail("the block was entered")


def test_case_20_kvzip_works_without_and_with_a_chat_template(folders, tmp_path):
    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = load_model(tmp_path)
    plain = torch.stack(replayed(model, resolve("kvzip"), ids_of(40)))
    template = "{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = torch.stack(replayed(model, resolve("kvzip"), ids_of(40)))
    assert (plain > 0).all()
    # the template's own tokens, which kvpress takes the context to begin with, are never looked at
    assert (chat[..., : len("[INST]")] == 0).all() and (chat[..., len("[INST]") :] > 0).all()


def test_kvzip_refuses_gemma_in_one_line(models):
    with pytest.raises(InvalidInput, match="KVzipPress is not supported for Gemma3ForCausalLM"):
        with resolve("kvzip").on(models["gemma3_text"]):
            pytest.fail("the block was entered")


WITHOUT = """
import sys
sys.modules["kvpress"] = None  # an import of it fails as if it were not there
from contourkv.press.scores import resolve, is_press
assert resolve("mass").is_mass and resolve(lambda *_: None) and not is_press(3)
resolve("snapkv")
"""


def test_kvpress_is_not_needed_until_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("contourkv.errors.InvalidInput: ")
    assert "pip install 'contourkv[benchmark]'" in done.stderr.splitlines()[-1]
