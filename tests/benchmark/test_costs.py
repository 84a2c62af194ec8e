"""Cost probes: bytes by hand and as the storages hold them, peaks that a press really has, and a model left alone."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from cut_off import goes_on

from contourkv.benchmark.choosing import ratio_of
from contourkv.benchmark.costs import Probe, published_press, run_costs
from contourkv.benchmark.methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, RECTANGULAR
from contourkv.benchmark.quest import PAGE
from contourkv.benchmark.records import COSTED, COSTS, merge_answers, read_answers
from contourkv.benchmark.running import Cell, cells, run_task
from contourkv.benchmark.samples import Question, Sample, Task, write_task
from contourkv.errors import InvalidInput
from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model
from contourkv.press.contour import POSITION_BYTES, TABLE_BYTES
from contourkv.press.scores import attention_modules
from contourkv.statistics.instances import read_columns

KVPRESS = importlib.util.find_spec("kvpress") is not None
needs_kvpress = pytest.mark.skipif(not KVPRESS, reason="kvpress is not installed")
logging.getLogger("kvpress").setLevel(logging.ERROR)

LAYERS, HEADS, DIM, TOKENS, STEPS = 3, 2, 16, 200, 3
ENTRY = 2 * DIM * 4
FULL = LAYERS * HEADS * TOKENS * ENTRY
CONTEXT = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(3))
BUDGETS = (0.25, 0.6)
# KVzip asks for the context in these words, a byte a token, and repeats it.
REPLAY = len("\n\nRepeat the previous context exactly.") + len("\n") + TOKENS


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for architecture in ("llama", "gemma3_text"):
        made[architecture] = tmp_path_factory.mktemp("models") / architecture
        make_model({"architecture": architecture, "seed": 3}, made[architecture], architecture)
    return made


@functools.cache
def probe_of(folder: Path) -> Probe:
    return Probe(load_model(folder), CONTEXT, 5, STEPS)


def cell(name: str, storage: str, budget: float = 1.0) -> Cell:
    return Cell(METHODS[name], storage, AGNOSTIC, budget)


SECONDS = ("prefill_seconds", "compress_seconds", "tokens_per_s")
CELLS = [each for each in cells(list(METHODS.values()), BUDGETS) if each.storage != RECTANGULAR]
OWN = [each for each in CELLS if each.method.name in ("full", "quest", "contour")]
MEASURED = CELLS if KVPRESS else OWN


def named(each: Cell) -> str:
    return f"{each.method.name}-{each.storage}-{each.budget:g}"


def state_of(model: torch.nn.Module) -> list[tuple]:
    return [
        (name, sorted(vars(module)), sorted(module._modules), getattr(module, "masked_key_indices", None))
        + (len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


@pytest.fixture(scope="module")
def measured(folders) -> dict[Cell, dict[str, float]]:
    probe = probe_of(folders["llama"])
    return {each: probe.measure(each) for each in MEASURED}


def held_by(probe: Probe, each: Cell) -> int:
    """Bytes of the storage that holds what a cell chooses."""
    chosen = probe.chooser.choose(each.method, each.storage, each.budget)
    storage = each.kind(probe.reading, [chosen])
    with storage.ready():
        return storage.held()[0].total


class TestProbe:
    @pytest.mark.parametrize("each", MEASURED, ids=named)
    def test_left_bytes_are_those_of_the_storage(self, folders, measured, each):
        probe, left = probe_of(folders["llama"]), measured[each]["left_bytes"]
        nominal = probe.chooser.nominal_bytes(each.budget)
        assert probe.full_bytes == FULL
        if each.method.keeps == "all":
            assert left == FULL
        elif each.method.keeps == "pages":
            assert left == FULL + HEADS * 2 * DIM * 4 * math.ceil(TOKENS / PAGE)  # one layer that is not dense
        elif each.method.name == "kvzip" and each.storage == PUBLISHED:
            # The cache is left as a view of what the replay appended to.
            dropped = int(LAYERS * HEADS * TOKENS * ratio_of(each.budget))
            assert left == LAYERS * HEADS * (TOKENS + REPLAY) * ENTRY + 24 * dropped
            assert held_by(probe, each) == FULL + 24 * dropped
        elif each.method.name == "contour_compactor":  # its press blends by a share of bytes that counts positions
            assert nominal - (ENTRY + POSITION_BYTES) < left <= nominal
        else:
            assert left == held_by(probe, each)
        if each.storage == ENFORCED:
            assert 0.95 * nominal < left <= nominal

    @pytest.mark.parametrize("each", MEASURED, ids=named)
    def test_peaks_by_hand(self, measured, each):
        """The most that is held when a layer has attended, before anything of it is dropped."""
        peak, left = measured[each]["peak_bytes"], measured[each]["left_bytes"]
        assert peak >= left
        layer = HEADS * TOKENS * ENTRY
        appended = HEADS * REPLAY * ENTRY
        observed = FULL + LAYERS * HEADS * (POSITION_BYTES * TOKENS + TABLE_BYTES)
        if each.method.name == "contour_kvzip":  # the replay runs over its storage, a layer at a time beside it
            assert peak == observed + layer + appended
        elif each.method.name == "kvzip":  # through the replay every layer holds what was appended to it
            assert peak == max(FULL + LAYERS * appended, left) > FULL
        elif each.method.keeps == "all":
            assert peak == FULL
        elif each.method.keeps == "pages":
            assert peak == left > FULL
        elif each.method.keeps == "ragged":  # one level for all layers: nothing is dropped before the last is seen
            assert peak == observed
        elif each.method.keeps == "heads" and each.storage == ENFORCED:  # and the masks of the layers before
            kept = int(
                (each.budget * FULL - LAYERS * HEADS * TABLE_BYTES) / (LAYERS * HEADS * (ENTRY + POSITION_BYTES))
            )
            assert peak == FULL + (LAYERS - 1) * 24 * HEADS * (TOKENS - kept)
        elif each.method.keeps == "heads":
            assert peak == left > FULL
        elif each.storage == ENFORCED:
            assert peak == FULL
        else:  # layers before are cut already
            assert peak == layer + (LAYERS - 1) * left / LAYERS

    @pytest.mark.parametrize("each", MEASURED, ids=named)
    def test_times_are_times(self, folders, measured, each):
        found = measured[each]
        assert set(found) == {"probed_bytes", "left_bytes", "peak_bytes", *SECONDS}
        assert all(type(value) is float and math.isfinite(value) for value in found.values())
        assert found["tokens_per_s"] > 0
        assert found["prefill_seconds"] > 0
        assert found["compress_seconds"] > -found["prefill_seconds"]

    @needs_kvpress
    def test_a_replay_takes_longer_than_a_norm(self, measured):
        costly, cheap = (measured[cell(name, PUBLISHED, 0.25)]["compress_seconds"] for name in ("kvzip", "knorm"))
        assert costly > cheap

    @pytest.mark.parametrize("name", ["full", "contour", "quest", *(["kvzip", "h2o"] if KVPRESS else [])])
    def test_decodes_as_many_tokens_as_it_times(self, folders, name):
        """One more comes first; its time does not count."""
        probe, calls = probe_of(folders["llama"]), []
        method = METHODS[name]
        hook = probe.model.register_forward_hook(lambda *_: calls.append(1))
        try:
            probe.measure(cell(name, method.storages[0], 1.0 if name == "full" else 0.5))
        finally:
            hook.remove()
        assert len(calls) == STEPS + 1

    @pytest.mark.parametrize("each", [each for each in MEASURED if each.budget != 0.6], ids=named)
    def test_the_model_is_left_as_it_was(self, folders, each):
        probe = probe_of(folders["llama"])
        probe.measure(cell("full", PUBLISHED))
        before, attends = state_of(probe.model), probe.model.config._attn_implementation
        probe.measure(each)
        assert state_of(probe.model) == before
        assert probe.model.config._attn_implementation == attends == "sdpa"

    @needs_kvpress
    @pytest.mark.parametrize("name", ["h2o", "kvzip"])
    def test_also_by_a_press_that_fails(self, folders, name):
        """H2O's is called with a budget for nothing, KVzip on a model that kvpress cannot serve."""
        probe = probe_of(folders["llama" if name == "h2o" else "gemma3_text"])
        before, attends = state_of(probe.model), probe.model.config._attn_implementation
        refused = {"h2o": InvalidInput, "kvzip": ValueError}[name]
        with pytest.raises(refused):
            probe.measure(cell(name, ENFORCED if name == "h2o" else PUBLISHED, 0.001 if name == "h2o" else 0.5))
        assert state_of(probe.model) == before
        assert probe.model.config._attn_implementation == attends == "sdpa"

    @needs_kvpress
    def test_h2o_sees_weights_whatever_the_model_attends_with(self, folders, measured):
        probe = probe_of(folders["llama"])
        assert all(module.config._attn_implementation == "sdpa" for module in attention_modules(probe.model))
        assert measured[cell("h2o", PUBLISHED, 0.25)]["left_bytes"] == LAYERS * HEADS * (TOKENS // 4) * ENTRY

    @pytest.mark.parametrize("name", ["full", "contour", "quest"])
    def test_sliding_layers_hold_their_window(self, folders, name):
        probe = probe_of(folders["gemma3_text"])
        shown = 2 * 31 + TOKENS  # two layers of a window of 32
        assert probe.full_bytes == HEADS * shown * ENTRY
        found = probe.measure(cell(name, METHODS[name].storages[0], 1.0 if name == "full" else 0.5))
        if name == "contour":
            nominal = probe.chooser.nominal_bytes(0.5)
            assert nominal - (ENTRY + POSITION_BYTES) < found["left_bytes"] <= nominal
        elif name == "quest":  # its bounds are those of layers behind the first two that have no window: none
            assert found["left_bytes"] == probe.full_bytes
        else:
            assert found["left_bytes"] >= probe.full_bytes

    @needs_kvpress
    @pytest.mark.parametrize("name", ["expected_attention", "adakv_expected_attention"])
    @pytest.mark.parametrize("storage", [PUBLISHED, ENFORCED])
    def test_two_rotary_bases_are_served(self, folders, name, storage):
        """kvpress hangs Gemma 3's one module on all its layers, whose bases differ."""
        probe, each = probe_of(folders["gemma3_text"]), cell(name, storage, 0.5)
        before = state_of(probe.model)
        left, held = probe.measure(each)["left_bytes"], held_by(probe, each)
        if storage == PUBLISHED:
            assert left == held
        else:  # a press counts what the windows have passed
            assert 0.95 * held < left <= held
        assert state_of(probe.model) == before


@needs_kvpress
class TestPublishedPress:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("streaming_llm", "StreamingLLMPress"),
            ("knorm", "KnormPress"),
            ("tova", "TOVAPress"),
            ("snapkv", "SnapKVPress"),
            ("expected_attention", "ExpectedAttentionPress"),
            ("compactor", "CompactorPress"),
            ("kvzip", "KVzipPress"),
            ("random", "RandomPress"),
        ],
    )
    def test_is_kvpress_own_with_its_own_settings(self, name, kind):
        import kvpress

        press = published_press(METHODS[name], 0.4)
        assert type(press) is getattr(kvpress, kind) and press == getattr(kvpress, kind)(compression_ratio=0.4)

    @pytest.mark.parametrize(("name", "inner"), [("adakv_snapkv", "SnapKVPress"), ("adakv_expected_attention", None)])
    def test_adakv_is_around_another(self, name, inner):
        import kvpress

        press = published_press(METHODS[name], 0.4)
        assert type(press) is kvpress.AdaKVPress and press.compression_ratio == 0.4
        assert type(press.press) is getattr(kvpress, inner or "ExpectedAttentionPress")

    def test_h2o_is_observed_attention_and_the_last_keys(self):
        import kvpress

        press = published_press(METHODS["h2o"], 0.4)
        assert isinstance(press, kvpress.ObservedAttentionPress) and press.compression_ratio == 0.4
        keys, weights = torch.zeros(1, 2, 10, 4), torch.rand(1, 4, 10, 10, generator=torch.Generator().manual_seed(0))
        scores = press.score(None, None, keys, keys, weights, {})
        plain = kvpress.ObservedAttentionPress(0.4).score(None, None, keys, keys, weights, {})
        assert torch.equal(scores[..., :7], plain[..., :7])  # six stay, three of them the last
        assert (scores[..., 7:] > plain.amax()).all()

    @pytest.mark.parametrize("name", ["full", "quest", "contour"])
    def test_others_have_none(self, name):
        with pytest.raises(InvalidInput, match=rf"^{name}: kvpress has no press of it$"):
            published_press(METHODS[name], 0.5)


