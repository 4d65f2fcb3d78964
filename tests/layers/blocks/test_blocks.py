"""Layers in blocks of destination nodes: dropout, what layers do, what is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from samples import (  # noqa: F401
    GraphNet,
    distance,
    equal,
    gradients,
    graph,
    labels,
    make,
    one_thread,
    train_step,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)

import gact_graph
from gact_graph.capture.session import Session
from gact_graph.layers.blocks import coded
from gact_graph.ops.quantize import Packed

X, EDGES = graph()
FIXED = {"adaptive": False}
EXACT = {"level": "lossless", "bits": 32, "adaptive": False}


class Dropped(MessagePassing):
    """Sums of what dropout leaves of the sources: linear in them for given masks."""

    def __init__(self, flow="source_to_target"):
        super().__init__(aggr="sum", flow=flow)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.scale)

    def message(self, x_j):
        return F.dropout(x_j, 0.5, self.training)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("options", [{"blocks": 300}, {"level": "CB1"}, {"level": "CB2"}], ids=str)
def test_backward_has_the_masks_of_forward(flow, options):
    model = Alone(Dropped(flow))
    gact_graph.wrap(model, **(EXACT | options))
    x = X.clone().requires_grad_()
    out = model(x, EDGES)
    weight = torch.randn(out.shape)
    state = torch.get_rng_state()
    out.backward(weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert (x.grad * x).sum().item() == pytest.approx((out * weight).sum().item(), abs=1e-2)
    again = model(x, EDGES)
    assert not torch.equal(again, out)


class Alone(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, *args, **kwargs):
        return self.conv(*args, **kwargs)


def test_a_mask_drops_the_share_it_should_and_is_new_in_each_block():
    model = gact_graph.wrap(Alone(Dropped()), blocks=100, **EXACT)
    edges = torch.stack([torch.arange(300), torch.arange(300)])
    out = model(torch.ones(300, 64), edges)
    assert gact_graph.report(model).layers[0].blocks > 3
    assert (out == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(out[:50], out[50:100])


class Steps:
    """Stock against blocks over training steps; convs without dropout of their own."""

    @staticmethod
    def run(model, steps=3, inputs=(X, EDGES)):
        # Adam would make much of gradients that are zero but for rounding: biases before a norm.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(*inputs), labels()).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
@pytest.mark.parametrize("options", [{"blocks": 256}, {"level": "CB2", "blocks": 256}], ids=str)
def test_training_follows_stock(kind, options):
    stock = Steps.run(make(lambda: GraphNet(kind)))
    model = gact_graph.wrap(make(lambda: GraphNet(kind)), **(EXACT | options))
    assert distance(Steps.run(model), stock) < 1e-5
    assert any(row.blocks for row in gact_graph.report(model).layers)


@pytest.mark.parametrize("level", ["L1", "CB1", "CB2"])
def test_with_adaptive_bits_what_a_layer_is_computed_from_is_measured(level):
    blocks = None if level == "CB1" else 256
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=4, level=level, blocks=blocks)
    Steps.run(model)
    rows = gact_graph.report(model).contexts
    measured = {row.slot for row in rows if row.sensitivity is not None}
    inside = "propagate.x" if level == "L1" else "forward.x"
    assert any(inside in slot or "mul.input" in slot for slot in measured)
    assert gact_graph.report(model).average_bits <= 4


@pytest.mark.parametrize("options", [{"blocks": 256}, {"level": "CB1"}, {"level": "CB2"}], ids=str)
def test_a_sweep_leaves_no_trace(options):
    """Bits of 32 by pins: so noise does not tell runs apart, but replays do take place."""

    def run(adaptive):
        model = make(lambda: GraphNet("gat", dropout=0.5))
        given = {"bits": 32, "level": "L1"} | options
        gact_graph.wrap(model, adaptive=adaptive, adapt_interval=1, **given)
        return Steps.run(model), [b.clone() for b in model.buffers()]

    (one, buffers), (other, others) = run(True), run(False)
    assert equal(one, other) and equal(buffers, others)


class Weighted(nn.Module):
    """A conv on what a linear layer gives, which that layer does not save."""

    def __init__(self, learn, aggr="sum"):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.weight = nn.Parameter(torch.rand(EDGES.size(1)), requires_grad=learn)
        self.conv = GraphConv(64, 8, aggr=aggr)

    def forward(self, x, edges):
        return self.conv(self.first(x), edges, self.weight * 1)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "softmax"])
@pytest.mark.parametrize("learn", [True, False])
def test_what_backward_does_not_read_is_not_saved(learn, aggr):
    stock = Steps.run(make(lambda: Weighted(learn, aggr)))
    model = gact_graph.wrap(make(lambda: Weighted(learn, aggr)), blocks=256, **EXACT)
    assert distance(Steps.run(model), stock) < 1e-5
    slots = [c.slot for c in gact_graph.report(model).contexts]
    read = learn or aggr not in ("sum", "mean")
    assert ("conv/propagate.x.0" in slots) == read, slots


def test_a_constant_weight_spares_the_features():
    """Of GCN's messages in blocks nothing but the weights is saved."""
    model = gact_graph.wrap(make(lambda: GraphNet("gcn")), blocks=256, **EXACT)
    model(X, EDGES).sum().backward()
    saved = [c for c in gact_graph.report(model).contexts if c.codec != "blocks"]
    slots = [c.slot for c in saved if "propagate" in c.slot]
    assert slots == ["convs.0/propagate.edge_weight", "convs.1/propagate.edge_weight"][: len(slots)]
    assert slots


