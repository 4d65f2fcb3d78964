"""Sensitivities: measured without a trace, true to the definition, and put to use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from samples import (  # noqa: F401
    FEATURES,
    GraphNet,
    Lambda,
    Mlp,
    equal,
    gradients,
    graph,
    labels,
    make,
    measurements,
    one_thread,
    seeded,
    train_step,
    widths,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv

import gact_graph
from gact_graph.adaptive.sensitivity import Measurement
from gact_graph.support.storage import tensors_in

X, EDGES = graph()


def wrapped(kind="gat", bits=6, **options):
    model = make(lambda: GraphNet(kind)) if isinstance(kind, str) else kind
    return gact_graph.wrap(model, bits=bits, adaptive=True, min_bytes=0, **options)


def everything(model):
    """The state that measuring might disturb."""
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
    ]


class TestTraining:
    def test_training_is_the_same_whatever_runs_again(self, monkeypatch):
        """The widths are those of the same steps without the runs that measure."""

        def run():
            model = wrapped(blocks=False, adapt_interval=2)
            model.forward.controller.methods["forward"].scheme.bits_of = lambda slot: 6
            optimizer = torch.optim.Adam(model.parameters())
            torch.manual_seed(0)
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(X, EDGES), labels()).backward()
                optimizer.step()
            assert measurements(model) == 3
            return everything(model)

        measured = run()
        monkeypatch.setattr(Measurement, "_measure", lambda *_: None)
        assert equal(measured, run())


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


@pytest.mark.parametrize(
    ("kind", "blocks", "most"), [("gcn", False, 1.8), ("gcn", 4096, 1.4), ("gat", 4096, 1.4)]
)
def test_measuring_peaks_little_above_a_step(kind, blocks, most, monkeypatch):
    """It holds codes of two bits more, and the results of one operation twice: messages, where all
    of them are made at once."""
    # Under the mode that measures.
    monkeypatch.setattr("gact_graph.capture.recipes.has_other_modes", lambda: False)
    model = wrapped(kind, bits=4, blocks=blocks, adapt_interval=3)
    nodes = 50_000
    x, edges = graph(nodes=nodes, edges=300_000)

    def forward_and_backward():
        out = model(x, edges)
        F.cross_entropy(out, labels(nodes)).backward()
        model.zero_grad()

    forward_and_backward()  # sorts the edges, too
    with LiveBytes() as step:
        forward_and_backward()
    with LiveBytes() as measuring:
        forward_and_backward()
    assert measurements(model) == 2
    assert measuring.peak <= most * step.peak, measuring.peak / step.peak


class TestAdaptation:
    def test_measures_the_first_step_and_again_later(self):
        model = wrapped(adapt_interval=4)
        counts = []
        for _ in range(12):
            train_step(model, X, EDGES)
            counts.append(measurements(model))
        assert counts == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]

    def test_the_average_is_kept_and_spent_unevenly(self):
        model = wrapped("gin", bits=5)
        for _ in range(4):
            train_step(model, X, EDGES)
        report = gact_graph.report(model)
        assert 4.5 < report.average_bits <= 5
        assert len({*widths(model).values()}) > 1
        measured = [row.sensitivity for row in report.contexts if row.bits is not None]
        assert all(c is not None and c > 0 for c in measured)

    def test_a_fraction_and_a_pin(self):
        model = wrapped(bits=5.5, pin={"*linear*": 8})
        for _ in range(4):
            train_step(model, X, EDGES)
        bits = widths(model)
        assert bits.pop("convs.1/lin/linear.input") == 8
        free = [row for row in gact_graph.report(model).contexts if row.slot in bits]
        taken = sum(row.numel * row.bits for row in free if row.bits < 16)
        assert taken <= 5.5 * sum(row.numel for row in free if row.bits < 16)

    def test_outputs_of_every_kind(self):
        class Several(GraphNet):
            def forward(self, x, edge_index):
                out = super().forward(x, edge_index)
                return {"a": (out, Data(x=out.tanh())), "unused": out.exp()}

        model = wrapped(make(lambda: Several("gat")))
        for _ in range(2):
            out = model(X, EDGES)
            (out["a"][0].sum() + out["a"][1].x.square().sum()).backward()
        assert measurements(model) == 1

    def test_changing_batches_and_accumulation(self):
        model = wrapped("gcn", adapt_interval=2)
        for step in range(8):
            train_step(model, *graph(nodes=300 + 10 * step, edges=2000 + 100 * step, seed=step))
            model(X, EDGES).sum().backward()
        assert measurements(model) > 8
        assert all(g.isfinite().all() for g in gradients(model))

    def test_several_forwards_before_one_backward(self):
        model = wrapped()
        for _ in range(3):
            (model(X, EDGES) * model(X, EDGES)).sum().backward()
        assert measurements(model) == 1

    def test_frozen_and_shared_parameters(self):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(FEATURES, FEATURES)
                self.b = self.a
                self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)

            def forward(self, x):
                return self.b(self.frozen(self.a(x).tanh()).exp())

        model = wrapped(Shared())
        for _ in range(3):
            model(X).sum().backward()
        assert measurements(model) == 1
        assert model.a is model.b and model.frozen.weight.grad is None

    def test_a_part_of_a_larger_model(self):
        encoder, model = nn.Linear(FEATURES, FEATURES), wrapped("sage")
        for _ in range(2):
            encoder.zero_grad()
            model(encoder(X), EDGES).sum().backward()
        assert measurements(model) == 1

    def test_other_levels_measure_nothing(self):
        model = gact_graph.wrap(
            make(GraphNet), level="lossless", bits=32, adaptive=True, min_bytes=0
        )
        for _ in range(2):
            train_step(model, X, EDGES)
        assert model.forward.controller.methods["forward"].adaptation is None

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_measure_for_themselves(self, clone):
        model = wrapped(adapt_interval=2)
        train_step(model, X, EDGES)
        other = clone(model)
        train_step(other, X, EDGES)
        assert measurements(other) == 2 and measurements(model) == 1


class TestState:
    def run(self, model, optimizer, start, stop):
        for step in range(start, stop):
            torch.manual_seed(step)
            optimizer.zero_grad()
            F.cross_entropy(model(X, EDGES), labels()).backward()
            optimizer.step()

    @pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
    def test_a_resumed_run_goes_on_bit_by_bit(self, stop):
        model = wrapped(adapt_interval=2)
        optimizer = torch.optim.Adam(model.parameters())
        self.run(model, optimizer, 0, stop)
        states = copy.deepcopy(
            (model.state_dict(), optimizer.state_dict(), gact_graph.state_dict(model))
        )
        self.run(model, optimizer, stop, stop + 4)

        other = wrapped(adapt_interval=2)
        another = torch.optim.Adam(other.parameters())
        other.load_state_dict(states[0])
        another.load_state_dict(states[1])
        gact_graph.load_state_dict(other, states[2])
        self.run(other, another, stop, stop + 4)
        assert equal([*other.parameters()], [*model.parameters()])
        assert widths(other) == widths(model)

    def test_after_a_layer_was_frozen(self):
        """The slot behind it, which needs more bits than the others, is gone."""

        def net():
            first, second, last = (nn.Linear(i, 64) for i in (FEATURES, 64, 64))
            return nn.Sequential(first, nn.Tanh(), second, nn.GELU(), last)

        model, other = (wrapped(make(net), bits=3) for _ in range(2))
        train_step(model, X)
        model[0].requires_grad_(False)
        train_step(model, X)
        state = gact_graph.state_dict(model)
        assert "1/tanh.result" in state["scheme"]["least"].keys() - state["scheme"]["sizes"].keys()
        gact_graph.load_state_dict(other, state)
        assert gact_graph.state_dict(other) == state

    def test_of_a_model_with_the_same_bits_everywhere(self):
        model, other = (
            gact_graph.wrap(make(Mlp), bits=2, adaptive=False, min_bytes=0) for _ in range(2)
        )
        train_step(model, X)
        gact_graph.load_state_dict(other, gact_graph.state_dict(model))
        assert equal(train_step(other, X), train_step(model, X))

    def test_of_the_other_kind_is_refused(self):
        fixed, adaptive = (
            gact_graph.wrap(make(Mlp), adaptive=False, min_bytes=0),
            wrapped(make(Mlp)),
        )
        with pytest.raises(ValueError, match="Expected the state of a model with adaptive=True"):
            gact_graph.load_state_dict(adaptive, gact_graph.state_dict(fixed))


class TestAlarm:
    def steps(self, bits, lr, **options):
        model = wrapped(bits=bits, adapt_interval=1, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(12):
            torch.manual_seed(step)
            optimizer.zero_grad()
            F.cross_entropy(model(X, EDGES), labels()).backward()
            optimizer.step()
        return model

    @pytest.mark.filterwarnings("ignore:With bits=1")
    def test_one_bit_and_a_high_learning_rate_provoke_it_once(self):
        with pytest.warns(RuntimeWarning, match="noise of compression dominates") as caught:
            model = self.steps(1, 5.0)
        dominating = [w for w in caught if "dominates" in str(w.message)]
        assert len(dominating) == 1
        text = str(dominating[0].message)
        assert "Most of it comes from" in text and "Take more bits" in text
        assert any(row.slot in text for row in gact_graph.report(model).contexts)

    def test_eight_bits_do_not(self):
        model = self.steps(8, 0.01)  # pytest makes an error of each warning
        assert gact_graph.report(model).variance_ratio < 0.1

    def test_the_remedy_works(self):
        model = self.steps(4, 0.01)
        scheme = model.forward.controller.methods["forward"].scheme
        cure = scheme.average_for(0.001)
        assert scheme._ratio(scheme._allocated(cure)) <= 0.001
        assert scheme._ratio(scheme._allocated(cure - 0.5)) > 0.001


class TestLog:
    def test_scalars(self):
        model = wrapped()
        for _ in range(4):
            train_step(model, X, EDGES)
        report, seen = gact_graph.report(model), []
        report.log(lambda *scalar: seen.append(scalar), 7)
        names = ["rate", "stored_mb", "average_bits", "variance_ratio", "gradient_error"]
        assert [(name, step) for name, _, step in seen] == [(f"gact_graph/{n}", 7) for n in names]
        values = [value for _, value, _ in seen]
        expected = [report.rate, report.stored_bytes / 1e6, report.average_bits]
        assert values == [*expected, report.variance_ratio, report.gradient_error]
        assert 0 < report.variance_ratio < 1

    def test_a_writer_of_tensorboards_kind(self):
        class Writer:
            def add_scalar(self, name, value, step):
                seen.append(name)

        seen = []
        model = gact_graph.wrap(make(Mlp), adaptive=False, min_bytes=0)
        train_step(model, X)
        gact_graph.report(model).log(Writer())
        assert len(seen) == 3  # nothing was measured

    def test_anything_else_is_refused(self):
        with pytest.raises(TypeError, match=r"Expected a writer with add_scalar.*got int"):
            gact_graph.report(wrapped()).log(3)


class Embeds(nn.Module):
    """Puts embeddings where the indices were, as examples with bipartite graphs do."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(300, 32), nn.Embedding(200, 32)
        self.conv = SAGEConv((32, 32), 32)

    def forward(self, x_dict, edge_index):
        x_dict["user"] = self.user(x_dict["user"])
        x_dict["item"] = self.item(x_dict["item"])
        return self.conv((x_dict["user"], x_dict["item"]), edge_index).relu() @ torch.ones(32, 5)