def task_file(path: Path, tokens: int = TOKENS) -> Path:
    ids = torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(9)).tolist()
    samples = [Sample(0, 70, ids, [Question([5, 9, 7], ["x"], [], [])], {})]
    task = Task("prose", "niah_single", "accuracy", "all", 256, "prose", 0.0, 3, samples, {"config": "abc"})
    write_task(path, task)
    return path


SETTINGS = {
    "methods": ["full", "kvzip", "expected_attention", "knorm", "contour", "quest"],
    "query_aware": ["knorm"],
    "budgets": [0.001, 0.5],
    "costs": {"tokens": 2},
}


class TestRunCosts:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_one_row_a_cell_and_a_failure_is_its_own(self, folders, tmp_path, architecture):
        output = tmp_path / "costs.parquet"
        run_costs(folders[architecture], task_file(tmp_path / "task.json"), output, SETTINGS, model_name="small")
        frame, _ = read_columns(output, COSTED)
        assert list(frame.columns) == list(COSTED)
        found = {(row["method"], row["storage"], row["budget"]): row for row in frame.to_dict("records")}
        kvpress = [
            (name, storage) for name in ("kvzip", "expected_attention", "knorm") for storage in (PUBLISHED, ENFORCED)
        ]
        each_budget = [*kvpress, ("contour", ENFORCED), ("quest", PUBLISHED)]
        wanted = {("full", PUBLISHED, 1.0)} | {(*pair, budget) for pair in each_budget for budget in (0.001, 0.5)}
        assert set(found) == wanted and len(frame) == len(wanted)
        for (method, storage, budget), row in found.items():
            assert (row["model"], row["length"], row["visibility"], row["device"]) == ("small", 256, AGNOSTIC, "cpu")
            numbers = [row[name] for name, kind in COSTED.items() if kind == "float64" and name != "budget"]
            fails = storage == ENFORCED and budget == 0.001
            fails |= architecture == "gemma3_text" and method == "kvzip"
            fails |= not KVPRESS and method not in ("full", "contour", "quest")
            assert row["cost_status"] == ("failed" if fails else "ok"), (method, storage, budget, row["cost_message"])
            assert bool(row["cost_message"]) == fails and "\n" not in row["cost_message"]
            assert all(map(math.isnan, numbers)) if fails else all(map(math.isfinite, numbers))
            if storage == ENFORCED and budget == 0.001 and (KVPRESS or method == "contour") and architecture == "llama":
                assert "not hold one entry in each" in row["cost_message"]

    def test_probes_that_were_cut_off_go_on_at_their_cell(self, folders, tmp_path, monkeypatch):
        task = task_file(tmp_path / "task.json")
        settings = {**SETTINGS, "methods": ["full", "contour", "quest"], "budgets": [0.5]}
        # seconds do not come again
        monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
        goes_on(
            lambda output, by: run_costs(folders["llama"], task, output, settings, made_by=by),
            tmp_path / "costs.parquet",
            3,
        )

    def test_joins_the_answers_of_its_cells(self, folders, tmp_path):
        folder, task = folders["llama"], task_file(tmp_path / "task.json")
        run_costs(folder, task, tmp_path / "costs.parquet", SETTINGS)
        run_task(folder, task, tmp_path / "answers.parquet", SETTINGS)
        merge_answers([tmp_path / "answers.parquet"], [tmp_path / "costs.parquet"], tmp_path / "merged.parquet")
        frame, _ = read_answers(tmp_path / "merged.parquet")
        probed = (frame["visibility"] == AGNOSTIC) & (frame["storage"] != RECTANGULAR)
        assert set(frame.loc[probed, "device"]) == {"cpu"} and set(frame.loc[~probed, "device"]) == {""}
        assert frame.loc[~probed, ["peak_bytes", "left_bytes", "tokens_per_s"]].isna().all(axis=None)
        assert list(frame.columns[-len(COSTS) :]) == COSTS
        costs = read_columns(tmp_path / "costs.parquet", COSTED)[0]
        for row in costs.to_dict("records"):
            same = frame[probed & (frame["method"] == row["method"]) & (frame["storage"] == row["storage"])]
            same = same[same["budget"] == row["budget"]]
            assert len(same) == 1
            pd.testing.assert_series_equal(
                same["peak_bytes"].astype(float), pd.Series([row["peak_bytes"]], same.index), check_names=False
            )
        ok = frame["cost_status"] == "ok"
        plain = ok & frame["method"].isin(["full", "knorm", "contour", "quest"])
        assert (frame.loc[plain, "left_bytes"] == frame.loc[plain, "held_bytes"]).all()
        assert (frame.loc[ok, "peak_bytes"] >= frame.loc[ok, "left_bytes"]).all()

    def test_an_unknown_method_is_refused(self, folders, tmp_path):
        settings = {**SETTINGS, "methods": ["snapvk"]}
        with pytest.raises(InvalidInput, match=r"^benchmark.methods: unknown method 'snapvk'; expected some of full, "):
            run_costs(folders["llama"], task_file(tmp_path / "task.json"), tmp_path / "costs.parquet", settings)
