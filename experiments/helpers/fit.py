"""Refusal of trainings that cannot fit in the memory of the device."""

from __future__ import annotations

import torch

from datasets import Graph
from datasets.memory import available_bytes, format_bytes
from experiments.helpers.errors import UsageError
from experiments.helpers.levels import EXACT_LEVELS
from experiments.helpers.recipes import Recipe
from experiments.helpers.train import Setup

# Weight, gradient and Adam's two moments, float32.
_BYTES_A_PARAMETER = 16
# Python's objects of a layer, on the host: a lower bound. A GATConv with its norm has 12 kB.
_BYTES_A_LAYER = 4_000


def check_fits(graph: Graph, setup: Setup, device: torch.device) -> None:
    """Refuse a training whose lower bound exceeds the free memory of the device.

    Training takes more than :func:`least_bytes`, so a training that passes may still not fit.

    Raises:
        UsageError: If it does not fit; the message lists the bytes.
    """
    parts = least_bytes(graph, setup)
    if device.type == "cuda":
        # Memory that torch's allocator holds without using it is free too.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free: int | None = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = available_bytes()
        del parts["graph"]  # already in memory
    needed = sum(parts.values())
    if free is not None and needed > free:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        raise UsageError(
            f"Expected a training that fits into the {format_bytes(free)} of memory that are free "
            f"on {device.type} (got at least {format_bytes(needed)}: {listed}): give smaller "
            f"--hidden, --heads or --layers{', or --blocks auto' if 'messages' in parts else ''}"
        )


def least_bytes(graph: Graph, setup: Setup) -> dict[str, int]:
    """Return a lower bound of the bytes of each part: the graph, the parameters with Adam's state,
    a layer's output in float32 and, in a GAT that is not in blocks, its messages."""
    recipe = setup.recipe
    last = graph.num_classes * (recipe.heads if setup.model == "gat" else 1)
    # With one layer, GCN and GAT have no hidden layer.
    hidden = recipe.hidden * recipe.heads if recipe.layers > 1 or setup.model == "gcnii" else 0
    widest = max(last, hidden)
    count = parameters(setup.model, recipe, graph.x.size(1), graph.num_classes)
    parts = {
        "graph": graph.x.nbytes + graph.edge_index.nbytes,
        "parameters": _BYTES_A_PARAMETER * count + _BYTES_A_LAYER * recipe.layers,
        "one layer": 4 * graph.num_nodes * widest,
    }
    in_blocks = setup.level not in EXACT_LEVELS if setup.blocks is None else setup.blocks
    if setup.model == "gat" and not in_blocks:
        parts["messages"] = 4 * graph.num_edges * widest
    return parts


def parameters(model: str, recipe: Recipe, i: int, o: int) -> int:
    """Return the number of weights by a formula, because models of refused sizes cannot be made."""
    depth, heads, width = recipe.layers, recipe.heads, recipe.hidden * recipe.heads
    if model == "gcnii":
        return i * width + depth * width * width + width * o
    if depth == 1:
        return i * o * heads
    return i * width + (depth - 2) * width * width + width * o * heads
