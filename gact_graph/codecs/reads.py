"""Descriptions of what backward reads of a saved tensor, which is all that a codec preserves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.ops.bitmask import pack_bits

Slices = tuple[tuple[int, ...], tuple[int, ...]]
"""A shape, and the dimensions of it that a slice spans."""


@dataclass(frozen=True)
class Values:
    """The values, with noise of mean zero.

    Args:
        least_bits: The least number of bits whose noise is acceptable.
        sign: Whether the noise must not move an element across zero.
        relative: Whether the error must be small relative to each element rather than the largest.
        slices: The shape of the values, contiguous, and the dimensions that a slice spans, if
            backward normalizes each slice.
    """

    least_bits: int = 1
    sign: bool = False
    relative: bool = False
    slices: Slices | None = None


@dataclass(frozen=True)
class Exact:
    """The exact values: they are compared or exponentiated, or their use is unknown."""


@dataclass(frozen=True)
class Nothing:
    """Nothing: backward does not read the tensor."""


@dataclass(frozen=True)
class Side:
    """Whether each element passes a test.

    Args:
        test: ``above`` (x > bound), ``not_at_most`` (not x <= bound, so also NaN), ``within`` (both
            bounds included) or ``strictly_within`` (both excluded).
        bounds: One number, or two, of which one may be None: no bound.
        low: The decoded value of elements that fail the test; it fails the test.
        high: The decoded value of elements that pass the test; it passes the test.
    """

    test: str
    bounds: tuple[float | None, ...]
    low: float
    high: float

    def words(self, x: Tensor) -> Tensor:
        """Return one bit per element, packed by :func:`gact_graph.ops.bitmask.pack_bits`."""
        low, *others = self.bounds
        if self.test in ("above", "not_at_most"):
            assert low is not None
            return pack_bits(x, self.test, low)
        [high] = others
        strictly = self.test == "strictly_within"
        passed = [] if low is None else [x > low if strictly else x >= low]
        passed += [] if high is None else [x < high if strictly else x <= high]
        return pack_bits(functools.reduce(torch.logical_and, passed))


@dataclass(frozen=True)
class Sign:
    """The sign of each element: -1, 0 or 1."""


Reads = Values | Exact | Nothing | Side | Sign

VALUES = Values()
RELATIVE = Values(relative=True)
EXACT = Exact()
