"""Messages that may not be cut into blocks run as PyG has them, and the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import distance, gradients, make
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.utils import scatter, softmax

import gact_graph
from gact_graph.layers.blocks import locality

NODES, EDGES_COUNT = 300, 2400
X = torch.randn(NODES, 8, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(NODES, (2, EDGES_COUNT), generator=torch.Generator().manual_seed(1))
LEVELS = {
    "lossless": {"level": "lossless", "blocks": 128},
    "L1": {"level": "L1", "blocks": 128},
    "CB2": {"level": "CB2", "blocks": 128},
}


class Message(MessagePassing):
    """Sums up any function of the rows at the sources, of a score, and of the ends of edges."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__(aggr="sum")
        self.lin, self.score = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        out: Tensor = self.propagate(edge_index, x=x, score=self.score(x).tanh())
        return out

    def message(
        self,
        x_j: Tensor,
        score_j: Tensor,
        edge_index_i: Tensor,
        edge_index_j: Tensor,
        size_i: int | None,
        size_j: int | None,
    ) -> Tensor:
        return self.function(self, x_j, score_j, edge_index_i, edge_index_j, size_i, size_j)


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


def _if_many(m: Any, x: Tensor, w: Tensor, i: Tensor, j: Tensor, n: int, s: int) -> Tensor:
    return x * 2 if len(x) > 2000 else x


