r"""ContourKV's allocator: how many entries each KV head keeps under one budget of bytes (paper, section 5).

A head h that keeps its n heaviest keys drops the mass m_h(n), the sum of the others. Over all heads of all layers

    minimise  sum_h m_h(n_h)   subject to   sum_h n_h cost_h <= budget,

with m_h the head's (weighted) dropped-mass curve and cost_h the bytes of one of its entries. Sorted masses fall, so
every curve is convex and the optimum is one level for all heads, a contour: a key stays if its mass per byte
reaches the level. `Contour` is that split, `ContourBySpan` the same for each kind of layer alone; `Uniform`, `AdaKV`,
`Pyramid` and `Global` are the compared methods' splits of the same budget, so that scores and splits can be exchanged
one at a time.

Kept by rule
    The first `sinks` and the last `recent` keys of every head stand outside the competition. They enter in a fixed
    order: key 0, the last key, the other sinks, the other recent keys; so under a small budget `recent` shrinks
    first, to 1, then `sinks`. At most half goes to them: half of what the heads may hold at most, and half of the
    budget. Only `floor` comes before: by-rule keys fill it.

Half of the budget, and still monotone
    Were the rule cut to the budget and the rest left to compete, a larger budget could raise the level: the rule
    takes one key more of every head at once. `Contour` therefore puts all entries in one order that does not know
    the budget and keeps the longest beginning that fits: by-rule entries in their order (in one round, the heads by
    falling mass per byte of the key in question), competing entries by falling mass per byte, and a by-rule entry
    enters as soon as the competing entries before it hold the bytes of the by-rule ones up to and with it. With equal
    costs the whole rule stands from twice its bytes on, with unequal ones from twice its bytes and one entry on.
    Where it does not, keys of the unshrunk rule do not compete for entries; by score they may fill them.

Ties at the level go by position, then by layer and head. A permutation of heads or layers permutes the entries
exactly whenever the level cuts through no tie.

Torch only. Tensors stay on their device; layers may lie on different ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidInput
from .operator import whole_number

DIGIT = 16  # bits of the order-preserving image that one histogram resolves


# --- the problem ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """One sequence's keys over all layers, and the bytes they may take.

    Parameters
    ----------
    scores : L tensors (H_l, N_l), floating
        Importance of each key, borrowed from a method; any finite number. Layers may differ in heads and keys;
        N_l = 0 holds nothing and costs nothing.
    masses : L tensors like `scores`, >= 0, or None
        Mean observed mass of each key, weighted or not (`weighted`): their falling order is the head's dropped-mass
        curve. None: the scores are masses.
    costs : L whole numbers
        Bytes of one entry in that layer: key, value and its metadata.
    budget : whole number
        Bytes for all entries together. More than everything costs is allowed.
    sinks, recent : whole numbers >= 0
        First and last keys of every head that are kept by rule (see the module).
    floor : whole number >= 0
        Least entries of a head that has them.
    cap : whole number >= floor, or None
        Most entries of a head.
    spans : L whole numbers, or None
        How many tokens back a layer sees, 0 where it sees all: what `ContourBySpan` groups layers by.

    Raises
    ------
    InvalidInput
        Not these types, shapes or ranges; NaN or infinity; a budget below the floor of all heads.
    """

    scores: tuple[Tensor, ...]
    masses: tuple[Tensor, ...] | None
    costs: tuple[int, ...]
    budget: int
    sinks: int = 4
    recent: int = 16
    floor: int = 1
    cap: int | None = None
    spans: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        scores = _layers("scores", self.scores)
        masses = scores if self.masses is None else _layers("masses", self.masses)
        if len(masses) != len(scores):
            raise InvalidInput(f"masses: expected {len(scores)} layers, as many as of scores, got {len(masses)}")
        for layer, (mass, score) in enumerate(zip(masses, scores, strict=True)):
            if mass.shape != score.shape or mass.device != score.device:
                raise InvalidInput(
                    f"masses: expected {tuple(score.shape)} on {score.device} in layer {layer}, like the scores, "
                    f"got {tuple(mass.shape)} on {mass.device}"
                )
        layer = _first_where([mass < 0 for mass in masses])
        if layer is not None:
            raise InvalidInput(
                f"masses: layer {layer} holds a negative mass; expected masses >= 0"
                if self.masses is not None
                else f"masses: the scores of layer {layer} are negative in places, so they are no masses; give masses"
            )
        if not isinstance(self.costs, tuple | list) or len(self.costs) != len(scores):
            raise InvalidInput(f"costs: expected {len(scores)} whole numbers, one a layer, got {self.costs!r}")
        costs = tuple(whole_number("costs", cost, 1) for cost in self.costs)
        budget = whole_number("budget", self.budget, 1)
        numbers = {name: whole_number(name, getattr(self, name), 0) for name in ("sinks", "recent", "floor")}
        if self.cap is not None:
            numbers["cap"] = whole_number("cap", self.cap, max(1, numbers["floor"]))
        if self.spans is not None:
            if not isinstance(self.spans, tuple | list) or len(self.spans) != len(scores):
                raise InvalidInput(f"spans: expected {len(scores)} whole numbers, one a layer, got {self.spans!r}")
            numbers["spans"] = tuple(whole_number("spans", span, 0) for span in self.spans)
        numbers |= {"scores": scores, "masses": None if self.masses is None else masses, "costs": costs}
        for name, value in (numbers | {"budget": budget}).items():
            object.__setattr__(self, name, value)
        needed = self.bytes_of([min(self.floor, most) for most in self.most])
        if budget < needed:
            raise InvalidInput(
                f"budget: {budget:,} bytes are below the floor of {self.floor} entries in each of "
                f"{sum(self.heads)} heads; give at least {needed:,}"
            )

    def __repr__(self) -> str:
        keys = sum(score.numel() for score in self.scores)
        return f"Problem({keys:,} keys in {sum(self.heads)} heads of {len(self.heads)} layers, {self.budget:,} bytes)"

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return tuple(score.shape[0] for score in self.scores)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each head, by layer."""
        return tuple(score.shape[1] for score in self.scores)

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Entries that a head may hold at most, by layer."""
        return tuple(length if self.cap is None else min(length, self.cap) for length in self.lengths)

    def bytes_of(self, entries: list[int] | tuple[int, ...]) -> int:
        """Bytes of `entries[l]` entries in every head of layer l."""
        return sum(h * n * cost for h, n, cost in zip(self.heads, entries, self.costs, strict=True))

    def by_rule(self, rounds: int) -> tuple[int, ...]:
        """By-rule keys of a head, by layer, when the first `rounds` of the rule's order are in."""
        return tuple(min(rounds, most) for most in self.most)

    @cached_property
    def full_rounds(self) -> int:
        """Length of the rule's order once cut to half of what the heads may hold."""
        return self._affordable(self.sinks + self.recent, self.bytes_of(self.most))

    @cached_property
    def rounds(self) -> int:
        """Rounds of the rule that every head gets under this budget: at most half of it, but what `floor` grants."""
        granted = min(self.floor, self.full_rounds)
        return max(granted, self._affordable(self.full_rounds, self.budget))

    def as_one_layer(self) -> Problem | None:
        """All heads in one layer, for which nothing changes; None where layers differ in keys, cost or device.

        A GPU is asked once for all layers, not once a layer.
        """
        kinds = {(score.shape[1], score.device) for score in self.scores}
        if len(self.scores) == 1 or len(kinds) > 1 or len(set(self.costs)) > 1:
            return None
        masses = None if self.masses is None else (torch.cat(_widened(self.masses)),)
        scores = (torch.cat(_widened(self.scores)),)
        return replace(self, scores=scores, masses=masses, costs=self.costs[:1], spans=None)

    def of_layers(self, layers: Sequence[int], budget: int) -> Problem:
        """Some of the layers, with a budget of their own."""

        def some(values: Sequence) -> tuple:
            return tuple(values[layer] for layer in layers)

        masses = None if self.masses is None else some(self.masses)
        return replace(self, scores=some(self.scores), masses=masses, costs=some(self.costs), budget=budget, spans=None)

    def _affordable(self, rounds: int, held: int) -> int:
        tried = range(min(rounds, max(self.most)) + 1)
        return bisect_right(tried, held, key=lambda count: 2 * self.bytes_of(self.by_rule(count))) - 1

    def ends(self, rounds: int) -> tuple[int, int]:
        """Sinks and recent keys among the first `rounds` by-rule keys of one head."""
        if not self.sinks or not self.recent:
            return (rounds, 0) if self.sinks else (0, rounds)
        recent = min(rounds // 2, 1) + max(rounds - self.sinks - 1, 0)
        return rounds - recent, recent

    def rule_order(self, layer: int, rounds: int) -> Tensor:
        """(rounds,) positions of a head's first `rounds` by-rule keys in that layer, in the order they enter."""
        length, device = self.lengths[layer], self.scores[layer].device
        sinks, recent = self.ends(rounds)
        first = torch.arange(sinks, device=device)
        last = length - 1 - torch.arange(recent, device=device)
        return torch.cat([first[:1], last[:1], first[1:], last[1:]])


class Share(NamedTuple):
    """What a split gives every head.

    Attributes
    ----------
    entries : L int64 tensors (H_l,), entries of each head
    by_rule : L int64 tensors (H_l,), how many of them are by-rule keys
    """

    entries: tuple[Tensor, ...]
    by_rule: tuple[Tensor, ...]


class Split:
    """A division of the budget among heads; one subclass a method."""

    def share(self, problem: Problem) -> Share:
        raise NotImplementedError(f"{type(self).__name__} does not say how it shares a budget")

    def entries(self, problem: Problem) -> tuple[Tensor, ...]:
        """Entries of each head: L int64 tensors (H_l,)."""
        return self.share(problem).entries


# --- splits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contour(Split):
    """ContourKV's split: one level of mass per byte for all heads (see the module).

    Minimises the sum over heads of dropped mass. The kept masses stop at the first entry that does not fit, so the
    total never exceeds the budget, misses it by less than one entry (unless everything allowed is kept), and grows
    with it: a larger budget drops nothing that a smaller one kept. O(total) expected, by selection; where the
    budget is under twice the rule's bytes, its few entries are sorted.
    """

    def share(self, problem: Problem) -> Share:
        together = problem.as_one_layer()
        if together is not None:
            return Share(*(part.split(list(problem.heads)) for (part,) in self._share(together)))
        return self._share(problem)

    def _share(self, problem: Problem) -> Share:
        rounds = problem.full_rounds
        ruled = problem.by_rule(rounds)
        images = _density_images(problem)
        enough = 2 * problem.bytes_of(ruled) + (max(problem.costs) if len(set(problem.costs)) > 1 else 0)
        if rounds > min(problem.floor, rounds) and problem.budget < enough:
            return _merged(problem, images)
        return _pooled(problem, images, rounds)


@dataclass(frozen=True)
class ContourBySpan(Contour):
    """A level for every group of layers that see equally far; what is spread over the groups is their share of bytes.

    In a sliding layer all of a row's mass lies within the window, so its keys are heavier than those of a layer whose
    mass lies over everything, without being worth more: one level gives the sliding layers the bytes. Here a group
    gets its floor and, of the rest, as much a byte that it could hold as every other. Layers that all see equally far
    are one group: `Contour`. Monotone in the budget, as each group is; misses it by less than an entry a group.
    """

    def share(self, problem: Problem) -> Share:
        groups: dict[int, list[int]] = {}
        for layer, span in enumerate(problem.spans or ()):
            groups.setdefault(span, []).append(layer)
        if len(groups) < 2:
            return super().share(problem)
        found: list[tuple[Tensor, Tensor]] = [(Tensor(), Tensor())] * len(problem.scores)
        for layers, budget in zip(groups.values(), self._budgets(problem, list(groups.values())), strict=True):
            if budget:
                parts = zip(*super().share(problem.of_layers(layers, budget)), strict=True)
            else:  # a group that can hold nothing, or gets less than a byte
                none = [
                    torch.zeros(problem.heads[n], dtype=torch.int64, device=problem.scores[n].device) for n in layers
                ]
                parts = zip(none, none, strict=True)
            for layer, part in zip(layers, parts, strict=True):
                found[layer] = part
        return Share(*zip(*found, strict=True))

    def _budgets(self, problem: Problem, groups: list[list[int]]) -> list[int]:
        def held(entries: Sequence[int], layers: list[int]) -> int:
            return sum(problem.heads[n] * entries[n] * problem.costs[n] for n in layers)

        floors = [min(problem.floor, most) for most in problem.most]
        least = [held(floors, layers) for layers in groups]
        room = [held(problem.most, layers) - low for layers, low in zip(groups, least, strict=True)]
        left = min(problem.budget - sum(least), sum(room))
        return [low + (left * more // sum(room) if more else 0) for low, more in zip(least, room, strict=True)]


@dataclass(frozen=True)
class Uniform(Split):
    """The same count in every head; layers with fewer keys keep them all and leave the rest to the others.

    What remains goes out one entry a head, in order of layer and head, up to the first that does not fit.
    """

    def share(self, problem: Problem) -> Share:
        return _sloped(problem, [1.0] * len(problem.costs))


@dataclass(frozen=True)
class AdaKV(Split):
    """AdaKV's split (arXiv 2407.11550): a layer's entries as in `Uniform`, its heads' by their scores pooled.

    Parameters
    ----------
    safeguard : float in [0, 1]
        Least entries of a head, as a share of its layer's mean.
    """

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        if not _is_number(self.safeguard) or not 0 <= self.safeguard <= 1:
            raise InvalidInput(f"safeguard: expected a number from 0 to 1, got {self.safeguard!r}")

    def share(self, problem: Problem) -> Share:
        counts, ruled = [], problem.by_rule(problem.rounds)
        images, uniform = _score_images(problem), Uniform().entries(problem)
        for layer, total in enumerate(int(each.sum()) for each in uniform):
            mean = total // problem.heads[layer]
            safe = int(mean * self.safeguard)
            least = min(max(safe, problem.floor, 1 if self.safeguard else 0), mean)
            one = _Pool(problem, [layer], ruled, least, costs=[1])
            counts += one.reached(images[layer : layer + 1], total - problem.heads[layer] * ruled[layer])
        return _share(problem, counts, ruled)


@dataclass(frozen=True)
class Pyramid(Split):
    """PyramidKV's split (arXiv 2406.02069): entries fall linearly from the first layer to the last.

    Beyond the by-rule keys, with M the mean entries of a head and N the keys of the longest layer, the last layer
    gets M / beta and the first 2 M - M / beta; where that passes N, the first gets N and the last 2 M - N. Inside
    a layer all heads get the same.

    Parameters
    ----------
    beta : float >= 1
        Steepness; 1 is uniform.
    """

    beta: float = 20

    def __post_init__(self) -> None:
        if not _is_number(self.beta) or not 1 <= self.beta < math.inf:
            raise InvalidInput(f"beta: expected a number of at least 1, got {self.beta!r}")

    def share(self, problem: Problem) -> Share:
        ruled, layers = problem.by_rule(problem.rounds), len(problem.costs)
        per_round = sum(h * cost for h, cost in zip(problem.heads, problem.costs, strict=True))
        mean = (problem.budget - problem.bytes_of(ruled)) / per_round
        longest = max(most - rule for most, rule in zip(problem.most, ruled, strict=True))
        last = mean / self.beta
        first = 2 * mean - last
        if first > longest:
            first, last = longest, 2 * mean - longest
        step = (first - last) / (layers - 1) if layers > 1 else 0.0
        # A budget above everything, or no key at all, leaves no slope.
        slope = [first - layer * step for layer in range(layers)] if 0 < mean < longest else [1.0] * layers
        return _sloped(problem, slope)


@dataclass(frozen=True)
class Global(Split):
    """KVzip's split (arXiv 2505.23416): the scores of all layers and heads in one pool, whatever their entries cost."""

    def share(self, problem: Problem) -> Share:
        return _pooled(problem, _score_images(problem), problem.rounds)


SPLITS = {
    "contour": Contour,
    "contour_by_span": ContourBySpan,
    "uniform": Uniform,
    "adakv": AdaKV,
    "pyramid": Pyramid,
    "global": Global,
}


# --- from a split to kept sets ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Allocation:
    """Kept sets under a budget, and what they cost and drop.

    Attributes
    ----------
    keep : L bool tensors (H_l, N_l), the kept keys
    entries : L int64 tensors (H_l,), kept keys of each head
    by_rule : L int64 tensors (H_l,), how many of them are kept by rule
    bytes : bytes of all entries, <= budget
    budget : bytes allowed
    dropped : sum over heads of the dropped masses, in the unit of the masses (float64)
    level : the largest mass per byte among the dropped keys; 0 when nothing is dropped
    """

    keep: tuple[Tensor, ...]
    entries: tuple[Tensor, ...]
    by_rule: tuple[Tensor, ...]
    bytes: int
    budget: int
    dropped: float
    level: float

    def __repr__(self) -> str:
        kept = int(sum(each.sum().item() for each in self.entries))
        keys = sum(each.numel() for each in self.keep)
        heads = sum(each.numel() for each in self.entries)
        return (
            f"Allocation({kept:,} of {keys:,} entries in {heads} heads, {self.bytes:,} of {self.budget:,} bytes, "
            f"dropped mass {self.dropped:.4g} over all heads, level {self.level:.3g})"
        )


def allocate(problem: Problem, split: Split | None = None) -> Allocation:
    """Share the budget among the heads by `split` (default `Contour()`) and choose the kept keys by score."""
    split = Contour() if split is None else split
    share = split.share(problem)
    keep = select(problem, share.entries, share.by_rule)
    dropped, level, held = 0.0, 0.0, 0
    masses = problem.scores if problem.masses is None else problem.masses
    for mask, mass, entries, cost in zip(keep, masses, share.entries, problem.costs, strict=True):
        held += int(entries.sum()) * cost
        if mass.numel():
            gone = mass.double().masked_fill(mask, 0.0)
            dropped += float(gone.sum())
            level = max(level, float(gone.max()) / cost)
    return Allocation(keep, share.entries, share.by_rule, held, problem.budget, dropped, level)


def select(
    problem: Problem, entries: tuple[Tensor, ...], by_rule: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """The kept keys of each head: by-rule keys first, then the largest scores, of equal ones the lower index.

    Parameters
    ----------
    problem : Problem
    entries : L integer tensors (H_l,)
        Keys that each head keeps, 0 to N_l.
    by_rule : L integer tensors (H_l,), or None
        How many of them are by-rule keys, in the rule's order; None: `problem.rounds`, or all of a smaller head.

    Returns
    -------
    L bool tensors (H_l, N_l), exactly `entries[l][h]` of them True in head h

    Raises
    ------
    InvalidInput
        Another number of layers or heads; counts out of range.
    """
    entries = _counts("entries", entries, problem, problem.lengths)
    if by_rule is None:
        by_rule = tuple(each.clamp(max=problem.rounds) for each in entries)
    by_rule = _counts("by_rule", by_rule, problem, [min(problem.sinks + problem.recent, n) for n in problem.lengths])
    keep = []
    for layer, (image, count, rule) in enumerate(zip(_score_images(problem), entries, by_rule, strict=True)):
        if bool((rule > count).any()):
            raise InvalidInput(f"by_rule: a head of layer {layer} has more by-rule keys than entries")
        order = problem.rule_order(layer, min(problem.sinks + problem.recent, problem.lengths[layer]))
        image = image.clone()
        ahead = torch.arange(order.numel(), device=image.device) < rule[:, None]
        image[:, order] = torch.where(ahead, _top(image), image[:, order])
        ranked = image.sort(dim=-1, descending=True, stable=True).indices
        within = torch.arange(image.shape[1], device=image.device) < count[:, None]
        keep.append(torch.zeros_like(within).scatter_(-1, ranked, within))
    return tuple(keep)


def curves(masses: Tensor) -> Tensor:
    """Dropped-mass curves m_h(n): the mass outside a head's n heaviest keys.

    Parameters
    ----------
    masses : (H, N) tensor, >= 0

    Returns
    -------
    (H, N + 1) float64 tensor, n = 0 .. N; falling, convex, 0 at N. Summed from the smallest mass up.
    """
    (masses,) = _layers("masses", (masses,))
    gathered = masses.double().sort(dim=-1).values.cumsum(dim=-1).flip(-1)
    return torch.nn.functional.pad(gathered, (0, 1))


def _plain(masses: Tensor, distances: Tensor) -> Tensor:
    return masses


def _spread(masses: Tensor, distances: Tensor) -> Tensor:
    if not masses.shape[-1]:
        return masses
    return masses * (2.0 * distances.amax(dim=-1, keepdim=True))


def _distance(masses: Tensor, distances: Tensor) -> Tensor:
    return masses * distances


WEIGHTS = {"plain": _plain, "spread": _spread, "distance": _distance}


def weighted(masses: Tensor, distances: Tensor, weight: str) -> Tensor:
    """Masses times what dropping them can cost the output.

    Parameters
    ----------
    masses : (H, N) tensor, >= 0
    distances : (H, N) tensor, >= 0
        ||v_j - mu|| of each key's value from the head's dense output, in the units of the values.
    weight : str
        "plain": masses as they are; "spread": times 2 D_h, D_h the head's largest distance, so that the curve is
        Lemma 2.1's cap; "distance": times the key's own distance, so that the level bounds ||g_j|| of every
        dropped key.

    Returns
    -------
    (H, N) tensor, float32 or float64
    """
    if not isinstance(weight, str) or weight not in WEIGHTS:
        raise InvalidInput(f"weight: expected one of {', '.join(WEIGHTS)}, got {weight!r}")
    masses, distances = _layers("masses", (masses,))[0], _layers("distances", (distances,))[0]
    if masses.shape != distances.shape:
        raise InvalidInput(f"distances: expected {tuple(masses.shape)}, like the masses, got {tuple(distances.shape)}")
    wide = torch.float64 if torch.float64 in (masses.dtype, distances.dtype) else torch.float32
    return WEIGHTS[weight](masses.to(wide), distances.to(wide))


# --- selection over the pooled keys -----------------------------------------------------------------------------


def _image(values: Tensor) -> Tensor:
    """Signed integers in the order of the floats `values`; -0 counts as 0. The extremes are left free."""
    wide = torch.int64 if values.dtype == torch.float64 else torch.int32
    bits = (values + 0.0).view(wide)
    return torch.where(bits < 0, bits ^ torch.iinfo(wide).max, bits)


def _top(image: Tensor) -> int:
    return torch.iinfo(image.dtype).max


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All in the widest of their dtypes, at least float32."""
    wide = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
    return [each.to(wide) for each in tensors]


def _images(tensors: list[Tensor]) -> list[Tensor]:
    return [_image(each) for each in _widened(tensors)]


def _score_images(problem: Problem) -> list[Tensor]:
    return _images(list(problem.scores))


def _density_images(problem: Problem) -> list[Tensor]:
    """Images of the masses per byte; where all entries cost the same, of the masses, which rank the same."""
    masses = list(problem.scores if problem.masses is None else problem.masses)
    if len(set(problem.costs)) > 1:
        masses = [mass.double() / cost for mass, cost in zip(masses, problem.costs, strict=True)]
    return _images(masses)


def _level(images: list[Tensor], costs: list[Tensor | int], budget: Tensor) -> tuple[Tensor, Tensor]:
    """The largest image of which, with all above it, not everything fits; and the bytes left above it.

    A radix selection: one histogram of costs a digit, from the highest digit down. `budget` is a 0-d int64 tensor;
    the costs of all images together must exceed it.
    """
    info = torch.iinfo(images[0].dtype)
    device, half = budget.device, 1 << (DIGIT - 1)
    level, left = None, budget
    for shift in range(info.bits - DIGIT, -1, -DIGIT):
        spent = torch.zeros(1 << DIGIT, dtype=torch.int64, device=device)
        for image, cost in zip(images, costs, strict=True):
            digit = image.flatten() >> shift
            if level is None:
                digit, weight = digit + half, torch.as_tensor(cost, device=image.device).expand(digit.shape)
            else:
                weight = (digit >> DIGIT == level.to(image.device)) * cost
                digit = digit & (2 * half - 1)
            if image.device == device:
                spent.index_add_(0, digit, weight)
            else:
                spent += (
                    torch.zeros(spent.shape, dtype=torch.int64, device=image.device)
                    .index_add_(0, digit, weight)
                    .to(device)
                )
        down = spent.flip(0).cumsum(0).flip(0)
        digit = (down > left).sum() - 1
        left = left - (down[digit] - spent[digit])
        level = digit - half if level is None else (level << DIGIT) + digit
    return level.to(images[0].dtype), left


def _reach(
    problem: Problem, layers: list[int], images: list[Tensor], first: list[int], costs: list[int], budget: int
) -> list[Tensor]:
    """Bool masks of the images that come before the first that does not fit into `budget` bytes.

    By falling image; ties by position (the images of layers[i] start at key first[i]), then layer and head.
    The costs of all images together must exceed the budget.
    """
    level, left = _level(images, costs, torch.tensor(budget, device=images[0].device))
    kept = [image > level.to(image.device) for image in images]
    ties = [image == level.to(image.device) for image in images]
    places = [-place[tie] for place, tie in zip(_places(problem, layers, images, first), ties, strict=True)]
    last, _ = _level(places, costs, left)
    for mask, tie, place in zip(kept, ties, places, strict=True):
        mask[tie] = place > last.to(mask.device)
    return kept


def _places(problem: Problem, layers: list[int], images: list[Tensor], first: list[int]) -> list[Tensor]:
    """Distinct numbers of the keys in the order that settles ties: position, layer, head."""
    total = sum(problem.heads)
    dtype = torch.int32 if (max(problem.lengths) + 1) * total < 2**31 else torch.int64
    places = []
    for layer, image, start in zip(layers, images, first, strict=True):
        heads = sum(problem.heads[:layer]) + torch.arange(image.shape[0], dtype=dtype, device=image.device)
        keys = start + torch.arange(image.shape[1], dtype=dtype, device=image.device)
        places.append(keys * total + heads[:, None])
    return places


def _largest(image: Tensor, count: int) -> Tensor:
    """Bool mask of the `count` largest of each row, ties to the lower index."""
    if count >= image.shape[1]:
        return torch.ones_like(image, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(image, dtype=torch.bool)
    least = image.kthvalue(image.shape[1] - count + 1, dim=-1, keepdim=True).values
    above, tie = image > least, image == least
    return above | (tie & (tie.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


class _Pool:
    """The keys of some layers that compete once the by-rule keys are taken out, with floor and cap.

    Floor: a head's heaviest keys up to it get the highest image. Cap: those beyond it get the lowest.
    """

    def __init__(
        self, problem: Problem, layers: list[int], ruled: tuple[int, ...], floor: int, costs: list[int] | None = None
    ) -> None:
        self.problem, self.layers = problem, layers
        self.costs = [problem.costs[layer] for layer in layers] if costs is None else costs
        ends = [problem.ends(ruled[layer]) for layer in layers]
        self.first = [sinks for sinks, _ in ends]
        self.stop = [problem.lengths[layer] - recent for layer, (_, recent) in zip(layers, ends, strict=True)]
        self.slots = [problem.most[layer] - ruled[layer] for layer in layers]
        self.forced = [max(0, min(floor, problem.most[layer]) - ruled[layer]) for layer in layers]
        counted = zip(layers, self.slots, self.costs, strict=True)
        self.capacity = sum(problem.heads[layer] * slots * cost for layer, slots, cost in counted)

    def images(self, images: list[Tensor]) -> list[Tensor]:
        competing = []
        for image, first, stop, slots, forced in zip(
            images, self.first, self.stop, self.slots, self.forced, strict=True
        ):
            image = image[:, first:stop]
            if slots < image.shape[1]:
                image = image.masked_fill(~_largest(image, slots), torch.iinfo(image.dtype).min)
            if forced:
                image = image.masked_fill(_largest(image, forced), _top(image))
            competing.append(image)
        return competing

    def masks(self, competing: list[Tensor], budget: int) -> list[Tensor]:
        """Bool masks of the competing keys that fit into `budget` bytes, from the heaviest down."""
        if self.capacity <= budget:
            return [image != torch.iinfo(image.dtype).min for image in competing]
        return _reach(self.problem, self.layers, competing, self.first, self.costs, budget)

    def reached(self, images: list[Tensor], budget: int) -> list[Tensor]:
        """Entries of each head from the competition for `budget` bytes."""
        return [mask.sum(-1) for mask in self.masks(self.images(images), budget)]


def _pooled(problem: Problem, images: list[Tensor], rounds: int) -> Share:
    """By-rule keys of `rounds` rounds, then all layers' keys by falling image."""
    ruled = problem.by_rule(rounds)
    pool = _Pool(problem, list(range(len(images))), ruled, problem.floor)
    return _share(problem, pool.reached(images, problem.budget - problem.bytes_of(ruled)), ruled)


def _share(problem: Problem, counts: list[Tensor], ruled: tuple[int, ...]) -> Share:
    by_rule = tuple(torch.full_like(count, rule) for count, rule in zip(counts, ruled, strict=True))
    return Share(tuple(count + rule for count, rule in zip(counts, by_rule, strict=True)), by_rule)


def _merged(problem: Problem, images: list[Tensor]) -> Share:
    """Contour where the rule alone would take over half of the budget: both orders merged (see the module).

    The floor is below the rule here, so by-rule keys fill it and nothing else is forced.
    """
    layers, device = list(range(len(images))), images[0].device
    full, granted = problem.by_rule(problem.full_rounds), problem.by_rule(min(problem.floor, problem.full_rounds))
    pool = _Pool(problem, layers, full, 0)
    competing = pool.images(images)
    # One entry beyond the budget, so that what does not fit is seen to come before what would.
    masks = pool.masks(competing, problem.budget + max(problem.costs))
    places = _places(problem, layers, competing, pool.first)
    heads = torch.arange(sum(problem.heads), device=device).split(list(problem.heads))

    def gathered(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten().to(device) for part in parts])

    owner = gathered(
        [head.to(mask.device)[:, None].expand(mask.shape)[mask] for head, mask in zip(heads, masks, strict=True)]
    )
    weight = gathered([image[mask] for image, mask in zip(competing, masks, strict=True)])
    place = gathered([place[mask] for place, mask in zip(places, masks, strict=True)])
    cost = torch.cat([torch.full(h.shape, c, device=device) for h, c in zip(heads, problem.costs, strict=True)])
    order = _ordered(place, -weight)
    owner = owner[order]

    rule_owner, rule_weight, rule_round = [], [], []
    for layer, image in enumerate(images):
        positions = problem.rule_order(layer, full[layer])
        rule_weight.append(image[:, positions])
        rule_owner.append(heads[layer].to(image.device)[:, None].expand(-1, full[layer]))
        rule_round.append(torch.arange(full[layer], device=image.device).expand(problem.heads[layer], -1))
    rule_owner, rule_weight, rule_round = gathered(rule_owner), gathered(rule_weight), gathered(rule_round)
    least = torch.cat([torch.full(h.shape, g, device=device) for h, g in zip(heads, granted, strict=True)])
    order = _ordered(rule_owner, -rule_weight, rule_round, rule_round >= least[rule_owner])
    rule_owner, free = rule_owner[order], (rule_round >= least[rule_owner])[order]

    held, rule_held = cost[owner].cumsum(0), cost[rule_owner].cumsum(0)
    # Competing entry i stands at 2 i, a by-rule entry just behind the first i whose bytes reach its own.
    stand = torch.where(free, 2 * torch.searchsorted(held, rule_held) + 1, -1)
    everyone = torch.cat([owner, rule_owner])
    order = torch.cat([2 * torch.arange(owner.numel(), device=device), stand]).argsort(stable=True)
    fits = cost[everyone][order].cumsum(0) <= problem.budget
    chosen = order[fits]
    ones = torch.ones_like(chosen)
    entries = torch.zeros_like(cost).index_add_(0, everyone[chosen], ones)
    by_rule = torch.zeros_like(cost).index_add_(0, everyone[chosen], ones * (chosen >= owner.numel()))

    def by_layer(counts: Tensor) -> tuple[Tensor, ...]:
        parts = counts.split(list(problem.heads))
        return tuple(part.to(image.device) for part, image in zip(parts, images, strict=True))

    return Share(by_layer(entries), by_layer(by_rule))


def _ordered(*keys: Tensor) -> Tensor:
    """Indices that sort by the last key, its ties by the one before, and so on."""
    order = keys[0].argsort(stable=True)
    for key in keys[1:]:
        order = order[key[order].argsort(stable=True)]
    return order


def _sloped(problem: Problem, slope: list[float]) -> Share:
    """Beyond the by-rule keys, entries in proportion to `slope`, the same in a layer's heads up to the remainder."""
    ruled = problem.by_rule(problem.rounds)
    most = [most - rule for most, rule in zip(problem.most, ruled, strict=True)]
    least = [max(0, min(problem.floor, most) - rule) for most, rule in zip(problem.most, ruled, strict=True)]
    left = problem.budget - problem.bytes_of(ruled)

    def at(scale: float) -> list[int]:
        return [min(high, max(low, int(scale * w))) for w, low, high in zip(slope, least, most, strict=True)]

    fits, over = 0.0, (max(most, default=0) + 1) / min(slope)
    for _ in range(100):
        middle = (fits + over) / 2
        if problem.bytes_of(at(middle)) <= left:
            fits = middle
        else:
            over = middle
    entries = at(fits)
    left -= problem.bytes_of(entries)
    extra = [0] * len(entries)
    # Layers in the order in which a larger scale would give them one more.
    for layer in sorted(range(len(entries)), key=lambda layer: ((entries[layer] + 1) / slope[layer], layer)):
        if entries[layer] == most[layer]:
            continue
        extra[layer] = min(problem.heads[layer], left // problem.costs[layer])
        left -= extra[layer] * problem.costs[layer]
        if extra[layer] < problem.heads[layer]:
            break
    counts = [
        count + (torch.arange(score.shape[0], device=score.device) < more).long()
        for score, count, more in zip(problem.scores, entries, extra, strict=True)
    ]
    return _share(problem, counts, ruled)


# --- arguments --------------------------------------------------------------------------------------------------


def _layers(name: str, tensors: object) -> tuple[Tensor, ...]:
    if not isinstance(tensors, tuple | list) or not tensors:
        raise InvalidInput(f"{name}: expected a tuple of tensors, one a layer, got {_kind(tensors)}")
    for layer, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise InvalidInput(f"{name}: expected a tensor of floats in layer {layer}, got {_kind(tensor)}")
        if tensor.ndim != 2 or not tensor.shape[0]:
            raise InvalidInput(
                f"{name}: expected shape (heads, keys) with a head or more in layer {layer}, got {tuple(tensor.shape)}"
            )
    layer = _first_where([~tensor.isfinite() for tensor in tensors])
    if layer is not None:
        raise InvalidInput(f"{name}: layer {layer} holds NaN or infinity; expected finite numbers")
    return tuple(tensor.detach() for tensor in tensors)


def _first_where(truths: list[Tensor]) -> int | None:
    """The first of several bool tensors that holds a True; a GPU is waited for once."""
    device = truths[0].device
    found = torch.stack([truth.any().to(device) for truth in truths]).tolist()
    return found.index(True) if True in found else None


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return "an empty one" if isinstance(value, tuple | list) and not value else type(value).__name__


def _counts(name: str, counts: object, problem: Problem, most: tuple[int, ...] | list[int]) -> tuple[Tensor, ...]:
    if not isinstance(counts, tuple | list) or len(counts) != len(problem.scores):
        raise InvalidInput(f"{name}: expected {len(problem.scores)} tensors of counts, one a layer")
    for layer, (count, heads, high) in enumerate(zip(counts, problem.heads, most, strict=True)):
        if not isinstance(count, Tensor) or count.dtype not in (torch.int64, torch.int32) or count.shape != (heads,):
            raise InvalidInput(
                f"{name}: expected {heads} whole numbers in layer {layer}, one a head, got {_kind(count)}"
            )
        if bool(((count < 0) | (count > high)).any()):
            raise InvalidInput(f"{name}: expected counts from 0 to {high} in layer {layer}, got {count.tolist()}")
    return tuple(count.long().to(score.device) for count, score in zip(counts, problem.scores, strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
