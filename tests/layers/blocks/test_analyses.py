"""One trace for each state: layers and graphs share it, and it holds nothing of theirs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing, SAGEConv

import gact_graph
from gact_graph.layers.blocks import edge_work, trace
from gact_graph.layers.blocks.trace import Trace

EXACT = {"level": "lossless", "blocks": 256, "min_bytes": 0}


def sample(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, 16, generator=made)
    return x, torch.randint(nodes, (2, edges), generator=made)


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(16, 16, aggr="max") for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """Grows with each trace."""
    edge_work._known.clear()
    made, run = [], trace._trace

    def counted(*args: object) -> Trace:
        made.append(run(*args))
        return made[-1]

    monkeypatch.setattr(trace, "_trace", counted)
    return made


def test_equal_layers_and_other_graphs_share_a_trace(traces: list[Trace]) -> None:
    model = gact_graph.wrap(Net(4), **EXACT)
    for nodes, edges in ((300, 3000), (500, 2000), (300, 1)):
        x, edge_index = sample(nodes, edges)
        model(x.requires_grad_(), edge_index).sum().backward()
    assert len(traces) == 1
    model.eval()
    model(*sample(300, 3000))
    assert len(traces) == 2  # no gradient of the input is needed now


def test_other_settings_make_another_trace(traces: list[Trace]) -> None:
    conv = gact_graph.wrap(GATConv(16, 8, add_self_loops=False), **EXACT)
    x, edge_index = sample(300, 3000)
    outs, counts = [], []
    for slope in (0.2, 0.2, 0.5):
        conv.negative_slope = slope
        outs.append(conv(x, edge_index))
        counts.append(len(traces))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert counts[0] == counts[1] < counts[2]


def test_a_trace_holds_no_parameter() -> None:
    conv = GATConv(16, 8, edge_dim=4, heads=2)
    gact_graph.wrap(conv, **EXACT)
    x, edge_index = sample(300, 3000)
    conv(x, edge_index, torch.randn(3000, 4)).sum().backward()
    held = [weakref.ref(parameter) for parameter in conv.parameters()]
    del conv
    gc.collect()
    assert [parameter() for parameter in held] == [None] * len(held)


class Ones(MessagePassing):
    """A message whose dtype is that of the factory functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x * self.scale)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * torch.ones(x_j.size(1))


def test_the_default_dtype_belongs_to_the_state() -> None:
    x, edge_index = sample(300, 3000)
    model = gact_graph.wrap(Ones(), **EXACT)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            out = model(x.requires_grad_(), edge_index)
        finally:
            torch.set_default_dtype(torch.float32)
        assert out.dtype == dtype
