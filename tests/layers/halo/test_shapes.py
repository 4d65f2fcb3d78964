"""Parts of unequal sizes, without edges or without a halo, and inputs of other forms."""

from __future__ import annotations

import pytest
from partitioned import PARTS
from ranks import run_ranks

SHAPES = """
# Nodes of the last part have no edges at all; others have none that lead to them.
edges = torch.randint(150, (2, 900)).unique(dim=1)
edges = edges[:, edges[1] % 3 > 0]
data.edge_index = edges
del data.weight, data.attr
cuts = {
    "a part without edges": (torch.arange(N) >= 150).long(),
    "a part of one node": (torch.arange(N) == 77).long(),
    "no edges between parts": None,
}

class Pairs(Net):
    def forward(self, graph):
        x = graph.x
        for conv in self.convs:
            x = conv((x, x), graph.edge_index).relu()
        return self.last(x)

def made(kind, make, **options):
    torch.manual_seed(1)
    model = kind(make)
    return gact_graph.wrap(model, min_bytes=0, **options) if options else model

CONVS = {
    "GCN": (Net, lambda: pyg.GCNConv(W, W)),
    "GAT": (Net, lambda: pyg.GATConv(W, W)),
    "Transformer": (Net, lambda: pyg.TransformerConv(W, W)),
    "SAGE max": (Net, lambda: pyg.SAGEConv(W, W, aggr="max")),
    "a pair for GAT": (Pairs, lambda: pyg.GATConv((W, W), W, add_self_loops=False)),
    "a pair for SAGE": (Pairs, lambda: pyg.SAGEConv((W, W), W)),
    "a pair for GATv2": (Pairs, lambda: pyg.GATv2Conv((W, W), W, add_self_loops=False)),
}
for cut, owner in cuts.items():
    if owner is None:
        data.edge_index = edges[:, (edges[0] < 75) == (edges[1] < 75)]
        owner = (torch.arange(N) >= 75).long()
    part = partition(data, world, owner)[rank]
    for name, (kind, make) in CONVS.items():
        stock = made(kind, make)
        expected = step(stock, data)
        for options in (dict(level="lossless", bits=32), dict(bits=32, blocks=150)):
            model = made(kind, make, partition=part, **options)
            out = step(model, part)
            sum_gradients(model)
            for got, want in ((out, expected[part.nodes]), (gradients(model), gradients(stock))):
                error = float((got - want).norm() / want.norm())
                assert error < 1e-5, (cut, name, options, error)
    coded = made(*CONVS["GAT"], partition=part, bits=4, halo_bits=4)
    assert step(coded, part).isfinite().all()
"""


@pytest.mark.long
def test_parts_and_inputs_of_other_shapes(tmp_path):
    run_ranks(PARTS + SHAPES, tmp_path)
