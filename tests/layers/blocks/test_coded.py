"""In backward the tensors of nodes stay coded, and blocks decode the rows that they read."""

from __future__ import annotations

import copy

import pytest
import torch
from blocked import WIDE, Wide
from samples import equal, graph, make, one_thread, train_step  # noqa: F401
from torch.autograd.graph import saved_tensors_hooks

import gact_graph
from gact_graph.layers.blocks import rows
from gact_graph.ops.quantize import Packed

X, EDGES = graph()
FIXED = {"adaptive": False, "min_bytes": 0}


@pytest.mark.parametrize("kind", WIDE)
def test_the_same_gradients_as_with_whole_tensors(kind, monkeypatch):
    options = {"bits": 3, "adaptive": False, "blocks": 200, "min_bytes": 0}
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
    monkeypatch.setattr(rows, "Quantized", None)  # no class is coded
    widths.clear()
    expected = train_step(gact_graph.wrap(net, **options), X, EDGES)
    assert not widths
    assert equal(found, expected)


def test_hooks_of_others_get_tensors():
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


def test_backward_twice():
    net = gact_graph.wrap(make(lambda: Wide(WIDE["gatv2"]())), bits=3, blocks=200, **FIXED)
    torch.manual_seed(0)
    loss = net(X, EDGES).square().sum()
    once = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [*net.parameters()])
    assert equal([*once], [*again])
