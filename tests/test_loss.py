"""Kept sets in the forward pass are those of the selectors, change nothing else, and their losses pair by context."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from cache_models import built
from capture.tiny_models import EAGER, SPECIAL, VOCABULARY, build, ids_of
from conftest import random_row
from cut_off import goes_on
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_instances import make_instances
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from contourkv import balance, forced_error, loss, max_mass
from contourkv.capture import recording
from contourkv.contexts import Context, write_contexts
from contourkv.errors import ContourKVError, InvalidInput
from contourkv.loss import (
    FlatCells,
    LossSettings,
    Selection,
    continuation_loss,
    continuation_nats,
    flat_cells,
    kept_sets,
    losses_file,
    renormalised,
)
from contourkv.models.eager import eager_attention
from contourkv.operator import Instance
from contourkv.statistics import read_table, write_tables
from contourkv.statistics.columns import LOSSES, VARIANTS
from contourkv.statistics.instances import read_columns
from contourkv.statistics.losses import loss_table, read_losses
from contourkv.statistics.tables import ALL_ARMS

LENGTH, START, S = 64, 40, 3
IDS = ids_of(LENGTH)
MODELS = {architecture: built(architecture) for architecture in SPECIAL}
LAYERS, HEADS = 2, 4


def everywhere(rule: str) -> np.ndarray:
    return np.full((LAYERS, HEADS), rule)


def attention_outputs(model, run) -> list[torch.Tensor]:
    """What each layer's heads give, (N, heads, d) a layer, while `run()` runs."""
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0].clone()))
        for layer in model.model.layers
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [output.view(len(output), HEADS, -1) for output in outputs]


