"""A softmax in several operations, whose backward multiplies two readings of the exponentials."""

from __future__ import annotations

import copy

import torch
from samples import seeded
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import gact_graph

N, EDGES = 150, torch.randint(150, (2, 900), generator=seeded(0))
X, TARGET = torch.randn(N, 16, generator=seeded(1)), torch.randn(N, 16, generator=seeded(2))


class Sharp(nn.Module):
    """Attention whose weights are far from equal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(16, 8, heads=2)
        with torch.no_grad():
            self.conv.att_src.mul_(3)
            self.conv.att_dst.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x, EDGES)
        return out


def _gradient(model: nn.Module) -> Tensor:
    model.zero_grad()
    (model(X.clone()) * TARGET).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_gradient_of_attention_has_no_bias_at_two_bits() -> None:
    torch.manual_seed(0)
    stock = Sharp()
    exact = _gradient(stock)
    options = {"bits": 2, "adaptive": False, "blocks": False, "min_bytes": 0}
    # The softmax alone.
    model = gact_graph.wrap(copy.deepcopy(stock), pin={"*/mul*": 32}, **options)
    found = torch.stack([_gradient(model) - exact for _ in range(600)]) / exact.norm()
    assert {row.slot: row.bits for row in gact_graph.report(model).contexts if row.bits} == {
        "conv/edge_update/softmax.exp.result": 4
    }
    assert found.mean(0).norm() < 0.015  # 4 % at 2 bits
