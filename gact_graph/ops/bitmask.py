r"""One bit an element: masks, sides and tensors of two values.

Format: ``words`` [ceil(numel / 64)] int64; bit i of word w stands for element 64 w + i in
contiguous order. The bits behind the last element are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gact_graph.ops import cpu, cuda
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import DTYPES
from gact_graph.ops.reference import bitmask as reference

TESTS = ("nonzero", "above", "not_at_most")
"""What a bit may tell of x: x != 0, x > threshold, or not x <= threshold (NaN included)."""

torch.library.define("gact_graph::pack_bits", "(Tensor x, int test, float threshold) -> Tensor")
torch.library.define(
    "gact_graph::pack_pair", "(Tensor x, float low, float high) -> (Tensor, Tensor)"
)
torch.library.define(
    "gact_graph::unpack_bits",
    "(Tensor words, int[] shape, float low, float high, ScalarType dtype) -> Tensor",
)
torch.library.impl("gact_graph::pack_bits", "default", reference.pack_bits)
torch.library.impl("gact_graph::pack_pair", "default", reference.pack_pair)
torch.library.impl("gact_graph::unpack_bits", "default", reference.unpack_bits)


@torch.library.impl("gact_graph::pack_bits", "cpu")
def _pack_bits_cpu(x: Tensor, test: int, threshold: float) -> Tensor:
    return (cpu.load() or reference).pack_bits(x, test, threshold)


@torch.library.impl("gact_graph::pack_pair", "cpu")
def _pack_pair_cpu(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (cpu.load() or reference).pack_pair(x, low, high)


@torch.library.impl("gact_graph::unpack_bits", "cpu")
def _unpack_bits_cpu(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    return (cpu.load() or reference).unpack_bits(words, shape, low, high, dtype)


@torch.library.impl("gact_graph::pack_bits", "cuda")
def _pack_bits_cuda(x: Tensor, test: int, threshold: float) -> Tensor:
    return (cuda.load(x.device) or reference).pack_bits(x, test, threshold)


@torch.library.impl("gact_graph::pack_pair", "cuda")
def _pack_pair_cuda(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (cuda.load(x.device) or reference).pack_pair(x, low, high)


@torch.library.impl("gact_graph::unpack_bits", "cuda")
def _unpack_bits_cuda(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    kernels = cuda.load(words.device) or reference
    return kernels.unpack_bits(words, shape, low, high, dtype)


@torch.library.register_fake("gact_graph::pack_bits")
def _pack_bits_fake(x: Tensor, test: int, threshold: float) -> Tensor:
    return x.new_empty((x.numel() + TILE - 1) // TILE, dtype=torch.int64)


@torch.library.register_fake("gact_graph::pack_pair")
def _pack_pair_fake(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return _pack_bits_fake(x, 0, 0.0), x.new_empty((), dtype=torch.bool)


@torch.library.register_fake("gact_graph::unpack_bits")
def _unpack_bits_fake(
    words: Tensor, shape: list[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    return words.new_empty(shape, dtype=dtype)


def pack_bits(x: Tensor, test: str = "nonzero", threshold: float = 0.0) -> Tensor:
    """One bit for each element: whether it passes the test.

    Args:
        x: Tensor of any shape and strides; bool, integer or floating-point.
        test: One of :data:`TESTS`.
        threshold: What ``above`` and ``not_at_most`` compare with; of a type narrower than float32
            in float32.

    Returns:
        words [ceil(numel / 64)] int64.

    Raises:
        ValueError: There is no such test.
        TypeError: ``x`` is no dense tensor, or complex, or where it is compared none of float16,
            bfloat16, float32 and float64; or ``threshold`` is no number.
    """
    _check_dense(x)
    if test not in TESTS:
        names = ", ".join(map(repr, TESTS))
        raise ValueError(f"Expected test to be one of {names} (got {test!r})")
    if test == "nonzero" and x.dtype.is_complex:
        raise TypeError(f"Expected a real tensor for the test {test!r} (got {x.dtype})")
    if test != "nonzero" and x.dtype not in DTYPES:
        raise TypeError(
            f"Expected a floating-point tensor for the test {test!r}, "
            f"of float16, bfloat16, float32 or float64 (got {x.dtype})"
        )
    _check_numbers(threshold=threshold)
    x = x.detach()
    words: Tensor = cpu.operators_for(x).pack_bits(x, TESTS.index(test), float(threshold))
    return words


def pack_pair(x: Tensor, low: float, high: float) -> tuple[Tensor, bool]:
    """One bit for each element of a tensor of two values: whether it is the second one.

    Args:
        x: Floating-point tensor of any shape and strides.
        low: The value of the bit 0, in x's dtype.
        high: The value of the bit 1.

    Returns:
        words [ceil(numel / 64)] int64, and whether each element has the very bits of one of both:
        where it is False (0 and -0 are two values, and so is NaN), the words mean nothing.

    Raises:
        TypeError: ``x`` is no dense floating-point tensor, or ``low`` or ``high`` no number.
    """
    _check_dense(x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"Expected a floating-point tensor (got {x.dtype})")
    _check_numbers(low=low, high=high)
    x = x.detach()
    words, matched = cpu.operators_for(x).pack_pair(x, float(low), float(high))
    return words, bool(matched)


def unpack_bits(
    words: Tensor, shape: Sequence[int], low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """The contiguous tensor of ``shape``: ``high`` where the bit is set, else ``low``.

    Args:
        words: [ceil(numel / 64)] int64, as the functions above make them.
        shape: Any shape of that many elements.
        low: A number that ``dtype`` holds; it is rounded to it.
        high: The like.
        dtype: Any real one, bool too.

    Raises:
        ValueError: The words are not those of a tensor of this shape.
        TypeError: ``words`` is no dense tensor, ``low`` or ``high`` no number, or ``dtype`` complex
            or none.
    """
    _check_dense(words)
    _check_numbers(low=low, high=high)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise TypeError(f"Expected a real dtype (got {dtype})")
    numel = torch.Size(shape).numel()
    expected = (numel + TILE - 1) // TILE
    if words.shape != (expected,) or words.dtype != torch.int64:
        raise ValueError(
            f"Expected {expected} words of int64 for shape {[*shape]} "
            f"(got {[*words.shape]} of {words.dtype})"
        )
    unpacked: Tensor = cpu.operators_for(words).unpack_bits(
        words, [*shape], float(low), float(high), dtype
    )
    return unpacked


def _check_dense(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected a tensor (got {type(x).__name__})")
    if x.layout != torch.strided:
        raise TypeError(f"Expected a strided tensor (got {x.layout})")


def _check_numbers(**numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"Expected {name} to be a number (got {type(value).__name__})")