class EmbedsInData(Embeds):
    def forward(self, data):
        data["user"].x = self.user(data["user"].x)
        data["item"].x = self.item(data["item"].x)
        x = data["user"].x, data["item"].x
        return self.conv(x, data["user", "item"].edge_index).relu() @ torch.ones(32, 5)


class TestForwardChangesItsArguments:
    def edges(self):
        generator = torch.Generator().manual_seed(0)
        return torch.stack([torch.randint(n, (3000,), generator=generator) for n in (300, 200)])

    def test_in_a_dict(self):
        model = gact_graph.wrap(make(Embeds), bits=4, adapt_interval=2, min_bytes=0)
        for _ in range(5):
            train_step(model, {"user": torch.arange(300), "item": torch.arange(200)}, self.edges())
        assert gact_graph.report(model).measurements > 1

    def test_in_a_data_object(self):
        model = gact_graph.wrap(make(EmbedsInData), bits=4, adapt_interval=2, min_bytes=0)
        for _ in range(5):
            data = HeteroData()
            data["user"].x, data["item"].x = torch.arange(300), torch.arange(200)
            data["user", "item"].edge_index = self.edges()
            train_step(model, data)
            assert data["user"].x.is_floating_point()
        assert gact_graph.report(model).measurements > 1

    def test_in_an_object_of_the_users_own(self):
        class Batch:
            def __init__(self, x):
                self.x = x

        class Changes(Mlp):
            def forward(self, batch):
                batch.x = batch.x.float()
                return super().forward(batch.x)

        model = gact_graph.wrap(make(Changes), adapt_interval=2, min_bytes=0)
        for _ in range(5):
            train_step(model, Batch(torch.ones(300, 32, dtype=torch.float64)))
        assert gact_graph.report(model).measurements > 1


