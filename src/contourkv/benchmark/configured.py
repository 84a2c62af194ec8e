"""The config section `benchmark`: what a schema cannot say of it, and a task of it made or read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidInput
from ..models.hub_source import planned_commit, write_note
from .hub import check_hub_settings, read_hub_task
from .methods import METHODS, methods_named
from .samples import write_task
from .tasks import check_settings, make_task, wheels_of

HUB = "hub"


def check_benchmark(config: Mapping) -> None:
    """Raise `InvalidInput` unless the section `benchmark` of a configuration can be run.

    Parameters
    ----------
    config : mapping
        The merged configuration, its schema checked.
    """
    section = config["benchmark"]
    for index, model in enumerate(section["models"]):
        if model not in config["models"]:
            raise InvalidInput(f"config key benchmark.models[{index}]: {model} is not among the run's models")
    for key in ("methods", "query_aware"):
        methods_named(section[key], f"config key benchmark.{key}")
    for index, name in enumerate(section["query_aware"]):
        if name not in section["methods"]:
            raise InvalidInput(f"config key benchmark.query_aware[{index}]: {name} is not among benchmark.methods")
        if METHODS[name].keeps in ("all", "pages"):
            raise InvalidInput(
                f"config key benchmark.query_aware[{index}]: {name} chooses no kept set, so when the question is read "
                "makes no difference; leave it out"
            )
    names: set[str] = set()
    for settings in section["tasks"]:
        name = settings["name"]
        if name in names:
            raise InvalidInput(f"config key benchmark.tasks: two tasks are called {name}; give each its own name")
        names.add(name)
        for model in settings.get("models", ()):
            if model not in section["models"]:
                raise InvalidInput(f"config key benchmark.tasks[{name}].models: {model} is not among benchmark.models")
        settings = made_of(settings)
        if settings["task"] == HUB:
            check_hub_settings(settings)
        else:
            check_settings(settings, config["text_sources"])
            for wheel in wheels_of(settings, config["text_sources"]):
                if wheel not in config["wheel_hashes"]:
                    raise InvalidInput(
                        f"config key benchmark.tasks[{name}]: no SHA-256 for {wheel} in wheel_hashes (texts.yaml)"
                    )
    lengths = [settings["length"] for settings in section["tasks"] if "length" in settings]
    for index, length in enumerate(section["costs"]["lengths"]):
        if section["tasks"] and length not in lengths:
            known = ", ".join(map(str, sorted(set(lengths)))) or "none"
            raise InvalidInput(
                f"config key benchmark.costs.lengths[{index}]: no task has the length {length}; expected some of "
                f"{known}"
            )


def made_of(settings: Mapping) -> dict:
    """Of an entry of `benchmark.tasks` what its samples depend on: all but the models that it is for."""
    return {key: value for key, value in settings.items() if key != "models"}


def model_tasks(section: Mapping) -> list[tuple[str, str]]:
    """Every pair of model and task that the section `benchmark` runs."""
    return [
        (model, settings["name"])
        for model in section["models"]
        for settings in section["tasks"]
        if model in settings.get("models", section["models"])
    ]


def task_wheels(settings: Mapping, text_sources: Mapping) -> list[str]:
    """Requirements of the wheels that an entry of `benchmark.tasks` reads."""
    return [] if settings["task"] == HUB else wheels_of(settings, text_sources)


def task_rows(settings: Mapping) -> list[str]:
    """Files of the folder that an entry of `benchmark.tasks` reads rows from; none where it reads no folder."""
    folder = Path(settings.get("path", ""))
    if settings["task"] != HUB or not folder.is_dir():
        return []
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def planned_rows(settings: Mapping, lock: str | os.PathLike, output: str | os.PathLike) -> str | None:
    """What `make_task_file` is told: see `planned_commit`; None where no hub repository is read."""
    if settings["task"] != HUB or Path(settings["path"]).is_dir():
        return None
    repo, revision = f"datasets/{settings['path']}", settings.get("revision", "main")
    return planned_commit(Path(lock), repo, revision, _note_of(output))


def _note_of(output: str | os.PathLike) -> Path:
    return Path(output).with_suffix(".hub")


def make_task_file(
    model_folder: str | os.PathLike,
    settings: Mapping,
    text_sources: Mapping,
    wheels: str | os.PathLike,
    hashes: Mapping[str, str],
    lock: str | os.PathLike,
    output: str | os.PathLike,
    told: str | None = None,
) -> None:
    """Make a task of the configuration in one model's tokens, or read it from the hub; write it (JSON).

    Parameters as of `tasks.make_task` and `hub.read_hub_task`; `told` is what `planned_rows` said, which is noted
    beside the task.
    """
    if settings["task"] == HUB:
        task = read_hub_task(settings, model_folder, lock)
        if told is not None:
            write_note(_note_of(output), task.provenance["data"]["revision"], told)
    else:
        task = make_task(model_folder, settings, text_sources, wheels, hashes)
    write_task(output, task)


def probed_tasks(section: Mapping) -> dict[tuple[str, int], str]:
    """Of each model and length the first task that has them: its first context is what costs are probed on.

    A model that no task of a length is for has no such entry.
    """
    lengths = {settings["name"]: settings.get("length") for settings in section["tasks"]}
    found: dict[tuple[str, int], str] = {}
    for model, task in model_tasks(section):
        if lengths[task] in section["costs"]["lengths"]:
            found.setdefault((model, lengths[task]), task)
    return found
