"""Small nets and graphs that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import gact_graph
from experiments.helpers.noise import Draws

NODES, FEATURES, CLASSES = 300, 32, 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For files that import it: on tensors this small, threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def graph(nodes: int = NODES, edges: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and edge_index."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, FEATURES, generator=generator)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def labels(nodes: int = NODES) -> Tensor:
    return torch.arange(nodes) % CLASSES


class GraphNet(nn.Module):
    """Two convs with a norm, an activation and dropout between them."""

    def __init__(self, kind: str = "gcn", dropout: float = 0.5) -> None:
        super().__init__()
        convs = {
            "gcn": lambda i, o: GCNConv(i, o),
            "gat": lambda i, o: GATConv(
                i, o // 2 if o > CLASSES else o, heads=2, concat=o > CLASSES
            ),
            "sage": lambda i, o: SAGEConv(i, o),
            "gin": lambda i, o: GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))),
        }
        self.convs = nn.ModuleList([convs[kind](FEATURES, 32), convs[kind](32, CLASSES)])
        self.norm = nn.BatchNorm1d(32)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.convs[0](x, edge_index)
        h = F.dropout(F.relu(self.norm(h)), self.dropout, self.training)
        return self.convs[1](h, edge_index)


_EDGES = graph()[1]


class ConvNet(nn.Module):
    """One conv on the edges of :func:`graph` after a linear layer, with more arguments for it."""

    def __init__(self, conv: nn.Module, *extra: Tensor) -> None:
        super().__init__()
        self.first, self.conv, self.extra = nn.Linear(FEATURES, FEATURES), conv, extra

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(torch.tanh(self.first(x)), _EDGES, *self.extra)
        return out


class Mlp(nn.Module):
    """tanh saves its result and linear its input: one storage, two savers."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = F.dropout(torch.tanh(self.second(h)), self.dropout, self.training)
        return self.last(h)


class Lambda(nn.Module):
    """A weight [32, 64] and any function of the module and its inputs."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 64, generator=seeded(3)) / 8)
        self.function = function

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.function(self, *args, **kwargs)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(net: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The net with the same parameters at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return net()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train_step(model: nn.Module, *inputs: object, seed: int = 7) -> list[Tensor]:
    """The gradients of one step; dropout follows ``seed``."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(*inputs)
    F.cross_entropy(out, labels(len(out))).backward()
    return gradients(model)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """Relative L2 distance of two lists of gradients."""
    a, b = (torch.cat([t.flatten() for t in side]) for side in (left, right))
    return ((a - b).norm() / b.norm()).item()


def draws(model: nn.Module, *inputs: object) -> Draws:
    """Gradients of one step of a model with fixed bits, under other draws of the noise."""

    def loss() -> Tensor:
        torch.manual_seed(3)
        out = model(*inputs)
        return F.cross_entropy(out, labels(len(out)))

    return Draws(model, loss)


def controller_of(model: nn.Module) -> Any:
    """The controller of a wrapped model."""
    return vars(model)["forward"].controller


def measurements(model: nn.Module) -> int:
    """The number of measurements of a wrapped model's sensitivities."""
    return gact_graph.report(model).measurements


def widths(model: nn.Module) -> dict[str, int]:
    """The bits of each coded slot of a wrapped model's last forward."""
    return {row.slot: row.bits for row in gact_graph.report(model).contexts if row.bits is not None}
