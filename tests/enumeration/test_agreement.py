"""The check of the three exact methods against one another: silent when they agree, loud when one is wrong."""

import numpy as np
import pytest
from conftest import random_row

from contourkv.enumeration import agreement
from contourkv.enumeration.agreement import methods_agree
from contourkv.enumeration.certificate import certify
from contourkv.errors import InvariantBroken


@pytest.mark.parametrize("seed", range(4))
def test_the_methods_agree(seed):
    row = random_row(np.random.default_rng(seed), 60, 4)
    assert methods_agree(row, 3, time_limit=20, tolerance=1e-6)


def test_a_method_that_proves_too_much_stops_the_run(monkeypatch):
    row = random_row(np.random.default_rng(1), 60, 4)

    def proves_anything(instance, s, incumbent, time_limit, tolerance, method):
        # Stops before it has searched, and calls that a proof.
        found = certify(instance, s, np.argsort(instance.p)[:s], 0.0, tolerance, method="branch")
        return type(found)(**{**vars(found), "proved": True})

    monkeypatch.setattr(agreement, "certify", proves_anything)
    with pytest.raises(InvariantBroken, match="all subsets give the least error"):
        methods_agree(row, 3, time_limit=20, tolerance=1e-6)


def test_no_time_is_no_verdict():
    row = random_row(np.random.default_rng(2), 60, 4)
    assert not methods_agree(row, 4, time_limit=0.0, tolerance=1e-6)
