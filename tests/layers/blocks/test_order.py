"""The edges of a graph in the order of their destinations, and their blocks."""

from __future__ import annotations

import pytest
import torch
from samples import graph
from waits import Waits

from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.orders import checksum

_, EDGES = graph()


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_blocks_have_each_edge_once_with_all_of_a_destination(target, size):
    order = Order(EDGES, target, 310)  # ten nodes more, without edges
    blocks = order.cuts.blocks(size)
    assert [b.first_node for b in blocks] == [0, *(b.end_node for b in blocks[:-1])]
    assert blocks[-1].end_node == 310 and blocks[-1].end_edge == EDGES.size(1)
    seen = []
    for block in blocks:
        positions = order.positions(block)
        destinations = order.destinations(block) + block.first_node
        assert torch.equal(EDGES[target][positions], destinations)
        assert torch.equal(EDGES[1 - target][positions], order.sources[block.edges])
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


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_is_of_compares_to_the_last_edge(chunk, on_host, monkeypatch):
    """On the CPU; and as on another device, with CPU tensors."""
    monkeypatch.setattr("gact_graph.layers.blocks.order._is_on_host", lambda tensor: on_host)
    monkeypatch.setattr("gact_graph.layers.blocks.order._CHUNK", chunk)
    monkeypatch.setattr("gact_graph.layers.blocks.order._CUDA_CHUNK", chunk)
    for edges in (EDGES, EDGES[:, EDGES[1].argsort(stable=True)]):
        order = Order(edges, 1, 300)
        assert order.is_of(edges.clone(), 1, 300)
        assert not order.is_of(edges, 0, 300) and not order.is_of(edges, 1, 301)
        assert not order.is_of(edges[:, 1:], 1, 300)
        for row in (0, 1):
            other = edges.clone()
            other[row, -1] = (other[row, -1] + 1) % 300
            assert not order.is_of(other, 1, 300)
        swapped = edges.clone()
        swapped[:, [0, -1]] = swapped[:, [-1, 0]]  # the same edges at other places
        assert not order.is_of(swapped, 1, 300)


def test_a_device_is_waited_for_once(monkeypatch):
    """However many edges there are: GATConv has its edges recognised in each forward."""
    order = Order(EDGES, 1, 300)
    monkeypatch.setattr("gact_graph.layers.blocks.order._is_on_host", lambda tensor: False)
    monkeypatch.setattr("gact_graph.layers.blocks.order._CUDA_CHUNK", 100)
    with Waits() as waits:
        assert order.is_of(EDGES.clone(), 1, 300)
    assert waits.seen == ["_local_scalar_dense"]
    with Waits() as waits:
        checksum(EDGES)
    assert waits.seen == ["_local_scalar_dense"]
