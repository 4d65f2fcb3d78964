"""pack and unpack as the library calls them: unbiased, bounded, strict about their arguments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_errors import VALUE_ERROR, of_kernels
from quantizer_samples import (
    CHANNELS,
    DEVICES,
    DTYPES,
    GROUP,
    SAMPLE_CASES,
    SAMPLES,
    Sample,
    same_bytes,
    steps_of,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_graph.ops import quantize as quantizer
from gact_graph.ops.quantize import (
    Channels,
    Widths,
    decorrelated_weight,
    group_ranges,
    pack,
    pack_channels,
)
from gact_graph.ops.reference import quantize as reference
from gact_graph.ops.reference.quantize import normalized


def _normal(n: int, device: str = "cpu") -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SAMPLE_CASES, ids=str)
def test_every_sample_as_the_reference_does_it(sample: Sample, device: str) -> None:
    x = sample.tensor().to(device)
    before = x.clone()
    for bits in (1, 2, 4, 8, 16):
        packed = pack(x, bits, seed=3)
        y = packed.unpack()
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        if packed.stats is None:
            assert same_bytes(y, x)
            continue
        codes, stats = reference.pack(before, bits, GROUP, 3)
        assert torch.equal(packed.codes, codes)
        assert torch.equal(packed.stats.view(torch.int16), stats.view(torch.int16))
        expected = reference.unpack(codes, stats, list(x.shape), bits, GROUP, x.dtype)
        # Groups that the codes cannot tell come back as they were.
        lost = steps_of(stats.cpu(), x.numel()).isnan().view(x.shape).to(device)
        assert same_bytes(y, torch.where(lost, x, expected))
    assert same_bytes(x, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_widths", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "channels", "inner"),
    CHANNELS,
    ids=str,
)
def test_a_normalized_tensor_has_the_codes_of_a_copy(
    shape: tuple[int, ...],
    channels: int,
    inner: int,
    dtype: torch.dtype,
    in_widths: bool,
    device: str,
) -> None:
    x = _normal(math.prod(shape), device).view(shape).to(dtype)
    statistics = torch.stack([_normal(channels, device), _normal(channels, device).abs() + 0.1])
    own, group = Channels(statistics, inner), 128
    copy = normalized(x, *own)
    widths = _widths(x.numel(), device, group) if in_widths else None
    coded = pack_channels(x, own, 3, group_size=group, seed=-5, widths=widths)
    whole = pack(copy, 3, group_size=group, seed=-5, widths=widths)
    assert coded is not None and (coded.shape, coded.dtype) == (x.shape, torch.float32)
    assert torch.equal(coded.codes, whole.codes)
    assert coded.stats is not None and whole.stats is not None
    assert torch.equal(coded.stats, whole.stats) and coded.widths == whole.widths
    assert coded.groups is None and (device == "cuda" or whole.groups is None)
    assert torch.equal(coded.decorrelated().unpack().view(-1), whole.decorrelated().unpack())
    assert torch.equal(group_ranges(x, group, own), group_ranges(copy, group))
    torch.testing.assert_close(decorrelated_weight(x, coded, own), decorrelated_weight(copy, whole))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_of_groups(dtype: torch.dtype, device: str) -> None:
    x = _normal(5000, device).to(dtype)
    x[256:512], x[600], x[900], x[2900], x[3100] = 2.5, torch.nan, torch.inf, -torch.inf, -0.0
    ranges = group_ranges(x, 256).cpu()
    groups = x[: 19 * 256].view(19, 256).float().cpu()
    expected = groups.amax(1) - groups.amin(1)
    assert ranges.dtype == torch.float32 and ranges[1] == 0
    assert ranges.isnan().nonzero().view(-1).tolist() == [2, 3, 11]
    finite = expected.isfinite()
    assert torch.equal(ranges[finite], expected[finite])
    assert group_ranges(x[:255], 256).shape == (0,)
    most = torch.finfo(torch.float32).max
    assert group_ranges(torch.tensor([-most, most] * 32), 64).isnan().all()


def test_normalized_tensors_with_infinity_are_refused() -> None:
    x = torch.cat([_normal(600), torch.tensor([torch.inf, 0.0])])
    assert pack_channels(x, Channels(torch.tensor([[0.0], [1.0]]), 1), 3) is None


def _decoded(x: Tensor, bits: int, seeds: range) -> tuple[Tensor, Tensor]:
    """Decodings [seeds, numel] (float64) of ``x``, and each element's step."""
    records = [pack(x, bits, seed=seed) for seed in seeds]
    assert records[0].stats is not None
    decodings = torch.stack([record.unpack().double() for record in records])
    return decodings, steps_of(records[0].stats.cpu(), x.numel()).to(x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12])
