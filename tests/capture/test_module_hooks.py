"""The hooks on modules and on the phases of message passing."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from samples import FEATURES, GraphNet, equal, graph, make, one_thread, train_step  # noqa: F401
from torch import nn
from torch_geometric.nn import GATConv, MessagePassing, ResGatedGraphConv

import gact_graph

X, EDGES = graph()
LOSSLESS = {"level": "lossless", "bits": 32, "min_bytes": 0}


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
        for hook in hooks.values()
    ]


class Failing(MessagePassing):
    """Fails in one phase, once."""

    def __init__(self, phase):
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.phase = phase

    def forward(self, x, edge_index):
        x = self.lin(x)
        return self.propagate(edge_index, x=x, weight=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i, x_j):
        self.check("edge_update")
        return (x_i * x_j).sum(-1, keepdim=True).tanh()

    def message(self, x_j, weight):
        self.check("message")
        return x_j * weight

    def aggregate(self, inputs, index, dim_size=None):
        self.check("aggregate")
        return super().aggregate(inputs, index, dim_size=dim_size)

    def check(self, phase):
        if phase == self.phase:
            self.phase = None
            raise ValueError("on purpose")


class Net(nn.Module):
    """Goes on where its conv has failed."""

    def __init__(self, phase):
        super().__init__()
        self.conv, self.last = Failing(phase), nn.Linear(FEATURES, 5)

    def forward(self, x, edge_index):
        for _ in range(2):
            try:
                x = self.conv(x, edge_index)
            except ValueError:
                continue
        return self.last(x.tanh())


class TestPhases:
    def test_are_part_of_the_slot(self):
        model = gact_graph.wrap(Failing(None), **LOSSLESS)
        model(X, EDGES)
        slots = {row.slot for row in gact_graph.report(model).contexts}
        assert {"edge_update/tanh.result", "message/mul.input"} <= slots

    @pytest.mark.parametrize("phase", ["edge_update", "message", "aggregate"])
    def test_that_fail_leave_nothing_on_the_stack(self, phase):
        model = gact_graph.wrap(make(lambda: Net(phase)), **LOSSLESS)
        model(X, EDGES)
        slots = {row.slot for row in gact_graph.report(model).contexts}
        assert "tanh.result" in slots
        assert all(slot.startswith(("conv/", "tanh", "last")) for slot in slots)

    def test_their_results_are_left_alone(self):
        stock = make(lambda: Net(None))
        model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
        assert torch.equal(model(X, EDGES), stock(X, EDGES))


class TestHooks:
    @pytest.mark.parametrize("kind", ["gat", "gcn", "sage", "gin"])
    def test_unwrap_takes_all_away(self, kind):
        model = make(lambda: GraphNet(kind))
        before = len(hooks_of(model))
        gact_graph.wrap(model, **LOSSLESS)
        assert len(hooks_of(model)) > before + 10
        gact_graph.unwrap(model)
        assert len(hooks_of(model)) == before

    def test_a_conv_may_be_the_model_itself(self):
        model = gact_graph.wrap(GATConv(FEATURES, 32), **LOSSLESS)
        model(X, EDGES)
        assert "message/mul.other" in {row.slot for row in gact_graph.report(model).contexts}

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_a_copy_has_its_own(self, clone):
        model = gact_graph.wrap(make(lambda: GraphNet("gat")), **LOSSLESS)
        other = clone(model)
        assert equal(train_step(other, X, EDGES), train_step(model, X, EDGES))
        names = [[row.slot for row in gact_graph.report(m).contexts] for m in (model, other)]
        assert names[0] == names[1]
        gact_graph.unwrap(model)
        train_step(other, X, EDGES)
        assert any("message/" in row.slot for row in gact_graph.report(other).contexts)

    def test_another_models_hooks_are_deaf(self):
        inner = gact_graph.wrap(make(lambda: GraphNet("gat")), **LOSSLESS)
        other = gact_graph.wrap(nn.Linear(2, 2), **LOSSLESS)
        with gact_graph.compress(other):
            inner.eval()(X, EDGES)
        slots = [row.slot for row in gact_graph.report(other).contexts]
        assert slots and not [slot for slot in slots if "convs" in slot or "message/" in slot]
        assert gact_graph.report(inner).contexts == []


class TestAModuleThatTwoModelsShare:
    """As convolutions of PyG do whose default activation is an object: ``act=Sigmoid()``."""

    @staticmethod
    def gated():
        return ResGatedGraphConv(FEATURES, FEATURES)

    def test_hooks_go_with_their_model(self):
        conv = self.gated()
        before = len(conv.act._forward_hooks), len(conv.act._forward_pre_hooks)
        model = gact_graph.wrap(conv, min_bytes=0)
        again = pickle.loads(pickle.dumps(model))
        assert len(conv.act._forward_hooks) == before[0] + 1
        shared = conv.act
        of_copy = again.act
        del model, conv, again
        gc.collect()
        assert (len(shared._forward_hooks), len(shared._forward_pre_hooks)) == before
        assert not of_copy._forward_hooks

    def test_a_model_may_die_while_the_module_runs(self):
        """As garbage collection has it, between two of the module's hooks."""
        model = gact_graph.wrap(self.gated(), **LOSSLESS)
        others = [gact_graph.wrap(self.gated(), **LOSSLESS)]
        x = X.clone().requires_grad_()

        def collect(module, args):
            others.clear()
            gc.collect()

        handle = model.act.register_forward_pre_hook(collect, prepend=True)
        try:
            model(x, EDGES).sum().backward()
        finally:
            handle.remove()
        assert not others

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("level", ["lossless", "CB2"])
    def test_a_model_that_waits_does_not_disturb(self, level):
        waiting = gact_graph.wrap(self.gated(), blocks=16, min_bytes=0)
        model = gact_graph.wrap(self.gated(), blocks=16, level=level, bits=32, min_bytes=0)
        assert waiting.act is model.act
        x = X.clone().requires_grad_()
        model(x, EDGES).sum().backward()
        layers = gact_graph.report(model).layers
        assert layers and all(row.reason is None for row in layers), layers
