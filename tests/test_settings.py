"""A configuration is either run or refused with one line that names the key and what to do."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from contourkv.errors import InvalidInput
from contourkv.settings import check, defaults, read_schema

CONFIG = Path(__file__).parents[1] / "config"
SCHEMA = read_schema(CONFIG / "schemas" / "config.schema.yaml")
SHA256 = "0" * 64
BASE = {
    **defaults(SCHEMA),
    "models": ["smollm2-135m", "gemma3-270m"],
    "enumeration": {
        "budgets": [4, 8, 16, 32],
        "families": [
            {"budget": 4, "core": 0, "pool": 70},
            {"budget": 8, "core": 0, "pool": 24},
            {"budget": 16, "core": 0, "pool": 24},
            {"budget": 32, "core": 24, "pool": 48},
        ],
        "swap_keys": 256,
    },
    "model_sources": {
        "smollm2-135m": {
            "label": "A",
            "source": "wheel",
            "wheels": ["a==1"],
            "gguf": ["a.gguf"],
            "gguf_sha256": SHA256,
            "licence": "Apache-2.0",
            "dtype": "float32",
        },
        "gemma3-270m": {"label": "B", "source": "folder", "path": str(CONFIG), "licence": "x", "dtype": "float32"},
    },
    "text_sources": {arm: {"wheel": "a==1", "reader": "python"} for arm in ("prose", "dialogue", "code")},
    "wheel_hashes": {"a==1": SHA256},
    **yaml.safe_load((CONFIG / "reference.yaml").read_text()),
}


def merged(*names: str) -> dict:
    """The configuration as Snakemake merges the files: mappings by key, lists replaced."""

    def merge(into: dict, more: dict) -> dict:
        for key, value in more.items():
            both = isinstance(value, dict) and isinstance(into.get(key), dict)
            into[key] = merge(into[key], value) if both else value
        return into

    config: dict = {}
    for name in ("models", "texts", "reference", "config", *names):
        merge(config, yaml.safe_load((CONFIG / f"{name}.yaml").read_text()))
    return config


def changed(path: str, value: object) -> dict:
    config = copy.deepcopy(BASE)
    *steps, last = re.findall(r"[^.\[\]]+", path)
    place = config
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    return config


def refused(config: dict) -> str:
    with pytest.raises(InvalidInput) as caught:
        check(config, SCHEMA)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("names", [(), ("offline",), ("test",), ("paper",)], ids=str)
def test_the_shipped_configurations_are_sound(names, monkeypatch):
    monkeypatch.chdir(CONFIG.parent)
    check(merged(*names), SCHEMA)


def test_config_yaml_holds_the_defaults_that_the_schema_names():
    assert yaml.safe_load((CONFIG / "config.yaml").read_text()) == defaults(SCHEMA)


def test_every_key_has_a_description_and_a_type_and_no_mapping_is_open():
    def walk(part: dict, path: str) -> None:
        for key, below in part.get("properties", {}).items():
            # `true` repeats a key that is described beside; `const` selects
            if below is True or "const" in below:
                continue
            target = {**SCHEMA["$defs"][below["$ref"].rpartition("/")[2]], **below} if "$ref" in below else below
            assert target.get("description") and target.get("type"), f"{path}.{key}"
        if part.get("type") == "object" and "propertyNames" not in part:
            # what stands beside `allOf` is closed by each of its branches
            assert part.get("additionalProperties") is False or "allOf" in part, path
        for key, below in part.items():
            if isinstance(below, dict):
                walk(below, f"{path}.{key}")

    walk(SCHEMA, "")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("moduls", [], "config key moduls: unknown key; did you mean models?"),
        ("zzz", 1, "config key zzz: unknown key; allowed: arms, audit, benchmark"),
        ("enumeration.budgts", [4], "config key enumeration.budgts: unknown key; did you mean budgets?"),
        ("enumeration.families[1].pol", 4, "config key enumeration.families[1].pol: unknown key; did you mean pool?"),
        ("model_sources.smollm2-135m.ggufs", 4, "smollm2-135m.ggufs: unknown key; did you mean gguf?"),
        ("model_sources.smollm2-135m.source", "whel", "smollm2-135m.source: expected one of wheel, folder"),
        ("models", ["smolm2-135m"], "models[0]: no smolm2-135m in model_sources (models.yaml); did you mean smollm2"),
        ("models", [], "models: expected at least 1 in the list, got []"),
        ("models", "smollm2-135m", "models: expected a list, got 'smollm2-135m'"),
        ("arms", ["prosa"], "arms[0]: no prosa in text_sources (texts.yaml); did you mean prose?"),
        ("arms", ["prose", "prose"], "arms: expected no entry twice"),
        ("arms[1]", False, "arms[1]: expected text, got False: YAML reads a bare yes, no, on or off"),
        ("run", 7, "run: expected text, got 7: put it in quotes"),
        ("run", "../up", "run: expected text that matches"),
        ("run", "a..b", "run: expected text that matches"),
        ("run", "a\n", "run: expected text that matches"),
        ("run", None, "run: expected text, got None: the key has no value"),
        ("model_sources", {"../x": {}}, "model_sources: the name '../x' is not allowed; expected lower-case"),
        ("contexts.seeds", {False: 1}, "contexts.seeds: the key False is not text: YAML reads a bare yes, no"),
        ("contexts.seeds", {"prose": 1, "code": 1}, "contexts.seeds.dialogue: missing: every arm needs a seed"),
        (
            "contexts.length",
            "1e3",
            "contexts.length: expected a whole number, got '1e3': YAML read it as text; write 1000",
        ),
        ("contexts.length", 1e3, "contexts.length: expected a whole number, got 1000.0: write 1000"),
        ("contexts.length", True, "contexts.length: expected a whole number, got True"),
        ("contexts.per_arm", 0, "contexts.per_arm: expected at least 1, got 0"),
        ("contexts", {"length": 1024, "per_arm": 2}, "contexts.seeds: missing (Seed of each arm's choice"),
        ("capture.positions", [639, 1024], "capture.positions[1]: position 1024 lies outside a context of 1024 tokens"),
        ("capture.positions", [767, 639], "capture.positions: expected rising positions, got [767, 639]"),
        ("capture.positions", [639, 639], "capture.positions: expected no entry twice"),
        ("capture.positions", [-1, 639], "capture.positions[0]: expected at least 1, got -1"),
        ("enumeration.budgets", [0, 4], "enumeration.budgets[0]: expected at least 1, got 0"),
        ("enumeration.budgets", [4, 640], "enumeration.budgets[1]: budget 640 is not below the 640 visible keys"),
        ("enumeration.budgets", [4, 5], "enumeration.families: no mass pool for budget 5; add {budget: 5, core: 0"),
        (
            "enumeration.families[0].core",
            4,
            "families[0]: expected core < budget <= pool, got core 4, budget 4, pool 70",
        ),
        (
            "enumeration.families[0].pool",
            3,
            "families[0]: expected core < budget <= pool, got core 0, budget 4, pool 3",
        ),
        (
            "enumeration.families[3].core",
            0,
            "families[3]: 2.25e+12 kept sets a row, more than 1e+09; make the pool smaller",
        ),
        (
            "enumeration.families[0].free",
            2,
            "families[0]: expected either core (a mass pool) or free (a neighbourhood)",
        ),
        (
            "enumeration.families[3]",
            {"budget": 4, "free": 5, "pool": 20},
            "families[3]: expected free <= budget and free < pool, got free 5",
        ),
        ("enumeration.families[0]", {"budget": 4, "pool": 20}, "families[0]: expected either core"),
        ("enumeration.swap_keys", 32, "enumeration.swap_keys: expected more than the largest budget 32, got 32"),
        ("certificate.tolerance", float("nan"), "certificate.tolerance: expected a finite number, got nan"),
        (
            "certificate.tolerance",
            "1e-6",
            "certificate.tolerance: expected a number, got '1e-6': YAML read it as text; write 1.0e-06",
        ),
        ("certificate.time_limit_s", 0, "certificate.time_limit_s: expected more than 0, got 0"),
        ("loss.models", "null", "loss.models: expected a list or null, got 'null': write null without quotes"),
        ("native.models", ["trained-qwen2"], "native.models[0]: trained-qwen2 is not among the run's models"),
        ("native.budgets", [64, 1024], "native.budgets[1]: budget 1024 is not below the 1024 visible keys"),
        ("statistics.resamples", "10", "statistics.resamples: expected a whole number, got '10': it is text; write it"),
        (
            "model_sources.gemma3-270m.label",
            "A",
            "model_sources.gemma3-270m.label: 'A' is the label of smollm2",
        ),
        ("model_sources.gemma3-270m.path", "/nowhere", "model_sources.gemma3-270m.path: there is no folder /nowhere"),
        ("device", "gpu", "device: expected text that matches"),
        ("wheel_hashes", {"a==1": "12"}, "wheel_hashes.a==1: expected text that matches"),
        ("wheel_hashes", {"--index-url x==1": SHA256}, "wheel_hashes: the name '--index-url x==1' is not allowed"),
        ("wheel_hashes", {}, "model_sources.smollm2-135m: no SHA-256 for a==1 in wheel_hashes"),
    ],
)
def test_one_line_names_the_key_and_what_was_expected(path, value, expected):
    message = refused(changed(path, value))
    assert expected in message
    assert message.startswith("config key ")


@given(st.text(st.characters(codec="utf-8"), max_size=12))
def test_no_name_that_is_accepted_leaves_its_folder(name):
    try:
        check(changed("run", name), SCHEMA)
    except InvalidInput:
        return
    assert Path("results", name).resolve().parent == Path("results").resolve()
    assert name == name.strip() and not name.startswith((".", "-"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.booleans(), inner, max_size=3)
        ),
        max_leaves=5,
    ),
    st.sampled_from(sorted(BASE)),
)
def test_any_value_is_accepted_or_refused_in_one_line(value, key):
    config = copy.deepcopy(BASE)
    config[key] = value
    try:
        check(config, SCHEMA)
    except InvalidInput as error:
        assert str(error).startswith("config key ") and "\n" not in str(error)


def test_the_schema_names_every_reader():
    from contourkv.contexts.readers import READERS

    named = SCHEMA["properties"]["text_sources"]["additionalProperties"]["properties"]["reader"]["enum"]
    assert named == list(READERS)


def test_the_schema_names_every_random_architecture():
    from contourkv.models.random_source import ARCHITECTURES

    assert SCHEMA["$defs"]["random_source"]["properties"]["architecture"]["enum"] == list(ARCHITECTURES)
