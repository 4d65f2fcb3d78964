"""Layers that are computed again in backward: what goes in, what comes out, what is left behind."""

from __future__ import annotations

import logging
import queue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import distance, equal, gradients, graph, make, one_thread  # noqa: F401
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.inspector import Inspector
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv, SuperGATConv

import gact_graph

X, EDGES = graph()
RECOMPUTED = {"level": "CB2", "bits": 32, "adaptive": False, "blocks": False, "min_bytes": 0}


class Around(nn.Module):
    """A conv between two linear layers; ``call`` says how it is called."""

    def __init__(self, conv, call=lambda conv, x, edges: conv(x, edges)):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.conv = conv
        self.call = call

    def forward(self, x, edges):
        out = self.call(self.conv, torch.tanh(self.first(x)), edges)
        return out


def train(model, x=X, steps=2):
    found = []
    for step in range(steps):
        model.zero_grad()
        seed_everything(step)  # negative samples come from Python's and NumPy's generators
        out = model(x, EDGES)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found += gradients(model)
    return [*found, *(b.clone() for b in model.buffers())]


class Several(MessagePassing):
    """Gives a dict of a tensor that learns, of integers, of nothing and of a number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, edge_index, *, scale):
        out = self.propagate(edge_index, x=x["of"][0] * self.weight * scale)
        return {"out": (out, x["of"][1]), "index": edge_index[0] * 2, "none": None, "number": 7}


def several(conv, x, edges):
    found = conv({"of": [x, x * 3]}, edges, scale=2.0)
    assert found["none"] is None and found["number"] == 7
    assert torch.equal(found["index"], edges[0] * 2) and not found["index"].requires_grad
    return found["out"][0] + found["out"][1]


def twice(conv, x, edges):
    return conv(conv(x, edges), edges)


def norm_inside():
    return GINConv(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.4)))


CASES = {
    "dropout": (lambda: GATConv(32, 16, heads=2, dropout=0.5), None),
    "batch norm and dropout inside": (norm_inside, None),
    "cached": (lambda: GCNConv(32, 32, cached=True), None),
    "nested arguments and results": (Several, several),
    "called twice": (lambda: SAGEConv(32, 32, aggr="max"), twice),
    "attention weights": (
        lambda: GATConv(32, 16, heads=2),
        lambda conv, x, edges: conv(x, edges, return_attention_weights=True)[1][1],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_buffers_are_those_of_stock(name):
    build, call = CASES[name]
    nets = [make(lambda: Around(build(), *([call] if call else []))) for _ in "ab"]
    stock = train(nets[0])
    got = train(gact_graph.wrap(nets[1], **RECOMPUTED))
    assert equal(got, stock)
    [row] = gact_graph.report(nets[1]).layers
    assert row.way == "recomputed"
    slots = [c.slot for c in gact_graph.report(nets[1]).contexts if c.slot.startswith("conv")]
    assert slots == [] or all(slot.startswith("conv/forward") for slot in slots)


def test_only_the_inputs_are_saved():
    saved = {}
    for level in ("L1", "CB2"):
        conv = make(lambda: Around(GATConv(32, 64, heads=4)))
        model = gact_graph.wrap(conv, level=level, blocks=False, min_bytes=0)
        train(model, steps=1)
        saved[level] = sum(c.raw_bytes for c in gact_graph.report(model).contexts)
    assert saved["CB2"] < saved["L1"] / 5


def test_backward_leaves_random_numbers_and_buffers_alone():
    model = gact_graph.wrap(make(lambda: Around(norm_inside())), **RECOMPUTED)
    out = model(X, EDGES)
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    out.sum().backward()
    assert equal([*model.buffers()], before)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_twice():
    model = gact_graph.wrap(make(lambda: Around(GATConv(32, 16, dropout=0.5))), **RECOMPUTED)
    out = model(X, EDGES)
    out.sum().backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    out.sum().backward()
    assert equal(gradients(model), once)


def test_a_layer_that_leaves_a_tensor_behind_runs_as_it_is():
    def attention(conv, x, edges):
        return conv(x, edges) + conv.get_attention_loss()

    def build():
        return Around(SuperGATConv(32, 32, is_undirected=True), attention)

    stock = train(make(build), steps=1)
    model = gact_graph.wrap(make(build), **RECOMPUTED)
    assert equal(train(model, steps=1), stock)
    [row] = gact_graph.report(model).layers
    assert (
        row.way == "stock"
        and "leaves a tensor that requires a gradient in its attribute" in row.reason
    )


def test_bytes_of_a_layer_that_runs_as_it_is_count_once():
    saved = []
    for level in ("CB2", "L1"):
        model = Around(SAGEConv(-1, 32))  # not initialized yet
        gact_graph.wrap(model, level=level, bits=32, blocks=False, min_bytes=0)
        model(X, EDGES).sum().backward()
        saved.append(gact_graph.state_dict(model)["saved_bytes"])
    assert saved[0] == saved[1]


class OfData(MessagePassing):
    def forward(self, data):
        return self.propagate(data.edge_index, x=data.x)


def test_tensors_that_learn_inside_an_object_are_not_lost():
    def call(conv, x, edges):
        return conv(Data(x=x, edge_index=edges))

    stock = train(make(lambda: Around(OfData(), call)))
    model = gact_graph.wrap(make(lambda: Around(OfData(), call)), **RECOMPUTED)
    assert equal(train(model), stock)
    assert "inside a Data" in gact_graph.report(model).layers[0].reason


def test_parameters_changed_before_backward_are_an_error():
    model = gact_graph.wrap(make(lambda: Around(GATConv(32, 16))), **RECOMPUTED)
    out = model(X, EDGES)
    with torch.no_grad():
        model.conv.lin.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_optimizer_may_step_during_backward():
    """A bias has its gradient, and changes, before its layer runs again."""

    def steps(model):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(
                lambda _, optimizer=optimizer: optimizer.step()
            )
        train(model)
        return [p.detach().clone() for p in model.parameters()]

    def make_model():
        return make(lambda: Around(GATConv(32, 16)))

    assert equal(steps(gact_graph.wrap(make_model(), **RECOMPUTED)), steps(make_model()))


def test_in_evaluation_nothing_happens():
    model = gact_graph.wrap(make(lambda: Around(GATConv(32, 16, dropout=0.5))), **RECOMPUTED)
    expected = make(lambda: Around(GATConv(32, 16, dropout=0.5))).eval()(X, EDGES)
    assert torch.equal(model.eval()(X, EDGES), expected)
    assert gact_graph.report(model).layers == []


class Force(MessagePassing):
    """Returns the gradient of an energy by its input."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x, edge_index):
        energy = self.propagate(edge_index, x=self.lin(x).tanh()).square().sum()
        [force] = torch.autograd.grad(energy, x, create_graph=True)
        return force


