"""The attention rows of one layer: softmax weights of some query positions, and the values they weigh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import InvalidInput


class Row(NamedTuple):
    """One row of one query head, only its keys of positive weight.

    `p` (n,) float64 sums to 1, `v` (n, d) float32, `keys` (n,) int64 key indices in the context (-1: the
    attention sink). `row` is the index into `LayerRows.positions`.
    """

    head: int
    kv_head: int
    row: int
    position: int
    p: np.ndarray
    v: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows of one layer at R query positions of a context of N tokens (paper, section 1: p and v).

    Row r of query head h, and the values of its keys, are

        keys = rows.visible(r)
        p, v = rows.p[r, h, keys], rows.v[h // rows.group, keys]

    both views. The query heads of KV head k are `rows.heads_of(k)`.

    Parameters
    ----------
    layer : int
    p : (R, heads, N) float64
        Softmax weights; 0 at keys that the row does not see. A visible key's weight may be exactly 0 too where
        the softmax underflows: such a key has no part in the row, `row()` leaves it out.
    v : (kv_heads, N, d) float32
        Values, once a KV head. Zero at keys that no row sees, once the rows have been through a shard.
    positions : (R,) int64
        Query positions, distinct, in [0, N).
    first_visible : (R,) int64
        First key that row r sees; it sees `first_visible[r] .. positions[r]`.
    window : int or None
        Sliding window of the layer, in keys.
    max_relative_error : float
        Largest ||p V - o|| / ||o|| over rows and heads, o the attention output that the model used.
    sink : (R, heads) float64 or None
        Weight of the head's attention sink, a key without a place in the context and with the value zero.
        With it, p.sum(-1) + sink = 1; without, p.sum(-1) = 1.
    """

    layer: int
    p: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    first_visible: np.ndarray
    window: int | None
    max_relative_error: float
    sink: np.ndarray | None = None

    def __post_init__(self) -> None:
        where = f"rows of layer {self.layer}"
        if self.p.ndim != 3 or self.p.dtype != np.float64:
            raise InvalidInput(f"{where}: p: expected (rows, heads, N) float64, got {self.p.shape} {self.p.dtype}")
        count, heads, length = self.p.shape
        if self.v.ndim != 3 or self.v.dtype != np.float32 or self.v.shape[1] != length:
            raise InvalidInput(
                f"{where}: v: expected (kv_heads, {length}, d) float32, got {self.v.shape} {self.v.dtype}"
            )
        if heads % self.v.shape[0]:
            raise InvalidInput(f"{where}: {heads} query heads are not a multiple of {self.v.shape[0]} KV heads")
        for name in ("positions", "first_visible"):
            value = getattr(self, name)
            if value.shape != (count,) or value.dtype != np.int64:
                raise InvalidInput(f"{where}: {name}: expected ({count},) int64, got {value.shape} {value.dtype}")
        if (
            not ((0 <= self.first_visible) & (self.first_visible <= self.positions)).all()
            or (self.positions >= length).any()
        ):
            raise InvalidInput(f"{where}: expected 0 <= first_visible <= positions < {length}")
        if self.sink is not None and (self.sink.shape != (count, heads) or self.sink.dtype != np.float64):
            raise InvalidInput(f"{where}: sink: expected ({count}, {heads}) float64")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.p.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.v.shape[0]

    @property
    def group(self) -> int:
        """Query heads a KV head; query head h reads KV head h // group."""
        return self.heads // self.kv_heads

    @property
    def length(self) -> int:
        """N, the tokens of the context."""
        return self.p.shape[2]

    def visible(self, row: int) -> slice:
        """Key indices that row `row` sees."""
        return slice(int(self.first_visible[row]), int(self.positions[row]) + 1)

    def heads_of(self, kv_head: int) -> slice:
        """Query heads that read KV head `kv_head`."""
        return slice(kv_head * self.group, (kv_head + 1) * self.group)

    def row(self, row: int, head: int) -> Row:
        """Row `row` of query head `head`: its keys of positive weight, the attention sink last if there is one.

        `p` and `v` are views of the layer's arrays unless a weight is 0 or the layer has sinks.
        """
        kv_head = head // self.group
        keys = self.visible(row)
        p, v = self.p[row, head, keys], self.v[kv_head, keys]
        index = np.arange(keys.start, keys.stop)
        positive = p > 0
        if not positive.all():
            p, v, index = p[positive], v[positive], index[positive]
        if self.sink is not None and self.sink[row, head] > 0:
            p = np.append(p, self.sink[row, head])
            v = np.concatenate([v, np.zeros((1, v.shape[1]), v.dtype)])
            index = np.append(index, -1)
        return Row(head, kv_head, row, int(self.positions[row]), p, v, index)

    def rows(self) -> Iterator[Row]:
        """All rows, by query head (so that a KV head's rows come together), then by query position."""
        for head in range(self.heads):
            for row in range(len(self.positions)):
                yield self.row(row, head)
