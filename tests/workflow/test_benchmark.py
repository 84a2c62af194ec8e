"""The benchmark inside the workflow: stand-ins for hub data end to end, and a run that was killed goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import yaml

from contourkv.benchmark.records import read_answers

SETTINGS = {
    # of the run's one model
    **{part: {"models": None} for part in ("native", "weights", "exact", "audit", "loss")},
    "run": "standin",
    "models": ["tiny-llama"],
    "benchmark": {
        "models": ["tiny-llama"],
        "methods": ["streaming_llm", "snapkv", "adakv_snapkv", "quest", "contour_snapkv", "contour"],
        "query_aware": ["snapkv"],
        "budgets": [0.5],
        "tasks": [
            {"name": "needles", "task": "hub", "source": "ruler", "path": "hub/ruler", "subset": "niah_single_1"},
            {"name": "passages", "task": "hub", "source": "longbench", "path": "hub/longbench", "length": 300},
        ],
        "costs": {"lengths": [300], "tokens": 2},
        "comparisons": {"resamples": 50},
    },
}
TARGET = ["benchmark_all", "--cores", "2", "--configfile", "config/test.yaml", "standin.yaml"]


def needle(at):
    return {
        "context": f"Some text. One of the special magic numbers for key-{at} is: {1234560 + at}. More text.\n" * 4,
        "question": f"What is the special magic number for key-{at}?\n",
        "answer_prefix": f" The special magic number for key-{at} is",
        "answer": [str(1234560 + at)],
        "task": "niah_single_1",
        "max_new_tokens": 4,
    }


def passage(at):
    return {
        "context": f"Passage {at // 2}: the capital of the country is a city by a river. " * 8,
        "question": f"Question: which city, {at}?\n",
        "answer_prefix": "Answer:",
        "answers": ["Paris"],
        "all_classes": None,
        "task": "hotpotqa",
        "max_new_tokens": 4,
        "length": 60,
    }


@pytest.fixture(scope="module")
def standin(finished):
    """The finished copy with stand-ins for hub data in it, and a configuration that asks about them."""
    for name, rows in {"ruler": [needle(at) for at in range(4)], "longbench": [passage(at) for at in range(4)]}.items():
        folder = finished.folder / "hub" / name
        folder.mkdir(parents=True)
        lines = (json.dumps(row) for row in rows)
        (folder / "test.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (finished.folder / "standin.yaml").write_text(yaml.safe_dump(SETTINGS))
    return finished


def test_hub_data_in_a_folder_runs_to_tables_and_figures_and_goes_on_after_a_kill(standin):
    folder = standin.folder / "results/standin/benchmark"
    answers = folder / "answers/tiny-llama"
    # a first run, killed as soon as one context of a task is finished
    first = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *TARGET],
        cwd=standin.folder,
        env={**os.environ, "PYTHONPATH": str(standin.folder / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = time.monotonic() + 240
    while not (parts := sorted(answers.glob("*.parts/0*.parquet"))):
        assert first.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not sorted(answers.glob("*.parquet"))
    content = parts[0].read_bytes()
    assert standin.run("--unlock", "--configfile", "config/test.yaml", "standin.yaml").returncode == 0

    done = standin.run(*TARGET)
    assert done.returncode == 0, done.stdout[-5000:]
    task = parts[0].parent.name.removesuffix(".parquet.parts")
    assert not list(folder.rglob("*.parts"))
    assert not list(folder.rglob(".partial-*"))

    frame, metadata = read_answers(folder / "answers.parquet")
    assert set(frame["task"]) == {"needles", "passages"}
    assert (frame["status"] == "ok").mean() > 0.5
    assert frame.groupby("task")["sample"].nunique().to_dict() == {"needles": 4, "passages": 2}
    assert frame[frame["task"] == "passages"]["question"].max() == 1
    assert metadata["answers"][0]["config"]
    kept = pd.read_parquet(_written(standin.folder, content))
    again = frame[(frame["task"] == task) & (frame["sample"] == kept["sample"].iloc[0])]
    keys = ["question", "method", "storage", "visibility", "budget"]
    merged = again.merge(kept.astype({name: str for name in ("method", "storage", "visibility")}), on=keys)
    assert len(merged) == len(kept)
    # to the second: the row is the one that was written before the kill
    assert (merged["score_seconds_x"] == merged["score_seconds_y"]).all()
    tables = {path.stem for path in folder.glob("*.csv")}
    assert tables == {path.stem for path in folder.glob("*.md")}
    assert len(list((folder / "figures").glob("*.png"))) == 5


def _written(folder, content):
    path = folder / "part.parquet"
    path.write_bytes(content)
    return path
