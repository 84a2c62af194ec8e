"""paper.md and paper.csv: every claim has its row, with the numbers of the tables and a command of its rule."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_instances import make_instances

from contourkv.statistics import build_tables
from contourkv.statistics.paper import COLUMNS, RULES, paper_table, write_paper
from contourkv.statistics.summary import SECTIONS, build_summary, judge
from contourkv.statistics.tables import read_table

META = {"contourkv": "0.1.0", "run": "unit", "statistics": {"resamples": 50, "seed": 1}}
CLAIMS = [claim for section in SECTIONS for claim in section.claims]
VERDICTS = pd.DataFrame(
    [
        {
            **{
                "claim": "Wins (section 5)",
                "model": "all models",
                "where": "ours",
                "paper": "93 of 160",
                "value": 50.0,
            },
            **{"value_low": 40.0, "value_high": 60.0, "unit": "%", "n": 160, "of": "comparisons", "verdict": "inside"},
            "note": "why",
        }
    ]
)


@pytest.fixture(scope="module")
def tables():
    return build_tables(make_instances({"a": (4, 4, 2), "b": (3, 2, 1)}), 50, 1)


def test_every_claim_has_a_row_with_the_numbers_of_its_table(tables):
    table = paper_table(tables, VERDICTS, None)
    assert list(table) == COLUMNS and list(table["section"]) == sorted(table["section"])
    assert len(table) == sum(len(judge(claim, tables)) for claim in CLAIMS) + 2
    row = table[table["claim"].str.startswith("AUC of dropped mass for") & (table["where"] == "a")].iloc[0]
    prediction = tables["prediction"]
    source = prediction[(prediction["model"] == "a") & (prediction["s"] == "8") & (prediction["against"] == "es_pool")]
    assert row["here"] == source["auc"].iloc[0] and row["here_high"] == source["auc_high"].iloc[0]
    assert row["section"] == "3" and row["n"] == source["n"].iloc[0] and row["paper"] == "0.76 to 0.89"
    last = table[table["section"] == "5"].iloc[0]
    assert (last["where"], last["here"], last["of"]) == ("all models, ours", 50.0, "comparisons")
    absent = table[table["table"] == "native"]
    assert set(absent["verdict"]) == {"not measured here"} and absent["here"].isna().all()


def test_it_says_why_numbers_may_differ_and_what_models_trained_here_are_worth(tables, tmp_path):
    write_paper(tmp_path / "paper", tables, VERDICTS, None, META)
    text = (tmp_path / "paper.md").read_text()
    for section in SECTIONS:
        assert f"*{section.title}.* {section.why}" in text
    assert "no evidence" not in text
    trained = {**META, "trained": ["b"]}
    write_paper(tmp_path / "paper", tables, VERDICTS, None, trained)
    counts = tables["invariants"].query("s == 'all'").set_index("model")["n"]
    for text in ((tmp_path / "paper.md").read_text(), build_summary(tables, trained)):
        assert "on its own texts: b. They show" in text and "no evidence about large models" in text
        assert f"leave their {counts['b']:,} of the {counts['a'] + counts['b']:,} instances out" in text
    only = {**META, "trained": ["a", "b"]}
    assert "no evidence" in build_summary(tables, only) and "instances out" not in build_summary(tables, only)


def test_sections_are_taken_off_the_words(tables):
    table = paper_table(tables, None, None)
    assert not table["claim"].str.contains("section").any() and set(table["section"]) <= set("1234")
    assert table["claim"].str.endswith("(Table 1)").any()


def test_commands_name_rules_of_the_workflow(tables):
    rules = "".join(path.read_text() for path in Path("workflow/rules").glob("*.smk"))
    known = set(re.findall(r"^rule (\w+):", rules, re.MULTILINE))
    assert {*RULES.values(), "tables"} <= known
    table = paper_table(tables, VERDICTS, "config/offline.yaml")
    apart = table["command"] == "python benchmarks/dropped_mass.py"
    assert apart.sum() == 1 and set(table.loc[apart, "verdict"]) == {"not measured here"}
    for command in table.loc[~apart, "command"]:
        assert command.startswith("snakemake --cores 2 --configfile config/offline.yaml --force ")
        assert command.split()[-1] in known


def test_files_are_written_alike(tables, tmp_path):
    for name in ("one", "two"):
        write_paper(tmp_path / name / "paper", tables, VERDICTS, None, META)
    for ending in ("md", "csv"):
        first, second = ((tmp_path / name / f"paper.{ending}").read_bytes() for name in ("one", "two"))
        assert first == second
    text = (tmp_path / "one/paper.md").read_text()
    assert all(f"## Section {section}" in text for section in "2345") and "Not measured in this run: " in text
    assert "    snakemake --cores 2 --force benchmark_tables\n" in text
    table = read_table(tmp_path / "one/paper.csv")
    wanted = paper_table(tables, VERDICTS, None)
    np.testing.assert_allclose(table["here"], wanted["here"], rtol=1e-9)
