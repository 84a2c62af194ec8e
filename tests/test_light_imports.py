"""Importing the package costs next to nothing; torch and ortools load only where a model or a proof is asked for."""

import subprocess
import sys

import pytest

HEAVY = {"numpy", "pandas", "scipy", "pyarrow", "numba", "matplotlib", "torch", "transformers", "ortools", "snakemake"}


def loaded(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint('loaded:', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_the_package_alone_loads_nothing_heavy():
    assert not loaded("import contourkv") & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        *"closure settings provenance errors progress logfile machine claim clock parts plain".split(),
        *("models.folder_source", "models.hub_source"),
    ],
)
def test_what_the_workflow_itself_imports_is_light(module):
    assert not loaded(f"import contourkv.{module}") & HEAVY


ROW = """
import numpy as np
from contourkv import Instance, balance, best_in_pool, certify, dropped_mass, forced_error, max_mass
rng = np.random.default_rng(1)
p = rng.random(12); row = Instance(p / p.sum(), rng.standard_normal((12, 3)))
kept = max_mass(row, 3); forced_error(row, kept); dropped_mass(row, 3); balance(row, 3)
found = best_in_pool(row, 3, 10)
"""


def test_selection_and_enumeration_load_neither_torch_nor_ortools():
    assert not loaded(ROW) & {"torch", "transformers", "ortools", "pandas", "matplotlib"}


@pytest.mark.parametrize(("method", "needed"), [("branch", set()), ("outer", {"ortools"})])
def test_ortools_loads_when_certify_asks_it_and_torch_never(method, needed):
    call = f"certify(row, 3, found.kept, time_limit=5, tolerance=1e-6, method={method!r})"
    assert loaded(ROW + call) & {"ortools", "torch", "transformers"} == needed


@pytest.mark.parametrize(
    "module",
    [
        *("enumeration", "selectors", "statistics", "measurement", "figures", "capture", "capture.shard"),
        *("job_costs", "report.page"),
    ],
)
def test_measuring_never_loads_torch(module):
    assert not loaded(f"import contourkv.{module}") & {"torch", "transformers", "ortools", "snakemake"}
