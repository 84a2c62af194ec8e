"""The allocator: optimal, monotone, within the budget to less than an entry, unmoved by the order of heads."""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contourkv.allocator import (
    SPLITS,
    WEIGHTS,
    AdaKV,
    Contour,
    ContourBySpan,
    Global,
    Problem,
    Pyramid,
    Uniform,
    allocate,
    curves,
    select,
    weighted,
)
from contourkv.errors import InvalidInput

NO_RULE = {"sinks": 0, "recent": 0}


def rebuilt(problem, **changes):
    fields = ("scores", "masses", "costs", "budget", "sinks", "recent", "floor", "cap", "spans")
    return Problem(**({name: getattr(problem, name) for name in fields} | changes))


def masses_of(problem):
    return problem.scores if problem.masses is None else problem.masses


def everything(problem):
    return problem.bytes_of(problem.most)


@st.composite
def problems(draw, most_keys=6, equal_costs=None, own_masses=None, **fixed):
    """Small problems: ties or none, one cost or several, empty layers, floors, caps, every size of budget."""
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tied = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def values(shape, low):
        drawn = rng.integers(low, 5, shape) / 4 if tied else rng.standard_normal(shape) ** (2 if low == 0 else 1)
        return torch.tensor(drawn, dtype=dtype)

    keys = draw(st.none() | st.integers(0, most_keys))  # of every layer, or each its own
    shapes = [
        (draw(st.integers(1, 2)), draw(st.integers(0, most_keys)) if keys is None else keys) for _ in range(layers)
    ]
    apart = draw(st.booleans()) if own_masses is None else own_masses
    masses = tuple(values(shape, 0) for shape in shapes)
    scores = tuple(values(shape, -4) for shape in shapes) if apart else masses
    same = draw(st.booleans()) if equal_costs is None else equal_costs
    costs = [draw(st.sampled_from([1, 2, 3, 7]))] * layers if same else [int(c) for c in rng.integers(1, 8, layers)]
    floor = draw(st.integers(0, 2))
    cap = draw(st.none() | st.integers(max(1, floor), 4))
    rest = {"sinks": draw(st.integers(0, 2)), "recent": draw(st.integers(0, 3)), "floor": floor, "cap": cap} | fixed
    whole = sum(h * n * c for (h, n), c in zip(shapes, costs, strict=True))
    least = sum(h * min(rest["floor"], n) * c for (h, n), c in zip(shapes, costs, strict=True))
    budget = max(1, draw(st.integers(least, max(least, whole + 3))))
    return Problem(scores, masses if apart else None, tuple(costs), budget, **rest)


def oracle(problem):
    """Contour in exact fractions, entry by entry: the order of the module, one list of heads."""
    heads = [(layer, head) for layer in range(len(problem.costs)) for head in range(problem.heads[layer])]
    full = problem.by_rule(problem.full_rounds)
    rule, competing = [], []
    for number, (layer, head) in enumerate(heads):
        cost, mass = problem.costs[layer], masses_of(problem)[layer][head].tolist()
        order = problem.rule_order(layer, full[layer]).tolist()
        granted = min(problem.floor, full[layer])
        for turn, key in enumerate(order):
            rule.append((turn >= granted, turn, -Fraction(mass[key]) / cost, number, cost))
        own = sorted((-Fraction(mass[key]) / cost, key) for key in range(len(mass)) if key not in order)
        forced = max(0, min(problem.floor, problem.most[layer]) - full[layer])
        for place, (density, key) in enumerate(own[: problem.most[layer] - full[layer]]):
            competing.append((place >= forced, density, key, number, cost))
    rule.sort()
    competing.sort()
    counts, by_rule = [0] * len(heads), [0] * len(heads)
    taken, ruled, others = 0, 0, 0
    while rule or competing:
        granted = rule and not rule[0][0]
        by_turn = rule and (granted or not competing or ruled + rule[0][-1] <= others)
        *_, number, cost = (rule if by_turn else competing).pop(0)
        if taken + cost > problem.budget:
            break
        taken += cost
        counts[number] += 1
        if by_turn:
            by_rule[number] += 1
            ruled += cost
        else:
            others += cost
    return counts, by_rule, taken


