"""What a run plans: everything at first, nothing afterwards, and after a change what depends on it."""

import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
import yaml

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


@pytest.mark.parametrize(
    ("module", "rules"),
    [
        ("figures.py", DRAWN | BENCHMARK_FIGURES),
        ("statistics/summary.py", {"summary", "benchmark_tables", *BENCHMARK_FIGURES}),
        ("statistics/tables.py", STATISTICS | BENCHMARK_TABLES),
        ("enumeration/pool.py", MEASURED | NATIVE | WEIGHTS | EXACT | AUDIT | STRUCTURED),
        ("capture/recording.py", CAPTURED | EXACT | AUDIT | STRUCTURED | {"capture_structured", "capture_exact"}),
        ("benchmark/comparisons.py", BENCHMARK_TABLES),
        ("benchmark/costs.py", {"probe_costs", "merge_answers", *BENCHMARK_TABLES}),
        ("benchmark/answering.py", BENCHMARK - {"make_task"}),
        ("benchmark/tasks/retrieval.py", BENCHMARK | STRUCTURED | {"make_structured", "capture_structured"}),
    ],
)
def test_an_edited_module_plans_what_imports_it_and_taking_it_back_plans_nothing(finished, edited, module, rules):
    edited(f"src/contourkv/{module}", "\n# a comment counts as well\n")
    assert set(finished.plan(TEST)) == rules | LAST


def test_an_edited_look_of_the_page_plans_the_page_alone(finished, edited):
    edited("src/contourkv/report/looks.py", "\n")
    assert set(finished.plan(TEST)) == {"report_page"}


def test_an_edited_caption_plans_the_page_alone(finished, edited):
    edited("workflow/report/kappa.rst", "More words.\n")
    assert set(finished.plan(TEST)) == {"report_page"}


def test_an_edit_that_was_taken_back_plans_nothing(finished):
    path = finished.folder / "src/contourkv/figures.py"
    content = path.read_bytes()
    path.write_bytes(content + b"\n# new\n")
    path.write_bytes(content)  # with a later time stamp
    assert finished.plan(TEST) == {}


def test_an_edited_script_plans_its_rule(finished, edited):
    edited("workflow/scripts/summary.py", "\n")
    assert set(finished.plan(TEST)) == {"summary"} | LAST


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"statistics": {"resamples": 199}}, STATISTICS),
        ({"certificate": {"seed": 8}}, MEASURED - {"enumerate"}),
        ({"enumeration": {"swap_keys": 24}}, MEASURED | EXACT | AUDIT | STRUCTURED),
        ({"capture": {"positions": [95]}}, CAPTURED),
        (
            {"contexts": {"seeds": {"code": 1}}},
            CAPTURED | EXACT | AUDIT | {"make_contexts", "make_loss_contexts", "make_exact_contexts", "capture_exact"},
        ),
        ({"native": {"rows": 11}}, NATIVE | {"summary"}),
        ({"weights": {"rows": 7}}, WEIGHTS | {"summary"}),
        ({"exact": {"floor": 0.25}}, EXACT | {"summary"}),
        ({"audit": {"budgets": [8]}}, AUDIT | {"summary"}),
        ({"structured": {"retrieval": 1}}, STRUCTURED | {"make_structured", "capture_structured", "summary"}),
        ({"loss": {"continuation": 9}}, LOSS | {"summary"}),
        ({"audit": {"models": []}}, {"summary"}),
        ({"contexts": {"seeds": {"dialogue": 1}}}, set()),
        ({"model_sources": {"tiny-llama": {"label": "another"}}}, STATISTICS | BENCHMARK_TABLES),
        ({"benchmark": {"comparisons": {"seed": 1}}}, BENCHMARK_TABLES),
        ({"benchmark": {"costs": {"tokens": 3}}}, {"probe_costs", "merge_answers", *BENCHMARK_TABLES}),
        ({"benchmark": {"query_aware": []}}, ASKED),
        ({"benchmark": {"tasks": []}}, {"summary"}),
        ({"benchmark": {"models": ["tiny-llama"]}}, {"merge_answers", *BENCHMARK_TABLES}),
        ({"model_sources": {"smollm2-135m": {"label": "another"}}}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_changed_key_plans_what_depends_on_it(finished, change, rules):
    assert set(finished.plan(TEST, more=change)) == rules | (LAST if rules else set())


def test_a_new_pin_plans_what_imports_the_package(finished):
    lock = finished.folder / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before.replace("matplotlib==", "matplotlib==9"))
    try:
        assert set(finished.plan(TEST)) == DRAWN | BENCHMARK_FIGURES | LAST
    finally:
        lock.write_text(before)


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
