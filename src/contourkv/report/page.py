"""What stands where on the page: verdicts, the paper's sections with figures and tables, costs, provenance."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..benchmark.tables import BUILDERS as BENCHMARK_TABLES
from ..benchmark.verdicts import WHY
from ..errors import InvalidInput
from ..figures import BENCHMARK_FIGURES, FIGURES
from ..job_costs import CAPTION, WHOLE
from ..job_costs import COLUMNS as COST_COLUMNS
from ..machine import machine, versions
from ..provenance import VERSION, file_sha256, write_text
from ..statistics.paper import COLUMNS, RULES, again, reasons
from ..statistics.summary import HOW_TO_READ, INSIDE, OUTSIDE, no_evidence
from ..statistics.tables import ALL_BUDGETS, ALL_MODELS, interval, read_table
from .behaviour import SCRIPT
from .blocks import command, data_table, figure, fold, header, link, pairs, sortable
from .looks import STYLE
from .markup import Markup, tag

SHOWN_VERSIONS = ("Python", "torch", "transformers")
ROWS_BEHIND, ROWS_ALONE = 5000, 1000
"""Rows that the page holds of a table behind a figure, and of one that no figure is drawn from."""
CLAIM = ("section", "claim", "where", "paper", "here [95%]", "n", "verdict", "rule")
NUMBERS = ("here [95%]", "n")
"""Columns of the verdicts, and those that sort as numbers."""
MEASURED = ("instances.parquet", "benchmark/answers.parquet")
"""Files of a run that every table can be computed from."""


@dataclass(frozen=True)
class Contents:
    """What a run has to show.

    Attributes
    ----------
    run : str
    labels : model -> label
    sections : title -> names of tables
        The paper's sections in order, each title starting with its number.
    tables, figures : list of str
        Names of those that the run has.
    captions : name -> caption
        Of tables and figures.
    config_file : str, optional
        What the run was configured with, for the commands.
    trained : list of str
        Labels of the models that were trained here.
    """

    run: str
    labels: Mapping[str, str]
    sections: Mapping[str, Sequence[str]]
    tables: Sequence[str]
    figures: Sequence[str]
    captions: Mapping[str, str]
    config_file: str | None = None
    trained: Sequence[str] = ()


def write_report(path: str | os.PathLike, results: str | os.PathLike, contents: Contents) -> Path:
    """Write the page of a run; see `build_report`."""
    write_text(path, build_report(results, contents))
    return Path(path)


def build_report(results: str | os.PathLike, contents: Contents) -> str:
    """The page of a run as one HTML text.

    Parameters
    ----------
    results : folder of the run
        With paper.csv, costs.csv, and the tables and figures that `contents` names.
    contents : Contents

    Returns
    -------
    str
        The same text for the same files on one machine: no date.

    Raises
    ------
    InvalidInput
        A name that no table or figure has; a file that is not there or is not what its name says.
    """
    return _Page(Path(results), contents).build()


class _Page:
    """The tables of a run, read and checked, and the parts of its page."""

    def __init__(self, results: Path, contents: Contents) -> None:
        self.results, self.contents = results, contents
        drawn = {**FIGURES, **BENCHMARK_FIGURES}
        placed = {name for names in contents.sections.values() for name in names}
        for lack, names in {
            "no such figure": set(contents.figures) - set(drawn),
            "a table in no section": set(contents.tables) - placed,
            "no caption": {*contents.tables, *contents.figures} - set(contents.captions),
        }.items():
            if names:
                raise InvalidInput(f"report: {', '.join(sorted(names))}: {lack}")
        self.figures = {name: drawn[name][1:] for name in contents.figures}  # name -> tables, title
        self.paper, self.costs = self._read("paper.csv", "summary"), self._read("costs.csv", "costs")
        for file, table, columns, rule in (
            ("paper.csv", self.paper, COLUMNS, "summary"),
            ("costs.csv", self.costs, COST_COLUMNS, "costs"),
        ):
            lost = [column for column in columns if column not in table]
            if lost:
                raise InvalidInput(f"{results / file}: no column {', '.join(lost)}; {self._make(rule)}")
        self.tables = {name: self._read(self._file(name), self._rule(name)) for name in contents.tables}

    def build(self) -> Markup:
        title = f"Run {self.contents.run}: the paper's claims beside what was measured"
        sections = {
            "verdicts": ("Verdicts", self._verdicts()),
            **self._paper_sections(),
            "costs": ("Costs", self._costs()),
            "provenance": ("Provenance", self._provenance()),
        }
        entries = [tag("li", tag("a", name, href=f"#{key}")) for key, (name, _) in sections.items()]
        body = [
            tag("a", "Skip to the verdicts", href="#verdicts", class_="skip"),
            tag("header", tag("h1", title), self._summary(), tag("nav", tag("ul", entries), aria_label="Sections")),
            tag("main", [tag("section", tag("h2", name), parts, id=key) for key, (name, parts) in sections.items()]),
            _dialog(),
            tag("script", SCRIPT),
        ]
        return Markup("<!DOCTYPE html>\n" + tag("html", tag("head", _head(title)), tag("body", body), lang="en") + "\n")

    def _summary(self) -> Markup:
        sentences = [f"Models: {', '.join(self.contents.labels.values())}."]
        instances, tasks = self.tables.get("invariants"), self.tables.get("tasks")
        if instances is not None:
            whole = instances[(instances["model"] == ALL_MODELS) & (instances["s"] == ALL_BUDGETS)].iloc[0]
            budgets = [s for s in dict.fromkeys(instances["s"]) if s != ALL_BUDGETS]
            sentences.append(
                f"{int(whole['n']):,} instances (an attention row at one budget of s = {', '.join(budgets)} keys) from "
                f"{int(whole['inputs']):,} contexts."
            )
        if tasks is not None:
            asked = tasks[tasks["samples"].notna()]
            sentences.append(f"{asked['task'].nunique():,} tasks of the downstream benchmark.")
        installed = versions()
        shown = [f"{name} {installed[name]}" for name in SHOWN_VERSIONS if name in installed]
        sentences.append(f"contourkv {VERSION}, {', '.join(shown)}.")
        words = [tag("p", " ".join(sentences))]
        if self.contents.trained and instances is not None:
            words.append(tag("p", no_evidence(self.tables, {"trained": self.contents.trained}) + "."))
        return Markup("".join(words))

    def _verdicts(self) -> list[Markup]:
        paper = self.paper
        counts = paper["verdict"].value_counts(sort=False)
        items = [tag("li", _verdict(name, f"{counts[name]:,} {name}")) for name in counts.index]
        head = [header(name, "n" if name in NUMBERS else None) for name in CLAIM]
        body = [self._claim(row) for row in paper.to_dict("records")]
        choices = [_choice(name, dict.fromkeys(map(str, paper[name]))) for name in ("section", "verdict")]
        return [
            tag("p", self._caption("paper")),
            tag("ul", items, class_="counts"),
            tag("form", choices, tag("output"), class_="filters", data_table="claims", hidden=True),
            sortable(head, body, "verdicts", id_="claims"),
            fold("How to read it", tag("p", HOW_TO_READ)),
            fold("Commands that compute these numbers again, by rule", *map(command, dict.fromkeys(paper["command"]))),
        ]

    def _claim(self, row: Mapping) -> Markup:
        known = pd.notna(row["here"])
        cells = {
            "section": [str(row["section"])],
            "claim": [row["claim"]],
            "where": [row["where"], tag("small", row["note"]) if row["note"] else None],
            "paper": [row["paper"]],
            "here [95%]": [interval(row["here"], row["here_low"], row["here_high"]) if known else "–"],
            "n": [f"{row['n']:,} {row['of']}" if row["where"] != "–" else "–"],
            "verdict": [_verdict(row["verdict"], row["verdict"])],
            "rule": [tag("code", str(row["command"]).rpartition(" ")[2])],
        }
        if row["interval"] != "none":
            cells["verdict"].append(tag("small", f"interval {row['interval']}"))
        shown = [
            tag("th", cells[name], scope="row", data_name=name)
            if name == "claim"
            else tag("td", cells[name], class_="n" if name in NUMBERS else None, data_name=name)
            for name in CLAIM
        ]
        return tag("tr", shown, data_section=str(row["section"]), data_verdict=row["verdict"])

    def _paper_sections(self) -> dict[str, tuple[str, list[Markup]]]:
        found = {}
        for title, names in self.contents.sections.items():
            number, _, name = title.partition(" ")
            drawn = [each for each in self.figures if self.figures[each][0][0] in names]
            behind = {table for each in drawn for table in self.figures[each][0]}
            rest = [table for table in names if table in self.tables and table not in behind]
            if not drawn and not rest:
                continue
            parts = [block for each in drawn for block in self._figure(each)]
            if rest:
                parts += [tag("h3", "Tables without a figure"), *(self._table(table, ROWS_ALONE) for table in rest)]
            why = [*reasons(number), *([("Bytes and downstream", WHY)] if "verdicts" in rest else [])]
            if why:
                words = [tag("p", tag("strong", f"{subject}. "), text) for subject, text in why]
                parts.append(fold("Why numbers may differ from the paper's", *words))
            found[f"section-{number}"] = (f"{name} (section {number})", parts)
        return found

    def _figure(self, name: str) -> list[Markup]:
        sources, title = self.figures[name]
        return [
            tag("h3", title),
            figure(self._there(self._drawn(name), name), title, self._caption(name)),
            command(again(name, self.contents.config_file)),
            *(self._table(source, ROWS_BEHIND) for source in sources if source in self.tables),
        ]

    def _table(self, name: str, rows: int) -> Markup:
        table = self.tables[name].drop(columns="provenance", errors="ignore")
        size = f"{len(table):,} row{'s' * (len(table) != 1)}"
        cut = f" The first {rows:,} of them stand here, also when sorted; all are in the file." * (len(table) > rows)
        return fold(
            ["Table ", tag("code", name), f", {size}"],
            tag("p", f"{self._caption(name)}{cut} ", link(self._file(name))),
            data_table(table, name, rows),
            command(again(self._rule(name), self.contents.config_file)),
        )

    def _costs(self) -> list[Markup]:
        table = self.costs.drop(columns="provenance", errors="ignore").astype(WHOLE)
        notes = table[table["note"] != ""]
        words = [tag("p", tag("strong", f"{row['rule'].capitalize()}: "), row["note"]) for _, row in notes.iterrows()]
        return [
            tag("p", CAPTION),
            data_table(table.drop(columns="note"), "costs", len(table)),
            *words,
            command(again("costs", self.contents.config_file)),
        ]

    def _provenance(self) -> list[Markup]:
        made: dict[str, list[str]] = {}
        for name, table in self.tables.items():
            lines = table["provenance"] if "provenance" in table else []
            made.setdefault(next(iter(lines), "unknown"), []).append(name)
        lines = [(", ".join(names), line) for line, names in made.items()]
        files = ["paper.csv", "costs.csv", *map(self._file, self.tables), *map(self._drawn, self.figures)]
        files += [name for name in MEASURED if (self.results / name).is_file()]
        hashes = [(name, file_sha256(self.results / name)) for name in files]
        config = f" --configfile {self.contents.config_file}" if self.contents.config_file else ""
        return [
            tag("p", f"This page was made with contourkv {VERSION} on: {machine()}."),
            pairs(list(versions().items()), ("package", "version"), "versions"),
            tag("h3", "What the tables were made from"),
            tag(
                "p",
                "Version, digest of the configuration, models with their revisions, seeds: as every file says itself.",
            ),
            pairs(lines, ("tables", "made from"), "what the tables were made from"),
            tag("h3", "Files"),
            tag(
                "p",
                "SHA-256 of what is shown here and of what it was computed from; the paths are those beside the page.",
            ),
            fold(f"{len(hashes)} files", pairs(hashes, ("file", "SHA-256"), "files")),
            tag("h3", "All of it again"),
            tag("p", "The whole run, and this page alone:"),
            command(f"snakemake --cores 2{config}"),
            command(again("report_page", self.contents.config_file)),
        ]

    def _caption(self, name: str) -> str:
        return " ".join(self.contents.captions[name].split())

    def _file(self, table: str) -> str:
        return f"{'benchmark' if table in BENCHMARK_TABLES else 'tables'}/{table}.csv"

    def _drawn(self, name: str) -> str:
        return f"{'benchmark/' if name in BENCHMARK_FIGURES else ''}figures/{name}.png"

    def _rule(self, table: str) -> str:
        return RULES.get(table, "benchmark_tables" if table in BENCHMARK_TABLES else "tables")

    def _read(self, file: str, rule: str) -> pd.DataFrame:
        return read_table(self._there(file, rule))

    def _there(self, file: str, rule: str) -> Path:
        path = self.results / file
        if not path.is_file():
            raise InvalidInput(f"{path}: not there, and the report shows it; {self._make(rule)}")
        return path

    def _make(self, rule: str) -> str:
        return f"make it with `{again(rule, self.contents.config_file)}`"


def _head(title: str) -> list[Markup]:
    """What a browser needs to know; nothing but what stands in the page may be loaded or run."""
    allowed = f"default-src 'none'; img-src data:; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
    allowed += "base-uri 'none'; form-action 'none'"
    return [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=allowed),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", STYLE),
    ]


def _dialog() -> Markup:
    """Where figures open large."""
    buttons = [
        tag("button", name, type="button", class_=kind) for name, kind in (("Full size", "size"), ("Close", "close"))
    ]
    bar = tag("div", tag("p"), buttons, class_="bar")
    stage = tag("div", class_="stage", tabindex="0", role="region", aria_label="Enlarged figure")
    return tag("dialog", bar, stage, aria_label="Figure, enlarged")


def _verdict(verdict: str, text: str) -> Markup:
    kind, sign = {INSIDE: ("inside", "✓"), OUTSIDE: ("outside", "✗")}.get(verdict, ("absent", "–"))
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), text, class_=f"verdict {kind}")


def _choice(name: str, values: Sequence[str] | Mapping[str, None]) -> Markup:
    options = [tag("option", "all", value=""), *(tag("option", value, value=value) for value in values)]
    return tag("label", f"{name} ", tag("select", options, name_=name))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
