"""Patches that make the layers of a model run their edge work in blocks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, MetaLayer

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock
from gact_graph.layers.blocks.edge_functions import EdgeFunction, edge_update, propagate
from gact_graph.layers.blocks.edge_work import EdgeWork, Prepared, Ran, in_blocks
from gact_graph.layers.blocks.meta_layer import edge_model, is_stock, sort_arguments_of
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.orders import Orders
from gact_graph.layers.blocks.size import edges_per_block
from gact_graph.layers.blocks.sort_arguments import sort_arguments, target_of
from gact_graph.layers.blocks.supported import check_module, plain_edge_index
from gact_graph.layers.recompute import reuse
from gact_graph.layers.recompute.saved_bytes import message_bytes, most_saved
from gact_graph.support import current
from gact_graph.support.patch import Patch
from gact_graph.support.rows import LayerRow
from gact_graph.support.transforms import is_transformed

_PAYS_OFF = 4
"""In a call that is not left alone, a layer runs in blocks from this part of ``min_bytes`` on:
coding its messages takes longer than cutting them into blocks. GAT with 1,000 nodes and 7,000
edges, 6 MB of messages: 2.2 times stock's time as PyG has it, 1.7 times in blocks."""


class Blocks:
    """What the patched layers of one wrapped model share.

    Args:
        owner: The model that the layers belong to.
        report: Gets an entry for each call, under its name: what became of it.
        size: Edges of a block, or ``"auto"``.
        thrifty: Whether saved tensors are quantized, and so small that free memory counts.
        min_bytes: A layer with fewer than a quarter of these bytes of messages is left alone, if
            ``size`` is ``"auto"``.

    Attributes:
        share: Of the edges that a block has where ``size`` is ``"auto"``: a small part of a graph
            is cut into as many blocks as the whole, to see how memory grows.
    """

    def __init__(
        self,
        owner: current.Owner,
        report: dict[str, LayerRow],
        size: int | str,
        thrifty: bool,
        min_bytes: int,
    ) -> None:
        self.owner = owner
        self.report = report
        self.orders = Orders()
        self._thrifty = thrifty
        self.min_bytes = min_bytes
        self._size = size
        self.share = 1.0

    @property
    def sizes_itself(self) -> bool:
        """Whether the user named no number of edges."""
        return self._size == "auto"

    def size_for(self, arguments: Arguments, summed: int | None = None) -> int:
        """Edges of a block; see :func:`edges_per_block`."""
        if isinstance(self._size, int):
            return self._size
        return max(1, round(edges_per_block(arguments, self._thrifty, summed) * self.share))

    def order(self, edge_index: Tensor, target: int, num_destinations: int) -> Order:
        """The order of these edges; see :class:`Order` for what it raises."""
        # Only captured forwards are counted, and a layer's own backward follows such a one. Without
        # a count, an edge_index that was seen before may have changed since.
        uncounted = current.session_of(self.owner) is None and reuse.current() is None
        with current.capture_disabled():  # else the index that sorts the edges would count as saved
            return self.orders.get(edge_index, target, num_destinations, confirm=uncounted)

    def attach(
        self, model: nn.Module, only: Container[nn.Module] | None = None
    ) -> Iterator[Blocked]:
        """Patches the edge work of each layer that has some, or of some; yields the patches."""
        for name, module in model.named_modules():
            if only is not None and module not in only:
                continue
            if isinstance(module, MessagePassing):
                for method in _METHODS:
                    yield BlockedMethod(self, module, name, method)
            elif isinstance(module, MetaLayer) and is_stock(module):
                yield BlockedMetaLayer(self, module, name)


class _Method(NamedTuple):
    """A method that is patched.

    Attributes:
        name: Its name.
        functions: The names of the layer's functions that it calls.
        edge_function: What runs for each block in its place.
    """

    name: str
    functions: tuple[str, ...]
    edge_function: EdgeFunction


_METHODS = (
    _Method("propagate", ("message", "aggregate", "update"), propagate),
    _Method("edge_updater", ("edge_update",), edge_update),
)


