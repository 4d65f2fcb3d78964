"""Compiled models with and without compression, and the same models uncompiled with compression.

``python -m experiments.compiled --dataset D/amazon_computers.npz --models gcn,gat,gcnii,bert --out
DIR`` takes steps of each in turn, in a fresh process for each network, and prints the saved bytes,
the peak of a step, its time relative to the compiled model alone, and the error of the gradient. A
compiled model's error is relative to the compiled model alone, an uncompiled one's to the
uncompiled model, because dropout draws other noise in compiled graphs. The networks have no
self-loops to remove, because PyG's layers would end a compiled graph there.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GCN2Conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gact_graph
from datasets import load
from experiments.helpers import command
from experiments.helpers.kept import Kept
from experiments.helpers.process import call, checked
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import gradient_of, seed_everything
from gact_graph.ops.allocations import watching_allocations

FILE_NAME = "compiled.json"

NAMES = {"gcn": "GCN", "gat": "GAT", "gcnii": "GCNII, 8 layers", "bert": "BERT, 6 layers"}

_HIDDEN, _LAYERS, _HEADS = 128, 3, 4
_BATCH, _WORDS = 32, 128
_DRAWS = 2
"""Draws of the noise for the error of the gradient."""

_COLUMNS: tuple[Column, ...] = (
    ("network", "{model}"),
    ("", "{way}"),
    ("saved, MB", "{saved:MB|}"),
    ("of, MB", "{raw:MB|}"),
    ("peak, MB", "{peak:MB}"),
    ("s/step", "{seconds:.3f}"),
    ("relative", "{ratio:.2f}x"),
    ("error", "{error:.2%}"),
    ("graph breaks", "{breaks:|}"),
)


def by_network(content: Mapping[str, Any]) -> Table:
    """Return one row for each network and way."""
    networks = content["networks"].items()
    rows = [{**row, "model": NAMES[model]} for model, found in networks for row in found]
    return table(_COLUMNS, rows)


class Gcnii(nn.Module):
    """Eight layers of GCNII on weights of edges."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(i, _HIDDEN), nn.Linear(_HIDDEN, o)
        self.convs = nn.ModuleList(
            GCN2Conv(_HIDDEN, 0.1, 0.5, layer, normalize=False) for layer in range(1, 9)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        h = first = self.first(x).relu()
        for conv in self.convs:
            h = F.dropout(conv(h, first, edge_index, edge_weight), 0.5, self.training).relu()
        out: Tensor = self.last(h)
        return out


class Bert(nn.Module):
    """Six layers in the shape of BERT, and the logits of the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, "gelu", batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 6), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.encoder(x).mean(1))
        return out


def _made(name: str, dataset: str, root: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """Return a network, its inputs and the classes of its outputs."""
    seed_everything(0)
    if name == "bert":
        return Bert(), (torch.randn(_BATCH, _WORDS, 256),), torch.arange(_BATCH) % 8
    graph = load(dataset, root)
    x, edges, classes = graph.x, graph.edge_index, graph.num_classes
    if name == "gat":
        options: dict[str, Any] = {"heads": _HEADS, "add_self_loops": False}
        # In blocks, dropout of attention draws other noise, which would count as an error.
        net: nn.Module = GAT(x.size(1), _HIDDEN, _LAYERS, classes, norm="batch_norm", **options)
        return net, (x, edges), graph.y
    edges, weights = gcn_norm(edges, None, len(x), dtype=x.dtype)
    if name == "gcnii":
        return Gcnii(x.size(1), classes), (x, edges, weights), graph.y
    net = GCN(x.size(1), _HIDDEN, _LAYERS, classes, norm="batch_norm", dropout=0.5, normalize=False)
    return net, (x, edges, weights), graph.y


def compare(name: str, dataset: str, root: str, bits: int, steps: int) -> list[dict[str, Any]]:
    """Return the figures of one network in each way."""
    made, inputs, y = _made(name, dataset, root)
    breaks = torch._dynamo.explain(made)(*inputs).graph_break_count
    torch.compiler.reset()
    coded: dict[str, Any] = {"bits": bits, "min_bytes": 0}
    exact: dict[str, Any] = {"level": "lossless", "min_bytes": 0}
    alone: Any = torch.compile(copy.deepcopy(made))
    ways: dict[str, nn.Module] = {"compiled": alone, "uncompiled": copy.deepcopy(made)}
    for title, options in (
        (f"compiled, {bits} bit, blocks", coded),
        (f"compiled, {bits} bit, as PyG", coded | {"blocks": False}),
        ("compiled, lossless, blocks", exact | {"blocks": "auto"}),
        ("compiled, lossless, as PyG", exact),
    ):
        own: Any = torch.compile(copy.deepcopy(made))
        ways[title] = gact_graph.wrap(own, **options)
    ways[f"{bits} bit, blocks"] = gact_graph.wrap(copy.deepcopy(made), **coded)
    ways[f"{bits} bit, as PyG"] = gact_graph.wrap(copy.deepcopy(made), blocks=False, **coded)
    return _figures(ways, inputs, y, steps, breaks)


def _figures(
    ways: Mapping[str, nn.Module], inputs: tuple[Tensor, ...], y: Tensor, steps: int, breaks: int
) -> list[dict[str, Any]]:
    def step(model: nn.Module, draw: int = 0) -> Tensor:
        model.zero_grad(set_to_none=True)
        seed_everything(draw)
        F.cross_entropy(model(*inputs), y).backward()
        return gradient_of(model).clone()

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks = {}
    for way, model in ways.items():
        for _ in range(2):
            step(model)
        peaks[way] = _peak_of(functools.partial(step, model))
    for _ in range(steps):
        for way, model in ways.items():
            begun = time.perf_counter()
            step(model)
            seconds[way].append(time.perf_counter() - begun)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    right = {
        way: [step(ways[way], draw) for draw in range(_DRAWS)] for way in ("compiled", "uncompiled")
    }
    rows = []
    for way, model in ways.items():
        own = [step(model, draw) for draw in range(_DRAWS)]
        alone = right["compiled" if way.startswith("compiled") else "uncompiled"]
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(own, alone, strict=True)]
        report = None if way in right else gact_graph.report(model)
        rows.append(
            {
                **{"way": way, "peak": peaks[way], "seconds": medians[way]},
                "saved": None if report is None else report.stored_bytes,
                "raw": None if report is None else report.raw_bytes,
                "ratio": medians[way] / medians["compiled"],
                "error": statistics.fmean(errors),
                "breaks": breaks if way.startswith("compiled") else None,
            }
        )
    return rows


def _peak_of(step: Callable[[], Tensor]) -> int | None:
    """Return the bytes of tensors that a step adds."""
    with watching_allocations() as watch:
        step()
        return None if watch is None else watch.peak()


def _apart(model: str, *task: Any) -> list[dict[str, Any]]:
    return checked(call("experiments.compiled:compare", model, *task), model) or []


@command.main(
    command.DATASET,
    command.DATA_ROOT,
    command.names("--models", NAMES),
    command.BITS,
    command.number("--steps", 5),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    kept: Kept = args.keep(FILE_NAME, steps=args.steps, bits=args.bits)
    for model in args.models:
        args.say(f"{model} on {dataset_name(args.dataset)}")
        task = model, str(args.dataset), str(args.data_root), args.bits, args.steps
        kept.once(("networks", model), _apart, *task)
    args.show("compiled models", by_network(kept.content))


if __name__ == "__main__":
    raise SystemExit(main())
