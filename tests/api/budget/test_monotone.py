"""Many budgets for each of six models: more memory never means a slower and less accurate plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from beside import amount
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, TransformerConv

import gact_graph
from gact_graph.ops import allocator

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(allocator.load() is None, reason="nothing watches allocations"),
]

NODES, EDGES, BUDGETS = 8_000, 40_000, amount(12, 50)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(TransformerConv(64, 32, heads=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.dropout(norm(conv(x, edge_index)).relu(), 0.5, self.training)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCN(64, 64, 4, 8, norm="batch_norm", dropout=0.5),
    "gat": lambda: GAT(64, 64, 3, 8, heads=2, norm="batch_norm", dropout=0.5),
    "sage": lambda: GraphSAGE(64, 64, 3, 8, norm="layer_norm", dropout=0.5),
    "gin": lambda: GIN(64, 64, 3, 8, norm="batch_norm"),
    "plain gcn": lambda: GCN(64, 64, 3, 8),
    "transformer": Attention,
}


def level(plan: gact_graph.Plan) -> str:
    """The level of a plan, of which exact tensors are the last choice."""
    own = str(plan.strategy.level)
    return "L1" if own == "lossless" else own


@pytest.mark.parametrize("name", MODELS)
def test_more_memory_never_means_a_worse_plan(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(NODES, 64)
    edges = torch.randint(NODES, (2, EDGES))
    peaks = {row.strategy: row.peak_bytes for row in gact_graph.estimate(model, x, edges).rows}
    low, high = 0.5 * peaks["L1, 2 bits"], 1.2 * peaks["lossless + blocks"] + (5 << 20)
    plans: list[gact_graph.Plan] = []
    for step in range(BUDGETS):
        memory = round(low + (high - low) * step / (BUDGETS - 1))
        try:
            plan = gact_graph.plan(model, x, edges, memory=memory)
        except gact_graph.MemoryBudgetError:
            assert not plans  # whatever is refused is below all that is kept
            continue
        assert plan.peak_bytes <= memory
        plans.append(plan)
    assert len(plans) > BUDGETS // 5 and plans[-1].error == 0
    for less, more in itertools.pairwise(plans):
        seconds = [sum(tensor.seconds for tensor in plan.tensors) for plan in (less, more)]
        is_better = more.error <= less.error * (1 + 1e-6) or seconds[1] <= seconds[0] * (1 + 1e-6)
        assert is_better or level(less) != level(more)
