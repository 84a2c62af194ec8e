r"""Rules of deployed methods, asked for one row: SnapKV, H2O, Quest, StreamingLLM, TOVA (paper, section 4).

A row is a query position i of a query head; its visible keys are numbered 0 .. n - 1, the last being its own. Each
function gets what its method looks at when the context ends with that row, and returns the s keys that it keeps,
sorted. Of equal scores the lower index is kept.

Attention is given as rows (R, n) over the visible keys: weights of any R rows of any query heads that share the
choice. Only their mean over R counts, so one row that is such a mean already, or a sum, says the same.

A method is published for budgets of hundreds of keys. Where one of its fixed sizes (SnapKV's window, Quest's page) is
more than half of the budget, it shrinks to half of the budget; the rule itself stays. Everything is float64 numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..operator import check_budget, mass_order, whole_number

WINDOW, KERNEL = 64, 5
"""SnapKV's observation window and pooling width, as kvpress sets them."""
SINKS = 4
"""StreamingLLM's first keys that always stay."""
PAGE = 16
"""Consecutive keys in one of Quest's pages."""


def observation_window(s: int) -> int:
    """Rows that SnapKV observes, and recent keys that it always keeps, at budget `s`: 64, at most half of it.

    Both published codes ask for a budget above the window; kvpress, below it, keeps any s keys of the window. At a
    budget of 1 the window is the row itself.
    """
    return max(1, min(WINDOW, whole_number("s", s, 1) // 2))


def page_size(s: int) -> int:
    """Keys in a page of Quest's at budget `s`: 16, at most half of it, so that it has two pages to choose at least."""
    return max(1, min(PAGE, whole_number("s", s, 1) // 2))


def snapkv(attention: ArrayLike, s: int, protected: int | None = None, kernel: int = KERNEL) -> np.ndarray:
    """SnapKV (arXiv 2404.14469) as kvpress has it: keys that the last rows attend to, smoothed over neighbours.

    With W protected keys, the score of key j < n - W is the mean over the rows of the pooled attention,

        score_j = mean_r (1 / kernel) sum_{|k - j| <= kernel // 2} a_rk,   a_rk = 0 beyond 0 .. n - W - 1;

    the s - W keys of largest score and the last W keys are kept.

    Parameters
    ----------
    attention : (R, n) array
        Weights >= 0 of the observation window's rows, of every query head of the KV head.
    s : budget, 1 <= s < n
    protected : int, optional
        W, at most s. Default `observation_window(s)`: give that many rows. With 0 the rows only score, and their
        own keys compete with all others.
    kernel : odd int

    Returns
    -------
    (s,) int64 array, sorted

    Raises
    ------
    InvalidInput
        A budget outside 1 .. n - 1; attention that is not such an array; another argument outside its range.
    """
    mean = _attention(attention).mean(axis=0)
    s = check_budget(s, mean.size)
    protected = observation_window(s) if protected is None else whole_number("protected", protected, 0)
    if protected > s:
        raise InvalidInput(f"protected: expected at most the budget {s}, got {protected}")
    if whole_number("kernel", kernel, 1) % 2 == 0:
        raise InvalidInput(f"kernel: expected an odd number, got {kernel}")
    open_keys = mean.size - protected
    padded = np.pad(mean[:open_keys], kernel // 2)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, kernel).mean(axis=1)
    return _with_recent(pooled, s - protected, mean.size)


def h2o(attention: ArrayLike, s: int, recent: int | None = None) -> np.ndarray:
    """H2O (arXiv 2306.14048): half of the budget for heavy hitters, half for the most recent keys.

    score_j = sum_r a_rj over all rows so far; the s - recent keys of largest score and the last `recent` are kept.
    The sums are those of full attention: nothing was evicted on the way to the row.

    Parameters
    ----------
    attention : (R, n) array
        Weights >= 0 of all rows 0 .. i, of every query head of the KV head; 0 where a row does not see a key. Or the
        one row of their sums.
    s : budget, 1 <= s < n
    recent : int, optional
        At most s; default s // 2.

    Returns
    -------
    (s,) int64 array, sorted

    Raises
    ------
    InvalidInput
        As of `snapkv`.
    """
    total = _attention(attention).sum(axis=0)
    s = check_budget(s, total.size)
    recent = s // 2 if recent is None else whole_number("recent", recent, 0)
    if recent > s:
        raise InvalidInput(f"recent: expected at most the budget {s}, got {recent}")
    return _with_recent(total[: total.size - recent], s - recent, total.size)


def tova(attention: ArrayLike, s: int) -> np.ndarray:
    """TOVA (arXiv 2401.06104): the keys that the last row attends to most.

    score_j = mean_r a_rj over the query heads that share the choice. The published code averages over all heads of
    the layer; of a head's own row alone, these are exactly the s keys of largest mass (paper, section 4). The row's
    own key is not protected, as it is in kvpress.

    Parameters
    ----------
    attention : (R, n) array
        Weights >= 0 of the row, in R query heads.
    s : budget, 1 <= s < n

    Returns
    -------
    (s,) int64 array, sorted

    Raises
    ------
    InvalidInput
        As of `snapkv`.
    """
    mean = _attention(attention).mean(axis=0)
    return np.sort(mass_order(mean)[: check_budget(s, mean.size)])


def streaming_llm(size: int, s: int, sinks: int = SINKS) -> np.ndarray:
    """StreamingLLM (arXiv 2309.17453): the first keys, which serve as sinks, and the most recent ones.

    The first min(sinks, s) and the last s - min(sinks, s) of `size` visible keys are kept, as in kvpress. In a sliding
    layer the first are those that the row still sees.

    Parameters
    ----------
    size : n, the visible keys
    s : budget, 1 <= s < n
    sinks : int >= 0

    Returns
    -------
    (s,) int64 array, sorted

    Raises
    ------
    InvalidInput
        A budget outside 1 .. n - 1, or a number that is not whole or too small.
    """
    size = whole_number("size", size, 1)
    s = check_budget(s, size)
    sinks = min(whole_number("sinks", sinks, 0), s)
    return np.concatenate([np.arange(sinks), np.arange(size - (s - sinks), size)])


def quest(query: ArrayLike, keys: ArrayLike, s: int, page: int | None = None) -> np.ndarray:
    """Quest (arXiv 2406.10774): the pages of keys that may matter to this query, by an upper bound of q . k.

    The visible keys lie in pages of `page` from the first on. A page's score is

        U = sum_c max(q_c min_c, q_c max_c) >= q . k for every key k of the page,

    min_c and max_c the least and the largest number in channel c of its keys. Pages are taken whole by falling score.
    The last page may be short, and the budget need not be a multiple of a page, so that the last one taken may not
    fit: its most recent keys then fill the budget to exactly s. A positive factor of the scores changes nothing. That
    the publication reads its first two layers whole, and its kernels always the newest page, is no part of this rule.

    Parameters
    ----------
    query : (d,) array
        Of the row, as attention gets it. Each query head chooses for itself.
    keys : (n, d) array
        The visible keys of its KV head.
    s : budget, 1 <= s < n
    page : int, optional
        Default `page_size(s)`.

    Returns
    -------
    (s,) int64 array, sorted

    Raises
    ------
    InvalidInput
        A budget outside 1 .. n - 1; arrays that are not such; a page that is not a whole number of at least 1.
    """
    query, keys = _numbers("query", query, 1), _numbers("keys", keys, 2)
    if keys.shape[1] != query.size:
        raise InvalidInput(
            f"keys: expected shape (n, {query.size}), one number a channel of the query, got {keys.shape}"
        )
    size = len(keys)
    s = check_budget(s, size)
    page = page_size(s) if page is None else whole_number("page", page, 1)
    starts = np.arange(0, size, page)
    least, largest = np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)
    bound = np.maximum(query * least, query * largest).sum(axis=1)
    taken, left = [], s
    for start in starts[mass_order(bound)]:
        stop = min(start + page, size)
        taken.append(np.arange(max(start, stop - left), stop))
        left -= taken[-1].size
        if not left:
            break
    return np.sort(np.concatenate(taken))


def _with_recent(scores: np.ndarray, count: int, size: int) -> np.ndarray:
    """The `count` keys of largest score, and the keys behind those that have one."""
    return np.concatenate([np.sort(mass_order(scores)[:count]), np.arange(scores.size, size)])


def _attention(value: ArrayLike) -> np.ndarray:
    rows = _numbers("attention", value, 2)
    if (rows < 0).any():
        raise InvalidInput(f"attention: expected weights >= 0, got {rows.min():g}")
    return rows


def _numbers(name: str, value: ArrayLike, dims: int) -> np.ndarray:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"of type {array.dtype}")
        array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidInput(f"{name}: expected an array of real numbers, got one that is not ({error})") from None
    if array.ndim != dims or array.size == 0:
        raise InvalidInput(f"{name}: expected a non-empty array of {dims} dimensions, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise InvalidInput(f"{name}: holds a number that is not finite")
    return array
