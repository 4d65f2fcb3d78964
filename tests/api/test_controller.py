"""The controller of a wrapped model, and its sessions."""

import pickle

import pytest
import torch
from samples import (
    Mlp,
    controller_of,
    graph,
    make,
    one_thread,  # noqa: F401
)
from torch import nn

import gact_graph
from gact_graph.api import controller
from gact_graph.api.forward import should_compress
from gact_graph.codecs.offload.files import Files
from gact_graph.support.current import current

X, _ = graph()


def test_counts_training_forwards_alone():
    model = gact_graph.wrap(make(Mlp), min_bytes=0)
    model(X)
    model.eval()(X)
    with torch.no_grad():
        model.train()(X)
    model(X)
    assert controller_of(model).forwards == 2


def test_swapping_follows_a_model_to_another_device(monkeypatch):
    model = gact_graph.wrap(make(Mlp), min_bytes=0, level="L2")
    chosen = controller_of(model).swapping
    model(X).sum().backward()
    assert controller_of(model).swapping is chosen and isinstance(chosen.streams, Files)

    class Streams(Files):
        pass

    monkeypatch.setattr(controller, "CudaStreams", Streams)
    monkeypatch.setattr(controller, "_is_on_cuda", lambda model: True)
    model(X).sum().backward()
    assert isinstance(controller_of(model).swapping.streams, Streams)


def test_no_session_is_current_outside():
    model = gact_graph.wrap(make(Mlp), min_bytes=0)
    seen = []
    model.second.register_forward_hook(lambda *_: seen.append(current()))
    model(X)
    assert seen[0].owner is controller_of(model).owner
    assert current() is None
    assert controller_of(model).session is None


def test_a_model_that_calls_itself_has_one_session():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(32, 32)

        def forward(self, x, depth=2):
            h = self.lin(x).tanh()
            return h if depth == 0 else self(h, depth - 1)

    model = gact_graph.wrap(Recursive(), min_bytes=0)
    model(X).sum().backward()
    slots = [row.slot for row in gact_graph.report(model).contexts]
    assert slots == ["tanh.result", "tanh#2.result", "tanh#3.result"]
    assert controller_of(model).forwards == 1


def test_inner_wrapped_models_report_for_themselves():
    outer = gact_graph.wrap(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), min_bytes=0)
    outer.append(gact_graph.wrap(make(Mlp), min_bytes=0))
    outer.append(nn.Tanh())
    outer(X).sum().backward()
    inner = [row.slot for row in gact_graph.report(outer[2]).contexts]
    assert inner == ["tanh.result", "tanh#2.result"]
    assert "1/tanh.result" in [row.slot for row in gact_graph.report(outer).contexts]
    assert outer[0].weight.grad is not None


@pytest.mark.parametrize(
    ("training", "grad", "expected"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_should_compress(training, grad, expected):
    with torch.set_grad_enabled(grad):
        assert should_compress(Mlp().train(training)) is expected


def test_a_copy_has_its_own_owner_shared_by_its_hooks():
    model = gact_graph.wrap(Mlp())
    twin = pickle.loads(pickle.dumps(model))
    [hook] = twin.first._forward_pre_hooks.values()
    assert hook.owner is controller_of(twin).owner
    assert hook.owner is not controller_of(model).owner
