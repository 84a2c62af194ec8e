"""Nothing that is read can run: what may open a file is a short list, and every call in the sources is on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "workflow").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "docs").glob("*.py"),
    ]
)
# Snakemake's own language is Python but for its headings; what is imported or called there stands in plain lines.
SNAKEFILES = [ROOT / "Snakefile", ROOT / "workflow/Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]

NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "jsonpickle"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "execfile"}
NEVER_NAMED = {"read_pickle", "to_pickle", "unsafe_load", "full_load", "load_pickle", "UnsafeLoader", "FullLoader"}
# The one loader of YAML that is no plain safe_load: SafeLoader with limits.
YAML_LOADER = ("src/contourkv/plain.py", "_plain_loader()")
# kvpress reads the tokenizer of the caller's own model where transformers finds it.
MAY_REACH_THE_HUB = {("src/contourkv/press/scores.py", "AutoTokenizer")}
MAY_IMPORT_BY_NAME = {"src/contourkv/lazy.py"}


def found(text: str, name: str = "x.py") -> list[str]:
    """What the source does that it must not, a line each."""
    wrong = []

    def refuse(node: ast.AST, why: str) -> None:
        wrong.append(f"{name}:{node.lineno}: {why}")

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for each in names:
                if NEVER_IMPORTED & set(each.split(".")):
                    refuse(node, f"imports {each}")
                if each in NEVER_NAMED:
                    refuse(node, f"imports {each}")
                if "import_module" in each.split(".") and name not in MAY_IMPORT_BY_NAME:
                    refuse(node, "imports modules by a name made at run time")
        elif isinstance(node, ast.Attribute) and node.attr in NEVER_NAMED:
            refuse(node, f"names {node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr == "import_module" and name not in MAY_IMPORT_BY_NAME:
            refuse(node, "imports modules by a name made at run time")
        elif isinstance(node, ast.Name) and node.id in {*NEVER_NAMED, "__import__"}:
            refuse(node, f"names {node.id}")
        elif isinstance(node, ast.Call):
            _call(node, name, refuse)
    return wrong


def _call(node: ast.Call, name: str, refuse) -> None:
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def says(key: str, value: object) -> bool:
        return isinstance(given.get(key), ast.Constant) and given[key].value is value

    called = ast.unparse(node.func)
    owner, _, last = called.rpartition(".")
    if (not owner and last in NEVER_CALLED) or owner == "builtins":
        refuse(node, f"calls {called}")
    if "trust_remote_code" in given and not says("trust_remote_code", False):
        refuse(node, f"{called} may trust remote code")
    if last == "from_pretrained":
        if not says("trust_remote_code", False):
            refuse(node, f"{called} without trust_remote_code=False")
        if not says("local_files_only", True) and (name, owner) not in MAY_REACH_THE_HUB:
            refuse(node, f"{called} without local_files_only=True")
    if last in ("load", "load_all") and "yaml" in owner:
        loader = [*node.args[1:], *(value for key, value in given.items() if key == "Loader")]
        if [(name, ast.unparse(each)) for each in loader] != [YAML_LOADER]:
            refuse(node, f"{called} with another loader than the safe one")
    if last == "load" and owner == "torch" and not says("weights_only", True):
        refuse(node, "torch.load without weights_only=True")
    if last == "load" and owner in ("np", "numpy") and not says("allow_pickle", False):
        refuse(node, f"{called} without allow_pickle=False")
    if "shell" in given and not says("shell", False):
        refuse(node, f"{called} through a shell")
    if (owner, last) in (
        ("os", "system"),
        ("os", "popen"),
        ("subprocess", "getoutput"),
        ("subprocess", "getstatusoutput"),
    ):
        refuse(node, f"{called}: a shell")
    if last in ("extractall", "unpack_archive"):
        refuse(node, f"{called}: members may lead out of the folder")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path):
    assert found(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))) == []


def test_no_rule_runs_what_it_reads():
    """Snakefiles do not parse as Python: no line of theirs has any of the words."""
    words = [*NEVER_IMPORTED, *NEVER_NAMED, "eval(", "exec(", "__import__", "import_module", "trust_remote_code"]
    words += ["yaml.load", "torch.load", "from_pretrained", "subprocess", "os.system", "shell:", "run:"]
    lines = [(path.name, line) for path in SNAKEFILES for line in path.read_text(encoding="utf-8").splitlines()]
    code = [(name, line.partition("#")[0]) for name, line in lines]
    # every job is a script, so that no config value ever stands in a shell command
    assert [(name, line) for name, line in code if any(word in line for word in words)] == []
    assert len(lines) > 500


def test_no_configuration_is_a_template():
    """Snakemake runs the expressions of a configuration that says so."""
    files = [*(ROOT / "config").rglob("*.yaml"), *(ROOT / "workflow/profiles").rglob("*.yaml")]
    assert len(files) > 5
    assert [path for path in files if "__use_yte__" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import a.pickle.b",
        "from torch import pickle",
        "import marshal, os",
        "import shelve",
        "import dill as d",
        "import joblib",
        "eval('1')",
        "exec(text)",
        "__import__('os')",
        "f = __import__",
        "import importlib; importlib.import_module(name)",
        "from importlib import import_module",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "yaml.full_load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "A.from_pretrained(path)",
        "A.from_pretrained(path, local_files_only=True)",
        "A.from_pretrained(path, trust_remote_code=False)",
        "A.from_pretrained(path, local_files_only=False, trust_remote_code=False)",
        "A.from_pretrained(path, local_files_only=True, trust_remote_code=True)",
        "load_dataset(path, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=flag)",
        "os.system(line)",
        "os.popen(line)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "from pandas import read_pickle",
        "archive.extractall(folder)",
        "shutil.unpack_archive(path)",
    ],
)
def test_each_of_them_would_be_found(line):
    assert found(f"def inside():\n    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "A.from_pretrained(path, local_files_only=True, trust_remote_code=False)",
        "np.load(path, allow_pickle=False)",
        "subprocess.run(['git', 'log'])",
        "model.eval()",
        "re.compile(text)",
        "ast.literal_eval(text)",
    ],
)
def test_what_is_sound_passes(line):
    assert found(line) == []
