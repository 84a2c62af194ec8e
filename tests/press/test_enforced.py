"""Enforced presses: kvpress's own selection, its answers to the next question, and the bytes given back."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from transformers import DynamicCache

from contourkv.errors import InvalidInput
from contourkv.held import held_bytes
from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model
from contourkv.press.enforced import EnforcedPress, enforce
from contourkv.press.scores import attention_modules
from contourkv.ragged.cache import RaggedCache

kvpress = pytest.importorskip("kvpress")
logging.getLogger("kvpress").setLevel(logging.ERROR)

TOKENS, LAYERS, KV_HEADS, HEAD_DIM = 200, 3, 2, 16
FULL = LAYERS * KV_HEADS * TOKENS * 2 * HEAD_DIM * 4

HEAD_WISE = {
    "adakv_snapkv": lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r)),
    "adakv_expected": lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r)),
    "adakv_compactor": lambda r: kvpress.AdaKVPress(kvpress.CompactorPress(r)),
    "critical_adakv": lambda r: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(r)),
    "kvzip": lambda r: kvpress.KVzipPress(r),
    "kvzip_layerwise": lambda r: kvpress.KVzipPress(r, layerwise=True, chunk_size=70),
    "kvgrad": lambda r: kvpress.KVgradPress(r),
}
EQUAL = {
    "knorm": lambda r: kvpress.KnormPress(r),
    "snapkv": lambda r: kvpress.SnapKVPress(r),
    "compactor": lambda r: kvpress.CompactorPress(r),
    "critical": lambda r: kvpress.CriticalKVPress(kvpress.SnapKVPress(r)),
    "streaming": lambda r: kvpress.StreamingLLMPress(r),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for architecture in ("llama", "qwen2", "qwen3", "gemma3_text"):
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make_model({"architecture": architecture, "seed": 3}, made[architecture], architecture)
    return made


@pytest.fixture(scope="module")
def models(folders):
    return {architecture: load_model(folder) for architecture, folder in folders.items()}


def ids_of(length: int, batch: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


CONTEXT, QUESTION = ids_of(TOKENS), ids_of(5, seed=8)


def clean(model) -> None:
    for module in model.modules():
        vars(module).pop("masked_key_indices", None)
        if module is not model.model:
            module._modules.pop("rotary_emb", None)
    vars(model.model).pop("forward", None)


def state_of(model) -> list:
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


def masked(model, press, context=CONTEXT, question=QUESTION):
    """kvpress as it is: the answer over its masked DynamicCache, and what it dropped in each layer."""
    cache, tokens = DynamicCache(), context.shape[1]
    torch.manual_seed(5)
    with torch.no_grad():
        with press(model):
            model(context, past_key_values=cache)
        dropped = [getattr(module, "masked_key_indices", None) for module in attention_modules(model)]
        positions = torch.arange(tokens, tokens + question.shape[1]).unsqueeze(0)
        logits = model(question, past_key_values=cache, position_ids=positions).logits
    clean(model)
    return logits, dropped, cache


def hidden(model, dropped, windows) -> torch.Tensor:
    """The exact answer: the full cache, and a mask of each layer's own that hides what its heads dropped."""
    cache, asked = DynamicCache(), QUESTION.shape[1]
    query, key = torch.arange(TOKENS, TOKENS + asked)[:, None], torch.arange(TOKENS + asked)

    def mask(module, args, kwargs):
        seen = (key <= query) & (key > query - (windows[module.layer_idx] or len(key)))
        seen = seen.expand(1, KV_HEADS, -1, -1).clone()
        batch, head, position = dropped[module.layer_idx]
        seen[batch, head, :, position] = False
        return args, {**kwargs, "attention_mask": seen.repeat_interleave(module.num_key_value_groups, dim=1)}

    with torch.no_grad():
        model(CONTEXT, past_key_values=cache)
        hooks = [module.register_forward_pre_hook(mask, with_kwargs=True) for module in attention_modules(model)]
        logits = model(QUESTION, past_key_values=cache).logits
    for hook in hooks:
        hook.remove()
    return logits


def enforced(model, press, context=CONTEXT, **given) -> RaggedCache:
    cache = RaggedCache(model.config)
    torch.manual_seed(5)
    with torch.no_grad(), enforce(press)(model):
        output = model(context, past_key_values=cache, **given)
    assert output.past_key_values is cache
    return cache


def answer(model, cache, question=QUESTION) -> torch.Tensor:
    with torch.no_grad():
        return model(question, past_key_values=cache).logits


# Same selection, same answers, bytes freed


