"""A small graph with rows of a call's own tensors, on which a layer is tried out.

Its destination nodes have no, one or several edges, its parts have different numbers of edges, some
edges are there twice, and the last destinations have none. So whether a layer treats its
destinations one by one shows on any user's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.order import Order

_DEGREES = ((3, 0, 2, 1, 5, 2, 1), (0, 8, 1, 3, 2), (0, 0))
_SOURCES = 11

_MOST = 1 << 16
"""A tensor with more elements than this keeps its values in all draws."""


@dataclass(frozen=True)
class Sample:
    """A small graph and the arguments of a call on it.

    Attributes:
        arguments: Arguments as the call's own, with tensors for this graph.
        order: The order of its edges.
        whole: One block of all destination nodes.
        parts: The same in three blocks. The second begins with a node without edges, and the last
            has no edges at all.
    """

    arguments: Arguments
    order: Order
    whole: Block
    parts: tuple[Block, Block, Block]

    def draws(self) -> Iterator[tuple[Tensor, ...]]:
        """Tensors for :attr:`arguments`, three times with other values.

        First rows of the call's own tensors; then random values in place of floating-point ones;
        then large positive ones, with index tensors sorted.
        """
        tensors = self.arguments.tensors
        yield tensors
        generator = torch.Generator().manual_seed(1)
        yield tuple(changed(t, generator) for t in tensors)
        whole = {use.index for use in self.arguments.uses if use.level == "whole"}
        others = [
            t if t.is_floating_point() or t.is_complex() or i in whole else t.sort(0).values
            for i, t in enumerate(tensors)
        ]
        large = [changed(t, generator) for t in others]
        yield tuple(t.abs() * 8 if t.is_floating_point() else t for t in large)


def sample_of(arguments: Arguments, target: int) -> Sample:
    """The sample for a call with at least one edge.

    Args:
        arguments: The call's.
        target: The row of edge_index that holds the destinations.
    """
    counts = torch.tensor([degree for part in _DEGREES for degree in part], device="cpu")
    nodes, edges = len(counts), int(counts.sum())
    levels = [arguments.levels_of(index) for index in range(len(arguments.names))]
    shared = any("source" in found and len(found) > 1 for found in levels)
    num_sources = nodes if shared else _SOURCES
    generator = torch.Generator().manual_seed(0)
    destinations = torch.arange(nodes, device="cpu").repeat_interleave(counts)
    # Each part reads other sources, so that no result over all edges is that over a part of them.
    later = destinations >= len(_DEGREES[0])
    half = num_sources // 2
    sources = torch.randint(half, (edges,), generator=generator, device="cpu")
    sources += later * (num_sources - half)
    sources[1] = sources[0]
    pair = (sources, destinations) if target else (destinations, sources)
    shuffled = torch.randperm(edges, generator=generator, device="cpu")
    edge_index = torch.stack(pair)[:, shuffled]
    device = arguments.tensors[0].device
    order = Order(edge_index.to(device), target, nodes)
    lengths = {"source": num_sources, "destination": nodes, "node": nodes, "edge": edges}
    tensors = []
    for tensor, found in zip(arguments.tensors, levels, strict=True):
        length = max(lengths.get(level, 0) for level in found)
        tensors.append(tensor.detach() if "whole" in found else _rows(tensor, length))
    ends = [len(part) for part in _DEGREES]
    first, second = ends[0], ends[0] + ends[1]
    starts = [0, *torch.cumsum(counts, 0).tolist()]
    parts = [
        Block(node, end, starts[node], starts[end])
        for node, end in ((0, first), (first, second), (second, nodes))
    ]
    return Sample(
        replace(arguments, tensors=tuple(tensors), num_destinations=nodes, num_sources=num_sources),
        order,
        Block(0, nodes, 0, edges),
        (parts[0], parts[1], parts[2]),
    )


def changed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of the magnitude of a floating-point tensor; other tensors stay as they are."""
    if not tensor.is_floating_point() or tensor.numel() > _MOST or not tensor.numel():
        return tensor
    known = tensor.detach().nan_to_num(1.0, 1.0, 1.0).abs().max()
    size = torch.where(known > 0, known, torch.ones_like(known))
    noise = torch.randn(tensor.shape, generator=generator, device=generator.device)
    return (noise.to(tensor.device) * size).to(tensor.dtype)


def _rows(tensor: Tensor, count: int) -> Tensor:
    last, device = tensor.size(0) - 1, tensor.device
    index = torch.linspace(0, last, count, dtype=torch.float64, device=device).long()
    return tensor.detach().index_select(0, index)


def blocks_of(sample: Sample, edgeless: bool) -> Sequence[Block]:
    """The three parts, or two blocks that both begin with a node that has edges.

    Args:
        sample: The sample.
        edgeless: Whether a block may begin with a node without edges, or have no edges.
    """
    first, second, last = sample.parts
    if edgeless:
        return sample.parts
    # The first node of the second part, which has no edges, goes to the first block.
    node = second.first_node + 1
    return (
        Block(first.first_node, node, first.first_edge, first.end_edge),
        Block(node, last.end_node, second.first_edge, last.end_edge),
    )
