"""What the measurements share: the models that they measure, and the frame of their commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, GraphSAGE, TransformerConv

import gact_graph
from datasets import DatasetError
from experiments.helpers.atomic import write_atomically
from experiments.helpers.data import Layout, NodeTask
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.options import EXACT_LEVELS
from experiments.helpers.recipes import recipe_for
from experiments.helpers.train import seed_everything
from experiments.helpers.values import FP32_BITS
from experiments.models import GAT, GCN, build


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        layout: How its graph is laid out.
        make: Makes it from the numbers of features and of classes; ``hidden`` and ``layers``
            replace its own.
        lr: Adam's learning rate, where it is trained.
    """

    layout: Layout
    make: Callable[..., nn.Module]
    lr: float = 0.01


def _attention(conv: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def make(i: int, o: int, hidden: int = 64, layers: int = 3) -> nn.Module:
        return GAT(i, hidden, o, layers, heads=3, conv=conv)

    return make


def _gcn(i: int, o: int, hidden: int = 256, layers: int = 3) -> nn.Module:
    return GCN(i, hidden, o, layers)


def _gcn_of_edges(i: int, o: int, hidden: int = 256, layers: int = 3) -> nn.Module:
    return GCN(i, hidden, o, layers, normalize=True)


def _sage(i: int, o: int, hidden: int = 256, layers: int = 3) -> nn.Module:
    return GraphSAGE(i, hidden, layers, o, dropout=0.5, norm="batch_norm")


_GCNII = recipe_for("gcnii", "ogbn-arxiv")  # 16 layers of 256


def _gcnii(i: int, o: int, **sizes: Any) -> nn.Module:
    return build("gcnii", dataclasses.replace(_GCNII, **sizes), i, o)


def _gcnii_of_edges(i: int, o: int, **sizes: Any) -> nn.Module:
    return build("gcnii", dataclasses.replace(_GCNII, **sizes), i, o, normalize=True)


# GCN and GCNII twice: with messages along edge_index, and as the main job runs them, on a sparse
# matrix.
SUBJECTS = {
    "gcn": Subject("csr", _gcn),
    "gcn-edge_index": Subject("edge_index", _gcn_of_edges),
    "gat": Subject("edge_index", _attention(GATConv)),
    "gatv2": Subject("edge_index", _attention(GATv2Conv)),
    "transformer": Subject("edge_index", _attention(TransformerConv)),
    "sage": Subject("edge_index", _sage),
    "gcnii": Subject("csr", _gcnii, lr=_GCNII.lr),
    "gcnii-edge_index": Subject("edge_index", _gcnii_of_edges, lr=_GCNII.lr),
}


def make(subject: Subject, task: NodeTask, **sizes: int) -> nn.Module:
    """Return the model for this task, with the same weights and the same dropout at every call."""
    seed_everything(0)
    return subject.make(task.x.size(1), task.num_classes, **sizes).to(task.x.device)


def wrap_at(
    model: nn.Module, level: str, bits: int, adaptive: bool = False, blocks: int | str = False
) -> nn.Module:
    """Wrap the model at a level; ``bits`` are for the levels that quantize."""
    if level in EXACT_LEVELS:
        bits = FP32_BITS
    return gact_graph.wrap(
        model, bits=bits, level=level, adaptive=adaptive, blocks=blocks, min_bytes=0
    )


def label(level: str, bits: int) -> str:
    """What to call a level in a table.

    >>> label("lossless", 4), label("L1", 4)
    ('lossless', 'L1 4 bit')
    """
    return level if level in EXACT_LEVELS else f"{level} {bits} bit"


def add_graph_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--dataset``, ``--data-root`` and ``--device``."""
    parser.add_argument("--dataset", default="digits", metavar="D", help="default: digits")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="default: data")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")


def choose(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Read names separated by commas; each counts once.

    Raises:
        UsageError: If one of them is not known.
    """
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"Expected {flag} of {', '.join(known)} (got {name!r})")
    return names


def exit_code(program: str, work: Callable[[], None]) -> int:
    """Do the work; return the exit code as the main job does, after one line on what went wrong."""
    try:
        work()
    except ExperimentError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except DatasetError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError:
        print(f"{program}: the device's memory is full: take a smaller graph", file=sys.stderr)
        return 1
    return 0


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``path`` whole or not at all.

    Raises:
        ResultsError: If the system refuses.
    """
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
