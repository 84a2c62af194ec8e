# What would spoil a run, said before its first job.
import os

from contourkv.claim import claim
from contourkv.clock import from_the_future
from contourkv.errors import AGAIN
from contourkv.logfile import WORKFLOW
from contourkv.provenance import sweep
from snakemake.iocontainers import InputFiles

# What jobs are told by their environment: the process that they end with, and the command that makes a file again.
COMMAND = ["snakemake", "--cores", "2"]
if workflow.overwrite_configfiles:
    COMMAND += ["--configfile", *(os.path.relpath(path) for path in workflow.overwrite_configfiles)]
os.environ[WORKFLOW] = str(os.getpid())
os.environ[AGAIN] = " ".join([*COMMAND, "--force"])

# Held until this process ends; the lists of the other two are what a plan says as well.
CLAIMED = []
MEMORY = workflow.global_resources.get("mem_mb")


def wanted_memory(rule):
    """MB of memory that a job of a rule may need at its first attempt; 0 where it does not say."""
    wanted = rule.resources.get("mem_mb")
    about = {"attempt": 1, "threads": 1, "input": InputFiles(), "rulename": rule.name, "async_run": workflow.async_run}
    wanted = wanted and wanted.evaluate(None, **about).value
    return wanted if isinstance(wanted, int) else 0


if workflow.is_main_process:
    if MEMORY is not None and isinstance(MEMORY.value, int):
        larger = [rule for rule in workflow.rules if wanted_memory(rule) > MEMORY.value]
        if larger:
            print(
                f"note: --resources mem_mb={MEMORY.value} is less than these rules may need; each of their jobs runs "
                "alone, and may run out of memory:",
                ", ".join(f"{rule.name} ({wanted_memory(rule)})" for rule in larger),
                file=sys.stderr,
            )
    for place in (Path("results"), Path("results") / config["run"]):
        if place.exists() and not os.access(place, os.W_OK):
            print(
                f"note: {place}: is read-only: nothing can be made there; make it writable, or give the run another name",
                file=sys.stderr,
            )
    future = from_the_future([Path("resources"), Path("results") / config["run"], Path("config")])
    if future:
        print(
            f"note: {len(future)} file{'s are' if len(future) > 1 else ' is'} dated in the future, such as {future[0]}: "
            "what is made from them would be made again by every run; date them now: "
            f"find resources results/{config['run']} config -newermt now -exec touch {{}} +",
            file=sys.stderr,
        )


# Runs of other names share resources/: it is claimed by those that make something there.
onstart:
    try:
        CLAIMED.append(claim(f"results/{config['run']}/logs/.claimed", f"results/{config['run']}"))
        made = {Path(file).parts[0] for job in workflow.dag.needrun_jobs() for file in job.output}
        if "resources" in made:
            CLAIMED.append(claim("resources/.claimed", "resources"))
        # Jobs in a queue outlive the process that sent them there, and may be writing.
        if workflow.local_exec:
            for place in (f"results/{config['run']}", "resources")[: len(CLAIMED)]:
                sweep(place)
    except ContourKVError as error:
        sys.exit(f"error: {error}")
