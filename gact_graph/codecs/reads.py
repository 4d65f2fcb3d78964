"""What backward reads of a saved tensor. A codec has to preserve that, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gact_graph.ops.bitmask import pack_bits

Slices = tuple[tuple[int, ...], tuple[int, ...]]
"""A shape, and the dimensions of it that a slice spans."""


@dataclass(frozen=True)
class Values:
    """The values, which may carry noise that is zero on average.

    Args:
        least_bits: The width below which the noise would add too much.
        sign: Whether the noise must not move an element across zero.
        relative: Whether the error must be small beside each element, not beside the largest ones.
        slices: The shape of the values, contiguous, and the dimensions of it that a slice spans:
            backward brings each slice to one scale.
    """

    least_bits: int = 1
    sign: bool = False
    relative: bool = False
    slices: Slices | None = None


@dataclass(frozen=True)
class Exact:
    """The exact values: they are compared or exponentiated, or their use is not known."""


@dataclass(frozen=True)
class Nothing:
    """Nothing: backward never reads the tensor."""


@dataclass(frozen=True)
class Side:
    """For each element, whether it passes a test.

    Args:
        test: ``above`` (x > bound), ``not_at_most`` (not x <= bound, so also NaN), ``within`` (both
            bounds included) or ``strictly_within``.
        bounds: One number, or two.
        low: A value that fails the test; all elements that fail it are decoded to this value.
        high: A value that passes it; all elements that pass it are decoded to this value.
    """

    test: str
    bounds: tuple[float, ...]
    low: float
    high: float

    def words(self, x: Tensor) -> Tensor:
        """One bit an element, packed as in :func:`gact_graph.ops.bitmask.pack_bits`."""
        if self.test in ("above", "not_at_most"):
            return pack_bits(x, self.test, self.bounds[0])
        low, high = self.bounds
        passed = (x >= low) & (x <= high) if self.test == "within" else (x > low) & (x < high)
        return pack_bits(passed)


@dataclass(frozen=True)
class Sign:
    """The sign of each element: -1, 0 or 1."""


Reads = Values | Exact | Nothing | Side | Sign

VALUES = Values()
RELATIVE = Values(relative=True)
EXACT = Exact()
