r"""Bits for each slot, from the integer program of GACT (ICML 2022), section 4.1:

.. math::
    \min_b \sum_l c_l S(b_l) \quad \text{subject to} \quad \sum_l D_l b_l \le B, \qquad
    S(b) = (2^b - 1)^{-2},

with the sensitivity :math:`c_l` and the number of elements :math:`D_l` of slot l, and a budget of
:math:`B` bits. Where each group of a slot has a width of its own (``codecs.group_widths``),
:math:`b_l` is their mean, in quarters of a bit, so that slots and groups share one budget.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

SLOT_WIDTHS = (*range(1, 9), 16, 32)
"""The widths of slots. At 32 bits a slot is not quantized."""

MEANS = (*(quarters / 4 for quarters in range(4, 32)), *SLOT_WIDTHS[-3:])
"""The mean widths of slots whose groups have widths of their own."""

_FIXED = ((8, 2), (24, 1))
"""With up to 8 slots, each pair of slots is fixed to each pair of widths in turn; with up to 24,
each single slot. A single slot may then take most of the budget, and the greedy search may be far
from the optimum. Steps of a quarter of a bit leave it close enough."""


def noise(bits: float) -> float:
    """Return S(b), the variance of b bits in units of the group's squared range; 0 at 32 bits."""
    return 0.0 if bits >= 32 else (2.0**bits - 1) ** -2


class _Ladder(NamedTuple):
    """The widths that a slot may have.

    Attributes:
        widths: The widths, in ascending order.
        rates: The part of S that each step to the next width removes, per bit.
        losses: The same, negative and so in ascending order.
        costs: Bits an element above the least width.
    """

    widths: Sequence[float]
    rates: Sequence[float]
    losses: Sequence[float]
    costs: Sequence[float]

    @classmethod
    def of(cls, widths: Sequence[float]) -> _Ladder:
        rates = [(noise(a) - noise(b)) / (b - a) for a, b in itertools.pairwise(widths)]
        return cls(widths, rates, [-rate for rate in rates], [w - widths[0] for w in widths])


_WHOLE = _Ladder.of(SLOT_WIDTHS)
_DIVIDED = _Ladder.of(MEANS)


def variance(sensitivities: Sequence[float], bits: Sequence[float]) -> float:
    """Return the objective: the variance that these bits add to the gradient."""
    return sum(c * noise(b) for c, b in zip(sensitivities, bits, strict=True))


def allocate(
    sensitivities: Sequence[float],
    sizes: Sequence[int],
    budget: float,
    divided: Collection[int] = (),
) -> list[float]:
    """Return the width of each slot.

    All slots start at the least width. While the budget allows, the step to the next width that
    removes the most variance per bit is taken from a heap: O(L log L) for L slots. With few slots,
    the search runs with each one or two of them fixed beforehand, and the best result is used.

    Args:
        sensitivities: c_l of each slot, not negative.
        sizes: D_l of each slot: its number of elements.
        budget: B, in bits.
        divided: The indices of slots whose groups have widths of their own.

    Returns:
        One of :data:`MEANS` for each of these slots, and of :data:`SLOT_WIDTHS` for others; the
        least for all if the budget allows no more.
    """
    ladders = [_DIVIDED if slot in divided else _WHOLE for slot in range(len(sizes))]
    whole = [slot for slot, ladder in enumerate(ladders) if ladder is _WHOLE]
    depth = next((fixed for slots, fixed in _FIXED if len(sizes) <= slots), 0)
    trials = [_greedy(sensitivities, sizes, budget, ladders, {})]
    for slots in itertools.combinations(whole, min(depth, len(whole))):
        for steps in itertools.product(range(len(SLOT_WIDTHS)), repeat=len(slots)):
            fixed = dict(zip(slots, steps, strict=True))
            if sum(sizes) + _cost(sizes, fixed) <= budget:
                trials.append(_greedy(sensitivities, sizes, budget, ladders, fixed))
    widths = ([ladder.widths[s] for ladder, s in zip(ladders, t, strict=True)] for t in trials)
    return min(widths, key=lambda bits: variance(sensitivities, bits))


