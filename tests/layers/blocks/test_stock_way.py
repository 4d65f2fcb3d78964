"""Layers that run as in PyG beside blocks: unsupported ones, hooks of the user and errors."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from blocked import Alone
from samples import equal, graph, make, one_thread  # noqa: F401
from torch import nn
from torch_geometric.nn import EdgeConv, GCNConv, SAGEConv

import gact_graph

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


def test_in_training_a_batch_norm_over_messages_runs_as_stock():
    mlp = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    stock = Alone(EdgeConv(mlp, aggr="mean"))
    model = gact_graph.wrap(copy.deepcopy(stock), blocks=256, **EXACT)
    assert torch.equal(model(X, EDGES), stock(X, EDGES))
    assert equal([*model.buffers()], [*stock.buffers()])
    [row] = gact_graph.report(model).layers
    assert row.way == "stock" and "changes nn.1.num_batches_tracked" in row.reason
    assert "runs as in PyG" in str(gact_graph.report(model))


@pytest.fixture
def kept_garbage():
    """The garbage collector keeps what it finds, and runs when it is told to."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def test_tensors_of_a_layer_that_runs_as_stock_end_with_its_call(request):
    # Otherwise they live on until the collector runs, and the step peaks as much higher.
    model = Alone(EdgeConv(nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)), aggr="mean"))
    gact_graph.wrap(model, blocks=256, **EXACT)
    model(X, EDGES).sum().backward()
    request.getfixturevalue("kept_garbage")
    model(X, EDGES).sum().backward()
    gc.collect()
    assert gact_graph.report(model).layers[0].way == "stock"
    assert [tuple(o.shape) for o in gc.garbage if isinstance(o, torch.Tensor)] == []


def test_a_hook_of_the_users_own_is_called_as_ever():
    model = Alone(GCNConv(32, 8))
    gact_graph.wrap(model, blocks=256, **EXACT)
    seen = []
    model.conv.register_message_forward_hook(lambda module, args, out: seen.append(len(out)))
    model(X, EDGES)
    assert seen == [EDGES.size(1) + 300 - int((EDGES[0] == EDGES[1]).sum())]


@pytest.mark.parametrize("bad", ["dtype", "source", "destination", "negative"])
def test_an_error_of_the_caller_is_that_of_pyg_and_is_not_remembered(bad):
    x, edges = X, EDGES.clone()
    if bad == "dtype":
        x = X.double()
    else:
        edges[1 if bad == "destination" else 0, -1] = -1 if bad == "negative" else 300
    stock = Alone(make(lambda: SAGEConv(32, 8)))
    model = gact_graph.wrap(copy.deepcopy(stock), blocks=256, **EXACT)
    with pytest.raises((IndexError, RuntimeError, ValueError)) as expected:
        stock(x, edges)
    with pytest.raises(type(expected.value)) as got:
        model(x, edges)
    assert str(got.value) == str(expected.value)
    model(X, EDGES)
    assert gact_graph.report(model).layers[0].way == "blocks"
