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

The same codes have a second reading, for which the noise is made anew from its seed:

.. math::
    \hat{x}' = lo + step \cdot (\mathrm{code} + 1 - 2u), \qquad
    E[\hat{x}'] = x, \qquad E[\hat{x} \hat{x}'] = x^2.

With f the fraction that rounding decides on, the product of two first readings is
:math:`step^2 f (1 - f)` too large on average, and :math:`2u` takes just that away. The variance of
the second reading is :math:`step^2 (1/3 - f (1 - f))`: on average over all f as large as that of
the first one. So where backward multiplies what it reads of a tensor in two places, each takes a
reading of its own, and the gradient is right on average, at no memory.

A reader who is alone takes a mean of both, of which the second has a share a. As their noises have
no covariance, its variance is least where a is the first one's part of both variances:

.. math::
    \hat{x} + a (\hat{x}' - \hat{x}), \qquad a = 3 E[f (1 - f)], \qquad
    \mathrm{Var} = step^2 a (1 - a) / 3.

That is half the variance of the first reading where f is uniform, and less gain where many elements
are the minimum of their group, whose first reading is exact.

Format: ``codes`` [ceil(numel / 64), bits] int64 holds, for each tile of 64 elements, one word a
bit plane (bit i of word p is bit p of element i's code); ``stats`` [ceil(numel / group_size), 2]
bfloat16 holds lo and step of each group. A group of equal elements has step 0 and keeps its value,
as a float64, in its first word: it comes back exactly. A step below 2^-110 is raised to it. float64
is coded through float32.

A group that holds NaN or Inf (a float64 beyond the largest float32 counts as Inf), or whose lo or
step is beyond the largest bfloat16, has NaN for both, and its elements are kept as they are:
``groups`` [K] int64 holds the numbers of such groups, ascending, and ``values``
[K, min(group_size, numel)], of the tensor's dtype, their elements; the last group is filled up with
the tensor's last element. A tensor without such a group has neither. On CUDA their number could be
known only by waiting for the device: there each tensor has room for :func:`room_of` of them, free
places hold the number of all groups, and what finds no room comes back as NaN, never as a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from gact_graph.ops import cpu, cuda
from gact_graph.ops.checks import TILE, check_quantization
from gact_graph.ops.reference import quantize as reference

WIDTHS = (*range(1, 17), 32)
"""Bits an element that can be asked for. 32 keeps the tensor as it is."""

_SAMPLED = 64
"""Groups by which the share of the second reading is chosen: with 256 elements each, the share is
off by less than a hundredth, and the variance by far less, as it is least there."""

MOST_IN_GROUP = 2**20
"""Elements of the largest group. Its statistics are nothing beside its codes long before that."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

torch.library.define(
    "gact_graph::pack", "(Tensor x, int bits, int group_size, int seed) -> (Tensor, Tensor)"
)
torch.library.define(
    "gact_graph::exact_groups", "(Tensor x, Tensor stats, int group_size) -> (Tensor, Tensor)"
)
torch.library.define(
    "gact_graph::unpack",
    "(Tensor codes, Tensor stats, int[] shape, int bits, int group_size, ScalarType dtype,"
    " Tensor? groups=None, Tensor? values=None, int? seed=None) -> Tensor",
)
torch.library.define(
    "gact_graph::unpack_rows",
    "(Tensor codes, Tensor stats, Tensor rows, int numel, int width, int bits, int group_size,"
    " ScalarType dtype, Tensor? groups=None, Tensor? values=None, int? seed=None) -> Tensor",
)
torch.library.impl("gact_graph::pack", "default", reference.pack)
torch.library.impl("gact_graph::exact_groups", "default", reference.exact_groups)
torch.library.impl("gact_graph::unpack", "default", reference.unpack)
torch.library.impl("gact_graph::unpack_rows", "default", reference.unpack_rows)


@torch.library.impl("gact_graph::pack", "cpu")
def _pack_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    return (cpu.load() or reference).pack(*args)


@torch.library.impl("gact_graph::exact_groups", "cpu")
def _exact_groups_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    return (cpu.load() or reference).exact_groups(*args)


@torch.library.impl("gact_graph::unpack", "cpu")
def _unpack_cpu(*args: Any) -> Tensor:
    return (cpu.load() or reference).unpack(*args)


@torch.library.impl("gact_graph::unpack_rows", "cpu")
def _unpack_rows_cpu(*args: Any) -> Tensor:
    return (cpu.load() or reference).unpack_rows(*args)


@torch.library.impl("gact_graph::pack", "cuda")
def _pack_cuda(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return (cuda.load(x.device) or reference).pack(x, *args)


@torch.library.impl("gact_graph::exact_groups", "cuda")
def _exact_groups_cuda(x: Tensor, stats: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    return reference.exact_groups(x, stats, group_size, room_of(stats.size(0)))


@torch.library.impl("gact_graph::unpack", "cuda")
def _unpack_cuda(codes: Tensor, *args: Any) -> Tensor:
    return (cuda.load(codes.device) or reference).unpack(codes, *args)


@torch.library.impl("gact_graph::unpack_rows", "cuda")
def _unpack_rows_cuda(codes: Tensor, *args: Any) -> Tensor:
    return (cuda.load(codes.device) or reference).unpack_rows(codes, *args)


@torch.library.register_fake("gact_graph::pack")
def _pack_fake(x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    check_quantization(bits, group_size)
    n = x.numel()
    codes = x.new_empty((n + TILE - 1) // TILE, bits, dtype=torch.int64)
    return codes, x.new_empty((n + group_size - 1) // group_size, 2, dtype=torch.bfloat16)


@torch.library.register_fake("gact_graph::exact_groups")
def _exact_groups_fake(x: Tensor, stats: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    count: Any = 0
    if not x.is_meta:  # a size can be left open for fake tensors alone
        with contextlib.suppress(DynamicOutputShapeException):
            count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(count, dtype=torch.int64), x.new_empty(count, min(group_size, x.numel()))


@torch.library.register_fake("gact_graph::unpack")
def _unpack_fake(
    codes: Tensor,
    stats: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    groups: Tensor | None = None,
    values: Tensor | None = None,
    seed: int | None = None,
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
    groups: Tensor | None = None,
    values: Tensor | None = None,
    seed: int | None = None,
) -> Tensor:
    return codes.new_empty((rows.size(0), width), dtype=dtype)


def room_of(groups: int) -> int:
    """How many of so many groups a tensor on CUDA has room for that the codes cannot tell.

    A thousandth of them: with groups of 256 float32 numbers that is 1/32 bit an element.
    """
    return min(groups, 4 + groups // 1024)


@dataclass(frozen=True)
class Packed:
    """A quantized tensor. ``stats`` is None where the tensor was kept as it is, in ``codes``.

    ``seed`` is that of the noise, and ``second`` tells which reading :meth:`unpack` and
    :meth:`unpack_rows` give.
    """

    codes: Tensor
    stats: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    group_size: int
    groups: Tensor | None = None
    values: Tensor | None = None
    seed: int | None = None
    second: bool = False

    def reread(self) -> Packed:
        """The same tensors, decoded in the second reading."""
        return dataclasses.replace(self, second=True)

    def share_of_second(self, x: Tensor) -> Tensor:
        """The second reading's share of the mean of both that has the least variance, [] float32.

        Args:
            x: What was packed, contiguous.
        """
        assert self.stats is not None
        size = min(self.group_size, x.numel())
        whole = x.numel() // size
        every = -(-whole // _SAMPLED)
        values = x.view(-1)[: whole * size].view(whole, size)[::every].float()
        # Equal elements have a step of 0, and groups that are kept as they are have none.
        low, step = self.stats[:whole:every].float().nan_to_num_(0.0).unbind(1)
        fraction = ((values - low[:, None]) / step[:, None]).nan_to_num_(0.0, 0.0, 0.0).frac_()
        square = (step / step.amax()).square()
        variance = (fraction * (1 - fraction)).mean(1) * square
        return (3 * variance.sum() / square.sum()).nan_to_num(0.0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        held = self.codes, self.stats, self.groups, self.values
        return tuple(tensor for tensor in held if tensor is not None)

    def moved(self, *tensors: Tensor) -> Packed:
        """The same with others in the place of :attr:`tensors`, in that order."""
        codes, stats, groups, values = (*tensors, None, None, None)[:4]
        assert codes is not None
        return dataclasses.replace(self, codes=codes, stats=stats, groups=groups, values=values)

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors hold."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def unpack(self) -> Tensor:
        """The decoded tensor, of the shape, dtype and device that was packed.

        It is new and contiguous, except where the tensor was kept: then it is that one.
        """
        if self.stats is None:
            return self.codes
        operators = cpu.operators_for(self.codes)
        unpacked: Tensor = operators.unpack(self.codes, self.stats, self.shape, *self._format)
        return unpacked

    def unpack_both(self, share: Tensor) -> Tensor:
        """The mean of both readings, new and contiguous, of a tensor that was not kept.

        Args:
            share: Of the second one, as :meth:`share_of_second` gives it.
        """
        first = dataclasses.replace(self, second=False).unpack()
        return first.lerp_(self.reread().unpack(), share.to(first.dtype))

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
        unpacked: Tensor = cpu.operators_for(self.codes).unpack_rows(
            self.codes, self.stats, rows, self.shape.numel(), width, *self._format
        )
        return unpacked

    @property
    def _format(self) -> tuple[int, int, torch.dtype, Tensor | None, Tensor | None, int | None]:
        """How to read the codes: the last arguments of both operators that decode them."""
        seed = self.seed if self.second else None
        return self.bits, self.group_size, self.dtype, self.groups, self.values, seed


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
    """Raises TypeError or ValueError unless ``group_size`` is a multiple of a tile in range."""
    check_int("group_size", group_size)
    if not 0 < group_size <= MOST_IN_GROUP or group_size % TILE:
        raise ValueError(
            f"Expected group_size to be at most {MOST_IN_GROUP} and a positive multiple of "
            f"{TILE} (got {group_size})"
        )


def pack(x: Tensor, bits: int, *, group_size: int = 256, seed: int = 0) -> Packed:
    """Quantizes ``x`` to ``bits`` an element.

    Args:
        x: Floating-point tensor of any shape and strides: float16, bfloat16, float32 or float64.
            One that is not contiguous is copied first. It is not changed.
        bits: 1 to 16, or 32. A width that is no narrower than the element itself keeps the tensor.
        group_size: Elements that share lo and step; a multiple of 64, at most 2^20.
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
    operators = cpu.operators_for(x)
    codes, stats = operators.pack(x, bits, group_size, signed)
    packed = Packed(codes, stats, x.shape, x.dtype, bits, group_size, seed=signed)
    groups, values = operators.exact_groups(x, stats, group_size)
    return packed if not len(groups) else dataclasses.replace(packed, groups=groups, values=values)
