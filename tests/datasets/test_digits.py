"""Handwritten digits as a graph: near neighbors mostly show the same digit."""

import torch

from datasets import load
from datasets.digits import NUM_NEIGHBORS


def test_counts_and_ranges():
    graph = load("digits")
    assert (graph.name, graph.num_nodes, graph.x.size(1), graph.num_classes) == (
        "digits",
        1797,
        64,
        10,
    )
    assert graph.x.min() == 0 and graph.x.max() == 1
    assert graph.y.unique().numel() == 10
    assert len(graph.train_idx) == 1078 and len(graph.val_idx) == 359


def test_edges_go_both_ways_once_and_never_to_themselves():
    graph = load("digits")
    source, target = graph.edge_index
    there, back = source * graph.num_nodes + target, target * graph.num_nodes + source
    assert (source != target).all()
    assert torch.equal(there.unique(), back.unique())
    assert there.unique().numel() == graph.num_edges
    assert source.bincount(minlength=graph.num_nodes).min() >= NUM_NEIGHBORS


def test_neighbors_mostly_show_the_same_digit():
    graph = load("digits")
    source, target = graph.edge_index
    assert (graph.y[source] == graph.y[target]).float().mean() > 0.95


def test_neighbors_are_nearer_than_the_rest():
    graph = load("digits")
    distance = torch.cdist(graph.x[:1], graph.x)[0]
    nearest = distance[1:].topk(NUM_NEIGHBORS, largest=False).indices + 1
    neighbors = graph.edge_index[1][graph.edge_index[0] == 0]
    assert torch.isin(nearest, neighbors).all()
