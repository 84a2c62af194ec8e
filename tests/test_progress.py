"""Lines of progress: what an earlier run finished counts as done, and not for the rate."""

import io
import re

from contourkv.progress import Progress


def test_steps_of_an_earlier_run_are_done_and_have_no_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("contourkv.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(8, "ask", "contexts", interval=10, stream=stream, before=3)
    now[0] += 70
    progress.advance()
    assert stream.getvalue() == "ask: 4 of 8 contexts, 70 s each, 70 s gone, 280 s left\n"


def test_the_last_step_is_always_told():
    stream = io.StringIO()
    for _ in Progress(3, "count", "rows", stream=stream).over(range(3)):
        pass
    assert re.fullmatch(r"count: 3 of 3 rows, .*/s, 0 s gone, 0 s left\n", stream.getvalue())
