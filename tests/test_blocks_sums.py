"""Layers that add up weighted rows: which are seen to, and that it makes no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import distance, gradients, graph, make, one_thread  # noqa: F401
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
from gact_graph.blocks import layers

X, EDGES = graph()
WEIGHT = torch.rand(EDGES.size(1), generator=torch.Generator().manual_seed(5))
EXACT = {"level": "lossless", "bits": 32, "adaptive": False}


class Net(nn.Module):
    """One conv between two linear layers, which also keep what it leaves behind."""

    def __init__(self, conv: nn.Module, *extra: Tensor) -> None:
        super().__init__()
        self.first, self.conv, self.extra = nn.Linear(32, 32), conv, extra

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(torch.tanh(self.first(x)), EDGES, *self.extra)
        return out


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
    "GCN": lambda: Net(GCNConv(32, 24)),
    "GCN, weights": lambda: Net(GCNConv(32, 24), WEIGHT),
    "GAT": lambda: Net(GATConv(32, 8, heads=3)),
    "GAT, mean": lambda: Net(GATConv(32, 8, heads=3, concat=False)),
    "GATv2": lambda: Net(GATv2Conv(32, 8, heads=3)),
    "Transformer": lambda: Net(TransformerConv(32, 8, heads=3, dropout=0.0)),
    "GraphConv, weights": lambda: Net(GraphConv(32, 24), WEIGHT),
    "weights first": lambda: Net(Message(lambda m, x, w: w.exp() * x)),
    "rows first": lambda: Net(Message(lambda m, x, w: torch.mul(x, w * w))),
    "another product": lambda: Net(Message(lambda m, x, w: x * (w * w.detach()))),
}
OTHERS = {
    "GIN": lambda: Net(GINConv(nn.Linear(32, 24))),
    "SAGE": lambda: Net(SAGEConv(32, 24)),
    "GCN, mean": lambda: Net(GraphConv(32, 24, aggr="mean"), WEIGHT),
    "a number a column": lambda: Net(Message(lambda m, x, w: x * (w + torch.ones(1, 32)))),
    "not the row": lambda: Net(Message(lambda m, x, w: x.relu() * w)),
    "in the weight too": lambda: Net(Message(_read_in_place)),
    "left behind": lambda: Net(Message(_leave)),
    "after the product": lambda: Net(Message(lambda m, x, w: (x * w).tanh())),
    "the row alone": lambda: Net(Message(lambda m, x, w: x)),
    "of the wide type": lambda: Net(Message(lambda m, x, w: x * w.double())),
}


def _step(model: nn.Module, **options: Any) -> list[Tensor]:
    if options:
        gact_graph.wrap(model, **options)
    torch.manual_seed(0)
    out = model(X)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return [out.detach(), *gradients(model)]


def _summed(model: nn.Module) -> list[Any]:
    return [*model.conv.propagate._summed.values()]


@pytest.mark.parametrize("net", SUMS.values(), ids=SUMS)
def test_sums_are_recognized_and_right(net: Any) -> None:
    expected, model = _step(make(net)), make(net)
    assert distance(_step(model, blocks=256, **EXACT), expected) < 1e-6
    assert [summed is not None for summed in _summed(model)] == [True]


@pytest.mark.parametrize("net", OTHERS.values(), ids=OTHERS)
def test_others_are_left_as_they_are(net: Any) -> None:
    expected, model = _step(make(net)), make(net)
    assert distance(_step(model, blocks=256, **EXACT), expected) < 1e-6
    assert _summed(model) == [None]


@pytest.mark.parametrize("name", ["GCN", "GAT", "Transformer"])
@pytest.mark.parametrize("options", [{"level": "L1", "blocks": 256}, {"level": "CB2"}], ids=str)
def test_the_same_values_are_read_from_codes(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without: the same codes of the same seeds, so rounding alone differs."""
    options = options | {"bits": 4, "adaptive": False}
    model = make(SUMS[name])
    got = _step(model, **options)
    assert None not in _summed(model)
    monkeypatch.setattr(layers, "find_summed", lambda *given: None)
    other = make(SUMS[name])
    assert distance(got, _step(other, **options)) < 1e-5
    assert set(_summed(other)) == {None}


def test_attention_dropout_is_that_of_forward() -> None:
    """The output is linear in the values, which only the last linear layer of them scales."""
    conv = make(lambda: TransformerConv(32, 8, heads=3, dropout=0.5, root_weight=False))
    model = gact_graph.wrap(Net(conv), blocks=256, **EXACT)
    out = model(X)
    out.backward(weight := torch.randn_like(out))
    value = conv.lin_value
    of_values = (value.weight.grad * value.weight).sum() + (value.bias.grad * value.bias).sum()
    assert of_values.item() == pytest.approx((out * weight).sum().item(), rel=1e-4)
    assert None not in _summed(model)


def test_a_message_that_turns_into_another_is_noticed() -> None:
    """Each call is looked at: what was a sum on one graph may be something else on the next."""
    turned: list[bool] = []
    net = Net(Message(lambda m, x, w: (w * x).tanh() if turned else w * x))
    model = gact_graph.wrap(net, blocks=256, **EXACT)
    first = model(X)
    turned.append(True)
    second = _step(model)
    assert not torch.equal(first, second[0])
    gact_graph.unwrap(model)
    model.zero_grad()
    assert distance(second, _step(model)) < 1e-6


def test_no_message_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row at the source has no memory, nor has the product with it."""
    sizes = []
    net = Net(Message(lambda m, x, w: w * x))
    inner = net.conv.message

    def message(x_j: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = inner(x_j, weight)
        sizes.append((x_j.untyped_storage().nbytes(), out.untyped_storage().nbytes()))
        return out

    model = gact_graph.wrap(net, blocks=256, **EXACT)
    model(X).sum().backward()
    monkeypatch.setattr(model.conv, "message", message)
    model.zero_grad()
    model(X).sum().backward()
    assert len(sizes) > 8 and set(sizes) == {(4, 4)}
