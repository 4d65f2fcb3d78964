"""Training in blocks of destination nodes beside stock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocked import Alone, trained
from samples import GraphNet, distance, equal, gradients, graph, labels, make, one_thread  # noqa: F401
from torch import nn
from torch_geometric.nn import GATConv, MessagePassing

import gact_graph
from gact_graph.layers.blocks.call import BlockedCall

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


@pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
@pytest.mark.parametrize("options", [{"blocks": 256}, {"level": "CB2", "blocks": 256}], ids=str)
def test_training_follows_stock(kind, options):
    stock = trained(make(lambda: GraphNet(kind)))
    model = gact_graph.wrap(make(lambda: GraphNet(kind)), **(EXACT | options))
    assert distance(trained(model), stock) < 1e-5
    assert any(row.blocks for row in gact_graph.report(model).layers)


@pytest.mark.parametrize(("level", "blocks"), [("L1", 256), ("CB2", False), ("CB2", 256)])
def test_with_adaptive_bits_what_a_layer_is_computed_from_is_measured(level, blocks):
    model = gact_graph.wrap(
        make(lambda: GraphNet("gat")), bits=4, level=level, blocks=blocks, min_bytes=0
    )
    trained(model)
    rows = gact_graph.report(model).contexts
    measured = {row.slot for row in rows if row.sensitivity is not None}
    # At L1 the projected features follow from the input of the norm before the layer.
    inside = "norm/batch_norm.input" if level == "L1" else "forward.x"
    assert any(inside in slot for slot in measured)
    assert gact_graph.report(model).average_bits <= 4


@pytest.mark.parametrize(
    "options", [{"blocks": 256}, {"level": "CB2", "blocks": False}, {"level": "CB2"}], ids=str
)
def test_a_sweep_leaves_no_trace(options):
    """Bits of 32 by pins: so noise does not tell runs apart, but replays do take place."""

    def run(adaptive):
        model = make(lambda: GraphNet("gat", dropout=0.5))
        given = {"bits": 32, "level": "L1"} | options
        gact_graph.wrap(model, adaptive=adaptive, adapt_interval=1, min_bytes=0, **given)
        return trained(model), [b.clone() for b in model.buffers()]

    (one, buffers), (other, others) = run(True), run(False)
    assert equal(one, other) and equal(buffers, others)


def test_evaluation_runs_in_blocks_too(monkeypatch):
    model = make(lambda: GraphNet("gat")).eval()
    blocks, forward = [], BlockedCall.forward

    def counted(call, *args):
        blocks.append(len(call.blocks))
        return forward(call, *args)

    monkeypatch.setattr(BlockedCall, "forward", counted)
    with torch.no_grad():
        expected = model(X, EDGES)
        gact_graph.wrap(model, blocks=256, **EXACT)
        got = model(X, EDGES)
    assert blocks and min(blocks) > 3
    assert torch.allclose(got, expected, atol=1e-6)


def test_two_models_at_once_and_bfloat16():
    models = [
        gact_graph.wrap(make(lambda: GraphNet("gat")), blocks=256, **EXACT),
        gact_graph.wrap(make(lambda: GraphNet("gcn")), **(EXACT | {"level": "CB2"})),
    ]
    stock = [make(lambda: GraphNet("gat")), make(lambda: GraphNet("gcn"))]
    for net in (models, stock):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            outs = [net[0](X, EDGES), net[1](X, EDGES)]
            loss = sum(F.cross_entropy(out.float(), labels()) for out in outs)
        loss.backward()
    for model, other in zip(models, stock, strict=True):
        assert distance(gradients(model), gradients(other)) < 0.02  # bfloat16 has 8 bits


def test_bipartite_with_isolated_nodes_and_duplicate_edges():
    edges = torch.tensor([[0, 0, 0, 5, 5, 9], [1, 1, 3, 3, 0, 6]])
    x = (torch.randn(10, 16), torch.randn(8, 16))
    conv = make(lambda: GATConv((16, 16), 8, add_self_loops=False))
    expected = conv(x, edges)
    expected.square().sum().backward()
    stock = gradients(conv)
    conv.zero_grad()
    model = gact_graph.wrap(Alone(conv), blocks=2, **EXACT)
    out = model(x, edges)
    out.square().sum().backward()
    assert torch.allclose(out, expected, atol=1e-6)
    assert distance(gradients(conv), stock) < 1e-5
    assert gact_graph.report(model).layers[0].blocks > 3


class AddedParameters(MessagePassing):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.tanh(x_j * (self.left + self.right)) * x_i


def test_parameters_that_are_added_have_gradients_of_their_own():
    # Autograd returns one tensor as the gradient of both.
    conv = make(AddedParameters)
    conv(X, EDGES).square().sum().backward()
    stock = gradients(conv)
    conv.zero_grad()
    model = gact_graph.wrap(Alone(conv), blocks=256, **EXACT)
    model(X, EDGES).square().sum().backward()
    assert gact_graph.report(model).layers[0].blocks > 3
    assert distance(gradients(conv), stock) < 1e-5


@pytest.mark.parametrize(
    ("blocks", "error", "words"),
    [
        (0, ValueError, r"Expected blocks of 1 to 2\^40 edges \(got 0\)"),
        (
            "all",
            TypeError,
            r"Expected blocks to be 'auto', a number of edges or False \(got 'all'\)",
        ),
        (1.5, TypeError, r"Expected blocks to be .* \(got float\)"),
    ],
)
def test_bad_blocks(blocks, error, words):
    with pytest.raises(error, match=words):
        gact_graph.wrap(nn.Linear(3, 3), blocks=blocks)
