"""Dropout of a wrapped model: the results, gradients and random numbers of stock PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import seeded
from seen import SeenOperations
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import gact_graph
from gact_graph.ops.allocations import watching_allocations
from gact_graph.ops.bernoulli import draws_as_torch


class _Net(nn.Module):
    def __init__(self, dropout: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 7)
        self.dropout, self.before = dropout, before

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.before(self.first(x))))


_SAME = {
    "function": lambda x: F.dropout(x, 0.3),
    "keywords": lambda x: F.dropout(input=x, training=True, p=0.6),
    "in place": lambda x: F.dropout(x, 0.4, True, True),
    "in place by keyword": lambda x: F.dropout(x, 0.4, inplace=True),
    "module": nn.Dropout(0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.2, True),
    "bfloat16": lambda x: F.dropout(x.bfloat16(), 0.3).float(),
    "double": lambda x: F.dropout(x.double(), 0.3).float(),
}
_AS_BEFORE = {
    "few elements": lambda x: F.dropout(x[:40], 0.3),
    "transposed": lambda x: F.dropout(x.t(), 0.3).t(),
    "p of 0": lambda x: F.dropout(x, 0.0),
    "p of 1": lambda x: F.dropout(x, 1.0),
    "evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3),
}


def _step(net: _Net, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    out = net(x)
    state = torch.get_rng_state()
    out.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return [out.detach(), state, *gradients]


@pytest.mark.parametrize(
    ("name", "before"),
    [
        (name, before)
        for name in (*_SAME, *_AS_BEFORE)
        for before in (torch.relu, torch.tanh, torch.neg)
        # Backward of the others needs their results unchanged.
        if before is torch.neg or not name.startswith("in place")
    ],
)
def test_equals_stock(name: str, before: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = _Net((_SAME | _AS_BEFORE)[name], before)
    x = torch.randn(200, 32, generator=seeded(1))
    expected = _step(net, x)
    gact_graph.wrap(net, level="lossless", min_bytes=0)
    seen: list[Any] = []
    # Under a mode of others, backward computes nothing again.
    plain = _step(net, x)
    with SeenOperations(seen):
        actual = _step(net, x)
    assert all(map(torch.equal, plain, expected)) and all(map(torch.equal, actual, expected))
    drawn = "gact_graph::draw_bits" in [operation.name() for operation in seen]
    assert drawn == (name in _SAME and draws_as_torch())


def _dropout_before_a_hook(x: Tensor) -> Tensor:
    result = F.dropout(x, 0.5)
    x.register_hook(lambda gradient: gradient + 1)
    return result


def _more(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient + 1 for gradient in gradients)


def _dropout_with_a_hook_on_its_node(x: Tensor) -> Tensor:
    result = F.dropout(x, 0.5)
    assert result.grad_fn is not None
    result.grad_fn.register_hook(_more)
    return result


def _dropout_after_a_hook_on_a_node(x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(_more)
    return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    "hooked",
    [_dropout_before_a_hook, _dropout_with_a_hook_on_its_node, _dropout_after_a_hook_on_a_node],
)
@pytest.mark.parametrize("options", [{"level": "lossless"}, {"bits": 8, "adaptive": False}])
def test_a_hook_between_relu_and_dropout(
    options: dict[str, Any], hooked: Callable[[Tensor], Tensor]
) -> None:
    """What it adds to the gradient passes ReLU where dropout passes nothing."""
    torch.manual_seed(0)
    net = _Net(hooked, torch.relu)
    x = torch.randn(200, 32, generator=seeded(1))
    expected = _step(net, x)
    gact_graph.wrap(net, min_bytes=0, **options)
    # The last layer's gradient has noise at 8 bits.
    assert all(map(torch.equal, _step(net, x)[:4], expected[:4]))


def test_mask_is_one_bit_for_each_element() -> None:
    net = _Net(nn.Dropout(0.5), torch.tanh)
    gact_graph.wrap(net, bits=4, min_bytes=0)
    net(torch.randn(1_000, 32, generator=seeded(1))).sum().backward()
    masks = [row for row in gact_graph.report(net).contexts if "dropout" in row.slot]
    assert [row.stored_bytes for row in masks] == [1_000 * 48 // 8]


def test_no_tensor_of_noise_exists() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1_000, 1).requires_grad_(False))
    gact_graph.wrap(net, level="lossless", min_bytes=0)
    x = torch.randn(1_000, 1_000, generator=seeded(1)).requires_grad_()
    net(x)
    with watching_allocations() as watch:
        if watch is None:
            pytest.skip("no compiled kernels watch allocations")
        net(x)
        forward = watch.peak()
    assert forward < 1.2 * x.nbytes  # the result of dropout, and a bit for each element


def _on_cpu(x: Tensor) -> Tensor:
    with save_on_cpu():
        return F.dropout(x, 0.4)


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: checkpoint(F.dropout, x, 0.4, use_reentrant=False),
        lambda x: checkpoint(F.dropout, x, 0.4, use_reentrant=True),
        _on_cpu,
    ],
    ids=["checkpoint", "reentrant checkpoint", "save_on_cpu"],
)
@pytest.mark.parametrize("level", ["L0", "lossless", "L2", "CB2"])
def test_under_hooks_of_others(level: str, dropout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = _Net(dropout, torch.tanh)
    x = torch.randn(200, 32, generator=seeded(1))
    out, state, *gradients = _step(net, x)
    gact_graph.wrap(net, level=level, bits=32, min_bytes=0)
    again = _step(net, x)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], state)
    assert all(map(torch.allclose, again[2:], gradients))


def test_second_derivatives() -> None:
    net = _Net(lambda x: F.dropout(x, 0.3), torch.tanh)
    found = []
    for wrapped in (False, True):
        if wrapped:
            gact_graph.wrap(net, level="lossless", min_bytes=0)
        torch.manual_seed(3)
        x = torch.randn(200, 32, generator=seeded(1), requires_grad=True)
        (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        found.append([gradient, *torch.autograd.grad(gradient.square().sum(), net.parameters())])
    assert all(map(torch.equal, *found))
