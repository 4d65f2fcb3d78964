"""Gradients of ``lossless`` on a device beside stock's: bit-identical, or within rounding.

``python -m experiments.check_lossless --device cuda --out FILE.json``

Sums by atomic additions come in another order at every run, so stock is run twice: only where it
agrees with itself can lossless agree with it bit by bit. Each model runs as torch is, and once more
with torch's deterministic algorithms.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from datasets import Graph, load
from experiments.data import Layout, prepare
from experiments.part import Save, run_part
from experiments.subjects import SUBJECTS, Subject, make, wrap_at
from experiments.train import seed_everything, training_loss

DATASET = "synthetic:ogbn-arxiv@0.1"

ROUNDING = 1e-5
"""Relative L2 distance that float32 sums in another order explain, through several layers."""


class _Net(nn.Module):
    """Two layers of a conv with what stands between them in practice."""

    def __init__(self, conv: Callable[[int, int], nn.Module], inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = conv(inputs, 32), conv(32, outputs)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = nn.functional.elu(self.norm(self.first(x, adjacency)))
        h = nn.functional.dropout(h, 0.3, self.training)
        out: Tensor = self.last(h, adjacency)
        return out


def _subject(conv: Callable[[int, int], nn.Module], layout: Layout = "edge_index") -> Subject:
    return Subject(layout, lambda i, o: _Net(conv, i, o))


def _mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, 32), nn.LeakyReLU(), nn.Linear(32, o))


CHECKED = SUBJECTS | {
    "SAGEConv, max": _subject(lambda i, o: pyg.SAGEConv(i, o, aggr="max")),
    "SAGEConv, csr": _subject(pyg.SAGEConv, "csr"),
    "GINConv": _subject(lambda i, o: pyg.GINConv(_mlp(i, o), train_eps=True)),
    "EdgeConv": _subject(lambda i, o: pyg.EdgeConv(_mlp(2 * i, o))),
    "ResGatedGraphConv": _subject(pyg.ResGatedGraphConv),
    "TAGConv": _subject(pyg.TAGConv),
    "GENConv": _subject(pyg.GENConv),
}


def check(
    device: torch.device, save: Save, dataset: str = DATASET, names: Sequence[str] = tuple(CHECKED)
) -> list[str]:
    """Compare the models of these names; return a line for each that is beyond rounding or raises.

    Saves for each model, ``as_is`` and ``deterministic``: ``stock_again``, the distance of stock's
    gradients from its own, and ``lossless``, their distance from those of lossless (relative, L2),
    with whether both are bit-identical.
    """
    graph = load(dataset, "data")
    found: dict[str, Any] = {"dataset": dataset, "models": {}}
    failed = []
    for name in names:
        found["models"][name] = {}
        for mode in ("as_is", "deterministic"):
            try:
                with _algorithms(mode == "deterministic"):
                    result = compare(CHECKED[name], graph, device)
            except Exception as error:  # one model must not hide the others
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            found["models"][name][mode] = result
            if (problem := verdict(result)) is not None:
                failed.append(f"{name}, {mode}: {problem}")
        save(found)
    return failed


def compare(subject: Subject, graph: Graph, device: torch.device) -> dict[str, Any]:
    """Return the distances, and whether they are none, of two runs of stock and of lossless."""
    task = prepare(graph, subject.layout, device=device)
    plain = make(subject, task)

    def gradients(model: nn.Module) -> list[Tensor]:
        seed_everything(1)
        model.train()
        training_loss(model(task.x, task.adjacency), task).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    stock, again = (gradients(copy.deepcopy(plain)) for _ in range(2))
    lossless = gradients(wrap_at(copy.deepcopy(plain), "lossless", 4))
    return {
        "stock_again": _distance(again, stock),
        "stock_identical": _identical(again, stock),
        "lossless": _distance(lossless, stock),
        "lossless_identical": _identical(lossless, stock),
    }


def verdict(result: dict[str, Any]) -> str | None:
    """What is wrong with a comparison; None if lossless is as near to stock as stock to itself.

    Up to ten times stock's own distance: that is one draw of what the order of sums does.
    """
    if "error" in result:
        return str(result["error"])
    if result["lossless_identical"]:
        return None
    bound = max(ROUNDING, 10 * result["stock_again"])
    if result["lossless"] <= bound:
        return None
    return f"gradients are {result['lossless']:.1e} from stock's (bound {bound:.1e})"


def _identical(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _distance(left: list[Tensor], right: list[Tensor]) -> float:
    a, b = (torch.cat([t.flatten() for t in side]).double() for side in (left, right))
    return float((a - b).norm() / b.norm())


@contextmanager
def _algorithms(deterministic: bool) -> Iterator[None]:
    """Torch's deterministic algorithms where it has them; what it has not runs all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def main(argv: list[str] | None = None) -> int:
    """Compare; return the exit code as the main job does."""
    # cuBLAS reads it at its first call, and is deterministic only with it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return run_part("check_lossless", __doc__.splitlines()[0], check, argv)


if __name__ == "__main__":
    sys.exit(main())
