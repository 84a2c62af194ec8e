"""Files from the future are those, and no others."""

import os

from contourkv.clock import SLACK_SECONDS, from_the_future


def test_files_dated_later_than_now_are_found(tmp_path):
    for name, later in {"a/old": -9, "a/now": 0, "b/soon": SLACK_SECONDS / 2, "b/c/later": 60, "far": 1e6}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 + later, 1e9 + later))
    (tmp_path / "a/broken").symlink_to("nowhere")
    folders = [tmp_path / "b", tmp_path / "a", tmp_path / "none"]
    assert from_the_future(folders, now=1e9) == [tmp_path / "b/c/later"]
    assert from_the_future([tmp_path], now=1e9) == [tmp_path / "b/c/later", tmp_path / "far"]
    assert from_the_future([tmp_path]) == []