def flat(tensors):
    return [count for each in tensors for count in each.tolist()]


def price(problem, entries):
    return sum(int(each.sum()) * cost for each, cost in zip(entries, problem.costs, strict=True))


# --- properties -------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(problems(equal_costs=True))
def test_layers_of_equal_keys_and_costs_are_one_layer(problem):
    together = problem.as_one_layer()
    if together is None:
        assert len(problem.scores) == 1 or len(set(problem.lengths)) > 1
        return
    (entries,), (by_rule,) = Contour().share(together)
    apart = Contour()._share(problem)
    assert entries.tolist() == flat(apart.entries) and by_rule.tolist() == flat(apart.by_rule)


@settings(max_examples=300)
@given(problems())
def test_contour_is_the_oracle(problem):
    counts, by_rule, taken = oracle(problem)
    found = allocate(problem)
    assert flat(found.entries) == counts
    assert flat(found.by_rule) == by_rule
    assert found.bytes == taken


@settings(max_examples=120)
@given(problems(most_keys=5), st.booleans())
def test_no_cheaper_or_equal_allocation_drops_less(problem, ruled):
    problem = rebuilt(problem, **({} if ruled else NO_RULE))
    full = problem.by_rule(problem.full_rounds)
    found = allocate(problem)
    if any((each < rule).any() for each, rule in zip(found.by_rule, full, strict=True)):
        return  # the rule is cut to the budget: there the oracle speaks
    budget = problem.budget if len(set(problem.costs)) == 1 else found.bytes
    outside = []
    for layer, mass in enumerate(masses_of(problem)):
        keys = [key for key in range(mass.shape[1]) if key not in problem.rule_order(layer, full[layer]).tolist()]
        outside += [(layer, row) for row in curves(mass[:, keys]).tolist()]
    choices, best = [], np.inf
    for layer, _ in outside:
        choices.append(range(max(full[layer], min(problem.floor, problem.most[layer])), problem.most[layer] + 1))
    if np.prod([len(choice) for choice in choices]) > 3000:
        return
    for counts in product(*choices):
        if sum(n * problem.costs[layer] for n, (layer, _) in zip(counts, outside, strict=True)) <= budget:
            best = min(best, sum(row[n - full[layer]] for n, (layer, row) in zip(counts, outside, strict=True)))
    mine = sum(row[n - full[layer]] for n, (layer, row) in zip(flat(found.entries), outside, strict=True))
    assert mine == pytest.approx(best, rel=1e-6, abs=1e-9)


@settings(max_examples=200)
@given(problems(), st.integers(1, 20))
def test_a_larger_budget_never_drops_a_kept_key(problem, more):
    small, large = allocate(problem), allocate(rebuilt(problem, budget=problem.budget + more))
    for inner, outer in zip(small.keep, large.keep, strict=True):
        assert not (inner & ~outer).any()


@settings(max_examples=200)
@given(problems(), st.data())
def test_a_level_for_each_span_is_contour_on_each_group_alone(problem, data):
    spans = tuple(data.draw(st.integers(0, 1)) for _ in problem.scores)
    both = rebuilt(problem, spans=spans)
    found = allocate(both, ContourBySpan())
    assert found.bytes <= problem.budget
    if len(set(spans)) == 1:
        assert flat(found.keep) == flat(allocate(problem).keep)
    for span in set(spans):
        layers = [layer for layer, each in enumerate(spans) if each == span]
        least = sum(problem.heads[n] * min(problem.floor, problem.most[n]) * problem.costs[n] for n in layers)
        held = sum(int(found.entries[n].sum()) * problem.costs[n] for n in layers)
        full = sum(problem.heads[n] * problem.most[n] * problem.costs[n] for n in layers)
        assert least <= held <= full
        room = everything(problem) - problem.bytes_of([min(problem.floor, most) for most in problem.most])
        fair = (problem.budget - everything(problem) + room) * Fraction(full - least, room) if room else 0
        own = least + int(min(fair, full - least))
        kept = [found.keep[n] for n in layers]
        assert (
            flat(kept) == flat(allocate(problem.of_layers(layers, own)).keep) if own else not any(map(torch.any, kept))
        )
    if problem.budget >= everything(problem):
        assert found.bytes == everything(problem)


