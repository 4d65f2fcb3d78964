r"""The quantizer: a floating-point tensor as a few bits an element, unbiased.

For each group of ``group_size`` consecutive elements (the last may be short) with minimum
:math:`m` and maximum :math:`M`, and for a width of :math:`b` bits,

.. math::
    \mathrm{code} = \lfloor (x - lo) / step + u \rfloor, \qquad
    \hat{x} = lo + step \cdot \mathrm{code}, \qquad
    step = (M - lo) / (2^b - 1),

with :math:`lo = m` rounded down to bfloat16, :math:`step` rounded up to bfloat16, and noise
:math:`u` uniform in [0, 1): stochastic rounding, so :math:`E[\hat{x}] = x` and
:math:`\mathrm{Var}[\hat{x}] \le step^2 / 4` (GACT, ICML 2022, section 3.2, assumptions B1 and B2).

Format: ``codes`` [ceil(numel / 64), bits] int64 holds, for each tile of 64 elements, one word a
bit plane (bit i of word p is bit p of element i's code); ``stats`` [ceil(numel / group_size), 2]
bfloat16 holds lo and step of each group. A group of equal elements has step 0 and keeps its value,
as a float64, in its first word: it comes back exactly. A step below 2^-110 is raised to it. A
group that holds NaN or Inf, or whose lo or step is beyond the largest bfloat16, has NaN for both
and comes back as NaN. float64 is coded through float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.kernels import cpu, cuda, reference

WIDTHS = (*range(1, 17), 32)
"""Bits an element that can be asked for. 32 keeps the tensor as it is."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

torch.library.define(
    "gact_graph::pack", "(Tensor x, int bits, int group_size, int seed) -> (Tensor, Tensor)"
)
torch.library.define(
    "gact_graph::unpack",
    "(Tensor codes, Tensor stats, int[] shape, int bits, int group_size, ScalarType dtype)"
    " -> Tensor",
)
torch.library.define(
    "gact_graph::unpack_rows",
    "(Tensor codes, Tensor stats, Tensor rows, int numel, int width, int bits, int group_size,"
    " ScalarType dtype) -> Tensor",
)
torch.library.impl("gact_graph::pack", "default", reference.pack)
torch.library.impl("gact_graph::unpack", "default", reference.unpack)
torch.library.impl("gact_graph::unpack_rows", "default", reference.unpack_rows)


