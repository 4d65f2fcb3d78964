"""Parts of a traced graph: their dependencies, and their execution for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gact_graph.layers.blocks.locality import BATCH_NORMS
from gact_graph.layers.blocks.trace import Trace
from gact_graph.support.storage import storage_id
from gact_graph.support.torch_private import OpOverload, set_grad_enabled, tree_leaves


class Dependencies:
    """The dependencies between the nodes of a trace, through arguments and changes in place.

    Args:
        trace: The trace.

    Attributes:
        of_storage: The first node whose tensor has a storage, by the storage's identity.
    """

    def __init__(self, trace: Trace) -> None:
        self.of_storage: dict[int, fx.Node] = {}
        self._before: dict[fx.Node, list[fx.Node]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Add the next node of the graph."""
        before = [*node.all_input_nodes]
        for storage in [s for earlier in before for s in storages_of(earlier)]:
            before += self._writers.get(storage, ())
        self._before[node] = before
        if changes_in_place(node):
            for storage in storages_of(node.all_input_nodes[0]):
                self._writers.setdefault(storage, []).append(node)
        for storage in storages_of(node):
            self.of_storage.setdefault(storage, node)

    def is_changed(self, node: fx.Node) -> bool:
        """Return whether another operation writes into the storage of a node's tensor."""
        writers = (w for storage in storages_of(node) for w in self._writers.get(storage, ()))
        return any(writer is not node for writer in writers)

    def closure(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes and all their dependencies."""
        waiting, closure = [*nodes], set[fx.Node]()
        for node in [*waiting]:
            for storage in storages_of(node):
                waiting += self._writers.get(storage, ())
        while waiting:
            node = waiting.pop()
            if node not in closure:
                closure.add(node)
                waiting += self._before[node]
        return closure


def storages_of(node: fx.Node) -> list[int]:
    """Return the identities of the storages of a node's tensors."""
    values = tree_leaves(node.meta.get("val"))
    return [storage_id(v) for v in values if isinstance(v, Tensor)]


def changes_in_place(node: fx.Node) -> bool:
    """Return whether an operation changes its first argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _unless_empty(norm: OpOverload) -> Callable[..., Any]:
    """Return a batch norm with given statistics that does nothing to no rows.

    The backward of the operators divides by the number of rows on a CPU, which ends the process;
    ``F.batch_norm`` does not call them without rows.
    """

    def batch_norm(x: Tensor, *args: Any) -> Any:
        return norm(x, *args) if len(x) else (x.clone(), x, x)

    return batch_norm


def _is_random(node: fx.Node) -> bool:
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(node.target, OpOverload) and seeded in node.target.tags


class EdgeGraph:
    """A part of a traced graph that runs on the tensors of a block.

    Args:
        trace: The trace.
        dependencies: The dependencies between its nodes.
        outputs: The nodes of the results of the part.

    Attributes:
        inputs: The names of the inputs of a block and of the constants that the part needs.
        is_random: Whether the part draws random numbers.
    """

    def __init__(
        self, trace: Trace, dependencies: Dependencies, outputs: Sequence[fx.Node]
    ) -> None:
        needed = dependencies.closure(outputs)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in trace.graph.nodes:
            if node in needed or node.target is set_grad_enabled:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                if getattr(node.target, "overloadpacket", None) in BATCH_NORMS:
                    copies[node].target = _unless_empty(node.target)
        self.inputs: tuple[str, ...] = tuple(
            name for name, node in trace.placeholders.items() if node in copies
        )
        graph.output([copies[node] for node in outputs])
        for copy in graph.nodes:  # fake tensors would live as long as the analysis
            copy.meta.clear()
        self.is_random: bool = any(_is_random(node) for node in copies)
        owner = trace.graph.owning_module
        assert owner is not None
        self._run = fx.GraphModule(owner, graph)

    @property
    def code(self) -> str:
        """The part as Python code, with the values of its literal tensors."""
        nodes = self._run.graph.find_nodes(op="get_attr")
        literals = [(node.target, getattr(self._run, node.target)) for node in nodes]
        return f"{self._run.code}{[(name, x.dtype, x.tolist()) for name, x in literals]}"

    def __call__(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Run the part and return its results.

        Args:
            inputs: The inputs of a block by name, which may be more than the part needs.
        """
        results: list[Tensor] = self._run(*(inputs[name] for name in self.inputs))
        return results
