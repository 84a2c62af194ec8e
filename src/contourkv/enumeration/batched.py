r"""The exact least forced error of many rows at once, by the same form as `pool`, as matrix products on any device.

Every row has its own core and free keys, the same number of each: rows are stacked. With H, the base and the signs
of `pool`, a chosen set S of the free keys, cut into its parts a in the left half and b in the right half, has

    h = c + q(a) + q(b) + 2 sum_{i in a, j in b} H_ij,   q(x) = sum_{i in x} 2 l_i + sum_{i, j in x} H_ij.

For all parts of one size on either side that is one product of [2 1_a H_LR, q(a) + c, 1] with [1_b, 1, q(b)]^T,
where 1_x is the indicator of a part: (keys of the half + 2) multiplications a set, in float64 throughout.

Passes: h is taken at the error e known so far. The set of least h has a lower error wherever h < 0; a row that it
improves is searched again at that error (Dinkelbach's iteration), and a row that it does not is decided: the sets
left below the bound of rounding are ties, each settled by its error summed from g. Exact as `pool` is, which is the
oracle of the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInput
from .pool import Asked, Found, KeptSet, MassPool, Neighbourhood, RankedRow, rounding_share

ENTRIES = {"cpu": 2**22, "cuda": 2**28}
"""Entries of h held at a time: 32 MiB; 2 GiB on a GPU, which wants long products."""


def search_together(
    rows: Sequence[RankedRow],
    s: int,
    families: Sequence[MassPool | Neighbourhood],
    swap_keys: int,
    device: str | torch.device,
    entries: int | None = None,
) -> list[Found]:
    """`RankedRow.search` of many rows at once: their exact searches are done together, on `device`.

    Parameters
    ----------
    rows, s, families, swap_keys : see `RankedRow.search`
    device : where the products are computed
    entries : see `best_in_batch`

    Returns
    -------
    list of Found, one a row
        As `search` finds it; of sets of equal error possibly another one.
    """
    steps = [row.searching(s, families, swap_keys) for row in rows]
    answers: list[KeptSet | None] = [None] * len(rows)
    found: list[Found | None] = [None] * len(rows)
    while any(each is None for each in found):
        alike: dict[tuple[int, int, int], list[tuple[int, Asked]]] = defaultdict(list)
        for at, step in enumerate(steps):
            if found[at] is not None:
                continue
            try:
                asked = step.send(answers[at])
            except StopIteration as end:
                found[at] = end.value
                continue
            answers[at] = rows[at].settled(asked, s)
            if answers[at] is None:
                alike[asked.core.size, asked.free.size, rows[at].g.shape[1]].append((at, asked))
        for (core, _, _), several in alike.items():
            g, p = (
                torch.from_numpy(np.stack([getattr(rows[at], name)[asked.keys] for at, asked in several]))
                for name in ("g", "p")
            )
            known = torch.tensor([asked.known.error for _, asked in several], dtype=torch.float64)
            places, _ = best_in_batch(g.to(device), p.to(device), core, s - core, known.to(device), entries)
            for (at, asked), place in zip(several, places.cpu().numpy(), strict=True):
                answers[at] = rows[at].answer(asked, place)
    return found


def best_in_batch(
    g: Tensor, p: Tensor, core: int, chosen: int, error: Tensor, entries: int | None = None
) -> tuple[Tensor, Tensor]:
    """The least forced error over all sets "the first `core` keys and any `chosen` of the rest", row by row.

    Parameters
    ----------
    g : float64 tensor (B, m, d)
        p_j (v_j - mu) of the core and then of the free keys of each row.
    p : float64 tensor (B, m), positive
        Their masses.
    core, chosen : whole numbers, 1 <= core + chosen, chosen <= m - core
    error : float64 tensor (B,)
        Error that a set must beat; infinity for none.
    entries : most numbers held at a time; by the device if None (`ENTRIES`)

    Returns
    -------
    places : int64 tensor (B, core + chosen)
        Places of the best set in each row, rising; -1 throughout where no set is better than `error`.
    error : float64 tensor (B,)
        Its error, or the error given.

    Raises
    ------
    InvalidInput
        Shapes that do not belong together, another dtype than float64.
    """
    _check(g, p, core, chosen, error)
    search = _Search(g, p, core, chosen, entries or ENTRIES.get(g.device.type, ENTRIES["cpu"]))
    return search.run(error)


def _check(g: Tensor, p: Tensor, core: int, chosen: int, error: Tensor) -> None:
    if g.dim() != 3 or p.shape != g.shape[:2] or error.shape != g.shape[:1]:
        raise InvalidInput(
            f"g, p, error: got shapes {tuple(g.shape)}, {tuple(p.shape)} and {tuple(error.shape)}, expected (B, m, d), "
            "(B, m) and (B,)"
        )
    for name, value in (("g", g), ("p", p), ("error", error)):
        if value.dtype != torch.float64:
            raise InvalidInput(f"{name}: got {value.dtype}, expected float64")
    if not (core >= 0 and chosen >= 0 and 1 <= core + chosen and chosen <= g.shape[1] - core):
        raise InvalidInput(
            f"core, chosen: got {core} and {chosen} of {g.shape[1]} keys; expected at least one key kept, and no more "
            "than there are"
        )


class _Search:
    """Rows of one shape, their Gram matrices, and the parts of each half."""

    def __init__(self, g: Tensor, p: Tensor, core: int, chosen: int, entries: int) -> None:
        self.g, self.p, self.core, self.chosen, self.entries = g, p, core, chosen, entries
        free = g.shape[1] - core
        # More than half of the free keys kept: the dropped ones are chosen instead.
        self.drop = 2 * chosen > free
        self.picked = free - chosen if self.drop else chosen
        self.left = free // 2
        self.right = free - self.left
        self.sign = -1.0 if self.drop else 1.0
        base = slice(0, g.shape[1] if self.drop else core)
        self.gram = g @ g.transpose(1, 2)
        total, self.mass = g[:, base].sum(1), p[:, base].sum(1)
        self.square = (total * total).sum(1)
        self.pull = self.sign * (g[:, core:] @ total.unsqueeze(2)).squeeze(2)
        gamma = rounding_share(g.shape[2], self.picked, g.shape[1])
        reach = 2.0 * self.gram.diagonal(dim1=1, dim2=2).sqrt().sum(1)
        self.negligible = lambda e2: gamma * (reach * reach + e2 * (self.mass + 1.0) ** 2)

    def run(self, error: Tensor) -> tuple[Tensor, Tensor]:
        best = error.clone()
        places = torch.full((len(best), self.core + self.chosen), -1, dtype=torch.int64, device=best.device)
        # Without an error to beat any set is one: that of the first keys.
        first = torch.arange(self.core + self.chosen, device=best.device).expand(len(best), -1)
        self._offer(torch.arange(len(best), device=best.device)[best.isinf()], first[best.isinf()], best, places)
        rows = (best > 0).nonzero().squeeze(1)
        while rows.numel():
            rows = self._pass(rows, best, places)
        return places, best

    def _pass(self, rows: Tensor, best: Tensor, places: Tensor) -> Tensor:
        """One look at every set of `rows` at their errors; the rows that it improved."""
        e2 = best[rows].square()
        slack = self.negligible(best.square())[rows]
        before = best[rows]
        least = torch.full_like(e2, torch.inf)
        where = torch.zeros(len(rows), 3, dtype=torch.int64, device=rows.device)  # size of the left part, a, b
        for some, size, first, form in self._forms(rows, e2):
            top, column = form.min(2)
            value, row = top.min(1)
            lower = value < least[some]
            least[some] = torch.where(lower, value, least[some])
            found = torch.stack(
                [torch.full_like(row, size), row + first, column.gather(1, row.unsqueeze(1)).squeeze(1)], 1
            )
            where[some] = torch.where(lower.unsqueeze(1), found, where[some])
            # Rows without a clearly lower h here: whatever may be as low by rounding is settled by its error.
            close = (top < slack[some].unsqueeze(1)) & (value > -slack[some]).unsqueeze(1)
            if bool(close.any()):
                at, a = close.nonzero(as_tuple=True)
                near, b = (form[at, a] < slack[some][at].unsqueeze(1)).nonzero(as_tuple=True)
                at, a = at[near], a[near]
                sets = self._sets(torch.stack([torch.full_like(a, size), a + first, b], 1))
                self._offer(rows[some][at], sets, best, places)
        lower = least < slack
        self._offer(rows[lower], self._sets(where[lower]), best, places)
        return rows[(best[rows] < before * (1 - 1e-12)) & (best[rows] > 0)]

    def _forms(self, rows: Tensor, e2: Tensor) -> Iterator[tuple[slice, int, int, Tensor]]:
        """h of all sets: rows at hand, size of the left part, number of the first left part, (rows, lefts, rights)."""
        core, left = self.core, self.left
        for size in range(max(0, self.picked - self.right), min(self.picked, left) + 1):
            parts, others = _parts(left, size, rows.device), _parts(self.right, self.picked - size, rows.device)
            block = max(1, min(len(parts), self.entries // len(others)))
            together = max(1, self.entries // (block * len(others)))
            for start in range(0, len(rows), together):
                some = slice(start, min(start + together, len(rows)))
                at, weight = rows[some], e2[some, None]
                p, mass = self.p[at], self.mass[at].unsqueeze(1)
                form = self.gram[at][:, core:, core:] - weight.unsqueeze(2) * p[:, core:, None] * p[:, None, core:]
                linear = self.pull[at] - self.sign * weight * mass * p[:, core:]
                constant = self.square[at].unsqueeze(1) - weight * mass * mass
                own = _form(parts, form[:, :left, :left], linear[:, :left]) + constant
                other = _form(others, form[:, left:, left:], linear[:, left:])
                cross = 2.0 * (parts @ form[:, :left, left:])
                factor = torch.cat([cross, own.unsqueeze(2), torch.ones_like(own).unsqueeze(2)], 2)
                columns = torch.cat(
                    [
                        others.expand(len(at), -1, -1),
                        torch.ones_like(other).unsqueeze(2),
                        other.unsqueeze(2),
                    ],
                    2,
                ).transpose(1, 2)
                for first in range(0, len(parts), block):
                    yield some, size, first, factor[:, first : first + block] @ columns

    def _sets(self, where: Tensor) -> Tensor:
        """Places of kept sets, rising, from (size of the left part, its number, number of the right part)."""
        keep = torch.zeros(len(where), self.g.shape[1], dtype=torch.bool, device=where.device)
        for size in range(max(0, self.picked - self.right), min(self.picked, self.left) + 1):
            at = (where[:, 0] == size).nonzero().squeeze(1)
            if at.numel():
                chosen = torch.cat(
                    [
                        _parts(self.left, size, where.device)[where[at, 1]],
                        _parts(self.right, self.picked - size, where.device)[where[at, 2]],
                    ],
                    1,
                )
                keep[at, self.core :] = (chosen == 0) if self.drop else (chosen != 0)
        keep[:, : self.core] = True
        return keep.nonzero()[:, 1].view(len(where), self.core + self.chosen)

    def _errors(self, rows: Tensor, sets: Tensor) -> Tensor:
        g = self.g[rows].gather(1, sets.unsqueeze(2).expand(-1, -1, self.g.shape[2]))
        return torch.linalg.vector_norm(g.sum(1), dim=1) / self.p[rows].gather(1, sets).sum(1)

    def _offer(self, rows: Tensor, sets: Tensor, best: Tensor, places: Tensor) -> None:
        """Take the best of the sets offered to each row, the first of equals, if its error is lower."""
        if not rows.numel():
            return
        error = self._errors(rows, sets)
        order = torch.argsort(error, stable=True)
        first = torch.full(best.shape, len(order), dtype=torch.int64, device=best.device)
        first.scatter_reduce_(0, rows[order], torch.arange(len(order), device=best.device), "amin")
        named = (first < len(order)).nonzero().squeeze(1)
        chosen = order[first[named]]
        taken = error[chosen] < best[named]
        best[named[taken]], places[named[taken]] = error[chosen[taken]], sets[chosen[taken]]


def _form(parts: Tensor, form: Tensor, linear: Tensor) -> Tensor:
    """sum_{i in x} 2 linear_i + sum_{i, j in x} form_ij of all parts x (n, keys), for each row: (B, n)."""
    return ((parts @ form) * parts).sum(2) + 2.0 * (linear @ parts.T)


def _parts(size: int, picked: int, device: torch.device) -> Tensor:
    """Indicators of all sets of `picked` among `size` keys: float64 (C(size, picked), size)."""
    return _indicators(size, picked, str(device))


@cache
def _indicators(size: int, picked: int, device: str) -> Tensor:
    keys = np.fromiter(
        (key for some in combinations(range(size), picked) for key in some), np.int64, comb(size, picked) * picked
    )
    found = torch.zeros(comb(size, picked), size, dtype=torch.float64)
    if picked:
        found.scatter_(1, torch.from_numpy(keys).view(-1, picked), 1.0)
    return found.to(device)
