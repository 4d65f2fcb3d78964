"""Losses are exact: those of torch, and those that a model computes by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from samples import FEATURES, graph, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GAE, GCNConv

import gact_graph

NODES, EDGES = 1500, 6000


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 64), GCNConv(64, 32)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Classifier(nn.Module):
    """Its ``loss`` runs the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = Encoder(), nn.Linear(32, 8)

    def loss(self, x: Tensor, edge_index: Tensor) -> Tensor:
        p = self.last(self.encoder(x, edge_index)).softmax(1)
        return -(p[:, :4].sum(1) + 1e-15).log().mean()


def data() -> tuple[Tensor, Tensor, Tensor]:
    x, edge_index = graph(NODES, EDGES)
    return 4 * x, edge_index, torch.randint(NODES, (2, EDGES))


def gradient_of_gae(**options) -> tuple[Tensor, list]:
    torch.manual_seed(0)
    model = GAE(Encoder())
    x, edge_index, others = data()

    def loss() -> Tensor:
        return model.recon_loss(model.encode(x, edge_index), edge_index, others)

    rows = []
    if options:
        gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
        with gact_graph.compress(model):
            out = loss()
        rows = gact_graph.report(model).contexts
    else:
        out = loss()
    out.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), rows


def test_of_a_graph_autoencoder():
    """-log(sigmoid(x) + 1e-15): the noise of a small sigmoid times 1e15."""
    exact, _ = gradient_of_gae()
    got, rows = gradient_of_gae(bits=4)
    assert (got - exact).norm() < 0.1 * exact.norm()
    widths = {row.slot: row.bits for row in rows}
    assert widths["encoder/second/lin/linear.input"] == 4
    assert all(bits is None for slot, bits in widths.items() if not slot.startswith("encoder"))


def test_a_loss_that_runs_the_model_compresses_the_model():
    model = gact_graph.wrap(Classifier(), bits=4, adaptive=False, min_bytes=0)
    x, edge_index, _ = data()
    with gact_graph.compress(model):
        loss = model.loss(x, edge_index)
    loss.backward()
    widths = {row.slot: row.bits for row in gact_graph.report(model).contexts}
    assert widths["encoder/second/lin/linear.input"] == 4
    assert widths["softmax.result"] is None


class Encodes(nn.Module):
    """Its method has an operation of its own, outside of submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)

    def encode(self, x: Tensor) -> Tensor:
        return torch.sin(torch.cumsum(self.first(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_a_method_that_a_loss_calls_is_compressed():
    model = gact_graph.wrap(Encodes(), methods=("encode",), bits=4, adaptive=False, min_bytes=0)

    def compute_loss() -> Tensor:
        return model.encode(data()[0]).square().mean()

    def widths() -> dict[str, float | None]:
        return {row.slot: row.bits for row in gact_graph.report(model).contexts}

    compute_loss().backward()
    assert widths()["sin.derivative"] == 4
    with gact_graph.compress(model):
        loss = compute_loss()
    loss.backward()
    assert widths()["sin.derivative"] == 4


LOSSES = {
    "kl_div": lambda h: F.kl_div(h, torch.rand_like(h), reduction="batchmean"),
    "huber_loss": lambda h: F.huber_loss(h, torch.zeros_like(h)),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, torch.ones_like(h)),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp()),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, torch.ones_like(h)),
    "triplet_margin_loss": lambda h: F.triplet_margin_loss(h[:400], h[400:800], h[800:1200]),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.arange(len(h)) % 32),
}


@pytest.mark.parametrize("name", LOSSES)
def test_of_torch(name):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, 32)

        def forward(self, x: Tensor) -> Tensor:
            return LOSSES[name](self.lin(x))

    model = gact_graph.wrap(Model(), bits=2, adaptive=False, min_bytes=0)
    model(torch.randn(NODES, FEATURES)).backward()
    rows = [row for row in gact_graph.report(model).contexts if name in row.slot]
    assert rows and all(row.bits is None for row in rows)
