"""Convs of the zoo on two parts: each gives the result of one process, or is refused."""

from __future__ import annotations

import pytest
from ranks import run_ranks

CONVS = """
from torch_geometric.data import Data
from gact_graph.distributed import partition, sum_gradients
import zoo

E = zoo.EDGES.size(1)
data = Data(x=zoo.X, edge_index=zoo.EDGES, number=torch.arange(E))
part = partition(data, world)[rank]

class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first, self.conv = nn.Linear(zoo.WIDTH, zoo.WIDTH), case.make()
        for module in self.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    def forward(self, x, before, edge_index, extra, named):
        out = self.conv(self.first(x), *before, edge_index, *extra, **named)
        return out[0] if isinstance(out, tuple) else out

def step(model, *inputs, cotangent):
    model.zero_grad()
    out = model(*inputs)
    out.mul(cotangent[: len(out)]).sum().backward()
    return out.detach()

def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

def cut(value):
    if value.dim() == 2 and value.size(1) == E:  # the edges of SignedConv
        return part.edge_index
    return value[part.nodes if len(value) == zoo.NODES else part.number]

def close(found, expected, what):
    error = float((found - expected).norm()), float(expected.norm())
    assert error[0] <= 1e-5 * max(error[1], 1.0), (what, error)

def made(case, **options):
    torch.manual_seed(1)
    model = Net(case)
    return gact_graph.wrap(model, bits=32, min_bytes=0, **options) if options else model

cotangent = torch.randn(zoo.NODES, 1, generator=torch.Generator().manual_seed(0))
elsewhere = "GCN GAT Transformer Edge GEN".split()
refused = set()
for name, case in zoo.CONVS.items():
    kind = name.split()[0]
    if "tensor" not in case.formats or kind.removesuffix("Conv") in elsewhere:
        continue
    extra = [zoo.EDGES] if kind == "SignedConv" else case.extra  # both ways would be two graphs
    inputs = zoo.X, case.before, zoo.EDGES, extra, dict(case.named)
    few = cut(zoo.X), [*map(cut, case.before)], part.edge_index, [*map(cut, extra)], {}
    stock = made(case)
    expected = step(stock, *inputs, cotangent=cotangent)
    try:
        model = made(case, partition=part, blocks=300)
    except ValueError as error:
        assert "Expected a model that can run on a part" in str(error), error
        refused.add(name)
        continue
    close(step(model, *few, cotangent=cut(cotangent)), expected[part.nodes], name)
    sum_gradients(model)
    got, want = gradients(model), gradients(stock)
    for key, gradient in got.items():  # of what is not used, zeros
        close(gradient, want.get(key, torch.zeros(())), (name, key))
    assert want.keys() <= got.keys(), name
    assert gact_graph.report(model).halo_bytes > 0, name
    gact_graph.unwrap(model)  # some convs share a ReLU with all others of their class
assert refused == {
    *("ChebConv", "SGConv cached", "FastRGCNConv", "HypergraphConv", "SuperGATConv", "DirGNNConv"),
    *("GPSConv", "GPSConv performer", "HGTConv", "HANConv", "HeteroConv"),
    *({"MeshCNNConv"} & {*zoo.CONVS}),  # new in PyG 2.7
}, refused
"""


@pytest.mark.long
def test_the_zoo_on_two_parts(tmp_path):
    run_ranks(CONVS, tmp_path)
