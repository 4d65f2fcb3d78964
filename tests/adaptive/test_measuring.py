"""When a step is measured; training is not changed by it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from samples import (  # noqa: F401
    FEATURES,
    Mlp,
    equal,
    graph,
    labels,
    make,
    measurements,
    one_thread,
    widths,
)
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import HGTConv, RGATConv

import gact_graph
from gact_graph.adaptive import sensitivity

X, EDGES = graph()


def measured(model):
    return gact_graph.report(model).variance_ratio is not None


def wrapped(model, **options):
    return gact_graph.wrap(model, min_bytes=0, **({"bits": 4} | options))


def steps(model, count, inputs=lambda: (X,), loss=lambda out: out.square().mean()):
    """Train; return the warnings of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    messages = []
    for _ in range(count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss(model(*inputs())).backward()
            optimizer.step()
        messages.append(
            [str(warning.message) for warning in caught if "gact_graph" in str(warning.message)]
        )
    return messages


def failing(monkeypatch, error):
    """Make operations raise where they run again."""

    def raises(node, inputs):
        raise error

    monkeypatch.setattr(sensitivity, "_run_again", raises)


class TestOperationsThatRaise:
    def test_training_goes_on_with_one_warning_and_three_tries(self, monkeypatch):
        model = wrapped(make(Mlp), adapt_interval=2)
        failing(monkeypatch, ValueError("not again"))
        said = steps(model, 8)
        assert sum(map(len, said)) == 1
        assert "ValueError: not again" in said[0][0] and "adaptive=False" in said[0][0]
        assert measurements(model) == 0
        assert {*widths(model).values()} == {4}

    def test_measuring_starts_again_when_something_else_learns(self, monkeypatch):
        model = wrapped(make(Mlp), adapt_interval=2)
        with monkeypatch.context() as patched:
            failing(patched, ValueError("not again"))
            steps(model, 6)
        steps(model, 2)
        assert measurements(model) == 0
        model.first.requires_grad_(False)
        steps(model, 3)
        assert measurements(model) > 0 and measured(model)

    def test_out_of_memory_too(self, monkeypatch):
        failing(monkeypatch, torch.OutOfMemoryError("no room"))
        assert "OutOfMemoryError: no room" in steps(wrapped(make(Mlp)), 3)[0][0]

    @pytest.mark.parametrize("level", ["L1", "CB2"])
    @pytest.mark.parametrize("kind", ["RGATConv", "HGTConv"])
    def test_parameters_without_gradient(self, kind, level):
        if kind == "RGATConv":
            types = EDGES[0] % 3

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = nn.Linear(FEATURES, 32)
                    self.conv = RGATConv(32, 16, num_relations=3)

                def forward(self, x):
                    return self.conv(self.first(x), EDGES, types)
        else:

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    kinds = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])
                    self.first = nn.Linear(FEATURES, 32)
                    self.conv = HGTConv(32, 16, kinds, heads=2)

                def forward(self, x):
                    x = self.first(x)
                    edges = {("a", "to", "b"): EDGES, ("b", "of", "a"): EDGES.flip(0)}
                    return self.conv({"a": x, "b": x * 2}, edges)["a"]

        model = wrapped(make(Net), level=level, adapt_interval=2)
        assert steps(model, 5) == [[]] * 5
        assert gact_graph.report(model).measurements > 2

    def test_a_dtype_that_changes(self):
        model = wrapped(make(Mlp), adapt_interval=2)
        steps(model, 1)
        model.double()
        assert steps(model, 3, inputs=lambda: (X.double(),)) == [[]] * 3
        assert measurements(model) > 1


class TestArguments:
    def test_a_dict_that_forward_writes_into(self):
        class Writes(Mlp):
            def forward(self, arguments):
                x = arguments.pop("x")
                arguments["x"] = arguments["more"] = torch.arange(3)
                return super().forward(x)

        def twin(arguments):
            return copy.copy(arguments)

        model = wrapped(make(Writes), adapt_interval=2)
        assert steps(model, 5, inputs=lambda: (twin({"x": X}),)) == [[]] * 5
        assert measured(model)

    def test_a_data_object_that_forward_writes_into(self):
        class Writes(Mlp):
            def forward(self, data):
                data.x = super().forward(data.x)
                return data.x

        model = wrapped(make(Writes), adapt_interval=2)
        assert steps(model, 5, inputs=lambda: (Data(x=X, edge_index=EDGES),)) == [[]] * 5
        assert measured(model)


