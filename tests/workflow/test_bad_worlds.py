"""Disks that are full or read-only, files that are damaged, clocks that jump, two runs at once, little memory.

Each is one clear line that says what to do, and what it says works.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from workflow_copy import Copy
from workflow_results import RESULTS, made

RUN = ("--cores", "2", "--configfile", "config/test.yaml")
AGAIN = "make it again: snakemake --cores 2 --configfile config/test.yaml --force "


@pytest.fixture
def world(finished, tmp_path) -> Copy:
    """The finished copy once more, to be spoilt."""
    shutil.copytree(finished.folder, tmp_path / "world", symlinks=True)
    return Copy(tmp_path / "world")


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """A file system of its own in memory at `folder`, with what the folder holds."""
    held = folder.with_name(f"{folder.name}-held")
    if folder.exists():
        folder.rename(held)
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        if held.exists():
            shutil.copytree(held, folder, dirs_exist_ok=True, symlinks=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def final(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*.*") if path.is_file() and path.suffix not in (".log", ".tsv")]
    return {str(path.relative_to(folder)) for path in files if ".parts" not in str(path)}


def test_a_full_disk_is_named_and_the_job_goes_on_when_there_is_room(world, finished):
    shards = [f"{RESULTS}/shards/tiny-llama/prose/{index:03d}.safetensors" for index in range(2)]
    size = (world.folder / shards[0]).stat().st_size
    shutil.rmtree(world.folder / RESULTS)
    with mounted(world.folder / RESULTS, f"size={1.5 * size + 8 * 4096:.0f}"):
        done = world.run(shards[0], *RUN)
        (line,) = errors(done.stdout)
        assert done.returncode == 1 and "Traceback" not in done.stdout
        assert f"{shards[0]}.parts/00001.safetensors: could not be written (No space left on device)" in line
        assert re.search(r"it needs \d+\.\d MB; \d+\.\d MB are free", line) and "make room" in line
        assert not [name for name in final(world.folder / RESULTS) if name.startswith("shards")]

        filled = world.folder / RESULTS / "filled"
        with contextlib.suppress(OSError), open(filled, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        done = world.run(shards[0], *RUN)
        (line,) = errors(done.stdout)
        assert done.returncode == 1 and "could not be written (No space left on device)" in line
        filled.unlink()

        remount(world.folder / RESULTS, f"size={8 * size}")
        done = world.run(shards[0], *RUN)
        assert done.returncode == 0, done.stdout[-3000:]
        assert [(world.folder / name).read_bytes() for name in shards] == [
            (finished.folder / name).read_bytes() for name in shards
        ]
        log = (world.folder / RESULTS / "logs/capture/tiny-llama/prose.log").read_text()
        assert re.search(r"capture tiny-llama: (\d+) of \1 layers", log)
        assert not list(world.folder.rglob("*.parts"))


def test_a_read_only_folder_is_one_line(world):
    with mounted(world.folder / RESULTS, "size=1g"):
        remount(world.folder / RESULTS, "ro")
        note = (
            f"note: {RESULTS}: is read-only: nothing can be made there; make it writable, or give the run another name"
        )
        done = world.run(*RUN)
        assert done.returncode == 0 and "Nothing to be done" in done.stdout and note in done.stdout.splitlines()
        done = world.run(*RUN, "--force", f"{RESULTS}/costs.csv")
        assert done.returncode == 1 and note in done.stdout.splitlines() and "Traceback" not in done.stdout

        remount(world.folder / RESULTS, "rw")
        for path in (world.folder / RESULTS).glob("costs.*"):
            path.unlink()
        remount(world.folder / RESULTS, "ro")
        done = world.run(*RUN, "--force", f"{RESULTS}/costs.csv")
        assert done.returncode == 1 and "Traceback" not in done.stdout
        (line,) = errors(done.stdout)
        assert line.startswith(f"error: {RESULTS}/logs/.claimed: could not be written (Read-only file system)")


def flipped(content: bytes) -> bytes:
    at = len(content) * 2 // 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


# What is damaged, how, and a file that is made from it; no such file is made from another one.
DAMAGED = {
    f"{RESULTS}/structured/shards/tiny-llama/needles/000.safetensors": (
        lambda content: content[:-100],
        f"{RESULTS}/structured/instances/tiny-llama/needles/000.parquet",
    ),
    f"{RESULTS}/shards/tiny-gemma3/code/001.safetensors": (flipped, f"{RESULTS}/weights/tiny-gemma3.parquet"),
    f"{RESULTS}/certificates/tiny-qwen3/s4.parquet": (flipped, f"{RESULTS}/instances.parquet"),
    f"{RESULTS}/exact/tiny-qwen2.parquet": (lambda content: b"PAR1, says who", f"{RESULTS}/tables/exact.csv"),
    f"{RESULTS}/structured/contexts/tiny-qwen2/needles.json": (
        lambda content: content[: len(content) // 2],
        f"{RESULTS}/structured/shards/tiny-qwen2/needles/000.safetensors",
    ),
    f"{RESULTS}/benchmark/tasks/tiny-llama/single.json": (
        lambda content: b'{"not": "a task"}',
        f"{RESULTS}/benchmark/answers/tiny-llama/single.parquet",
    ),
    f"{RESULTS}/tables/native.csv": (lambda content: b"\x89PNG\r\n\x1a\n", f"{RESULTS}/figures/fig_native.pdf"),
    "resources/models/tiny-gemma3/model.safetensors": (flipped, f"{RESULTS}/audit/tiny-gemma3/prose.parquet"),
    "resources/models/tiny-olmo2/tokenizer.json": (
        lambda content: content[:2000],
        f"{RESULTS}/structured/contexts/tiny-olmo2/chains.json",
    ),
}


def put(path: Path, content: bytes, like: os.stat_result) -> None:
    """A file as it was, time included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(like.st_atime_ns, like.st_mtime_ns))


