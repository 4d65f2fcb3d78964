"""The advice where a CUDA device is out of memory, without a device."""

import gc
import re
import types
import weakref

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, MessagePassing

import gact_graph
from gact_graph.codecs.quantize import Quantized
from gact_graph.layers.blocks.graph import EdgeGraph

MIB, GIB = 1 << 20, 1 << 30
NONE = "no strategy takes clearly less than this one; the smallest, "


@pytest.fixture
def device(monkeypatch):
    """A device whose memory a test may set."""
    properties = types.SimpleNamespace(total_memory=GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    return properties


def fail_once_in_backward(monkeypatch, owner, method):
    """The first call of a method in backward runs out of memory."""
    run, left = getattr(owner, method), [1]

    def out_of_memory(*args):
        if left and torch._C._current_graph_task_id() != -1:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(*args)

    monkeypatch.setattr(owner, method, out_of_memory)


@pytest.fixture
def once(monkeypatch):
    """The first block in backward runs out of memory."""
    fail_once_in_backward(monkeypatch, EdgeGraph, "__call__")


class Full(nn.Module):
    """Runs out of memory at the first call, and not when it is tried on less."""

    def __init__(self):
        super().__init__()
        self.conv = GCNConv(16, 32)

    def forward(self, x, edge_index):
        if edge_index.size(1) > 200_000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.conv(x, edge_index)


class Conv(MessagePassing):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).relu())

    def message(self, x_i, x_j):
        return torch.sigmoid(x_i - x_j) * x_j


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(64, 64), Conv()

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).tanh(), edge_index)


def call(total, device):
    device.total_memory = total
    torch.manual_seed(0)
    model = gact_graph.wrap(Full(), blocks=False, min_bytes=0)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        model(torch.randn(8000, 16), torch.randint(8000, (2, 300_000)))
    return str(caught.value)


def test_it_names_the_way_that_would_fit(device):
    text = call(48 * MIB, device)
    way = "lossless + blocks would fit into the 48.0 MiB that were free"
    assert f"gact_graph: {way}: wrap(model, memory={48 * MIB})." in text


def test_it_names_a_smaller_way_where_the_one_that_failed_should_have_fitted(device):
    text = call(GIB, device)
    match = re.search(
        r"gact_graph: lossless \+ blocks takes about 1\d\.\d MiB, "
        r"and this strategy [789]\d\.\d MiB: "
        r"wrap\(model, memory=(\d+)\)\.$",
        text,
    )
    assert match, text
    assert 70 * MIB < int(match[1]) < 100 * MIB  # what stock takes, which does not fit into that


def test_it_says_where_nothing_would(device):
    text = call(1 << 20, device)
    assert "no strategy fits into the 1.0 MiB that were free; the smallest, " in text


def forward(**settings):
    """A wrapped model, its inputs, and its output."""
    torch.manual_seed(0)
    model = gact_graph.wrap(Net(), min_bytes=0, adaptive=False, **settings)
    inputs = torch.randn(500, 64), torch.randint(500, (2, 5000))
    return model, inputs, model(*inputs)


def error_of(out):
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. ") as caught:
        out.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("level", ["L1", "CB2"])
def test_a_layer_that_runs_again_in_backward_has_the_advice(device, once, level):
    model, inputs, out = forward(level=level, blocks=4096)
    text = error_of(out)
    assert text.count("gact_graph: ") == 1
    assert f"gact_graph: {NONE}" in text
    model(*inputs).sum().backward()  # and trains on
    assert all(p.grad is not None for p in model.parameters())


def test_decoding_has_the_advice(device, monkeypatch):
    fail_once_in_backward(monkeypatch, Quantized, "decode")
    _model, _inputs, out = forward(blocks=False)
    assert f"gact_graph: {NONE}" in error_of(out)


def test_a_graph_holds_no_input_for_the_sake_of_advice(device, once):
    model, inputs, out = forward(blocks=4096)
    gone = [weakref.ref(tensor) for tensor in inputs]
    del inputs
    gc.collect()
    assert None in [reference() for reference in gone]
    assert error_of(out).endswith(
        "gact_graph: wrap(model, memory=...) chooses a strategy that fits."
    )
    assert model.training
