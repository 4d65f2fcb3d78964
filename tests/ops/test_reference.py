"""The pure-torch oracle, on the sample inputs that every backend is held to."""

from __future__ import annotations

import pytest
import torch
from grids import grid
from quantizer_samples import (
    DEVICES,
    DTYPES,
    GROUP,
    SAMPLE_CASES,
    Sample,
    normal,
    same_bytes,
    steps_of,
)
from torch import Tensor

from gact_graph.ops import cpu
from gact_graph.ops.quantize import Widths
from gact_graph.ops.reference import quantize as reference


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SAMPLE_CASES, ids=str)
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
@pytest.mark.parametrize(
    ("value", "dtype"), grid([0.1, -0.0, 0.0, -7.5, "max", "min", "smallest"], DTYPES), ids=str
)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_size", [64, 256, 320])
@pytest.mark.parametrize("n", [0, 1, 640, 1000, 5000])
def test_a_group_of_any_width_has_the_words_of_a_tensor_of_that_width(
    n: int, group_size: int, device: str
) -> None:
    x = normal(n, torch.float32).to(device)
    if n > 600:
        x[300:600], x[-1] = 0.1, torch.inf
    widths = [1 + 5 * g % 16 for g in range(-(-n // group_size))]
    own = Widths.of(torch.tensor(widths, dtype=torch.uint8, device=device), n, group_size)
    codes, stats = reference.pack(x, 4, group_size, 3, own.widths, own.words)
    y = reference.unpack(codes, stats, [n], 4, group_size, x.dtype, None, None, 3, own.widths)
    words = [codes[:0]]
    for g, bits in enumerate(widths):
        part = slice(g * group_size, (g + 1) * group_size)
        all_codes, all_stats = reference.pack(x, bits, group_size, 3)
        decoded = reference.unpack(
            all_codes, all_stats, [n], bits, group_size, x.dtype, None, None, 3
        )
        assert same_bytes(stats[g], all_stats[g]) and same_bytes(y[part], decoded[part])
        words.append(all_codes[part.start // 64 : part.stop // 64].reshape(-1))
    assert torch.equal(codes, torch.cat(words)) and own.words == len(codes)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_the_group_with_the_bad_element_is_lost(bad: float) -> None:
    x = normal(5 * GROUP + 9, torch.float32)
    x[2 * GROUP + 17] = bad
    codes, stats = reference.pack(x, 3, GROUP, 1)
    lost = reference.unpack(codes, stats, [x.numel()], 3, GROUP, x.dtype).isnan().nonzero().view(-1)
    assert torch.equal(lost, torch.arange(2 * GROUP, 3 * GROUP))


def test_a_tensor_above_the_size_of_a_slice_has_no_seam() -> None:
    """The reference codes 2**22 elements at a time; the kernels code all at once."""
    kernels = cpu.load()
    if kernels is None:
        pytest.skip("no compiler")
    x = normal((1 << 22) + 1000, torch.float16)
    n = x.numel()
    own = Widths.of((torch.arange(-(-n // 8192)) % 3 + 1).byte(), n, 8192)
    of_groups = (own.widths, own.words), (None, None, None, own.widths)
    for packing, unpacking in (((), ()), of_groups):
        codes, stats = reference.pack(x, 1, 8192, 5, *packing)
        expected = kernels.pack(x, 1, 8192, 5, *packing)
        assert torch.equal(codes, expected[0]) and same_bytes(stats, expected[1])
        y = reference.unpack(codes, stats, [n], 1, 8192, x.dtype, *unpacking)
        assert same_bytes(y, kernels.unpack(codes, stats, [n], 1, 8192, x.dtype, *unpacking))


def _noise(start: int, count: int, seed: int) -> Tensor:
    return reference.noise16(torch.arange(start, start + count), seed)


def test_noise_is_the_published_one() -> None:
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
        25979,
        62909,
        44639,
        15603,
        36518,
        63567,
        22079,
        27648,
        58916,
        21836,
    ]


@pytest.mark.parametrize("moved", [1, 40503, 2**15, 2**16 - 1])
def test_the_high_bits_of_a_seed_move_the_noise(moved: int) -> None:
    index = torch.arange(2**32 - 500, 2**32 + 500)
    for low in (0, 12345, 2**48 - 1):
        seed = moved << 48 | low
        signed = seed - (1 << 64 if seed >> 63 else 0)
        expected = (reference.noise16(index, low) + moved) % 2**16
        assert torch.equal(reference.noise16(index, signed), expected)


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


@pytest.mark.parametrize("other", [1, -1, 2, 1 << 32, 1 << 47])
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
