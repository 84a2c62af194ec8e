"""Rows for the tests: softmax rows with sinks, ties and heavy tails."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from contourkv import Instance

settings.register_profile("contourkv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("contourkv")


def pytest_configure() -> None:
    """Tests against kvpress are skipped where it cannot be, `make test-newest`, and nowhere else by oversight."""
    if importlib.util.find_spec("kvpress") is None and "CONTOURKV_WITHOUT_KVPRESS" not in os.environ:
        raise pytest.UsageError("kvpress is not installed: make setup; or set CONTOURKV_WITHOUT_KVPRESS=1")


def random_row(rng: np.random.Generator, keys: int, head_dim: int, sharpness: float = 2.0) -> Instance:
    """A softmax row of Gaussian scores with one sink, Gaussian values."""
    scores = sharpness * rng.standard_normal(keys)
    scores[0] += sharpness
    weights = np.exp(scores - scores.max())
    return Instance(weights / weights.sum(), rng.standard_normal((keys, head_dim)))


@st.composite
def rows(draw, min_keys: int = 2, max_keys: int = 12) -> Instance:
    """Rows of few keys, some with equal masses or equal values."""
    keys = draw(st.integers(min_keys, max_keys))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    instance = random_row(rng, keys, draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 1.0, 3.0])))
    values = np.array(instance.v)
    if draw(st.booleans()) and keys > 2:
        values[1] = values[2]
    return Instance(instance.p, values)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260825)
