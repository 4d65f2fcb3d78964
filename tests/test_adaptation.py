"""Sensitivities: measured without a trace, true to the definition, and put to use."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from samples import (  # noqa: F401
    FEATURES,
    GraphNet,
    Mlp,
    equal,
    gradients,
    graph,
    labels,
    make,
    one_thread,
    train_step,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

import gact_graph
from gact_graph.replay import Recording
from gact_graph.sensitivity import sensitivities
from gact_graph.storage import tensors_in

X, EDGES = graph()


def wrapped(kind="gat", bits=6, **options):
    model = make(lambda: GraphNet(kind)) if isinstance(kind, str) else kind
    return gact_graph.wrap(model, bits=bits, adaptive=True, **options)


def widths(model):
    return {row.slot: row.bits for row in gact_graph.report(model).contexts if row.bits is not None}


def passes(model):
    return model.forward.controller.adaptation.passes


def everything(model):
    """Whatever a replay might disturb."""
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
    ]


def replayer(model, recording):
    """A function from slot and receiver, as sensitivities() takes it."""
    controller = model.forward.controller

    def replay(slot, receive):
        recording.replay(
            model,
            model.forward.inner,
            lambda inputs: controller.replay(model, inputs, slot),
            receive,
        )

    return replay


def replayed(model, recording, slot):
    found = {}
    replayer(model, recording)(slot, found.__setitem__)
    return [found[place] for place in sorted(found)]


class TestReplay:
    def gradient(self, model, recording):
        return replayed(model, recording, None)

    @pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
    def test_gives_the_same_gradient_and_leaves_no_trace(self, kind):
        model = gact_graph.wrap(make(lambda: GraphNet(kind)), level="lossless", bits=32)
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(3)
        recording = Recording(model, (X, EDGES), {})
        fresh = copy.deepcopy(model)
        out = model(X, EDGES)
        recording.watch(out)
        F.cross_entropy(out, labels()).backward()
        objects = [id(t) for t in (*model.parameters(), *model.buffers())]
        before, versions = everything(model), [p._version for p in model.parameters()]
        assert equal(self.gradient(model, recording), gradients(model))
        assert equal(everything(model), before)
        assert [p._version for p in model.parameters()] == versions
        assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
        optimizer.step()
        torch.manual_seed(3)
        assert torch.equal(fresh(X, EDGES), out)

    def test_hooks_on_parameters_rest(self):
        calls = []
        model = wrapped()
        next(model.parameters()).register_hook(lambda grad: calls.append(1))
        for _ in range(3):
            train_step(model, X, EDGES)
        assert len(calls) == 3 and passes(model) > 3

    @pytest.mark.parametrize("steps", [1, 2, 5])
    def test_training_is_the_same_with_and_without_measuring(self, steps):
        """With exact codecs the scheme changes nothing, so whatever differs is a trace."""

        def run(measure):
            model = wrapped(bits=4) if measure else gact_graph.wrap(make(lambda: GraphNet("gat")))
            if measure:  # it allocates, and 32 bits are asked for all the same
                model.forward.controller.scheme.bits_of = lambda slot: 32
            else:
                gact_graph.unwrap(model)
            optimizer = torch.optim.Adam(model.parameters())
            torch.manual_seed(0)
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(X, EDGES), labels()).backward()
                optimizer.step()
            return everything(model)

        assert equal(run(True), run(False))


class Noisy:
    """A gradient with noise of known size for each slot."""

    def __init__(self, scales, bits):
        self.scales, self.bits, self.calls = scales, bits, []

    def __call__(self, reseeded, receive):
        self.calls.append(reseeded)
        gradient = torch.zeros(1 + len(self.scales))
        gradient[0] = 10.0
        for i, (slot, scale) in enumerate(self.scales.items()):
            gradient[1 + i] = -scale if slot == reseeded else scale
        receive(0, gradient)


class TestSensitivity:
    def test_is_algorithm_1(self):
        noisy = Noisy({"a": 0.1, "b": 0.4}, 2)
        found = sensitivities(["a", "b"], lambda slot: 2, noisy)
        assert noisy.calls == [None, "a", "b"]
        length = 100 + 0.01 + 0.16
        # 1/2 (2 scale)^2 / S(2), S(2) = 1/9
        assert found == pytest.approx(
            {"a": 0.5 * 0.04 * 9 / length, "b": 0.5 * 0.64 * 9 / length}, rel=1e-5
        )

    @pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
    def test_nothing_comes_of_a_gradient_that_tells_nothing(self, bad):
        def replay(slot, receive):
            receive(0, torch.full((3,), bad))

        assert sensitivities(["a"], lambda slot: 2, replay) == {}

    def test_agrees_with_the_variance_over_many_draws(self):
        """c_l S(b) is the variance that one slot's noise adds: here against 200 draws of it."""
        model = gact_graph.wrap(make(Mlp), bits=3)
        controller = model.forward.controller
        recording = Recording(model, (X,), {})
        out = model(X)
        recording.watch(out)
        F.cross_entropy(out, labels()).backward()

        for slot in [row.slot for row in gact_graph.report(model).contexts if row.bits]:
            single, draws = [], []
            for number in range(200):
                controller.forwards = number  # all seeds anew
                single.append(sensitivities([slot], lambda s: 3, replayer(model, recording))[slot])
                first, second = (
                    torch.cat([g.flatten() for g in replayed(model, recording, s)])
                    for s in (None, slot)
                )
                draws.append((first - second).square().sum() / 2 / first.square().sum())
            truth = torch.stack(draws).mean().item() * (2**3 - 1) ** 2
            assert sum(single) / len(single) == pytest.approx(truth, rel=1e-6)
            assert min(single) > truth / 3 and max(single) < truth * 3


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


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_a_replay_peaks_no_higher_than_a_step(kind):
    """But for one gradient of the parameters, to compare with, and copies of buffers and states."""
    model = wrapped(kind)
    x, edges = graph(nodes=3000, arcs=20_000)

    def forward_and_backward():
        out = model(x, edges)
        F.cross_entropy(out, labels(3000)).backward()
        model.zero_grad()

    with LiveBytes() as step:
        forward_and_backward()
    with LiveBytes() as sweep:
        controller = model.forward.controller
        controller.measure(model, model.forward.inner)
    assert passes(model) > 2
    assert step.peak > 1_000_000
    copied = [*model.parameters(), *model.buffers(), *[torch.get_rng_state()] * 2]
    assert sum(t.nbytes for t in copied) < 0.01 * step.peak
    assert sweep.peak <= step.peak + sum(t.nbytes for t in copied)


