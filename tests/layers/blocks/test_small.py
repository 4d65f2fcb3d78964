"""Layers whose messages are too few to matter: ``"auto"`` leaves them as PyG has them."""

import torch
from samples import make
from torch import nn
from torch_geometric.nn import GCNConv

import gact_graph

NODES = 2000


class TwoGraphs(nn.Module):
    """One layer on many edges, one on few."""

    def __init__(self):
        super().__init__()
        self.many, self.few = GCNConv(16, 64), GCNConv(64, 4)

    def forward(self, x, many, few):
        return self.few(self.many(x, many).relu(), few)


def inputs():
    torch.manual_seed(0)
    return torch.randn(NODES, 16), *(torch.randint(NODES, (2, n)) for n in (40_000, 3000))


def ways(min_bytes, **options):
    model = gact_graph.wrap(make(TwoGraphs), bits=8, min_bytes=min_bytes, **options)
    for _ in range(2):
        model(*inputs()).square().mean().backward()
    return {row.slot.split("/")[0]: row for row in gact_graph.report(model).layers}


def test_each_layer_is_judged_alone():
    found = ways(8 << 20, blocks="auto")
    assert found["many"].way == "blocks"
    assert (found["few"].way, found["few"].reason) == ("stock", "is small (min_bytes=)")


def test_no_layer_is_small_where_none_may_be():
    assert {row.way for row in ways(0, blocks="auto").values()} == {"blocks"}


def test_a_number_of_edges_is_kept_to():
    assert {row.way for row in ways(4 << 20, blocks=500).values()} == {"blocks"}


def test_a_small_layer_runs_as_stock_to_the_bit_also_in_evaluation():
    stock, model = make(TwoGraphs), make(TwoGraphs)
    gact_graph.wrap(
        model, level="lossless", bits=32, adaptive=False, blocks="auto", min_bytes=1 << 30
    )
    assert torch.equal(stock.eval()(*inputs()), model.eval()(*inputs()))


def test_a_gradient_of_an_input_may_be_differentiated_again():
    x, many, few = inputs()
    x.requires_grad_()
    model = gact_graph.wrap(make(TwoGraphs), blocks="auto", bits=32, min_bytes=0)
    (force,) = torch.autograd.grad(model(x, many, few).sum(), x, create_graph=True)
    force.square().sum().backward()
    rows = gact_graph.report(model).layers
    assert {row.way for row in rows} == {"stock"} and "twice" in rows[0].reason
