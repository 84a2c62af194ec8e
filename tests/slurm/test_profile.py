"""One model's measurement through a real Slurm: the same bytes, what jobs ask for, how a failed one is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from one_node import jobs, one_node
from two_runs import TOGETHER, Pair, succeeded
from workflow_results import RESULTS, assert_same_results

from contourkv.statistics.instances import read_instances

MODEL = "tiny-llama"
# Of a GPU that there is not: it is booked, and the job computes on the CPU and says so.
ONE = {"device": "cuda", "models": [MODEL], "arms": ["prose"], "benchmark": {"models": [MODEL], "tasks": []}}
ONE |= {part: {"models": [MODEL]} for part in ("native", "weights", "exact", "audit", "loss")}
ONE |= {"structured": {"arms": []}}
TARGETS = ("tables", "fig_kappa")
# Groups of the profile with a GPU, and without.
GPU, CPU = {"rows"}, {"ready", "samples", "tables"}


@pytest.fixture(scope="module")
def ran(slurm, tmp_path_factory) -> Pair:
    """One model has been measured, here and through Slurm."""
    pair = Pair.make(tmp_path_factory.mktemp("one"), ONE)
    succeeded(*pair.run(*TARGETS, queue=TOGETHER))
    return pair


def groups(slurm) -> dict[str, dict[str, str]]:
    """The first job of each group, by the group's name."""
    found: dict[str, dict[str, str]] = {}
    for job in jobs(slurm):
        found.setdefault(job["Comment"].removeprefix("rule_").partition("_")[0], job)
    return found


def test_one_model_through_slurm_leaves_the_bytes_that_it_leaves_here(ran):
    assert (ran.queue.folder / RESULTS / "figures/fig_kappa.png").exists()
    assert_same_results(ran.here, ran.queue)


def test_a_group_is_given_what_its_rules_need_where_that_is(ran, slurm):
    found = groups(slurm)
    assert set(found) == GPU | CPU
    for group, job in found.items():
        assert job["JobState"] == "COMPLETED"
        assert job["Partition"] == ("gpu" if group in GPU else "cpu")
        assert job["JOB_GRES"] == ("gpu:1" if group in GPU else "(null)")
    # a capture of 16,000 MB, then two instances of 6,000 MB one after the other, as they share the GPU
    assert "mem=16000M" in found["rows"]["TRES"].split(",")
    # a capture of 15 minutes, two enumerations of 15
    assert found["rows"]["TimeLimit"] == "00:45:00"
    # three certificates, two side by side
    assert {"cpu=2", "mem=8000M"} <= set(found["samples"]["TRES"].split(","))


def test_results_name_the_device_that_computed_them_not_the_one_that_was_asked_for(ran):
    _, metadata = read_instances(ran.queue.folder / RESULTS / "instances.parquet")
    assert metadata["devices"] == {"capture": ["cpu"], "measurement": ["cpu"]}
    log = ran.queue.folder / RESULTS / f"logs/capture/{MODEL}/prose.log"
    assert "cuda was asked for and there is no CUDA device here: computed on the CPU" in log.read_text()


def test_a_failed_job_shows_the_line_that_it_shows_here_and_runs_again_with_more_memory(ran, slurm):
    shard = Path(RESULTS) / "shards" / MODEL / "prose/001.safetensors"
    for copy in (ran.here, ran.queue):
        path = copy.folder / shard
        path.write_bytes(path.read_bytes()[:-100])
    before = len(jobs(slurm))
    here, queue = ran.run("enumerate_all", queue=("--retries", "1", *TOGETHER))
    assert here.returncode == queue.returncode == 1
    lines = {line for line in here.stdout.splitlines() if line.startswith("error: ")}
    assert len(lines) == 1 and str(shard) in lines.copy().pop()
    shown = {line.strip() for line in queue.stdout.splitlines()}
    assert {line for line in shown if line.startswith("error: ")} == lines
    memory = [job["TRES"].split("mem=")[1].partition(",")[0] for job in jobs(slurm)[before:]]
    assert memory == ["6000M", "12000M"]
    assert not (ran.queue.folder / RESULTS / "instances" / MODEL / "prose/001.parquet").exists()


def test_a_slurm_ends_with_its_block_also_when_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), one_node(tmp_path / "slurm") as environment:
        assert of(environment)
        raise ZeroDivisionError
    assert not of(environment)


def of(environment: dict[str, str]) -> list[str]:
    """Names of the processes that belong to a Slurm, by its configuration in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if f"SLURM_CONF={environment['SLURM_CONF']}".encode() in (process / "environ").read_bytes():
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return found
