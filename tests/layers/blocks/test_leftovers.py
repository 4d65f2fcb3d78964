"""Blocks leave nothing behind: after unwrap, an exception, a hundred graphs or a step."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from blocked import WIDE, Alone, Wide, trained
from samples import GraphNet, equal, graph, labels, make, one_thread, train_step  # noqa: F401
from torch import nn
from torch_geometric.nn import MessagePassing

import gact_graph
from gact_graph.capture.session import Session

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}
FIXED = {"adaptive": False, "min_bytes": 0}


def test_unwrap_restores_all_and_copies_stand_alone():
    model = make(lambda: GraphNet("gat"))
    before = [dict(vars(m)) for m in model.modules()]
    gact_graph.wrap(model, blocks=256, level="CB2", min_bytes=0)
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    trained(model, steps=1)
    for other in (twin, stored):
        trained(other, steps=1)
        assert gact_graph.report(other).layers
        assert equal([*other.parameters()], [*model.parameters()])
    gact_graph.unwrap(model)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert {*vars(module)} == {*attributes}
        assert "propagate" not in vars(module) and "forward" not in vars(module)


class Looked(MessagePassing):
    """Looks up a row for the kind of a source, beside dropout."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(3, 32))

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind_j):
        return F.dropout(x_j, 0.5) * self.rows[kind_j.squeeze(1)]


def test_an_exception_in_a_block_leaves_no_trace():
    model, stock = gact_graph.wrap(Alone(Looked()), blocks=256, **EXACT), Alone(Looked())
    kind = torch.arange(300)[:, None] % 3
    wrong = kind.clone()
    wrong[EDGES[0, -1]] = 3
    model(X, EDGES, kind).sum().backward()
    states = []
    for net in (model, stock):
        torch.manual_seed(0)
        with pytest.raises(IndexError, match="out of bounds"):
            net(X, EDGES, wrong)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)  # also where blocks had drawn before the error
    model(X, EDGES, kind).sum().backward()
    assert gact_graph.report(model).layers[0].way == "blocks"


def test_a_hundred_graphs_leave_nothing_behind():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=4, blocks=256, min_bytes=0)
    alive = []
    for seed in range(100):
        x, edges = graph(edges=500 + seed, seed=seed)
        F.cross_entropy(model(x, edges), labels()).backward()
        alive.append(weakref.ref(x))
        orders = model.forward.controller.blocks.orders
        assert orders.nbytes < 12 * 20_000
    del x, edges
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 1


@pytest.mark.parametrize("kind", ["gat", "gatv2", "transformer"])
@pytest.mark.parametrize("level", ["L1", "CB2"])
def test_no_session_outlives_its_graph(kind, level):
    """Found in a probe: it kept the contexts of the first forward for as long as the model."""

    def sessions():
        gc.collect()
        return sum(type(o) is Session for o in gc.get_objects())

    before = sessions()
    net = gact_graph.wrap(
        make(lambda: Wide(WIDE[kind]())), bits=3, level=level, blocks=200, **FIXED
    )
    train_step(net, X, EDGES)
    assert sessions() == before