@given(problems(), st.data(), st.integers(1, 40))
def test_a_level_for_each_span_never_drops_what_a_smaller_budget_kept(problem, data, more):
    problem = rebuilt(problem, spans=tuple(data.draw(st.integers(0, 1)) for _ in problem.scores))
    less = allocate(problem, ContourBySpan())
    greater = allocate(rebuilt(problem, budget=problem.budget + more), ContourBySpan())
    for inner, outer in zip(less.keep, greater.keep, strict=True):
        assert not (inner & ~outer).any()


@pytest.mark.parametrize("costs", [(1, 1), (3, 2)])
@pytest.mark.parametrize("own_masses", [False, True])
def test_kept_sets_are_nested_over_every_budget(costs, own_masses, rng):
    masses = tuple(torch.tensor(rng.random((2, 9)) ** 4) for _ in costs)
    scores = tuple(torch.tensor(rng.standard_normal((2, 9))) for _ in costs) if own_masses else masses
    problem = Problem(scores, masses if own_masses else None, costs, 10, sinks=2, recent=2)
    before = [torch.zeros_like(score, dtype=torch.bool) for score in scores]
    for budget in range(problem.bytes_of([1, 1]), everything(problem) + 2):
        found = allocate(rebuilt(problem, budget=budget))
        assert not any((old & ~new).any() for old, new in zip(before, found.keep, strict=True))
        assert found.bytes > budget - max(costs) or found.bytes == everything(problem)
        before = found.keep


@settings(max_examples=100)
@given(problems(), st.data())
def test_contour_moves_with_heads_and_layers(problem, data):
    masses = masses_of(problem)
    values = torch.cat([mass.flatten() / cost for mass, cost in zip(masses, problem.costs, strict=True)])
    if values.unique().numel() < values.numel():
        return  # a level through a tie may go by layer and head
    layers = data.draw(st.permutations(range(len(masses))))
    heads = [data.draw(st.permutations(range(problem.heads[layer]))) for layer in layers]

    def moved(tensors):
        return tuple(tensors[layer][order] for layer, order in zip(layers, heads, strict=True))

    turned = rebuilt(
        problem,
        scores=moved(problem.scores),
        masses=None if problem.masses is None else moved(problem.masses),
        costs=tuple(problem.costs[layer] for layer in layers),
    )
    here, there = allocate(problem), allocate(turned)
    for mine, theirs in zip(moved(here.keep), there.keep, strict=True):
        assert torch.equal(mine, theirs)


@settings(max_examples=200)
@given(problems(), st.sampled_from(sorted(SPLITS)))
def test_every_split_keeps_to_the_budget_floor_and_cap(problem, name):
    split = SPLITS[name]()
    found = allocate(problem, split)
    assert found.bytes == price(problem, found.entries) <= problem.budget
    spare = max(problem.costs)
    assert found.bytes == everything(problem) or found.bytes > problem.budget - spare
    for layer, (mask, count, ruled) in enumerate(zip(found.keep, found.entries, found.by_rule, strict=True)):
        assert torch.equal(mask.sum(-1), count)
        assert (count >= min(problem.floor, problem.lengths[layer])).all()
        assert (count <= problem.most[layer]).all()
        for head, number in enumerate(ruled.tolist()):
            assert mask[head, problem.rule_order(layer, number)].all()
    assert [each.tolist() for each in split.entries(problem)] == [each.tolist() for each in found.entries]
    again = allocate(problem, split)
    assert all(torch.equal(a, b) for a, b in zip(found.keep, again.keep, strict=True))


