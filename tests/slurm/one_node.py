"""A real Slurm of one node on loopback: its daemons, started and ended by process."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")
CPUS = 2
PATIENCE = 60.0

CONFIGURATION = """\
ClusterName=contourkv
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
# nothing of the machine is touched: no cgroups, and the memory of a job is booked, not held to
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
KillWait=10
# ended jobs stay to be asked about
MinJobAge=7200
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=256000 Gres=gpu:1 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=ALL MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed here."""
    return [name for name in NEEDED if shutil.which(name) is None]


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm in `folder`; yield the environment in which `sbatch` and the rest speak to it.

    Partitions cpu (the default) and gpu share the node. Its one GPU is a file, so that it is booked and no job finds
    a device. Every daemon ends with the block, and with this process should it be killed.
    """
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "gpu0").touch()
    ports = _free_ports(2)
    text = CONFIGURATION.format(user=getpass.getuser(), folder=folder, controller=ports[0], node=ports[1], cpus=CPUS)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName=localhost Name=gpu File={folder}/gpu0\n")
    # A job's inner srun loses SLURM_*; a cluster's own lies in /etc, where srun finds it without.
    srun = f'#!/bin/sh\nexport SLURM_CONF={folder}/slurm.conf\nexec {shutil.which("srun")} "$@"\n'
    (folder / "bin/srun").write_text(srun)
    (folder / "bin/srun").chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    munge = [f"--{part}={folder}/munge.{part.partition('-')[0]}" for part in ("socket", "pid-file", "seed-file")]
    munge += [f"--key-file={folder}/munge.key", f"--log-file={folder}/munge.log"]
    daemons: list[subprocess.Popen] = []
    try:
        daemons.append(_start(folder, environment, "munged", "--foreground", "--force", *munge))
        _wait("munged opens its socket", (folder / "munge.socket").exists, daemons, folder)
        daemons.append(_start(folder, environment, "slurmctld", "-D", "-c"))
        daemons.append(_start(folder, environment, "slurmd", "-D", "-N", "localhost"))
        _wait("the node is idle", lambda: "idle" in asked(environment, "sinfo -h -o %T"), daemons, folder)
        yield environment
    finally:
        if len(daemons) == 3:
            _end_jobs(environment)
        for daemon in reversed(daemons):
            _end(daemon)


def jobs(environment: dict[str, str]) -> list[dict[str, str]]:
    """Every job that was ever submitted, with what it was given, as `scontrol` shows it."""
    lines = asked(environment, "scontrol --oneliner --details show jobs").splitlines()
    found = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    return sorted((job for job in found if "JobId" in job), key=lambda job: int(job["JobId"]))


def asked(environment: dict[str, str], command: str) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True).stdout


def _start(folder: Path, environment: dict[str, str], name: str, *arguments: str) -> subprocess.Popen:
    with open(folder / f"{name}.out", "wb") as out:
        # ends with this process, however that ends
        command = ["setpriv", "--pdeathsig", "TERM", name, *arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def _wait(what: str, so, daemons: list[subprocess.Popen], folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not so():
        if time.monotonic() > end or any(daemon.poll() is not None for daemon in daemons):
            said = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.out")))
            raise RuntimeError(f"Slurm does not start: waited until {what}; its daemons said:\n{said}")
        time.sleep(0.1)


def _end_jobs(environment: dict[str, str]) -> None:
    asked(environment, f"scancel --user {getpass.getuser()}")
    end = time.monotonic() + PATIENCE
    while asked(environment, "squeue -h -o %i") and time.monotonic() < end:
        time.sleep(0.2)


def _end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(10)
        return
    daemon.kill()
    daemon.wait()


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
