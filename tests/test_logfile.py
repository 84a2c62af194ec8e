"""What a job prints goes to its log; an expected error is one line in the log and on the terminal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contourkv.logfile import WORKFLOW

PREFIX = "from contourkv.logfile import logged\nwith logged('logs/job.log'):\n    "


@pytest.fixture
def job(tmp_path):
    def run(body: str) -> tuple[subprocess.CompletedProcess, str]:
        code = PREFIX + body.replace("\n", "\n    ")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        return done, (tmp_path / "logs" / "job.log").read_text()

    return run


def test_everything_printed_goes_to_the_log(job):
    done, log = job("import os, sys\nprint('one')\nprint('two', file=sys.stderr)\nos.system('echo three')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(log.split()) == ["one", "three", "two"]


def test_progress_reaches_the_terminal_too(job):
    done, log = job("from contourkv.progress import Progress\nProgress(1, 'count', 'rows').advance()")
    assert done.stderr == log
    assert log.startswith("count: 1 of 1 rows")


def test_an_expected_error_is_one_line_in_both_places(job):
    done, log = job("from contourkv.errors import InvalidInput\nraise InvalidInput('the key: what to do')")
    assert done.returncode == 1
    assert done.stderr == log == "error: the key: what to do\n"


def test_an_unexpected_error_leaves_its_traceback_in_the_log_alone(job):
    done, log = job("{}['x']")
    assert done.returncode == 1
    assert done.stderr == "error: KeyError: 'x' (traceback in logs/job.log)\n"
    assert log.startswith("Traceback") and "KeyError: 'x'" in log


WRITE = """import time
from contourkv.provenance import atomic_path
with atomic_path('out.txt') as temporary:
    temporary.write_text('half')
    open('started', 'w').close()
    time.sleep(60)"""


def _wait(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def _visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"logs", "started"}


def test_a_terminated_job_leaves_no_half_written_file(tmp_path):
    code = PREFIX + WRITE.replace("\n", "\n    ")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    _wait((tmp_path / "started").exists)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert _visible(tmp_path) == set()


def test_a_job_ends_when_its_parent_is_killed(tmp_path):
    code = PREFIX + "import os\n    open('pid', 'w').write(str(os.getpid()))\n    " + WRITE.replace("\n", "\n    ")
    (tmp_path / "job.py").write_text(code)
    parent = f"import subprocess\nsubprocess.run([{sys.executable!r}, 'job.py'])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    _wait((tmp_path / "started").exists)
    child = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    _wait(lambda: not _alive(child))
    assert _visible(tmp_path) == {"job.py", "pid"}


def test_a_job_ends_when_the_workflow_that_started_it_is_gone_whoever_its_parent_is(tmp_path):
    """One that was killed before the job began to watch it, and one behind a shell that lives on."""
    code = PREFIX + WRITE.replace("\n", "\n    ")
    workflow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = {"args": [sys.executable, "-c", code], "cwd": tmp_path, "env": {**os.environ, WORKFLOW: str(workflow.pid)}}
    job = subprocess.Popen(**start)
    _wait((tmp_path / "started").exists)
    workflow.kill()
    workflow.wait()
    assert job.wait(20) == 128 + signal.SIGTERM
    assert subprocess.run(**start, timeout=30).returncode == 128 + signal.SIGTERM
    assert _visible(tmp_path) == set()


def test_an_interrupted_job_ends_without_a_traceback(tmp_path):
    code = PREFIX + WRITE.replace("\n", "\n    ")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    _wait((tmp_path / "started").exists)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT and not said
    assert _visible(tmp_path) == set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_on_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/job.log").symlink_to("/dev/full")
    for body in (
        "print('x' * 9000, flush=True)",
        "from contourkv.errors import InvalidInput\n    raise InvalidInput('a')",
    ):
        done = subprocess.run([sys.executable, "-c", PREFIX + body], cwd=tmp_path, capture_output=True, text=True)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1
        assert line.startswith("error: logs/job.log: could not be written (No space left") or line == "error: a"
    (tmp_path / "logs/job.log").unlink()
    (tmp_path / "logs/job.log").mkdir()
    done = subprocess.run([sys.executable, "-c", PREFIX + "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: logs/job.log: could not be written (Is a directory)")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a zombie whose new parent does not collect it has ended too
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
