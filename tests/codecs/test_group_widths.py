"""Widths of groups by their ranges: the least noise in the bytes of one width."""

from __future__ import annotations

import copy
import heapq

import pytest
import torch
from samples import seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.codecs.group_widths import most_words, widths_of_groups
from gact_graph.ops.quantize import Widths, pack

GROUPS = 1200


def _groups(spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal elements, in groups of 256 whose scales are ``spread`` apart, and a short group."""
    scale = (spread * torch.randn(GROUPS, 1, generator=seeded(1))).exp()
    x = torch.randn(GROUPS, 256, generator=seeded(2)) * scale
    return torch.cat([x.flatten(), torch.randn(100, generator=seeded(3))]).to(dtype)


def _noise(widths: list[int], ranges: list[float]) -> float:
    return sum((r / (2**w - 1)) ** 2 for w, r in zip(widths, ranges, strict=True))


def _least_noise(ranges: list[float], total: int) -> float:
    """The least noise of widths from 1 to 8 with this sum: the best next bit, again and again."""
    widths = [1] * len(ranges)

    def offer(i: int) -> tuple[float, int]:
        gained = ranges[i] ** 2 * ((2 ** (widths[i] + 1) - 1) ** -2 - (2 ** widths[i] - 1) ** -2)
        return (gained if widths[i] < 8 else 0.0), i

    offers = [offer(i) for i in range(len(ranges))]
    heapq.heapify(offers)
    for _ in range(total - len(ranges)):
        _, i = heapq.heappop(offers)
        widths[i] += 1
        heapq.heappush(offers, offer(i))
    return _noise(widths, ranges)


@pytest.mark.parametrize("rest", [0, 1, 64, 65, 255])
@pytest.mark.parametrize("bits", [1.5, 2, 4.7, 6])
def test_the_words_allocated_on_a_gpu_are_enough(bits: float, rest: int) -> None:
    x = _groups(1.5)[: GROUPS * 256]
    x = torch.cat([x, x[:rest]])
    found = widths_of_groups(x, bits, 256)
    assert found is not None
    most = most_words(x.numel(), bits, 256)
    assert found.words <= most <= found.words + 0.1 * bits * GROUPS * 4


@pytest.mark.gpu
def test_a_gpu_chooses_the_same_widths() -> None:
    x = _groups(1.5)
    here, there = widths_of_groups(x, 4, 256), widths_of_groups(x.cuda(), 4, 256)
    assert here is not None and there is not None
    # A logarithm of another library may round to the next bin.
    assert (here.widths == there.widths.cpu()).float().mean() > 0.99
    assert there.words == most_words(x.numel(), 4, 256)
    packed = pack(x.cuda(), 4, widths=there)
    assert torch.equal(
        packed.unpack().cpu(), pack(x, 4, widths=Widths.of(there.widths.cpu(), x.numel())).unpack()
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.5, 5.0])
def test_the_noise_is_near_the_least_in_these_bytes(spread: float, bits: int) -> None:
    x = _groups(spread)
    found = widths_of_groups(x, bits, 256)
    assert found is not None
    widths = found.widths[:GROUPS].tolist()
    assert sum(widths) <= bits * GROUPS and found.widths[-1] == bits
    values = x[: GROUPS * 256].view(GROUPS, 256)
    ranges = (values.amax(1) - values.amin(1)).tolist()
    assert _noise(widths, ranges) <= 1.1 * _least_noise(ranges, bits * GROUPS)
    packed = pack(x, bits, widths=found)
    assert packed.nbytes <= pack(x, bits).nbytes + GROUPS + 1


@pytest.mark.parametrize("width", [64, 100, 256, 384, 1024])
def test_weights_of_rows_count_as_those_of_their_groups(width: int) -> None:
    rows = 256 * GROUPS // width
    x = torch.randn(rows, width, generator=seeded(1)).flatten()
    weights = torch.randn(rows, generator=seeded(2)).mul(2).exp()
    found = widths_of_groups(x, 2, 256, weights)
    assert found is not None
    whole = x.numel() // 256
    of_groups = weights.repeat_interleave(width)[: whole * 256].view(whole, 256).mean(1)
    values = x[: whole * 256].view(whole, 256)
    scales = ((values.amax(1) - values.amin(1)) * of_groups.sqrt()).tolist()
    widths = found.widths[:whole].tolist()
    assert sum(widths) <= 2 * whole
    assert _noise(widths, scales) <= 1.1 * _least_noise(scales, 2 * whole)


def test_equal_ranges_have_one_width() -> None:
    x = torch.randn(256, generator=seeded(1)).repeat(GROUPS)
    found = widths_of_groups(x, 3, 256)
    assert found is not None and (found.widths == 3).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = _groups(1.0, dtype)
    found, other = widths_of_groups(x, 4, 256), widths_of_groups(x.float(), 4, 256)
    assert found is not None and other is not None and torch.equal(found.widths, other.widths)


def test_groups_without_codes_leave_their_bits_to_the_others() -> None:
    x = _groups(0.1)
    x[: 256 * 600] = 7.0
    x[256 * 600 + 5] = torch.nan
    x[256 * 601 + 5] = torch.inf
    found = widths_of_groups(x, 2, 256)
    assert found is not None
    assert (found.widths[:602] == 1).all() and found.widths[602:GROUPS].double().mean() > 2.9
    got = pack(x, 2, widths=found).unpack()
    assert torch.equal(got[: 256 * 602].nan_to_num(), x[: 256 * 602].nan_to_num())


@pytest.mark.parametrize("x", [torch.zeros(256 * 1000), torch.full((256 * 1000,), torch.nan)])
def test_without_ranges(x: Tensor) -> None:
    found = widths_of_groups(x, 2, 256)
    assert found is not None and ((found.widths >= 1) & (found.widths <= 2)).all()
    assert torch.equal(pack(x, 2, widths=found).unpack().isnan(), x.isnan())


@pytest.mark.parametrize(
    ("count", "bits"), [(0, 2), (256 * 999, 2), (256 * 1000, 1), (256 * 1000, 8)]
)
def test_small_tensors_and_outer_widths_have_one_width(count: int, bits: int) -> None:
    assert widths_of_groups(torch.randn(count), bits, 256) is None


class Scaled(nn.Module):
    """A linear layer of rows whose lengths are far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 8)
        self.first = nn.Parameter(torch.randn(GROUPS, 256, generator=seeded(4)))

    def forward(self, scale: Tensor) -> Tensor:
        out: Tensor = self.linear((self.first * scale).sin() * scale)
        return out


def test_the_gradient_is_unbiased_and_has_less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.randn(GROUPS, 1, generator=seeded(5)).mul(1.5).exp()
    stock = Scaled()

    def gradient(model: nn.Module) -> Tensor:
        model.zero_grad()
        model(scale.clone()).square().sum().backward()
        return model.linear.weight.grad.clone()

    def errors() -> Tensor:
        model = gact_graph.wrap(copy.deepcopy(stock), bits=2, adaptive=False, min_bytes=0)
        found = torch.stack([gradient(model) - exact for _ in range(60)])
        assert {row.codec for row in gact_graph.report(model).contexts} >= {"quantize"}
        return found / exact.norm()

    exact = gradient(stock)
    found = errors()
    monkeypatch.setattr("gact_graph.codecs.quantize.widths_of_groups", lambda *_: None)
    variance, before = (e.var(0).sum() for e in (found, errors()))
    assert variance < 0.6 * before
    assert found.mean(0).square().sum() < 3 * variance / len(found)