NOT_LOCAL: dict[str, tuple[Callable[..., Tensor], str]] = {
    "softmax over sources": (lambda m, x, w, i, j, n, s: x * softmax(w, j, num_nodes=s), "rows"),
    "mean over sources": (
        lambda m, x, w, i, j, n, s: x * scatter(w, j, 0, s, "mean")[j],
        "rows",
    ),
    "degree of sources": (
        lambda m, x, w, i, j, n, s: x / torch.bincount(j, minlength=s)[j].view(-1, 1),
        "bincount",
    ),
    "position": (
        lambda m, x, w, i, j, n, s: x * torch.arange(x.size(0)).view(-1, 1),
        "position",
    ),
    "position of the length": (
        lambda m, x, w, i, j, n, s: x * torch.arange(len(x)).view(-1, 1),
        "number of edges",
    ),
    "number of edges": (_if_many, "reads the number of edges"),
    "divided by that number": (
        lambda m, x, w, i, j, n, s: x / x.size(0),
        "computes with the number",
    ),
    "number of nodes": (lambda m, x, w, i, j, n, s: x * n, "computes with the number"),
    "median": (lambda m, x, w, i, j, n, s: x * (w > w.median()), "statistic over all edges"),
    "mean": (lambda m, x, w, i, j, n, s: x - x.mean(0), "statistic over all edges (mean)"),
    "batch norm": (lambda m, x, w, i, j, n, s: m.norm(x), "norm.num_batches_tracked"),
    "norm without buffers": (
        lambda m, x, w, i, j, n, s: torch.batch_norm(
            x, None, None, None, None, True, 0.1, 1e-5, False
        ),
        "statistic over all edges",
    ),
    "largest": (lambda m, x, w, i, j, n, s: x / x.max(), "statistic over all edges (max)"),
    "a hook on a tensor": (lambda m, x, w, i, j, n, s: _hooked(x * 1), "calls register_hook"),
    "in place": (
        lambda m, x, w, i, j, n, s: x.mul_(2),
        "in-place operation",
    ),
    "sort": (lambda m, x, w, i, j, n, s: x.sort(0).values, "statistic over all edges (sort)"),
    "cumsum": (lambda m, x, w, i, j, n, s: x * w.cumsum(0), "statistic over all edges (cumsum)"),
    "unique": (
        lambda m, x, w, i, j, n, s: x * j.unique(return_inverse=True)[1].view(-1, 1),
        "size depends on values",
    ),
    "flip": (lambda m, x, w, i, j, n, s: x.flip(0), "statistic over all edges (flip)"),
    "the next edge": (lambda m, x, w, i, j, n, s: x + x.roll(1, 0), "over all edges (roll)"),
    "first edge": (lambda m, x, w, i, j, n, s: x + x[:1], "over all edges (slice)"),
    "between edges": (lambda m, x, w, i, j, n, s: (x @ x.t()).softmax(-1) @ x, ""),
    "numbers of destinations": (lambda m, x, w, i, j, n, s: x * i.view(-1, 1), "numbers of dest"),
    "self-loops": (lambda m, x, w, i, j, n, s: x * (i != j).view(-1, 1), "numbers of dest"),
    "numbers of destinations by position": (
        lambda m, x, w, i, j, n, s: x * i.unsqueeze(1)[:, [0]],
        "rows of other nodes than the destination of an edge (index)",
    ),
    "a scatter into the first edge": (
        lambda m, x, w, i, j, n, s: x.scatter(1, torch.zeros(1, 1, dtype=torch.long), 7.0),
        "rows of other nodes than the destination of an edge (scatter)",
    ),
    "squeezed": (
        lambda m, x, w, i, j, n, s: x * w.squeeze(0),
        "mixes rows of edges and nodes (squeeze)",
    ),
    "squeezed along several": (
        lambda m, x, w, i, j, n, s: x * w.squeeze((0, 1)).unsqueeze(1),
        "mixes rows of edges and nodes (squeeze)",
    ),
    "out=": (
        lambda m, x, w, i, j, n, s: x * _written(x.detach()),
        "writes into another tensor than its first argument (exp)",
    ),
    "other edges": (lambda m, x, w, i, j, n, s: x[j % len(x)], ""),
    "values": (lambda m, x, w, i, j, n, s: x * 2 if bool((x > 3).any()) else x, "reads values"),
    "permutation": (lambda m, x, w, i, j, n, s: x[torch.randperm(x.size(0))] * 0 + x, "position"),
    "one mask": (
        lambda m, x, w, i, j, n, s: x * nn.functional.dropout(torch.ones(1, 8), 0.5) * 0 + x,
        "all edges share",
    ),
}
LOCAL: dict[str, Callable[..., Tensor]] = {
    "softmax over destinations": lambda m, x, w, i, j, n, s: x * softmax(w, i, num_nodes=n),
    "mean over destinations": lambda m, x, w, i, j, n, s: x - scatter(x, i, 0, n, "mean")[i],
    "largest of a destination": lambda m, x, w, i, j, n, s: x - scatter(w, i, 0, n, "max")[i],
    "degree of destinations": lambda m, x, w, i, j, n, s: (
        x / scatter(torch.ones_like(w), i, 0, n, "sum")[i]
    ),
    "over channels": lambda m, x, w, i, j, n, s: x.softmax(-1) * x.mean(-1, keepdim=True),
    "sorted channels": lambda m, x, w, i, j, n, s: x.sort(-1).values.cumsum(-1).flip(-1),
    "matrices of edges": lambda m, x, w, i, j, n, s: (
        torch.bmm(x.view(-1, 2, 4), x.view(-1, 4, 2)).flatten(1).repeat(1, 2)
    ),
    "columns without others of one": lambda m, x, w, i, j, n, s: x * w.unsqueeze(2).squeeze(2),
    "a scatter over channels": lambda m, x, w, i, j, n, s: x.scatter(1, (w > 0).long(), 7.0),
    "columns put in": lambda m, x, w, i, j, n, s: _put_in(x, w),
    "a column of the product put in": lambda m, x, w, i, j, n, s: _overwrite(x * w, w),
    "numbers of sources": lambda m, x, w, i, j, n, s: x * (j % 3).view(-1, 1),
    "without gradient": lambda m, x, w, i, j, n, s: _partly(x, w),
    "detached": lambda m, x, w, i, j, n, s: x + (x.sign() - x).detach(),
    ".data": lambda m, x, w, i, j, n, s: x * w.data,
}


def _overwrite(product: Tensor, w: Tensor) -> Tensor:
    product[:, :1] = w
    return product


def _written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    torch.exp(x * 0.1, out=out)
    return out


def _put_in(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :1] = w
    out[:, 1:] = x[:, 1:]
    return out


def _partly(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = w.exp()
    return x * scale


def _step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    out = model(X, EDGES)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), *gradients(model)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NOT_LOCAL)
def test_messages_that_are_not_local(name: str, level: str) -> None:
    function, reason = NOT_LOCAL[name]
    expected = _step(make(lambda: Message(function)))
    model = make(lambda: Message(function))
    gact_graph.wrap(model, bits=32, adaptive=False, min_bytes=0, **LEVELS[level])
    assert distance(_step(model), expected) < 1e-5
    [row] = [row for row in gact_graph.report(model).layers if row.slot.endswith("propagate")]
    assert row.way == "stock"
    assert reason in str(row.reason)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOCAL)