def test_evaluation_runs_in_blocks_too():
    model = make(lambda: GraphNet("gat")).eval()
    with torch.no_grad():
        expected = model(X, EDGES)
        gact_graph.wrap(model, blocks=256, **EXACT)
        calls = []
        conv = model.convs[0]
        inner = conv.message
        conv.message = lambda **given: calls.append(1) or inner(**given)
        got = model(X, EDGES)
    assert len(calls) > 3
    assert torch.allclose(got, expected, atol=1e-6)


def test_unwrap_restores_all_and_copies_stand_alone():
    model = make(lambda: GraphNet("gat"))
    before = [dict(vars(m)) for m in model.modules()]
    gact_graph.wrap(model, blocks=256, level="CB2")
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    Steps.run(model, steps=1)
    for other in (twin, stored):
        Steps.run(other, steps=1)
        assert gact_graph.report(other).layers
        assert equal([*other.parameters()], [*model.parameters()])
    gact_graph.unwrap(model)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert {*vars(module)} == {*attributes}
        assert "propagate" not in vars(module) and "forward" not in vars(module)


class Failing(MessagePassing):
    def forward(self, x, edge_index, fail):
        return self.propagate(edge_index, x=x, fail=fail)

    def message(self, x_j, fail, index):
        if fail and index.numel() and not self.first:
            raise ValueError("no such message")
        self.first = False
        return x_j * 2

    first = True


def test_an_exception_in_a_block_leaves_no_trace():
    model = Alone(Failing())
    model.weight = nn.Parameter(torch.ones(()))
    gact_graph.wrap(model, blocks=256, **EXACT)
    x = X.clone().requires_grad_()
    model(x, EDGES, False).sum().backward()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="no such message"):
        model(x, EDGES, True)
    assert torch.equal(torch.get_rng_state(), state)
    expected, x.grad = x.grad, None
    model(x, EDGES, False).sum().backward()
    assert torch.equal(x.grad, expected)


def test_in_training_a_batch_norm_over_messages_runs_as_stock():
    mlp = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    stock = Alone(EdgeConv(mlp, aggr="mean"))
    model = gact_graph.wrap(copy.deepcopy(stock), blocks=256, **EXACT)
    assert torch.equal(model(X, EDGES), stock(X, EDGES))
    assert equal([*model.buffers()], [*stock.buffers()])
    [row] = gact_graph.report(model).layers
    assert row.way == "stock" and "batch_norm over all edges" in row.reason
    assert "runs as PyG has it" in str(gact_graph.report(model))