@settings(max_examples=200)
@given(problems(floor=0), st.sampled_from(sorted(SPLITS)))
def test_the_rule_takes_at_most_half_and_stands_whole_when_half_suffices(problem, name):
    found = allocate(problem, SPLITS[name]())
    ruled = price(problem, found.by_rule)
    assert 2 * ruled <= problem.budget
    whole = [min(problem.sinks + problem.recent, most) for most in problem.most]
    slack = max(problem.costs) if name == "contour" and len(set(problem.costs)) > 1 else 0
    if 2 * problem.bytes_of(whole) + slack <= min(problem.budget, everything(problem)):
        assert ruled == problem.bytes_of(whole)
        for mask, length, count in zip(found.keep, problem.lengths, whole, strict=True):
            sinks, recent = problem.ends(count)
            assert mask[:, :sinks].all() and mask[:, length - recent :].all()


@given(problems(), st.data())
def test_select_keeps_the_rule_then_the_largest_scores(problem, data):
    entries, by_rule = [], []
    for heads, length in zip(problem.heads, problem.lengths, strict=True):
        counts = [data.draw(st.integers(0, length)) for _ in range(heads)]
        limit = min(problem.sinks + problem.recent, length)
        entries.append(torch.tensor(counts))
        by_rule.append(torch.tensor([data.draw(st.integers(0, min(limit, count))) for count in counts]))
    keep = select(problem, tuple(entries), tuple(by_rule))
    for layer, score in enumerate(problem.scores):
        for head, (count, rule) in enumerate(zip(entries[layer].tolist(), by_rule[layer].tolist(), strict=True)):
            first = problem.rule_order(layer, rule).tolist()
            rest = sorted((-score[head, key].item(), key) for key in range(score.shape[1]) if key not in first)
            wanted = sorted(first + [key for _, key in rest[: count - rule]])
            assert keep[layer][head].nonzero().flatten().tolist() == wanted


@given(problems(own_masses=True))
def test_dropped_mass_and_level_are_those_of_the_keys_not_kept(problem):
    found = allocate(problem)
    gone = [mass.double()[~mask] for mass, mask in zip(problem.masses, found.keep, strict=True)]
    assert found.dropped == pytest.approx(sum(each.sum().item() for each in gone), abs=1e-12)
    heaviest = [each.max().item() / cost for each, cost in zip(gone, problem.costs, strict=True) if each.numel()]
    assert found.level == pytest.approx(max(heaviest, default=0.0))
    assert f"{found.bytes:,} of {problem.budget:,} bytes" in repr(found)


@given(problems(own_masses=False, cap=None, floor=0, **NO_RULE))
def test_the_level_parts_kept_from_dropped(problem):
    found = allocate(problem)
    for mass, mask, cost in zip(problem.scores, found.keep, problem.costs, strict=True):
        assert (mass.double()[mask] / cost >= found.level * (1 - 1e-12)).all()


@given(problems())
def test_curves_fall_are_convex_and_sum_what_is_outside(problem):
    for mass in masses_of(problem):
        curve = curves(mass)
        assert curve.dtype == torch.float64 and curve.shape == (mass.shape[0], mass.shape[1] + 1)
        steps = curve[:, :-1] - curve[:, 1:]
        assert torch.allclose(steps, mass.double().sort(descending=True).values, atol=1e-12)
        assert (curve[:, -1] == 0).all()


# --- a float64 oracle at size -----------------------------------------------------------------------------------


def by_sorting(masses, costs, budget, sinks, recent):
    """Entries of each head by one sort of everything that competes, float64 numpy."""
    density, owner, position, cost, offset = [], [], [], [], 0
    for mass, each in zip(masses, costs, strict=True):
        heads, keys = mass.shape
        inner = mass.numpy()[:, sinks : keys - recent]
        density.append(inner.astype(np.float64).ravel() / each)
        owner.append(offset + np.repeat(np.arange(heads), inner.shape[1]))
        position.append(np.tile(np.arange(inner.shape[1]), heads))
        cost.append(np.full(inner.size, each))
        offset += heads
        budget -= heads * (sinks + recent) * each
    density, owner, position, cost = map(np.concatenate, (density, owner, position, cost))
    order = np.lexsort((owner, position, -density))
    fits = np.cumsum(cost[order]) <= budget
    return sinks + recent + np.bincount(owner[order][fits], minlength=offset)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("costs", [(1024, 1024, 1024), (1028, 2052, 516)])
