"""Roles: nodes and edges, by sizes."""

from __future__ import annotations

import pytest
import torch
from samples import FEATURES, GraphNet, Mlp, graph, make, one_thread  # noqa: F401
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv
from torch_geometric.typing import WITH_TORCH_SPARSE
from zoo import csr, sparse

import gact_graph
from gact_graph.capture.ledger import Sizes

X, EDGES = graph()


class TestSizes:
    def test_of_every_adjacency(self):
        coo = torch.eye(3).to_sparse()
        formats = [EDGES, EdgeIndex(EDGES), csr(), coo, csr().to_sparse_csc()]
        counts = [2000, 2000, csr().values().numel(), 3, csr().values().numel()]
        if WITH_TORCH_SPARSE:
            formats.append(sparse())
            counts.append(sparse().nnz())
        for adjacency, count in zip(formats, counts, strict=True):
            sizes = Sizes()
            sizes.add(adjacency, [10, None])
            assert sizes.role_of((count, 4), of_edges=False) == "edge"
            assert sizes.role_of((10, 4), of_edges=False) == "node"
            assert sizes.role_of((11, 4), of_edges=False) == "other"
            assert sizes.role_of((), of_edges=True) == "other"

    def test_both_sides_of_a_bipartite_graph(self):
        sizes = Sizes()
        sizes.add(EDGES, (10, 20))
        assert {sizes.role_of((n,), of_edges=True) for n in (10, 20)} == {"node"}

    def test_a_batch_may_come_first(self):
        sizes = Sizes()
        sizes.add(EDGES, (10, 10))
        assert sizes.role_of((7, 10, 4), of_edges=False) == "node"
        assert sizes.role_of((7, 2000, 4), of_edges=False) == "edge"
        assert sizes.role_of((7, 5, 10), of_edges=False) == "other"

    def test_as_many_edges_as_nodes(self):
        sizes = Sizes()
        sizes.add(torch.zeros(2, 10), (10, 10))
        assert sizes.role_of((10, 4), of_edges=True) == "edge"
        assert sizes.role_of((10, 4), of_edges=False) == "node"


def roles(model):
    return {row.slot: row.role for row in gact_graph.report(model).contexts}


class TestRoles:
    def test_of_gat(self):
        model = gact_graph.wrap(
            make(lambda: GraphNet("gat")), level="lossless", bits=32, min_bytes=0
        )
        model(X, EDGES)
        expected = {
            "convs.0/mul.input": "node",
            "convs.0/index_select.index": "index",
            "convs.0/edge_update/leaky_relu.input": "mask",
            "convs.0/edge_update/softmax.exp.result": "edge",
            "convs.0/edge_update/softmax.div.other.source": "node",
            "convs.0/message/mul.other": "edge",
            "norm/batch_norm.input": "node",
            "norm/batch_norm.result1": "other",
            "relu.result": "mask",
            "dropout.other": "mask",
            "convs.1/lin/linear.input": "node",
        }
        role_of = roles(model)
        assert {slot: role_of[slot] for slot in expected} == expected

    def test_a_graph_with_as_many_edges_as_nodes(self):
        conv = GATConv(FEATURES, FEATURES, add_self_loops=False)
        model = gact_graph.wrap(conv, level="lossless", bits=32, min_bytes=0)
        model(X, EDGES[:, :300])
        role_of = roles(model)
        assert role_of["message/mul.other"] == "edge"
        assert role_of["mul.input"] == "node"

    def test_without_message_passing_there_is_neither(self):
        model = gact_graph.wrap(make(Mlp), level="lossless", bits=32, min_bytes=0)
        model(X)
        assert {*roles(model).values()} == {"other"}

    @pytest.mark.parametrize("form", [csr, lambda: EdgeIndex(EDGES, sparse_size=(300, 300))])
    def test_of_other_adjacencies(self, form):
        model = gact_graph.wrap(
            make(lambda: GraphNet("gat")), level="lossless", bits=32, min_bytes=0
        )
        model(X, form())
        role_of = roles(model)
        assert role_of["convs.0/message/mul.other"] == "edge"
        assert role_of["convs.1/lin/linear.input"] == "node"
