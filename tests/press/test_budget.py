"""A budget: four ways to say it, what it is in bytes, and everything that makes no sense."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contourkv.errors import InvalidInput
from contourkv.press.budget import UNITS, Budget

layers = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 5000), st.integers(5, 2052)), min_size=1, max_size=6
)  # KV heads, entries available, bytes of an entry
same_cost = layers.map(lambda drawn: [(heads, count, drawn[0][2]) for heads, count, _ in drawn])
fractions = st.floats(0, 1, exclude_min=True)


def columns(drawn):
    return tuple([layer[i] for layer in drawn] for i in range(3))


def full(drawn) -> int:
    return sum(math.prod(layer) for layer in drawn)


def least(drawn) -> int:
    return sum(heads * cost for heads, count, cost in drawn if count)


def total(drawn) -> int:
    return sum(heads * count for heads, count, _ in drawn)


# Properties


@given(layers, fractions, st.integers(0, 10**6))
def test_a_fraction_is_that_fraction_of_the_full_cache_and_never_empties_a_head(drawn, fraction, overhead):
    found = Budget.of(fraction).bytes_for(*columns(drawn), overhead)
    assert found == max(math.floor(Fraction(repr(fraction)) * full(drawn)), least(drawn))
    assert least(drawn) <= found <= full(drawn)


@given(layers, fractions, fractions)
def test_a_larger_fraction_never_gives_fewer_bytes(drawn, one, other):
    low, high = (Budget.of(x).bytes_for(*columns(drawn)) for x in sorted((one, other)))
    assert low <= high


@given(layers, st.floats(0, 1, exclude_max=True))
def test_a_ratio_is_the_fraction_removed_as_in_kvpress(drawn, ratio):
    budget = Budget.of(compression_ratio=ratio)
    assert budget.amount == 1 - Fraction(repr(ratio))
    assert ratio or budget.bytes_for(*columns(drawn)) == full(drawn)


def test_a_tenth_is_a_tenth():
    # in binary 100 * (1 - 0.9) is a little less than 10
    assert Budget.of(compression_ratio=0.9).bytes_for([1], [100], [1]) == 10
    assert Budget.of(0.1).bytes_for([1], [1000], [3]) == Budget.of("10%").bytes_for([1], [1000], [3]) == 300


@given(layers, st.integers(1, 10**8), st.integers(0, 10**5))
def test_bytes_pay_for_tables_first_and_stop_at_everything(drawn, count, overhead):
    budget = Budget.of(count)
    if count - overhead < least(drawn):
        with pytest.raises(
            InvalidInput, match=f"budget: {count}.*{least(drawn) + overhead} B a sequence are the least"
        ):
            budget.bytes_for(*columns(drawn), overhead)
    else:
        found = budget.bytes_for(*columns(drawn), overhead)
        assert found == min(count - overhead, full(drawn))


@given(same_cost, st.integers(1, 10**5))
def test_entries_of_one_cost_are_counted_exactly(drawn, count):
    heads = sum(heads for heads, available, _ in drawn if available)
    assume(count >= heads)
    assert Budget.of(entries=count).bytes_for(*columns(drawn)) == min(count, total(drawn)) * drawn[0][2]


@given(layers, st.integers(1, 10**5))
def test_entries_of_different_cost_are_that_many_of_mean_cost(drawn, count):
    heads = sum(heads for heads, available, _ in drawn if available)
    if count < heads:
        with pytest.raises(InvalidInput, match=rf"entries: {count} is less than one in each of {heads} KV heads"):
            Budget.of(entries=count).bytes_for(*columns(drawn))
    else:
        found = Budget.of(entries=count).bytes_for(*columns(drawn))
        assert least(drawn) <= found <= full(drawn)
        if count < total(drawn):
            mean = Fraction(full(drawn), total(drawn))
            assert found == max(math.floor(count * mean), least(drawn))


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_strings_are_read_in_every_unit_in_any_case(count, unit, gap, lower):
    text = f"{count}{gap}{unit.lower() if lower else unit}"
    assert Budget.of(text).amount == count * UNITS[unit]


@given(fractions, st.integers(1, 10**9))
def test_what_is_printed_makes_the_same_budget(fraction, count):
    for budget in (
        Budget.of(fraction),
        Budget.of(count),
        Budget.of("1.5 MiB"),
        Budget.of(entries=count),
        Budget.of(compression_ratio=0.75),
    ):
        assert eval(repr(budget)) == budget
        assert Budget.of(budget) == budget


def test_an_empty_context_needs_no_bytes():
    for budget in (Budget.of(0.5), Budget.of(1000), Budget.of(entries=5), Budget.of(compression_ratio=0.5)):
        assert budget.bytes_for([2, 2], [0, 0], [100, 100]) == 0


def test_case_1_a_short_context_keeps_an_entry_in_every_head():
    assert Budget.of(compression_ratio=0.99).bytes_for([2, 2], [3, 3], [100, 60]) == 2 * 100 + 2 * 60


def test_case_8_an_absolute_size_or_a_ratio():
    shape = ([8] * 32, [4096] * 32, [4 * 2 * 128 + 4] * 32)
    assert Budget.of("64MiB").bytes_for(*shape, overhead=4096) == 64 * 2**20 - 4096
    assert Budget.of(entries=4096).bytes_for(*shape) == 4096 * 1028
    assert Budget.of("1 TiB").bytes_for(*shape) == 8 * 32 * 4096 * 1028


# Examples


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("500kB", 500_000),
        ("1000000 B", 10**6),
        ("0.5KB", 500),
        (" .25 kib ", 256),
    ],
)
def test_sizes(text, count):
    budget = Budget.of(text)
    assert (budget.kind, budget.amount) == ("bytes", count)


def test_numbers_of_numpy_are_numbers():
    assert Budget.of(np.int64(5)).amount == 5
    assert Budget.of(np.float64(0.5)).amount == Fraction(1, 2)
    assert Budget.of(entries=np.int32(7)).amount == 7


def test_it_reads_well():
    assert str(Budget.of(0.25)) == str(Budget.of("25%")) == "25% of the full cache"
    assert str(Budget.of("64MiB")) == "67,108,864 bytes"
    assert repr(Budget.of(entries=4096)) == "Budget.of(entries=4096)"


# Bad input

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected exactly one of them, got none; give budget="),
        ({"budget": 0.5, "entries": 3}, "expected exactly one of them, got budget and entries"),
        ({"entries": 3, "compression_ratio": 0.5}, "got entries and compression_ratio"),
        *(
            ({"budget": wrong}, "^budget: expected")
            for wrong in (0, -3, 0.0, -0.25, 1.5, NAN, INF, True, False, [1], 1j)
        ),
        ({"budget": 2.0}, "for bytes give a whole number, 2"),
        *(
            ({"budget": wrong}, "^budget: cannot read")
            for wrong in ("", "25", "-1 B", "1e3 B", "MiB", "1,5 GiB", "٣ B")
        ),
        *(({"budget": wrong}, "^budget: unknown unit") for wrong in ("7 parsecs", "3 Mbit", "1 i")),
        *(({"budget": wrong}, "^budget: .*less than one byte") for wrong in ("0 B", "0.4B")),
        *(({"budget": wrong}, "^budget: expected more than 0% and up to 100%") for wrong in ("0%", "101%")),
        *(({"entries": wrong}, "^entries: expected a whole number of at least 1") for wrong in (0, -1, 2.0, True, "9")),
        *(
            ({"compression_ratio": wrong}, "^compression_ratio: expected")
            for wrong in (1.0, 1.5, -0.1, NAN, True, "0.5", 1)
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(given, message):
    with pytest.raises(InvalidInput, match=message) as error:
        Budget.of(**given)
    assert "\n" not in str(error.value)
