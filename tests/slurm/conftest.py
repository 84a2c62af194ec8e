"""A running Slurm for the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import one_node
import pytest


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a running Slurm, also that of this process meanwhile."""
    if missing := one_node.missing():
        pytest.fail(f"not installed: {', '.join(missing)}; make test-slurm installs them by apt-get")
    before = dict(os.environ)
    with one_node.one_node(tmp_path_factory.mktemp("slurm")) as environment:
        os.environ.update(environment)
        yield environment
        os.environ.clear()
        os.environ.update(before)
