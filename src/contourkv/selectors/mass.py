"""Max-mass: keep the largest weights (A*_s of the paper, section 1)."""

from __future__ import annotations

import numpy as np

from ..operator import Instance, check_budget, check_instance


def max_mass(instance: Instance, s: int) -> np.ndarray:
    """The s keys of largest mass, sorted by index; of equal masses, the lower index is kept.

    Raises
    ------
    InvalidInput
        Unless 1 <= s < N.
    """
    s = check_budget(s, check_instance(instance).size)
    return np.sort(instance.order[:s])
