# Where a run's files lie, which names may stand in a path, and what a rule's result depends on beside its inputs.
import re
from functools import cache

import contourkv
from contourkv.closure import closure, code_digest, pins
from contourkv.models.folder_source import files_of
from contourkv.models.hub_source import planned_commit
from contourkv.models.wheels import wheel_name

ROOT = Path(workflow.current_basedir).parent.parent
PACKAGE = Path(contourkv.__file__).parent
HUB_LOCK = "config/hub.lock.yaml"

if (ROOT / "src/contourkv").is_dir() and not PACKAGE.samefile(ROOT / "src/contourkv"):
    sys.exit(
        f"error: contourkv is imported from {PACKAGE}, not from this workflow's {ROOT / 'src/contourkv'}; "
        "install this one (make setup) or set PYTHONPATH to its src folder"
    )


for place in (Path("results"), Path("results") / config["run"]):
    if place.exists() and not place.is_dir():
        sys.exit(f"error: {place}: is a file, expected the folder for results; move it away")


pathvars:
    results=f"results/{config['run']}",
    logs=f"results/{config['run']}/logs",
    benchmarks=f"results/{config['run']}/benchmarks",


wildcard_constraints:
    model=r"[a-z0-9][a-z0-9._-]*",
    arm=r"[a-z0-9][a-z0-9._-]*",
    index=r"\d{3}",
    budget=r"\d+",
    task=r"[a-z0-9][a-z0-9._-]*",
    length=r"\d+",


MODELS = config["models"]
ARMS = config["arms"]
INDICES = [f"{index:03d}" for index in range(config["contexts"]["per_arm"])]
BUDGETS = config["enumeration"]["budgets"]
# Models that were trained here: evidence of nothing larger, so all models together leave them out.
APART = [model for model in MODELS if config["model_sources"][model]["source"] == "trained"]
LABELS = {model: config["model_sources"][model]["label"] for model in MODELS}
MODEL_FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "source.json",
]


WHEELS = {wheel_name(requirement): requirement for requirement in config["wheel_hashes"]}


# Where the report shows a table, and the figures drawn from it: by the paper's sections.
SECTIONS = {
    "1 Summary": ["summary", "paper", "costs"],
    "2 Enumeration": [
        *("ceiling", "kappa", "kappa_quantiles", "recovered", "certificates", "pools", "invariants"),
        *("native", "weights", "exact"),
    ],
    "3 Prediction": [
        *("prediction", "predictors", "content_arms", "edges", "cells"),
        *("bounds", "structured_cells"),
    ],
    "4 Deployed selectors": ["audit", "loss"],
    "5 Bytes and downstream": [
        *("tasks", "scores", "comparisons", "comparison_counts", "enforcing", "visibility", "memory"),
        *("decomposition", "reuse", "verdicts"),
    ],
}
SECTION_OF = {table: section for section, tables in SECTIONS.items() for table in tables}


def shown(path, name, *tables):
    """A result that the report shows, a table or a figure drawn from `tables`, with the caption of its name."""
    return report(
        path,
        caption=f"../report/{name}.rst",
        category=SECTION_OF[tables[0] if tables else name],
        subcategory="Figures" if tables else "Tables",
        labels={"name": name},
    )


def models_of(part):
    """Models that a part of the configuration is for, in the run's order: all, or those that it names."""
    named = config[part]["models"]
    return [model for model in MODELS if named is None or model in named]


def wheel(requirement):
    """Path of a wheel."""
    return f"<resources>/wheels/{wheel_name(requirement)}"


def hashes(requirements):
    """Pinned SHA-256 of wheels, checked again where they are read."""
    return {requirement: config["wheel_hashes"][requirement] for requirement in requirements}


def model_wheels(wildcards):
    """Paths of what a model is made of: wheels, a folder's files, the committed files of one that was trained here."""
    source = config["model_sources"][wildcards.model]
    if source["source"] == "folder":
        return files_of(source["path"])
    if source["source"] == "trained":
        return [f"{source['path']}/{file}" for file in REFERENCE_FILES]
    return [wheel(requirement) for requirement in source.get("wheels", [])]


def memory(megabytes):
    """What a job may need, in MB: more at each further attempt, as a first one may have been killed for it."""
    return lambda wildcards, attempt: megabytes * attempt


def model_commit(wildcards):
    """What tells whether a hub model is to be fetched: see `planned_commit`."""
    source = config["model_sources"][wildcards.model]
    if source["source"] != "hub":
        return None
    note = Path("resources/models") / wildcards.model / "hub.json"
    return planned_commit(Path(HUB_LOCK), source["repo"], source["revision"], note)


def of_model(pattern):
    """Paths of all contexts of one model, in the same order for shards and instances."""
    return expand(pattern, arm=ARMS, index=INDICES, allow_missing=True)


# Rules share scripts, and each asks twice: most of a plan's time would go to following the same imports again.
@cache
def imports(script):
    """What a script imports."""
    return closure(ROOT / "workflow/scripts" / script, PACKAGE)


def code(script):
    """Digest of a script and the package modules behind it, so that an edit reruns what depends on it."""
    return code_digest(ROOT / "workflow/scripts" / script, PACKAGE, imports(script))


def locked(script):
    """Pinned versions of the packages that those modules import."""
    return pins(ROOT / "workflow/scripts" / script, PACKAGE, ROOT / "requirements.lock", imports(script))
