"""What counting tokens alone predicts: the baselines beside which a trained model's loss is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

DISCOUNT = 0.75


class CountModel:
    """Unigram and bigram counts of token streams.

    Parameters
    ----------
    streams : sequence of (n,) int arrays
        Token ids; no pair is counted across two streams.
    vocabulary : int
    """

    def __init__(self, streams: Sequence[np.ndarray], vocabulary: int) -> None:
        self.vocabulary = vocabulary
        counts = np.ones(vocabulary)  # each token once more than seen: none is impossible
        for stream in streams:
            counts += np.bincount(stream, minlength=vocabulary)
        self.chance = counts / counts.sum()
        pairs = [stream[:-1].astype(np.int64) * vocabulary + stream[1:] for stream in streams]
        self.pairs, self.counts = np.unique(np.concatenate(pairs), return_counts=True)
        first = self.pairs // vocabulary
        self.followed = np.bincount(first, weights=self.counts, minlength=vocabulary)
        self.kinds = np.bincount(first, minlength=vocabulary)

    def unigram(self, tokens: ArrayLike) -> np.ndarray:
        """Nats of each token by its frequency, float64."""
        return -np.log(self.chance[np.asarray(tokens)])

    def bigram(self, before: ArrayLike, tokens: ArrayLike) -> np.ndarray:
        """Nats of each token given the one before it, float64.

        Absolute discounting: 3/4 is taken off each pair's count, and what that frees is spread as the unigram is.
        After a token that was never followed by any, the unigram alone.
        """
        before, tokens = np.asarray(before, np.int64), np.asarray(tokens, np.int64)
        wanted = before * self.vocabulary + tokens
        place = np.minimum(np.searchsorted(self.pairs, wanted), self.pairs.size - 1)
        seen = np.where(self.pairs[place] == wanted, self.counts[place], 0)
        followed = self.followed[before]
        freed = DISCOUNT * self.kinds[before]
        lower = self.chance[tokens]
        with np.errstate(invalid="ignore", divide="ignore"):
            chance = (np.maximum(seen - DISCOUNT, 0.0) + freed * lower) / followed
        return -np.log(np.where(followed > 0, chance, lower))
