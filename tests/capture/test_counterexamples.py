"""Programs that an attack on capture found: another gradient than in PyTorch, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import Lambda, seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.codecs.quantize import exceeds_float32

ROWS = 1200


class Stop(torch.autograd.Function):
    """A function without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def net(forward: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = Lambda(forward)
    model.first, model.second = nn.Linear(64, 64), nn.Linear(64, 64)
    model.norm = nn.BatchNorm1d(64)
    model.weight = nn.Parameter(torch.rand(64, generator=seeded(1)))
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()
    return [p.grad for p in model.parameters()]


X = torch.randn(ROWS, 64, generator=seeded(2))

PROGRAMS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Tensor]] = {
    "a product of three dimensions, transposed": (
        lambda m, x: F.softplus(m.first(x.transpose(1, 2))) * m.weight,
        torch.randn(1000, 64, 3, generator=seeded(3)),
    ),
    "a dropout whose gradient is transposed": (
        lambda m, x: F.dropout(m.first(x), 0.3).t().contiguous() * torch.ones(ROWS).exp(),
        X,
    ),
    "vmap inside of forward": (
        lambda m, x: torch.func.vmap(lambda row: m.first(row).relu())(m.second(x)) * m.weight,
        X,
    ),
    "nested tensors": (
        lambda m, x: (
            F.linear(
                torch.nested.nested_tensor([x[:200], x[200:]]), m.first.weight, m.first.bias
            ).to_padded_tensor(0.0)
            * m.weight
        ),
        X,
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", PROGRAMS)
def test_lossless_has_the_bits_of_stock(name: str) -> None:
    forward, x = PROGRAMS[name]
    model = gact_graph.wrap(net(forward), level="lossless", min_bytes=0)
    for own, expected in zip(gradients(model, x), gradients(net(forward), x), strict=True):
        assert (own is None) == (expected is None)
        assert own is None or torch.equal(own, expected)


OPERATIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "relu": lambda m, x: m.first(x).relu(),
    "dropout": lambda m, x: F.dropout(m.first(x), 0.5),
    "scaled": lambda m, x: m.first(x) * m.weight.exp(),
    "linear": lambda m, x: m.first(x.sin()),
    "addmm": lambda m, x: torch.addmm(m.first(x), x.sin(), m.first.weight.t()),
    "batch norm": lambda m, x: m.norm(m.first(x)),
}


@pytest.mark.parametrize("level", ["lossless", "L1"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_parameter_without_a_gradient_gets_none(name: str, level: str) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return module.second(x).sum() + Stop.apply(OPERATIONS[name](module, x)).sum()

    x = torch.randn(ROWS, 64, generator=seeded(2))
    stock, model = net(forward), gact_graph.wrap(net(forward), level=level, min_bytes=0)
    got, expected = gradients(model, x), gradients(stock, x)
    assert [g is None for g in got] == [g is None for g in expected]
    assert any(g is None for g in got) and any(g is not None for g in got)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_float64_far_from_zero_keeps_its_deviations(norm: type[nn.Module]) -> None:
    """Codes are made in float32, which rounds a deviation of 1 from 1e8 to 8 or 0."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.norm(model.first(x).flip(0) + 1e8)

    model, x = net(forward).double(), X.double()
    model.norm = norm(64).double()
    ours = gact_graph.wrap(copy.deepcopy(model), bits=16, adaptive=False, min_bytes=0)
    weights = torch.randn(ROWS, 64, generator=seeded(4), dtype=torch.float64)
    for each in (model, ours):
        (each(x) * weights).sum().backward()
    torch.testing.assert_close(ours.norm.weight.grad, model.norm.weight.grad, rtol=1e-3, atol=0.1)


def test_float64_without_its_zeros() -> None:
    """The slices of a norm are those of all elements, and the codes those of the others."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = model.first(x).relu() * 1e8
        return model.norm(h.relu()) + h.relu().square()

    model, x = net(forward).double(), X.double()
    model.norm = nn.LayerNorm(64).double()
    with torch.no_grad():
        model.first.bias[0] = 1e6
    ours = gact_graph.wrap(copy.deepcopy(model), bits=16, adaptive=False, min_bytes=0)
    for each in (model, ours):
        each(x).sum().backward()
    expected = model.first.weight.grad
    assert (ours.first.weight.grad - expected).norm() < 1e-2 * expected.norm()


def test_slices_of_elements_that_were_left_out() -> None:
    x = torch.rand(7, dtype=torch.float64) + 1e9
    assert exceeds_float32(x, ((4, 5), (1,))) and not exceeds_float32(x - 1e9, ((4, 5), (1,)))
