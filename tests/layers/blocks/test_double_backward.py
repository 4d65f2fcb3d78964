"""Gradients of gradients, as of forces: they come in blocks, and agree with those of stock PyG."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    PNAConv,
    SAGEConv,
    TransformerConv,
)

import gact_graph

N, E, WIDTH = 9, 40, 4
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=N))
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Linear(o, o))


CONVS = {
    "GCN": (lambda: GCNConv(WIDTH, WIDTH), None),
    "SAGE": (lambda: SAGEConv(WIDTH, WIDTH, aggr="mean"), None),
    "GAT": (lambda: GATConv(WIDTH, 2, heads=2, edge_dim=2), "edge_attr"),
    "GAT with dropout": (lambda: GATConv(WIDTH, 2, heads=2, edge_dim=2, dropout=0.3), "edge_attr"),
    "GATv2": (lambda: GATv2Conv(WIDTH, 2, heads=2, edge_dim=2), "edge_attr"),
    "Transformer": (lambda: TransformerConv(WIDTH, 2, heads=2, edge_dim=2), "edge_attr"),
    "PNA": (
        lambda: PNAConv(WIDTH, WIDTH, ["mean", "max", "std"], ["identity"], DEGREES, edge_dim=2),
        "edge_attr",
    ),
    "Edge": (lambda: EdgeConv(mlp(2 * WIDTH, WIDTH)), None),
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        make, self.edges = CONVS[name]
        self.convs = nn.ModuleList(make() for _ in range(2))

    def forward(self, x, e):
        given = {} if self.edges is None else {self.edges: e}
        for conv in self.convs:
            x = torch.tanh(conv(x, EDGES, **given))
        return x


def net(name):
    torch.manual_seed(1)
    return Net(name).double()


def inputs():
    generator = torch.Generator().manual_seed(2)
    shapes = ((N, WIDTH), (E, 2))
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    ]


def check(run, *leaves):
    """Whether first and second derivatives are right, in directions drawn at random."""
    return gradcheck(run, leaves, fast_mode=True) and gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", CONVS)
def test_second_derivatives_of_layers(name):
    model = gact_graph.wrap(net(name), blocks=11, **EXACT)

    def run(x, e):
        torch.manual_seed(3)  # dropout
        return model(x, e)

    x, e = inputs()
    run(x, e)
    assert {row.way for row in gact_graph.report(model).layers} == {"blocks"}
    if CONVS[name][1] is None:
        assert check(lambda x: run(x, e), x)
    else:
        assert check(run, x, e)


def trained_on_forces(model):
    """The gradients of a loss of energy and forces."""
    x, e = inputs()
    energy = model(x, e).square().sum()
    [force] = torch.autograd.grad(energy, x, create_graph=True)
    (energy + force.square().sum()).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", [name for name in CONVS if "dropout" not in name])
def test_parameters_learn_from_forces(name):
    stock = net(name)
    model = gact_graph.wrap(copy.deepcopy(stock), blocks=11, **EXACT)
    for found, expected in zip(trained_on_forces(model), trained_on_forces(stock), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", None])
def test_second_derivatives_of_messages_by_hand(reduce):
    torch.manual_seed(1)
    function = mlp(2 * WIDTH + 2, 3).double()

    def message(x_i, x_j, e):
        return function(torch.cat([x_i, x_j, e], -1))

    def run(x, e):
        return gact_graph.message_passing(message, x, EDGES, e, reduce=reduce, blocks=11)

    assert check(run, *inputs())


class Largest(TorchDispatchMode):
    """Notes the most float64 numbers that fit into a tensor which an operation gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.nbytes // 8)
        return result


def test_no_tensor_of_all_messages_is_made():
    x, e = inputs()
    largest = {}
    for blocks in (5, False):
        torch.manual_seed(1)
        function = nn.Sequential(nn.Linear(2 * WIDTH + 2, 32), nn.Tanh()).double()
        with Largest() as found:
            out = gact_graph.message_passing(
                lambda x_i, x_j, e, mlp=function: mlp(torch.cat([x_i, x_j, e], -1)),
                x,
                EDGES,
                e,
                reduce="max",
                blocks=blocks,
            )
            [force] = torch.autograd.grad(out.sum(), x, create_graph=True)
            force.square().sum().backward()
        largest[blocks] = found.numel
    assert largest[False] == E * 32
    assert largest[5] < E * 32


def test_a_third_derivative_is_refused_with_the_way_out():
    x, e = inputs()
    function = mlp(2 * WIDTH + 2, 3).double()
    out = gact_graph.message_passing(
        lambda x_i, x_j, e: function(torch.cat([x_i, x_j, e], -1)), x, EDGES, e, blocks=11
    )
    [first] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"without create_graph=True .* blocks=False"):
        torch.autograd.grad(first.square().sum(), x, create_graph=True)


def test_a_batch_of_gradients_is_refused_with_the_way_out():
    x, e = inputs()
    out = gact_graph.message_passing(lambda x_i, x_j, e: x_i * x_j, x, EDGES, e, blocks=11)
    with pytest.raises(RuntimeError, match=r"got a batch of gradients.* blocks=False"):
        torch.autograd.grad(out.sum(0), x, torch.eye(WIDTH, dtype=out.dtype), is_grads_batched=True)