def allocate_by_name(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    average: float,
    least: Mapping[str, int],
    divided: Collection[str] = (),
) -> dict[str, float]:
    """Return the width of each slot for an average number of bits an element.

    Args:
        sensitivities: c_l by slot.
        sizes: D_l by slot.
        average: The average of bits an element over all slots.
        least: The least width by slot, at most the average; 1 for other slots.
        divided: The slots whose groups have widths of their own.
    """
    bits: dict[str, float] = {}
    names = [*sizes]
    while True:
        # Slots below their least width get that width, and the others share the remaining budget.
        budget = average * sum(sizes.values())
        budget -= sum(width * sizes[name] for name, width in bits.items())
        places = {place for place, name in enumerate(names) if name in divided}
        of_names = [sensitivities[n] for n in names], [sizes[n] for n in names]
        free = dict(zip(names, allocate(*of_names, budget, places), strict=True))
        low = {name: least[name] for name in names if free[name] < least.get(name, 1)}
        if not low:
            return {name: bits.get(name, free.get(name, 0)) for name in sizes}
        bits |= low
        names = [name for name in names if name not in low]


def _greedy(
    sensitivities: Sequence[float],
    sizes: Sequence[int],
    budget: float,
    ladders: Sequence[_Ladder],
    fixed: Mapping[int, int],
) -> list[int]:
    """Return the index of each slot's width in its ladder; ``fixed`` has those that do not
    change."""
    left = budget - sum(sizes) - _cost(sizes, fixed)
    # The worth of a bit of each slot, except for its step. Negative: a heap pops its least item.
    worth = [-c / size if size else 0.0 for c, size in zip(sensitivities, sizes, strict=True)]
    start = _start(worth, sizes, left, ladders)
    steps = [0 if slot in fixed else step for slot, step in enumerate(start)]
    left -= sum(map(_spent, ladders, steps, sizes))
    heap = [
        (worth[slot] * ladders[slot].rates[step], slot)
        for slot, step in enumerate(steps)
        if slot not in fixed and step < len(ladders[slot].rates)
    ]
    for slot, step in fixed.items():
        steps[slot] = step
    heapq.heapify(heap)
    while heap and left > 0:
        _, slot = heap[0]
        step, (widths, rates, *_) = steps[slot], ladders[slot]
        price = (widths[step + 1] - widths[step]) * sizes[slot]
        # If this step exceeds the budget, steps of smaller slots may still fit.
        if price > left:
            heapq.heappop(heap)
            continue
        left -= price
        steps[slot] = step + 1
        if step + 1 < len(rates):
            heapq.heapreplace(heap, (worth[slot] * rates[step + 1], slot))
        else:
            heapq.heappop(heap)
    return steps


def _start(
    worth: Sequence[float], sizes: Sequence[int], left: float, ladders: Sequence[_Ladder]
) -> list[int]:
    """Return the steps whose worth exceeds a threshold at which the budget covers all of them.

    The heap would take exactly these steps first, which is slower.
    """
    logs = [(size, math.log(-w)) for w, size in zip(worth, sizes, strict=True) if w and size]
    if not logs or left <= 0:
        return [0] * len(sizes)
    total = sum(size for size, _ in logs)
    # If all slots are equal, this ends one bit below the budget: a bit is worth a factor of four.
    threshold = math.exp(sum(size * log for size, log in logs) / total) * 4.0 ** (1 - left / total)
    while True:
        steps = [
            bisect.bisect_left(ladder.losses, threshold / w) if w else 0
            for w, ladder in zip(worth, ladders, strict=True)
        ]
        if sum(map(_spent, ladders, steps, sizes)) <= left:
            return steps
        threshold *= 4


def _spent(ladder: _Ladder, step: int, size: int) -> float:
    return ladder.costs[step] * size


def _cost(sizes: Sequence[int], steps: Mapping[int, int]) -> float:
    return sum(_spent(_WHOLE, step, sizes[slot]) for slot, step in steps.items())
