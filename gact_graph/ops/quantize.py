r"""The quantizer: an unbiased encoding of a floating-point tensor in a few bits per element.

For each group of ``group_size`` consecutive elements (the last may be short) with minimum
:math:`m` and maximum :math:`M`, and for a width of :math:`b` bits,

.. math::
    \mathrm{code} = \lfloor (x - lo) / step + u \rfloor, \qquad
    \hat{x} = lo + step \cdot \mathrm{code}, \qquad
    step = (M - lo) / (2^b - 1),

with :math:`lo = m` rounded down to bfloat16, :math:`step` rounded up to bfloat16, and noise
:math:`u` uniform in [0, 1): stochastic rounding, so :math:`E[\hat{x}] = x`, up to the rounding of
:math:`\hat{x}` to the dtype of the tensor, and
:math:`\mathrm{Var}[\hat{x}] \le step^2 / 4` (GACT, ICML 2022, section 3.2, assumptions B1 and B2).

**Decorrelated decoding.** The same codes have a second decoding, which generates the noise again
from its seed:

.. math::
    \hat{x}' = lo + step \cdot (\mathrm{code} + 1 - 2u), \qquad
    E[\hat{x}'] = x, \qquad E[\hat{x} \hat{x}'] = x^2.

Let f be the fraction that rounding decides on. The product of two plain decodings is
:math:`step^2 f (1 - f)` too large on average, and the term :math:`2u` cancels that. The variance of
the decorrelated decoding is :math:`step^2 (1/3 - f (1 - f))`, on average over all f that of the
plain one. If backward multiplies two values of one tensor, each takes another decoding, so the
gradient is unbiased at no memory.

**Minimum-variance decoding.** If backward reads a tensor once, it takes a weighted mean of both
decodings, which have no covariance. The variance is least where the weight a of the decorrelated
decoding is the plain one's part of both variances:

.. math::
    \hat{x} + a (\hat{x}' - \hat{x}), \qquad a = 3 E[f (1 - f)], \qquad
    \mathrm{Var} = step^2 a (1 - a) / 3.

That is half the variance of the plain decoding where f is uniform. It gains less where many
elements are the minimum of their group, whose plain decoding is exact.

**Format.** ``codes`` [ceil(numel / 64), bits] int64 holds one word per bit plane for each tile of
64 elements: bit i of word p is bit p of element i's code. ``stats`` [ceil(numel / group_size), 2]
bfloat16 holds lo and step of each group. A group of equal elements has step 0 and its value, as a
float64, in its first word, so it decodes exactly. A step below 2^-110 is raised to it. float64 is
encoded through float32.

**Widths of groups.** Each group may have its own width (:class:`Widths`). ``codes`` [words] int64
then holds the words of one tile after another, b per tile in a group of width b. Each group has the
words that it has in a tensor of that width. The number of a group's first word is the sum over the
groups before it and is not stored.

**Exact groups.** A group that holds NaN or Inf (a float64 beyond the largest float32 counts as
Inf), or whose lo or step is beyond the largest bfloat16, has NaN for both, and its elements are
kept unencoded: ``groups`` [K] int64 holds the numbers of such groups in ascending order, and
``values`` [K, min(group_size, numel)], of the tensor's dtype, their elements; the last group is
padded with the tensor's last element. A tensor without such a group has neither. On CUDA, counting
the groups would wait for the device, so K is fixed
(:func:`gact_graph.ops.reference.quantize.exact_group_capacity`): unused entries hold the number of
all groups, and groups beyond K decode to NaN, never to a number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gact_graph.ops.checks import DTYPES as DTYPES
from gact_graph.ops.checks import MOST_BITS, TILE, check_tensor, count_words
from gact_graph.ops.reference import quantize as reference
from gact_graph.ops.registration import dispatched

WIDTHS = (*range(1, 17), 32)
"""The supported numbers of bits per element. 32 keeps the tensor itself."""

_SAMPLED = 64
"""Groups that are sampled for the weight of the decorrelated decoding. With 256 elements each, the
weight is off by less than a hundredth, and the variance, which is at its minimum, by far less."""

MOST_IN_GROUP = 2**20
"""Elements of the largest group. The size of statistics is negligible long before that."""

_pack = dispatched(reference.pack)
_exact_groups = dispatched(reference.exact_groups)
_group_ranges = dispatched(reference.group_ranges)
_weight = dispatched(reference.decorrelated_weight)
_unpack = dispatched(reference.unpack)
_unpack_rows = dispatched(reference.unpack_rows)


class Channels(NamedTuple):
    """Statistics to normalize a tensor with.

    Element i is of channel i / ``inner``, modulo the number of channels.

    Attributes:
        statistics: The mean and the deviation of each channel, float32 [2, channels].
        inner: Consecutive elements of a channel.
    """

    statistics: Tensor
    inner: int


@dataclass(frozen=True)
class Widths:
    """The width of each group of a tensor.

    Tensors with the same number of elements may share it. ``widths`` must not change until all of
    them are decoded.

    Attributes:
        widths: Bits per element of each group, 1 to 16, uint8 [ceil(numel / group_size)], on the
            tensor's device.
        words: The number of words of the codes, which the host must know to allocate them. On a GPU
            it may be larger than the widths need.
    """

    widths: Tensor
    words: int

    @classmethod
    def of(cls, widths: Tensor, numel: int, group_size: int = 256) -> Widths:
        """Return the widths of a tensor's groups. Waits for the device.

        Args:
            widths: The attribute of that name.
            numel: The number of the tensor's elements.
            group_size: Elements per group.

        Raises:
            TypeError: If ``group_size`` is not an int.
            ValueError: If ``widths`` has another dtype or shape or is not contiguous, or a width or
                ``group_size`` is out of range.
        """
        check_group_size(group_size)
        check_tensor("widths", widths, torch.uint8, [-(-numel // group_size)], widths.device)
        if not numel:
            return cls(widths, 0)
        counts = *map(Tensor.long, widths.aminmax()), count_words(widths, numel, group_size)
        least, most, words = torch.stack(counts).tolist()
        for wrong in {least, most} - {*range(1, MOST_BITS + 1)}:
            raise ValueError(f"Expected widths from 1 to {MOST_BITS} (got {wrong})")
        return cls(widths, words)


@dataclass(frozen=True)
class Packed:
    """A quantized tensor.

    Attributes:
        codes: The codes; the tensor itself if it was kept unencoded.
        stats: The statistics of groups; None if the tensor was kept unencoded.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        bits: Bits per element, unless ``widths`` has them.
        group_size: Elements per group.
        groups: The numbers of the exact groups; None if there are none.
        values: The elements of the exact groups; None if there are none.
        seed: The seed of the noise.
        decorrelate: Whether :meth:`unpack` and :meth:`unpack_rows` give the decorrelated decoding.
        widths: The widths of the groups; None if all have ``bits``.
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
    decorrelate: bool = False
    widths: Widths | None = None

    def decorrelated(self) -> Packed:
        """Return the same tensors with the decorrelated decoding."""
        return dataclasses.replace(self, decorrelate=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The codes and, where present, the stats, groups, values and widths."""
        widths = None if self.widths is None else self.widths.widths
        tensors = self.codes, self.stats, self.groups, self.values, widths
        return tuple(tensor for tensor in tensors if tensor is not None)

    def moved(self, *tensors: Tensor) -> Packed:
        """Return a copy with other tensors in place of :attr:`tensors`, in that order."""
        rest = iter(tensors)
        names = "codes", "stats", "groups", "values"
        parts: dict[str, Any] = {n: next(rest) for n in names if getattr(self, n) is not None}
        if self.widths is not None:
            parts["widths"] = dataclasses.replace(self.widths, widths=next(rest))
        return dataclasses.replace(self, **parts)

    @property
    def nbytes(self) -> int:
        """The bytes of :attr:`tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def unpack(self) -> Tensor:
        """Return the decoded tensor, of the original shape, dtype and device.

        It is new and contiguous, unless the tensor was kept unencoded.
        """
        if self.stats is None:
            return self.codes
        return _unpack(self.codes, self.stats, [*self.shape], *self._format)

    def unpack_min_variance(self, weight: Tensor) -> Tensor:
        """Return the minimum-variance decoding, new and contiguous.

        Args:
            weight: The weight from :func:`decorrelated_weight`.
        """
        if self.stats is None:
            return self.codes
        if self.dtype == torch.float32:
            form = *self.decorrelated()._format, weight.view(1)
            return _unpack(self.codes, self.stats, [*self.shape], *form)
        plain = dataclasses.replace(self, decorrelate=False).unpack()
        other = self.decorrelated().unpack()
        return reference.mean_of_decodings(plain, other, weight.to(plain.dtype))

    def unpack_rows(self, rows: Tensor, width: int) -> Tensor:
        """Return some rows of the decoded tensor seen as [numel / width, width].

        Args:
            rows: The row numbers [R], int64, in any order, duplicates allowed.
            width: Elements per row.

        Returns:
            The rows [R, width], new and contiguous, of the original dtype and device.
        """
        if self.stats is None:
            return self.codes.reshape(-1, width)[rows]
        return _unpack_rows(self.codes, self.stats, rows, self.shape.numel(), width, *self._format)

    @property
    def _format(self) -> tuple[Any, ...]:
        """The last arguments of both operators that decode."""
        seed = self.seed if self.decorrelate else None
        widths = None if self.widths is None else self.widths.widths
        exact = self.groups, self.values
        return self.bits, self.group_size, self.dtype, *exact, seed, widths


def check_int(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is an int and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected {name} to be an int (got {type(value).__name__})")


def check_bits(bits: int, name: str = "bits") -> None:
    """Raise TypeError or ValueError unless ``bits`` is one of :data:`WIDTHS`."""
    check_int(name, bits)
    if bits not in WIDTHS:
        raise ValueError(f"Expected {name} to be 1 to 16, or 32 for no quantization (got {bits})")


def check_group_size(group_size: int) -> None:
    """Raise TypeError or ValueError unless ``group_size`` is a multiple of a tile in range."""
    check_int("group_size", group_size)
    if not 0 < group_size <= MOST_IN_GROUP or group_size % TILE:
        raise ValueError(
            f"Expected group_size to be at most {MOST_IN_GROUP} and a positive multiple of "
            f"{TILE} (got {group_size})"
        )


def pack(
    x: Tensor, bits: int, *, group_size: int = 256, seed: int = 0, widths: Widths | None = None
) -> Packed:
    """Quantize ``x`` to ``bits`` per element.

    Args:
        x: A tensor of float16, bfloat16, float32 or float64, of any shape and strides. A tensor
            that is not contiguous is copied first.
        bits: 1 to 16, or 32. A width no narrower than the element keeps the tensor unencoded.
        group_size: Elements that share lo and step; a multiple of 64, at most 2^20.
        seed: Any int, modulo 2^64. The noise is a function of the seed and the element's index.
            The low 48 bits choose the noise; the high 16 bits, as a fraction, are added modulo 1.
        widths: The width of each group; ``bits`` then only decides whether the tensor is kept
            unencoded. None for ``bits``.

    Raises:
        TypeError: If ``bits``, ``group_size`` or ``seed`` is not an int.
        ValueError: If ``x`` is not a dense floating-point tensor; if ``bits`` or ``group_size`` is
            out of range; or if ``widths`` is not uint8, or has another number of groups or device,
            or (on the CPU) another number of words.
    """
    check_bits(bits)
    check_group_size(group_size)
    check_int("seed", seed)
    x = x.detach()
    if bits == 32 or bits >= 8 * x.element_size():
        return Packed(x, None, x.shape, x.dtype, bits, group_size)
    of_groups: tuple[Any, ...] = ()
    if widths is not None:
        check_tensor("widths", widths.widths, torch.uint8, [-(-x.numel() // group_size)], x.device)
        of_groups = widths.widths, widths.words
    signed = _signed(seed)
    codes, stats = _pack(x, bits, group_size, signed, *of_groups)
    packed = Packed(codes, stats, x.shape, x.dtype, bits, group_size, seed=signed, widths=widths)
    exact, values = _exact_groups(x, stats, group_size)
    return packed if not len(exact) else dataclasses.replace(packed, groups=exact, values=values)


def pack_channels(
    x: Tensor,
    channels: Channels,
    bits: int,
    *,
    group_size: int = 256,
    seed: int = 0,
    widths: Widths | None = None,
) -> Packed | None:
    """Quantize (x - mean) / deviation, of which no tensor is made on a CPU.

    Args:
        x: A tensor of float16, bfloat16, float32 or float64.
        channels: The mean and deviation of each channel.
        bits, group_size, seed, widths: As for :func:`pack`, where ``bits`` is at most 16.

    Returns:
        Codes of the normalized tensor, of float32. None if it has NaN or Inf. On CUDA, to find out
        would wait for the device: such groups then decode to NaN.

    Raises:
        ValueError: If the channels do not divide the tensor.
    """
    check_bits(bits)
    check_group_size(group_size)
    x, signed = x.detach(), _signed(seed)
    own, words = (None, 0) if widths is None else (widths.widths, widths.words)
    codes, stats = _pack(x, bits, group_size, signed, own, words, *channels)
    if stats.device.type != "cuda" and bool(stats[:, 1].isnan().any()):
        return None
    return Packed(
        codes, stats, x.shape, torch.float32, bits, group_size, seed=signed, widths=widths
    )


def decorrelated_weight(x: Tensor, packed: Packed, channels: Channels | None = None) -> Tensor:
    """Return the weight of the decorrelated decoding in :meth:`Packed.unpack_min_variance`.

    Args:
        x: The packed tensor, not empty.
        packed: The codes.
        channels: Those that it was packed with.

    Returns:
        A float32 tensor [1].
    """
    assert packed.stats is not None
    return _weight(x.detach(), packed.stats, packed.group_size, _SAMPLED, *(channels or ()))


def group_ranges(x: Tensor, group_size: int, channels: Channels | None = None) -> Tensor:
    """Return the maximum minus the minimum of each whole group, float32 [numel // group_size].

    It is NaN where it is not finite.

    Args:
        x: A tensor of float16, bfloat16, float32 or float64.
        group_size: Elements per group.
        channels: Those to normalize ``x`` with before; None for ``x`` itself.
    """
    return _group_ranges(x.detach(), group_size, *(channels or ()))


def _signed(seed: int) -> int:
    """Return a seed as the operators take it: a signed 64-bit number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
