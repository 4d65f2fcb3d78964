"""One call of a layer without its tensors: what it takes to run the layer once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gact_graph.layers.recompute.structure import Structure, taken_apart
from gact_graph.support.current import Coding
from gact_graph.support.replica import Replica, Snapshot, leaves_of
from gact_graph.support.run_state import RunState

Key = tuple[bool, ...]

LEARNS_FROM_ELSEWHERE = "uses a tensor that learns and is neither an argument nor a parameter of it"
"""The reason for a layer some of whose gradients would be lost; it follows "it" in the report."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Autograd holds it until backward, so it has no tensors but those of the layer itself: the
    arguments wait as saved tensors, which the hooks compress.

    Attributes:
        snapshot: The layer as it was when the call began.
        method: Gives the layer's own forward, from the layer or a replica.
        arguments: ``(args, kwargs)`` without the tensors.
        learns: For each tensor argument, then for each parameter of ``snapshot.learning``, whether
            it requires a gradient.
        run_state: Random states and autocast when the call began.
        coding: How node tensors are quantized that wait for blocks while the layer runs again;
            None leaves them as they are.
        values_not_needed: Shared by all calls of the layer: by :attr:`key`, the calls of its edge
            work whose values backward does not need.
    """

    snapshot: Snapshot
    method: Callable[[nn.Module], Callable[..., Any]]
    arguments: Structure
    learns: tuple[bool, ...]
    run_state: RunState
    coding: Coding | None
    values_not_needed: dict[Key, frozenset[int]]

    @property
    def key(self) -> Key:
        """What the graph of a layer depends on: which modules train, and which tensors learn."""
        return *self.snapshot.modes, *self.learns

    def run(self, module: nn.Module, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Structure]:
        """Runs the layer or a replica on these tensors; gives its results, taken apart."""
        args, kwargs = self.arguments.filled(tensors)
        return taken_apart(self.method(module)(*args, **kwargs))


def learns_from_elsewhere(
    replica: Replica, results: Sequence[Tensor], inputs: Sequence[Tensor]
) -> bool:
    """Whether gradients of the results flow to a leaf that is no input and no parameter."""
    known = {id(t) for t in (*inputs, *replica.parameters)}
    return any(id(leaf) not in known for leaf in leaves_of(results))
