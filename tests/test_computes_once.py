"""A step runs forward once: its side effects happen as often as in stock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import graph, labels, make, one_thread  # noqa: F401
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gact_graph

X, EDGES = graph()
STEPS = 6

CALLS = 0
VARIABLE = "GACT_GRAPH_TEST_CALLS"


class Net(nn.Module):
    """Leaves a trace of each forward wherever one can be left."""

    calls = 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(32, 32), GCNConv(32, 5)])
        self.norm = nn.BatchNorm1d(32)
        self.generator = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(3)
        self.counter = np.zeros(1, dtype=np.int64)
        self.items: Iterator[int] = iter(range(1000))
        self.path = path
        self.draws: list[float] = []
        self.numbers: list[float] = []
        self.taken: list[int] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        type(self).calls += 1
        self.counter += 1
        os.environ[VARIABLE] = str(int(os.environ[VARIABLE]) + 1)
        with self.path.open("a") as file:
            file.write("a line\n")
        self.draws.append(torch.randn((), generator=self.generator).item())
        self.numbers.append(float(self.rng.random()))
        self.taken.append(next(self.items))
        x = self.norm(self.convs[0](x * (1 + 0.1 * self.draws[-1]), edge_index)).relu()
        return self.convs[1](F.dropout(x, 0.3, self.training), edge_index)


def _trace(model: Net, hooks: list[str]) -> dict[str, Any]:
    """The traces of six steps."""
    global CALLS
    CALLS, Net.calls, os.environ[VARIABLE] = 0, 0, "0"
    model.path.write_text("")
    for module in (model, model.convs[0]):
        module.register_forward_pre_hook(lambda *_: hooks.append("before"))
        module.register_forward_hook(lambda *_: hooks.append("after"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X, EDGES), labels())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "torch.Generator": (model.draws, model.generator.get_state().tolist()),
        "NumPy's generator": (model.numbers, model.rng.random()),
        "a NumPy counter": int(model.counter[0]),
        "an iterator": (model.taken, next(model.items)),
        "forward hooks": hooks,
        "a class attribute": Net.calls,
        "a module global": CALLS,
        "os.environ": os.environ[VARIABLE],
        "a file": model.path.read_text().count("\n"),
        "batches of the norm": int(model.norm.num_batches_tracked),
        "first loss": round(losses[0], 4),
    }


@pytest.mark.filterwarnings("ignore:The noise of compression dominates")
@pytest.mark.parametrize("level", ["L1", "CB2"])
def test_a_step_runs_forward_once(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    stock = _trace(make(lambda: Net(tmp_path / "stock")), [])
    assert stock["a module global"] == STEPS
    model = make(lambda: Net(tmp_path / "wrapped"))
    gact_graph.wrap(model, level=level, min_bytes=0)
    got = _trace(model, [])
    different = {name: (got[name], stock[name]) for name in stock if got[name] != stock[name]}
    assert not different