@pytest.mark.parametrize("ratio", [0.5, 0.8])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", HEAD_WISE)
def test_a_head_wise_press_answers_as_kvpress_does_and_frees_what_it_drops(models, architecture, name, ratio):
    model = models[architecture]
    logits, dropped, _ = masked(model, HEAD_WISE[name](ratio))
    cache = enforced(model, HEAD_WISE[name](ratio))
    for layer, triple in enumerate(dropped):
        keep = torch.ones(1, KV_HEADS, TOKENS, dtype=torch.bool)
        if triple is not None:
            keep[triple] = False
        for head in range(KV_HEADS):
            assert cache.kept_positions(layer, 0, head).tolist() == keep[0, head].nonzero().squeeze(1).tolist()
    ours = answer(model, cache)
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours, hidden(model, dropped, [None] * LAYERS), atol=1e-4, rtol=0)
    cache.rollback()
    held = held_bytes(cache, model)
    assert held.slack == 0 and held.payload == pytest.approx(
        (1 - ratio) * FULL, abs=LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
    )
    assert held.metadata <= 0.05 * held.payload


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("name", EQUAL)
def test_a_press_of_equal_counts_keeps_the_same_keys(models, architecture, name):
    model, press = models[architecture], EQUAL[name](0.6)
    logits, _, theirs = masked(model, press)
    cache = enforced(model, press)
    torch.testing.assert_close(answer(model, cache), logits, atol=1e-4, rtol=0)
    cache.rollback()
    assert held_bytes(cache).payload == sum(layer.keys[:, :, :80].numel() for layer in theirs.layers) * 2 * 4
    assert "compress" not in vars(press)


def test_layers_of_unequal_length_work_which_kvpress_cannot_decode_with(models):
    model, ratios = models["llama"], [0.2, 0.5, 0.8]
    cache = enforced(model, kvpress.PerLayerCompressionPress(kvpress.KnormPress(), ratios))
    # by kvpress's rule: 200 * (1 - 0.8) is a little less than 40 in floating point
    assert [layer.tolist() for layer in cache.entries()] == [[[160, 160]], [[100, 100]], [[39, 39]]]
    pyramid = enforced(model, kvpress.PyramidKVPress(0.5, window_size=8))
    counts = [int(layer[0, 0]) for layer in pyramid.entries()]
    assert counts[0] > counts[1] > counts[2]
    assert torch.isfinite(answer(model, pyramid)).all()


def test_a_threshold_is_enforced(models):
    model = models["llama"]
    press = kvpress.DMSPress(kvpress.KnormPress(), threshold=-6.0, sliding_window_size=16)
    logits, dropped, _ = masked(model, press)
    assert sum(len(triple[0]) for triple in dropped) > 100
    torch.testing.assert_close(answer(model, enforced(model, press)), logits, atol=1e-4, rtol=0)


def test_a_ratio_of_zero_keeps_everything(models):
    model = models["llama"]
    for press in (HEAD_WISE["adakv_snapkv"](0.0), HEAD_WISE["kvzip"](0.0), EQUAL["knorm"](0.0)):
        cache = enforced(model, press)
        assert held_bytes(cache).payload == FULL


