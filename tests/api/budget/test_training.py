"""Budgets in training loops: sampled batches, many graphs, node types, methods, links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from old_pyg import needs_to_hetero
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import ClusterData, ClusterLoader, DataLoader, RandomNodeLoader
from torch_geometric.nn import (
    GAE,
    GAT,
    GCN,
    GIN,
    VGAE,
    GCNConv,
    global_mean_pool,
    to_hetero,
)

import gact_graph
from experiments.helpers import metis
from gact_graph.api.budget.steps import watching
from gact_graph.api.report.names import parse_bytes
from gact_graph.support.storage import tensors_in

CPU = torch.device("cpu")
CHANNELS = 32


def random_graph(nodes: int, edges: int) -> Data:
    return Data(x=torch.randn(nodes, CHANNELS), edge_index=torch.randint(nodes, (2, edges)))


@dataclass
class Case:
    """A model, the arguments of its training calls, and a budget into which stock does not fit."""

    model: nn.Module
    calls: Sequence[tuple[Any, ...]]
    memory: str
    method: str = "forward"


def full_batch() -> Case:
    data = random_graph(4000, 60_000)
    model = GAT(CHANNELS, 64, 3, heads=2, dropout=0.2)
    return Case(model, [(data.x, data.edge_index)] * 2, "60 MiB")  # 114 for stock


def random_nodes() -> Case:
    loader = RandomNodeLoader(random_graph(12_000, 600_000), num_parts=3)
    calls = [(batch.x, batch.edge_index) for batch in loader]
    return Case(GCN(CHANNELS, 64, 3, dropout=0.2), calls, "30 MiB")  # 40


def growing() -> Case:
    data = random_graph(8000, 120_000)
    parts = [data.subgraph(torch.randperm(8000)[:size]) for size in (2000, 5000, 8000)]
    model = GCN(CHANNELS, 64, 3, dropout=0.2)
    return Case(model, [(part.x, part.edge_index) for part in parts], "40 MiB")  # 7 to 75


def clusters() -> Case:
    metis.provide()
    parts = ClusterData(random_graph(6000, 120_000), num_parts=6, log=False)
    calls = [(batch.x, batch.edge_index) for batch in ClusterLoader(parts, batch_size=2)]
    return Case(GCN(CHANNELS, 64, 3), calls, "14 MiB")  # 12, and 4 to spare


class Classifier(nn.Module):
    """Gives scores [G, 2] of the graphs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn, self.last = GIN(CHANNELS, 64, 3), nn.Linear(64, 2)

    def forward(self, data: Batch) -> Tensor:
        h = self.gnn(data.x, data.edge_index)
        return self.last(global_mean_pool(h, data.batch, data.num_graphs))


def many_graphs() -> Case:
    graphs = [random_graph(30 + i % 40, 300) for i in range(384)]
    calls = [(batch,) for batch in DataLoader(graphs, batch_size=128)]
    return Case(Classifier(), calls, "35 MiB")  # 22; small graphs leave little to save


def types_of_nodes() -> Case:
    needs_to_hetero()
    data = random_graph(2000, 20_000)
    types = [("a", "to", "b"), ("b", "to", "a")]
    model = to_hetero(GAT(CHANNELS, 64, 2, heads=2, add_self_loops=False), (["a", "b"], types))
    call = dict.fromkeys("ab", data.x), dict.fromkeys(types, data.edge_index)
    return Case(model, [call] * 2, "36 MiB")  # 47


def links() -> Case:
    data = random_graph(4000, 60_000)
    model = GAE(GCN(CHANNELS, 64, 3))
    return Case(model, [(data.x, data.edge_index)] * 2, "30 MiB", "encode")  # 39


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.deviation = (GCNConv(CHANNELS, CHANNELS) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x, edge_index).relu()
        return self.mean(hidden, edge_index), self.deviation(hidden, edge_index)


def test_a_model_that_keeps_results_has_plans_for_larger_batches() -> None:
    model = gact_graph.wrap(VGAE(Encoder()), memory="30 MB")
    for nodes in (500, 20_000):
        data = random_graph(nodes, 4 * nodes)
        z = model.encode(data.x, data.edge_index)
        (model.recon_loss(z, data.edge_index) + model.kl_loss() / nodes).backward()
    assert gact_graph.report(model).strategy != "stock"


def test_a_frozen_model_before_a_head_trains() -> None:
    data = random_graph(4000, 16_000)
    model = gact_graph.wrap(GCN(CHANNELS, 64, 3), memory="60 MB").requires_grad_(False)
    head = nn.Linear(64, 3)
    head(model(data.x, data.edge_index)).sum().backward()
    assert head.weight.grad is not None


class Checked(GCN):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert len(x) == 4000
        return super().forward(x, edge_index)


class Silent(GCN):
    def forward(self, x: Tensor, edge_index: Tensor) -> None:
        self.loss = super().forward(x, edge_index).sum()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Checked, "AssertionError"), (Silent, "no output of the model requires a gradient")],
)
def test_a_model_that_runs_on_no_part_is_refused(kind: type[GCN], reason: str) -> None:
    data = random_graph(4000, 16_000)
    model = gact_graph.wrap(kind(CHANNELS, 64, 3), memory="60 MB")
    with pytest.raises(ValueError, match=f"for memory= .*{reason}"):
        model(data.x, data.edge_index)


WITHOUT_METIS = pytest.mark.skipif(not metis.is_there(), reason="no METIS")
CASES = [
    full_batch,
    random_nodes,
    growing,
    pytest.param(
        clusters,
        marks=[WITHOUT_METIS, pytest.mark.filterwarnings("ignore:.*xadj:DeprecationWarning")],
    ),
    many_graphs,
    types_of_nodes,
    links,
]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.filterwarnings("ignore:The noise of compression")  # that bits are few is not the point
def test_a_budget_below_stock_is_kept(make: Callable[[], Case]) -> None:
    """In all steps of all batches, by what torch's allocator hands out; and the model learns."""
    case = make()
    memory = parse_bytes(case.memory)
    model = gact_graph.wrap(case.model, memory=case.memory)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(arguments: tuple[Any, ...]) -> None:
        optimizer.zero_grad()
        outputs = tensors_in(getattr(model, case.method)(*arguments))
        losses = [out.square().mean() for out in outputs if out.requires_grad]
        torch.stack(losses).sum().backward()

    ways = []
    for arguments in case.calls:
        step(arguments)  # chooses, where the batch is larger than all before
        ways.append(gact_graph.report(model).strategy)
    if make is not many_graphs:
        assert ways[-1] != "stock" and (ways[0] == "stock") == (make is growing)
    optimizer.zero_grad()
    for arguments in case.calls:
        with watching(CPU) as watch:
            step(arguments)
            assert watch.peak() <= memory
        optimizer.step()
        optimizer.zero_grad()  # a watch does not see the end of earlier tensors
    assert all(p.isfinite().all() for p in model.parameters())
    assert not all(map(torch.equal, before, model.parameters()))
