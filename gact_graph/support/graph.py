"""Walks over autograd's graph, from results back to leaves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def ends_of(outputs: Iterable[Tensor]) -> list[Node]:
    """The nodes that made these tensors; those without a graph have none."""
    return [t.grad_fn for t in outputs if t.grad_fn is not None]


def nodes_before(ends: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all before them in forward, each once."""
    waiting = [*ends]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)


def saved_by_node(node: Node) -> list[Any]:
    """What a node saved for backward, as ``torch._C._autograd.SavedTensor``; nothing is unpacked.

    Autograd documents no list of what a node saved: each type of node has an attribute
    ``_raw_saved_NAME`` for each of its tensors, or for each of its lists of tensors.
    """
    found: list[Any] = []
    for name in _raw_names(type(node)):
        saved = getattr(node, name)
        found += saved if isinstance(saved, (list, tuple)) else [saved]
    return found


@functools.lru_cache(maxsize=1024)
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
