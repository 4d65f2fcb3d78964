"""The peak of a fresh process that trains within a budget, from its first call on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

MIB = 1 << 20

_CHILD = """
import gc, json, sys
import torch
from torch import nn
from torch_geometric.nn import GAT, GCN, GraphSAGE
import gact_graph

kind, nodes, edges, columns, memory = json.loads(sys.argv[1])
torch.manual_seed(0)
if nodes is None:
    from datasets import load
    graph = load(f"{sys.argv[2]}/coauthor_cs.npz", sys.argv[2])
    x, edge_index, y = graph.x, graph.edge_index, graph.y
else:
    x = torch.rand(nodes, columns)
    edge_index, y = torch.randint(nodes, (2, edges)), torch.randint(7, (nodes,))
kinds = {"gcn": GCN, "sage": GraphSAGE, "gat": GAT}
options = {"heads": 2} if kind == "gat" else {}
out = int(y.max()) + 1
model = kinds[kind](x.size(1), 128, 3, out, dropout=0.5, norm="batch_norm", **options)
optimizer = torch.optim.Adam(model.parameters())
gact_graph.wrap(model, memory=memory)

def bytes_of(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

gc.collect()
start = bytes_of("VmRSS:")
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
try:
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, edge_index), y).backward()
        optimizer.step()
except gact_graph.MemoryBudgetError as error:
    print(json.dumps({"refused": str(error)}))
else:
    peak = bytes_of("VmHWM:") - start
    print(json.dumps({"peak": peak, "way": gact_graph.report(model).strategy}))
"""

needs_proc = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc to read a peak from"
)


def trained(*task: Any) -> dict[str, Any]:
    """What a fresh process found under a budget."""
    data = os.environ.get("GACT_GRAPH_DATA", "../shared/data")
    command = [sys.executable, "-c", _CHILD, json.dumps(task), data]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_proc
@pytest.mark.parametrize(
    ("task", "budgets"),
    [
        (("gcn", 10_000, 100_000, 64), (90, 65)),  # stock takes about 180
        (("sage", 10_000, 100_000, 64), (85, 70)),  # 160
        (("gat", 10_000, 100_000, 64), (220, 140, 90)),  # 440
        (("gat", 2000, 20_000, 8415), (130,)),
    ],
)
def test_a_budget_that_is_accepted_is_kept(task: tuple[Any, ...], budgets: tuple[int, ...]) -> None:
    """And a smaller budget peaks no higher than a larger one."""
    last = math.inf
    for budget in budgets:
        found = trained(*task, budget * MIB)
        assert "refused" not in found, found
        assert found["peak"] <= 1.03 * min(budget * MIB, last), found
        last = found["peak"]


@needs_proc
def test_features_are_not_copied() -> None:
    """Those of this graph take 476 MiB."""
    path = Path(os.environ.get("GACT_GRAPH_DATA", "../shared/data")) / "coauthor_cs.npz"
    if not path.exists():
        pytest.skip(f"no {path}")
    found = trained("gcn", None, None, None, 150 * MIB)
    assert found["peak"] <= 1.03 * 150 * MIB


@needs_proc
def test_a_budget_that_cannot_be_kept_says_what_is_missing() -> None:
    found = trained("gcn", 10_000, 100_000, 64, 30 * MIB)
    assert "MiB more, or use a smaller model" in found["refused"]
