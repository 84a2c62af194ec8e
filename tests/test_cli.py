"""`contourkv bytes`: nominal against held, from real prefills; one line and a status for everything that is wrong."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys

import pytest
import torch

from contourkv import cli
from contourkv.held import held_bytes
from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model
from contourkv.ragged.cache import RaggedCache

TOKENS = 120
FULL = 3 * 2 * TOKENS * 2 * 16 * 4  # layers, KV heads, tokens, key and value, head_dim, float32
TRIPLE = 3 * 8  # index of a dropped pair
HEAD = 3 * 2  # heads of all layers


@pytest.fixture
def with_kvpress():
    pytest.importorskip("kvpress")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    make_model({"architecture": "llama", "seed": 5}, path, "llama")
    return path


@pytest.fixture
def run(folder, capsys):
    """Exit status, rows and standard error of `contourkv bytes` on the tiny model."""

    def call(*arguments: str, model: str | None = None):
        status = cli.main(["bytes", "--model", model or str(folder), "--format", "json", *arguments])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, err

    return call


@pytest.mark.usefixtures("with_kvpress")
def test_cases_14_and_19_nominal_held_and_full_of_every_kind_of_press(run):
    names = ["full", "knorm", "adakv_knorm", "kvzip", "contourkv"]
    status, rows, err = run("--press", ",".join(names), "--ratio", "0.5,0.75", "--tokens", str(TOKENS))
    assert status == 0 and err == ""
    assert [(row["press"], row["ratio"]) for row in rows] == [
        ("full", 0.0),
        *((name, ratio) for name in names[1:] for ratio in (0.5, 0.75)),
    ]
    by = {(row["press"], row["ratio"]): row for row in rows}
    assert by["full", 0.0]["total"] == by["full", 0.0]["nominal"] == FULL
    for ratio in (0.5, 0.75):
        cut, masked, replayed, ours = (by[name, ratio] for name in names[1:])
        dropped = int(ratio * HEAD * TOKENS)
        assert cut["total"] == cut["nominal"] == round((1 - ratio) * FULL)
        assert (masked["payload"], masked["metadata"]) == (FULL, dropped * TRIPLE)
        assert replayed["payload"] == FULL and replayed["slack"] > FULL
        assert ours["payload"] <= ours["nominal"] < ours["total"] < 1.2 * ours["nominal"]
        for row in (cut, masked, replayed, ours):
            assert row["total"] == row["payload"] + row["slack"] + row["metadata"]
            assert row["held_over_nominal"] == row["total"] / row["nominal"]
            assert row["held_over_full"] == row["total"] / FULL


@pytest.mark.usefixtures("with_kvpress")
def test_enforced_selections_hold_what_their_ratio_says(run):
    status, rows, _ = run("--press", "adakv_snapkv,contourkv", "--ratio", "0.5", "--tokens", str(TOKENS), "--enforce")
    assert status == 0
    assert [row["press"] for row in rows] == ["full", "adakv_snapkv", "enforced(adakv_snapkv)", "contourkv"]
    assert rows[1]["payload"] == FULL and rows[2]["payload"] == FULL // 2 and rows[2]["slack"] == 0


def test_a_row_is_what_a_call_of_the_library_gives(run, folder):
    from contourkv.press import ContourKVPress

    model = load_model(folder)
    ids = torch.randint(0, model.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(9))
    cache = RaggedCache(model.config)
    with torch.no_grad(), ContourKVPress(compression_ratio=0.4)(model):
        model(ids, past_key_values=cache)
    _, rows, _ = run("--press", "contourkv", "--ratio", "0.4", "--tokens", "50", "--seed", "9")
    assert rows[1]["total"] == held_bytes(cache).total


@pytest.mark.usefixtures("with_kvpress")
def test_case_11_nothing_leaks_from_one_row_into_the_next(run):
    names = ["kvzip", "knorm", "adakv_compactor", "contourkv", "snapkv"]
    arguments = ("--ratio", "0.6", "--tokens", "100", "--enforce")
    together = run("--press", ",".join(names), *arguments)[1]
    apart = [row for name in names for row in run("--press", name, *arguments)[1][1:]]
    assert together[1:] == apart


def test_dtype_and_text(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a" * 300, encoding="utf-8")
    _, rows, _ = run("--press", "full", "--ratio", "0.5", "--text", str(text), "--tokens", str(TOKENS))
    assert rows[0]["total"] == FULL
    _, rows, _ = run("--press", "full", "--ratio", "0.5", "--text", str(text), "--dtype", "bfloat16")
    assert rows[0]["total"] == FULL // 2 * 301 // TOKENS  # every byte a token, and BOS


@pytest.mark.usefixtures("with_kvpress")
def test_a_press_that_fails_is_a_row_and_the_rest_goes_on(run, capsys, folder):
    names = "snapkv,knorm,adakv_snapkv"
    status, rows, err = run("--press", names, "--ratio", "0.5", "--tokens", "20", "--enforce")  # SnapKV needs over 64
    assert status == 1
    assert [bool(row["error"]) for row in rows] == [False, True, True, False, False, True, True]
    assert "Query length 20 should be greater than the window size 64" in rows[1]["error"] and rows[1]["total"] is None
    assert rows[3]["total"] == rows[3]["nominal"]
    assert err.count("\n") == 4 and err.startswith("contourkv bytes: snapkv at ratio 0.5 failed: AssertionError: ")
    cli.main(["bytes", "--model", str(folder), "--press", names, "--ratio", "0.5", "--tokens", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["snapkv", "0.5", f"{FULL // 12:,}", "-", "-", "-", "-", "failed"]


@pytest.mark.usefixtures("with_kvpress")
def test_formats_say_the_same(folder, capsys):
    shown = {}
    for kind in ("table", "csv", "json"):
        arguments = ["--press", "knorm,adakv_knorm", "--ratio", "0.5", "--tokens", str(TOKENS), "--format", kind]
        assert cli.main(["bytes", "--model", str(folder), *arguments]) == 0
        shown[kind] = capsys.readouterr().out
    rows = json.loads(shown["json"])
    assert [int(row["total"]) for row in csv.DictReader(io.StringIO(shown["csv"]))] == [row["total"] for row in rows]
    header, *lines = shown["table"].splitlines()
    assert header.split() == "press ratio nominal payload slack metadata total held/nominal held/full".split()
    assert [int(line.split()[6].replace(",", "")) for line in lines] == [row["total"] for row in rows]
    assert lines[1].split()[-2:] == ["1.000", "0.500"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--press", "snap"], "--press: unknown press 'snap'; expected full, contourkv, compactor, .*adakv_NAME"),
        (["--press", "adakv_kvzip"], "--press: unknown press 'adakv_kvzip'"),
        (["--press", ","], "--press: expected names"),
        (["--ratio", "1.0"], "--ratio: expected the fraction to remove, at least 0 and under 1, got 1.0"),
        (["--ratio", "0.5,-0.1"], "--ratio: .* got -0.1"),
        (["--ratio", "nan"], "--ratio: .* got nan"),
        (["--ratio", "half"], "--ratio: expected numbers such as 0.5,0.75, got 'half'"),
        (["--model", "/no/such/folder"], "--model: /no/such/folder: there is no such folder, and it is no hub"),
        (["--model", "nothing here"], "--model: nothing here: there is no such folder"),
        (["--tokens", "5000"], "--tokens: 5000 tokens, the model's window holds 2048"),
        (["--text", "/no/such/text"], "--text: /no/such/text: cannot be read as text"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(run, arguments, message):
    defaults = {"--press": "full", "--ratio": "0.5"}
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        defaults[name] = value
    model = defaults.pop("--model", None)
    status, rows, err = run(*[word for pair in defaults.items() for word in pair], model=model)
    assert status == 2 and rows is None
    assert err.count("\n") == 1
    assert re.search(f"^contourkv bytes: {message}", err)


def test_a_text_too_short_is_refused(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ab", encoding="utf-8")
    status, _, err = run("--press", "full", "--ratio", "0", "--text", str(text), "--tokens", "9")
    assert status == 2 and "has 3 tokens, --tokens asks for 9" in err


def test_a_folder_without_a_model_is_refused(run, tmp_path):
    status, _, err = run("--press", "full", "--ratio", "0", model=str(tmp_path))
    assert status == 2 and err == f"contourkv bytes: {tmp_path}: no config.json in the model folder\n"


def test_case_24_exit_codes_reach_the_shell_without_a_traceback(tmp_path):
    def shell(*arguments: str):
        return subprocess.run([sys.executable, "-m", "contourkv.cli", *arguments], capture_output=True, text=True)

    refused = shell("bytes", "--model", str(tmp_path / "nothing"), "--press", "full", "--ratio", "0.5")
    assert refused.returncode == 2 and refused.stdout == "" and "Traceback" not in refused.stderr
    for arguments in ([], ["bytes"], ["bytes", "--model", "x", "--press", "y", "--ratio", "0", "--tokens", "0"]):
        wrong = shell(*arguments)
        assert wrong.returncode == 2 and "usage: contourkv" in wrong.stderr and "Traceback" not in wrong.stderr
    assert shell("bytes", "--help").returncode == 0


def test_an_output_that_ends_and_an_interrupt_are_no_tracebacks(folder, monkeypatch, capsys):
    asked = ["bytes", "--model", str(folder), "--press", "contourkv", "--ratio", "0.5", "--tokens", "60"]
    shell = " ".join([sys.executable, "-m", "contourkv.cli", *asked])
    for into, status in (("| true", 0), ("> /dev/full", 1)):
        ended = subprocess.run(["bash", "-o", "pipefail", "-c", f"{shell} {into}"], capture_output=True, text=True)
        assert ended.returncode == status and "Traceback" not in ended.stderr
    assert "cannot write: No space left on device" in ended.stderr

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "measure", interrupted)
    assert cli.main(asked) == 130
    assert capsys.readouterr().err == "contourkv bytes: interrupted\n"


def test_asking_for_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom contourkv.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'transformers', 'kvpress'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