class Blocked(Patch):
    """Replaces a method of one layer with one that runs its edge work in blocks.

    Args:
        blocks: What the layers of the model share.
        module: The layer.
        attribute: The method.
        layer: The layer's name in the model.
        work: The name of the edge work.
        edge_function: The function that runs for each block.
        methods: The methods of the layer that it calls.
    """

    def __init__(
        self,
        blocks: Blocks,
        module: nn.Module,
        attribute: str,
        layer: str,
        work: str,
        edge_function: EdgeFunction,
        methods: Sequence[str],
    ) -> None:
        super().__init__(module, attribute)
        self._left_alone: str | None = None
        self._blocks = blocks
        self._name = f"{layer}/{work}" if layer else work
        self._label = work
        self._work = EdgeWork(edge_function, frozenset(methods))

    def _prepare(self, module: Any, *args: Any, **kwargs: Any) -> Prepared:
        """Finds out whether and how the edge work of a call can run in blocks.

        Raises:
            CannotBlock: It cannot.
        """
        raise NotImplementedError

    def _in_blocks(self, module: Any, worker: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """The result of the edge work; None if it cannot run in blocks.

        Args:
            module: The layer.
            worker: The module that gets the tensors that edge work leaves in attributes.
            args: Of the method.
            kwargs: Of the method.
        """

        def run(first: bool) -> Ran:
            if torch.compiler.is_compiling() or is_transformed():
                raise CannotBlock("is compiled, traced or transformed")
            if first and self._blocks.sizes_itself:
                self._check_worth(module, (args, kwargs))
            prepared = self._prepare(module, *args, **kwargs)
            session = current.session_of(self._blocks.owner)
            return self._work.run(prepared, worker, session, self._label)

        found = in_blocks(self._name, run)
        report = self._blocks.report
        if isinstance(found, Ran):
            row = LayerRow(self._name, "blocks", found.blocks, None)
            report[self._name] = row
            return found.result
        if found is not None:
            report[self._name] = LayerRow(self._name, "stock", None, found)
        return None

    def _check_worth(self, module: nn.Module, arguments: Any) -> None:
        if message_bytes(module, arguments) < self._blocks.min_bytes // _PAYS_OFF:
            raise CannotBlock("is small (min_bytes=)")
        # torch.utils.checkpoint runs a part of the forward within backward: decided as in forward.
        if torch._C._current_graph_task_id() == -1:
            session = current.session_of(self._blocks.owner)
            self._left_alone = None
            if session is None:
                if current.is_left_alone(self._blocks.owner):
                    self._left_alone = "is small, in a call that is left alone (min_bytes=)"
            elif session.may_run_backward_twice:
                self._left_alone = (
                    "may be differentiated twice: an input of the model needs a gradient"
                )
            elif session.leaves_alone(most_saved(module, arguments)):
                self._left_alone = "is small, in a call that is left alone (min_bytes=)"
        if self._left_alone is not None:
            raise CannotBlock(self._left_alone)


class BlockedMethod(Blocked):
    """Replaces ``propagate`` or ``edge_updater`` of one message passing layer."""

    def __init__(self, blocks: Blocks, module: MessagePassing, name: str, method: _Method) -> None:
        functions = method.functions
        super().__init__(
            blocks, module, method.name, name, method.name, method.edge_function, functions
        )
        self._functions = method.functions

    def run(self, module: Any, edge_index: Any, *args: Any, size: Any = None, **given: Any) -> Any:
        """Runs in place of the method of ``module``."""
        result = self._in_blocks(module, module, edge_index, *args, size=size, **given)
        if result is not None:
            return result
        out = self.original(module)(edge_index, *args, size=size, **given)
        reuse.ended_as_stock()
        return out

    def _prepare(
        self, module: Any, edge_index: Any = None, *args: Any, size: Any = None, **given: Any
    ) -> Prepared:
        if args:
            raise CannotBlock("gets its arguments by position")
        edges = plain_edge_index(module, edge_index)
        check_module(module)
        arguments = sort_arguments(module, self._functions, edges, size, given)
        return self._work.prepare(module, edges, target_of(module), arguments, self._blocks)


class BlockedMetaLayer(Blocked):
    """Replaces the forward of a MetaLayer: its edge model runs in blocks."""

    def __init__(self, blocks: Blocks, module: MetaLayer, name: str) -> None:
        super().__init__(blocks, module, "forward", name, "edge_model", edge_model, ())

    def run(
        self,
        module: Any,
        x: Any,
        edge_index: Any,
        edge_attr: Any = None,
        u: Any = None,
        batch: Any = None,
    ) -> Any:
        """Runs in place of the forward of ``module``, and does what that does."""
        if module.edge_model is not None:
            given = x, edge_index, edge_attr, u, batch
            found = self._in_blocks(module, module.edge_model, *given)
            edge_attr = self._all_at_once(module, *given) if found is None else found
        if module.node_model is not None:
            x = module.node_model(x, edge_index, edge_attr, u, batch)
        if module.global_model is not None:
            u = module.global_model(x, edge_index, edge_attr, u, batch)
        return x, edge_attr, u

    @staticmethod
    def _all_at_once(
        module: Any, x: Any, edge_index: Any, edge_attr: Any, u: Any, batch: Any
    ) -> Any:
        source, destination = edge_index[0], edge_index[1]
        of_edges = None if batch is None else batch[source]
        out = module.edge_model(x[source], x[destination], edge_attr, u, of_edges)
        reuse.ended_as_stock()
        return out

    def _prepare(self, module: Any, *args: Any, **kwargs: Any) -> Prepared:
        edges, arguments = sort_arguments_of(*args)
        return self._work.prepare(module.edge_model, edges, 1, arguments, self._blocks)
