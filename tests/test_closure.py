"""The closure holds what a script's import runs, and its digest moves with that content and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contourkv.closure import _parsed, closure, code_digest, pins
from contourkv.errors import InvalidInput

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "contourkv"
SCRIPTS = sorted((ROOT / "workflow" / "scripts").glob("*.py"))


@pytest.fixture
def package(tmp_path):
    """Write modules of a package `pkg`, and a script; return both paths."""

    def write(script: str, **modules: str):
        for name, text in {"__init__": "", **modules}.items():
            file = tmp_path / "pkg" / (name.replace(".", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        path = tmp_path / "script.py"
        path.write_text(script)
        return path, tmp_path / "pkg"

    return write


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pkg", []),
        ("import pkg.a", ["pkg.a"]),
        ("import pkg.sub.b as b", ["pkg.sub", "pkg.sub.b"]),
        ("from pkg import a", ["pkg.a"]),
        ("from pkg.a import name", ["pkg.a"]),
        ("from pkg.sub import b, name", ["pkg.sub", "pkg.sub.b"]),
        ("from pkg.sub import *", ["pkg.sub"]),
        ("def f():\n    from pkg import a", ["pkg.a"]),
        ("if x:\n    try:\n        import pkg.a\n    except ImportError:\n        pass", ["pkg.a"]),
        ("from pkg.sub import lazy", ["pkg.sub", "pkg.sub.b"]),
        ("from pkg import chain", ["pkg.a", "pkg.chain", "pkg.sub", "pkg.sub.b"]),
        ("from pkg import circle", ["pkg.circle"]),
    ],
)
def test_every_form_of_import_is_followed(package, line, found):
    script, folder = package(
        line,
        **{
            "a": "",
            "sub.__init__": "name = 1\n_HOME = {'lazy': 'b'}",
            "sub.b": "from ..a import name" if line == "from pkg import chain" else "",
            "chain": "from . import sub\nfrom .sub import b",
            "circle": "from .circle import x",
        },
    )
    assert list(closure(script, folder).modules) == sorted({"pkg", *found})


def test_packages_from_elsewhere_are_named_without_the_standard_library(package):
    script, folder = package("import os, json\nfrom pkg import a", a="import numpy.linalg\nfrom yaml import load")
    assert closure(script, folder).outside == ("numpy", "yaml")


def test_pins_are_those_of_imported_packages(package, tmp_path):
    script, folder = package("from pkg import a", a="import numpy\nimport yaml\nimport unpinned")
    lock = tmp_path / "lock"
    lock.write_text("# comment\nNumPy==2.4.6\nPyYAML==6.0.4  # why\nscipy==1\n")
    assert pins(script, folder, lock) == {"numpy": "2.4.6", "pyyaml": "6.0.4"}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.sampled_from(["a", "other"]), comment=st.text("abc ", max_size=5))
def test_digest_moves_with_the_closure_alone_and_comes_back(package, which, comment):
    before = {"a": "x = 1\n", "other": "y = 1\n"}
    script, folder = package("from pkg import a", **before)
    first = code_digest(script, folder)
    package("from pkg import a", **{**before, which: before[which] + "#" + comment})
    assert (code_digest(script, folder) == first) == (which == "other")
    package("from pkg import a", **before)
    assert code_digest(script, folder) == first


def test_digest_moves_with_the_script_and_not_with_its_time_stamp(package):
    script, folder = package("from pkg import a", a="x = 1")
    first = code_digest(script, folder)
    os.utime(script, (1, 1))
    assert code_digest(script, folder) == first
    script.write_text("from pkg import a  # another")
    assert code_digest(script, folder) != first


def test_digest_is_the_same_in_another_folder(package, tmp_path):
    script, folder = package("from pkg import a", a="x = 1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "pkg").rename(elsewhere / "pkg")
    moved = code_digest(script, elsewhere / "pkg")
    (elsewhere / "pkg").rename(tmp_path / "pkg")
    assert moved == code_digest(script, folder)
    assert len(moved) == 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import pkg.nowhere.b", "imports pkg.nowhere.b, but there is no"),
        ("import (", "script.py, line 1: is not valid Python"),
    ],
)
def test_what_cannot_be_followed_is_said(package, line, message):
    script, folder = package(line)
    with pytest.raises(InvalidInput, match=message):
        closure(script, folder)


def test_missing_script_and_missing_package_are_said(tmp_path):
    with pytest.raises(InvalidInput, match="is not a Python package"):
        closure(tmp_path / "script.py", tmp_path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        closure(tmp_path / "script.py", PACKAGE)


def test_closures_of_all_scripts_parse_each_file_once_and_hold_what_really_loads():
    _parsed.cache_clear()
    found = {script.name: set(closure(script, PACKAGE).modules) for script in SCRIPTS}
    # Parsing is what takes time: every plan of the workflow does this.
    assert 0 < _parsed.cache_info().misses <= len(set().union(*found.values())) + len(SCRIPTS)
    # against the interpreter: what a module's import loads lies in the closure
    code = "import sys, contourkv.measurement; print(*[m for m in sys.modules if m.startswith('contourkv')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) <= found["enumerate.py"]
