"""pack and unpack in pure torch: the oracle of the compiled kernels, and what serves without them.

:mod:`gact_graph.ops.quantize` describes the format. Everything is computed with single IEEE
float32 operations and integers, so every backend can give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import (
    TILE,
    check_coded,
    check_packed,
    check_quantization,
    check_range,
    check_rows,
    check_strided,
    check_tensor,
    checked_numel,
    used_size,
)

# Groups are worked off in slices of about this many elements, so that the int64 temporaries stay
# small beside the tensor.
_SLICE = 1 << 22
_LOW32 = 0xFFFFFFFF
_FLOAT32_MAX = torch.finfo(torch.float32).max
# The smallest step: its reciprocal, times the noise's 2^16 grains, is in float32's range.
_SMALLEST_STEP = 2.0**-110


def fraction_bits(bits: int) -> int:
    """Bits of noise below the code: what a float32's 24 bits leave, at most 16."""
    return 16 if bits <= 8 else 24 - bits


def pack(x: Tensor, bits: int, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes [ceil(numel / 64), bits] (int64) and stats [ceil(numel / group_size), 2] (bfloat16)."""
    check_quantization(bits, group_size)
    check_strided("x", x, x.device)
    check_coded("x", x.dtype)
    flat = x.detach().contiguous().view(-1)
    n = flat.numel()
    group_size = used_size(group_size, n)
    codes = torch.empty(-(-n // TILE), bits, dtype=torch.int64, device=x.device)
    stats = torch.empty(-(-n // group_size), 2, dtype=torch.bfloat16, device=x.device)
    stride = max(1, _SLICE // group_size) * group_size
    for start in range(0, n, stride):
        part = flat[start : start + stride]
        words, pairs = _pack_slice(part, bits, group_size, seed, start)
        codes[start // TILE : start // TILE + len(words)] = words
        stats[start // group_size : start // group_size + len(pairs)] = pairs
    return codes, stats


def exact_groups(
    x: Tensor, stats: Tensor, group_size: int, room: int | None = None
) -> tuple[Tensor, Tensor]:
    """The groups without stats [K] (int64, ascending) and their elements [K, group_size].

    The last group is filled up with its own last element; a row is no longer than the tensor.

    Args:
        x: What was packed.
        stats: As :func:`pack` made them of it.
        group_size: The like.
        room: K. Where there are fewer such groups, the rest have the number of all groups; where
            there are more, the last are left out. None: as many as there are, which waits for the
            device.
    """
    check_quantization(1, group_size)
    check_strided("x", x, x.device)
    check_coded("x", x.dtype)
    n = x.numel()
    check_tensor("stats", stats, torch.bfloat16, [-(-n // group_size), 2], x.device)
    lost = stats[:, 1].isnan()
    if room is None or not n:
        groups = lost.nonzero().view(-1)
    else:
        groups = torch.nonzero_static(lost, size=room, fill_value=len(lost)).view(-1)
    lane = torch.arange(min(group_size, n), device=x.device)
    place = (groups[:, None] * group_size + lane).clamp_(max=max(n - 1, 0))
    return groups, x.detach().contiguous().view(-1)[place]


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
) -> Tensor:
    """The decoded tensor of ``shape`` and ``dtype``, contiguous; with the seed, read again."""
    n = checked_numel(shape)
    check_packed(codes, stats, n, bits, group_size, dtype, groups, values)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    flat = out.view(-1)
    stride = max(1, _SLICE // group_size) * group_size
    for start in range(0, n, stride):
        part = flat[start : start + stride]
        words = codes[start // TILE : -(-(start + len(part)) // TILE)]
        pairs = stats[start // group_size : -(-(start + len(part)) // group_size)]
        part.copy_(_unpack_slice(words, pairs, len(part), bits, group_size, dtype, seed, start))
    if groups is not None and values is not None and n:
        group = torch.arange(len(stats), device=codes.device)[stats[:, 1].isnan()]
        row, found = _find(groups, group)
        group, row = group[found], row[found]
        lane = torch.arange(values.size(1), device=codes.device)
        place = group[:, None] * group_size + lane
        within = place < n
        flat[place[within]] = values[row][within]
    return out


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
) -> Tensor:
    """Rows [len(rows), width] of the decoded tensor seen as [numel / width, width]."""
    check_rows(rows, numel, width, codes.device)
    check_packed(codes, stats, numel, bits, group_size, dtype, groups, values)
    check_range("rows", rows, numel // width - 1)
    out = torch.empty(len(rows), width, dtype=dtype, device=codes.device)
    stride = max(1, _SLICE // width)
    for start in range(0, len(rows), stride):
        part = rows[start : start + stride, None] * width
        index = (part + torch.arange(width, device=codes.device)).view(-1)
        tile, lane = index // TILE, index % TILE
        code = torch.zeros_like(index)
        for p in range(bits):
            code |= ((codes[tile, p] >> lane) & 1) << p
        group = index // group_size
        first = codes[group * (group_size // TILE), 0]
        pairs = stats[group]
        decoded = _decode(_level(code, index, bits, seed), pairs, first, dtype)
        if groups is not None and values is not None and len(groups):
            row, found = _find(groups, group)
            own = values[row, index % group_size]
            decoded = torch.where(found & pairs[:, 1].isnan(), own, decoded)
        out[start : start + stride] = decoded.view(-1, width)
    return out


def _find(groups: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each in ``groups``, which ascend, and whether it is there at all."""
    if not len(groups):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    row = torch.searchsorted(groups, wanted).clamp_(max=len(groups) - 1)
    return row, groups[row] == wanted


def noise16(index: Tensor, seed: int) -> Tensor:
    """16 random bits for each element index (int64), as ``csrc/noise.h`` defines them."""
    high = index >> 32
    first, second = torch.empty_like(index), torch.empty_like(index)
    for part in high.unique().tolist():  # one, or two at a multiple of 2^32
        k = _noise_key(seed, part)
        first[high == part], second[high == part] = k & _LOW32, k >> 32
    h = (((index & _LOW32 & ~16) ^ first) * 0x9E3779B1) & _LOW32
    h = h ^ (h >> 15)
    h = ((h + second) * 0x85EBCA77) & _LOW32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE3D) & _LOW32
    h = h ^ (h >> 16)
    return torch.where((index & 16) != 0, h >> 16, h & 0xFFFF)


