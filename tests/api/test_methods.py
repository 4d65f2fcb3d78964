"""Methods beside forward that a training loop calls."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from old_pyg import needs_to_hetero
from samples import (
    GraphNet,
    distance,
    equal,
    gradients,
    graph,
    make,
    one_thread,  # noqa: F401
)
from torch import nn
from torch_geometric.nn import GAE, VGAE, DeepGraphInfomax, GCNConv, to_hetero

import gact_graph

X, EDGES = graph()


class Encoder(nn.Module):
    def __init__(self, heads=1):
        super().__init__()
        self.first = GCNConv(32, 64)
        self.last = nn.ModuleList([GCNConv(64, 16) for _ in range(heads)])

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).tanh()
        out = tuple(conv(h, edge_index) for conv in self.last)
        return out if len(out) > 1 else out[0]


class Parts(GraphNet):
    """Trains through a method of its own."""

    def embed(self, x, edge_index):
        return torch.tanh(self.convs[0](x, edge_index))

    def score(self, x, edge_index):
        return self.convs[1](self.embed(x, edge_index), edge_index)


def gae(model):
    model.zero_grad()
    torch.manual_seed(0)
    z = model.encode(X, EDGES)
    loss = model.recon_loss(z, EDGES, neg_edge_index=EDGES.flip(0))
    loss.backward()
    return gradients(model)


def score(model):
    model.zero_grad()
    model.score(X, EDGES).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize(
    "net", [lambda: GAE(Encoder()), lambda: VGAE(Encoder(heads=2))], ids=["GAE", "VGAE"]
)
def test_autoencoders_are_followed_in_encode(net):
    model = gact_graph.wrap(make(net), bits=8, min_bytes=0)
    got = gae(model)
    assert gact_graph.report(model).rate > 1.5
    assert 0 < distance(got, gae(make(net))) < 0.05
    for _ in range(3):
        gae(model)
    assert gact_graph.report(model).measurements > 0
    gact_graph.unwrap(model)
    assert not {"encode", "forward"} & set(vars(model))
    assert equal(gae(model), gae(make(net)))


def test_deep_graph_infomax_is_followed_in_forward():
    def corruption(x, edge_index):
        return x.flip(0), edge_index

    model = DeepGraphInfomax(64, Encoder(), lambda z, *_: z.mean(0).sigmoid(), corruption)
    model.weight = nn.Parameter(torch.randn(16, 16))
    gact_graph.wrap(model, bits=8, min_bytes=0)
    model.loss(*model(X, EDGES)).backward()
    assert gact_graph.report(model).rate > 1.5


class TestNamed:
    def test_methods_are_followed(self):
        model = gact_graph.wrap(make(Parts), bits=8, methods=("score", "embed"), min_bytes=0)
        got = score(model)
        assert 0 < distance(got, score(make(Parts))) < 0.05
        slots = [row.slot for row in gact_graph.report(model).contexts]
        assert any(slot.startswith("convs.1/") for slot in slots)
        assert "tanh.result" in slots

    def test_each_has_bits_of_its_own(self):
        model = gact_graph.wrap(
            make(lambda: Parts("gat")), bits=4, methods=("score", "embed"), seed=3, min_bytes=0
        )
        for _ in range(3):
            score(model)
            model.embed(X, EDGES).square().mean().backward()
            model(X, EDGES).square().mean().backward()
        state = gact_graph.state_dict(model)
        assert set(state["methods"]) == {"score", "embed"}
        assert state["scheme"]["bits"]
        for of_method in state["methods"].values():
            assert of_method["scheme"]["bits"]
            assert all(c > 0 for c in of_method["scheme"]["sensitivities"].values())
        twin = gact_graph.wrap(
            copy.deepcopy(gact_graph.unwrap(copy.deepcopy(model))),
            bits=4,
            methods=("score", "embed"),
            seed=3,
            min_bytes=0,
        )
        gact_graph.load_state_dict(twin, state)
        assert equal(score(twin), score(model))

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_follow_them_too(self, copied):
        model = gact_graph.wrap(make(Parts), bits=2, methods=("score",), min_bytes=0)
        twin = copied(model)
        assert equal(score(twin), score(model))
        assert not gact_graph.report(twin).empty

    @pytest.mark.parametrize(
        ("methods", "error", "words"),
        [
            ("score", TypeError, r"a sequence of names \(got 'score'\)"),
            ((1,), TypeError, r"a sequence of names \(got \(1,\)\)"),
            (5, TypeError, r"a sequence of names \(got 5\)"),
            (("encod",), ValueError, r"methods of Parts \(got 'encod'\)"),
        ],
    )
    def test_wrong_names_are_refused(self, methods, error, words):
        model = Parts()
        with pytest.raises(error, match=words):
            gact_graph.wrap(model, methods=methods)
        assert "forward" not in vars(model)

    def test_another_state_is_refused(self):
        model = gact_graph.wrap(make(Parts), methods=("score",))
        with pytest.raises(ValueError, match=r"Expected state\['methods'\] to have the keys"):
            gact_graph.load_state_dict(
                model, gact_graph.state_dict(gact_graph.wrap(make(Parts), methods=("embed",)))
            )


class TestNothingTracked:
    def test_a_backward_warns_once(self):
        model = gact_graph.wrap(make(Parts), bits=2, min_bytes=0)
        with pytest.warns(RuntimeWarning, match=r"methods=\('encode',\)") as caught:
            score(model)
        assert [warning.filename for warning in caught] == [__file__]
        score(model)

    def test_a_followed_model_warns_of_nothing(self):
        model = gact_graph.wrap(make(Parts), bits=2, min_bytes=0)
        model(X, EDGES)
        score(model)
        with gact_graph.compress(gact_graph.wrap(make(Parts), min_bytes=0)) as _:
            score(make(Parts))

    def test_to_hetero_of_a_wrapped_model_names_the_remedy(self):
        needs_to_hetero()
        metadata = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])
        features = {"a": X, "b": X.flip(0)}
        edges = {metadata[1][0]: EDGES, metadata[1][1]: EDGES.flip(0)}

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                from torch_geometric.nn import SAGEConv

                self.conv1, self.conv2 = SAGEConv((32, 32), 32), SAGEConv((32, 32), 8)

            def forward(self, x, edge_index):
                return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

        def step(model):
            sum(out.square().mean() for out in model(features, edges).values()).backward()

        hetero = to_hetero(gact_graph.wrap(Net(), min_bytes=0), metadata)
        with pytest.warns(RuntimeWarning, match=r"gact_graph.wrap\(to_hetero\(") as caught:
            step(hetero)
        assert len(caught) == 1
        model = gact_graph.wrap(to_hetero(Net(), metadata), bits=4, min_bytes=0)
        step(model)
        assert gact_graph.report(model).rate > 1.2


class TestPin:
    def test_that_matches_nothing_warns_once(self):
        model = gact_graph.wrap(make(GraphNet), pin={"*.nothing": 8, "convs.0/*": 8}, min_bytes=0)
        with pytest.warns(RuntimeWarning, match=r"got '\*.nothing', which match none") as caught:
            model(X, EDGES)
        assert [warning.filename for warning in caught] == [__file__]
        model(X, EDGES)

    def test_that_matches_says_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gact_graph.wrap(make(GraphNet), pin={"convs.0/*": 8})(X, EDGES)


class LightningModule(nn.Module):
    """Known by its name."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([GraphNet(), GraphNet()])
        self.loss = nn.CrossEntropyLoss()  # has no parameters: is no part


def test_parts_in_a_list_are_followed_and_have_no_report_of_their_own():
    model = gact_graph.wrap(LightningModule(), min_bytes=0)
    sum(net(X, EDGES).square().mean() for net in model.nets).backward()
    assert set(gact_graph.state_dict(model)["methods"]) == {"nets.0.forward", "nets.1.forward"}
    slots = [row.slot for row in gact_graph.report(model).contexts]
    assert all(any(slot.startswith(f"nets.{i}/") for slot in slots) for i in (0, 1))
    for call in (gact_graph.report, gact_graph.unwrap, gact_graph.state_dict):
        with pytest.raises(ValueError, match=r"got GraphNet, the part 'nets.1' of a wrapped model"):
            call(model.nets[1])