def test_unbiased_with_bounded_error_and_variance(bits: int, device: str) -> None:
    x, count = _normal(600, device), 2000
    y, step = _decoded(x, bits, range(count))
    error = y - x.double()
    # Rounding to the 2^16 (2^12 at 12 bits) grains below the code, and to float32.
    grain = step * 2.0 ** -(reference.fraction_bits(torch.tensor(bits))) + 1e-6
    # An element is off by at most one step, with a standard deviation of step / 2 at most; of
    # 600 elements none is beyond six of them.
    assert (error.abs() <= step + grain).all()
    assert (error.mean(0).abs() <= 6 * step / 2 / count**0.5 + grain).all()
    assert (error.mean(0) / step).mean().abs() <= 6 * 0.5 / (count * x.numel()) ** 0.5 + 2e-3
    assert (y.var(0) <= step**2 / 4 * (1 + 6 * 2 / count**0.5) + grain**2).all()
    # Stochastic rounding: not everything may simply be rounded to nearest.
    assert ((y.var(0) > step**2 / 100).double().mean() > 0.5).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_errors_of_different_elements_and_seeds_are_uncorrelated(bits: int) -> None:
    x, count = torch.zeros(128), 4000
    x[1] = 1.0
    record = pack(x, bits)
    assert record.stats is not None
    # A third of the way between two codes: near a code there is little noise to correlate.
    x[2:] = record.stats[0, 1].float() * (2**bits // 3 + 1 / 3)
    y, _ = _decoded(x, bits, range(count))
    noisy = y[:, 2:].t()
    between = torch.corrcoef(noisy) - torch.eye(126, dtype=torch.float64)
    assert between.abs().max() < 6 / count**0.5
    neighbors = torch.stack([noisy[:-1].ravel(), noisy[1:].ravel()])
    assert abs(torch.corrcoef(neighbors)[0, 1]) < 6 / (125 * count) ** 0.5
    seeds = torch.stack([noisy[:, :-1].ravel(), noisy[:, 1:].ravel()])
    assert abs(torch.corrcoef(seeds)[0, 1]) < 6 / (126 * count) ** 0.5


def test_float64_constant_keeps_every_digit() -> None:
    x = torch.full((5, 70), 0.1, dtype=torch.float64)
    assert torch.equal(pack(x, 1).unpack(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_32_bits_keep_the_tensor(dtype: torch.dtype) -> None:
    x = _normal(60).to(dtype).view(6, 10).t()
    packed = pack(x, 32)
    y = packed.unpack()
    assert packed.stats is None
    assert packed.nbytes == 60 * dtype.itemsize
    assert y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
    assert not y.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_keep_a_half_tensor_and_code_a_wider_one(dtype: torch.dtype) -> None:
    x = _normal(60).to(dtype)
    assert pack(x, 16).stats is None
    assert pack(x, 16).unpack().data_ptr() == x.data_ptr()
    assert pack(x, 15).stats is not None
    assert pack(x.float(), 16).stats is not None


@pytest.mark.parametrize("n", [0, 1, 64, 65, 256, 257, 1000])
@pytest.mark.parametrize("group_size", [64, 256])
def test_nbytes_is_that_of_the_format(n: int, group_size: int) -> None:
    for bits in range(1, 17):
        packed = pack(_normal(n), bits, group_size=group_size)
        words, groups = -(-n // 64) * bits, -(-n // group_size)
        assert packed.nbytes == 8 * words + 4 * groups
        assert packed.stats is not None
        held = packed.codes.untyped_storage().nbytes() + packed.stats.untyped_storage().nbytes()
        assert held == packed.nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, -1, 2**64 - 2])
def test_the_decorrelated_decoding(device: str, seed: int) -> None:
    x = _normal(30_000, device)
    x[300] = torch.nan
    packed = pack(x, 2, seed=seed)
    again = packed.decorrelated()
    first, second = packed.unpack(), again.unpack()
    assert again.nbytes == packed.nbytes and again.tensors == packed.tensors
    assert not torch.equal(first, second) and torch.equal(
        second[256:512].isnan(), x[256:512].isnan()
    )
    rows = torch.tensor([7, 0, 7], device=device)
    assert torch.equal(again.unpack_rows(rows, 100), second.view(-1, 100)[rows])
    noise, other = (y[512:] - x[512:] for y in (first, second))
    # Means of 29,488 products; on average over the fractions, both variances are step^2 / 6.
    square = noise.square().mean()
    assert other.square().mean().item() == pytest.approx(square.item(), rel=0.1)
    assert abs((noise * other).mean()) < 0.05 * square
    kept = pack(x, 32).decorrelated()
    assert kept.unpack().data_ptr() == x.data_ptr()


def _with_zeros(kept: float, device: str) -> Tensor:
    """Normal numbers; or the sizes of such, of which only a share is not the minimum, 0."""
    x = _normal(100_000)
    chosen = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < kept
    return (x if kept == 1 else x.abs() * chosen).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_minimum_variance_decoding_has_the_least_noise(
    bits: int, kept: float, device: str
) -> None:
    x = _with_zeros(kept, device)
    packed = pack(x, bits, seed=5)
    share = decorrelated_weight(x, packed)
    assert packed.stats is not None
    square = steps_of(packed.stats.cpu(), x.numel()).square().mean()
    variance = {
        a: float(
            (packed.unpack_min_variance(torch.tensor(a, device=device)) - x)
            .double()
            .square()
            .mean()
        )
        for a in (0.0, float(share), 1.0)
    }
    # Means of 100,000 squares of numbers below two steps; the share is that of 16,384 elements.
    assert variance[float(share)] == pytest.approx(
        float(square * share * (1 - share) / 3), rel=0.05
    )
    assert variance[float(share)] < min(variance[0.0], variance[1.0])
    if kept == 1 and bits > 1:
        assert variance[float(share)] == pytest.approx(variance[0.0] / 2, rel=0.05)
    assert torch.equal(packed.unpack_min_variance(torch.zeros_like(share)), packed.unpack())


def test_the_minimum_variance_decoding_is_unbiased() -> None:
    x = _normal(600)
    records = [pack(x, 2, seed=seed) for seed in range(400)]
    share = decorrelated_weight(x, records[0])
    mean = torch.stack([record.unpack_min_variance(share) for record in records]).mean(0)
    assert records[0].stats is not None
    # A reading's deviation is below half a step: five deviations of the mean.
    assert ((mean - x).abs() < 5 * 0.5 * steps_of(records[0].stats, 600) / 400**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinite_elements_stay_infinite_in_the_decoding_of_least_variance(
    dtype: torch.dtype,
) -> None:
    x = torch.randn(1000).to(dtype)
    x[3], x[700] = math.inf, -math.inf
    best = pack(x, 4).unpack_min_variance(torch.tensor(0.4))
    assert torch.equal(best.isinf(), x.isinf()) and not best.isnan().any()


@pytest.mark.parametrize(
    "x",
    [torch.full((300,), 3.0), torch.arange(7.0), _normal(700) * 1e37, _normal(700) * 1e-37],
    ids=["equal", "short", "huge", "tiny"],
)
def test_the_minimum_variance_weight_is_a_number(x: Tensor) -> None:
    for tensor in (x, torch.cat([torch.full((256,), torch.nan), x])):
        packed = pack(tensor, 2)
        share = decorrelated_weight(tensor, packed)
        assert 0 <= share <= 0.75
        assert torch.equal(packed.unpack_min_variance(share).isnan(), tensor.isnan())
    if (x == x[0]).all():
        assert share == 0


def _widths(n: int, device: str = "cpu", group_size: int = 256) -> Widths:
    """Widths of 1 to 16."""
    numbers = 7 * torch.arange(-(-n // group_size)) % 16 + 1
    return Widths.of(numbers.byte().to(device), n, group_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_equal_widths_give_the_bytes_of_one_width(bits: int, device: str) -> None:
    x = _normal(5000, device)
    x[300:600], x[700] = 0.1, torch.nan
    own = Widths.of(torch.full((20,), bits, dtype=torch.uint8, device=device), 5000)
    plain, packed = pack(x, bits, seed=3), pack(x, 2, seed=3, widths=own)
    assert torch.equal(packed.codes, plain.codes.view(-1)) and own.words == plain.codes.numel()
    assert packed.bits == 2 and packed.nbytes == plain.nbytes + 20
    for one, other in zip(packed.tensors[1:-1], plain.tensors[1:], strict=True):
        assert same_bytes(one.cpu(), other.cpu())
    assert same_bytes(packed.unpack().cpu(), plain.unpack().cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_every_decoding_of_a_record_with_widths(device: str) -> None:
    x = _normal(30_000, device)
    x[300], x[600:1100] = torch.nan, 0.5
    own = _widths(x.numel(), device)
    packed = pack(x, 4, seed=9, widths=own)
    assert packed.codes.shape == (own.words,) and packed.bits == 4
    assert packed.nbytes == sum(tensor.nbytes for tensor in packed.tensors)
    assert packed.tensors[-1] is own.widths
    again = packed.moved(*(tensor.clone() for tensor in packed.tensors)).decorrelated()
    assert again.widths is not None and torch.equal(again.widths.widths, own.widths)
    rows = torch.tensor([7, 0, 7, 299, 3], device=device)
    assert packed.stats is not None
    step = steps_of(packed.stats.cpu(), x.numel()).to(device)
    weight = decorrelated_weight(x, packed)
    best = packed.unpack_min_variance(weight)
    for record in (packed, again):
        y = record.unpack()
        assert same_bytes(y[256:512].cpu(), x[256:512].cpu()) and (y[768:1024] == 0.5).all()
        off = (y - x)[512:].abs() / step[512:].float()
        # In float32, a code of 16 bits is off by some grains.
        assert off.nan_to_num(0.0).max() < (1.02 if record is packed else 2.02)
        assert same_bytes(record.unpack_rows(rows, 100).cpu(), y.view(-1, 100)[rows].cpu())
    plain, other = packed.unpack(), again.unpack()
    mean = torch.where(plain == other, plain, plain + (other - plain) * weight)
    assert same_bytes(best.cpu(), mean.cpu())
    first, second, least = ((y - x)[512:].square().mean().item() for y in (plain, other, best))
    # The least variance of a weighted mean of two numbers without covariance.
    assert least == pytest.approx(first * second / (first + second), rel=0.05)


def test_a_record_with_widths_is_unbiased() -> None:
    x = _normal(1200)
    own = Widths.of(torch.tensor([1, 3, 12, 2, 5], dtype=torch.uint8), 1200)
    records = [pack(x, 2, seed=seed, widths=own) for seed in range(2000)]
    assert records[0].stats is not None
    step = steps_of(records[0].stats, 1200)
    for decoded in (
        [record.unpack() for record in records],
        [record.decorrelated().unpack() for record in records],
    ):
        mean = torch.stack(decoded).double().mean(0)
        # The deviation of a decoding is at most 0.58 steps: six deviations of the mean.
        assert ((mean - x).abs() < 6 * 0.58 * step / 2000**0.5 + 2.0**-12 * step + 1e-6).all()


def test_a_tensor_that_is_kept_has_no_widths() -> None:
    x = _normal(300)
    packed = pack(x, 32, widths=_widths(300))
    assert packed.widths is None and packed.unpack().data_ptr() == x.data_ptr()
    assert pack(x[:0], 2, widths=_widths(0)).unpack().shape == (0,)


@pytest.mark.parametrize(
    ("widths", "error", "words"),
    [
        ([0, 1], ValueError, r"Expected widths from 1 to 16 \(got 0\)"),
        ([17, 3], ValueError, r"Expected widths from 1 to 16 \(got 17\)"),
        ([3], ValueError, r"Expected widths of \[2\], contiguous \(got \[1\]\)"),
        ([3, 3, 3], ValueError, r"Expected widths of \[2\].*\(got \[3\]\)"),
        ([2.0, 3.0], ValueError, r"Expected widths of uint8 \(got float32\)"),
        ([2, 3], ValueError, r"Expected widths of uint8 \(got int64\)"),
    ],
)
def test_widths_out_of_range_are_refused(
    widths: list[float], error: type[Exception], words: str
) -> None:
    small = "of uint8" not in words
    tensor = torch.tensor(widths, dtype=torch.uint8 if small else None)
    with pytest.raises(of_kernels(error), match=words):
        Widths.of(tensor, 300)
    if words.startswith("Expected widths of"):
        with pytest.raises(of_kernels(error), match=words):
            pack(_normal(300), 2, widths=Widths(tensor, 10))


def test_widths_with_other_words_are_refused() -> None:
    own = torch.tensor([2, 3], dtype=torch.uint8)
    with pytest.raises(VALUE_ERROR, match=r"Expected widths of 10 words \(got 11\)"):
        pack(_normal(300), 2, widths=Widths(own, 10))
    with pytest.raises(VALUE_ERROR, match=r"Expected widths from 1 to 16 \(got 0\)"):
        pack(_normal(300), 2, widths=Widths(torch.tensor([2, 0], dtype=torch.uint8), 8))


def test_seed_decides_and_may_be_any_int() -> None:
    x = _normal(500)
    seeds = [0, 1, -1, 2**63, 2**63 + 5, -(2**63) + 1, 2**64 - 2]
    codes = [pack(x, 2, seed=seed).codes for seed in seeds]
    for i, a in enumerate(codes):
        assert torch.equal(a, pack(x, 2, seed=seeds[i]).codes)
        assert not any(torch.equal(a, b) for b in codes[:i])
    # A seed counts modulo 2^64.
    assert torch.equal(pack(x, 2, seed=-1).codes, pack(x, 2, seed=2**64 - 1).codes)


@pytest.mark.parametrize("device", DEVICES)
def test_global_generators_are_left_alone(device: str) -> None:
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    pack(_normal(1000, device), 2).unpack()
    assert torch.equal(torch.get_rng_state(), cpu_state)
    after = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    assert all(torch.equal(a, b) for a, b in zip(cuda_states, after, strict=True))


def test_gradients_do_not_hang_on_a_record() -> None:
    x = _normal(300).requires_grad_()
    packed = pack(x * 2, 4)
    assert packed.codes.grad_fn is None and not packed.unpack().requires_grad
    with torch.inference_mode():
        inside = pack(torch.ones(300), 4).unpack()
    assert torch.equal(inside, torch.ones(300))


_SMALL = [s for s in SAMPLES if s.size in (0, 65) and s.kind in ("normal", "expanded")]
_SMALL = [s for s in _SMALL if s.dtype == torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", _SMALL, ids=str)
def test_opcheck(sample: Sample, device: str) -> None:
    x = sample.tensor().to(device)
    ops = torch.ops.gact_graph
    torch.library.opcheck(ops.pack.default, (x, 3, GROUP, 1))
    codes, stats = ops.pack(x, 3, GROUP, 1)
    how = 3, GROUP, x.dtype
    rows = torch.arange(min(x.numel(), 2), device=device)
    for seed in (None, 1):
        again = None, None, seed
        torch.library.opcheck(ops.unpack.default, (codes, stats, list(x.shape), *how, *again))
        whole = codes, stats, rows, x.numel(), 1
        torch.library.opcheck(ops.unpack_rows.default, (*whole, *how, *again))


def test_meta_and_fake_tensors_have_the_shapes_of_real_ones() -> None:
    real = torch.randn(7, 100, dtype=torch.float64)
    record = pack(real, 5, group_size=128)
    assert record.stats is not None
    with FakeTensorMode() as mode:
        for x in (mode.from_tensor(real), torch.empty(7, 100, dtype=torch.float64, device="meta")):
            packed = pack(x, 5, group_size=128)
            assert packed.stats is not None
            assert packed.codes.shape == record.codes.shape
            assert packed.stats.shape == record.stats.shape
            assert (packed.codes.dtype, packed.stats.dtype) == (torch.int64, torch.bfloat16)
            assert packed.nbytes == record.nbytes
            y = packed.unpack()
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
            widths = torch.empty(6, dtype=torch.uint8, device=x.device)
            packed = pack(x, 5, group_size=128, widths=Widths(widths, 40))
            assert packed.codes.shape == (40,) and packed.codes.device == x.device
            assert packed.unpack().shape == x.shape


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bits": 0}, ValueError, r"Expected bits to be 1 to 16, or 32 .*\(got 0\)"),
        ({"bits": 17}, ValueError, r"Expected bits to be 1 to 16, or 32 .*\(got 17\)"),
        ({"bits": -1}, ValueError, r"\(got -1\)"),
        ({"bits": 2.0}, TypeError, r"Expected bits to be an int \(got float\)"),
        ({"bits": True}, TypeError, r"Expected bits to be an int \(got bool\)"),
        ({"group_size": 0}, ValueError, r"Expected group_size .* multiple of 64 \(got 0\)"),
        ({"group_size": 100}, ValueError, r"Expected group_size .* multiple of 64 \(got 100\)"),
        ({"group_size": -64}, ValueError, r"\(got -64\)"),
        ({"group_size": "256"}, TypeError, r"Expected group_size to be an int \(got str\)"),
        ({"seed": 1.5}, TypeError, r"Expected seed to be an int \(got float\)"),
        ({"x": torch.ones(3, dtype=torch.int64)}, ValueError, "Expected x of float16"),
        ({"x": torch.ones(3, dtype=torch.cfloat)}, ValueError, "Expected x of float16"),
        ({"x": torch.ones(3, dtype=torch.bool)}, ValueError, "Expected x of float16"),
        ({"x": torch.eye(3).to_sparse()}, ValueError, "Expected x to be a strided tensor"),
    ],
)
def test_errors_name_the_argument(arguments: dict, error: type[Exception], words: str) -> None:
    call = {"x": torch.ones(3), "bits": 2, **arguments}
    with pytest.raises(of_kernels(error), match=words):
        pack(call.pop("x"), call.pop("bits"), **call)


def test_widths_are_those_that_check_bits_lets_through() -> None:
    passed = []
    for bits in range(-5, 70):
        try:
            quantizer.check_bits(bits)
        except ValueError:
            continue
        passed.append(bits)
    assert tuple(passed) == quantizer.WIDTHS


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, min_value=-(2.0**120), max_value=2.0**120),
        max_size=300,
    ),
    bits=st.integers(1, 16),
    group_size=st.sampled_from([64, 128, 256]),
    seed=st.integers(-(2**64), 2**64),
)
def test_round_trip_is_off_by_one_step_at_most(
    values: list[float], bits: int, group_size: int, seed: int
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    packed = pack(x, bits, group_size=group_size, seed=seed)
    assert packed.stats is not None
    y = packed.unpack()
    assert y.isfinite().all()
    step = steps_of(packed.stats, len(values), group_size)
    # lo + step * code is summed in float32, and the code's grain is 2^-9 steps at the coarsest.
    rounding = torch.maximum(x.abs(), y.abs()).double() * 2.0**-22
    low = packed.stats[:, 0].double().repeat_interleave(group_size)[: len(values)]
    assert ((y.double() - x.double()).abs() <= step * (1 + 2.0**-8) + rounding).all()
    # bfloat16 has 8 bits: no step is wider than what is needed, but for its rounding.
    for g, group in enumerate(x.split(group_size) if values else ()):
        need = (group.max().double() - low[g * group_size]) / (2**bits - 1)
        smallest = float(torch.finfo(torch.float32).tiny) * 2**17
        assert step[g * group_size] <= max(need * (1 + 2.0**-6), smallest)