def _noise_key(seed: int, high: int) -> int:
    mask = (1 << 64) - 1
    z = (seed + (high + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _pack_slice(
    x: Tensor, bits: int, group_size: int, seed: int, start: int
) -> tuple[Tensor, Tensor]:
    n, top, fraction = len(x), 2**bits - 1, fraction_bits(bits)
    groups = -(-n // group_size)
    # The last group is filled up with its own last element, which widens no range.
    filled = torch.cat([x, x[-1:].expand(groups * group_size - n)]).view(groups, group_size)
    values = filled.to(torch.float32)
    minimum, maximum = values.amin(1), values.amax(1)
    low = _round_to_bf16(minimum + 0.0, up=False)  # -0 counts as +0
    # By a tensor: CUDA multiplies by the reciprocal of a number instead, which rounds twice.
    step = _round_to_bf16((maximum - low) / low.new_full((), top), up=True)
    finite = values.isfinite().all(1)
    constant = finite & (minimum == maximum)
    # Near the largest numbers lo or step may have been rounded to infinity.
    finite &= constant | step.isfinite()
    step = step.clamp(min=_SMALLEST_STEP).masked_fill(constant, 0.0)
    low, step = low.masked_fill(~finite, torch.nan), step.masked_fill(~finite, torch.nan)

    scale = (1.0 / step) * (1 << fraction)
    fine = ((values - low[:, None]) * scale[:, None]).round()
    plain = (finite & ~constant)[:, None]
    index = torch.arange(start, start + groups * group_size, device=x.device)
    noise = noise16(index, seed).view(groups, group_size) >> (16 - fraction)
    code = (torch.where(plain, fine, 0.0).to(torch.int64) + noise) >> fraction
    code = (code.clamp(max=top) * plain).view(-1)
    code[n:] = 0

    lane = torch.arange(TILE, device=x.device)
    plane = torch.arange(bits, device=x.device)
    # The bits of a word are disjoint, so their sum is their union, also when it wraps at the sign.
    words = (((code.view(-1, TILE, 1) >> plane) & 1) << lane[:, None]).sum(1)
    words[torch.arange(groups, device=x.device)[constant] * (group_size // TILE), 0] = (
        filled[constant, 0].to(torch.float64).view(torch.int64)
    )
    # Both are on bfloat16's grid, so their upper halves will do. torch's own conversion gives NaN
    # one bit pattern or another, by the vector width.
    pairs = torch.stack([low, step], 1).view(torch.int32) >> 16
    return words[: -(-n // TILE)], pairs.to(torch.int16).view(torch.bfloat16)


def _unpack_slice(
    words: Tensor,
    stats: Tensor,
    n: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    seed: int | None,
    start: int,
) -> Tensor:
    lane = torch.arange(TILE, device=words.device)
    code = torch.zeros(len(words), TILE, dtype=torch.int64, device=words.device)
    for p in range(bits):
        code |= ((words[:, p, None] >> lane) & 1) << p
    index = torch.arange(n, device=words.device)
    group = index // group_size
    first = words[:: group_size // TILE, 0].contiguous()
    level = _level(code.view(-1)[:n], index + start, bits, seed)
    return _decode(level, stats[group], first[group], dtype)


def _level(code: Tensor, index: Tensor, bits: int, seed: int | None) -> Tensor:
    """Steps above lo (float32): codes [n], or what else they say of elements with these indices."""
    if seed is None:
        return code.to(torch.float32)
    fraction = fraction_bits(bits)
    grains = 1 << fraction
    noise = noise16(index, seed) >> (16 - fraction)
    # At most 2^24 grains: a float32 holds their number exactly.
    return (code * grains + (grains - 1 - 2 * noise)).to(torch.float32) * (1.0 / grains)


def _decode(level: Tensor, stats: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of levels [n], with the stats [n, 2] and the first words [n] of their groups."""
    low, step = stats.to(torch.float32).unbind(1)
    x = level * step + low
    limit = min(_FLOAT32_MAX, torch.finfo(dtype).max)
    # A step that was rounded up must not turn a finite value into infinity.
    clamped = x.clamp(-limit, limit).to(dtype)
    return torch.where(step == 0, first.contiguous().view(torch.float64).to(dtype), clamped)


def _round_to_bf16(x: Tensor, up: bool) -> Tensor:
    """Float32 ``x`` rounded to bfloat16's grid, up or down; kept as float32."""
    raw = x.view(torch.int32)
    away = (raw >= 0) if up else (raw < 0)
    return ((raw + away.to(torch.int32) * 0xFFFF) & ~0xFFFF).view(torch.float32)
