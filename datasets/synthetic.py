"""Synthetic graphs of published sizes, to measure memory and speed without a download."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from datasets.errors import DatasetError
from datasets.graph import Graph
from datasets.memory import check_fits
from datasets.published import PUBLISHED, Size
from datasets.split import random_split

# Chosen so that a node's features alone leave its class uncertain, and those of its neighbors
# decide it: a graph network clearly beats a perceptron, so training on these graphs is a test.
FRACTION_INSIDE = 0.7
SIGNAL = 1.5
LABELS_A_CLASS = 8  # further labels of each community, in the multi-label graphs
LABEL_DROPOUT = 0.1
ROWS_AT_ONCE = 65_536


def load_synthetic(spec: str) -> Graph:
    r"""Make the graph that :obj:`"synthetic:NAME"` or :obj:`"synthetic:NAME@SCALE"` describes.

    Args:
        spec (str): :obj:`NAME` is a key of :obj:`~datasets.published.PUBLISHED`; :obj:`SCALE`
            multiplies the numbers of nodes and edges, which keeps the mean degree. It defaults
            to 1.

    Raises:
        DatasetError: If the name is unknown, or the scale is not a positive number or too small.
    """
    name, at, scale_text = spec.removeprefix("synthetic:").partition("@")
    if name not in PUBLISHED:
        raise DatasetError(
            f"Expected 'synthetic:NAME' or 'synthetic:NAME@SCALE' with NAME one of "
            f"{', '.join(PUBLISHED)} (got {spec!r})"
        )
    scale = _scale(scale_text, spec) if at else 1.0
    size = PUBLISHED[name]
    if not math.isfinite(scale * max(size)):
        raise DatasetError(f"Expected a scale that leaves numbers finite (got {spec!r})")
    scaled = size._replace(nodes=round(size.nodes * scale), edges=round(size.edges * scale))
    return block_model(scaled, name=spec)


def block_model(size: Size, name: str = "synthetic", seed: int = 0) -> Graph:
    r"""Sample a stochastic block model with one community per class.

    Communities are equally large. A share :obj:`FRACTION_INSIDE` of the edges join two nodes of
    one community, as far as there is room, and the other edges join two communities. Nodes are
    drawn uniformly, so degrees are even, unlike in the real graphs. Features are the mean of the
    community plus unit noise. In a multi-label graph, each community has a set of labels of its
    own, and each node lacks some of them.

    Every edge exists in both directions, and **once**: duplicates are drawn again, so the number
    of edges is the requested one, minus one if that is odd. Edges are sorted by source, then
    target. There are no self-loops.

    Args:
        size (Size): Counts of the graph: at least two :obj:`classes`, at least two :obj:`nodes`
            per class, and :obj:`edges` at most half of all ordered pairs of nodes.
        name (str, optional): Name of the graph. (default: :obj:`"synthetic"`)
        seed (int, optional): The graph depends on the size and this seed alone; the global random
            state is neither read nor changed. (default: :obj:`0`)

    Raises:
        DatasetError: If the counts leave no room for such a graph.
    """
    num_nodes, num_edges = size.nodes, size.edges // 2
    if size.classes < 2:
        raise DatasetError(
            f"Expected {name} to have at least two classes (got {size.classes}): with one there "
            "is no edge between communities"
        )
    if num_nodes < 2 * size.classes:
        raise DatasetError(
            f"Expected {name} to have at least two nodes for each of its {size.classes} classes "
            f"(got {num_nodes} nodes); use a larger scale"
        )
    if num_edges > num_nodes * (num_nodes - 1) // 4:
        raise DatasetError(
            f"Expected {name} to join at most half of its node pairs "
            f"(got {num_edges} edges among {num_nodes} nodes); use a larger scale"
        )
    check_fits(name, _least_bytes(size), "use a smaller scale, as in 'synthetic:reddit@0.1'")
    generator = torch.Generator().manual_seed(seed)
    # Edges are drawn between places, in which communities are blocks; a shuffle assigns nodes.
    node_at = torch.randperm(num_nodes, generator=generator)
    block_at = torch.arange(num_nodes) * size.classes // num_nodes
    block = torch.empty_like(block_at).index_copy_(0, node_at, block_at)
    # With the same seed, the split would repeat the shuffle, and so split by class.
    split_seed = int(torch.randint(2**31, (), generator=generator))
    train_idx, val_idx, test_idx = random_split(num_nodes, split_seed)
    return Graph(
        name=name,
        x=_features(block, size, generator),
        edge_index=_edges(node_at, size.classes, num_edges, generator),
        y=_label_sets(block, size.classes, generator) if size.multi_label else block,
        num_classes=size.classes,
        train_idx=train_idx,
        val_idx=val_idx,
        test_idx=test_idx,
    )


def _least_bytes(size: Size) -> int:
    """Return a lower bound: features, targets and edges at the end, and edges during the sort."""
    columns = 4 * size.features + (4 * size.classes if size.multi_label else 8)
    return size.nodes * columns + 32 * size.edges


def _scale(text: str, spec: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise DatasetError(
            f"Expected a positive number after '@' in {spec!r} (got {text!r}); "
            "'synthetic:reddit@0.1' is a tenth of Reddit"
        )
    return scale


def _edges(node_at: Tensor, num_blocks: int, num_edges: int, generator: torch.Generator) -> Tensor:
    num_nodes = node_at.numel()
    start = (torch.arange(num_blocks + 1) * num_nodes + num_blocks - 1) // num_blocks
    length = start.diff()
    # Drawing until all are distinct stays quick while no more than half of the pairs are taken.
    room_inside = int((length * (length - 1) // 4).sum())
    num_inside = min(round(FRACTION_INSIDE * num_edges), room_inside)
    pairs = torch.cat(
        (
            _distinct_pairs(num_inside, start, True, generator),
            _distinct_pairs(num_edges - num_inside, start, False, generator),
        )
    )
    a, b = node_at[pairs // num_nodes], node_at[pairs % num_nodes]
    # One integer per edge: sorting these costs a third of sorting two rows, in time and memory.
    edges = torch.cat((a * num_nodes + b, b * num_nodes + a)).sort().values
    return torch.stack((edges // num_nodes, edges % num_nodes))


def _distinct_pairs(count: int, start: Tensor, inside: bool, generator: torch.Generator) -> Tensor:
    """Draw `count` unordered pairs of places a < b, each as the integer a * N + b."""
    pairs = torch.empty(0, dtype=torch.int64)
    while pairs.numel() < count:
        drawn = _draw_pairs(count - pairs.numel(), start, inside, generator)
        pairs = torch.cat((pairs, drawn)).unique()
    return pairs


def _draw_pairs(count: int, start: Tensor, inside: bool, generator: torch.Generator) -> Tensor:
    num_nodes = int(start[-1])
    a = torch.randint(num_nodes, (count,), generator=generator)
    block = a * (start.numel() - 1) // num_nodes
    first, length = start[block], start.diff()[block]
    # Step from `a`, or from the end of its block, around the circle of the places that qualify: no
    # draw is rejected, and no place is paired with itself.
    steps = length - 1 if inside else num_nodes - length
    step = (torch.rand(count, generator=generator, dtype=torch.float64) * steps).long()
    b = first + (a - first + 1 + step) % length if inside else (first + length + step) % num_nodes
    return torch.minimum(a, b) * num_nodes + torch.maximum(a, b)


def _features(block: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    # Means are about SIGNAL * sqrt(2) units of noise apart, for any number of features.
    means = torch.randn(size.classes, size.features, generator=generator)
    means *= SIGNAL / math.sqrt(size.features)
    x = torch.randn(block.numel(), size.features, generator=generator)
    for rows, blocks in zip(x.split(ROWS_AT_ONCE), block.split(ROWS_AT_ONCE), strict=True):
        rows += means[blocks]
    return x


def _label_sets(block: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    shape = (num_classes, num_classes)
    labels = torch.rand(shape, generator=generator) < LABELS_A_CLASS / num_classes
    labels.fill_diagonal_(True)
    y = torch.rand(block.numel(), num_classes, generator=generator)
    for rows, blocks in zip(y.split(ROWS_AT_ONCE), block.split(ROWS_AT_ONCE), strict=True):
        rows.copy_((rows >= LABEL_DROPOUT) & labels[blocks])
    return y
