"""Is a configuration sound? The schema's rules, and the relations between keys that a schema cannot say.

The first thing that is wrong is raised as one line: the key's path, what it holds, what was expected.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path

from .errors import InvalidInput
from .plain import MOST_YAML_VALUES, NotPlain, check_nesting, read_json, read_yaml

# at 250 million subsets a second, four seconds a row
MOST_SUBSETS = 10**9

_TYPE = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping of keys",
    "string": "text",
}


def read_schema(path: str | os.PathLike) -> dict:
    """The JSON schema written as YAML in `path`."""
    try:
        return read_yaml(path)
    except NotPlain as error:
        raise InvalidInput(f"{path}: {error}; restore the file") from error


def check_files(paths: Iterable[str | os.PathLike]) -> None:
    """Raise `InvalidInput` where a configuration file is not plain data; files that are not there are passed over.

    Snakemake merges them by the last of equal keys, and runs the expressions of a file that says `__use_yte__`.
    """
    for path in filter(os.path.isfile, paths):
        try:
            try:
                value = read_json(path)
            except NotPlain:
                value = read_yaml(path)
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read ({error.strerror})") from error
        except NotPlain as error:
            raise InvalidInput(f"{path}: {error}; expected plain YAML, every key once") from error
        if isinstance(value, dict) and "__use_yte__" in value:
            raise InvalidInput(f"{path}: __use_yte__ makes a template of it, whose expressions run; write plain values")


def check(config: Mapping, schema: Mapping) -> None:
    """Raise `InvalidInput` unless `config` is a configuration that can be run.

    Parameters
    ----------
    config : mapping
        The merged configuration.
    schema : mapping
        JSON schema, draft 2020-12; every object with `additionalProperties`.
    """
    try:
        check_nesting(config, MOST_YAML_VALUES)
    except NotPlain as error:
        raise InvalidInput(f"config: {error}; write it flatter, without aliases") from error
    _check_values(config, ())
    _check_schema(config, schema)
    _check_sources(config)
    _check_positions(config["capture"]["positions"], config["contexts"]["length"])
    _check_enumeration(config["enumeration"], config["capture"]["positions"][0] + 1)
    _check_parts(config)


def defaults(schema: Mapping) -> dict:
    """The values that `schema` names as defaults, nested as the configuration is."""
    found = {}
    for key, part in schema.get("properties", {}).items():
        if "default" in part:
            found[key] = part["default"]
        elif nested := defaults(part):
            found[key] = nested
    return found


def _fail(path: Sequence, problem: str) -> None:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    raise InvalidInput(f"config key {name}: {problem}" if name else f"config: {problem}")


def _check_values(value: object, path: tuple) -> None:
    """Stop on what YAML can write and JSON cannot: keys that are not text, numbers that are not finite."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                _fail(path, f"the key {key!r} is not text{_hint(key, 'string')}")
            _check_values(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_values(part, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        _fail(path, f"expected a finite number, got {value}")


def _check_schema(config: Mapping, schema: Mapping) -> None:
    from jsonschema import Draft202012Validator, validators

    # JSON schema counts 1.0 and 1e3 as integers, range() does not
    whole = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    validator = validators.extend(Draft202012Validator, type_checker=whole)(schema)
    # a misspelt key explains the missing one
    errors = sorted(
        validator.iter_errors(config),
        key=lambda error: (error.validator != "additionalProperties", [str(step) for step in error.path]),
    )
    if not errors:
        return
    error = errors[0]
    path, value, rule = tuple(error.absolute_path), error.instance, error.validator_value
    about = _meaning(error.schema)
    if error.validator == "additionalProperties":
        allowed = sorted(error.schema.get("properties", {}))
        key = next(key for key in value if key not in allowed)
        _fail((*path, key), f"unknown key{_closest(key, allowed)}")
    if "propertyNames" in error.absolute_schema_path:
        _fail(path, f"the name {value!r} is not allowed; expected {error.schema.get('description')}")
    if error.validator == "required":
        key = next(key for key in rule if key not in value)
        part = error.schema.get("properties", {}).get(key, {})
        _fail((*path, key), f"missing{_meaning(part)}")
    if error.validator == "type":
        types = [rule] if isinstance(rule, str) else rule
        wanted = " or ".join("null" if name == "null" else _TYPE[name] for name in types)
        _fail(path, f"expected {wanted}, got {value!r}{_hint(value, types[0])}{about}")
    expected = {
        "enum": lambda: "one of " + ", ".join(map(str, rule)),
        "minimum": lambda: f"at least {rule}",
        "maximum": lambda: f"at most {rule}",
        "exclusiveMinimum": lambda: f"more than {rule}",
        "exclusiveMaximum": lambda: f"less than {rule}",
        "minItems": lambda: f"at least {rule} in the list",
        "uniqueItems": lambda: "no entry twice",
        "maxLength": lambda: f"at most {rule} characters",
        "pattern": lambda: f"text that matches {rule}",
    }
    wanted = expected[error.validator]() if error.validator in expected else error.message
    _fail(path, f"expected {wanted}, got {value!r}{about}")


def _meaning(schema: Mapping) -> str:
    text = schema.get("description", "").strip().rstrip(".")
    return f" ({text})" if text else ""


def _closest(name: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"; did you mean {near[0]}?" if near else f"; allowed: {', '.join(allowed) or 'none'}"


def _hint(value: object, wanted: str) -> str:
    """Why YAML may have read something else than was meant."""
    if value is None:
        return ": the key has no value"
    if wanted == "array" and value == "null":
        return ": write null without quotes"
    if wanted == "string" and isinstance(value, bool):
        return ": YAML reads a bare yes, no, on or off as true or false; put it in quotes"
    if wanted == "string" and isinstance(value, (int, float, datetime.date)):
        return ": put it in quotes"
    if wanted == "integer" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if wanted in ("integer", "number") and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if not math.isfinite(number):
            return ""
        if value.strip().lstrip("+-").replace(".", "", 1).isdigit():
            return ": it is text; write it without quotes, and in a file: --config reads numbers inside of {} as text"
        # YAML wants a point before an exponent
        digits, mark, exponent = repr(int(number) if number.is_integer() else number).partition("e")
        return f": YAML read it as text; write {digits}{'.0' if mark and '.' not in digits else ''}{mark}{exponent}"
    return ""


def _check_sources(config: Mapping) -> None:
    hashes = config["wheel_hashes"]
    for kind, registry, file in (
        ("models", "model_sources", "models.yaml"),
        ("arms", "text_sources", "texts.yaml"),
    ):
        known = config[registry]
        for index, name in enumerate(config[kind]):
            if name not in known:
                _fail((kind, index), f"no {name} in {registry} ({file}){_closest(name, sorted(known))}")
            source = known[name]
            for wheel in source.get("wheels", [source["wheel"]] if "wheel" in source else []):
                if wheel not in hashes:
                    _fail((registry, name), f"no SHA-256 for {wheel} in wheel_hashes (texts.yaml, models.yaml)")
    labels: dict[str, str] = {}
    for name in config["models"]:
        source = config["model_sources"][name]
        if (other := labels.setdefault(source["label"], name)) != name:
            _fail(
                ("model_sources", name, "label"),
                f"{source['label']!r} is the label of {other} too; tables tell models by it",
            )
        if source["source"] in ("folder", "trained") and not Path(source["path"]).is_dir():
            _fail(
                ("model_sources", name, "path"), f"there is no folder {source['path']}; correct the path of the model"
            )
    seeds = config["contexts"]["seeds"]
    for arm in config["arms"]:
        if arm not in seeds:
            _fail(("contexts", "seeds", arm), "missing: every arm needs a seed of its own")


def _check_positions(positions: Sequence[int], length: int, part: str = "capture") -> None:
    where = (part, "positions")
    if list(positions) != sorted(positions):
        _fail(where, f"expected rising positions, got {list(positions)}")
    if positions[-1] >= length:
        _fail(
            (*where, len(positions) - 1),
            f"position {positions[-1]} lies outside a context of {length} tokens "
            f"({'exact' if part == 'exact' else 'contexts'}.length); "
            f"the last position is {length - 1}",
        )


def _check_enumeration(enumeration: Mapping, keys: int) -> None:
    budgets, families = enumeration["budgets"], enumeration["families"]
    for index, family in enumerate(families):
        _check_family(family, ("enumeration", "families", index))
    for index, s in enumerate(budgets):
        if s >= keys:
            _fail(
                ("enumeration", "budgets", index),
                f"budget {s} is not below the {keys} visible keys of the first query position; "
                "lower it or move capture.positions",
            )
        if not any(family["budget"] == s and "core" in family for family in families):
            _fail(("enumeration", "families"), f"no mass pool for budget {s}; add {{budget: {s}, core: 0, pool: ...}}")
    if enumeration["swap_keys"] <= max(budgets):
        _fail(
            ("enumeration", "swap_keys"),
            f"expected more than the largest budget {max(budgets)}, got {enumeration['swap_keys']}",
        )


def _check_parts(config: Mapping) -> None:
    """The parts beside the enumeration: their models, positions and budgets."""
    for part in ("native", "weights", "exact", "audit", "loss"):
        for index, model in enumerate(config[part]["models"] or []):
            if model not in config["models"]:
                _fail(
                    (part, "models", index), f"{model} is not among the run's models{_closest(model, config['models'])}"
                )
    native, seen = config["native"], config["capture"]["positions"][-1] + 1
    for index, s in enumerate(native["budgets"] if native["models"] != [] else ()):
        if s >= seen:
            _fail(
                ("native", "budgets", index),
                f"budget {s} is not below the {seen} visible keys of the last query position; lower it or move "
                "capture.positions",
            )
    length, audit, loss = config["contexts"]["length"], config["audit"], config["loss"]
    if audit["models"] != []:
        _check_positions(audit["positions"], length, "audit")
    if audit["models"] != [] and max(audit["budgets"]) > audit["positions"][0]:
        _fail(
            ("audit", "budgets", audit["budgets"].index(max(audit["budgets"]))),
            f"budget {max(audit['budgets'])} is not below the {audit['positions'][0] + 1} visible keys of the first "
            "query position; lower it or move audit.positions",
        )
    budgets = config["enumeration"]["budgets"]
    exact = config["exact"]
    if exact["models"] != []:
        _check_positions(exact["positions"], exact["length"], "exact")
        if not any(entry["budget"] == exact["s"] and "core" in entry for entry in config["enumeration"]["families"]):
            _fail(("exact", "s"), f"no mass pool for budget {exact['s']} in enumeration.families")
    for index, entry in enumerate(config["weights"]["pools"]):
        s, pool = entry["budget"], entry["pool"]
        if s >= pool:
            _fail(("weights", "pools", index), f"expected budget < pool, got budget {s}, pool {pool}")
        if comb(pool, s) > MOST_SUBSETS:
            _fail(
                ("weights", "pools", index), f"{float(comb(pool, s)):.3g} kept sets a row, more than {MOST_SUBSETS:.0e}"
            )
        if config["weights"]["candidates"] < s:
            _fail(("weights", "candidates"), f"expected at least the budget {s}, got {config['weights']['candidates']}")
    if loss["models"] != [] and loss["s"] not in budgets:
        _fail(("loss", "s"), f"expected one of enumeration.budgets, {', '.join(map(str, budgets))}, got {loss['s']}")
    if loss["models"] != [] and loss["continuation"] >= length:
        _fail(("loss", "continuation"), f"expected fewer than the {length} tokens of a context (contexts.length)")
    if loss["models"] != [] and loss["candidates"] < loss["s"]:
        _fail(("loss", "candidates"), f"expected at least loss.s, {loss['s']}, got {loss['candidates']}")


def _check_family(family: Mapping, where: tuple) -> None:
    s, pool = family["budget"], family["pool"]
    if ("core" in family) == ("free" in family):
        _fail(where, "expected either core (a mass pool) or free (a neighbourhood)")
    if "core" in family:
        core = family["core"]
        if not core < s <= pool:
            _fail(where, f"expected core < budget <= pool, got core {core}, budget {s}, pool {pool}")
        subsets = comb(pool - core, s - core)
    else:
        free = family["free"]
        if not (free <= s and free < pool):
            _fail(where, f"expected free <= budget and free < pool, got free {free}, budget {s}, pool {pool}")
        subsets = comb(pool, free)
    if subsets > MOST_SUBSETS:
        _fail(where, f"{float(subsets):.3g} kept sets a row, more than {MOST_SUBSETS:.0e}; make the pool smaller")