class TestAdaptation:
    def test_a_sweep_follows_the_first_step_and_refreshes_later(self):
        model = wrapped(adapt_interval=4)
        counts = []
        for _ in range(12):
            train_step(model, X, EDGES)
            counts.append(passes(model))
        slots = len(widths(model))
        assert counts[:3] == [0, slots + 1, slots + 1]
        assert counts[3:] == [slots + 1, *[slots + 3] * 4, *[slots + 5] * 4]

    def test_the_average_is_kept_and_spent_unevenly(self):
        model = wrapped(bits=5)
        for _ in range(2):
            train_step(model, X, EDGES)
        report = gact_graph.report(model)
        assert 4.5 < report.average_bits <= 5
        assert len({*widths(model).values()}) > 1
        measured = [row.sensitivity for row in report.contexts if row.bits is not None]
        assert all(c is not None and c > 0 for c in measured)

    def test_a_fraction_and_a_pin(self):
        model = wrapped(bits=5.5, pin={"*linear*": 8})
        for _ in range(2):
            train_step(model, X, EDGES)
        assert widths(model)["convs.1/lin/linear.input"] == 8
        assert gact_graph.report(model).average_bits <= 5.5

    def test_outputs_of_every_kind(self):
        class Several(GraphNet):
            def forward(self, x, edge_index):
                out = super().forward(x, edge_index)
                return {"a": (out, Data(x=out.tanh())), "unused": out.exp()}

        model = wrapped(make(lambda: Several("gat")))
        for _ in range(2):
            out = model(X, EDGES)
            (out["a"][0].sum() + out["a"][1].x.square().sum()).backward()
        assert passes(model) > 3

    def test_changing_batches_and_accumulation(self):
        model = wrapped("gcn", adapt_interval=2)
        for step in range(8):
            train_step(model, *graph(nodes=300 + 10 * step, arcs=2000 + 100 * step, seed=step))
            model(X, EDGES).sum().backward()
        assert passes(model) > 8
        assert all(g.isfinite().all() for g in gradients(model))

    def test_several_forwards_before_one_backward(self):
        model = wrapped()
        for _ in range(3):
            (model(X, EDGES) * model(X, EDGES)).sum().backward()
        assert passes(model) > 3

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
        for _ in range(2):
            model(X).sum().backward()
        assert passes(model) > 1
        assert model.a is model.b and model.frozen.weight.grad is None

    def test_what_cannot_be_replayed_is_told_once(self):
        model, x = wrapped(), X.clone()
        model(x, EDGES).sum().backward()
        x.add_(1)
        with pytest.warns(RuntimeWarning, match="changed in place since"):
            model(x, EDGES)
        assert passes(model) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, EDGES).sum().backward()
            x.add_(1)
            model(x, EDGES)

    def test_a_part_of_a_larger_model(self):
        encoder, model = nn.Linear(FEATURES, FEATURES), wrapped("sage")
        for _ in range(2):
            encoder.zero_grad()
            model(encoder(X), EDGES).sum().backward()
        slots = widths(model)
        assert passes(model) == len(slots) + 1
        before = encoder.weight.grad.clone()
        model.forward.controller.measure(model, model.forward.inner)
        assert torch.equal(encoder.weight.grad, before)

    def test_objects_that_hold_a_graph_cannot_be_replayed(self):
        class Taking(GraphNet):
            def forward(self, data):
                return super().forward(data.x, data.edge_index)

        encoder, model = nn.Linear(FEATURES, FEATURES), wrapped(make(lambda: Taking("sage")))
        with pytest.warns(RuntimeWarning, match="hold tensors of another module's graph"):
            model(Data(x=encoder(X), edge_index=EDGES)).sum().backward()

    def test_other_levels_measure_nothing(self):
        model = gact_graph.wrap(make(GraphNet), level="lossless", bits=32, adaptive=True)
        for _ in range(2):
            train_step(model, X, EDGES)
        assert model.forward.controller.adaptation is None

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_measure_for_themselves(self, clone):
        model = wrapped()
        train_step(model, X, EDGES)
        other = clone(model)
        for _ in range(2):
            train_step(other, X, EDGES)
        assert passes(other) > 0 == passes(model)


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

    def test_of_a_model_with_the_same_bits_everywhere(self):
        model, other = (gact_graph.wrap(make(Mlp), bits=2, adaptive=False) for _ in range(2))
        train_step(model, X)
        gact_graph.load_state_dict(other, gact_graph.state_dict(model))
        assert equal(train_step(other, X), train_step(model, X))

    def test_of_the_other_kind_is_refused(self):
        fixed, adaptive = gact_graph.wrap(make(Mlp), adaptive=False), wrapped(make(Mlp))
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

    def test_one_bit_and_a_high_learning_rate_provoke_it_once(self):
        with pytest.warns(RuntimeWarning, match="noise of compression dominates") as caught:
            model = self.steps(1, 5.0)
        found = [w for w in caught if "dominates" in str(w.message)]
        assert len(found) == 1
        text = str(found[0].message)
        assert "Most of it comes from" in text and "Take more bits" in text
        assert any(slot in text for slot in widths(model))

    def test_eight_bits_do_not(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = self.steps(8, 0.01)
        assert gact_graph.report(model).variance_ratio < 0.1

    def test_the_cure_it_names_is_one(self):
        model = self.steps(4, 0.01)
        scheme = model.forward.controller.scheme
        cure = scheme.cure(0.001)
        assert scheme._ratio(scheme._allocated(cure)) <= 0.001
        assert scheme._ratio(scheme._allocated(cure - 0.5)) > 0.001


class TestLog:
    def test_four_scalars(self):
        model = wrapped()
        for _ in range(2):
            train_step(model, X, EDGES)
        report, seen = gact_graph.report(model), []
        report.log(lambda *scalar: seen.append(scalar), 7)
        names = ["rate", "stored_mb", "average_bits", "variance_ratio"]
        assert [(name, step) for name, _, step in seen] == [(f"gact_graph/{n}", 7) for n in names]
        values = [value for _, value, _ in seen]
        expected = [report.rate, report.stored_bytes / 1e6, report.average_bits]
        assert values == [*expected, report.variance_ratio]
        assert 0 < report.variance_ratio < 1

    def test_a_writer_of_tensorboards_kind(self):
        class Writer:
            def add_scalar(self, name, value, step):
                seen.append(name)

        seen = []
        model = gact_graph.wrap(make(Mlp), adaptive=False)
        train_step(model, X)
        gact_graph.report(model).log(Writer())
        assert len(seen) == 3  # nothing was measured

    def test_anything_else_is_refused(self):
        with pytest.raises(TypeError, match=r"Expected a writer with add_scalar.*got int"):
            gact_graph.report(wrapped()).log(3)


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrapped(adapt_interval=2)
        for _ in range(6):
            train_step(model, X, EDGES)
