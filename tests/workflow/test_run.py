"""The whole workflow on tiny random models: what it leaves behind, the same bytes twice, and errors in a job."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from workflow_copy import Copy
from workflow_results import RESULTS, TAKEN, assert_same_results, made

AGAIN = ("tiny-llama", "tiny-gemma3")


@pytest.fixture(scope="module")
def again(finished, tmp_path_factory) -> Copy:
    """A run in another folder, of two models from their contexts on; what the others left is taken over."""
    copy = Copy.make(tmp_path_factory.mktemp("again") / "another-name", finished.folder)
    kept = [finished.folder / "resources"]
    for stage in ("contexts", "shards", "instances", "certificates"):
        kept += [path for path in (finished.folder / RESULTS / stage).iterdir() if path.name not in AGAIN]
    for path in kept:
        shutil.copytree(path, copy.folder / path.relative_to(finished.folder), copy_function=shutil.copy2)
    done = copy.run("--cores", "2", "--configfile", "config/test.yaml")
    assert done.returncode == 0, done.stdout[-5000:]
    assert len(list((copy.folder / RESULTS / "benchmarks/capture").glob("*/*.tsv"))) == len(AGAIN) * 2
    return copy


def test_the_report_shows_tables_and_figures_by_the_papers_sections(finished, tmp_path):
    archive = tmp_path / "report.zip"
    done = finished.run("--report", str(archive), "--configfile", "config/test.yaml")
    assert done.returncode == 0, done.stdout[-3000:]
    with zipfile.ZipFile(archive) as files:
        html = files.read("report/report.html").decode()
    results, categories = (
        json.JSONDecoder().raw_decode(html, html.index(f"var {name} = {{") + len(f"var {name} = "))[0]
        for name in ("results", "categories")
    )
    found = {
        category: {Path(path).stem for paths in kinds.values() for path in paths}
        for category, kinds in categories.items()
    }
    assert sum(map(len, found.values())) == len(results)
    captions = {path: result["caption"] for path, result in results.items()}
    assert all(len(caption) > 40 for caption in captions.values())
    assert len(set(captions.values())) == len(captions)
    assert sorted(found) == [
        "1 Summary",
        "2 Enumeration",
        "3 Prediction",
        "4 Deployed selectors",
        "5 Bytes and downstream",
    ]
    assert {"kappa", "fig1_recovered", "weights", "fig_weights", "exact", "fig_exact"} <= found["2 Enumeration"]
    assert {"cells", "fig2_cells", "bounds", "fig_bounds"} <= found["3 Prediction"]
    assert found["4 Deployed selectors"] == {"audit", "fig_audit", "loss", "fig_loss"}


def test_every_kind_of_result_is_there_and_nothing_half_written(finished):
    files = made(finished)
    assert {name.split("/")[0] for name in files} == {
        "contexts",
        "shards",
        "instances",
        "certificates",
        "instances.parquet",
        "tables",
        "figures",
        "summary.md",
        "paper.md",
        "paper.csv",
        *TAKEN,
        *("native", "weights", "exact", "audit", "structured", "loss"),
        "benchmark",
    }
    assert {name.rpartition(".")[2] for name in files if name.startswith("figures/")} == {"pdf", "png"}
    assert not list(finished.folder.rglob(".partial-*"))


def test_every_job_has_a_log_and_a_benchmark(finished):
    folder = finished.folder / RESULTS
    logs = {str(path.relative_to(folder / "logs").with_suffix("")) for path in folder.glob("logs/**/*.log")}
    timed = {
        str(path.relative_to(folder / "benchmarks").with_suffix("")) for path in folder.glob("benchmarks/**/*.tsv")
    }
    assert logs == timed
    assert {name.split("/")[0] for name in logs} >= {
        *("prepare_model", "capture", "enumerate", "certify", "figures"),
        *("make_task", "ask", "probe_costs", "benchmark_tables"),
    }


def test_the_page_holds_the_whole_run_and_snakemake_knows_its_commands(finished):
    files = made(finished)
    page = (finished.folder / RESULTS / "report.html").read_text()
    shown = {name for name in files if name.endswith((".csv", ".png")) or name == "instances.parquet"}
    assert len(shown) > 40 and not [name for name in shown if files[name] not in page]
    commands = re.findall(r'<code class="again"[^>]*>(.*?)</code>', page)
    rules = sorted({command.rpartition(" --force ")[2] for command in commands if "--force" in command})
    assert {"tables", "costs", "report_page", "fig_kappa"} <= set(rules)
    done = finished.run("-n", "--configfile", "config/test.yaml", "--force", *rules)
    assert done.returncode == 0, done.stdout[-3000:]
    whole = [command for command in commands if "--force" not in command]
    assert sorted(whole) == ["python benchmarks/dropped_mass.py", "snakemake --cores 2 --configfile config/test.yaml"]


def test_costs_are_those_of_every_job_but_the_last_two(finished):
    table = pd.read_csv(finished.folder / RESULTS / "costs.csv").set_index("rule")
    records = list((finished.folder / RESULTS / "benchmarks").rglob("*.tsv"))
    assert table.loc["all jobs", "jobs"] == len(records) - 2
    instances = pd.read_parquet(finished.folder / RESULTS / "instances.parquet", columns=["s"])
    assert table.loc["enumerate", "instances"] == len(instances)
    assert 0 < table.loc["the workflow itself", "share"] < 1
    assert "from Snakemake's own start to its first job" in table.loc["the workflow itself", "note"]
    assert "unknown" not in table.loc["the workflow itself", "note"]


def test_instances_hold_every_row_at_every_budget(finished):
    from contourkv.statistics.instances import read_instances

    frame, metadata = read_instances(finished.folder / RESULTS / "instances.parquet")
    groups = frame.groupby(["model", "arm", "input", "position", "s"], observed=True).size()
    assert len(groups) == 5 * 2 * 2 * 2 * 3
    assert (groups.groupby("model", observed=True).nunique() == 1).all()
    assert json.dumps(metadata)
    assert str(finished.folder) not in json.dumps(metadata)


def test_the_same_configuration_gives_the_same_bytes_in_another_folder(finished, again):
    assert_same_results(finished, again)


def test_a_truncated_shard_ends_its_job_with_one_line_and_leaves_no_output(again):
    shard = again.folder / RESULTS / "shards" / AGAIN[0] / "code/001.safetensors"
    name = shard.relative_to(again.folder / RESULTS / "shards").with_suffix("")
    shard.write_bytes(shard.read_bytes()[:-100])
    done = again.run("--cores", "2", "--configfile", "config/test.yaml", "--until", "enumerate")
    assert done.returncode == 1
    log = (again.folder / RESULTS / "logs/enumerate" / name).with_suffix(".log").read_text()
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0] in log.splitlines()
    assert str(name) in lines[0]
    assert not (again.folder / RESULTS / "instances" / name).with_suffix(".parquet").exists()
