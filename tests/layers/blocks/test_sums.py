"""Layers that sum weighted rows: which are recognized, with the same results."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from samples import ConvNet, distance, gradients, graph, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

import gact_graph
from gact_graph.layers.blocks import analysis, edge_work
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.ops import cpu

X, EDGES = graph()
WEIGHT = torch.rand(EDGES.size(1), generator=torch.Generator().manual_seed(5))
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


class Message(MessagePassing):
    """Adds up any function of what lies at the source, and of a weight that learns."""

    def __init__(self, function: Any) -> None:
        super().__init__(aggr="sum")
        self.weight = nn.Parameter(torch.rand(EDGES.size(1), 1))
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, weight=self.weight)
        return out

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return self.function(self, x_j, weight)


def _leave(module: Message, x: Tensor, weight: Tensor) -> Tensor:
    module.left = x * 2
    return weight * x


def _read_in_place(module: Message, x: Tensor, weight: Tensor) -> Tensor:
    return weight * (1 + x.sum(1, keepdim=True).sigmoid()) * x


SUMS = {
    "GCN": lambda: ConvNet(GCNConv(32, 24)),
    "GCN, weights": lambda: ConvNet(GCNConv(32, 24), WEIGHT),
    "GAT": lambda: ConvNet(GATConv(32, 8, heads=3)),
    "GAT, mean": lambda: ConvNet(GATConv(32, 8, heads=3, concat=False)),
    "GATv2": lambda: ConvNet(GATv2Conv(32, 8, heads=3)),
    "Transformer": lambda: ConvNet(TransformerConv(32, 8, heads=3, dropout=0.0)),
    "GraphConv, weights": lambda: ConvNet(GraphConv(32, 24), WEIGHT),
    "SAGE": lambda: ConvNet(SAGEConv(32, 24)),
    "weights first": lambda: ConvNet(Message(lambda m, x, w: w.exp() * x)),
    "rows first": lambda: ConvNet(Message(lambda m, x, w: torch.mul(x, w * w))),
    "another product": lambda: ConvNet(Message(lambda m, x, w: x * (w * w.detach()))),
    "GIN": lambda: ConvNet(GINConv(nn.Linear(32, 24))),
    "GCN, mean": lambda: ConvNet(GraphConv(32, 24, aggr="mean"), WEIGHT),
    "the row alone": lambda: ConvNet(Message(lambda m, x, w: x)),
}
OF_EDGES = SUMS.keys() - {"Transformer", "SAGE", "GCN, mean"}
"""Those whose weights are made of tensors of edges alone."""

OTHERS = {
    "a number a column": lambda: ConvNet(Message(lambda m, x, w: x * (w + torch.ones(1, 32)))),
    "not the row": lambda: ConvNet(Message(lambda m, x, w: x.relu() * w)),
    "in the weight too": lambda: ConvNet(Message(_read_in_place)),
    "left behind": lambda: ConvNet(Message(_leave)),
    "after the product": lambda: ConvNet(Message(lambda m, x, w: (x * w).tanh())),
    "of the wide type": lambda: ConvNet(Message(lambda m, x, w: x * w.double())),
}


def _step(model: nn.Module, **options: Any) -> list[Tensor]:
    if options:
        gact_graph.wrap(model, **options)
    torch.manual_seed(0)
    out = model(X)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return [out.detach(), *gradients(model)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[BlockedCall]:
    """Grows with each call that runs in blocks."""
    ran: list[BlockedCall] = []
    forward = BlockedCall.forward

    def watched(self: BlockedCall, *args: Any) -> list[Tensor]:
        ran.append(self)
        return forward(self, *args)

    monkeypatch.setattr(BlockedCall, "forward", watched)
    return ran


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("compiled", [True, False])
def test_sums_are_recognized_and_right(
    name: str, compiled: bool, calls: list[BlockedCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are given are taken for all edges at once: once in forward, once in backward."""
    if not compiled:
        monkeypatch.setattr(cpu, "load", lambda: None)
    expected = _step(make(SUMS[name]))
    assert distance(_step(make(SUMS[name]), blocks=256, **EXACT), expected) < 1e-6
    weighted_sum = calls[-1].analysis.weighted_sum
    assert weighted_sum is not None
    assert weighted_sum.of_edges == (name in OF_EDGES)
    assert "x_j" not in weighted_sum.weights.inputs


@pytest.mark.parametrize("net", OTHERS.values(), ids=OTHERS)
def test_others_are_left_as_they_are(net: Any, calls: list[BlockedCall]) -> None:
    expected = _step(make(net))
    assert distance(_step(make(net), blocks=256, **EXACT), expected) < 1e-6
    assert [call.analysis.weighted_sum for call in calls] == [None]


@pytest.mark.parametrize("name", ["GCN", "GAT", "Transformer", "SAGE"])
@pytest.mark.parametrize("options", [{"level": "L1", "blocks": 256}, {"level": "CB2"}], ids=str)
def test_the_same_values_are_read_from_codes(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without: the same codes of the same seeds, so rounding alone differs."""
    options = options | {"bits": 4, "adaptive": False, "min_bytes": 0}
    model = make(SUMS[name])
    got = _step(model, **options)
    monkeypatch.setattr(analysis, "match_weights", lambda *_: None)
    monkeypatch.setattr(edge_work, "_known", OrderedDict())
    assert distance(got, _step(make(SUMS[name]), **options)) < 1e-5


@pytest.mark.parametrize("name", ["x_j at the destination too", "reversed", "detached", "index"])
def test_weights_that_look_given(name: str) -> None:
    """The gradient of the weights is that of the layer, and so is what else reads the rows."""

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -gradient

    class Both(Message):
        def message(self, x_j: Tensor, x_i: Tensor, weight: Tensor) -> Tensor:
            return weight * x_j + 0 * x_i

    class Indexed(Message):
        def message(self, x_j: Tensor, weight: Tensor, index: Tensor) -> Tensor:
            return weight * x_j

    kinds = {
        "x_j at the destination too": lambda: Both(None),
        "reversed": lambda: Message(lambda m, x, w: Reversed.apply(w) * x),
        "detached": lambda: Message(lambda m, x, w: w.detach() * x),
        "index": lambda: Indexed(None),
    }
    expected = _step(make(lambda: ConvNet(kinds[name]())))
    got = _step(make(lambda: ConvNet(kinds[name]())), blocks=256, **EXACT)
    assert distance(got, expected) < 1e-6


def test_rows_beyond_the_last_source_have_no_gradient() -> None:
    edges = EDGES[:, EDGES[0] < 100]
    conv = make(lambda: GATConv(32, 8, heads=3, add_self_loops=False))
    x = X.clone().requires_grad_()
    gact_graph.wrap(conv, blocks=256, **EXACT)
    conv(x, edges)[:, :1].sum().backward()
    got = x.grad
    gact_graph.unwrap(conv)
    x.grad = None
    conv(x, edges)[:, :1].sum().backward()
    assert distance([got], [x.grad]) < 1e-6