def plain_nats(model, ids, start) -> np.ndarray:
    """The loss by transformers alone."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, start - 1 :]
    return torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[start:]), reduction="none").numpy()


# Kept sets: properties


@st.composite
def heads(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Rows p of a query head that see different keys, values, weights of a sink, a budget that all rows exceed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys, count = draw(st.integers(4, 24)), draw(st.integers(1, 4))
    s = draw(st.integers(1, keys // 2))
    p = np.zeros((count, keys + 1))
    for row in p:
        seen = rng.permutation(keys)[: draw(st.integers(s + 1, keys))]
        row[[*seen, keys]] = random_row(rng, len(seen) + 1, 1, draw(st.sampled_from([0.0, 1.0, 3.0]))).p
    return p[:, :keys], rng.standard_normal((keys, draw(st.integers(1, 5)))), p[:, keys], s


@given(heads(), st.integers(0, 30))
def test_kept_sets_are_those_of_the_selectors(head, more):
    p, v, _, s = head
    p = p / p.sum(axis=1, keepdims=True)
    for rule, choose in (("max_mass", max_mass), ("balance", lambda row, s: balance(row, s, candidates=s + more))):
        kept = kept_sets(p, v, rule, s, s + more)
        for row, keys, output in zip(p, kept, renormalised(p, v, kept), strict=True):
            seen = np.flatnonzero(row)
            instance = Instance(row[seen], v[seen])
            expected = seen[choose(instance, s)]
            ours, theirs = (forced_error(instance, np.searchsorted(seen, some)) for some in (keys, expected))
            assert set(keys) <= set(seen)
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
            assert np.linalg.norm(output - instance.mu) == pytest.approx(ours, rel=1e-9, abs=1e-12)


def error_with_sink(row, v, sink, keys) -> float:
    return np.linalg.norm(row @ v - row[keys] @ v[keys] / (row[keys].sum() + sink))


@given(heads())
def test_a_sink_is_kept_beside_the_budget(head):
    p, v, sink, s = head
    heaviest, kept = kept_sets(p, v, "max_mass", s, 24, sink), kept_sets(p, v, "balance", s, 24, sink)
    outputs = renormalised(p, v, kept, sink)
    for row, weight, first, keys, output in zip(p, sink, heaviest, kept, outputs, strict=True):
        assert len(set(keys)) == s and (row[keys] > 0).all()
        assert np.linalg.norm(row @ v - output) == pytest.approx(error_with_sink(row, v, weight, keys), abs=1e-12)
        error = error_with_sink(row, v, weight, keys)
        assert error <= error_with_sink(row, v, weight, first) + 1e-12
        for place in range(s):
            for other in np.setdiff1d(np.flatnonzero(row), keys):
                swapped = keys.copy()
                swapped[place] = other
                assert error_with_sink(row, v, weight, swapped) >= error * (1 - 1e-6) - 1e-9


# The forward pass: properties


@pytest.mark.parametrize("architecture", SPECIAL)
def test_dense_cells_give_the_models_own_loss(architecture):
    model = MODELS[architecture]
    nats = continuation_nats(model, IDS, START, Selection(everywhere("dense")))
    assert nats.dtype == np.float64 and nats.shape == (LENGTH - START,)
    np.testing.assert_allclose(nats, plain_nats(model, IDS, START), atol=1e-5)
    assert continuation_loss(model, IDS, START, everywhere("dense")) == nats.mean()


@pytest.mark.parametrize("rule", ["max_mass", "balance"])
@pytest.mark.parametrize("architecture", SPECIAL)
def test_a_row_that_sees_no_more_keys_than_are_kept_is_dense_and_the_next_is_not(architecture, rule):
    model = MODELS[architecture]
    dense, whole, part = (
        attention_outputs(model, lambda which=which, s=s: continuation_loss(model, IDS, 3, everywhere(which), s))
        for which, s in (("dense", 1), (rule, LENGTH), (rule, 5))
    )
    for layer in range(LAYERS):
        assert torch.equal(whole[layer], dense[layer])
        # The row at position 5 sees six keys and is the first to drop one.
        assert torch.equal(part[layer][:5], dense[layer][:5])
        assert not torch.equal(part[layer][5], dense[layer][5])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_rows_before_the_continuation_are_those_of_the_dense_pass_to_the_bit(architecture):
    model = MODELS[architecture]
    passes = {
        rule: attention_outputs(model, lambda rule=rule: continuation_loss(model, IDS, START, everywhere(rule), S))
        for rule in ("dense", "max_mass", "balance")
    }
    for rule in ("max_mass", "balance"):
        for dense, ours in zip(passes["dense"], passes[rule], strict=True):
            assert torch.equal(dense[:START], ours[:START])
            assert not torch.isclose(dense[START:], ours[START:]).all(dim=-1).any()
    if architecture not in EAGER:
        with torch.no_grad():
            plain = attention_outputs(model, lambda: model(torch.tensor([IDS[:-1]]), use_cache=False))
        assert all(torch.equal(dense, ours) for dense, ours in zip(plain, passes["dense"], strict=True))


@settings(max_examples=8)
@given(st.integers(0, LAYERS - 1), st.integers(0, HEADS - 1), st.sampled_from(["max_mass", "balance"]))
def test_the_rule_of_one_cell_changes_that_cell_alone(layer, head, rule):
    model, rules = MODELS["qwen2"], everywhere("dense").astype(object)
    rules[layer, head] = rule
    dense, ours = (
        attention_outputs(model, lambda which=which: continuation_loss(model, IDS, START, which, S))
        for which in (everywhere("dense"), rules)
    )
    others = [other for other in range(HEADS) if other != head]
    for below in range(layer):
        assert torch.equal(dense[below], ours[below])
    assert torch.equal(dense[layer][:, others], ours[layer][:, others])
    assert not torch.isclose(dense[layer][START:, head], ours[layer][START:, head]).all(dim=-1).any()


@settings(max_examples=8)
@given(st.integers(START + 2, LENGTH), st.sampled_from(["max_mass", "balance"]))
def test_losses_do_not_depend_on_later_tokens(length, rule):
    model, selection = MODELS["gemma3_text"], Selection(everywhere(rule), S)
    whole = continuation_nats(model, IDS, START, selection)
    short = continuation_nats(model, IDS[:length], START, selection)
    np.testing.assert_allclose(short, whole[: length - START], atol=1e-4)


# The oracle: transformers' own eager attention, and the selectors on numpy rows one by one


def slow_balance(p, v, s, sink) -> np.ndarray:
    """Best single swaps from the s heaviest keys, a sink kept beside them."""
    keys = list(np.argsort(-p, kind="stable")[:s])
    error = error_with_sink(p, v, sink, keys)
    while True:
        swaps = [
            [*keys[:place], other, *keys[place + 1 :]]
            for place in range(s)
            for other in range(p.size)
            if other not in keys
        ]
        errors = [error_with_sink(p, v, sink, swap) for swap in swaps]
        if not min(errors) < error * (1 - 1e-12):
            return np.array(keys)
        error, keys = min(errors), swaps[int(np.argmin(errors))]


def oracle(rules, start, s):
    """An attention function that selects row by row, and the outputs (N, heads, d) of each layer that it gave."""
    given = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        output, weights = eager_attention(module)(module, query, key, value, attention_mask, **kwargs)
        for head in range(HEADS):
            v = value[0, head // (HEADS // value.shape[1])].double().numpy()
            for position in range(start, query.shape[2]):
                rule, p = rules[module.layer_idx, head], weights[0, head, position].double().numpy()
                seen = np.flatnonzero(p)
                if rule == "dense" or seen.size <= s:
                    continue
                if kwargs.get("s_aux") is None:
                    row = Instance(p[seen] / p.sum(), v[seen])
                    kept, sink = seen[max_mass(row, s) if rule == "max_mass" else balance(row, s)], 0.0
                else:
                    sink = 1 - p.sum()
                    heaviest = seen[np.argsort(-p[seen], kind="stable")[:s]]
                    kept = heaviest if rule == "max_mass" else seen[slow_balance(p[seen], v[seen], s, sink)]
                output[0, position, head] = torch.from_numpy(p[kept] @ v[kept] / (p[kept].sum() + sink)).to(output)
        given.append(output[0].clone())
        return output, None

    return attend, given


@pytest.mark.parametrize("rules", ["max_mass", "balance", "mixed"])
@pytest.mark.parametrize("architecture", SPECIAL)
def test_the_forward_pass_is_that_of_the_oracle(architecture, rules, monkeypatch):
    model = MODELS[architecture]
    rng = np.random.default_rng(5)
    rules = rng.choice(loss.RULES, (LAYERS, HEADS)) if rules == "mixed" else everywhere(rules)
    nats = []
    ours = attention_outputs(model, lambda: nats.append(continuation_nats(model, IDS, START, Selection(rules, S))))
    attend, theirs = oracle(rules, START, S)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "oracle", attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "oracle")
    expected = plain_nats(model, IDS, START)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(nats[0], expected, atol=1e-4)


def test_rules_by_number_are_rules_by_name():
    numbers = np.random.default_rng(2).integers(0, 3, (LAYERS, HEADS))
    names = np.array(loss.RULES)[numbers]
    first, second = (continuation_loss(MODELS["llama"], IDS, START, rules, S) for rules in (numbers, names.tolist()))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    nats = continuation_nats(build("llama", dtype), IDS, START, Selection(everywhere("balance"), S))
    whole = continuation_nats(MODELS["llama"], IDS, START, Selection(everywhere("balance"), S))
    # The first is from a dense row; after it, rounding can change which keys stay.
    assert nats[0] == pytest.approx(whole[0], abs=0.1) and abs(nats.mean() - whole.mean()) < 0.5


# Nothing is left behind


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_model_is_as_it_was_after_success_and_after_an_exception(architecture):
    model = build(architecture)
    before, nats = model.config._attn_implementation, plain_nats(model, IDS, START)

    def fail(layer):
        raise RuntimeError(f"stop in layer {layer}")

    selection = Selection(everywhere("balance"), S)
    for stop in (None, fail):
        if stop is None:
            continuation_nats(model, IDS, START, selection)
        else:
            with pytest.raises(RuntimeError, match="stop in layer 0"):
                continuation_nats(model, IDS, START, selection, on_layer=stop)
        assert model.config._attn_implementation == before
        assert recording._recorder.get() is None
        np.testing.assert_array_equal(plain_nats(model, IDS, START), nats)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_layers_are_reported_as_they_come():
    seen = []
    rules = [["dense"] * HEADS, ["max_mass"] * HEADS]
    continuation_nats(MODELS["llama"], IDS, START, Selection(rules, S), on_layer=seen.append)
    assert seen == [0, 1]


# Bad arguments


@pytest.mark.parametrize(
    ("rules", "s", "candidates", "message"),
    [
        (["balance"], 3, None, r"rules: expected a \(layers, heads\) array"),
        ([["balance"], ["dense", "dense"]], 3, None, r"rules: expected a \(layers, heads\) array"),
        ([[]], 3, None, r"rules: expected a \(layers, heads\) array"),
        (
            [["balance", "heaviest"]],
            3,
            None,
            "rules: expected dense, .* or their numbers 0..2, got 'heaviest'",
        ),
        ([[0, 3]], 3, None, "0..2, got 3"),
        ([[-1]], 3, None, "0..2, got -1"),
        ([[True]], 3, None, "0..2, got True"),
        ([[0.5]], 3, None, "0..2, got 0.5"),
        ([["balance"]], 0, None, "s: expected a whole number of at least 1, got 0"),
        ([["balance"]], 2.0, None, "s: expected a whole number of at least 1, got 2.0"),
        ([["balance"]], 8, 7, "candidates: expected at least the budget 8, got 7"),
        ([["balance"]], 8, "all", "candidates: expected a whole number, got 'all'"),
    ],
)
def test_an_unsound_selection_is_refused(rules, s, candidates, message):
    with pytest.raises(InvalidInput, match=message):
        Selection(rules, s, candidates)


def test_a_selection_holds_its_own_rules():
    rules = np.zeros((2, 2), int)
    selection = Selection(rules, 200)
    rules[:] = 2
    assert selection.rules.tolist() == [[0, 0], [0, 0]] and selection.candidates == 400
    with pytest.raises(ValueError, match="read-only"):
        selection.rules[0, 0] = 1


@pytest.mark.parametrize(
    ("ids", "start", "rules", "message"),
    [
        (IDS, 0, everywhere("balance"), "start: expected 1 to 62 in a context of 64 tokens.*got 0"),
        (IDS, LENGTH - 1, everywhere("balance"), "start: expected 1 to 62.*got 63"),
        (IDS, 2.5, everywhere("balance"), "start: expected a whole number, got 2.5"),
        (IDS, START, everywhere("balance").T, r"rules: expected one a \(layer, query head\), \(2, 4\), got .*\(4, 2\)"),
        ([*IDS, VOCABULARY], START, everywhere("dense"), "token 97 is not in the vocabulary of model llama"),
    ],
)
def test_bad_arguments_are_refused_before_any_compute(ids, start, rules, message):
    model = build("llama")
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(InvalidInput, match=message):
        continuation_loss(model, ids, start, rules, S)


def test_models_that_cannot_be_measured_are_refused():
    rules = everywhere("balance")
    with pytest.raises(InvalidInput, match=r"call model\.eval\(\)"):
        continuation_loss(build("llama").train(), IDS, START, rules)
    with pytest.raises(InvalidInput, match="no language-model head"):
        continuation_loss(build("llama").model, IDS, START, rules)
    with pytest.raises(InvalidInput, match=r"'mistral'.*supported are"):
        continuation_loss(build("mistral"), IDS, START, rules)
    for attends in ("flex_attention", "flash_attention_2"):
        model = build("llama")
        model.config._attn_implementation_internal = attends
        with pytest.raises(InvalidInput, match=f"model llama: it attends by '{attends}'.*sdpa"):
            continuation_loss(model, IDS, START, rules)
    model = build("llama")
    recorder = recording.Recorder(loss.attention_geometry(model.config), LENGTH, [3], "tiny")
    with recording.recording(model, recorder), pytest.raises(ContourKVError, match="recorded already"):
        continuation_loss(model, IDS, START, rules)


# Flat cells


@pytest.fixture(scope="module")
def instances() -> pd.DataFrame:
    return make_instances({"tiny-llama": (LAYERS, HEADS, 2), "tiny-qwen2": (LAYERS, HEADS, 2)}, per_arm=2)


def test_flat_cells_are_those_with_a_large_median_ratio(instances):
    flat = flat_cells(instances, model="tiny-qwen2")
    assert (flat.model, flat.s, flat.threshold, flat.cells.shape) == ("tiny-qwen2", 8, 1.11, (LAYERS, HEADS))
    assert flat.inputs == tuple(f"{arm}/{index:03d}" for arm in ("code", "dialogue", "prose") for index in range(2))
    medians = np.empty((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            cell = instances.query("model == 'tiny-qwen2' and s == 8 and layer == @layer and head == @head")
            medians[layer, head] = np.median(cell["es_max_mass"] / cell["es_pool"])
    np.testing.assert_array_equal(flat.cells, medians >= 1.11)
    assert 0 < flat.cells.sum() < flat.cells.size
    bound = float(np.sort(medians.ravel())[-2])
    assert flat_cells(instances, threshold=bound, model="tiny-qwen2").cells.sum() == 2, "the bound itself is flat"
    shuffled = instances.sample(frac=1, random_state=1)
    np.testing.assert_array_equal(flat_cells(shuffled, model="tiny-qwen2").cells, flat.cells)


def test_flat_cells_that_cannot_be_told_are_refused(instances):
    one = instances[instances["model"] == "tiny-llama"]
    assert flat_cells(one).model == "tiny-llama"
    with pytest.raises(InvalidInput, match="model: the instances are of tiny-llama, tiny-qwen2; name one"):
        flat_cells(instances)
    with pytest.raises(InvalidInput, match="none of model tiny-llama at s = 16; those of tiny-llama have s = 4, 8"):
        flat_cells(one, s=16)
    with pytest.raises(InvalidInput, match="none of model other at s = 8; models: tiny-llama"):
        flat_cells(one, model="other")
    with pytest.raises(InvalidInput, match="no row of model tiny-llama at s = 8 in layer 1, head 2"):
        flat_cells(one[~((one["layer"] == 1) & (one["head"] == 2))])


# A file of losses

SETTINGS = {"s": S, "continuation": 20}
CELLS = np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS) % 3 == 0
FLAT = FlatCells("tiny-llama", 8, 1.11, CELLS, ("prose/000", "prose/001"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    build("llama").save_pretrained(path)
    (path / "source.json").write_text('{"source": "random", "revision": "r1"}')
    return path


@pytest.fixture
def contexts(tmp_path):
    path = tmp_path / "contexts.json"
    write_contexts(path, [Context("prose", index, ids_of(48, seed=index), {"seed": 101}) for index in (2, 3)])
    return path


def test_each_context_is_measured_under_every_variant(tmp_path, folder, contexts, capsys):
    output = tmp_path / "losses" / "tiny.parquet"
    losses_file(folder, contexts, output, FLAT, SETTINGS)
    frame, metadata = read_columns(output, LOSSES)
    assert list(frame.columns) == list(LOSSES)
    assert list(zip(frame["input"], frame["variant"], strict=True)) == [
        (name, variant) for name in ("prose/002", "prose/003") for variant in VARIANTS
    ]
    rules = [everywhere(rule) for rule in ("dense", "max_mass", "balance")]
    rules.append(np.where(CELLS, "balance", "max_mass"))
    texts = [ids_of(48, seed=index) for index in (2, 3)]
    expected = [continuation_loss(MODELS["llama"], ids, 28, rule, S) for ids in texts for rule in rules]
    np.testing.assert_allclose(frame["nats"], expected, atol=1e-6)
    assert len(set(frame["nats"][:4])) == 4
    for name, value in {"s": S, "candidates": 256, "start": 28, "tokens": 20, "flat_cells": 3, "cells": 8}.items():
        assert (frame[name] == value).all(), name
    assert metadata["model"] == {"name": "tiny-llama", "revision": "r1"} and metadata["dtype"] == "float32"
    assert metadata["flat_cells"] == {
        "s": 8,
        "threshold": 1.11,
        "cells": np.argwhere(CELLS).tolist(),
        "inputs": ["prose/000", "prose/001"],
    }
    assert metadata["seeds"] == {"contexts.prose": 101} and metadata["contourkv"]
    assert "loss tiny-llama: 16 of 16 layers" in capsys.readouterr().err
    first = output.read_bytes()
    losses_file(folder, contexts, output, FLAT, LossSettings(**SETTINGS))
    assert output.read_bytes() == first


def test_losses_that_were_cut_off_go_on_at_their_context(tmp_path, folder, contexts):
    def job(output, by):
        losses_file(folder, contexts, output, FLAT, SETTINGS, made_by=by)

    goes_on(job, tmp_path / "losses.parquet", 2)


def test_a_run_that_fails_leaves_no_file(tmp_path, folder, contexts, monkeypatch):
    def fail(*args, **kwargs):
        if args[1] == ids_of(48, seed=3):
            raise RuntimeError("stop")
        return np.ones(20)

    monkeypatch.setattr(loss, "continuation_nats", fail)
    with pytest.raises(RuntimeError, match="stop"):
        losses_file(folder, contexts, tmp_path / "losses" / "tiny.parquet", FLAT, SETTINGS)
    assert not (tmp_path / "losses" / "tiny.parquet").exists() and not list(tmp_path.rglob(".partial-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flat": {"inputs": ("prose/003",)}}, "context prose/003 is one of the 1 that the flat cells come from"),
        ({"flat": {"model": "tiny-qwen2"}}, r"cells of model tiny-qwen2, \(2, 4\), were given for model tiny-llama"),
        ({"flat": {"cells": np.ones((3, 4), bool)}}, r"tiny-llama, \(3, 4\), were given .*which has \(2, 4\)"),
        ({"settings": {"continuation": 48}}, r"prose/002: it has 48 tokens, loss\.continuation scores the last 48"),
        ({"settings": {"continuation": 1}}, r"loss\.continuation: expected a whole number of at least 2, got 1"),
        ({"settings": {"s": 0}}, r"loss\.s: expected a whole number of at least 1, got 0"),
        ({"settings": {"s": 9, "candidates": 8}}, r"loss\.candidates: expected at least the budget 9, got 8"),
        ({"settings": {"budget": 9}}, r"loss\.budget: no such key; expected some of s, continuation, candidates"),
        ({"contexts": [(2, 48), (2, 48)]}, "context prose/002 comes twice"),
        ({"contexts": []}, "it holds no context"),
        ({"contexts": [(2, 4097)]}, "prose/002: ids: the context has 4097 tokens, the window of model tiny-llama"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_weights_are_read(
    tmp_path, folder, contexts, monkeypatch, changes, message
):
    monkeypatch.setattr(loss, "load_model", lambda *_, **__: pytest.fail("the weights were read"))
    if "contexts" in changes:
        entries = [Context("prose", index, ids_of(length), {}) for index, length in changes["contexts"]]
        write_contexts(contexts, entries)
    flat = FlatCells(**{**vars(FLAT), **changes.get("flat", {})})
    with pytest.raises(InvalidInput, match=message):
        losses_file(folder, contexts, tmp_path / "x.parquet", flat, {**SETTINGS, **changes.get("settings", {})})


def test_losses_of_several_files_are_one_table(tmp_path, folder, contexts):
    paths = [tmp_path / f"{index}.parquet" for index in range(2)]
    losses_file(folder, contexts, paths[0], FLAT, SETTINGS)
    write_contexts(contexts, [Context("code", 2, ids_of(48, seed=9), {"seed": 103})])
    losses_file(folder, contexts, paths[1], FLAT, SETTINGS)
    frame, metadata = read_losses(paths)
    assert len(frame) == 12 and metadata["seeds"] == {"contexts.code": 103, "contexts.prose": 101}
    assert metadata["models"] == [{"name": "tiny-llama", "revision": "r1"}] and len(metadata["config"]) == 2
    assert len(loss_table(frame, 10, 0)) == 3 * len(VARIANTS)
    with pytest.raises(
        InvalidInput, match="model tiny-llama, arm code, input code/002, s 3, variant dense comes twice"
    ):
        read_losses([paths[1], paths[1]])
    assert metadata["flat_cells"]["tiny-llama"]["inputs"] == ["prose/000", "prose/001"]
    losses_file(folder, contexts, tmp_path / "2.parquet", FlatCells(**{**vars(FLAT), "cells": ~CELLS}), SETTINGS)
    with pytest.raises(InvalidInput, match=r"2\.parquet: the flat cells of tiny-llama are not those of the other"):
        read_losses([paths[0], tmp_path / "2.parquet"])
    with pytest.raises(InvalidInput, match="no files given"):
        read_losses([])


# Differences


def losses(differences: dict[str, dict[str, np.ndarray]], model: str = "tiny-llama") -> pd.DataFrame:
    """Losses of contexts whose texts differ far more than the variants do: arm -> variant -> over dense."""
    records = []
    for arm, variants in differences.items():
        count = len(variants["max_mass"])
        text = np.random.default_rng(7).normal(3, 1, count)
        for variant in VARIANTS:
            over = variants.get(variant, np.zeros(count))
            records += [
                {"model": model, "arm": arm, "input": f"{arm}/{index:03d}", "variant": variant, "s": 8,
                 "candidates": 256, "start": 384, "tokens": 128, "nats": text[index] + over[index],
                 "flat_cells": 5, "cells": 8}
                for index in range(count)
            ]  # fmt: skip
    return pd.DataFrame(records)


def drawn(count: int, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    over = rng.normal(1, 0.2, count)
    return {"max_mass": over, "balance": over - 0.4, "flat_balance": over - rng.normal(0.2, 0.1, count)}


def rows_of(table: pd.DataFrame, arm: str) -> pd.DataFrame:
    return table[table["arm"] == arm].set_index("variant")


def test_differences_are_paired_by_context():
    variants = drawn(12)
    table = rows_of(loss_table(losses({"prose": variants}), 400, 1), "prose")
    over = variants["flat_balance"] - variants["max_mass"]
    row = table.loc["flat_balance"]
    assert row["minus_max_mass"] == pytest.approx(over.mean(), abs=1e-12)
    assert row["minus_dense"] == pytest.approx(variants["flat_balance"].mean(), abs=1e-12)
    # A constant difference has no spread, however far the texts lie apart; the rest follow the normal interval.
    constant = table.loc["balance"]
    for end in ("", "_low", "_high"):
        assert constant[f"minus_max_mass{end}"] == pytest.approx(-0.4, abs=1e-12)
    half = (row["minus_max_mass_high"] - row["minus_max_mass_low"]) / 2
    assert half == pytest.approx(1.96 * over.std() / np.sqrt(12), rel=0.2)
    assert row["nats_high"] - row["nats_low"] > 4 * half
    assert row["minus_max_mass_low"] < over.mean() < row["minus_max_mass_high"] < 0
    assert np.isnan(table.loc["max_mass", "minus_max_mass"]) and np.isnan(table.loc["dense", "minus_dense"])
    assert (table[["inputs", "tokens", "flat_cells", "cells"]] == [12, 12 * 128, 5, 8]).all(axis=None)
    assert (table["note"] == "").all()


def test_identical_variants_differ_by_nothing():
    over = drawn(6)["max_mass"]
    table = rows_of(loss_table(losses({"prose": dict.fromkeys(VARIANTS[1:], over)}), 100, 1), "prose")
    for name in ("minus_max_mass", "minus_max_mass_low", "minus_max_mass_high"):
        assert table.loc["balance", name] == table.loc["flat_balance", name] == 0


def test_noise_around_nothing_keeps_nothing_inside():
    rng, inside = np.random.default_rng(11), 0
    for seed in range(40):
        variants = {"max_mass": np.ones(10), "balance": 1 + rng.normal(0, 1, 10)}
        table = rows_of(loss_table(losses({"prose": variants}), 200, seed), "prose")
        inside += table.loc["balance", "minus_max_mass_low"] <= 0 <= table.loc["balance", "minus_max_mass_high"]
    assert inside >= 32  # 95% of 40, less what ten contexts and chance take


def test_the_interval_widens_as_contexts_become_fewer():
    variants = drawn(8)
    copied = {name: np.tile(values, 4) for name, values in variants.items()}
    few, many = (
        rows_of(loss_table(losses({"prose": each}), 2000, 1), "prose").loc["flat_balance"]
        for each in (variants, copied)
    )
    widths = [row["minus_max_mass_high"] - row["minus_max_mass_low"] for row in (few, many)]
    assert few["minus_max_mass"] == pytest.approx(many["minus_max_mass"], abs=1e-12)
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.15)


def test_arms_are_pooled_and_models_are_not():
    arms = {"prose": drawn(4), "code": drawn(12, seed=8)}
    frame = pd.concat([losses(arms), losses({"prose": drawn(4, seed=5)}, "other")]).sample(frac=1, random_state=0)
    table = loss_table(frame, 100, 1, labels={"tiny-llama": "Tiny Llama"})
    assert list(dict.fromkeys(table["model"])) == ["Tiny Llama", "other"]
    own = table[table["model"] == "Tiny Llama"]
    assert list(dict.fromkeys(own["arm"])) == ["code", "prose", ALL_ARMS]
    pooled = rows_of(own, ALL_ARMS).loc["flat_balance"]
    over = [arms[arm]["flat_balance"] - arms[arm]["max_mass"] for arm in arms]
    assert pooled["minus_max_mass"] == pytest.approx(np.concatenate(over).mean(), abs=1e-12)
    assert pooled["inputs"] == 16
    assert set(table[table["model"] == "other"]["arm"]) == {"prose"}


def test_one_context_has_a_point_and_no_interval():
    row = loss_table(losses({"prose": drawn(1)}), 100, 1).iloc[-1]
    assert np.isfinite(row["minus_max_mass"]) and np.isnan(row["minus_max_mass_low"])
    assert row["note"] == "no interval: 1 input in prose"


def test_the_table_is_written_and_read_like_the_others(tmp_path):
    table = loss_table(losses({"prose": drawn(3)}), 50, 1)
    write_tables({"loss": table}, tmp_path, json.loads('{"contourkv": "0.1.0", "config": ["ab"]}'))
    again = read_table(tmp_path / "loss.csv").drop(columns="provenance")
    pd.testing.assert_frame_equal(again, table, check_dtype=False, rtol=1e-8)
    assert "minus_max_mass" in (tmp_path / "loss.md").read_text()


def test_losses_that_do_not_pair_are_refused():
    frame = losses({"prose": drawn(3)})
    with pytest.raises(InvalidInput, match="no rows"):
        loss_table(frame[:0], 10, 0)
    with pytest.raises(InvalidInput, match="comes twice"):
        loss_table(pd.concat([frame, frame[:1]]), 10, 0)
    with pytest.raises(InvalidInput, match=r"no max_mass of tiny-llama prose/001 at s = 8, start 384"):
        loss_table(frame[~((frame["variant"] == "max_mass") & (frame["input"] == "prose/001"))], 10, 0)
    with pytest.raises(InvalidInput, match="no balance of tiny-llama"):
        loss_table(frame[frame["variant"] != "balance"], 10, 0)
    with pytest.raises(InvalidInput, match="dense of tiny-llama prose/000 is nan nats"):
        loss_table(frame.assign(nats=np.nan), 10, 0)
    changed = frame["input"].eq("prose/002") * 2 + 5
    with pytest.raises(InvalidInput, match="has 5 flat_cells in one file and 7 in another"):
        loss_table(frame.assign(flat_cells=changed), 10, 0)
