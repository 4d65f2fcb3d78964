"""The quantizer in pure torch: see :mod:`gact_graph.ops.quantize` for the format.

Each step is one IEEE float32 operation or integer arithmetic, so every backend can give the same
bytes.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops.checks import (
    MOST_BITS,
    TILE,
    check_elements,
    check_packed,
    check_quantization,
    check_range,
    check_rows,
    check_tensor,
    check_weight,
    check_widths,
    checked_numel,
    clamp_group_size,
)
from gact_graph.ops.registration import operator
from gact_graph.support.torch_private import DynamicOutputShapeException

# Elements of a slice that is processed at a time, so that int64 temporaries stay small beside the
# tensor.
_SLICE = 1 << 22
_LOW32 = 0xFFFFFFFF
_FLOAT32_MAX = torch.finfo(torch.float32).max
# The smallest step whose reciprocal, times the 2^16 grains of the noise, is in float32's range.
_SMALLEST_STEP = 2.0**-110


def fraction_bits(bits: Tensor) -> Tensor:
    """Return the bits of noise below the code: the rest of a float32's 24 bits, at most 16."""
    return (24 - bits).clamp_(max=16)


def first_words(widths: Tensor, group_size: int) -> Tensor:
    """Return the words before each group [ceil(numel / group_size)], int64."""
    return (widths.cumsum(0, dtype=torch.int64) - widths) * (group_size // TILE)


class _Layout:
    """The places of the words of each tile.

    Args:
        bits: The width of all groups; unused with ``widths``.
        widths: As for :func:`pack`.
    """

    def __init__(self, bits: int, group_size: int, widths: Tensor | None) -> None:
        self.group_size = group_size
        # The most that is known without waiting for the device.
        self.planes = bits if widths is None else MOST_BITS
        self._groups = None if widths is None else (first_words(widths, group_size), widths.long())

    def of(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first word and the number of words of each tile."""
        if self._groups is None:
            return tile * self.planes, torch.full_like(tile, self.planes)
        size = self.group_size // TILE
        first, width = (of_groups[tile // size] for of_groups in self._groups)
        return first + tile % size * width, width


@operator()
def pack(
    x: Tensor,
    bits: int,
    group_size: int,
    seed: int,
    widths: Tensor | None = None,
    words: int = 0,
    channels: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return codes [ceil(numel / 64), bits] (int64) and stats [ceil(numel / group_size), 2].

    Args:
        bits: The width of all groups; unused with ``widths``.
        widths: The width of each group [ceil(numel / group_size)] (uint8); None for ``bits``.
        words: The number of words with ``widths``; the codes are then [words].
        channels, inner: As for :func:`normalized`, of which the result is packed.
    """
    check_elements(x, bits, group_size)
    flat = normalized(x.detach(), channels, inner).contiguous().view(-1)
    n = flat.numel()
    if widths is not None:
        check_widths(widths, words, n, group_size, x.device)
    group_size = clamp_group_size(group_size, n)
    shape = [-(-n // TILE), bits] if widths is None else [words]
    codes = torch.empty(shape, dtype=torch.int64, device=x.device)
    stats = torch.empty(-(-n // group_size), 2, dtype=torch.bfloat16, device=x.device)
    layout = _Layout(bits, group_size, widths)
    stride = max(1, _SLICE // group_size) * group_size
    for start in range(0, n, stride):
        part = flat[start : start + stride]
        pairs = _pack_slice(part, layout, seed, start, codes.view(-1))
        stats[start // group_size : start // group_size + len(pairs)] = pairs
    return codes, stats


@torch.library.register_fake("gact_graph::pack")
def _pack_fake(
    x: Tensor,
    bits: int,
    group_size: int,
    seed: int,
    widths: Tensor | None = None,
    words: int = 0,
    *others: object,
) -> tuple[Tensor, Tensor]:
    check_quantization(bits, group_size)
    n = x.numel()
    shape = ((n + TILE - 1) // TILE, bits) if widths is None else (words,)
    codes = x.new_empty(shape, dtype=torch.int64)
    return codes, x.new_empty((n + group_size - 1) // group_size, 2, dtype=torch.bfloat16)


def normalized(x: Tensor, channels: Tensor | None, inner: int) -> Tensor:
    """Return (x - mean) / deviation, flat and in float32; ``x`` itself without channels.

    Args:
        channels: The mean and the deviation of each channel, float32 [2, channels].
        inner: Consecutive elements of a channel: element i is of channel i / ``inner``, modulo the
            number of channels.
    """
    if channels is None:
        return x
    check_channels(x, channels, inner)
    mean, deviation = channels[:, :, None]
    return (x.reshape(-1, channels.size(1), inner).float() - mean).div_(deviation).view(-1)


def check_channels(x: Tensor, channels: Tensor, inner: int) -> None:
    """Raise an error unless channels are those of a tensor."""
    count = channels.size(-1) if channels.dim() else 0
    check_tensor("channels", channels, torch.float32, [2, count], x.device)
    if inner < 1 or not count or x.numel() % (inner * count):
        raise ValueError(
            f"Expected channels that divide {x.numel()} elements (got {count} of {inner})"
        )


@operator()
def group_ranges(
    x: Tensor, group_size: int, channels: Tensor | None = None, inner: int = 1
) -> Tensor:
    """Return the maximum minus the minimum of each whole group, float32 [numel // group_size].

    A range that is not finite is NaN.

    Args:
        channels, inner: As for :func:`normalized`, of which the groups are.
    """
    check_elements(x, 1, group_size)
    flat = normalized(x.detach(), channels, inner).contiguous().view(-1)
    whole = flat.numel() // group_size
    groups = flat[: whole * group_size].view(whole, group_size)
    # aminmax takes ten times as long.
    ranges = groups.amax(1).float() - groups.amin(1).float()
    return ranges.masked_fill_(~ranges.isfinite(), math.nan)


@torch.library.register_fake("gact_graph::group_ranges")
def _group_ranges_fake(x: Tensor, group_size: int, *others: object) -> Tensor:
    check_quantization(1, group_size)
    return x.new_empty(x.numel() // group_size, dtype=torch.float32)


@operator()
def decorrelated_weight(
    x: Tensor,
    stats: Tensor,
    group_size: int,
    groups: int,
    channels: Tensor | None = None,
    inner: int = 1,
) -> Tensor:
    """Return the weight of the decorrelated decoding in the one of minimum variance, float32 [1].

    Args:
        x: The packed tensor, not empty.
        stats: The stats that :func:`pack` returned for it.
        group_size: The group size that it was packed with.
        groups: About the number of groups that are sampled.
        channels, inner: As for :func:`pack`.
    """
    check_elements(x, 1, group_size)
    n = x.numel()
    check_tensor("stats", stats, torch.bfloat16, [-(-n // group_size), 2], x.device)
    if n < 1 or groups < 1:
        raise ValueError(f"Expected elements and groups (got {n} and {groups})")
    size = min(group_size, n)
    whole = n // size
    stride = -(-whole // groups)
    flat = normalized(x.detach(), channels, inner).contiguous().view(-1)
    values = flat[: whole * size].view(whole, size)[::stride].float()
    # Groups of equal elements have a step of 0, and exact groups have none.
    low, step = stats[:whole:stride].float().nan_to_num_(0.0).unbind(1)
    fraction = ((values - low[:, None]) / step[:, None]).nan_to_num_(0.0, 0.0, 0.0).frac_()
    square = (step / step.amax()).square()
    variance = (fraction * (1 - fraction)).mean(1) * square
    return (3 * variance.sum() / square.sum()).nan_to_num(0.0).view(1)


@torch.library.register_fake("gact_graph::decorrelated_weight")
def _decorrelated_weight_fake(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


@operator()
def exact_groups(x: Tensor, stats: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the groups without stats [K] (int64, ascending) and their elements.

    On CUDA, K is :func:`exact_group_capacity`.

    Args:
        x: The packed tensor.
        stats: The stats that :func:`pack` returned for it.
        group_size: The group size that it was packed with.

    Returns:
        The numbers [K], and the elements [K, min(group_size, numel)]. The last group is padded with
        its last element.
    """
    capacity = exact_group_capacity(len(stats)) if x.device.type == "cuda" else None
    return gather_exact_groups(x, stats, group_size, capacity)


@torch.library.register_fake("gact_graph::exact_groups")
def _exact_groups_fake(x: Tensor, stats: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    count: Any = 0
    if not x.is_meta:  # only fake tensors support a size that depends on data
        with contextlib.suppress(DynamicOutputShapeException):
            count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(count, dtype=torch.int64), x.new_empty(count, min(group_size, x.numel()))


def exact_group_capacity(groups: int) -> int:
    """Return the number of exact groups that a CUDA tensor of so many groups can hold.

    A thousandth of the groups: with groups of 256 float32 elements, 1/32 bit an element.
    """
    return min(groups, 4 + groups // 1024)


def gather_exact_groups(
    x: Tensor, stats: Tensor, group_size: int, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """Return the groups without stats, as :func:`exact_groups`.

    Args:
        capacity: K. If there are fewer such groups, the remaining numbers are the number of all
            groups; if there are more, the last are omitted. None for the number of such groups,
            which waits for the device.
    """
    check_elements(x, 1, group_size)
    n = x.numel()
    check_tensor("stats", stats, torch.bfloat16, [-(-n // group_size), 2], x.device)
    without = stats[:, 1].isnan()
    if capacity is None or not n:
        groups = without.nonzero().view(-1)
    else:
        groups = torch.nonzero_static(without, size=capacity, fill_value=len(without)).view(-1)
    lane = torch.arange(min(group_size, n), device=x.device)
    place = (groups[:, None] * group_size + lane).clamp_(max=max(n - 1, 0))
    return groups, x.detach().contiguous().view(-1)[place]


@operator()
def unpack(
    codes: Tensor,
    stats: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    groups: Tensor | None = None,
    values: Tensor | None = None,
    seed: int | None = None,
    widths: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the decoded tensor of ``shape`` and ``dtype``, contiguous.

    Args:
        seed: The seed of the noise for the decorrelated decoding; None for the plain one.
        widths: As for :func:`pack`.
        weight: The weight of the decorrelated decoding in its mean with the plain one, float32 [1],
            for a ``dtype`` of float32; None for 1, or for 0 without a seed.
    """
    if weight is not None:
        check_weight(weight, seed, dtype, codes.device)
        exact = groups, values
        plain, other = (
            unpack(codes, stats, shape, bits, group_size, dtype, *exact, s, widths)
            for s in (None, seed)
        )
        return mean_of_decodings(plain, other, weight)
    n = checked_numel(shape)
    check_packed(codes, stats, n, bits, group_size, dtype, groups, values, widths)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    flat = out.view(-1)
    layout = _Layout(bits, group_size, widths)
    stride = max(1, _SLICE // group_size) * group_size
    for start in range(0, n, stride):
        part = flat[start : start + stride]
        pairs = stats[start // group_size : -(-(start + len(part)) // group_size)]
        words = codes.view(-1)
        part.copy_(_unpack_slice(words, pairs, len(part), layout, dtype, seed, start))
    if groups is not None and values is not None and n:
        group = torch.arange(len(stats), device=codes.device)[stats[:, 1].isnan()]
        row, exists = _find(groups, group)
        group, row = group[exists], row[exists]
        lane = torch.arange(values.size(1), device=codes.device)
        place = group[:, None] * group_size + lane
        within = place < n
        flat[place[within]] = values[row][within]
    return out


def mean_of_decodings(plain: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of both decodings, where the weight [1] is that of the decorrelated one."""
    # In exact groups, both are the elements themselves, which may be infinite.
    return torch.where(other == plain, plain, (other - plain).mul_(weight).add_(plain))


@torch.library.register_fake("gact_graph::unpack")
def _unpack_fake(
    codes: Tensor,
    stats: Tensor,
    shape: list[int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    *others: object,
) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


@operator()
def unpack_rows(
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
    widths: Tensor | None = None,
) -> Tensor:
    """Return rows [len(rows), width] of the decoded tensor seen as [numel / width, width].

    Args:
        seed: As for :func:`unpack`.
        widths: As for :func:`pack`.
    """
    check_rows(rows, numel, width, codes.device)
    check_packed(codes, stats, numel, bits, group_size, dtype, groups, values, widths)
    check_range("rows", rows, numel // width - 1)
    out = torch.empty(len(rows), width, dtype=dtype, device=codes.device)
    words, layout = codes.view(-1), _Layout(bits, group_size, widths)
    stride = max(1, _SLICE // width)
    for start in range(0, len(rows), stride):
        part = rows[start : start + stride, None] * width
        index = (part + torch.arange(width, device=codes.device)).view(-1)
        lane, group = index % TILE, index // group_size
        place, own = layout.of(index // TILE)
        code = torch.zeros_like(index)
        for p in range(layout.planes):
            code |= ((words[_place(place, own, p)] >> lane) & 1) << p
        code &= (1 << own) - 1
        first, _ = layout.of(group * (group_size // TILE))
        pairs = stats[group]
        decoded = _decode(_level(code, index, own, seed), pairs, words[first], dtype)
        if groups is not None and values is not None and len(groups):
            row, exists = _find(groups, group)
            exact = values[row, index % group_size]
            decoded = torch.where(exists & pairs[:, 1].isnan(), exact, decoded)
        out[start : start + stride] = decoded.view(-1, width)
    return out


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
    *others: object,
) -> Tensor:
    return codes.new_empty((rows.size(0), width), dtype=dtype)


def _find(groups: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each number in ascending ``groups``, and whether it occurs there."""
    if not len(groups):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    row = torch.searchsorted(groups, wanted).clamp_(max=len(groups) - 1)
    return row, groups[row] == wanted


def noise16(index: Tensor, seed: int) -> Tensor:
    """Return 16 random bits for each element index (int64), as defined in ``csrc/noise.h``."""
    high = index >> 32
    first, second = torch.empty_like(index), torch.empty_like(index)
    for part in high.unique().tolist():  # one value, or two around a multiple of 2^32
        k = _noise_key(seed, part)
        first[high == part], second[high == part] = k & _LOW32, k >> 32
    h = (((index & _LOW32 & ~16) ^ first) * 0x9E3779B1) & _LOW32
    h = h ^ (h >> 15)
    h = ((h + second) * 0x85EBCA77) & _LOW32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE3D) & _LOW32
    h = h ^ (h >> 16)
    half = torch.where((index & 16) != 0, h >> 16, h & 0xFFFF)
    return (half + (seed >> 48)) & 0xFFFF


def _noise_key(seed: int, high: int) -> int:
    mask = (1 << 64) - 1
    z = ((seed & ((1 << 48) - 1)) + (high + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _pack_slice(x: Tensor, layout: _Layout, seed: int, start: int, words: Tensor) -> Tensor:
    """Write the words of the elements from ``start`` on; return their stats."""
    n, group_size = len(x), layout.group_size
    groups = -(-n // group_size)
    tile = torch.arange(start // TILE, -(-(start + n) // TILE), device=x.device)
    place, width = layout.of(tile)
    bits = width[:: group_size // TILE]
    top, fraction = (1 << bits) - 1, fraction_bits(bits)[:, None]
    # The last group is padded with its last element, which widens no range.
    padded = torch.cat([x, x[-1:].expand(groups * group_size - n)]).view(groups, group_size)
    values = padded.to(torch.float32)
    minimum, maximum = values.amin(1), values.amax(1)
    low = _round_to_bf16(minimum + 0.0, up=False)  # -0 becomes +0
    # Divided by a tensor: CUDA would multiply by the reciprocal of a number, which rounds twice.
    step = _round_to_bf16((maximum - low) / top.to(torch.float32), up=True)
    finite = values.isfinite().all(1)
    constant = finite & (minimum == maximum)
    # Near the largest numbers, rounding lo or step may give infinity.
    finite &= constant | step.isfinite()
    step = step.clamp(min=_SMALLEST_STEP).masked_fill(constant, 0.0)
    low, step = low.masked_fill(~finite, torch.nan), step.masked_fill(~finite, torch.nan)

    scale = (1.0 / step)[:, None] * (1 << fraction)
    fine = ((values - low[:, None]) * scale).round()
    plain = (finite & ~constant)[:, None]
    index = torch.arange(start, start + groups * group_size, device=x.device)
    noise = noise16(index, seed).view(groups, group_size) >> (16 - fraction)
    code = (torch.where(plain, fine, 0.0).to(torch.int64) + noise) >> fraction
    code = (torch.minimum(code, top[:, None]) * plain).view(-1)
    code[n:] = 0

    code = code.view(-1, TILE)[: len(tile)]
    lane = torch.arange(TILE, device=x.device)
    # Planes that a tile lacks come first, in the place of its last one.
    for p in reversed(range(layout.planes)):
        # The bits of a word are disjoint, so their sum is their union, also when it wraps at the
        # sign.
        words[_place(place, width, p)] = ((code >> p & 1) << lane).sum(1)
    of_group = place[:: group_size // TILE]
    words[of_group[constant]] = padded[constant, 0].to(torch.float64).view(torch.int64)
    # Both are bfloat16 values, so their upper halves are exact. The bit pattern of NaN in torch's
    # own conversion depends on the vector width.
    pairs = torch.stack([low, step], 1).view(torch.int32) >> 16
    return pairs.to(torch.int16).view(torch.bfloat16)


def _place(first: Tensor, width: Tensor, p: int) -> Tensor:
    """Return the place of the word of a tile's plane ``p``, or of its last plane."""
    return first + (width - 1).clamp_(max=p)


def _unpack_slice(
    words: Tensor,
    stats: Tensor,
    n: int,
    layout: _Layout,
    dtype: torch.dtype,
    seed: int | None,
    start: int,
) -> Tensor:
    tile = torch.arange(start // TILE, -(-(start + n) // TILE), device=words.device)
    first, width = layout.of(tile)
    lane = torch.arange(TILE, device=words.device)
    code = torch.zeros(len(tile), TILE, dtype=torch.int64, device=words.device)
    for p in range(layout.planes):
        code |= ((words[_place(first, width, p)][:, None] >> lane) & 1) << p
    code &= ((1 << width) - 1)[:, None]
    index = torch.arange(n, device=words.device)
    group = index // layout.group_size
    size = layout.group_size // TILE
    level = _level(code.view(-1)[:n], index + start, width[::size][group], seed)
    return _decode(level, stats[group], words[first[::size]][group], dtype)


def _level(code: Tensor, index: Tensor, bits: Tensor, seed: int | None) -> Tensor:
    """Return the levels of codes [n] in steps above lo, float32.

    Args:
        index: The element indices, for the noise.
        bits: The width of each code.
        seed: As for :func:`unpack`.
    """
    if seed is None:
        return code.to(torch.float32)
    fraction = fraction_bits(bits)
    grains = 1 << fraction
    noise = noise16(index, seed) >> (16 - fraction)
    # At most 2^24 grains: a float32 holds their number exactly.
    return (code * grains + (grains - 1 - 2 * noise)).to(torch.float32) * (1.0 / grains)


def _decode(level: Tensor, stats: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of levels [n] from the stats [n, 2] and first words [n] of their groups."""
    low, step = stats.to(torch.float32).unbind(1)
    x = level * step + low
    limit = min(_FLOAT32_MAX, torch.finfo(dtype).max)
    # The step is rounded up, and must not turn a finite value into infinity.
    clamped = x.clamp(-limit, limit).to(dtype)
    return torch.where(step == 0, first.contiguous().view(torch.float64).to(dtype), clamped)


def _round_to_bf16(x: Tensor, up: bool) -> Tensor:
    """Return float32 ``x`` rounded up or down to a bfloat16 value, as float32."""
    raw = x.view(torch.int32)
    away = (raw >= 0) if up else (raw < 0)
    return ((raw + away.to(torch.int32) * 0xFFFF) & ~0xFFFF).view(torch.float32)
