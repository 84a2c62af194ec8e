"""The page of a run: no text breaks out of it, it fetches nothing, all of the run is on it, the same bytes again."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_run import make_run, without

from contourkv.errors import InvalidInput
from contourkv.provenance import file_sha256
from contourkv.report import build_report, page, write_report
from contourkv.report.behaviour import SCRIPT
from contourkv.report.looks import STYLE
from contourkv.report.markup import VOID, Markup, joined, tag
from contourkv.statistics.paper import again
from contourkv.statistics.tables import interval, read_table

DRAWN = ("fig_kappa", "fig_prediction", "fig_bytes_score")
NASTY = """<script>alert(1)</script>"'><img src=x onerror=alert(2)>&amp;{x}</td></table>|"""


class Parsed(HTMLParser):
    """Elements with their attributes and text, in order; tags must match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict, list[str]]] = []
        self.open: list[tuple[str, dict, list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes)
        element = (name, dict(attributes), [])
        self.elements.append(element)
        if name not in VOID:
            self.open.append(element)

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def rows(self, label: str) -> int:
        """Rows of the table that is called so, its header among them."""
        names = [(name, found.get("aria-label")) for name, found, _ in self.elements]
        start = names.index(("div", label))
        after = [name for name, _ in names[start + 1 :]]
        return after[: after.index("code")].count("tr")

    def all(self, name: str, **wanted: str) -> list[tuple[dict, str]]:
        return [
            (attributes, "".join(text))
            for found, attributes, text in self.elements
            if found == name and wanted.items() <= attributes.items()
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    results = tmp_path_factory.mktemp("run")
    return results, make_run(results, drawn=DRAWN)


@pytest.fixture(scope="module")
def parsed(run):
    return Parsed(build_report(*run))


@given(st.text(), st.text())
def test_any_text_comes_out_as_it_went_in_and_is_never_markup(text, more):
    made = tag("p", text, tag("b", more), more, title=text, data_x=more, hidden=False, class_=None)
    elements = Parsed(made).elements
    assert [name for name, _, _ in elements] == ["p", "b"]
    plain, other = joined(text), joined(more)
    shown = Parsed(tag("p", text)).elements[0][2]
    assert "".join(elements[0][2]) == "".join(shown) + 2 * "".join(elements[1][2])
    assert elements[0][1] == {"title": "".join(shown), "data-x": "".join(elements[1][2])}
    kept = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]", "\ufffd", text)
    assert "".join(shown) == kept
    assert isinstance(plain, Markup) and joined([plain, other]) == plain + other


@given(st.text())
def test_what_is_markup_already_is_escaped_once(text):
    assert joined(joined(text)) == joined(text)
    made = tag("b", text)
    assert tag("p", [made, None]) == f"<p>{made}</p>"


@pytest.mark.parametrize("text", ["a</script>", "</SCRIPT >", "<!-- "])
def test_a_script_that_would_end_its_element_is_refused(text):
    with pytest.raises(ValueError, match="script: text would end the element"):
        tag("script", text)


@pytest.mark.parametrize("label", [NASTY, "</style><style>*{display:none}</style>", "a\x01b\x1b[31m", "𝕏 & – ünï"])
def test_a_label_from_a_config_or_a_model_does_no_harm(tmp_path, label):
    contents = make_run(tmp_path, label, drawn=())
    contents = replace(contents, run=label, trained=[label], captions={**contents.captions, "kappa": label})
    parsed = Parsed(build_report(tmp_path, contents))
    assert [text for _, text in parsed.all("script")] == [SCRIPT]
    assert [text for _, text in parsed.all("style")] == [STYLE]
    assert not parsed.all("img")
    attributes = [key for _, found, _ in parsed.elements for key in found]
    assert not [key for key in attributes if key.startswith("on") or key == "style"]
    plain = re.sub("[\x01\x1b]", "\ufffd", label)
    assert any(text == plain for _, text in parsed.all("td"))
    assert f"Run {plain}: " in parsed.all("h1")[0][1] and "no evidence about large models" in parsed.all("header")[0][1]


def test_nothing_but_what_the_page_carries_may_be_loaded_or_run(parsed):
    ((attributes, _),) = parsed.all("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.split(" ", 1) for rule in attributes["content"].split("; "))

    def hashed(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        **{"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", "img-src": "data:"},
        **{"style-src": hashed(STYLE), "script-src": hashed(SCRIPT)},
    }
    for name, found, _ in parsed.elements:
        source = found.get("src") or (found.get("href") if name == "link" else None)
        assert source is None or source.startswith("data:")
        assert "style" not in found and not re.match(r"\w+:", found.get("href", "") if name == "a" else "")


def test_it_can_be_read_without_seeing_and_used_without_a_mouse(parsed):
    levels = [int(name[1]) for name, _, _ in parsed.elements if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(parsed.all("img")) == len(DRAWN)
    assert all(len(found["alt"]) > 40 and int(found["width"]) > 100 for found, _ in parsed.all("img"))
    assert all(found.get("scope") in ("col", "row") for found, _ in parsed.all("th"))
    scrolled = parsed.all("div", **{"class": "scroll"})
    assert len(scrolled) == len(parsed.all("table"))
    assert all(found["tabindex"] == "0" and found["aria-label"] for found, _ in scrolled)
    ids = [found["id"] for _, found, _ in parsed.elements if "id" in found]
    assert len(set(ids)) == len(ids)
    links = [found["href"] for found, _ in parsed.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= {*ids}
    assert parsed.all("html")[0][0] == {"lang": "en"}


def test_verdicts_come_first_with_the_numbers_of_paper_csv(run, parsed):
    heads = [text for _, text in parsed.all("h2")]
    assert heads == [
        *("Verdicts", "Enumeration (section 2)", "Prediction (section 3)", "Bytes and downstream (section 5)"),
        *("Costs", "Provenance"),
    ]
    paper = read_table(run[0] / "paper.csv")
    rows = [found for found, _ in parsed.all("tr") if "data-verdict" in found]
    assert [row["data-verdict"] for row in rows] == list(paper["verdict"])
    assert [row["data-section"] for row in rows] == [str(section) for section in paper["section"]]
    cells = [text for _, text in parsed.all("td", **{"data-name": "here [95%]"})]
    assert cells == [
        interval(row["here"], row["here_low"], row["here_high"]) if pd.notna(row["here"]) else "–"
        for _, row in paper.iterrows()
    ]
    assert {text for _, text in parsed.all("td", **{"data-name": "paper"})} == set(paper["paper"])
    shown = {text for _, text in parsed.all("option")}
    assert shown == {"all", *map(str, paper["section"]), *paper["verdict"]}
    counts = paper["verdict"].value_counts()
    assert sorted(text[2:] for _, text in parsed.all("li") if "inside" in text or "outside" in text) == sorted(
        f"{counts[name]:,} {name}" for name in counts.index if name in ("inside", "outside")
    )


def test_every_table_and_figure_is_there_with_its_caption_and_command(run, parsed):
    results, contents = run
    words = "".join(parsed.elements[0][2])
    folds = [text for _, text in parsed.all("details")]
    commands = [text for _, text in parsed.all("code", **{"class": "again"})]
    for name in contents.tables:
        (fold,) = [text for text in folds if text.startswith(f"Table {name}, ")]
        assert " ".join(contents.captions[name].split()) in fold
        rows = len(read_table(results / ("benchmark" if name in page.BENCHMARK_TABLES else "tables") / f"{name}.csv"))
        assert fold.startswith(f"Table {name}, {rows:,} row")
    for name in contents.figures:
        assert again(name, "config/unit.yaml") in commands
        assert " ".join(contents.captions[name].split()) in words
    rules = {command.rpartition(" ")[2] for command in commands}
    assert {*DRAWN, "tables", "benchmark_tables", "costs", "report_page"} <= rules
    assert "snakemake --cores 2 --configfile config/unit.yaml" in commands
    for file in (
        "paper.csv",
        "costs.csv",
        "tables/kappa.csv",
        "figures/fig_kappa.png",
        "benchmark/figures/fig_bytes_score.png",
    ):
        assert file_sha256(results / file) in words
    assert "seeds contexts.prose=101" in words and "one@sha256:abc" in words


def test_the_numbers_behind_a_figure_are_in_the_table_below_it(run, parsed):
    table = read_table(run[0] / "tables/content_arms.csv")
    ((_, text),) = [(found, text) for found, text in parsed.all("details") if text.startswith("Table content_arms")]
    for _, row in table.iterrows():
        assert interval(row["auc"], row["auc_low"], row["auc_high"]) in text


def test_parts_that_a_run_lacks_leave_no_gap(run):
    results, contents = run
    gone = [*contents.sections["5 Bytes and downstream"], "fig_bytes_score", "fig_prediction"]
    parsed = Parsed(build_report(results, without(contents, *gone)))
    heads = [text for _, text in parsed.all("h2")]
    assert "Bytes and downstream (section 5)" not in heads and "Prediction (section 3)" in heads
    assert len(parsed.all("img")) == 1
    # Tables whose figure is not drawn stand with the others.
    assert any(text.startswith("Table content_arms") for _, text in parsed.all("details"))
    assert not [text for _, text in parsed.all("details") if text.startswith("Table scores")]
    assert "tasks of the downstream benchmark" not in parsed.all("header")[0][1]


def test_of_a_long_table_the_first_rows_stand_and_the_page_says_so(run, monkeypatch):
    monkeypatch.setattr(page, "ROWS_ALONE", 7)
    parsed = Parsed(build_report(*run))
    ((_, text),) = [(found, text) for found, text in parsed.all("details") if text.startswith("Table cells")]
    rows = len(read_table(run[0] / "tables/cells.csv"))
    assert rows > 7 and f"Table cells, {rows} rows" in text
    assert "The first 7 of them stand here, also when sorted; all are in the file." in text
    assert parsed.rows("Table: cells") == 1 + 7
    assert parsed.rows("Table: kappa_quantiles") == 1 + len(read_table(run[0] / "tables/kappa_quantiles.csv"))
    quantiles = next(text for _, text in parsed.all("details") if text.startswith("Table kappa_quantiles"))
    assert "The first" not in quantiles


def test_the_same_run_gives_the_same_bytes_whatever_the_clock_says(run, tmp_path):
    results, contents = run
    write_report(tmp_path / "one.html", results, contents)
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    write_report(tmp_path / "two.html", copy, contents)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert (tmp_path / "one.html").read_bytes().decode().count("<!DOCTYPE html>") == 1


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("paper.csv", "summary"),
        ("costs.csv", "costs"),
        ("tables/kappa.csv", "tables"),
        ("benchmark/scores.csv", "benchmark_tables"),
        ("benchmark/verdicts.csv", "benchmark_tables"),
        ("figures/fig_kappa.png", "fig_kappa"),
        ("benchmark/figures/fig_bytes_score.png", "fig_bytes_score"),
    ],
)
def test_a_missing_file_is_one_line_with_the_command_that_makes_it(run, tmp_path, file, rule):
    shutil.copytree(run[0], tmp_path / "copy")
    (tmp_path / "copy" / file).unlink()
    with pytest.raises(InvalidInput) as raised:
        write_report(tmp_path / "report.html", tmp_path / "copy", run[1])
    assert str(raised.value) == (
        f"{tmp_path / 'copy' / file}: not there, and the report shows it; "
        f"make it with `snakemake --cores 2 --configfile config/unit.yaml --force {rule}`"
    )
    assert not (tmp_path / "report.html").exists()


def test_files_that_are_not_what_their_names_say_are_named(run, tmp_path):
    results = shutil.copytree(run[0], tmp_path / "copy")
    (results / "figures/fig_kappa.png").write_text("no picture")
    with pytest.raises(InvalidInput, match=r"fig_kappa\.png: not a png; delete it and make it again"):
        build_report(results, run[1])
    (results / "paper.csv").write_text("section,claim,provenance\n2,a,p\n")
    with pytest.raises(InvalidInput, match=r"paper\.csv: no column where, paper, .*--force summary"):
        build_report(results, run[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figures": ["fig_none"]}, "report: fig_none: no such figure"),
        ({"sections": {"2 Enumeration": ["kappa"]}}, "report: .*tasks.*: a table in no section"),
        ({"captions": {}}, "report: .*kappa.*: no caption"),
    ],
)
def test_names_that_have_no_place_on_the_page_are_refused(run, change, message):
    with pytest.raises(InvalidInput, match=message):
        build_report(run[0], replace(run[1], **change))
