"""Whether a layer runs in blocks follows from its operations, not from a block or from values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import distance, gradients, make, one_thread, seeded  # noqa: F401
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    HGTConv,
    MessagePassing,
    PointTransformerConv,
    SAGEConv,
    TransformerConv,
)

import gact_graph

EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}
NODES = 300
X = torch.randn(NODES, 32, generator=seeded(0))
EDGES = torch.randint(NODES, (2, 1000), generator=seeded(1))
LATE = torch.stack(
    [
        torch.randint(200, (1000,), generator=seeded(2)),
        torch.randint(200, NODES, (1000,), generator=seeded(3)),
    ]
)
"""The first 200 nodes have no edges, so the first blocks have none."""


class Net(nn.Module):
    """A linear layer, and a conv with its other arguments."""

    def __init__(self, conv: nn.Module, *before: Any) -> None:
        super().__init__()
        self.first, self.conv, self.before = nn.Linear(32, 32), conv, before

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        out: Tensor = self.conv(self.first(x), *self.before, *args)
        return out


class Message(MessagePassing):
    """Any function of the rows at the sources, and of a weight that learns."""

    def __init__(self, function: Callable[..., Tensor], aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.function = function
        self.weight = nn.Parameter(torch.randn(32, generator=seeded(4)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return self.function(self, x_j)


def _step(model: nn.Module, *inputs: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    out = model(*inputs)
    out.backward(torch.randn(out.shape, generator=seeded(5)))
    return [out.detach(), *gradients(model)]


def _as_stock(net: Callable[[], nn.Module], *steps: Any, blocks: int = 20, **options: Any) -> Any:
    """Steps with both, which must agree; returns the layers' rows of the report."""
    stock = make(net)
    model = copy.deepcopy(stock)
    options = EXACT | {"blocks": blocks} | options
    gact_graph.wrap(model, **options)
    for inputs in steps:
        assert distance(_step(model, *inputs), _step(stock, *inputs)) < 1e-6
    rows = gact_graph.report(model).layers
    assert rows
    return rows


class TestBlocksWithoutEdges:
    @pytest.mark.parametrize(
        "conv",
        [
            lambda: TransformerConv(32, 8, heads=2),
            lambda: GATConv(32, 8, heads=2, add_self_loops=False),
            lambda: GATv2Conv(32, 8, heads=2, add_self_loops=False),
            lambda: SAGEConv(32, 8, aggr="std"),
            lambda: Message(lambda m, x: torch.sigmoid((m.weight * x).sum(-1, keepdim=True)) * x),
        ],
        ids=["transformer", "gat", "gatv2", "std", "sigmoid"],
    )
    def test_come_first(self, conv: Any) -> None:
        for row in _as_stock(lambda: Net(conv()), (X, LATE)):
            assert row.blocks > 8

    def test_come_first_with_types_of_edges(self) -> None:
        types = torch.randint(3, (1000,), generator=seeded(6))
        [row] = _as_stock(lambda: Net(FastRGCNConv(32, 8, 3)), (X, LATE, types))
        assert row.blocks > 8

    def test_median_runs_as_stock(self) -> None:
        """It counts the edges of nodes by ``bincount``, whose size depends on values."""
        first = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 0, 100, 100, 100]])
        edges = torch.cat([first, LATE], dim=1)
        [row] = _as_stock(lambda: Net(SAGEConv(32, 8, aggr="median")), (X, edges))
        assert "size depends on values (bincount)" in row.reason

    def test_no_output_channels(self) -> None:
        model = gact_graph.wrap(Net(GCNConv(32, 0)), blocks=20, **EXACT)
        assert model(X, LATE).shape == (NODES, 0)

    def test_a_call_without_edges(self) -> None:
        steps = [(X, EDGES[:, :0]), (X, EDGES)]
        rows = _as_stock(lambda: Net(GATConv(32, 8, add_self_loops=False)), *steps)
        assert all(row.blocks > 8 for row in rows)


def test_a_choice_that_the_first_forward_does_not_meet() -> None:
    net = Net(Message(lambda m, x: torch.where(x > 6, x * 2, x)))
    [row] = _as_stock(lambda: net, (X, EDGES), (X * 10, EDGES))
    assert row.blocks > 8


def test_blocks_whose_nodes_have_one_edge() -> None:
    """A softmax over one edge is one, whatever its argument."""
    once = torch.stack([torch.randint(NODES, (200,), generator=seeded(7)), torch.arange(200)])
    often = torch.randint(200, NODES, (800,), generator=seeded(8))
    edges = torch.cat([once, torch.stack([EDGES[0, :800], often])], dim=1)
    position = torch.randn(NODES, 3, generator=seeded(9))
    [row] = _as_stock(lambda: Net(PointTransformerConv(32, 8), position), (X, edges), blocks=300)
    assert row.blocks > 2


