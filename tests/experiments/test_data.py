"""The tensors that a model trains on: normalization, standardized features and layouts."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from experiments_samples import small_graph

from experiments.helpers.data import layout_of, prepare
from experiments.helpers.errors import ExperimentError


def test_edges_go_both_ways_and_once() -> None:
    graph = small_graph()
    task = prepare(graph, "edge_index")
    edges = set(map(tuple, graph.edge_index.t().tolist()))
    expected = edges | {(target, source) for source, target in edges}
    found = list(map(tuple, task.adjacency.t().tolist()))
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_adjacency_is_normalized_with_self_loops() -> None:
    graph = small_graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adjacency = prepare(graph, "csr").adjacency
    assert adjacency.layout == torch.sparse_csr
    edges = torch.zeros(60, 60)
    edges[graph.edge_index[0], graph.edge_index[1]] = 1
    loops = ((edges + edges.t()) > 0).float()
    loops.fill_diagonal_(1)
    root = loops.sum(dim=1).pow(-0.5)
    torch.testing.assert_close(adjacency.to_dense(), root[:, None] * loops * root[None, :])


def test_standardised_on_training_nodes_only() -> None:
    graph = small_graph()
    x = graph.x.clone()
    x[:, 2] = 5.0
    x[50, 2] = 9.0  # a test node
    task = prepare(replace(graph, x=x), "csr", standardize=True)
    known = task.x[graph.train_idx]
    torch.testing.assert_close(known.mean(dim=0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(known.std(dim=0, correction=0), torch.tensor([1.0, 1.0, 0.0]))
    assert task.x[50, 2] == 4.0
    assert torch.equal(prepare(graph, "csr").x, graph.x)


def test_layouts() -> None:
    assert [layout_of(model) for model in ("gcn", "gat", "gcnii")] == ["csr", "edge_index", "csr"]


def test_empty_split_is_told() -> None:
    graph = replace(small_graph(), val_idx=torch.empty(0, dtype=torch.int64))
    words = r"Expected at least one .* 'small' \(got 30, 0 and 15\)"
    with pytest.raises(ExperimentError, match=words):
        prepare(graph, "csr")
