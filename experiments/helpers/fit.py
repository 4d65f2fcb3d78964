"""What a training needs at the very least, said before the machine runs out of memory over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from datasets.memory import available_bytes, format_bytes
from experiments.helpers.errors import UsageError
from experiments.helpers.labels import EXACT_LEVELS
from experiments.helpers.recipes import Recipe

if TYPE_CHECKING:
    from datasets import Graph
    from experiments.helpers.train import Setup

# Weight, gradient and Adam's two moments, float32.
_BYTES_A_PARAMETER = 16
# Python's objects of a layer, on the host; measured: 12 kB for a GATConv with its norm.
_BYTES_A_LAYER = 4_000


def check_fits(graph: Graph, setup: Setup, device: torch.device) -> None:
    """Refuse a training that no machine with this memory could begin.

    Counted is what cannot be spared: the parameters with their gradients and Adam's state, one
    layer's output in float32 and, in a GAT that is not in blocks, its messages; on CUDA the graph
    too, which on the CPU is there already. What training takes beyond that is not known here, so
    one that passes may still not fit.

    Args:
        graph: The graph, loaded.
        setup: Model, recipe and level.
        device: Where it is to be trained.

    Raises:
        UsageError: If these bytes are more than the device has free; the message lists them.
    """
    free = _free_bytes(device)
    parts = least_bytes(graph, setup)
    if device.type != "cuda":
        del parts["graph"]
    needed = sum(parts.values())
    if free is not None and needed > free:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        raise UsageError(
            f"Expected a training that fits into the {format_bytes(free)} of memory that are free "
            f"on {device.type} (got at least {format_bytes(needed)}: {listed}): give smaller "
            f"--hidden, --heads or --layers{', or --blocks auto' if 'messages' in parts else ''}"
        )


def least_bytes(graph: Graph, setup: Setup) -> dict[str, int]:
    """Return the bytes by what needs them, a lower bound of each."""
    recipe = setup.recipe
    last = graph.num_classes * (recipe.heads if setup.model == "gat" else 1)
    # With one layer GCN and GAT have no hidden one.
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


def parameters(model: str, recipe: Recipe, in_channels: int, out_channels: int) -> int:
    """Return how many weights the convolutions and linear layers have, biases and norms left out.

    A formula instead of a model: of the sizes that are to be refused, no model can be made.
    """
    depth, heads = recipe.layers, recipe.heads
    width = recipe.hidden * heads
    if model == "gcnii":
        return in_channels * width + depth * width * width + width * out_channels
    out = out_channels * heads
    if depth == 1:
        return in_channels * out
    return in_channels * width + (depth - 2) * width * width + width * out


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return available_bytes()
    # What torch's allocator holds without using it is free too.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
