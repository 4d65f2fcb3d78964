"""The edges of a graph in the order of their destinations, and their blocks."""

from __future__ import annotations

import pytest
import torch
from samples import graph

from gact_graph.layers.blocks.order import Order

_, EDGES = graph()


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_blocks_have_each_edge_once_with_all_of_a_destination(target, size):
    order = Order(EDGES, target, 310)  # ten nodes more, without edges
    blocks = order.blocks(size)
    assert [b.first_node for b in blocks] == [0, *(b.end_node for b in blocks[:-1])]
    assert blocks[-1].end_node == 310 and blocks[-1].end_edge == EDGES.size(1)
    seen = []
    for block in blocks:
        positions = order.positions(block)
        destinations = order.destinations(block) + block.first_node
        assert torch.equal(EDGES[target][positions], destinations)
        assert torch.equal(EDGES[1 - target][positions], order.neighbors[block.edges])
        assert block.num_edges + block.num_nodes <= size or block.num_nodes == 1
        seen.append(torch.as_tensor(positions))
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(EDGES.size(1)))


def test_sorted_edges_need_no_permutation():
    order = Order(EDGES[:, EDGES[1].argsort(stable=True)], 1, 300)
    assert order.permutation is None
    assert Order(EDGES, 1, 300).permutation is not None


def test_a_destination_beyond_the_last_node_is_refused():
    with pytest.raises(IndexError):
        Order(EDGES, 1, int(EDGES.max()))


@pytest.mark.parametrize("target", [0, 1])
def test_the_same_edges_by_source(target):
    by_source = Order(EDGES, target, 300).by_source
    edges = EDGES[:, by_source.permutation]
    assert torch.equal(edges[target], by_source.neighbors)
    assert torch.equal(edges[1 - target], EDGES[1 - target].sort().values)
    assert torch.equal(by_source.permutation.sort().values, torch.arange(EDGES.size(1)))
