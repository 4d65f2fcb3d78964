"""Whether a layer can be computed again: it runs once on a replica, which leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.layers.recompute.call import LEARNS_FROM_ELSEWHERE, LayerCall, learns_from_elsewhere
from gact_graph.layers.recompute.reuse import EdgeCalls, counting
from gact_graph.support.replica import CannotReplicate, Replica
from gact_graph.support.storage import tensors_in


@dataclass(frozen=True)
class Finding:
    """What the try-out showed.

    Attributes:
        reason: Why the layer must run as it is, to follow "it" in the report; None if it need not.
        values_not_needed: The calls of its edge work whose values backward does not need; None
            where only the first backward can tell.
    """

    reason: str | None
    values_not_needed: frozenset[int] | None = None


def try_out(call: LayerCall, tensors: Sequence[Tensor], blocks: bool) -> Finding:
    """Runs a layer once on a replica.

    In blocks, its edge work is not computed: what the layer does with a result of that shape says
    enough, and says beforehand which values backward does not need.

    Args:
        call: The call.
        tensors: Its tensor arguments.
        blocks: Whether edge work is done in blocks.
    """
    for shapes_only in (True, False) if blocks else (False,):
        with call.run_state.restored(), saved_tensors_hooks(_save_nothing, _read_nothing):
            try:
                return _run(call, tensors, shapes_only)
            except (CannotReplicate, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # A layer that changes the result in place cannot take a mere shape.
                reason = f"fails when it is tried out ({type(error).__name__}: {error})"
    return Finding(reason)


def _run(call: LayerCall, tensors: Sequence[Tensor], shapes_only: bool) -> Finding:
    edge_calls = EdgeCalls(shapes_only=shapes_only)
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with call.snapshot.replica(own=True, watch=True) as replica:
        with counting(edge_calls):
            results, _ = call.run(replica.module, leaves)
        elsewhere = replica.undo()
        if elsewhere is not None:
            return Finding(f"changes {elsewhere}")
        reason = _reason(replica, results, leaves)
        if reason is not None or not shapes_only:
            return Finding(reason)
        return Finding(None, edge_calls.find_values_not_needed(results))


def _reason(replica: Replica, results: list[Tensor], leaves: list[Tensor]) -> str | None:
    buffers = replica.buffers
    for name, value in replica.changes().items():
        held = value if isinstance(value, Tensor) else None
        if held is not None and held.is_floating_point() and name not in buffers:
            return f"leaves a tensor in its attribute {name}"
        if any(t.requires_grad and not t.is_leaf for t in tensors_in(value)):
            return f"leaves a tensor that learns in its attribute {name}"
        if buffers.get(name):
            return f"changes its buffer {name}, which is too large to be copied at every call"
    return LEARNS_FROM_ELSEWHERE if learns_from_elsewhere(replica, results, leaves) else None


def _save_nothing(_: Any) -> None:
    """The pack hook: no backward goes through this graph."""


def _read_nothing(_: Any) -> Tensor:
    """The unpack hook, for whoever looks at what a node saved."""
    return torch.empty(0, device="cpu")