class Global(MessagePassing):
    """Normalises by the largest message of all."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j / x_j.max()


class Closure(MessagePassing):
    """Takes a tensor that propagate was not given."""

    def forward(self, x, edge_index):
        self.hidden = [x * 2]
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_index_j):
        return x_j + self.hidden[0][edge_index_j]


@pytest.mark.parametrize(
    ("conv", "reason"),
    [(Global, "another result when"), (Closure, "is not among its arguments")],
)
def test_what_looks_elsewhere_runs_as_stock(conv, reason):
    gradients_of = []
    for options in ({}, EXACT | {"blocks": 256}):
        model = Alone(conv())
        model.weight = nn.Parameter(torch.ones(32))
        if options:
            gact_graph.wrap(model, **options)
        x = X.clone().requires_grad_()
        model(x, EDGES).square().sum().backward()
        gradients_of.append(x.grad)
    assert torch.equal(*gradients_of)
    assert reason in gact_graph.report(model).layers[0].reason


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


def test_attention_weights_come_in_the_order_of_the_edges():
    conv = make(lambda: TransformerConv(32, 8, heads=2))
    expected, (_, weights) = conv(X, EDGES, return_attention_weights=True)
    model = gact_graph.wrap(Alone(conv), blocks=256, **EXACT)
    out, (_, got) = model(X, EDGES, return_attention_weights=True)
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(got, weights, atol=1e-6)
    got.square().sum().backward()
    blocked = gradients(conv)
    conv.zero_grad()
    gact_graph.unwrap(model)
    conv(X, EDGES, return_attention_weights=True)[1][1].square().sum().backward()
    assert distance(blocked, gradients(conv)) < 1e-5


def test_a_hundred_graphs_leave_nothing_behind():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=4, blocks=256)
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


class Wide(nn.Module):
    """A conv of 96 channels between linear layers."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(32, 96), conv, nn.Linear(96, 5)

    def forward(self, x, edge_index):
        return self.last(F.elu(self.conv(F.elu(self.first(x)), edge_index)))


WIDE = {
    "transformer": lambda: TransformerConv(96, 48, heads=2),
    "gatv2": lambda: GATv2Conv(96, 48, heads=2, dropout=0.3),
    "gat": lambda: GATConv(96, 48, heads=2),
    "max": lambda: GraphConv(96, 96, aggr="max"),
}


class TestCoded:
    """In backward the tensors of nodes stay coded, and blocks decode the rows that they read."""

    @pytest.mark.parametrize("kind", WIDE)
    def test_the_same_gradients_as_with_whole_tensors(self, kind, monkeypatch):
        options = {"bits": 3, "adaptive": False, "blocks": 200}
        net = make(lambda: Wide(WIDE[kind]()))
        widths = []
        unpack_rows = Packed.unpack_rows
        monkeypatch.setattr(
            Packed,
            "unpack_rows",
            lambda packed, rows, width: widths.append(width) or unpack_rows(packed, rows, width),
        )
        found = train_step(gact_graph.wrap(copy.deepcopy(net), **options), X, EDGES)
        assert {*widths} == {96}
        monkeypatch.setattr(coded, "_coded", lambda saved: None)
        widths.clear()
        expected = train_step(gact_graph.wrap(net, **options), X, EDGES)
        assert not widths
        assert equal(found, expected)

    def test_hooks_of_others_get_tensors(self):
        """Ours are outside here, so what autograd unpacks was never ours."""
        net = gact_graph.wrap(make(lambda: Wide(WIDE["gat"]())), bits=3, blocks=200, **FIXED)
        seen = []

        def pack(tensor):
            seen.append(tensor)
            return tensor

        inner = net.conv.forward

        def forward(*args):
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return inner(*args)

        net.conv.forward = forward
        assert all(g.isfinite().all() for g in train_step(net, X, EDGES)) and seen

    def test_backward_twice(self):
        net = gact_graph.wrap(make(lambda: Wide(WIDE["gatv2"]())), bits=3, blocks=200, **FIXED)
        torch.manual_seed(0)
        loss = net(X, EDGES).square().sum()
        once = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
        again = torch.autograd.grad(loss, [*net.parameters()])
        assert equal([*once], [*again])


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
