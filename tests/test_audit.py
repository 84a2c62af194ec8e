"""Verdicts on deployed methods against eager attention and plain loops, against brute force, and taken to a file."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from capture.tiny_models import EAGER, WINDOW, WINDOWS, build, ids_of
from cut_off import goes_on
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv import audit
from contourkv.audit import METHODS, audit_context, audit_file, read_audit
from contourkv.benchmark.reading import Reading
from contourkv.capture import capture_rows
from contourkv.contexts.storage import Context, write_contexts
from contourkv.enumeration import MassPool, Neighbourhood
from contourkv.errors import ContourKVError, InvalidInput, InvariantBroken
from contourkv.measurement import measure_row
from contourkv.operator import Instance
from contourkv.selectors import observation_window, page_size
from contourkv.statistics.audit import audit_table
from contourkv.statistics.columns import AUDITED

IDS = ids_of(48)
POSITIONS = [47, 30]
KEYS = ["layer", "head", "kv_head", "position", "s", "method"]
NUMBERS = ["es", "mass", "es_max_mass", "es_pool", "dropped_mass", "spread"]


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(KEYS).set_index(KEYS)[NUMBERS]


def assert_same(found: pd.DataFrame, wanted: pd.DataFrame, rtol: float) -> None:
    pd.testing.assert_frame_equal(numbers(found), numbers(wanted), rtol=rtol, atol=1e-7, check_index_type=False)


# The oracle: a float64 model's own eager attention, plain loops over keys


def plain_kept(method: str, head: int, row: int, first: int, s: int, attention, query, keys, group: int) -> list[int]:
    """Keys in the context that a rule keeps for the row of position `row`, which sees `first` .. `row`.

    `attention` (heads, N, N), `query` (heads, N, d) and `keys` (H, N, d) of one layer.
    """
    seen = list(range(first, row + 1))
    own = range(head // group * group, head // group * group + group)

    def best(score, among, count):
        return sorted(among, key=lambda key: -score(key))[:count]

    if method == "streaming_llm":
        return [*seen[:4], *seen[len(seen) - s + 4 :]] if s >= 4 else seen[:s]
    if method == "tova":
        return best(lambda key: attention[head, row, key], seen, s)
    if method == "tova_layer":
        return best(lambda key: sum(attention[h, row, key] for h in range(len(attention))), seen, s)
    if method == "h2o":
        recent = seen[len(seen) - s // 2 :]
        heavy = best(
            lambda key: sum(attention[h, at, key] for h in own for at in range(row + 1)),
            [key for key in seen if key not in recent],
            s - s // 2,
        )
        return heavy + recent
    if method == "snapkv":
        window = observation_window(s)
        recent = seen[len(seen) - window :]
        others = [key for key in seen if key not in recent]
        scored = {key: sum(attention[h, at, key] for h in own for at in recent) for key in others}
        return best(lambda key: sum(scored.get(key + off, 0.0) for off in range(-2, 3)), others, s - window) + recent
    assert method == "quest"
    size, q, held = page_size(s), query[head, row], keys[head // group]
    pages = [seen[start : start + size] for start in range(0, len(seen), size)]
    bounds = [sum(max(q[c] * held[page, c].min(), q[c] * held[page, c].max()) for c in range(q.size)) for page in pages]
    kept: list[int] = []
    for page in sorted(range(len(pages)), key=lambda number: -bounds[number]):
        kept += pages[page][-(s - len(kept)) :] if len(kept) < s else []
    return kept


def oracle(model, ids: list[int], positions: list[int], budgets: list[int]) -> pd.DataFrame:
    """Every verdict but es_pool, from the model's eager attention weights and the values in its cache."""
    reading = Reading.of(model, torch.tensor([ids]))
    cache = DynamicCache()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), past_key_values=cache, output_attentions=True).attentions
    records = []
    for number, (weights, held) in enumerate(zip(attentions, cache.layers, strict=True)):
        attention, values = weights[0].double().numpy(), held.values[0].double().numpy()
        query, keys = (tensor[0].double().numpy() for tensor in (reading.layers[number].query, held.keys))
        group, window = len(attention) // len(values), reading.layers[number].window
        how = reading.layers[number].how
        has_sink = how["sinks"] is not None
        for head in range(len(attention)):
            for row in positions:
                first = 0 if window is None else max(0, row - window + 1)
                p, v = attention[head, row, first : row + 1], values[head // group, first : row + 1]
                if has_sink:
                    # From the heaviest key; 1 - sum p would cancel.
                    top = first + int(p.argmax())
                    score = how["scaling"] * query[head, row] @ keys[head // group, top]
                    sink = p.max() * np.exp(how["sinks"][head].item() - score)
                    p, v = np.append(p, sink), np.append(v, np.zeros((1, v.shape[1])), axis=0)
                p = p / p.sum()
                mu = p @ v
                order = sorted(range(p.size), key=lambda key: -p[key])

                def error(kept, p=p, v=v, mu=mu):
                    return np.linalg.norm(mu - p[kept] @ v[kept] / p[kept].sum())

                for s in budgets:
                    for method in METHODS:
                        kept = plain_kept(method, head, row, first, s - has_sink, attention, query, keys, group)
                        assert len(set(kept)) == s - has_sink and first <= min(kept) and max(kept) <= row
                        at = [key - first for key in kept] + [p.size - 1] * has_sink
                        records.append(
                            {
                                "layer": number,
                                "head": head,
                                "kv_head": head // group,
                                "position": row,
                                "s": s,
                                "method": method,
                                "es": error(at),
                                "mass": p[at].sum(),
                                "es_max_mass": error(order[:s]),
                                "es_pool": np.nan,
                                "dropped_mass": p[order[s:]].sum(),
                                "spread": np.linalg.norm(v - mu, axis=1).max(),
                            }
                        )
    return pd.DataFrame(records)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text", "gemma2", "gpt_oss"])
def test_verdicts_are_those_of_eager_attention(architecture):
    """Of full and sliding layers, normed and capped scores, sinks."""
    # gpt_oss's experts know no float64.
    exact = architecture != "gpt_oss"
    model = build(architecture, torch.float64 if exact else torch.float32)
    if architecture in EAGER:
        model.set_attn_implementation("eager")
    found = audit_context(model, IDS, POSITIONS, [5, 16])
    assert len(found) == 2 * 4 * 2 * 2 * len(METHODS)
    assert_same(found, oracle(model, IDS, POSITIONS, [5, 16]), rtol=2e-5 if exact else 2e-4)


def test_the_pool_is_brute_force_and_no_method_is_below_it(llama):
    """On complete pools es_pool is ES(s) itself."""
    position, families = 17, {2: [MassPool(2, 0, 18)], 3: [MassPool(3, 0, 18)]}
    found = audit_context(llama, IDS, [position], [2, 3, 8], families=families)
    assert found.loc[found["s"] == 8, "es_pool"].isna().all()
    found = found[found["s"] < 8]
    assert (found["es"] >= found["es_pool"] * (1 - 1e-9)).all()
    for rows in capture_rows(llama, IDS, [position]):
        for row in rows.rows():
            p, v = row.p, row.v.astype(float)
            for s in (2, 3):
                sets = np.array(list(combinations(range(p.size), s)))
                outputs = np.einsum("as,asd->ad", p[sets], v[sets]) / p[sets].sum(axis=1)[:, None]
                least = np.linalg.norm(p @ v - outputs, axis=1).min()
                same = found[(found["layer"] == rows.layer) & (found["head"] == row.head) & (found["s"] == s)]
                assert same["es_pool"].to_numpy() == pytest.approx(least, rel=1e-8)


def test_rows_are_those_of_the_instances_table(llama):
    families = {4: [MassPool(4, 0, 12), Neighbourhood(4, 2, 10)]}
    found = audit_context(llama, IDS, POSITIONS, [4], families=families, swap_keys=24).set_index(KEYS)
    for rows in capture_rows(llama, IDS, POSITIONS):
        for row in rows.rows():
            (measured,) = measure_row(Instance(row.p, row.v), families, 24)
            for method in METHODS:
                verdict = found.loc[(rows.layer, row.head, row.kv_head, row.position, 4, method)]
                for column in ("es_max_mass", "es_pool", "dropped_mass", "spread"):
                    assert verdict[column] == pytest.approx(measured[column], rel=1e-9)


def test_tova_of_a_head_is_max_mass_to_the_bit(llama):
    found = audit_context(llama, IDS, POSITIONS, [4, 8, 16])
    tova = found[found["method"] == "tova"]
    assert (tova["es"] == tova["es_max_mass"]).all() and len(tova) == 2 * 4 * 2 * 3
    assert (found.loc[found["method"] == "tova_layer", "es"].to_numpy() != tova["es"].to_numpy()).any()
    np.testing.assert_allclose(tova["mass"], 1 - tova["dropped_mass"], rtol=1e-12)


# What must not matter


@settings(max_examples=8)
@given(st.lists(st.integers(9, 47), min_size=1, max_size=4, unique=True), st.integers(1, 60))
def test_neither_other_rows_nor_blocks_nor_later_tokens_matter(positions, block):
    model = build("qwen2")
    former, audit.ROWS_AT_ONCE = audit.ROWS_AT_ONCE, block
    try:
        together = audit_context(model, IDS, positions, [8])
    finally:
        audit.ROWS_AT_ONCE = former
    alone = [audit_context(model, IDS[: position + 1], [position], [8]) for position in positions]
    assert_same(together, pd.concat(alone), rtol=2e-3)


def test_parts_of_the_question_give_parts_of_the_answer(llama):
    whole = audit_context(llama, IDS, POSITIONS, [4, 8])
    part = audit_context(llama, IDS, POSITIONS, [8], methods=["quest", "h2o"], layers=[1])
    same = whole[(whole["layer"] == 1) & (whole["s"] == 8) & whole["method"].isin(["quest", "h2o"])]
    assert_same(part, same, rtol=1e-12)


def test_attention_is_held_in_blocks_of_rows_and_the_model_gets_its_own_back(llama, monkeypatch):
    asked, own, masses = [], llama.config._attn_implementation, audit.window_masses
    monkeypatch.setattr(audit, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(audit, "window_masses", lambda *a, rows, **k: asked.append(rows) or masses(*a, rows=rows, **k))
    layers = []
    audit_context(llama, IDS, POSITIONS, [8], on_layer=layers.append)
    assert max(asked) == 10 and sum(asked) == 2 * (48 + 2 * observation_window(8))
    assert layers == [0, 1] and llama.config._attn_implementation == own


def test_keys_without_weight_leave_no_error():
    """Scores hundreds apart: what is kept may weigh nothing at all in float64."""
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(80)
    found = audit_context(model, IDS, POSITIONS, [1], methods=["streaming_llm", "tova"])
    lost = found["mass"] == 0
    assert lost.any() and not lost.all() and (found["es"].isna() == lost).all()
    assert (found.loc[lost, "method"] == "streaming_llm").all() and found["es_max_mass"].notna().all()


# What stops it


@pytest.mark.parametrize(
    "given, says",
    [
        ({"budgets": [8, 31]}, r"budgets: expected whole numbers from 1 to 30 \(the row of position 30 in layer 0"),
        ({"budgets": []}, "budgets: expected at least one"),
        ({"budgets": [8, 8]}, "budgets: expected at least one, none twice"),
        ({"budgets": [0]}, "budgets: expected a whole number of at least 1, got 0"),
        ({"methods": ["tova", "snap"]}, "methods: expected some of snapkv, h2o, .*, got 'snap'"),
        ({"positions": [48]}, "positions: 48 lies outside the context"),
        ({"ids": [9999]}, "ids: token 9999"),
        ({"layers": [2]}, r"layers: expected some of 0..1, got \[2\]"),
        (
            {"families": {8: [MassPool(7, 0, 9)]}},
            "head 0, .*families: expected at least one family, each with budget 8",
        ),
    ],
)
def test_bad_arguments_are_named(llama, given, says):
    arguments = {"ids": IDS, "positions": POSITIONS, "budgets": [8], **given}
    with pytest.raises(InvalidInput, match=says):
        audit_context(llama, **arguments)


def test_a_budget_must_fit_into_a_sliding_window_and_beside_a_sink():
    with pytest.raises(InvalidInput, match=f"from 1 to {WINDOW - 1} .*in layer 1 sees {WINDOW} keys.*got {WINDOW}"):
        audit_context(build("qwen2"), IDS, POSITIONS, [WINDOW])
    assert WINDOWS["qwen2"] == [None, WINDOW]
    with pytest.raises(InvalidInput, match="from 2 to"):
        audit_context(build("gpt_oss"), IDS, POSITIONS, [1])


def test_a_rule_that_keeps_too_much_or_an_error_too_large_stops_it(llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "h2o", lambda view, head, s: np.arange(view.size - 1))
        with pytest.raises(InvariantBroken, match=r"heavier than max-mass: .*layer 0, head 0, .*method h2o"):
            audit_context(llama, IDS, POSITIONS, [4], methods=["tova", "h2o"])
    monkeypatch.setattr(audit, "forced_error", lambda instance, kept: 1e6)
    with pytest.raises(InvariantBroken, match=r"the error is above 2 D \(1 - p\(A\)\)"):
        audit_context(llama, IDS, POSITIONS, [4], methods=["h2o"])


# To a file


SETTINGS = {
    "positions": POSITIONS,
    "budgets": [4, 8],
    "methods": ["snapkv", "quest"],
    "families": [{"budget": 4, "core": 0, "pool": 12}, {"budget": 16, "core": 0, "pool": 20}],
    "swap_keys": 24,
}


@pytest.fixture
def folder(tmp_path, llama):
    path = tmp_path / "tiny-llama"
    llama.save_pretrained(path)
    (path / "source.json").write_text('{"source": "random", "revision": "r1"}')
    return path


@pytest.fixture
def contexts(tmp_path):
    path = tmp_path / "prose.json"
    write_contexts(path, [Context("prose", index, ids_of(48, index), {"seed": 5}) for index in range(2)])
    return path


def test_a_file_of_contexts_becomes_one_table(tmp_path, folder, contexts, llama, capfd):
    audit_file(folder, contexts, tmp_path / "a.parquet", SETTINGS)
    audit_file(folder, contexts, tmp_path / "b.parquet", SETTINGS)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert "audit tiny-llama: 4 of 4 layers" in capfd.readouterr().err
    frame, metadata = read_audit(tmp_path / "a.parquet")
    assert list(frame.columns) == list(AUDITED)
    for index in range(2):
        part = frame[frame["input"] == f"prose/{index:03d}"]
        families = {4: [MassPool(4, 0, 12)]}
        given = {"methods": SETTINGS["methods"], "families": families, "swap_keys": 24}
        again = audit_context(llama, ids_of(48, index), POSITIONS, [4, 8], **given)
        assert_same(part.astype({"method": str}), again, rtol=1e-9)
    assert set(frame["model"]) == {"tiny-llama"} and set(frame["arm"]) == {"prose"}
    assert (frame["es_pool"].isna() == (frame["s"] == 8)).all()
    assert metadata["model"] == {"name": "tiny-llama", "revision": "r1"} and metadata["seeds"] == {"contexts.prose": 5}

    audit_file(folder, contexts, tmp_path / "c.parquet", {**SETTINGS, "swap_keys": 25})
    assert read_audit(tmp_path / "c.parquet")[1]["config"] != metadata["config"]


def test_an_audit_that_was_cut_off_goes_on_at_its_context(tmp_path, folder, contexts):
    def job(output, by):
        audit_file(folder, contexts, output, SETTINGS, made_by=by)

    goes_on(job, tmp_path / "audit.parquet", 2)


def test_nothing_is_left_of_an_audit_that_fails(tmp_path, folder, contexts, monkeypatch):
    output, done, real = tmp_path / "out" / "a.parquet", [], audit.audit_context

    def fails_at_the_second(*args, **kwargs):
        if done:
            raise ContourKVError("stopped")
        done.append(real(*args, **kwargs))
        return done[0]

    monkeypatch.setattr(audit, "audit_context", fails_at_the_second)
    with pytest.raises(ContourKVError, match="stopped"):
        audit_file(folder, contexts, output, SETTINGS)
    assert not output.exists() and not list(tmp_path.rglob(".partial-*"))


def test_inputs_are_checked_before_the_weights_are_read(tmp_path, folder, contexts, monkeypatch):
    def unread(*args, **kwargs):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(audit, "load_model", unread)
    output = tmp_path / "a.parquet"
    for change, says in (
        ({"budgets": [31]}, r"prose\.json: context prose/000: budgets: expected whole numbers from 1 to 30"),
        ({"positions": [50]}, r"prose\.json: context prose/000: positions: 50 lies outside"),
        ({"methods": ["max"]}, "methods: expected some of"),
        ({"families": [{"budget": 4, "free": 2, "pool": 9}]}, "no mass pool for budget 4"),
    ):
        with pytest.raises(InvalidInput, match=says):
            audit_file(folder, contexts, output, {**SETTINGS, **change})
    with pytest.raises(InvalidInput, match="there is no such model folder"):
        audit_file(tmp_path / "none", contexts, output, SETTINGS)
    with pytest.raises(InvalidInput, match=r"none\.json: there is no such file"):
        audit_file(folder, tmp_path / "none.json", output, SETTINGS)


def test_the_table_is_plain_pandas(rng):
    n = 240
    frame = pd.DataFrame(
        {
            "model": np.repeat(["a", "b"], n),
            "arm": "prose",
            "input": np.tile(np.repeat(["0", "1", "2"], n // 3), 2),
            "layer": np.tile(np.arange(n) // 2, 2),
            "head": 0,
            "position": 9,
            "s": np.tile(np.repeat([8, 64], n // 2), 2),
            "method": np.tile(["h2o", "quest"], n),
            "es_max_mass": rng.uniform(1, 2, 2 * n),
            "dropped_mass": rng.uniform(0, 1, 2 * n),
            "mass": 0.5,
            "spread": 2.0,
        }
    )
    shared = frame.groupby(["model", "input", "layer", "s"])["es_max_mass"].transform("first")
    frame["es_max_mass"] = shared
    frame["es_pool"] = np.where(frame["s"] == 8, shared * 0.9, np.nan)
    frame["es"] = shared * rng.uniform(1, 4, 2 * n)
    table = audit_table(frame, 50, 1, {"a": "First", "b": "Second"})
    assert list(dict.fromkeys(table["model"])) == ["First", "Second", "all models"]
    assert list(dict.fromkeys(table["method"])) == ["max-mass", "H2O", "Quest"]
    row = table[(table["model"] == "First") & (table["s"] == "8") & (table["method"] == "H2O")].iloc[0]
    some = frame[(frame["model"] == "a") & (frame["s"] == 8) & (frame["method"] == "h2o")]
    assert row["over_max_mass"] == pytest.approx((some["es"] / some["es_max_mass"]).median())
    assert row["over_pool_p90"] == pytest.approx((some["es"] / some["es_pool"]).quantile(0.9))
    excess = (some["es"] - some["es_pool"]) / some["spread"]
    assert row["spearman"] == pytest.approx(some["dropped_mass"].corr(excess, method="spearman"))
    own = table[(table["model"] == "First") & (table["s"] == "64") & (table["method"] == "max-mass")].iloc[0]
    assert own["over_max_mass"] == 1 and np.isnan(own["over_pool"]) and own["note"] == "spearman: constant"