@torch.library.impl("gact_graph::pack", "cpu")
def _pack_cpu(x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    return (cpu.load() or reference).pack(x, bits, group_size, seed)


@torch.library.impl("gact_graph::unpack", "cpu")
def _unpack_cpu(
    codes: Tensor, stats: Tensor, shape: list[int], bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return (cpu.load() or reference).unpack(codes, stats, shape, bits, group_size, dtype)


@torch.library.impl("gact_graph::unpack_rows", "cpu")
def _unpack_rows_cpu(codes: Tensor, *args: Any) -> Tensor:
    return (cpu.load() or reference).unpack_rows(codes, *args)


@torch.library.impl("gact_graph::pack", "cuda")
def _pack_cuda(x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    return (cuda.load(x.device) or reference).pack(x, bits, group_size, seed)


@torch.library.impl("gact_graph::unpack", "cuda")
def _unpack_cuda(
    codes: Tensor, stats: Tensor, shape: list[int], bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    kernels = cuda.load(codes.device) or reference
    return kernels.unpack(codes, stats, shape, bits, group_size, dtype)


@torch.library.impl("gact_graph::unpack_rows", "cuda")
def _unpack_rows_cuda(codes: Tensor, *args: Any) -> Tensor:
    return (cuda.load(codes.device) or reference).unpack_rows(codes, *args)


@torch.library.register_fake("gact_graph::pack")
def _pack_fake(x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    codes = x.new_empty((n + reference.TILE - 1) // reference.TILE, bits, dtype=torch.int64)
    return codes, x.new_empty((n + group_size - 1) // group_size, 2, dtype=torch.bfloat16)


@torch.library.register_fake("gact_graph::unpack")
def _unpack_fake(
    codes: Tensor, stats: Tensor, shape: list[int], bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


@torch.library.register_fake("gact_graph::unpack_rows")
def _unpack_rows_fake(
    codes: Tensor,
    stats: Tensor,
    rows: Tensor,
    numel: int,
    width: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((rows.size(0), width), dtype=dtype)


@dataclass(frozen=True)
class Packed:
    """A quantized tensor. ``stats`` is None where the tensor was kept as it is, in ``codes``."""

    codes: Tensor
    stats: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes that codes and stats hold."""
        return self.codes.nbytes + (0 if self.stats is None else self.stats.nbytes)

    def unpack(self) -> Tensor:
        """The decoded tensor, of the shape, dtype and device that was packed.

        It is new and contiguous, except where the tensor was kept: then it is that one.
        """
        if self.stats is None:
            return self.codes
        unpacked: Tensor = torch.ops.gact_graph.unpack(
            self.codes, self.stats, self.shape, self.bits, self.group_size, self.dtype
        )
        return unpacked

    def unpack_rows(self, rows: Tensor, width: int) -> Tensor:
        """Some rows of the decoded tensor seen as [numel / width, width], without the others.

        Args:
            rows: Their numbers [R], int64, from 0 on; any order, any of them several times.
            width: Elements a row.

        Returns:
            [R, width], new and contiguous, of the dtype and device that was packed; where the
            tensor was kept, rows of that one.
        """
        if self.stats is None:
            return self.codes.reshape(-1, width)[rows]
        unpacked: Tensor = torch.ops.gact_graph.unpack_rows(
            self.codes,
            self.stats,
            rows,
            self.shape.numel(),
            width,
            self.bits,
            self.group_size,
            self.dtype,
        )
        return unpacked


def check_int(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is an int; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected {name} to be an int (got {type(value).__name__})")


def check_bits(bits: int) -> None:
    """Raises TypeError or ValueError unless ``bits`` is one of :data:`WIDTHS`."""
    check_int("bits", bits)
    if bits not in WIDTHS:
        raise ValueError(f"Expected bits to be 1 to 16, or 32 for no quantization (got {bits})")


def check_group_size(group_size: int) -> None:
    """Raises TypeError or ValueError unless ``group_size`` is a positive multiple of a tile."""
    check_int("group_size", group_size)
    if group_size < reference.TILE or group_size % reference.TILE:
        raise ValueError(
            f"Expected group_size to be a positive multiple of {reference.TILE} (got {group_size})"
        )


def pack(x: Tensor, bits: int, *, group_size: int = 256, seed: int = 0) -> Packed:
    """Quantizes ``x`` to ``bits`` an element.

    Args:
        x: Floating-point tensor of any shape and strides: float16, bfloat16, float32 or float64.
            One that is not contiguous is copied first. It is not changed.
        bits: 1 to 16, or 32. A width that is no narrower than the element itself keeps the tensor.
        group_size: Elements that share lo and step; a multiple of 64.
        seed: Any int; it counts modulo 2^64. The noise is a function of it and the element's index
            alone.

    Raises:
        TypeError: ``x`` is no dense floating-point tensor, or ``bits``, ``group_size`` or ``seed``
            no int.
        ValueError: ``bits`` or ``group_size`` is out of range.
    """
    check_bits(bits)
    check_group_size(group_size)
    check_int("seed", seed)
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected a tensor (got {type(x).__name__})")
    if x.layout != torch.strided:
        raise TypeError(f"Expected a strided tensor (got {x.layout})")
    if x.dtype not in DTYPES:
        raise TypeError(f"Expected a float16, bfloat16, float32 or float64 tensor (got {x.dtype})")
    x = x.detach()
    if bits == 32 or bits >= 8 * x.element_size():
        return Packed(x, None, x.shape, x.dtype, bits, group_size)
    # The operators take a signed 64-bit number.
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    codes, stats = torch.ops.gact_graph.pack(x, bits, group_size, signed)
    return Packed(codes, stats, x.shape, x.dtype, bits, group_size)
