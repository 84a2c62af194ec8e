r"""The operator that eviction changes: one softmax row, its forced-weight error and the mass that bounds it.

Symbols (paper, section 1): p the row's softmax weights over N keys, v_j the values, mu = sum_j p_j v_j the
dense output, A a kept set, p(A) its mass, m_A = sum_{j in A} p_j v_j / p(A) the renormalised output. With
g_j = p_j (v_j - mu), which sum to zero over all keys,

    es(A) = ||mu - m_A|| = ||sum_{j in A} g_j|| / p(A).

Everything here is float64 numpy.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from .errors import InvalidInput

SUM_TOLERANCE = 1e-9
LARGEST_VALUE = 1e140


class Instance:
    """One attention row: its weights and the values of its KV head.

    Parameters
    ----------
    p : (N,) array
        Softmax weights over the visible keys: strictly positive, sum 1 within 1e-9. Stored as float64,
        divided by their sum so that they sum to 1 to rounding.
    v : (N, d) array
        Values of the KV head, one a key. Stored as float64.

    Attributes
    ----------
    p, v : the inputs, float64
    mu : (d,) dense output
    g : (N, d) p_j (v_j - mu)
    order : (N,) keys by falling mass; of equal masses, the lower index first
    size : N

    Raises
    ------
    InvalidInput
        Not numbers, wrong shapes, no key, NaN or infinity, a weight <= 0, weights that do not sum to 1, values
        whose squares float64 cannot hold.
    """

    def __init__(self, p: ArrayLike, v: ArrayLike) -> None:
        p, v = _float64("p", p), _float64("v", v)
        if p.ndim != 1 or p.size == 0:
            raise InvalidInput(f"p: expected a non-empty vector of weights, got shape {p.shape}")
        if v.ndim != 2 or v.shape[0] != p.size or v.shape[1] == 0:
            raise InvalidInput(f"v: expected shape ({p.size}, d), one value a weight, got {v.shape}")
        if not np.isfinite(p).all():
            raise InvalidInput(f"p: weight {int(np.argmin(np.isfinite(p)))} is not a finite number")
        if not np.isfinite(v).all():
            bad = int(np.argmin(np.isfinite(v).all(axis=1)))
            raise InvalidInput(f"v: the value of key {bad} holds a number that is not finite")
        if (p <= 0).any():
            raise InvalidInput(f"p: weight {int(np.argmax(p <= 0))} is not positive; leave masked keys out")
        largest = np.abs(v).max(initial=0.0)
        if largest and not 1 / LARGEST_VALUE <= largest <= LARGEST_VALUE:
            raise InvalidInput(
                f"v: the largest value is {largest:.3g} in size, squares need {1 / LARGEST_VALUE:g} to "
                f"{LARGEST_VALUE:g}; scale the values"
            )
        total = p.sum()
        if abs(total - 1.0) > SUM_TOLERANCE:
            raise InvalidInput(
                f"p: the weights sum to {total:.12g}, expected 1 within {SUM_TOLERANCE:g}; of a float32 softmax, "
                "convert to float64 and divide by the sum"
            )
        self.p = p / total
        self.v = v
        self.p.setflags(write=False)
        self.v.setflags(write=False)

    @property
    def size(self) -> int:
        return self.p.size

    @cached_property
    def mu(self) -> np.ndarray:
        # From the heaviest key's value, so that equal values give g = 0 exactly.
        origin = self.v[self.order[0]]
        return origin + self.p @ (self.v - origin)

    @cached_property
    def g(self) -> np.ndarray:
        return self.p[:, None] * (self.v - self.mu)

    @cached_property
    def order(self) -> np.ndarray:
        return mass_order(self.p)

    def __repr__(self) -> str:
        return f"Instance(keys={self.size}, head_dim={self.v.shape[1]}, heaviest={self.p.max():.3g})"


def mass_order(p: np.ndarray) -> np.ndarray:
    """Keys by falling mass along the last axis; of equal masses, the lower index first."""
    return np.argsort(-p, axis=-1, kind="stable")


def _float64(name: str, value: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"of type {array.dtype}")
        return np.array(array, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidInput(f"{name}: expected an array of real numbers, got one that is not ({error})") from None


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int if it is a whole number, not under `least`; raise InvalidInput, naming it, otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
        of_least = "" if least is None else f" of at least {least}"
        raise InvalidInput(f"{name}: expected a whole number{of_least}, got {value!r}")
    return int(value)


def real_number(name: str, value: object, low: float, high: float, meaning: str) -> float:
    """Return `value` as a float if it is a number from `low` to `high`; raise InvalidInput, naming it, otherwise."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise InvalidInput(f"{name}: expected {meaning}, got {value!r}")
    return float(value)


