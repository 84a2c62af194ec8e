"""The same run twice: on this machine, and through Slurm by the profile that users have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess as Done

import yaml
from one_node import CPUS
from workflow_copy import Copy

CONFIG = "config/test.yaml"
# What a user says of a cluster; and how often one node on loopback is asked.
CLUSTER = (
    *("--workflow-profile", "profiles/slurm", "--slurm-partition-config", "profiles/slurm/partitions.yaml"),
    *("--slurm-no-account", "--slurm-status-command", "squeue", "--cores", str(CPUS), "--latency-wait", "10"),
    *("--slurm-init-seconds-before-status-checks", "3", "--seconds-between-status-checks", "2"),
)
# All that can wait together does: a job of the queue takes seconds to start.
GROUPS = ("ready", "rows", "structured", "exact", "samples", "forward", "tables", "losses", "last")
TOGETHER = ("--group-components", *(f"{group}=1000" for group in GROUPS))


@dataclass(frozen=True)
class Pair:
    """Two copies that run the same configuration: one here, one through Slurm."""

    here: Copy
    queue: Copy
    configs: tuple[str, ...]

    def run(self, *targets: str, here: tuple[str, ...] = (), queue: tuple[str, ...] = ()) -> tuple[Done, ...]:
        """Both runs, side by side."""
        more = (*targets, "--configfile", *self.configs)
        with ThreadPoolExecutor() as pool:
            local = pool.submit(self.here.run, *more, "--cores", "1", *here)
            queued = self.queue.run(*more, *CLUSTER, *queue)
            return local.result(), queued

    @classmethod
    def make(cls, folder: Path, changes: dict) -> Pair:
        """Fresh copies, configured by config/test.yaml and changes to it."""
        pair = cls(Copy.make(folder / "here"), Copy.make(folder / "queue"), (CONFIG, "changes.yaml"))
        for copy in (pair.here, pair.queue):
            (copy.folder / "changes.yaml").write_text(yaml.safe_dump(changes))
        return pair


def succeeded(*runs: Done) -> None:
    for done in runs:
        assert done.returncode == 0, done.stdout[-8000:]
