"""Groups with NaN, Inf or numbers too large for a code come back exactly, and they alone do so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import simt
import torch
import torch.nn.functional as F
from cpu_builds import BUILDS, build
from grids import grid
from quantizer_samples import DTYPES, same_bytes
from samples import seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.codecs.codec import Request
from gact_graph.codecs.quantize import Quantize, Quantized, QuantizedWithSign
from gact_graph.codecs.reads import Values
from gact_graph.ops.quantize import Packed, pack
from gact_graph.ops.reference import quantize as reference

_WIDTHS = (1, 2, 3, 4, 8, 11, 16)
_OPS = torch.ops.gact_graph


def _sample(n: int, dtype: torch.dtype, bad: dict[int, float]) -> Tensor:
    x = torch.randn(n, generator=seeded(n)).to(dtype)
    for place, value in bad.items():
        x[place] = value
    return x


# Elements of 1100 in groups of 256: the last one is short.
_BAD = {
    "one": {300: -math.inf},
    "in the short group": {1099: math.inf},
    "of both signs": {5: math.inf, 7: -math.inf, 900: math.inf},
    "nan": {5: math.nan, 900: -math.inf, 1090: math.nan},
    "everywhere": dict.fromkeys(range(0, 1100, 2), -math.inf),
    "all": dict.fromkeys(range(1100), -math.inf),
}


@pytest.mark.parametrize(("bad", "dtype"), grid(_BAD, DTYPES), ids=str)
def test_the_groups_come_back_exactly_and_the_others_as_before(
    bad: str, dtype: torch.dtype
) -> None:
    x = _sample(1100, dtype, _BAD[bad])
    clean = x.masked_fill(~x.isfinite(), 0.5)
    groups = {place // 256 for place in _BAD[bad]}
    exact = torch.tensor([place // 256 in groups for place in range(1100)])
    for bits in _WIDTHS:
        packed, other = pack(x, bits, seed=3), pack(clean, bits, seed=3)
        if packed.stats is None:
            continue
        assert packed.groups is not None and packed.groups.tolist() == sorted(groups)
        assert same_bytes(packed.unpack(), torch.where(exact, x, other.unpack()))
        assert other.groups is None and other.values is None
        kept = len(groups) * (8 + 256 * x.element_size())
        assert packed.nbytes == other.nbytes + kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_numbers_too_large_for_a_code_are_exact(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    x = _sample(700, dtype, {3: limit, 4: -limit, 600: limit})
    packed = pack(x, 4)
    assert packed.groups is not None and packed.groups.tolist()[0] == 0
    assert torch.equal(packed.unpack()[:256], x[:256])
    assert packed.unpack().isfinite().all()


def test_any_strides_and_shapes() -> None:
    base = _sample(2400, torch.float32, {1000: -math.inf, 1001: math.inf})
    for x in (base.view(60, 40).t(), base[1::2], base.view(2, 30, 40)[:, ::3], base.view(60, 40)):
        bad = ~x.isfinite()
        y = pack(x, 2).unpack()
        assert y.shape == x.shape and torch.equal(y[bad], x[bad]) and not y.isnan().any()
    assert torch.equal(
        pack(base[:1].expand(3, 100).contiguous(), 2).unpack(), base[:1].expand(3, 100)
    )
    assert pack(base[:0], 2).groups is None


def test_a_group_longer_than_the_tensor() -> None:
    x = _sample(100, torch.float32, {10: -math.inf})
    packed = pack(x, 2, group_size=1 << 20)
    assert torch.equal(packed.unpack(), x)
    assert packed.values is not None and packed.values.shape == (1, 100)


@pytest.mark.parametrize("width", [1, 64, 100, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(width: int, dtype: torch.dtype) -> None:
    x = _sample(30 * width, dtype, {0: -math.inf, 20 * width: math.nan, 30 * width - 1: math.inf})
    rows = torch.tensor([29, 0, 3, 3, 20, 19, 1])
    for bits, group_size in ((1, 64), (4, 256), (7, 192)):
        packed = pack(x, bits, group_size=group_size, seed=1)
        whole = packed.unpack().view(30, width)
        assert same_bytes(packed.unpack_rows(rows, width), whole[rows])
        assert same_bytes(whole.view(-1)[x.isinf()], x[x.isinf()])


@pytest.fixture(params=["reference", "cuda-source", *BUILDS])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return reference
    if request.param == "cuda-source":
        return simt.KERNELS
    return build(request.param)


@pytest.mark.parametrize(("bad", "dtype"), grid(_BAD, DTYPES), ids=str)
def test_every_backend_decodes_them(bad: str, dtype: torch.dtype, kernels: Any) -> None:
    x = _sample(1100, dtype, _BAD[bad])
    rows = torch.tensor([10, 0, 3, 3, 9])
    for bits, group_size in ((2, 256), (5, 64), (9, 1024)):
        codes, stats = reference.pack(x, bits, group_size, 7)
        groups, values = reference.exact_groups(x, stats, group_size)
        if kernels is not simt.KERNELS:
            actual = kernels.exact_groups(x, stats, group_size)
            assert torch.equal(actual[0], groups) and same_bytes(actual[1], values)
        how = bits, group_size, dtype, groups, values
        whole = kernels.unpack(codes, stats, [11, 100], *how)
        plain = reference.unpack(codes, stats, [11, 100], bits, group_size, dtype)
        assert same_bytes(whole, torch.where(plain.isnan(), x.view(11, 100), plain))
        some = kernels.unpack_rows(codes, stats, rows, 1100, 100, *how)
        assert same_bytes(some, whole[rows])
        # What finds no place stays NaN.
        few = groups[:1].contiguous(), values[:1].contiguous()
        part = kernels.unpack(codes, stats, [1100], *how[:3], *few)
        first = stats[:, 1].isnan().nonzero()[0].item() * group_size
        assert same_bytes(part[first : first + group_size], x[first : first + group_size])
        assert same_bytes(part[first + group_size :], plain.view(-1)[first + group_size :])


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 10])
def test_a_fixed_capacity_as_on_cuda(capacity: int) -> None:
    """Nothing waits for the device: the record has a fixed size."""
    x = _sample(1100, torch.float32, {5: -math.inf, 600: math.nan, 1099: math.inf})
    codes, stats = reference.pack(x, 2, 256, 0)
    groups, values = reference.gather_exact_groups(x, stats, 256, capacity)
    assert groups.shape == (capacity,) and values.shape == (capacity, 256)
    assert groups.tolist() == ([0, 2, 4] + [5] * capacity)[:capacity]
    for backend in (reference, simt.KERNELS):
        y = backend.unpack(codes, stats, [1100], 2, 256, x.dtype, groups, values)
        for place, group in enumerate((0, 2, 4)):
            part = slice(256 * group, 256 * (group + 1))
            assert same_bytes(y[part], x[part]) if place < capacity else y[part].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "groups",
    [(), (0,), (1023, 1024, 2047), (0, 31, 32, 2300), range(9), (5, *range(1100, 1110))],
    ids=str,
)
def test_cuda_lists_the_first(groups: Sequence[int], dtype: torch.dtype) -> None:
    """A warp reads the statistics of 1024 groups, and all of them before where it finds any."""
    x = _sample(64 * 2301 - 10, dtype, {64 * group + 3: math.inf for group in groups})
    _, stats = reference.pack(x, 2, 64, 0)
    capacity = reference.exact_group_capacity(len(stats))
    found, values = simt.KERNELS.exact_groups(x, stats, 64)
    expected = reference.gather_exact_groups(x, stats, 64, capacity)
    count = min(capacity, len(groups))
    assert torch.equal(found, expected[0]) and values.shape == expected[1].shape
    assert found[:count].tolist() == [*groups][:count]
    assert same_bytes(values[:count], expected[1][:count])


def test_the_capacity_on_cuda_is_a_thousandth() -> None:
    assert [reference.exact_group_capacity(groups) for groups in (0, 1, 4, 5, 1024, 10**6)] == [
        0,
        1,
        4,
        4,
        5,
        980,
    ]


def test_a_context_that_moves_takes_them_along() -> None:
    x = _sample(3000, torch.float32, {100: -math.inf, 2999: math.inf})
    for encoded in (
        Quantized(pack(x, 2), 2),
        QuantizedWithSign(pack(x, 2), 2, _OPS.pack_bits(x, 1, 0.0)),
    ):
        other = encoded.moved(*(tensor.clone() for tensor in encoded.movable()))
        assert same_bytes(other.decode(), encoded.decode())
        assert other.decode()[100] == -math.inf and other.decode()[2999] == math.inf
        assert other.nbytes == encoded.nbytes == sum(t.nbytes for t in encoded.movable())


def test_tensors_that_codes_make_no_smaller_are_not_quantized() -> None:
    def request(x: Tensor) -> Request:
        gathered, keep = None, lambda tensor: pytest.fail("nothing refers to another tensor")
        return Request(x, "slot", "log_softmax", Values(), gathered, keep, 2, 256, 0)

    all_masked = _sample(1024, torch.float32, dict.fromkeys(range(0, 1024, 4), -math.inf))
    assert Quantize().encode(request(all_masked)) is None
    some = _sample(1024, torch.float32, {3: -math.inf})
    encoded = Quantize().encode(request(some))
    assert encoded is not None and encoded.nbytes < some.nbytes


class _Masked(nn.Module):
    """A log_softmax of which some entries are masked, as in attention."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 96), nn.Linear(96, 40), nn.Linear(40, 9)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        mask = torch.zeros(h.numel(), dtype=torch.bool)
        mask[1 :: self.every] = True
        weights = F.log_softmax(h.masked_fill(mask.view_as(h), -math.inf), dim=1).exp()
        return self.last(40 * weights)


@pytest.mark.parametrize("every", [3, 40, 5000])
@pytest.mark.parametrize("level", ["L1", "CB2"])
def test_masked_log_softmax_in_a_model(every: int, level: str) -> None:
    x, y = torch.randn(800, 64, generator=seeded(0)), torch.arange(800) % 9

    def step(model: nn.Module) -> list[Tensor]:
        F.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    stock = step(_Masked(every))
    torch.manual_seed(0)
    ours = step(gact_graph.wrap(_Masked(every), bits=8, level=level, adaptive=False, min_bytes=0))
    assert all(gradient.isfinite().all() for gradient in stock)
    for actual, expected in zip(ours, stock, strict=True):
        assert torch.allclose(actual, expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


def test_a_record_is_one_of_a_fake_tensor_too() -> None:
    packed = pack(torch.empty(1000, device="meta"), 2)
    assert isinstance(packed, Packed) and packed.groups is None