def test_lstm_where_all_blocks_have_the_same_largest_degree() -> None:
    """It pads to the largest degree, and runs on over the padding."""
    index = torch.arange(NODES).repeat_interleave(3)
    edges = torch.stack([torch.randint(NODES, (len(index),), generator=seeded(10)), index])
    more = torch.cat([edges, edges[:, -1:].expand(2, 4)], dim=1)
    net = Net(SAGEConv(32, 8, aggr="lstm"))
    [row] = _as_stock(lambda: net, (X, edges), (X, more))
    assert "reads values of tensors in Python" in row.reason


def test_a_mean_over_all_edges_in_training_alone() -> None:
    net = Net(Message(lambda m, x: x - x.mean(0) if m.training else x))
    [row] = _as_stock(lambda: net, (X, EDGES))
    assert "a statistic over all edges (mean)" in row.reason


def test_a_layer_that_gives_zeros_at_first() -> None:
    """With parameters of zero all its results are equal, over all edges and over some."""

    def net() -> nn.Module:
        conv = Message(lambda m, x: m.weight * (x - x.mean(0)))
        nn.init.zeros_(conv.weight)
        return Net(conv)

    [row] = _as_stock(net, (X, EDGES))
    assert "a statistic over all edges (mean)" in row.reason


class ByDestination(MessagePassing):
    """Looks a number of each node up by itself; blocks count their nodes from zero."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.number = torch.ones(NODES, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor, edge_index_i: Tensor) -> Tensor:
        return x_j * self.number[edge_index_i]


def test_rows_that_a_layer_looks_up_by_destination() -> None:
    stock, model = make(lambda: Net(ByDestination())), make(lambda: Net(ByDestination()))
    gact_graph.wrap(model, blocks=20, **EXACT)
    for scale in (torch.ones(NODES), torch.randn(NODES, generator=seeded(11))):
        for net in (stock, model):
            net.conv.number = scale[:, None]
        assert distance(_step(model, X, EDGES), _step(stock, X, EDGES)) < 1e-6


class Modes(MessagePassing):
    """Has a setting, a mode, and a function that is none of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.square = False

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, weight=weight)
        return out

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        if self.square:
            return x_j.square()
        if not self.training:
            return x_j.tanh()
        return x_j if weight is None else weight * x_j


