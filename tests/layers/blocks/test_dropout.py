"""Dropout of messages in blocks: forward and backward have the same masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocked import Alone
from samples import graph, one_thread  # noqa: F401
from torch import nn
from torch_geometric.nn import MessagePassing

import gact_graph

X, EDGES = graph()
EXACT = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}


class Dropped(MessagePassing):
    """Sums of what dropout leaves of the sources: linear in them for given masks."""

    def __init__(self, flow="source_to_target"):
        super().__init__(aggr="sum", flow=flow)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x * self.scale)

    def message(self, x_j):
        return F.dropout(x_j, 0.5, self.training)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("options", [{"blocks": 300}, {"level": "CB2"}], ids=str)
def test_backward_has_the_masks_of_forward(flow, options):
    model = Alone(Dropped(flow))
    gact_graph.wrap(model, **(EXACT | options))
    x = X.clone().requires_grad_()
    out = model(x, EDGES)
    weight = torch.randn(out.shape)
    state = torch.get_rng_state()
    out.backward(weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert (x.grad * x).sum().item() == pytest.approx((out * weight).sum().item(), abs=1e-2)
    again = model(x, EDGES)
    assert not torch.equal(again, out)


def test_a_mask_drops_the_share_it_should_and_is_new_in_each_block():
    model = gact_graph.wrap(Alone(Dropped()), blocks=100, **EXACT)
    edges = torch.stack([torch.arange(300), torch.arange(300)])
    out = model(torch.ones(300, 64), edges)
    assert gact_graph.report(model).layers[0].blocks > 3
    assert (out == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(out[:50], out[50:100])
