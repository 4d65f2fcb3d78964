"""Combinations of values, of which ``make test`` runs few and ``make test-long`` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def named(cases: dict[str, Any], long: Collection[str] = ()) -> list[Any]:
    """Return the values as parameters of a test with their names; some are marked ``long``."""
    assert {*long} <= cases.keys()
    return [
        pytest.param(value, id=name, marks=pytest.mark.long if name in long else ())
        for name, value in cases.items()
    ]


def grid(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of the values, as parameters of a test.

    Those off a diagonal are marked ``long``: on it each value of each axis comes at least once.
    """
    values = [[*axis] for axis in axes]
    longest = max(map(len, values))
    diagonal = {tuple(i % len(axis) for axis in values) for i in range(longest)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, places, strict=True)),
            marks=() if places in diagonal else pytest.mark.long,
        )
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]