def test_decides_again_when_a_setting_mode_or_argument_changes() -> None:
    weight = torch.rand(EDGES.size(1), 1, generator=seeded(12)).requires_grad_()
    found = []
    for wrapped in (False, True):
        model = make(lambda: Net(Modes()))
        if wrapped:
            gact_graph.wrap(model, blocks=20, **EXACT)
        steps = []
        for number in range(10):
            model.conv.train(number % 3 != 1)
            model.conv.square = number % 3 == 2
            given = (weight,) if number % 2 else ()
            steps += _step(model, X, EDGES, *given)
            if number % 4 == 3:
                model = model.double() if number == 3 else model.float()
                break_off = X.double() if number == 3 else X
                if number == 3:
                    steps += _step(model, break_off, EDGES)
                    model = model.float()
        steps.append(weight.grad)
        weight.grad = None
        found.append(steps)
    assert len(found[0]) == len(found[1])
    for expected, got in zip(*found, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


class Keep(torch.autograd.Function):
    """Keeps its input past the hooks on what autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.x


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: Keep.apply(x),
        lambda m, x: x * torch.from_numpy(x.detach().numpy().copy()),
        lambda m, x: x * float(x.detach().sum(1).max().item() > 3),
        lambda m, x: x * (x.detach().amax(1, keepdim=True) > 1),
        lambda m, x: x[:, x.detach().sum(0).argsort()],
        lambda m, x: x.clone().relu_(),
        lambda m, x: torch.zeros_like(x).copy_(x).mul_(x.detach()),
        lambda m, x: torch.nn.functional.normalize(x, dim=-1),
        lambda m, x: x.index_fill(1, x.detach().sum(0).argmax(), 0.0),
    ],
)
def test_functions_that_read_the_row(function: Any) -> None:
    _as_stock(lambda: Net(Message(function)), (X, LATE), (X * 3, EDGES), (X, EDGES))


@pytest.mark.parametrize(
    "options", [{"blocks": 64}, {"level": "CB2", "blocks": None}, {"level": "CB2"}], ids=str
)
@pytest.mark.parametrize(
    "conv", [lambda: SAGEConv((-1, -1), 16), lambda: GATv2Conv(-1, 16)], ids=["sage", "gatv2"]
)
def test_lazy_parameters(conv: Any, options: dict[str, Any]) -> None:
    rows = _as_stock(lambda: Net(conv()), (X, EDGES), (X, EDGES), **options)
    assert all(row.reason is None for row in rows)


def test_copies_decide_for_themselves() -> None:
    model = gact_graph.wrap(Net(GATv2Conv(32, 8)), blocks=64, **EXACT)
    expected = _step(model, X, EDGES)
    assert distance(_step(copy.deepcopy(model), X, EDGES), expected) == 0


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(32, 32), GATv2Conv(32, 8, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.conv, self.first(x), edge_index, use_reentrant=False)
        return out


OPTIONS = [{"blocks": 64}, {"level": "CB2", "blocks": None}, {"level": "CB2"}, {"level": "L1"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoint_inside(options: dict[str, Any]) -> None:
    _as_stock(Checkpointed, (X, EDGES), (X, EDGES), **options)


def test_an_evaluation_between_a_checkpoint_and_its_backward() -> None:
    """It does not change that the layer runs as stock, as an input needs a gradient."""
    stock, x = make(Checkpointed), X.clone().requires_grad_()
    model = gact_graph.wrap(copy.deepcopy(stock), blocks="auto", **EXACT)
    for net in (stock, model):
        out = net(x, EDGES)
        with torch.no_grad():
            net(X, EDGES)
        out.square().sum().backward()
    assert distance(gradients(model), gradients(stock)) < 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_function_transforms(training: bool, options: dict[str, Any]) -> None:
    stock = make(lambda: Net(GATv2Conv(32, 8))).train(training)
    model = gact_graph.wrap(copy.deepcopy(stock), **(EXACT | options))
    found = []
    for net in (stock, model):

        def loss(parameters: Any, net: nn.Module = net) -> Tensor:
            return torch.func.functional_call(net, parameters, (X, EDGES)).square().sum()

        found.append([*torch.func.grad(loss)(dict(net.named_parameters())).values()])
    assert distance(*found) < 1e-6


@pytest.mark.parametrize("options", [*OPTIONS, {"blocks": False}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_forward_mode(training: bool, options: dict[str, Any]) -> None:
    stock = make(lambda: Net(GATv2Conv(32, 8))).train(training)
    model = gact_graph.wrap(copy.deepcopy(stock), **(EXACT | options))
    found = []
    for net in (stock, model):
        with torch.set_grad_enabled(training), forward_ad.dual_level():
            out = net(forward_ad.make_dual(X, X.cos()), EDGES)
            found.append([*forward_ad.unpack_dual(out)])
    assert distance(*found) < 1e-6


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jit_trace(options: dict[str, Any]) -> None:
    stock = make(lambda: Net(GATv2Conv(32, 8))).eval()
    model = gact_graph.wrap(copy.deepcopy(stock), **(EXACT | options))
    traced = torch.jit.trace(model, (X, EDGES), check_trace=False)
    assert distance([traced(X, LATE)], [stock(X, LATE)]) < 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_edge_index_made_in_inference_mode(options: dict[str, Any]) -> None:
    with torch.inference_mode():
        edges = EDGES.clone()
    _as_stock(lambda: Net(GATv2Conv(32, 8)), (X, edges), **options)


def test_hgt_with_codes_and_adaptive_bits() -> None:
    """Its propagate gets no gradient of most of its parameters, which a replay must bear."""
    kinds = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])
    model = make(lambda: HGTConv(32, 64, kinds, heads=2))
    gact_graph.wrap(model, bits=4, blocks=64, min_bytes=0)
    for _ in range(2):
        out = model({"a": X, "b": X.flip(0)}, dict.fromkeys(kinds[1], EDGES))
        sum(t.sum() for t in out.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert gact_graph.report(model).measurements > 0


class InUpdate(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, weight=weight)
        return out

    def update(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs * weight.mean()


class InBoth(InUpdate):
    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.mean()


@pytest.mark.parametrize(
    ("conv", "rows", "reason"),
    [(InUpdate, 1000, "may be of nodes or of edges"), (InBoth, NODES, "both in message and in")],
)
def test_arguments_of_update(conv: Any, rows: int, reason: str) -> None:
    weight = torch.rand(rows, 1, generator=seeded(13))
    [row] = _as_stock(lambda: Net(conv()), (X, EDGES, weight))
    assert reason in row.reason