def test_generate_goes_on_from_the_true_position(models):
    model = models["llama"]
    full = torch.cat([CONTEXT, QUESTION], dim=1)
    cache = enforced(model, HEAD_WISE["adakv_snapkv"](0.5))
    assert cache.get_seq_length() == TOKENS
    said = model.generate(full, past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.rollback()
    again = model.generate(full, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(said, again) and cache.get_seq_length() == TOKENS + 5 + 5


def test_case_10_padding_is_never_held(models):
    model, pad = models["llama"], 30
    batch = torch.cat([CONTEXT, ids_of(TOKENS, seed=5)])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    cache = enforced(model, HEAD_WISE["adakv_snapkv"](0.5), batch, attention_mask=mask)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            assert cache.kept_positions(layer, 1, head).min() >= pad
    assert all(int(layer[0].sum()) == KV_HEADS * TOKENS // 2 for layer in cache.entries())


def test_case_13_a_sliding_layer_holds_only_what_it_can_still_show(models):
    model, window = models["gemma3_text"], 32
    press = kvpress.AdaKVPress(kvpress.KnormPress(0.25))
    _, dropped, _ = masked(model, press)
    cache = enforced(model, press)
    # not kvpress's answer: here its fake keys get weights that are not quite zero, and its logits are off by 0.01
    torch.testing.assert_close(answer(model, cache), hidden(model, dropped, [window, None, window]), atol=1e-4, rtol=0)
    cache.rollback()
    for layer in (0, 2):  # the sliding ones
        for head in range(KV_HEADS):
            assert cache.kept_positions(layer, 0, head).min() >= TOKENS - window + 1
    assert int(cache.entries()[1].sum()) == KV_HEADS * TOKENS * 3 // 4
    full = enforced(model, kvpress.AdaKVPress(kvpress.KnormPress(0.0)))
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(CONTEXT, past_key_values=plain)
    torch.testing.assert_close(answer(model, full), answer(model, plain), atol=1e-4, rtol=0)


def test_the_full_cache_is_gone_layer_by_layer(models, monkeypatch):
    model, alive = models["llama"], []
    take = RaggedCache.take

    def watched(self, layer, keys, values, keep, length):
        alive.append(weakref.ref(keys.untyped_storage()))
        take(self, layer, keys, values, keep, length)
        del keys, values
        # of the layers that went before none is left
        gc.collect()
        assert [reference() is None for reference in alive[:-1]] == [True] * (len(alive) - 1)

    monkeypatch.setattr(RaggedCache, "take", watched)
    enforced(model, HEAD_WISE["kvzip"](0.5))
    assert len(alive) == LAYERS


# Nothing is left behind


@pytest.mark.parametrize("name", ["adakv_snapkv", "kvzip", "kvgrad"])
def test_case_11_the_model_is_as_it_was(folders, name):
    model = load_model(folders["llama"])
    before = state_of(model)
    enforced(model, HEAD_WISE[name](0.5))
    assert state_of(model) == before
    assert torch.is_grad_enabled()


def test_case_11_another_presss_mask_is_there_again(models):
    model = models["llama"]
    modules = attention_modules(model)
    mark = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    modules[1].masked_key_indices = mark
    try:
        plain = enforced(model, HEAD_WISE["adakv_snapkv"](0.0))
        assert modules[1].masked_key_indices is mark and held_bytes(plain).payload == FULL
    finally:
        clean(model)


@pytest.mark.parametrize("name", ["adakv_snapkv", "kvzip", "kvgrad"])
def test_an_exception_in_the_block_leaves_model_and_cache_as_they_were(folders, name):
    model = load_model(folders["llama"])
    before, cache = state_of(model), RaggedCache(model.config)
    with pytest.raises(ZeroDivisionError), enforce(HEAD_WISE[name](0.5))(model):
        model(CONTEXT, past_key_values=cache)
        raise ZeroDivisionError
    assert state_of(model) == before and cache.get_seq_length() == 0
    assert torch.is_grad_enabled()


def test_an_exception_while_the_cache_is_filled_leaves_it_empty(models, monkeypatch):
    model = models["llama"]
    take, cache = RaggedCache.take, RaggedCache(model.config)

    def failing(self, layer, *rest):
        if layer == 1:
            raise MemoryError("no room")
        take(self, layer, *rest)

    before = state_of(model)
    monkeypatch.setattr(RaggedCache, "take", failing)
    with pytest.raises(MemoryError), torch.no_grad(), enforce(HEAD_WISE["adakv_snapkv"](0.5))(model):
        model(CONTEXT, past_key_values=cache)
    assert cache.get_seq_length() == 0 and held_bytes(cache).payload == 0 and state_of(model) == before


def test_a_block_without_a_forward_pass_does_nothing(models):
    before = state_of(models["llama"])
    with enforce(HEAD_WISE["kvzip"](0.5))(models["llama"]):
        pass
    assert state_of(models["llama"]) == before


# What is refused


class Truncating(kvpress.BasePress):
    """Keeps every second key, and tells nobody."""

    compression_ratio = 0.5

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, ::2], values[:, :, ::2]


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (None, "expected a kvpress press, got NoneType"),
        (3, "expected a kvpress press, got int"),
        (kvpress.AdaKVPress, r"got the class AdaKVPress; give an instance"),
        (
            kvpress.ChunkKVPress(kvpress.KnormPress(0.5)),
            "ChunkKVPress already frees what it drops.*with a DynamicCache",
        ),
        (kvpress.BlockPress(kvpress.KnormPress(0.5)), "BlockPress already frees"),
        (kvpress.FinchPress(0.5), "FinchPress already frees"),
        (kvpress.ComposedPress([kvpress.KnormPress(0.5)]), "ComposedPress already frees"),
        (kvpress.SimLayerKVPress(), "SimLayerKVPress already frees"),
        (kvpress.KeyRerotationPress(kvpress.KnormPress(0.5)), "KeyRerotationPress moves the keys"),
        (kvpress.ThinKPress(0.5), "ThinKPress drops channels"),
        (kvpress.DecodingPress(kvpress.KnormPress()), "DecodingPress compresses while tokens are decoded"),
        (kvpress.PrefillDecodingPress(), "PrefillDecodingPress compresses while"),
        (kvpress.DMSPress(kvpress.KnormPress(), -1.0, decoding=True), "DMSPress with decoding=True compresses while"),
        (kvpress.RestoreKVPress(0.5), "RestoreKVPress adds tokens of its own"),
        (kvpress.KVComposePress(compression_ratio=0.5), "KVComposePress already frees"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_at_construction(press, message):
    with pytest.raises(InvalidInput, match=f"^enforce: {message}") as error:
        enforce(press)
    assert "\n" not in str(error.value)


def refused(model, press, message, *args, **given):
    before, cache = state_of(model), given.get("past_key_values")
    with pytest.raises(InvalidInput, match=message), torch.no_grad(), enforce(press)(model):
        model(*args, **given)
    assert state_of(model) == before
    assert not isinstance(cache, RaggedCache) or cache.get_seq_length() in (0, 7)


def test_an_unknown_press_that_truncates_is_found_when_it_has(models):
    model = models["llama"]
    message = "Truncating left 100 of 200 keys in layer 0: it already frees"
    refused(model, Truncating(), message, CONTEXT, past_key_values=RaggedCache(model.config))


@pytest.mark.parametrize("name", ["adakv_snapkv", "kvzip"])
def test_case_22_only_an_empty_ragged_cache_is_taken(models, name):
    model, press = models["llama"], HEAD_WISE[name](0.5)
    refused(
        model, press, "expected past_key_values=RaggedCache.*got DynamicCache", CONTEXT, past_key_values=DynamicCache()
    )
    refused(model, press, r"expected past_key_values=RaggedCache\(model.config\), got no cache", CONTEXT)
    used = RaggedCache(model.config)
    with torch.no_grad():
        model(CONTEXT[:, :7], past_key_values=used)
    refused(model, press, r"the cache holds 7 tokens of another context; reset\(\) it", CONTEXT, past_key_values=used)


def test_a_second_forward_pass_is_refused(models):
    model, cache = models["llama"], RaggedCache(models["llama"].config)
    with pytest.raises(InvalidInput, match=r"a second forward pass inside the block.*generate after the block"):
        with torch.no_grad(), enforce(HEAD_WISE["adakv_snapkv"](0.5))(model):
            model(CONTEXT, past_key_values=cache)
            model(QUESTION, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_model_in_training_mode_is_refused(folders):
    model = load_model(folders["llama"]).train()
    with pytest.raises(InvalidInput, match=r"training mode; call model\.eval\(\) first"):
        with enforce(HEAD_WISE["adakv_snapkv"](0.5))(model):
            pytest.fail("the block was entered")


def test_case_21_kvzip_refuses_a_batch_by_name(models):
    model, cache = models["llama"], RaggedCache(models["llama"].config)
    refused(model, HEAD_WISE["kvzip"](0.5), "KVzipPress: got a batch of 2", ids_of(9, 2), past_key_values=cache)


def test_kvzip_refuses_embeddings_which_kvpress_would_silently_not_compress(models):
    model, cache = models["llama"], RaggedCache(models["llama"].config)
    embeddings = model.get_input_embeddings()(CONTEXT).detach()
    refused(
        model,
        HEAD_WISE["kvzip"](0.5),
        "needs input_ids, not embeddings",
        inputs_embeds=embeddings,
        past_key_values=cache,
    )


def test_case_9_an_empty_context_is_refused_and_one_token_works(models):
    model, cache = models["llama"], RaggedCache(models["llama"].config)
    refused(model, EQUAL["knorm"](0.5), "the context is empty", CONTEXT[:, :0], past_key_values=cache)
    one = enforced(model, kvpress.AdaKVPress(kvpress.KnormPress(0.5)), CONTEXT[:, :1])
    assert [layer.tolist() for layer in one.entries()] == [[[1, 1]]] * LAYERS


def test_what_kvpress_refuses_comes_as_one_line(folders, models):
    eager = load_model(folders["llama"])
    eager.set_attn_implementation("eager")
    message = "AdaKVPress: kvpress refuses: eager mode not supported"
    cache = RaggedCache(eager.config)
    refused(eager, kvpress.AdaKVPress(kvpress.KnormPress(0.5)), message, CONTEXT, past_key_values=cache)
    message = "SnapKVPress: kvpress refuses: Query length 20 should be greater than the window size 64"
    model, cache = models["llama"], RaggedCache(models["llama"].config)
    refused(model, kvpress.SnapKVPress(0.5), message, CONTEXT[:, :20], past_key_values=cache)
    with pytest.raises(InvalidInput, match=r"KVzipPress: kvpress refuses: .* not supported for Gemma3ForCausalLM"):
        with enforce(HEAD_WISE["kvzip"](0.5))(models["gemma3_text"]):
            pytest.fail("the block was entered")


def test_errors_of_the_user_stay_their_own(models):
    with pytest.raises(AssertionError, match="mine"), enforce(EQUAL["knorm"](0.5))(models["llama"]):
        raise AssertionError("mine")


def test_it_reads_well():
    press = enforce(kvpress.KnormPress(0.25))
    assert isinstance(press, EnforcedPress) and press.compression_ratio == 0.25
    assert repr(press) == "enforce(KnormPress(compression_ratio=0.25))"