def test_messages_that_are_local(name: str, level: str) -> None:
    expected = _step(make(lambda: Message(LOCAL[name])))
    model = make(lambda: Message(LOCAL[name]))
    gact_graph.wrap(model, bits=32, adaptive=False, min_bytes=0, **LEVELS[level])
    assert distance(_step(model), expected) < 1e-5
    [row] = [row for row in gact_graph.report(model).layers if row.slot.endswith("propagate")]
    assert row.way == "blocks", row.reason


class Updated(Message):
    """Writes into a view of the sum."""

    def update(self, out: Tensor) -> Tensor:
        out[:, 0] = 3.0
        return out


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("level", LEVELS)
def test_sums_that_are_written_to(level: str, aggr: str) -> None:
    def net() -> Message:
        model = Updated(lambda m, x, w, i, j, n, s: x)
        model.aggr_module = {"sum": SumAggregation, "mean": MeanAggregation}[aggr]()
        return model

    expected = _step(make(net))
    model = make(net)
    gact_graph.wrap(model, bits=32, adaptive=False, min_bytes=0, **LEVELS[level])
    assert distance(_step(model), expected) < 1e-5
    [row] = [row for row in gact_graph.report(model).layers if row.slot.endswith("propagate")]
    assert row.way == "blocks", row.reason


class _Through(torch.autograd.Function):
    """Rounds; its gradient goes through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize("function", [_Through, _Reversal])
@pytest.mark.parametrize("level", LEVELS)
def test_autograd_functions_keep_their_backward(function: Any, level: str) -> None:
    def net() -> Message:
        return Message(lambda m, x, w, i, j, n, s: function.apply(x * 3))

    expected = _step(make(net))
    model = make(net)
    gact_graph.wrap(model, bits=32, adaptive=False, min_bytes=0, **LEVELS[level])
    assert distance(_step(model), expected) < 1e-6
    [row] = [row for row in gact_graph.report(model).layers if row.slot.endswith("propagate")]
    assert f"autograd function {function.__name__}" in str(row.reason)


def test_hooks_inside_messages_run_as_ever() -> None:
    """A trace would call them once."""

    class Net(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.nn = nn.Linear(8, 8)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.propagate(edge_index, x=x)
            return out

        def message(self, x_j: Tensor) -> Tensor:
            return self.nn(x_j).relu()

    seen: list[int] = []
    model = Net()
    gact_graph.wrap(model, level="lossless", blocks=128, min_bytes=0)
    model(X, EDGES)
    assert gact_graph.report(model).layers[0].way == "blocks"
    model.nn.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    for _ in range(3):
        model(X, EDGES)
    assert seen == [EDGES_COUNT] * 3
    assert "has a hook on its module nn" in str(gact_graph.report(model).layers[0].reason)


def test_a_layer_that_is_another_at_each_call() -> None:
    """Traces are made for a few states; then the layer runs as PyG has it, until it rests."""

    class Scaled(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.bias = 0.0, nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.propagate(edge_index, x=x)
            return out

        def message(self, x_j: Tensor) -> Tensor:
            return (x_j * self.scale + self.bias).tanh()

    model = gact_graph.wrap(Scaled(), level="lossless", blocks=512, min_bytes=0)
    ways = []
    for step in range(20):
        model.scale = float(step)
        out = model(X, EDGES)
        expected = scatter((X[EDGES[0]] * step).tanh(), EDGES[1], 0, NODES, "sum")
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        ways.append(gact_graph.report(model).layers[0].way)
    assert ways[0] == "blocks" and ways[-1] == "stock"
    model(X, EDGES)
    assert gact_graph.report(model).layers[0].way == "blocks"


@pytest.mark.parametrize("name", ["leaky_relu", "leaky_relu_", "elu_", "celu_", "hardtanh_"])
def test_rules_do_not_depend_on_tags_of_new_versions(name: str) -> None:
    """They are tagged as pointwise since torch 2.12: without leaky_relu, no GAT is in blocks."""
    assert getattr(torch.ops.aten, name) in locality._POINTWISE
