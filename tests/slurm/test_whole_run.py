"""The whole workflow on tiny models through a real Slurm, to the same bytes as here."""

from __future__ import annotations

from one_node import jobs
from two_runs import GROUPS, TOGETHER, Pair, succeeded
from workflow_results import assert_same_results


def test_the_whole_run_through_slurm_leaves_the_bytes_that_it_leaves_here(slurm, tmp_path):
    before = len(jobs(slurm))
    pair = Pair.make(tmp_path, {"device": "cuda"})
    succeeded(*pair.run(queue=TOGETHER))
    assert_same_results(pair.here, pair.queue)
    done = jobs(slurm)[before:]
    assert {job["JobState"] for job in done} == {"COMPLETED"}
    assert len(done) == len(GROUPS)