def check_instance(instance: Instance) -> Instance:
    """Return `instance` if it is one; raise InvalidInput otherwise."""
    if not isinstance(instance, Instance):
        raise InvalidInput(f"instance: expected an Instance(p, v), got {type(instance).__name__}")
    return instance


def check_budget(s: int, size: int) -> int:
    """Return `s` as an int if 1 <= s < size; raise InvalidInput otherwise."""
    if isinstance(s, bool) or not isinstance(s, int | np.integer) or not 1 <= s < size:
        raise InvalidInput(f"s: expected a whole number from 1 to {size - 1} (of {size} visible keys), got {s!r}")
    return int(s)


def check_kept(kept: ArrayLike, size: int) -> np.ndarray:
    """Return `kept` as an index array; raise InvalidInput unless it names distinct keys in [0, size)."""
    keys = np.atleast_1d(np.asarray(kept))
    if keys.ndim != 1 or keys.size == 0 or not np.issubdtype(keys.dtype, np.integer):
        raise InvalidInput("kept: expected a non-empty list of key indices")
    if keys.min() < 0 or keys.max() >= size:
        raise InvalidInput(f"kept: indices must lie in 0..{size - 1}, got {keys.min()}..{keys.max()}")
    if np.unique(keys).size != keys.size:
        raise InvalidInput("kept: a key is named twice")
    return keys


def forced_error(instance: Instance, kept: ArrayLike) -> float:
    """es(A): distance of the renormalised output over `kept` from the dense output (paper, section 1).

    Parameters
    ----------
    instance : Instance
    kept : indices of the kept set A, distinct

    Returns
    -------
    float
        ||sum_{j in A} g_j|| / p(A), in the units of the values; 0 when every key is kept.
    """
    keys = check_kept(kept, check_instance(instance).size)
    if keys.size == instance.size:
        return 0.0
    return float(np.linalg.norm(instance.g[keys].sum(axis=0)) / instance.p[keys].sum())


def dropped_mass(instance: Instance, s: int) -> float:
    """m_s: the mass outside the s heaviest keys, 1 - p(A*_s), summed over the dropped keys."""
    s = check_budget(s, check_instance(instance).size)
    return float(instance.p[instance.order[s:]].sum())


def phi(instance: Instance, s: int) -> float:
    """Phi: ||sum_{j in A*_s} g_j||, the one-pass O(N d) statistic (paper, section 1)."""
    s = check_budget(s, check_instance(instance).size)
    return float(np.linalg.norm(instance.g[instance.order[:s]].sum(axis=0)))


def spread(instance: Instance) -> float:
    """D: the largest distance of a value from the dense output, max_j ||v_j - mu||."""
    return float(np.linalg.norm(check_instance(instance).v - instance.mu, axis=1).max())


def mass_bound(instance: Instance, s: int) -> float:
    """Lemma 2.1's cap on es(A*_s): 2 D m_s."""
    return 2.0 * spread(instance) * dropped_mass(instance, s)


def absolute_bound(instance: Instance, s: int) -> float:
    """AdaKV's bound of an eviction's loss on one head (arXiv 2407.11550, Theorem 3.1): 2 C m_s.

    There C is the largest 1-norm of a value behind the output projection. A row stands before that projection and
    errors here are Euclidean, so C = max_j ||v_j||. In the units of the values; unlike `mass_bound` it is no less for
    values that are alike.
    """
    return 2.0 * float(np.linalg.norm(check_instance(instance).v, axis=1).max()) * dropped_mass(instance, s)


def spectral_ratio(instance: Instance) -> float:
    """Directions that the values of a row spread over: tr(C)^2 / tr(C^2) with C = sum_j p_j (v_j - mu)(v_j - mu)^T.

    From 1 (all on a line) to d (alike in all directions); 0 where all values are equal. O(N d^2), and the same for
    every budget. The paper names an O(N d^2) spectral statistic without its formula (section 3): this participation
    ratio of the covariance's eigenvalues is this project's reading.
    """
    centred = check_instance(instance).v - instance.mu
    size = np.abs(centred).max()
    if size == 0.0:
        return 0.0
    centred = centred / size
    covariance = (instance.p[:, None] * centred).T @ centred
    return float(np.trace(covariance) ** 2 / np.square(covariance).sum())
