"""The zoo with nothing too small to be encoded, caches unfilled, and data that change each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from beside import small_storages_count
from samples import distance, equal, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.typing import WITH_TORCH_SPARSE
from zoo import ATTR, CONVS, EDGE_WIDTH, FORMATS, NODES, TENSOR, WEIGHT, WIDTH, Case, Net

import gact_graph

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Sparse:UserWarning")]

LAZY: dict[str, Case] = {
    "lazy GCN": Case(lambda: pyg.GCNConv(-1, WIDTH)),
    "lazy GCN weighted": Case(lambda: pyg.GCNConv(-1, WIDTH), TENSOR, (WEIGHT,)),
    "lazy SAGE": Case(lambda: pyg.SAGEConv((-1, -1), WIDTH), bipartite=True),
    "lazy SAGE max": Case(lambda: pyg.SAGEConv(-1, WIDTH, aggr="max")),
    "lazy Graph": Case(lambda: pyg.GraphConv((-1, -1), WIDTH), bipartite=True),
    "lazy GAT": Case(lambda: pyg.GATConv(-1, WIDTH, edge_dim=EDGE_WIDTH), TENSOR, (ATTR,)),
    "lazy GAT pair": Case(
        lambda: pyg.GATConv((-1, -1), WIDTH, add_self_loops=False), bipartite=True
    ),
    "lazy GATv2": Case(lambda: pyg.GATv2Conv(-1, WIDTH, edge_dim=EDGE_WIDTH), TENSOR, (ATTR,)),
    "lazy Transformer": Case(lambda: pyg.TransformerConv((-1, -1), WIDTH), bipartite=True),
    "lazy SG cached": Case(lambda: pyg.SGConv(-1, WIDTH, K=2, cached=True)),
    "lazy FiLM": Case(lambda: pyg.FiLMConv((-1, -1), WIDTH), bipartite=True),
    "lazy GEN": Case(lambda: pyg.GENConv((-1, -1), WIDTH), bipartite=True),
}
ZOO = CONVS | LAZY

# Sums come in another order, of data up to 20 times those of the first step.
ORDER = 1e-5
# 16 bits; GMMConv divides by squared widths that start near zero.
CODED, CODED_OF = 0.02, {"GMMConv": 0.4}
SCALES = (1.0, -20.0, 0.05)

WAYS: dict[str, dict[str, Any]] = {
    "lossless": {"level": "lossless", "bits": 32},
    "L1 exact": {"level": "L1", "bits": 32, "blocks": False},
    "L1": {"level": "L1", "bits": 16, "blocks": False},
    "blocks": {"level": "lossless", "bits": 32, "blocks": 128},
    "CB2, no blocks": {"level": "CB2", "bits": 32, "blocks": False},
    "CB2": {"level": "CB2", "bits": 32, "blocks": 128},
    "CB2 coded": {"level": "CB2", "bits": 16, "blocks": 128},
}


def _fresh(case: Case) -> nn.Module:
    """The net with a new conv, which has cached nothing."""
    net = make(lambda: Net(case, "elu"))
    net.conv = make(case.make, seed=3)
    for module in net.conv.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # in blocks it draws other numbers
    return net


def _steps(model: nn.Module, adjacency: Callable[[], Any]) -> list[list[Tensor]]:
    """Output and gradients of each step."""
    results = []
    for step, scale in enumerate(SCALES):
        made = torch.Generator().manual_seed(step)
        x = (torch.randn(NODES, WIDTH, generator=made) * scale).requires_grad_()
        model.zero_grad()
        torch.manual_seed(step)
        out = model(x, adjacency())
        out.backward(torch.randn(out.shape, generator=made))
        leaves = [x, *model.parameters()]  # what is cached takes no gradient to x
        results.append([out.detach(), *(t.grad.clone() for t in leaves if t.grad is not None)])
    return results


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    case = ZOO[name]
    form = case.formats[0]
    if form == "sparse" and not WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse is not installed")
    stock = _steps(_fresh(case), FORMATS[form])
    with small_storages_count():
        for way, options in WAYS.items():
            model = gact_graph.wrap(_fresh(case), adaptive=False, min_bytes=0, **options)
            for step, (got, expected) in enumerate(
                zip(_steps(model, FORMATS[form]), stock, strict=True)
            ):
                where = f"{way}, step {step}"
                assert len(got) == len(expected), where
                if way in ("lossless", "L1 exact"):
                    assert equal(got, expected), where
                    continue
                bound = CODED_OF.get(name, CODED) if options["bits"] == 16 else ORDER
                assert distance(got[:1], expected[:1]) < ORDER, where
                assert distance(got[1:], expected[1:]) < bound, where