def test_a_codec_of_32_bits_remains_after_a_measurement():
    def forward(module, x):
        return torch.log_softmax(x @ module.weight, -1).square()

    model = gact_graph.wrap(Lambda(forward).double(), bits=4, min_bytes=0)
    x = torch.randn(2000, 32, dtype=torch.float64, generator=seeded(1))
    codecs = []
    for _ in range(3):
        model(x).mean().backward()
        rows = gact_graph.report(model).contexts
        codecs.append([(row.codec, row.bits) for row in rows if "log_softmax" in row.slot])
    assert gact_graph.report(model).measurements > 0
    assert codecs[0] == [("round", 32)] and codecs[1:] == codecs[:1] * 2


@pytest.mark.parametrize("way", ["resumed", "copied"])
def test_layers_that_train_in_turns_go_on_with_their_own_bits(way):
    def build():
        layers = nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)
        return gact_graph.wrap(
            make(lambda: nn.Sequential(*layers)), bits=3, adapt_interval=1000, min_bytes=0
        )

    def run(model, steps):
        for step in steps:
            for number in (0, 2, 4):
                model[number].requires_grad_((number == 4) == bool(step % 2))
            model(x).square().mean().backward()
        return gact_graph.state_dict(model)

    x = torch.randn(600, 32, generator=seeded(1))
    model = build()
    saved = run(model, range(6))
    other = copy.deepcopy(model) if way == "copied" else build()
    if way == "resumed":
        gact_graph.load_state_dict(other, saved)
    assert run(other, range(6, 9)) == run(model, range(6, 9))
    assert saved["scheme"]["bits"] != gact_graph.state_dict(model)["scheme"]["bits"]