class Counter(MessagePassing):
    """Counts its calls in an attribute, an object, a global and a hook, and reads the counts."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls, self.log = nn.Linear(32, 32), 0, []
        self.lin.register_forward_hook(lambda *_: self.log.append(0))
        self.register_buffer("large", torch.ones(300, 400))

    def forward(self, x, edge_index):
        self.calls += 1
        COUNTED.append(0)
        self.large.mul_(0.5)
        scale = self.calls + len(COUNTED) + len(self.log) + self.large[0, 0].clone()
        return self.propagate(edge_index, x=self.lin(x).tanh() * scale)


COUNTED = []


@pytest.mark.parametrize("blocks", [False, 100])
def test_a_layer_that_differentiates_itself(blocks):
    stock = train(make(lambda: Around(Force())).double(), X.double())
    model = make(lambda: Around(Force())).double()
    gact_graph.wrap(model, **RECOMPUTED | {"blocks": blocks})
    for a, b in zip(train(model, X.double()), stock, strict=True):
        assert torch.allclose(a, b)
    assert {row.slot: row.way for row in gact_graph.report(model).layers}["conv"] == "recomputed"


def test_a_layer_that_counts():
    """The first call copies the large buffer; the next ones run as stock, for it changes."""
    found = []
    for options in (None, RECOMPUTED):
        COUNTED.clear()
        model = make(lambda: Around(Counter()))
        if options:
            gact_graph.wrap(model, **options)
        found.append(train(model, steps=3))
        assert (model.conv.calls, len(model.conv.log), len(COUNTED)) == (3, 3, 3)
    assert equal(*found)
    [row] = gact_graph.report(model).layers
    assert row.way == "stock" and row.reason.startswith("changes large, which is too large")


def test_a_layer_that_saves_other_tensors_in_backward():
    """What cannot be seen, such as a file, makes it do something else."""

    class Other(Force):
        def forward(self, x, edge_index):
            out = self.propagate(edge_index, x=self.lin(x).tanh())
            return out.sin() if torch._C._current_graph_task_id() == -1 else out

    model = gact_graph.wrap(make(lambda: Around(Other())), **RECOMPUTED)
    with pytest.raises(RuntimeError, match="Expected conv to save the same tensors"):
        train(model)


def test_a_layer_that_chooses_edges_by_values():
    """Its input comes back with an error, after which other edges are chosen."""

    class Chosen(Force):
        def forward(self, x, edge_index):
            x = self.lin(x)
            edges = edge_index[:, x[edge_index[0], 0] > 0]
            return self.propagate(edges, x=x).tanh()

    model = gact_graph.wrap(make(lambda: Around(Chosen())), **RECOMPUTED | {"bits": 2})
    with pytest.raises(RuntimeError, match="Expected conv to save the same tensors"):
        train(model)


class Notes(MessagePassing):
    """Adds a loss to a list of the caller."""

    def forward(self, x, edge_index, losses):
        losses.append(x.square().mean())
        return self.propagate(edge_index, x=x)


class Running(MessagePassing):
    """Reads a running statistic that its forward updates in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x, edge_index):
        self.scale.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return (x_j * self.scale).tanh()