def test_a_damaged_file_is_named_with_the_command_that_makes_it_again(world):
    """Truncated, a bit flipped, or another file under its name."""
    merged, certificate = f"{RESULTS}/instances.parquet", f"{RESULTS}/certificates/tiny-qwen3/s4.parquet"
    files = [path for place in (RESULTS, "resources/models") for path in (world.folder / place).rglob("*.*")]
    before = {str(path.relative_to(world.folder)): (path.read_bytes(), path.stat()) for path in files if path.is_file()}
    for name, (damage, _) in DAMAGED.items():
        put(world.folder / name, damage(before[name][0]), before[name][1])
    readers = [reader for _, reader in DAMAGED.values()]
    done = world.run(*RUN, "--keep-going", "--force", *readers)
    assert done.returncode == 1
    lines = errors(done.stdout)
    assert sorted(line.rpartition(AGAIN)[2] for line in lines) == sorted(DAMAGED), "\n".join(lines)
    assert all(line.startswith(f"error: {line.rpartition(AGAIN)[2]}: ") for line in lines), "\n".join(lines)
    assert not [reader for reader in readers if (world.folder / reader).exists()]

    # one command a file is what the lines say; all files after one is the same
    done = world.run(*shlex.split(AGAIN.partition("snakemake ")[2]), *DAMAGED)
    assert done.returncode == 0, done.stdout[-3000:]
    assert [name for name in DAMAGED if (world.folder / name).read_bytes() != before[name][0]] == []

    # A certificate that was made again is joined again: all else as it was, so that no more is planned.
    for name, (content, stat) in before.items():
        if name not in (certificate, merged):
            put(world.folder / name, content, stat)
    done = world.run(*RUN, "--until", "merge_instances")
    assert done.returncode == 0 and done.stdout.count("Finished jobid") <= 2, done.stdout[-3000:]
    assert (world.folder / merged).read_bytes() == before[merged][0]


def test_a_wheel_of_another_hash_is_named_and_fetched_again(world):
    wheels = {path: path.read_bytes() for path in (world.folder / "resources/wheels").glob("*.whl")}
    for path, content in wheels.items():
        path.write_bytes(flipped(content))
    done = world.run(*RUN, "--force", f"{RESULTS}/contexts/tiny-llama/prose.json")
    (line,) = errors(done.stdout)
    name = line.rpartition(AGAIN)[2]
    assert done.returncode == 1 and line.startswith(f"error: {name}: expected SHA-256 ")
    done = world.run(*shlex.split(line.partition("again: snakemake ")[2]))
    assert done.returncode == 0, done.stdout[-3000:]
    path = world.folder / name
    assert path.read_bytes() == wheels[path]


def test_a_file_from_the_future_is_named_with_what_puts_it_right(world):
    table = world.folder / RESULTS / "tables/kappa.csv"
    content = made(world)
    later = time.time() + 86400
    os.utime(table, (later, later))
    done = world.run("-n", *RUN)
    (note,) = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert "1 file is dated in the future" in note and f"{RESULTS}/tables/kappa.csv" in note
    command = note.rpartition("date them now: ")[2]
    subprocess.run(command, shell=True, cwd=world.folder, check=True)
    done = world.run(*RUN)
    assert done.returncode == 0, done.stdout[-3000:]
    assert world.plan("config/test.yaml") == {} and "note: " not in world.run("-n", *RUN).stdout
    unlike = {name for name, found in made(world).items() if found != content[name]}
    assert unlike <= {"costs.csv", "costs.md", "report.html"}


def test_of_two_runs_at_once_one_is_refused_in_one_line(world, tmp_path):
    log = tmp_path / "first.log"
    first = world.start(*RUN, "--force", f"{RESULTS}/shards/tiny-llama/prose/000.safetensors", log=log)
    claimed = world.folder / RESULTS / "logs/.claimed"
    limit = time.monotonic() + 600
    while f"process {first.pid} " not in claimed.read_text():
        assert first.poll() is None and time.monotonic() < limit, log.read_text()
        time.sleep(0.05)
    second = world.run(*RUN, "--force", f"{RESULTS}/costs.csv")
    assert second.returncode == 1 and "Traceback" not in second.stdout
    (line,) = errors(second.stdout)
    assert f"{RESULTS}: another run is writing there (process {first.pid} on " in line
    assert first.wait(1200) == 0, log.read_text()
    assert world.run(*RUN, "--force", f"{RESULTS}/costs.csv").returncode == 0, "the claim ends with its process"


def test_a_small_machine_plans_and_names_the_rules_that_may_not_fit(finished):
    done = finished.run("-n", "--configfile", "config/test.yaml", "--resources", "gpu=1", "mem_mb=4000")
    assert done.returncode == 0 and "Nothing to be done" in done.stdout
    (note,) = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert "mem_mb=4000" in note
    assert set(re.findall(r"(\w+) \((\d+)\)", note)) == {
        (name, "6000") for name in ("prepare_model", "ask", "probe_costs")
    }
    done = finished.run("-n", "--configfile", "config/test.yaml", "--resources", "gpu=1", "mem_mb=8000")
    assert done.returncode == 0 and "note: " not in done.stdout
