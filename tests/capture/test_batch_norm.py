"""Batch norm whose backward works in the memory of the decoded input."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from samples import seeded
from torch import Tensor, nn

import gact_graph
from gact_graph.capture.batch_norm import _BatchNorm
from gact_graph.codecs import Saved
from gact_graph.ops.allocations import watching_allocations

ROWS, COLUMNS = 9000, 64


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rows", [2, 7, ROWS])
def test_gradients_are_those_of_stock(affine: bool, rows: int) -> None:
    generator = seeded(2)
    x = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64) * 3 + 50
    gradient = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64)
    parts = torch.randn(2, COLUMNS, generator=generator, dtype=torch.float64) if affine else None

    def run(norm) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        weight, bias = (None, None) if parts is None else parts.clone().requires_grad_()
        leaves = [leaf, *(t for t in (weight, bias) if t is not None)]
        moments = torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
        out = norm(leaf, weight, bias, *moments)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient), *moments]

    def stock(x, weight, bias, mean, var):
        return F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)

    ours = run(lambda *tensors: _BatchNorm.apply(*tensors, 0.1, 1e-5))
    for own, other in zip(ours, run(stock), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, COLUMNS), nn.BatchNorm1d(COLUMNS), nn.ReLU(), nn.Linear(COLUMNS, 3)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_a_wrapped_model_trains_as_stock(frozen: str | None) -> None:
    stock, x = _net(), torch.randn(ROWS, 8, generator=seeded(3))
    if frozen is not None:
        getattr(stock[1], frozen).requires_grad_(False)
    model = gact_graph.wrap(copy.deepcopy(stock), bits=16, adaptive=False, min_bytes=0)
    for net in (stock, model):
        net(x).square().mean().backward()
    for (name, own), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert (own.grad - other.grad).norm() <= 1e-3 * other.grad.norm() + 1e-7, name
    for own, other in zip(model.buffers(), stock.buffers(), strict=True):
        assert torch.equal(own, other)


def test_slots_are_those_of_pytorchs_own_norm() -> None:
    x = torch.randn(ROWS, 8, generator=seeded(3))
    slots = []
    for levels in ({"bits": 4}, {"bits": 4, "pin": {"1/batch_norm.input": 32}}):
        model = gact_graph.wrap(_net(), adaptive=False, min_bytes=0, **levels)
        model(x).sum().backward()
        slots.append({row.slot for row in gact_graph.report(model).contexts})
    assert "1/batch_norm.input" in slots[0]
    assert slots[0] == slots[1]


def test_the_gradient_of_a_gradient_is_that_of_stock() -> None:
    stock, x = _net(), torch.randn(50, 8, generator=seeded(4))
    model = gact_graph.wrap(copy.deepcopy(stock), bits=16, adaptive=False, min_bytes=0)
    found = []
    for net in (stock, model):
        leaf = x.clone().requires_grad_()
        (of_leaf,) = torch.autograd.grad(net(leaf).square().sum(), leaf, create_graph=True)
        of_leaf.square().sum().backward()
        found.append([p.grad for p in net.parameters() if p.grad is not None])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-4)


def test_backward_allocates_one_tensor_beside_the_gradient() -> None:
    x = torch.randn(8 * ROWS, COLUMNS, generator=seeded(5))
    # No recipe computes the result of a softmax again.
    layers = nn.Linear(COLUMNS, COLUMNS), nn.Softmax(1), nn.BatchNorm1d(COLUMNS)
    model = gact_graph.wrap(nn.Sequential(*layers), bits=4, adaptive=False, min_bytes=0)
    for _ in range(2):
        out = model(x)
        gradient = torch.ones_like(out)
        with watching_allocations() as watch:
            if watch is None:
                pytest.skip("no compiled kernels watch allocations")
            torch.autograd.grad(out, model[2].bias, gradient)
            peak = watch.peak()
    # The input, decoded.
    assert peak < 1.5 * x.nbytes


@pytest.mark.parametrize("affine", [True, False])
def test_the_gradient_takes_the_place_of_the_decoded_input(
    affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    places: list[int] = []
    plain = Saved.tensor

    def tensor(saved: Saved) -> Tensor:
        result = plain(saved)
        decoded.append(result.data_ptr())
        return result

    layers = nn.Linear(8, COLUMNS), nn.Softmax(1), nn.BatchNorm1d(COLUMNS, affine=affine)
    model = gact_graph.wrap(nn.Sequential(*layers), bits=4, adaptive=False, min_bytes=0)
    out = model(torch.randn(ROWS, 8, generator=seeded(3)))
    out.grad_fn.register_hook(lambda results, _: places.append(results[0].data_ptr()))
    monkeypatch.setattr(Saved, "tensor", tensor)
    out.sum().backward()
    assert places == decoded[:1]


def test_in_blocks_an_exact_input_costs_one_tensor_less() -> None:
    """PyTorch's own backward makes two tensors of the input's size; plain lossless keeps its."""
    peaks, x = {}, torch.randn(ROWS, COLUMNS, requires_grad=True)
    for blocks in (False, "auto"):
        net = nn.Sequential(nn.BatchNorm1d(COLUMNS))
        model = gact_graph.wrap(net, level="lossless", blocks=blocks, min_bytes=0)
        out, gradient = model(x), torch.randn(ROWS, COLUMNS)
        with watching_allocations() as watch:
            if watch is None:
                pytest.skip("no compiled kernels watch allocations")
            torch.autograd.grad(out, x, gradient)
            peaks[blocks] = watch.peak()
    assert 0.9 < (peaks[False] - peaks["auto"]) / x.nbytes < 1.1