def test_contour_is_a_sort(dtype, costs, rng):
    masses = tuple(
        torch.tensor(rng.pareto(0.6, (heads, keys)) * 1e-3).clamp(max=6e4).to(dtype)
        for heads, keys in ((8, 3000), (4, 3000), (8, 512))
    )
    exact = tuple(mass.double() for mass in masses)
    for share in (0.1, 0.25, 0.6, 0.97):
        whole = sum(mass.numel() * cost for mass, cost in zip(masses, costs, strict=True))
        problem = Problem(masses, None, costs, int(share * whole), sinks=4, recent=16)
        assert flat(Contour().entries(problem)) == by_sorting(exact, costs, problem.budget, 4, 16).tolist()


def test_extreme_floats_keep_their_order():
    tiny = torch.finfo(torch.float32).smallest_normal
    masses = torch.tensor([[0.0, -0.0, tiny / 8, tiny, 1.0, torch.finfo(torch.float32).max]])
    for count in range(1, 7):
        keep = allocate(Problem((masses,), None, (1,), count, **NO_RULE)).keep[0]
        assert keep[0].nonzero().flatten().tolist() == sorted([5, 4, 3, 2, 0, 1][:count])
    scores = torch.cat([-masses, masses], dim=1).double()
    wanted = np.argsort(-scores[0].numpy(), kind="stable")
    for count in range(1, 13):
        problem = Problem((scores,), (torch.ones_like(scores),), (1,), count, **NO_RULE)
        assert allocate(problem, Global()).keep[0][0].nonzero().flatten().tolist() == sorted(wanted[:count].tolist())


# --- splits as peers make them ----------------------------------------------------------------------------------


