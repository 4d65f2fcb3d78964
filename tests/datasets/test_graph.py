"""The graph that loaders return: its counts and its checks."""

import dataclasses

import pytest
import torch

from datasets import Graph


def make(**changes):
    fields = {
        "name": "tiny",
        "x": torch.ones(3, 2),
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "y": torch.tensor([0, 1, 1]),
        "num_classes": 2,
        "train_idx": torch.tensor([0]),
        "val_idx": torch.tensor([1]),
        "test_idx": torch.tensor([2]),
    }
    return Graph(**{**fields, **changes})


def test_counts():
    graph = make()
    assert (graph.num_nodes, graph.num_edges, graph.multi_label) == (3, 2, False)
    assert make(y=torch.eye(3), num_classes=3).multi_label


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().name = "other"


def test_a_graph_may_lack_edges_and_all_nodes_but_one_to_train_on():
    none = torch.empty(0, dtype=torch.int64)
    assert make(edge_index=none.view(2, 0), val_idx=none, test_idx=none).num_edges == 0
