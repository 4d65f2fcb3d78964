"""The comparisons of backward, read from gradients that the installed PyTorch computes.

The gradient of ``relu``, ``clamp`` and similar operations depends only on the side of a bound on
which each element lies, and on the bound itself by convention: with PyTorch 2.15 the gradient of
``clamp`` is 0 there, with 2.13 it is 1. So nothing is assumed. Before the first captured forward,
the gradient of a few elements at and around the bounds is compared with those that each test gives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.codecs.reads import Side
from gact_graph.ops.bitmask import unpack_bits
from gact_graph.support.torch_private import outside_of_compilers, without_functions, without_modes

_LOW, _HIGH = -0.5, 2.0
_AROUND = (-1.0, _LOW, -0.0, 0.0, 1.0, _HIGH, 3.0, math.inf, -math.inf)

# By operation: a call of it, and the comparison with PyTorch 2.13.
_PROBES: Mapping[str, tuple[Callable[[Tensor], Tensor], Side]] = {
    "relu": (torch.relu, Side("not_at_most", (0.0,), 0.0, 1.0)),
    "leaky_relu": (F.leaky_relu, Side("above", (0.0,), 0.0, 1.0)),
    "threshold": (
        lambda x: F.threshold(x, _LOW, _HIGH),
        Side("not_at_most", (_LOW,), -math.inf, math.inf),
    ),
    "hardtanh": (
        lambda x: F.hardtanh(x, _LOW, _HIGH),
        Side("strictly_within", (_LOW, _HIGH), _LOW, 1.0),
    ),
    "clamp": (lambda x: x.clamp(_LOW, _HIGH), Side("within", (_LOW, _HIGH), math.nan, 1.0)),
    "clamp_min": (
        lambda x: x.clamp_min(_LOW),
        Side("within", (_LOW, None), math.nan, 1.0),
    ),
    "clamp_max": (
        lambda x: x.clamp_max(_HIGH),
        Side("within", (None, _HIGH), math.nan, 1.0),
    ),
}

_ALTERNATIVES = {1: ("not_at_most", "above"), 2: ("within", "strictly_within")}


@functools.cache
def find_tests() -> Mapping[str, str | None]:
    """Return the test of :class:`~gact_graph.codecs.reads.Side` that each gradient depends on.

    The value is None for an operation whose gradient depends on more. The tests are found once in a
    process, in a few milliseconds.

    A captured forward needs the tests from its start: the search adds nodes to those that autograd
    numbers on this thread. Another thread needs memory for a stack, which a limit may not leave.
    """
    with without_functions(), without_modes(), outside_of_compilers(), torch.enable_grad():
        return {name: _found(function, usual) for name, (function, usual) in _PROBES.items()}


def _found(function: Callable[[Tensor], Tensor], usual: Side) -> str | None:
    tests = _ALTERNATIVES[len(usual.bounds)]
    # Between two bounds PyTorch treats NaN as its place in the tensor has it.
    numbers = (*_AROUND, math.nan) if len(usual.bounds) == 1 else _AROUND
    x = torch.tensor(numbers, dtype=torch.float32, device="cpu", requires_grad=True)
    expected = _gradient(function, x, lambda saved: saved)
    for side in (dataclasses.replace(usual, test=test) for test in tests):
        found = _gradient(function, x, functools.partial(_decoded, side))
        if torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)):
            return side.test
    return None


def _gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, unpack: Callable[[Tensor], Tensor]
) -> Tensor:
    with saved_tensors_hooks(Tensor.detach, unpack):
        result = function(x)
    (gradient,) = torch.autograd.grad(result, x, torch.full_like(result, 3.0))
    return gradient


def _decoded(side: Side, saved: Tensor) -> Tensor:
    return unpack_bits(side.words(saved), saved.shape, side.low, side.high, saved.dtype)
