"""Gradients are right on average where backward multiplies two reads of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from samples import seeded
from simulated import Simulated
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv

import gact_graph
from gact_graph.codecs import Context, Saved
from gact_graph.codecs.offload.swap import Swap, Swapping
from gact_graph.codecs.quantize import Quantized
from gact_graph.ops.quantize import pack

NODES, EDGES, CHANNELS = 300, 900, 64
INDEX = torch.randint(NODES, (2, EDGES), generator=seeded(3))


class Scored(nn.Module):
    """Messages weighted by scores of their own sources: ``x_j * <att, x_j>``."""

    def __init__(self, gather: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(NODES, CHANNELS, generator=seeded(1)))
        self.att = nn.Parameter(torch.randn(CHANNELS, generator=seeded(2)))
        self.gather = gather

    def forward(self) -> Tensor:
        x = self.x + 0
        score = (x * self.att).sum(-1, keepdim=True)
        return self.gather(x, INDEX[0]) * self.gather(score, INDEX[0]) + 0


class Attention(nn.Module):
    """Scores that are nearly equal, so that softmax is nearly a mean."""

    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = conv(CHANNELS, CHANNELS, bias=False, add_self_loops=False)
        self.x = torch.randn(NODES, CHANNELS, generator=seeded(1))
        self.att = self.conv.att_src if conv is GATConv else self.conv.att

    def forward(self) -> Tensor:
        return self.conv(self.x, INDEX) + 0


def gradient(model: nn.Module) -> Tensor:
    model.zero_grad()
    model().sum().backward()
    return model.att.grad.flatten().double().clone()


def squared_bias(
    make: Callable[[], nn.Module], bits: int, draws: int, blocks: bool | int = False
) -> float:
    """Of the gradient of the scores' parameter, over its square; free of the noise that is left."""
    exact = gradient(make())
    options = {"bits": bits, "adaptive": False, "blocks": blocks, "min_bytes": 0}
    models = (gact_graph.wrap(make(), seed=seed, **options) for seed in range(draws))
    added = torch.stack([gradient(model) - exact for model in models])
    squares, square = added.square().sum(), added.sum(0).square().sum()
    assert squares > 0
    return float((square - squares) / (draws * (draws - 1)) / exact.square().sum())


GATHERS = {
    "index_select": lambda x, index: x.index_select(0, index),
    "getitem": lambda x, index: x[index],
}


@pytest.mark.parametrize("gather", GATHERS)
def test_scores_and_messages_of_one_tensor(gather: str) -> None:
    """Of one reading for both, the mean gradient is off by half of its length (squared: 0.28)."""
    assert abs(squared_bias(lambda: Scored(GATHERS[gather]), 2, 40)) < 0.02


@pytest.mark.parametrize("blocks", [False, 256])
@pytest.mark.parametrize("conv", [GATConv, GATv2Conv])
def test_attention_layers(conv: type[nn.Module], blocks: bool | int) -> None:
    """With one decoding for both, the mean gradient is off by a third (squared: 0.12 and 0.13)."""
    # In blocks the slope of LeakyReLU is that of decoded scores: 0.015 for GATv2.
    assert abs(squared_bias(lambda: Attention(conv), 2, 60, blocks)) < 0.02


class FarApart(nn.Module):
    """Attention with scores that are far apart, so that softmax is nearly a maximum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        nodes = 1500
        self.conv = GATConv(8, 8, heads=4, add_self_loops=False)
        self.x, self.index = torch.randn(nodes, 8), torch.randint(nodes, (2, 6 * nodes))
        self.weight = torch.randn(nodes, 32)
        self.att = self.conv.att_src
        with torch.no_grad():
            self.att.mul_(3)
            self.conv.att_dst.mul_(3)

    def forward(self) -> Tensor:
        out: Tensor = self.conv(self.x, self.index) * self.weight
        return out


def test_exponentials_of_scores_in_blocks() -> None:
    """With exponentials of scores of 2 bits, the mean gradient is off by 28 % (squared: 0.08)."""
    assert abs(squared_bias(FarApart, 2, 60, 1024)) < 0.02


def test_readers_of_each_tensor() -> None:
    """Alone a tensor is read as always; where it is gathered, too, its codes serve both readers."""
    model = gact_graph.wrap(Scored(GATHERS["getitem"]), bits=2, adaptive=False, min_bytes=0)
    gradient(model)
    rows = {row.codec: row for row in gact_graph.report(model).contexts}
    assert rows["quantize"].stored_bytes < NODES * CHANNELS
    x = torch.randn(1000, generator=seeded(1))
    for leave in (lambda encoded: encoded, Swap(Swapping(Simulated(), least=0)).leave):
        packed = pack(x, 2, seed=5)
        saved = Saved(Context(leave(Quantized(packed, packed.bits))))
        assert torch.equal(saved.tensor(), packed.unpack())
        saved.context.gathered = True
        assert torch.equal(saved.tensor(), packed.decorrelated().unpack())
        assert torch.equal(saved.source(), packed.unpack())