@pytest.mark.parametrize("blocks", [False, 40])
def test_a_list_of_the_caller_gets_what_the_layer_adds(blocks):
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        losses = []
        model = Around(Notes(), lambda conv, x, edges, to=losses: conv(x, edges, to))
        if wrapped:
            gact_graph.wrap(model, **RECOMPUTED | {"blocks": blocks})
        out = model(X, EDGES)
        (out.sum() + 100 * sum(losses)).backward()
        assert len(losses) == 1
        found.append(gradients(model))
    for own, stock in zip(*found, strict=True):
        torch.testing.assert_close(own, stock)


@pytest.mark.parametrize("blocks", [False, 40])
def test_a_buffer_that_forward_updates(blocks):
    torch.manual_seed(0)
    stock = Around(Running())
    torch.manual_seed(0)
    model = gact_graph.wrap(Around(Running()), **RECOMPUTED | {"blocks": blocks})
    for own, expected in zip(train(model), train(stock), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


class Scaled(MessagePassing):
    """Counts its calls in an argument, and reads a factor that the model changes between calls."""

    def forward(self, x, edge_index, state):
        state.calls += 1
        return self.propagate(edge_index, x=x.tanh() * (state.factor + state.calls)).sin()


class Changed:
    def __init__(self):
        self.calls, self.factor = 0, 1.0


class UsersData(Data):
    pass


class Values:
    """An object around an array."""

    def __init__(self, size):
        self.held = np.ones(size)

    @property
    def calls(self):
        return self.held[0]

    @calls.setter
    def calls(self, value):
        self.held[0] = value

    @property
    def factor(self):
        return float(self.held[1])

    @factor.setter
    def factor(self, value):
        self.held[1] = value


def thrice(make_state, seen):
    def call(conv, x, edges):
        state = make_state()
        seen.append(state)
        for _ in range(3):
            x = conv(x, edges, state)
            state.factor *= 2
        return x

    return call


STATES = {
    "an object": (Changed, None),
    "data": (lambda: Data(calls=0, factor=1.0, also=torch.ones(3)), None),
    "the user's data": (lambda: UsersData(calls=0, factor=1.0), None),
    "an array": (lambda: Values(2), None),
    "a large array": (lambda: Values(1 << 16), "an array that is too large to be compared"),
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_an_argument(name):
    make_state, reason = STATES[name]
    found = []
    for wrapped in (False, True):
        seen = []
        model = make(lambda seen=seen: Around(Scaled(), thrice(make_state, seen)))
        if wrapped:
            gact_graph.wrap(model, **RECOMPUTED)
        found.append([*train(model), *(torch.tensor([s.calls, s.factor]) for s in seen)])
    assert equal(*found)
    [row] = gact_graph.report(model).layers
    assert (reason or "") in (row.reason or "")
    assert row.way == ("recomputed" if reason is None else "stock")


class Given(MessagePassing):
    def forward(self, x, edge_index, given):
        return self.propagate(edge_index, x=x.tanh())


GIVEN = {
    "a batch": (lambda: Batch.from_data_list([Data(x=torch.ones(2, 2))] * 2), None),
    "a number": (lambda: np.float32(1), None),
    "a function": (lambda: torch.relu, None),
    "a logger": (lambda: logging.getLogger("given"), None),
    "a queue": (queue.SimpleQueue, "reads an argument, an object of the module _queue"),
    "an iterator": (lambda: iter([1]), "reads an argument, an iterator or an open file"),
    "of a library": (lambda: Inspector(Given), "gets a Inspector, whose state cannot be restored"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_whose_state_is_unknown(name):
    make_given, reason = GIVEN[name]
    model = Around(Given(), lambda conv, x, edges: conv(x, edges, make_given()))
    train(gact_graph.wrap(model, **RECOMPUTED))
    [row] = gact_graph.report(model).layers
    assert (row.way, row.reason) == ("recomputed" if reason is None else "stock", reason)


def test_a_layer_that_gets_no_tensor():
    def call(conv, x, edges):
        return x + conv(Data(x=X, edge_index=edges))

    stock = train(make(lambda: Around(OfData(), call)))
    model = gact_graph.wrap(make(lambda: Around(OfData(), call)), **RECOMPUTED)
    assert equal(train(model), stock)
    assert gact_graph.report(model).layers[0].reason == "gets no tensor"


class Grows(MessagePassing):
    """Appends to a list at each call."""

    def __init__(self, length):
        super().__init__()
        self.log = [0] * length

    def forward(self, x, edge_index):
        self.log.append(0)
        return self.propagate(edge_index, x=x.tanh() * (len(self.log) / 1000))


@pytest.mark.parametrize(("length", "ways"), [(999, ["recomputed"] * 2 + ["stock"]), (1001, None)])
def test_a_list_that_grows(length, ways):
    """The list is still restored if it grows above the bound after it has been recorded."""
    stock = make(lambda: Around(Grows(length)))
    model = gact_graph.wrap(make(lambda: Around(Grows(length))), **RECOMPUTED)
    for way in ways or ["stock"] * 3:
        assert equal(train(model, steps=1), train(stock, steps=1))
        [row] = gact_graph.report(model).layers
        assert row.way == way, row.reason
    assert len(model.conv.log) == length + 3
    assert row.reason == "reads log, which has more than 1000 items"


class Deep(MessagePassing):
    """Counts its calls after many submodules."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(2, 2) for _ in range(400))
        self.linears.append(Counts())

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.linears[-1](x))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = Changed()

    def forward(self, x):
        self.state.calls += 1
        return x.tanh() * self.state.calls


def test_a_layer_of_many_modules():
    stock = make(lambda: Around(Deep()))
    model = gact_graph.wrap(make(lambda: Around(Deep())), **RECOMPUTED)
    assert equal(train(model), train(stock))
    assert gact_graph.report(model).layers[0].way == "recomputed"
    assert model.conv.linears[-1].state.calls == 2


class Made(MessagePassing):
    """Reads an attribute by a name that it makes."""

    def __init__(self):
        super().__init__()
        self.state = Changed()

    def forward(self, x, edge_index):
        factor = getattr(self.state, "".join(["fac", "tor"]))
        return self.propagate(edge_index, x=x.tanh() * factor).sin()


def test_attributes_by_names_that_are_made():
    def call(conv, x, edges):
        conv.state.factor = 1.0
        x = conv(x, edges)
        conv.state.factor = 2.0
        return x

    stock = make(lambda: Around(Made(), call))
    model = gact_graph.wrap(make(lambda: Around(Made(), call)), **RECOMPUTED)
    assert equal(train(model), train(stock))
    assert model.conv.state.factor == 2.0


def test_edge_work_that_can_no_longer_run_in_blocks():
    conv = make(lambda: Around(SAGEConv(32, 32, aggr="max")))
    model = gact_graph.wrap(conv, **RECOMPUTED | {"blocks": 100})
    out = model(X, EDGES)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="Expected conv/propagate to do in backward what"):
            out.sum().backward()
    finally:
        handle.remove()


class Rounds(TorchFunctionMode):
    """Rounds the results of linear layers, with the gradient of the layer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + (out.detach().round() - out).detach() if func is F.linear else out


def test_a_mode_of_the_user_is_not_active_in_backward():
    found = []
    for wraps in (False, True):
        net = make(lambda: Around(SAGEConv(32, 32)))
        if wraps:
            gact_graph.wrap(net, **RECOMPUTED)
        net.zero_grad()
        with Rounds():
            out = net(X, EDGES)
        out.sin().sum().backward()
        found.append(gradients(net))
    assert equal(*found)
    [row] = gact_graph.report(net).layers
    assert row.way == "stock" and "runs in a mode of the user" in row.reason


class OwnSum(SAGEConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs)


def test_vmap_around_a_layer():
    def call(conv, x, edges):
        return torch.vmap(lambda one: conv(one, edges))(torch.stack([x, x * 2])).flatten(0, 1)

    stock = make(lambda: Around(OwnSum(32, 32), call))
    model = gact_graph.wrap(make(lambda: Around(OwnSum(32, 32), call)), **RECOMPUTED)
    assert equal(train(model), train(stock))
    [row] = gact_graph.report(model).layers
    assert row.way == "stock" and row.reason == "is traced or transformed"


@pytest.mark.filterwarnings("ignore:(Sparse|Converting sparse)")
@pytest.mark.parametrize("learns", [False, True])
def test_sparse_adjacency(learns):
    places = EDGES.unique(dim=1)

    def call(conv, x, edges):
        weights = torch.ones(places.size(1), requires_grad=learns)
        return conv(x, torch.sparse_coo_tensor(places, weights, (len(x), len(x))).coalesce())

    stock = make(lambda: Around(SAGEConv(32, 32, aggr="sum"), call))
    model = gact_graph.wrap(make(lambda: Around(SAGEConv(32, 32, aggr="sum"), call)), **RECOMPUTED)
    assert equal(train(model), train(stock))
    [row] = gact_graph.report(model).layers
    assert row.way == ("stock" if learns else "recomputed")
    assert row.reason == ("gets a sparse tensor that requires a gradient" if learns else None)


def test_an_input_that_the_model_holds_and_forward_differentiates():
    def call(conv, x, edges):
        position = x.detach().requires_grad_()
        conv.held = position * position.norm(dim=1, keepdim=True)
        energy = conv(conv.held, edges).square().sum()
        [force] = torch.autograd.grad(energy, position, create_graph=True)
        return x * energy + force

    stock = make(lambda: Around(Tanh(), call))
    model = gact_graph.wrap(make(lambda: Around(Tanh(), call)), **RECOMPUTED)
    assert distance(train(model, steps=1), train(stock, steps=1)) < 1e-5


class Tanh(MessagePassing):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).tanh())


class RaisingAttributes(dict):
    __getattr__ = dict.__getitem__


class AnyAttribute(dict):
    __getattr__ = dict.get


@pytest.mark.parametrize("kind", [RaisingAttributes, AnyAttribute])
def test_settings_with_attributes_of_their_own(kind):
    def build():
        conv = SAGEConv(32, 32)
        conv.settings, conv.scale = kind(alpha=0.5), torch.ones(1).expand(32)
        return Around(conv)

    assert equal(train(gact_graph.wrap(make(build), **RECOMPUTED)), train(make(build)))


def test_a_parameter_that_the_first_forward_changes():
    """It is too large to be copied at each call, so the next calls run as stock."""

    class Bounded(Tanh):
        def forward(self, x, edge_index):
            with torch.no_grad():
                self.lin.weight.clamp_(-0.1, 0.1)
            return self.propagate(edge_index, x=self.lin(x).tanh() @ self.wide)

        def __init__(self):
            super().__init__()
            self.lin, self.wide = nn.Linear(32, 128), torch.eye(128, 32)

    model = gact_graph.wrap(make(lambda: Around(Bounded())), **RECOMPUTED)
    assert equal(train(model), train(make(lambda: Around(Bounded()))))
    [row] = gact_graph.report(model).layers
    assert row.way == "stock" and "changes lin.weight" in row.reason


def test_a_layer_that_leaves_a_graph_in_a_buffer():
    class Leaves(Tanh):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", None)

        def forward(self, x, edge_index):
            self.last = super().forward(x, edge_index)
            return self.last

    model = gact_graph.wrap(make(lambda: Around(Leaves())), **RECOMPUTED)
    assert equal(train(model), train(make(lambda: Around(Leaves()))))
    [row] = gact_graph.report(model).layers
    assert row.reason == "leaves a tensor that requires a gradient in its attribute last"