def kept_by(masked, heads, keys):
    keep = torch.ones(heads, keys, dtype=torch.bool)
    _, head, key = masked
    keep[head, key] = False
    return keep


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.7])
def test_adakv_keeps_what_kvpress_keeps(ratio, safeguard, rng):
    kvpress = pytest.importorskip("kvpress")

    class Given(kvpress.ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return scores[None].clone()

    scores = torch.tensor(rng.standard_normal((4, 80)) * np.array([[0.5], [1], [2], [3]]), dtype=torch.float32)
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    kvpress.AdaKVPress(Given(ratio), safeguard).compress(module, None, scores[None, ..., None], None, None, {})
    budget = 4 * int(80 * (1 - ratio)) * 12
    problem = Problem((scores,), (torch.ones_like(scores),), (12,), budget, floor=0, **NO_RULE)
    assert torch.equal(allocate(problem, AdaKV(safeguard)).keep[0], kept_by(module.masked_key_indices, 4, 80))


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_global_keeps_what_kvzip_in_kvpress_keeps(ratio, rng):
    kvpress = pytest.importorskip("kvpress")
    scores = torch.tensor(rng.random((3, 2, 60)) ** 3, dtype=torch.float32)
    config = SimpleNamespace(_attn_implementation="sdpa")
    modules = [SimpleNamespace(layer_idx=layer, config=config) for layer in range(3)]
    press = kvpress.KVzipPress(compression_ratio=ratio, n_sink=0)
    press.score_val = scores[:, None].clone()
    layers = [SimpleNamespace(self_attn=module) for module in modules]
    press.compress_post(SimpleNamespace(model=SimpleNamespace(layers=layers)))
    budget = (scores.numel() - int(scores.numel() * ratio)) * 8
    problem = Problem(tuple(scores), None, (8, 8, 8), budget, floor=0, **NO_RULE)
    for mask, module in zip(allocate(problem, Global()).keep, modules, strict=True):
        assert torch.equal(mask, kept_by(module.masked_key_indices, 2, 60))


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("beta", [4, 20])
def test_pyramid_has_the_layer_budgets_of_kvpress(ratio, beta, rng):
    kvpress = pytest.importorskip("kvpress")
    layers, keys = 6, 400
    press = kvpress.PyramidKVPress(ratio, window_size=0, beta=beta)
    config = SimpleNamespace(num_hidden_layers=layers)
    theirs = [press.get_layer_budget(SimpleNamespace(config=config, layer_idx=i), keys) for i in range(layers)]
    scores = tuple(torch.tensor(rng.random((2, keys))) for _ in range(layers))
    budget = round(2 * layers * keys * (1 - ratio)) * 4
    found = allocate(Problem(scores, None, (4,) * layers, budget, **NO_RULE), Pyramid(beta))
    assert found.bytes == budget
    for entries, count in zip(found.entries, theirs, strict=True):
        assert (entries - count).abs().max() <= 1


def test_pyramid_of_beta_1_is_uniform(rng):
    scores = tuple(torch.tensor(rng.random((2, 30))) for _ in range(3))
    problem = Problem(scores, None, (4, 8, 4), 400, **NO_RULE)
    assert flat(Pyramid(1).entries(problem)) == flat(Uniform().entries(problem))


def test_uniform_leaves_to_the_others_what_short_layers_cannot_hold():
    scores = (torch.rand(2, 100), torch.rand(2, 8), torch.rand(2, 0))
    found = allocate(Problem(scores, None, (10, 10, 10), 1010, **NO_RULE), Uniform())
    assert flat(found.entries) == [43, 42, 8, 8, 0, 0]


def test_splits_differ_where_heads_do(rng):
    wide, narrow = rng.random((1, 64)), np.zeros((1, 64))
    narrow[0, :3] = 1.0
    masses = torch.tensor(np.concatenate([wide, narrow]))
    problem = Problem((masses,), None, (1,), 64, **NO_RULE)
    assert flat(Uniform().entries(problem)) == [32, 32]
    assert flat(Contour().entries(problem)) == [61, 3]
    assert flat(AdaKV(0.2).entries(problem)) == [58, 6]


# --- defined results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_equal_masses_go_by_position_then_head(value):
    masses = tuple(torch.full((2, 4), value) for _ in range(2))
    keep = allocate(Problem(masses, None, (1, 1), 6, **NO_RULE)).keep
    assert keep[0].tolist() == [[True, True, False, False]] * 2
    assert keep[1].tolist() == [[True, False, False, False]] * 2


def test_equal_scores_keep_the_first_keys_after_the_rule():
    scores = torch.zeros(1, 8)
    keep = allocate(Problem((scores,), None, (1,), 5, sinks=1, recent=1)).keep[0][0]
    assert keep.nonzero().flatten().tolist() == [0, 1, 2, 3, 7]


def test_the_rule_shrinks_recent_first_then_sinks():
    masses = torch.linspace(1, 0.1, 40)[None]
    problem = Problem((masses,), None, (1,), 40, sinks=3, recent=10)
    seen = []
    for budget in range(1, 41):
        rounds = int(allocate(rebuilt(problem, budget=budget)).by_rule[0])
        seen.append(problem.ends(rounds))
    # The floor's one entry is key 0; from then on every second entry.
    assert seen[:12] == [(1, 0)] * 3 + [(1, 1)] * 2 + [(2, 1)] * 2 + [(3, 1)] * 2 + [(3, 2)] * 2 + [(3, 3)]
    assert seen[-15:] == [(3, 10)] * 15


@pytest.mark.parametrize("split", [one() for one in SPLITS.values()], ids=sorted(SPLITS, key=list(SPLITS).index))
def test_one_key_one_head_and_empty_layers(split):
    one = allocate(Problem((torch.ones(1, 1),), None, (5,), 5), split)
    assert one.keep[0].tolist() == [[True]] and one.bytes == 5 and one.dropped == 0 and one.level == 0
    none = allocate(Problem((torch.ones(1, 0), torch.ones(2, 0)), None, (5, 5), 1), split)
    assert flat(none.entries) == [0, 0, 0] and none.bytes == 0
    short = allocate(Problem((torch.rand(2, 3), torch.rand(1, 0)), None, (5, 5), 21), split)
    assert sum(flat(short.entries)) == 4
    whole = allocate(Problem((torch.rand(2, 50),), None, (5,), 10**15), split)
    assert flat(whole.entries) == [50, 50]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_by_rule_keys_fill_the_floor_before_any_competition(name):
    masses = torch.linspace(0.1, 1, 20).expand(3, -1)
    found = allocate(Problem((masses,), None, (2,), 12, sinks=1, recent=1, floor=2), SPLITS[name]())
    assert [each.nonzero().flatten().tolist() for each in found.keep[0]] == [[0, 19]] * 3


def test_a_competing_entry_that_does_not_fit_stops_the_rule_behind_it():
    dear, cheap = torch.full((1, 4), 70.0), torch.ones(1, 30)
    problem = Problem((dear, cheap), None, (7, 1), 2, sinks=1, recent=1, floor=0)
    assert flat(allocate(problem).entries) == oracle(problem)[0] == [0, 0]
    problem = rebuilt(problem, budget=8)
    assert flat(allocate(problem).entries) == oracle(problem)[0] == [1, 0]


def test_a_head_without_mass_keeps_its_rule_and_its_floor():
    masses = torch.stack([torch.linspace(1, 2, 40), torch.zeros(40)])
    found = allocate(Problem((masses,), None, (1,), 40, sinks=2, recent=2))
    assert flat(found.entries) == [36, 4]
    bare = allocate(Problem((masses,), None, (1,), 40, floor=3, **NO_RULE))
    assert flat(bare.entries) == [37, 3]
    capped = allocate(Problem((masses,), None, (1,), 40, cap=25, **NO_RULE))
    assert flat(capped.entries) == [25, 15]


def test_weights(rng):
    masses, distances = torch.tensor(rng.random((2, 5))), torch.tensor(rng.random((2, 5)))
    assert torch.equal(weighted(masses, distances, "plain"), masses)
    assert torch.allclose(weighted(masses, distances, "spread"), masses * 2 * distances.max(-1, keepdim=True).values)
    assert torch.equal(weighted(masses, distances, "distance"), masses * distances)
    half = weighted(masses.half(), distances.bfloat16(), "distance")
    assert half.dtype == torch.float32
    assert all(weighted(masses[:, :0], distances[:, :0], name).shape == (2, 0) for name in WEIGHTS)


def test_allocating_alters_no_input(rng):
    scores, masses = torch.tensor(rng.standard_normal((2, 60))), torch.tensor(rng.random((2, 60)))
    before = scores.clone(), masses.clone()
    for split in SPLITS.values():
        allocate(Problem((scores,), (masses,), (3,), 100), split())
    assert torch.equal(scores, before[0]) and torch.equal(masses, before[1])


# --- bad input --------------------------------------------------------------------------------------------------

GOOD = {"scores": (torch.ones(2, 5), torch.ones(1, 3)), "masses": None, "costs": (4, 4), "budget": 30}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"scores": ()}, "scores: expected a tuple of tensors, one a layer, got an empty one"),
        ({"scores": torch.ones(2, 5)}, "scores: expected a tuple of tensors, one a layer, got a tensor of"),
        ({"scores": (torch.ones(2, 5), None)}, "scores: expected a tensor of floats in layer 1, got NoneType"),
        ({"scores": (torch.ones(2, 5).long(), torch.ones(1, 3))}, "scores: expected a tensor of floats in layer 0"),
        ({"scores": (torch.ones(5), torch.ones(1, 3))}, r"scores: expected shape \(heads, keys\).* got \(5,\)"),
        ({"scores": (torch.ones(0, 5), torch.ones(1, 3))}, r"scores: expected shape .* got \(0, 5\)"),
        ({"scores": (torch.ones(2, 5), torch.full((1, 3), torch.nan))}, "scores: layer 1 holds NaN or infinity"),
        ({"scores": (torch.ones(2, 5), -torch.ones(1, 3))}, "masses: the scores of layer 1 are negative"),
        ({"masses": (torch.ones(2, 5),)}, "masses: expected 2 layers, as many as of scores, got 1"),
        ({"masses": (torch.ones(2, 5), torch.ones(1, 4))}, r"masses: expected \(1, 3\) on cpu in layer 1"),
        ({"masses": (torch.ones(2, 5), -torch.ones(1, 3))}, "masses: layer 1 holds a negative mass"),
        ({"masses": (torch.full((2, 5), torch.inf), torch.ones(1, 3))}, "masses: layer 0 holds NaN or infinity"),
        ({"costs": (4,)}, "costs: expected 2 whole numbers"),
        ({"costs": 4}, "costs: expected 2 whole numbers"),
        ({"costs": (4, 0)}, "costs: expected a whole number of at least 1, got 0"),
        ({"costs": (4, 2.5)}, "costs: expected a whole number of at least 1, got 2.5"),
        ({"budget": 0}, "budget: expected a whole number of at least 1, got 0"),
        ({"budget": -3}, "budget: expected a whole number of at least 1, got -3"),
        ({"budget": 0.25}, "budget: expected a whole number of at least 1, got 0.25"),
        ({"budget": True}, "budget: expected a whole number of at least 1, got True"),
        ({"budget": 11}, "budget: 11 bytes are below the floor of 1 entries in each of 3 heads; give at least 12"),
        ({"sinks": -1}, "sinks: expected a whole number of at least 0, got -1"),
        ({"recent": 1.0}, "recent: expected a whole number of at least 0, got 1.0"),
        ({"floor": -1}, "floor: expected a whole number of at least 0, got -1"),
        ({"cap": 0}, "cap: expected a whole number of at least 1, got 0"),
        ({"cap": 1, "floor": 2}, "cap: expected a whole number of at least 2, got 1"),
    ],
)
def test_bad_problems_are_named(changes, says):
    with pytest.raises(InvalidInput, match=says) as caught:
        Problem(**(GOOD | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entries, by_rule, says",
    [
        ((torch.tensor([1, 1]),), None, "entries: expected 2 tensors of counts"),
        ((torch.tensor([1, 1]), torch.tensor([1.0])), None, "entries: expected 1 whole numbers in layer 1"),
        ((torch.tensor([1]), torch.tensor([1])), None, "entries: expected 2 whole numbers in layer 0"),
        ((torch.tensor([1, 6]), torch.tensor([1])), None, "entries: expected counts from 0 to 5 in layer 0"),
        ((torch.tensor([1, -1]), torch.tensor([1])), None, "entries: expected counts from 0 to 5 in layer 0"),
        ((torch.tensor([1, 1]), torch.tensor([1])), (torch.tensor([2, 0]), torch.tensor([0])), "more by-rule keys"),
    ],
)
def test_bad_counts_are_named(entries, by_rule, says):
    with pytest.raises(InvalidInput, match=says):
        select(Problem(**GOOD), entries, by_rule)


def test_bad_settings_are_named():
    for value in (-0.1, 1.5, float("nan"), "half", True):
        with pytest.raises(InvalidInput, match="safeguard: expected a number from 0 to 1"):
            AdaKV(value)
    for value in (0.5, float("inf"), None):
        with pytest.raises(InvalidInput, match="beta: expected a number of at least 1"):
            Pyramid(value)
    with pytest.raises(InvalidInput, match="weight: expected one of plain, spread, distance, got 'norm'"):
        weighted(torch.ones(1, 2), torch.ones(1, 2), "norm")
    with pytest.raises(InvalidInput, match=r"distances: expected \(1, 2\)"):
        weighted(torch.ones(1, 2), torch.ones(1, 3), "plain")
    with pytest.raises(InvalidInput, match="masses: layer 0 holds NaN"):
        curves(torch.tensor([[torch.nan]]))
