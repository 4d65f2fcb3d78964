"""The integer program: against brute force, and within its budget."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gact_graph.adaptive.allocator import (
    MEANS,
    SLOT_WIDTHS,
    allocate,
    allocate_by_name,
    noise,
    variance,
)


@st.composite
def programs(draw, most: int = 4):
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(1, 3000), min_size=count, max_size=count))
    scales = draw(st.lists(st.floats(-6, 4), min_size=count, max_size=count))
    average = draw(st.sampled_from([1, 1.5, 2, 2.5, 3, 4, 8, 20, 32]))
    return [10**scale for scale in scales], sizes, average * sum(sizes)


def taken(bits, sizes):
    return sum(b * n for b, n in zip(bits, sizes, strict=True))


@settings(deadline=None, max_examples=150)
@given(programs())
def test_is_within_one_per_cent_of_brute_force(program):
    sensitivities, sizes, budget = program
    best = min(
        variance(sensitivities, bits)
        for bits in itertools.product(SLOT_WIDTHS, repeat=len(sizes))
        if taken(bits, sizes) <= budget
    )
    bits = allocate(sensitivities, sizes, budget)
    assert taken(bits, sizes) <= budget
    assert variance(sensitivities, bits) <= best * 1.01


@settings(deadline=None, max_examples=60)
@given(programs(most=3), st.sets(st.integers(0, 2), min_size=1))
def test_with_divided_slots_too(program, divided):
    sensitivities, sizes, budget = program
    choices = [MEANS if slot in divided else SLOT_WIDTHS for slot in range(len(sizes))]
    best = min(
        variance(sensitivities, bits)
        for bits in itertools.product(*choices)
        if taken(bits, sizes) <= budget
    )
    bits = allocate(sensitivities, sizes, budget, divided)
    assert taken(bits, sizes) <= budget
    assert all(width in choice for width, choice in zip(bits, choices, strict=True))
    # Steps above 8 bits are as large as for other slots, and no slot is fixed to a mean in turn.
    assert variance(sensitivities, bits) <= best * 2


@settings(deadline=None, max_examples=100)
@given(programs(most=60))
def test_never_exceeds_the_budget_and_beats_uniform(program):
    sensitivities, sizes, budget = program
    bits = allocate(sensitivities, sizes, budget)
    assert taken(bits, sizes) <= budget
    assert {*bits} <= {*SLOT_WIDTHS}
    uniform = max(width for width in SLOT_WIDTHS if width * sum(sizes) <= budget)
    bound = variance(sensitivities, [uniform] * len(sizes))
    assert variance(sensitivities, bits) <= bound * (1 + 1e-9)


def test_bits_go_where_they_count():
    assert allocate([1000.0, 1.0], [100, 100], 800) == [6, 2]
    assert allocate([1.0, 1.0], [100, 100], 800) == [4, 4]
    assert allocate([1.0, 1.0], [100, 10_000], 2.1 * 10_100)[0] > 4


def test_too_small_a_budget_gives_the_least_width():
    assert allocate([1.0, 5.0], [10, 10], 3) == [1, 1]


@pytest.mark.parametrize("count", [0, 1, 25, 10_000])
def test_any_number_of_slots(count):
    sizes = [1 + i % 97 for i in range(count)]
    bits = allocate([math.exp(i % 13) for i in range(count)], sizes, 4 * sum(sizes))
    assert len(bits) == count
    # What is left over would not pay for a bit of the largest slot, unless all are at the top.
    assert taken(bits, sizes) > 4 * sum(sizes) - 16 * max(sizes, default=0) or not count


def test_takes_the_steps_in_order_of_worth():
    """The heap for many slots, against a sorted list of all steps."""
    generator = random.Random(0)
    sizes = [generator.randint(1, 10**6) for _ in range(2000)]
    sensitivities = [10 ** generator.uniform(-6, 4) for _ in sizes]
    steps = [
        (c * (noise(a) - noise(b)) / (b - a) / size, (b - a) * size, slot, b)
        for slot, (c, size) in enumerate(zip(sensitivities, sizes, strict=True))
        for a, b in itertools.pairwise(SLOT_WIDTHS)
    ]
    for average in (1.2, 2, 4, 9, 31):
        left = (average - 1) * sum(sizes)
        expected = [1] * len(sizes)
        stuck = set()
        for _, price, slot, width in sorted(steps, reverse=True):
            if slot not in stuck and price <= left:
                left -= price
                expected[slot] = width
            else:
                stuck.add(slot)
        assert allocate(sensitivities, sizes, average * sum(sizes)) == expected


def test_nothing_to_lose_and_nothing_to_code():
    assert allocate([0.0, 1.0], [10, 10], 40) == [1, 3]
    assert allocate([1.0, 1.0], [0, 10], 40)[1] == 4


def test_divided_slots_share_the_budget_in_quarters():
    bits = allocate([3.0, 1.0], [1000, 1000], 4000, {0, 1})
    assert bits == [2.25, 1.75]
    assert allocate([3.0, 1.0], [1000, 1000], 4000) == [2, 2]
    assert allocate_by_name({"a": 3.0, "b": 1.0}, {"a": 9, "b": 9}, 2, {}, {"a"}) == {
        "a": 2.0,
        "b": 2,
    }


def test_noise():
    assert [noise(b) for b in (1, 2, 32)] == [1.0, 1 / 9, 0.0]
    assert all(noise(a) > noise(b) for a, b in itertools.pairwise(SLOT_WIDTHS))


def test_by_name_no_slot_has_less_than_its_least():
    sizes = {"a": 100, "b": 100, "c": 100}
    sensitivities = {"a": 1e6, "b": 1.0, "c": 1e-6}
    free = allocate_by_name(sensitivities, sizes, 4, {})
    assert free["c"] == 1
    held = allocate_by_name(sensitivities, sizes, 4, {"b": 3, "c": 3})
    assert held["c"] == 3 <= held["b"] and sum(held.values()) <= 12
    assert allocate_by_name(sensitivities, sizes, 4, dict.fromkeys(sizes, 4)) == dict.fromkeys(
        sizes, 4
    )
