"""Rules of deployed methods: s distinct visible keys, plain loops as oracle, kvpress and Quest's pages as peers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from cache_models import built, ids
from conftest import random_row
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance, max_mass
from contourkv.benchmark.quest import PAGE, chosen_pages, page_bounds, page_count
from contourkv.benchmark.reading import LayerReading, Reading
from contourkv.errors import InvalidInput
from contourkv.press.quiet import quiet_kvpress
from contourkv.selectors import deployed, h2o, observation_window, page_size, quest, snapkv, streaming_llm, tova

needs_kvpress = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
TOKENS = 150


@st.composite
def attentions(draw) -> tuple[np.ndarray, int]:
    """Rows of small whole weights, many of them equal, so that float64 sums and means are exact; and a budget."""
    size = draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.sampled_from([1, 2, 4, 8]))
    return rng.integers(0, draw(st.sampled_from([2, 5, 1000])), (rows, size)).astype(float), draw(
        st.integers(1, size - 1)
    )


@st.composite
def products(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """A query, keys of small whole numbers, and a budget."""
    size, dim = draw(st.integers(2, 60)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    query, keys = rng.integers(-3, 4, dim).astype(float), rng.integers(-3, 4, (size, dim)).astype(float)
    return query, keys, draw(st.integers(1, size - 1))


def heaviest(scores: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(scores), key=lambda key: -scores[key])[:count]


def assert_kept(kept: np.ndarray, s: int, size: int) -> None:
    assert kept.dtype == np.int64 and kept.shape == (s,)
    assert (np.diff(kept) > 0).all() and kept[0] >= 0 and kept[-1] < size


# Every rule keeps s distinct visible keys, and those that a plain loop keeps


@given(attentions(), st.data())
def test_snapkv_is_a_plain_loop(case, data):
    attention, s = case
    protected = data.draw(st.sampled_from([None, *range(s + 1)]))
    kernel = data.draw(st.sampled_from([1, 3, 5]))
    kept = snapkv(attention, s, protected, kernel)
    window = max(1, min(64, s // 2)) if protected is None else protected
    rows, size = attention.shape
    scores = {}
    for j in range(size - window):
        near = [k for k in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= k < size - window]
        scores[j] = sum(attention[r, k] for r in range(rows) for k in near)
    assert_kept(kept, s, size)
    assert kept.tolist() == sorted([*heaviest(scores, s - window), *range(size - window, size)])


@given(attentions(), st.data())
def test_h2o_is_a_plain_loop(case, data):
    attention, s = case
    recent = data.draw(st.sampled_from([None, *range(s + 1)]))
    kept = h2o(attention, s, recent)
    last = s // 2 if recent is None else recent
    rows, size = attention.shape
    scores = {j: sum(attention[r, j] for r in range(rows)) for j in range(size - last)}
    assert_kept(kept, s, size)
    assert kept.tolist() == sorted([*heaviest(scores, s - last), *range(size - last, size)])


@given(attentions())
def test_tova_is_a_plain_loop(case):
    attention, s = case
    kept = tova(attention, s)
    assert_kept(kept, s, attention.shape[1])
    assert kept.tolist() == sorted(heaviest({j: sum(attention[:, j]) for j in range(attention.shape[1])}, s))


@given(st.integers(2, 50), st.data())
def test_streaming_llm_is_a_plain_loop(size, data):
    s, sinks = data.draw(st.integers(1, size - 1)), data.draw(st.integers(0, 8))
    kept = streaming_llm(size, s, sinks)
    chosen = list(range(size))[:sinks][:s]
    for key in reversed(range(size)):
        if len(chosen) < s:
            chosen.append(key)
    assert_kept(kept, s, size)
    assert kept.tolist() == sorted(chosen)


@given(products(), st.data())
def test_quest_is_a_plain_loop(case, data):
    query, keys, s = case
    page = data.draw(st.sampled_from([None, 1, 2, 3, 16]))
    kept = quest(query, keys, s, page)
    width = max(1, min(16, s // 2)) if page is None else page
    pages = [list(range(start, min(start + width, len(keys)))) for start in range(0, len(keys), width)]
    bounds = {
        number: sum(max(q * keys[j, c] for j in inside) for c, q in enumerate(query))
        for number, inside in enumerate(pages)
    }
    chosen: list[int] = []
    for number in heaviest(bounds, len(pages)):
        free = s - len(chosen)
        chosen += pages[number][-free:] if free else []
    assert_kept(kept, s, len(keys))
    assert kept.tolist() == sorted(chosen)


# Relations between the rules


@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.data())
def test_what_looks_at_the_row_alone_keeps_max_mass(size, seed, data):
    """TOVA of one head; SnapKV of one row, unpooled; H2O without a recent half; Quest with pages of one key."""
    rng = np.random.default_rng(seed)
    s = data.draw(st.integers(1, size - 1))
    query, keys = rng.standard_normal(4), rng.standard_normal((size, 4))
    weights = np.exp(keys @ query)
    row = Instance(weights / weights.sum(), rng.standard_normal((size, 3)))
    wanted = max_mass(row, s).tolist()
    assert tova(row.p[None], s).tolist() == wanted
    assert snapkv(row.p[None], s, protected=0, kernel=1).tolist() == wanted
    assert h2o(row.p[None], s, recent=0).tolist() == wanted
    assert quest(query, keys, s, page=1).tolist() == wanted


@given(attentions(), st.integers(0, 2**32 - 1))
def test_rows_of_attention_are_a_set_and_only_their_mean_counts(case, seed):
    attention, s = case
    shuffled = np.random.default_rng(seed).permutation(attention)
    for rule in (snapkv, h2o, tova):
        kept = rule(attention, s).tolist()
        assert rule(shuffled, s).tolist() == kept
        assert rule(attention.mean(axis=0, keepdims=True), s).tolist() == kept
        assert rule(4 * attention, s).tolist() == kept


@given(products(), st.integers(-8, 8))
def test_quest_knows_no_scale_of_the_scores(case, power):
    query, keys, s = case
    assert quest(2.0**power * query, keys, s).tolist() == quest(query, keys, s).tolist()


@given(st.integers(1, 600))
def test_fixed_sizes_shrink_to_half_of_the_budget(s):
    assert observation_window(s) == (64 if s >= 128 else max(1, s // 2))
    assert page_size(s) == (16 if s >= 32 else max(1, s // 2))


# Peers on a layer of a model


@pytest.fixture(scope="module")
def layer() -> LayerReading:
    return Reading.of(built("llama"), ids(TOKENS)).layers[1]


def by_kv_head(layer: LayerReading, rows: slice) -> np.ndarray:
    """Attention rows by KV head, (H, group * rows, N), float64."""
    attention = layer.attentions()[0, :, rows].double().numpy()
    return attention.reshape(layer.keys.shape[1], -1, TOKENS)


def kvpress_scores(layer: LayerReading, name: str, attentions: torch.Tensor | None = None, **given) -> np.ndarray:
    """Scores (H, N) of a press of kvpress."""
    import kvpress

    with quiet_kvpress(), torch.no_grad():
        press = getattr(kvpress, name)(**given)
        score = press.score(layer.module, layer.hidden, layer.keys, layer.values, attentions, layer.given)
    return score[0].double().numpy()


def topk(scores: np.ndarray, s: int) -> list[int]:
    return torch.from_numpy(scores).topk(s).indices.sort().values.tolist()


@needs_kvpress
@pytest.mark.parametrize("s", [8, 16, 33, 128, 140])
def test_snapkv_keeps_what_kvpress_keeps(layer, s):
    window = observation_window(s)
    scores = kvpress_scores(layer, "SnapKVPress", window_size=window)
    for head, attention in enumerate(by_kv_head(layer, slice(-window, None))):
        assert snapkv(attention, s).tolist() == topk(scores[head], s)


@needs_kvpress
@pytest.mark.parametrize("s", [8, 64, 149])
def test_h2o_ranks_by_the_sums_of_which_kvpress_takes_means(layer, s):
    seen_by = np.arange(TOKENS, 0, -1)
    sums = kvpress_scores(layer, "ObservedAttentionPress", layer.attentions()) * seen_by
    for head, attention in enumerate(by_kv_head(layer, slice(None))):
        np.testing.assert_allclose(attention.sum(axis=0) / 2, sums[head], rtol=1e-4)  # two query heads
        assert h2o(attention, s, recent=0).tolist() == topk(sums[head], s)
        sums[head, -(s // 2) :] = np.inf
        assert h2o(attention, s).tolist() == topk(sums[head], s)


@needs_kvpress
@pytest.mark.parametrize("s", [2, 8, 64])
def test_tova_of_all_heads_ranks_as_kvpress_does_but_for_the_last_key(layer, s):
    scores = kvpress_scores(layer, "TOVAPress")
    last = layer.attentions()[0, :, -1].double().numpy()
    np.testing.assert_allclose(last.mean(axis=0)[:-1], scores[0, :-1], rtol=1e-4)
    kept = tova(last, s)
    without = kept[kept < TOKENS - 1]
    assert without.tolist() == topk(scores[0, :-1], without.size)


@needs_kvpress
@pytest.mark.parametrize("s", [5, 8, 64, 149])
def test_streaming_llm_keeps_what_kvpress_keeps(layer, s):
    scores = kvpress_scores(layer, "StreamingLLMPress", compression_ratio=1 - (s + 0.5) / TOKENS)
    assert streaming_llm(TOKENS, s).tolist() == np.flatnonzero(scores[0]).tolist()


@pytest.mark.parametrize("budget", [32, 64, 96])
@pytest.mark.parametrize("tokens", [144, TOKENS])
def test_quest_reads_the_pages_that_a_quest_cache_reads(layer, tokens, budget):
    keys, query = layer.keys[:, :, :tokens].double(), layer.query[:, :, tokens - 1 : tokens].double()
    pages = chosen_pages(query, page_bounds(keys), [page_count(budget, tokens)])[0, :, 0]
    group, compared = pages.shape[0] // keys.shape[1], 0
    for head, chosen in enumerate(pages):
        read = chosen.repeat_interleave(PAGE)[:tokens].nonzero().flatten().tolist()
        kept = quest(query[0, head, 0], keys[0, head // group], budget).tolist()
        if len(read) == budget:
            assert kept == read
        else:  # the short last page is among them: one page more fills the budget
            assert set(read) < set(kept) and len(kept) == budget
        compared += 1
    assert compared == 4


# Examples


def test_snapkv_smooths_over_neighbours_and_keeps_its_window():
    attention = np.zeros((1, 20))
    attention[0, [5, 7]] = 1.0
    attention[0, 12] = 1.5
    assert snapkv(attention, 4, protected=2).tolist() == [5, 6, 18, 19]
    assert snapkv(attention, 4, protected=2, kernel=1).tolist() == [5, 12, 18, 19]


def test_streaming_llm_is_sinks_then_recent():
    assert streaming_llm(100, 8).tolist() == [0, 1, 2, 3, 96, 97, 98, 99]
    assert streaming_llm(100, 3).tolist() == [0, 1, 2]


def test_a_page_that_does_not_fit_gives_its_recent_keys():
    keys = np.repeat([[0.0], [3.0], [2.0]], 4, axis=0)
    assert quest([1.0], keys, 6, page=4).tolist() == [4, 5, 6, 7, 10, 11]
    assert quest([-1.0], keys, 6, page=4).tolist() == [0, 1, 2, 3, 10, 11]


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: snapkv(np.ones((2, 9)), 9), "s: expected a whole number from 1 to 8"),
        (lambda: snapkv(np.ones((2, 9)), 4, protected=5), "protected: expected at most the budget 4, got 5"),
        (lambda: snapkv(np.ones((2, 9)), 4, kernel=4), "kernel: expected an odd number, got 4"),
        (lambda: snapkv(np.ones(9), 4), r"attention: expected a non-empty array of 2 dimensions, got shape \(9,\)"),
        (lambda: h2o(-np.ones((1, 9)), 4), "attention: expected weights >= 0, got -1"),
        (lambda: h2o(np.ones((1, 9)), 4, recent=5), "recent: expected at most the budget 4, got 5"),
        (lambda: h2o(np.ones((1, 9)), True), "s: expected a whole number"),
        (lambda: tova(np.full((1, 9), np.nan), 4), "attention: holds a number that is not finite"),
        (lambda: tova([["a", "b"]], 1), "attention: expected an array of real numbers"),
        (lambda: tova(np.ones((0, 9)), 4), "attention: expected a non-empty array"),
        (lambda: streaming_llm(9, 4, sinks=-1), "sinks: expected a whole number of at least 0, got -1"),
        (lambda: streaming_llm(9.0, 4), "size: expected a whole number of at least 1, got 9.0"),
        (lambda: quest(np.ones(3), np.ones((9, 2)), 4), r"keys: expected shape \(n, 3\)"),
        (lambda: quest(np.ones(2), np.ones((9, 2)), 4, page=0), "page: expected a whole number of at least 1"),
        (lambda: observation_window(0), "s: expected a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(InvalidInput, match=says):
        call()


def test_inputs_are_left_as_they_are(rng):
    row = random_row(rng, 30, 4)
    attention, keys = np.stack([row.p, row.p[::-1]]), np.array(row.v)
    before = attention.copy(), keys.copy()
    for rule in (snapkv, h2o, tova):
        rule(attention, 8)
    quest(keys[0], keys, 8)
    assert (attention == before[0]).all() and (keys == before[1]).all()
    assert (deployed.WINDOW, deployed.KERNEL, deployed.SINKS, deployed.PAGE) == (64, 5, 4, PAGE)
