"""The nodes of autograd's graph, and the tensors that they have saved."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def nodes_of(results: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes from results back to the leaves, each once."""
    nodes = (tensor.grad_fn for tensor in results if tensor.grad_fn is not None)
    waiting = [*dict.fromkeys(nodes)]  # a node may have several results
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)


def saved_by_node(node: Node) -> list[Any]:
    """Return the tensors that a node saved for backward, packed, as ``SavedTensor`` objects.

    Autograd documents no list of saved tensors: each type of node has an attribute
    ``_raw_saved_NAME`` for each of its tensors, or for each of its lists of tensors.
    """
    packed: list[Any] = []
    for name in raw_names(type(node)):
        saved = getattr(node, name)
        packed += saved if isinstance(saved, (list, tuple)) else [saved]
    return packed


@functools.lru_cache(maxsize=1024)
def raw_names(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes in which a type of nodes has packed tensors."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
