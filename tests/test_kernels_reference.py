"""The pure-torch oracle, and the list of sample inputs that every backend is held to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gact_graph.kernels import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICES = (
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
)
WIDTHS = tuple(range(1, 17))
GROUP = 256
# Around a vector, a tile and a group, and several groups with a short last one.
SIZES = (0, 1, 3, 63, 64, 65, 255, 256, 257, 1000, 5000)


@dataclass(frozen=True)
class Sample:
    """A named input on the CPU; ``tensor()`` makes it anew, the same each time."""

    kind: str
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}-{str(self.dtype).removeprefix('torch.')}"

    def tensor(self) -> Tensor:
        return _KINDS[self.kind](self.size, self.dtype)


def _normal(size: int, dtype: torch.dtype, scale: float = 10.0) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def _offset(size: int, dtype: torch.dtype) -> Tensor:
    """Far from zero, with a range small beside it."""
    return _normal(size, dtype, 1e-2).abs() + 100


def _with(value: float, size: int, dtype: torch.dtype) -> Tensor:
    x = _normal(size, dtype)
    x[size // 2] = value
    return x


def _zeros_of_both_signs(size: int, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(size, dtype=dtype)
    x[1::2] = -0.0
    return x


def _close_to_maximum(size: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Evenly from ``low`` to ``high`` maxima of the dtype (of float32 for float64)."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    share = torch.linspace(low, high, max(size, 2), dtype=torch.float64)[:size]
    return (share * limit).to(dtype)


def _subnormal(size: int, dtype: torch.dtype) -> Tensor:
    """A range of some thousand of the dtype's (or float32's) smallest steps above zero."""
    smallest = torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).smallest_normal
    return (_normal(size, torch.float64).clamp(-20, 20) * smallest / 100).to(dtype)


_KINDS = {
    "normal": _normal,
    "offset": _offset,
    "tiny": lambda n, t: _normal(n, t, 1e-6),
    "two-values": lambda n, t: (_normal(n, t) > 0).to(t),
    "constant": lambda n, t: torch.full((n,), 0.1, dtype=t),
    "minus-zero": lambda n, t: torch.full((n,), -0.0, dtype=t),
    "zeros": _zeros_of_both_signs,
    "constant-max": lambda n, t: torch.full((n,), torch.finfo(t).max, dtype=t),
    "constant-min": lambda n, t: torch.full((n,), torch.finfo(t).min, dtype=t),
    "nan": lambda n, t: _with(torch.nan, n, t),
    "inf": lambda n, t: _with(torch.inf, n, t),
    "minus-inf": lambda n, t: _with(-torch.inf, n, t),
    "all-nan": lambda n, t: torch.full((n,), torch.nan, dtype=t),
    "max-both": lambda n, t: _close_to_maximum(n, t, -1.0, 1.0),
    "max-above": lambda n, t: _close_to_maximum(n, t, 0.9, 1.0),
    "max-below": lambda n, t: _close_to_maximum(n, t, -1.0, -0.9),
    "subnormal": _subnormal,
    "transposed": lambda n, t: _normal(n, t).view(-1, 5 if n % 5 == 0 else 1).t(),
    "sliced": lambda n, t: _normal(2 * n + 1, t)[1::2],
    "expanded": lambda n, t: _normal(n, t)[:, None].expand(n, 3),
}
_EDGE_SIZES = (1, 65, 257, 1000)
SAMPLES = tuple(
    Sample(kind, size, dtype)
    for kind, dtype in itertools.product(_KINDS, DTYPES)
    for size in (SIZES if kind == "normal" else _EDGE_SIZES)
)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    return bool(same.all())


def steps_of(stats: Tensor, n: int, group_size: int = GROUP) -> Tensor:
    """The step of each of ``n`` elements, float64."""
    return stats[:, 1].to(torch.float64).repeat_interleave(group_size)[:n]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_round_trip_of_every_sample(sample: Sample, device: str) -> None:
    x = sample.tensor().to(device)
    flat = x.reshape(-1)
    n, groups = flat.numel(), -(-flat.numel() // GROUP)
    # How float32 sees the input: that is what is coded.
    seen = flat.float()
    padded = torch.cat([seen, seen[-1:].expand(groups * GROUP - n)]).view(groups, GROUP)
    finite = padded.isfinite().all(1)
    for bits in (1, 2, 5, 8, 16):
        codes, stats = reference.pack(x, bits, GROUP, 7)
        assert codes.shape == (-(-n // 64), bits) and codes.dtype == torch.int64
        assert stats.shape == (groups, 2) and stats.dtype == torch.bfloat16
        y = reference.unpack(codes, stats, list(x.shape), bits, GROUP, x.dtype)
        assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
        y = y.reshape(-1)
        step = steps_of(stats, n)
        assert not y.isinf().any()
        bad = y.isnan()
        # All of a group is NaN or nothing is; one with NaN or Inf is, others only on overflow.
        assert torch.equal(bad, step.isnan())
        assert bad[~finite.repeat_interleave(GROUP)[:n]].all()
        if not sample.kind.startswith(("max", "constant-m")):
            assert not bad[finite.repeat_interleave(GROUP)[:n]].any()
        good = ~bad
        error = (y.double() - flat.double())[good].abs()
        # Beside the step: rounding to the dtype, or to float32 where the sum is made.
        precision = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)
        size = torch.maximum(flat[good].double().abs(), y[good].double().abs())
        rounding = size * precision + torch.finfo(x.dtype).smallest_normal * precision
        assert (error <= step[good] * (1 + 1e-5) + rounding).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.1, -0.0, 0.0, -7.5, "max", "min", "smallest"])
def test_constant_groups_are_exact(value: float | str, dtype: torch.dtype, device: str) -> None:
    info = torch.finfo(dtype)
    named = {"max": info.max, "min": info.min, "smallest": info.smallest_normal / 2}
    number = named[value] if isinstance(value, str) else value
    if dtype == torch.float64 and value in ("max", "min"):
        number = torch.finfo(torch.float32).max * (1 if value == "max" else -1)
    x = torch.full((300,), number, dtype=dtype, device=device)
    for bits in (1, 2, 8, 16):
        codes, stats = reference.pack(x, bits, GROUP, 3)
        assert same_bytes(reference.unpack(codes, stats, [300], bits, GROUP, dtype), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_the_group_with_the_bad_element_is_lost(bad: float) -> None:
    x = _normal(5 * GROUP + 9, torch.float32)
    x[2 * GROUP + 17] = bad
    codes, stats = reference.pack(x, 3, GROUP, 1)
    lost = reference.unpack(codes, stats, [x.numel()], 3, GROUP, x.dtype).isnan().nonzero().view(-1)
    assert torch.equal(lost, torch.arange(2 * GROUP, 3 * GROUP))


def test_slices_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _normal(5000, torch.float32)
    whole = reference.pack(x, 3, 192, 5)
    monkeypatch.setattr(reference, "_SLICE", 1000)
    parts = reference.pack(x, 3, 192, 5)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
    joined = reference.unpack(*parts, [5000], 3, 192, x.dtype)
    monkeypatch.undo()
    assert torch.equal(joined, reference.unpack(*whole, [5000], 3, 192, x.dtype))


def _noise(start: int, count: int, seed: int) -> Tensor:
    return reference.noise16(torch.arange(start, start + count), seed)


def test_noise_is_as_it_was_published() -> None:
    """Numbers computed once with csrc/noise.h; a change of them breaks stored contexts."""
    index = torch.tensor([0, 1, 15, 16, 31, 32, 2**31 + 5, 2**32, 2**32 + 16, 2**40 + 3])
    assert reference.noise16(index, 0).tolist() == [
        19530,
        52902,
        53179,
        42320,
        53939,
        5003,
        19504,
        20257,
        10235,
        9846,
    ]
    assert reference.noise16(index, -1).tolist() == [
        52668,
        55273,
        2639,
        13390,
        47918,
        58412,
        2572,
        12726,
        71,
        43529,
    ]


def test_noise_has_16_bits_and_is_uniform() -> None:
    noise = _noise(0, 1 << 20, 11)
    assert noise.min() >= 0 and noise.max() < 1 << 16
    counts = torch.bincount(noise >> 8, minlength=256).double()
    expected = (1 << 20) / 256
    # Chi-square with 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * 22.6
    for bit in range(16):
        share = ((noise >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 6 * 0.5 / 1024


@pytest.mark.parametrize("lag", [1, 2, 8, 15, 16, 17, 32, 64, 256, 4096])
def test_noise_of_different_elements_is_uncorrelated(lag: int) -> None:
    noise = _noise(0, 1 << 18, 5).double()
    correlation = torch.corrcoef(torch.stack([noise[:-lag], noise[lag:]]))[0, 1]
    assert abs(correlation) < 6 / 512  # 1 / sqrt(2^18) is its standard deviation


def test_noise_of_an_element_is_uncorrelated_over_seeds() -> None:
    noise = torch.stack([_noise(0, 64, seed) for seed in range(4000)]).double()
    correlation = torch.corrcoef(noise.t()) - torch.eye(64)
    assert correlation.abs().max() < 6 / 4000**0.5


@pytest.mark.parametrize("other", [1, -1, 2, 1 << 32, 1 << 62])
def test_noise_of_different_seeds_is_uncorrelated(other: int) -> None:
    a, b = _noise(0, 1 << 18, 0).double(), _noise(0, 1 << 18, other).double()
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 6 / 512


def test_noise_does_not_repeat_above_32_bits() -> None:
    low = _noise(0, 1 << 16, 9)
    for start in (1 << 31, 1 << 32, 3 << 32, 1 << 45):
        far = _noise(start, 1 << 16, 9)
        # By chance one in 2^16 agrees.
        assert (low == far).double().mean() < 1e-3
        assert abs(torch.corrcoef(torch.stack([low, far]).double())[0, 1]) < 6 / 256


def test_noise_of_a_range_that_crosses_32_bits_is_that_of_its_halves() -> None:
    across = _noise((1 << 32) - 100, 200, 4)
    assert torch.equal(
        across, torch.cat([_noise((1 << 32) - 100, 100, 4), _noise(1 << 32, 100, 4)])
    )
