"""The answers table: what is joined, in which order, and which files are refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contourkv.benchmark.records import (
    ANSWERED,
    CELL,
    COSTED,
    COSTS,
    MERGED,
    merge_answers,
    read_answers,
    write_answers,
    write_costs,
)
from contourkv.errors import InvalidInput

KEYS = ["model", "task", "sample", "question", "method", "storage", "visibility", "budget"]
PLAIN = {"int64": 0, "float64": 0.5, "category": ""}
CELLS = [
    ("full", "published", "agnostic", 1.0),
    ("snapkv", "published", "agnostic", 0.25),
    ("snapkv", "enforced", "agnostic", 0.25),
    ("snapkv", "published", "query_aware", 0.25),
    ("snapkv", "published", "agnostic", 0.1),
]


def answered(model: str = "tiny", task: str = "prose", length: int = 512, samples: int = 2, cells=CELLS):
    """Answers of one task: a row for each cell, sample and one of two questions."""
    rows = []
    for sample in range(samples):
        for question in range(2):
            for number, (method, storage, visibility, budget) in enumerate(cells):
                row = {name: PLAIN[kind] for name, kind in ANSWERED.items()}
                row |= {"model": model, "task": task, "length": length, "sample": sample, "question": question}
                row |= {"method": method, "storage": storage, "visibility": visibility, "budget": budget}
                row |= {"question_id": f"{task}/{sample}/{question}", "status": "ok", "answer": f"it is {number}"}
                row |= {"score": number / 8, "floor": math.nan, "held_bytes": 2**40 + number}
                rows.append(row)
    return pd.DataFrame(rows, columns=list(ANSWERED))


def costed(model: str = "tiny", length: int = 512, cells=CELLS) -> pd.DataFrame:
    rows = []
    for number, (method, storage, visibility, budget) in enumerate(cells):
        row = {"model": model, "length": length, "method": method, "storage": storage, "visibility": visibility}
        row |= {"budget": budget, "cost_status": "ok", "cost_message": "", "left_bytes": 100.0 + number + length}
        row |= {
            "probed_bytes": 150.0,
            "peak_bytes": 200.0 + number,
            "prefill_seconds": 0.1,
            "compress_seconds": 0.01 * number,
        }
        rows.append(row | {"tokens_per_s": 30.0 + number, "device": "cpu"})
    return pd.DataFrame(rows, columns=list(COSTED))


def written(folder: Path, answers: list[pd.DataFrame], costs: list[pd.DataFrame]) -> tuple[list[Path], list[Path]]:
    paths = [folder / f"answers-{number}.parquet" for number in range(len(answers))]
    for number, (path, frame) in enumerate(zip(paths, answers, strict=True)):
        write_answers(path, frame, {"config": f"a{number}"})
    probes = [folder / f"costs-{number}.parquet" for number in range(len(costs))]
    for number, (path, frame) in enumerate(zip(probes, costs, strict=True)):
        write_costs(path, frame, {"config": f"c{number}"})
    return paths, probes


def merged(folder: Path, answers: list[pd.DataFrame], costs: list[pd.DataFrame]) -> tuple[pd.DataFrame, dict]:
    merge_answers(*written(folder, answers, costs), folder / "merged.parquet")
    return read_answers(folder / "merged.parquet")


@pytest.fixture(scope="module")
def ordered(tmp_path_factory) -> tuple[tuple[Path, list[Path], list[Path]], bytes]:
    """Files, and what they are merged to in their own order."""
    folder = tmp_path_factory.mktemp("ordered")
    answers = [answered("one"), answered("one", "noise"), answered("two", length=64, cells=CELLS[1:])]
    paths, probes = written(folder, answers, [costed("one"), costed("two", 64)])
    merge_answers(paths, probes, folder / "merged.parquet")
    return (folder, paths, probes), (folder / "merged.parquet").read_bytes()


class TestMerge:
    def test_joins_costs_on_the_cell(self, tmp_path):
        """By model, length, method, storage, visibility and budget: each row against a look-up by hand."""
        answers = [
            answered("one", "prose", 512),
            answered("one", "noise", 512),
            answered("one", "long", 1024),
            answered("two", "prose", 512),
        ]
        costs = [costed("one", 512), costed("one", 1024, CELLS[:2]), costed("two", 512, CELLS[2:])]
        frame, _ = merged(tmp_path, answers, costs)
        assert list(frame.columns) == list(MERGED)
        assert len(frame) == sum(map(len, answers))
        known = {tuple(row[name] for name in CELL): row for probe in costs for row in probe.to_dict("records")}
        found = 0
        for row in frame.to_dict("records"):
            probe = known.get(tuple(row[name] for name in CELL))
            found += probe is not None
            for name in COSTS:
                if COSTED[name] == "category":
                    assert row[name] == ("" if probe is None else probe[name])
                else:
                    assert row[name] == probe[name] if probe else math.isnan(row[name])
        assert found == 4 * (2 * len(CELLS) + 2 + 3)

    @settings(max_examples=10)
    @given(seed=st.integers(0, 999), answers=st.permutations(range(3)), costs=st.permutations(range(2)))
    def test_order_of_files_and_rows_does_not_show_in_the_bytes(self, ordered, seed, answers, costs):
        (folder, paths, probes), merged = ordered
        frame = pd.read_parquet(paths[0]).sample(frac=1, random_state=seed)
        write_answers(paths[0], frame, {"config": "a0"})
        merge_answers([paths[at] for at in answers], [probes[at] for at in costs], folder / "again.parquet")
        assert (folder / "again.parquet").read_bytes() == merged

    def test_answers_stay_what_they_are_in_the_order_of_their_keys(self, tmp_path):
        answers = [answered("two"), answered("one", "noise"), answered("one")]
        frame, _ = merged(tmp_path, answers, [costed("one")])
        wanted = pd.concat(answers).sort_values(KEYS, ignore_index=True)
        for name, kind in ANSWERED.items():
            if kind != "category":
                assert str(frame[name].dtype) == kind
            pd.testing.assert_series_equal(frame[name], wanted[name], check_dtype=False)

    def test_without_probes_costs_are_unknown(self, tmp_path):
        frame, _ = merged(tmp_path, [answered()], [])
        assert list(frame.columns) == list(MERGED) and len(frame) == 20
        for name in COSTS:
            missing = frame[name] == "" if COSTED[name] == "category" else frame[name].isna()
            assert missing.all(), name

    def test_says_what_all_files_were_made_from(self, tmp_path):
        _, metadata = merged(tmp_path, [answered("one"), answered("two")], [costed("one")])
        assert metadata == {"answers": [{"config": "a0"}, {"config": "a1"}], "costs": [{"config": "c0"}]}

    def test_files_of_different_words_are_put_together(self, tmp_path):
        """Categories of one file that another does not know."""
        other = answered("two", "noise", cells=[("knorm", "enforced", "agnostic", 0.5)])
        other["message"], other["status"], other["score"] = "it failed", "failed", np.nan
        frame, _ = merged(tmp_path, [answered("one"), other], [])
        failed = frame[frame["status"] == "failed"]
        assert len(failed) == 4 and set(failed["message"]) == {"it failed"} and failed["score"].isna().all()
        assert set(frame["method"]) == {"full", "snapkv", "knorm"}


class TestRefused:
    def test_a_question_and_cell_in_two_files(self, tmp_path):
        files = written(tmp_path, [answered("one"), answered("one", samples=1, cells=CELLS[1:2])], [])
        line = (
            r"^answers: two rows for model one, task prose, sample 0, question 0, method snapkv, storage published, "
            r"visibility agnostic, budget 0.25$"
        )
        with pytest.raises(InvalidInput, match=line):
            merge_answers(*files, tmp_path / "merged.parquet")
        assert not (tmp_path / "merged.parquet").exists()

    def test_a_question_and_cell_twice_in_one(self, tmp_path):
        with pytest.raises(InvalidInput, match=r"^answers: two rows for model tiny"):
            merged(tmp_path, [pd.concat([answered(), answered(samples=1)])], [])

    @pytest.mark.parametrize("split", [True, False])
    def test_a_cell_that_was_probed_twice(self, tmp_path, split):
        """Else every answer of it would be there twice."""
        costs = [costed(), costed(cells=CELLS[2:3])]
        line = (
            r"^costs: two rows for model tiny, length 512, method snapkv, storage enforced, visibility agnostic, "
            r"budget 0.25$"
        )
        with pytest.raises(InvalidInput, match=line):
            merged(tmp_path, [answered()], costs if split else [pd.concat(costs)])

    def test_no_answers_at_all(self, tmp_path):
        with pytest.raises(InvalidInput, match=r"^answers: expected at least one file, got none$"):
            merge_answers([], [], tmp_path / "merged.parquet")

    @pytest.mark.parametrize("column", ANSWERED)
    def test_an_answers_file_without_a_column(self, tmp_path, column):
        files = written(tmp_path, [answered().drop(columns=column)], [])
        with pytest.raises(InvalidInput, match=rf"answers-0.parquet: columns missing: {column};"):
            merge_answers(*files, tmp_path / "merged.parquet")

    @pytest.mark.parametrize("column", COSTED)
    def test_a_costs_file_without_a_column(self, tmp_path, column):
        files = written(tmp_path, [answered()], [costed().drop(columns=column)])
        with pytest.raises(InvalidInput, match=rf"costs-0.parquet: columns missing: {column};"):
            merge_answers(*files, tmp_path / "merged.parquet")

    @pytest.mark.parametrize("column", MERGED)
    def test_a_merged_file_without_a_column(self, tmp_path, column):
        frame, metadata = merged(tmp_path, [answered()], [costed()])
        write_answers(tmp_path / "less.parquet", frame.drop(columns=column), metadata)
        with pytest.raises(InvalidInput, match=rf"less.parquet: columns missing: {column};"):
            read_answers(tmp_path / "less.parquet")

    def test_what_is_missing_or_no_parquet(self, tmp_path):
        with pytest.raises(InvalidInput, match=r"none.parquet: no such file"):
            merge_answers([tmp_path / "none.parquet"], [], tmp_path / "merged.parquet")
        whole = written(tmp_path, [answered()], [])[0][0].read_bytes()
        (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InvalidInput, match=r"half.parquet: not a whole parquet file"):
            merge_answers([tmp_path / "half.parquet"], [], tmp_path / "merged.parquet")
        with pytest.raises(InvalidInput, match=r"half.parquet: not a whole parquet file"):
            read_answers(tmp_path / "half.parquet")


def test_a_flipped_bit_is_found_wherever_it_lies(tmp_path):
    """In a page its checksum finds it; in the footer the parse or the provenance does, or nothing was said by it."""
    path = tmp_path / "answers.parquet"
    (answers, costs) = written(tmp_path, [answered()], [costed()])
    merge_answers(answers, costs, path)
    whole, _ = read_answers(path)
    content = path.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for place in rng.choice(len(content), 150, replace=False):
        broken = bytearray(content)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            frame, _ = read_answers(path)
        except InvalidInput as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
        else:
            pd.testing.assert_frame_equal(frame, whole)
    assert refused > 50