class TestBackwardThatRaises:
    def test_it_is_no_measurement(self):
        def fails(gradient):
            raise ValueError("on purpose")

        model = wrapped(make(Mlp))
        handle = model.first.weight.register_hook(fails)
        with pytest.raises(ValueError, match="on purpose"):
            model(X).square().mean().backward()
        handle.remove()
        assert measurements(model) == 0
        assert steps(model, 9) == [[]] * 9 and measurements(model) == 1


class TestSetsOfParameters:
    def test_the_last_eight_are_remembered(self):
        model = wrapped(make(Mlp), adapt_interval=1000)
        for number in range(12):
            for place, parameter in enumerate([*model.parameters()][:4]):
                parameter.requires_grad_(bool(number >> place & 1))
            steps(model, 1)
        assert len(model.forward.controller.methods["forward"].adaptation._others) == 8


class TestGradientsThatTellNothing:
    def test_are_skipped_for_an_interval_with_a_warning_after_the_third(self):
        model = wrapped(make(Mlp), adapt_interval=4)
        said = steps(model, 20, loss=lambda out: (out * 0.0).sum())
        assert measurements(model) == 5 and not measured(model)
        assert sum(map(len, said)) == 1 and "NaN or infinity" in str(said)
        assert {*widths(model).values()} == {4}

    def test_it_measures_once_they_do(self):
        model = wrapped(make(Mlp), adapt_interval=4)
        steps(model, 3, loss=lambda out: out.sum() * float("nan"))
        assert measurements(model) == 1 and not measured(model)
        model = wrapped(make(Mlp), adapt_interval=4)
        steps(model, 2, loss=lambda out: (out * 0.0).sum())
        steps(model, 8)
        assert measured(model)


def test_the_output_is_kept_as_in_the_forward():
    """log_softmax saves its result: quantized, with -inf in it, its gradient is NaN."""

    class Ends(Mlp):
        def __init__(self):
            super().__init__(width=64)
            self.wide = nn.Linear(5, 64)

        def forward(self, x):
            return F.log_softmax(self.wide(super().forward(x)), -1)

    model = wrapped(make(Ends), bits=2)
    exact = [row.slot for row in (steps(model, 1), gact_graph.report(model).contexts)[1]]
    [out] = [slot for slot in exact if "log_softmax" in slot]
    assert out not in widths(model)
    steps(model, 2)
    assert out not in widths(model) and measured(model)


class TestWhatLearns:
    def test_a_layer_that_comes_back_has_the_average_until_it_is_measured(self):
        model = wrapped(make(Mlp), bits=4, adapt_interval=1000)
        steps(model, 1)
        model.second.requires_grad_(False)
        steps(model, 1)
        model.requires_grad_(True)
        steps(model, 1)
        assert widths(model) and all(width >= 4 for width in widths(model).values())

    def test_layers_that_learn_by_turns_are_not_measured_each_time(self):
        model = wrapped(make(Mlp), bits=4, adapt_interval=1000)
        for turn in range(12):
            model.first.requires_grad_(turn % 2 == 0)
            model.second.requires_grad_(turn % 2 == 0)
            steps(model, 2)
            if turn == 5:
                before = measurements(model)
        assert measurements(model) == before == 2

    def test_a_step_whose_backward_comes_late_is_dropped(self):
        model = wrapped(make(Mlp))
        late = model(X).square().mean()
        model.first.requires_grad_(False)
        model(X)
        late.backward()
        assert measurements(model) == 0
        assert steps(model, 1) == [[]] and measurements(model) == 1


def test_slots_without_a_width_are_measured_once():
    model = wrapped(make(Mlp), bits=16)
    steps(model, 12)
    assert gact_graph.report(model).measurements == 1


def test_an_output_that_is_kept_does_not_stop_measuring():
    model = wrapped(make(Mlp))
    kept = model(X)
    steps(model, 12)
    assert measured(model) and kept.grad_fn is not None


def test_a_forward_without_outputs_is_not_measured():
    class Silent(Mlp):
        def forward(self, x):
            self.loss = super().forward(x).square().mean()

    model = wrapped(make(Silent))
    with pytest.warns(RuntimeWarning, match="because forward returns no tensor with a gradient"):
        model(X)
    stored = []
    for _ in range(5):
        model.loss.backward()
        model(X)
        stored.append(gact_graph.report(model).stored_bytes)
    assert not measured(model) and stored[-1] <= stored[0]
