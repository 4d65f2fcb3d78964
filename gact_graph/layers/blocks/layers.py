"""Patches that make the layers of a model run their edge work in blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing, MetaLayer

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, EdgeFunction
from gact_graph.layers.blocks.compiled import Layer, in_graph
from gact_graph.layers.blocks.cutting import Cutting
from gact_graph.layers.blocks.edge_work import EdgeWork, in_blocks
from gact_graph.layers.blocks.graph_work import GraphCall, of_graph
from gact_graph.layers.blocks.order import Orders
from gact_graph.layers.blocks.sort_arguments import (
    check_layer,
    nested,
    sort_arguments,
    sort_edge_model_arguments,
    target_of,
)
from gact_graph.layers.blocks.sparse_product import SparseProduct, sparse_product
from gact_graph.layers.blocks.trace import reason_of
from gact_graph.layers.recompute import runs
from gact_graph.layers.recompute.saved_bytes import message_bytes, most_saved
from gact_graph.support import current
from gact_graph.support.current import is_transformed
from gact_graph.support.patch import BoundPatch, Patch
from gact_graph.support.rows import LayerRow
from gact_graph.support.torch_private import graph_task_id

_WORTHWHILE = 4
"""In a call that is compressed, a layer runs in blocks from this part of ``min_bytes`` on: coding
its messages takes longer than cutting them into blocks. GAT with 1,000 nodes and 7,000 edges, 6 MB
of messages: 2.2 times stock's time with coded messages, 1.7 times in blocks."""


def _propagate(module: MessagePassing, inputs: dict[str, Any]) -> Tensor:
    collect = module.inspector.collect_param_data
    out = module.message(**collect("message", inputs))
    out = module.aggregate(out, **collect("aggregate", inputs))
    return module.update(out, **collect("update", inputs))


def _edge_update(module: MessagePassing, inputs: dict[str, Any]) -> Tensor:
    return module.edge_update(**module.inspector.collect_param_data("edge_update", inputs))


def _edge_model(module: Any, inputs: dict[str, Any]) -> Tensor:
    names = ("src", "dest", "edge_attr", "u", "batch")
    return module(*(nested(inputs, name) for name in names))


_METHODS = (
    EdgeFunction("propagate", _propagate, False, frozenset({"message", "aggregate", "update"})),
    EdgeFunction("edge_updater", _edge_update, True, frozenset({"edge_update"})),
)
_EDGE_MODEL = EdgeFunction("edge_model", _edge_model, of_edges=True)
"""The edge model of a ``MetaLayer``, which gets the rows of both ends as tensors of edges."""


class Blocks(Cutting):
    """The state that the patched layers of a wrapped model share.

    Args:
        owner: The model that the layers belong to.
        report: Gets an entry for each call, under its name.
        size: Edges of a block, or ``"auto"``.
        quantized: Whether saved tensors are quantized; see :class:`Cutting`.
        min_bytes: A layer with fewer than a quarter of these bytes of messages runs as in PyG, if
            ``size`` is ``"auto"``.
        keep_sums: Whether sums of constant rows are kept from one forward to the next.

    Attributes:
        in_graphs: The entries of layers in compiled graphs, of which not all report each forward.
    """

    def __init__(
        self,
        owner: current.Owner,
        report: dict[str, LayerRow],
        size: int | str,
        quantized: bool,
        min_bytes: int,
        keep_sums: bool,
    ) -> None:
        super().__init__(Orders(), size, quantized, keep_sums)
        self.owner = owner
        self.report = report
        self.min_bytes = min_bytes
        self.in_graphs: dict[str, LayerRow] = {}

    @property
    def session(self) -> current.Capture | None:
        """The session that captures the model's forward; None if there is none."""
        return current.session_of(self.owner)

    def sparse_product(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        accepts: Callable[[int], bool],
    ) -> SparseProduct | None:
        """Return the product with a sparse matrix that an operation computes, if it is one."""
        return sparse_product(func, args, kwargs, self.orders, accepts)

    @property
    def _confirms(self) -> bool:
        # Without a session, a layer may be called on its own, and no forward is counted between two
        # calls: the edges are compared in each. While a layer runs again in backward, its edges are
        # those of its forward.
        return self.session is None and runs.current() is None

    def attach(self, model: nn.Module, only: Container[nn.Module] | None) -> Iterator[Blocked]:
        """Patch the edge work of the layers of a model, and yield the patches.

        Args:
            model: The model.
            only: The layers to patch; None for all.
        """
        for name, module in model.named_modules():
            if only is not None and module not in only:
                continue
            if isinstance(module, MessagePassing):
                for edge_function in _METHODS:
                    yield BlockedMethod(self, module, edge_function.name, name, edge_function)
            elif (
                isinstance(module, MetaLayer)
                and type(module).forward is MetaLayer.forward
                and "forward" not in vars(module)
                and isinstance(module.edge_model, nn.Module | None)
            ):
                yield BlockedMetaLayer(self, module, "forward", name, _EDGE_MODEL)


class Blocked(Patch, Layer):
    """Replace a method of a layer by a method that runs the layer's edge work in blocks.

    Args:
        blocks: The state that the layers of the model share.
        module: The layer.
        attribute: The method.
        layer: The layer's name in the model.
        edge_function: The function that runs for each block.
    """

    def __init__(
        self,
        blocks: Blocks,
        module: nn.Module,
        attribute: str,
        layer: str,
        edge_function: EdgeFunction,
    ) -> None:
        Layer.__init__(self, self._worker_of(module))
        self._blocks = blocks
        self._name = f"{layer}/{edge_function.name}" if layer else edge_function.name
        self._work = EdgeWork(edge_function)
        Patch.__init__(self, module, attribute)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"works": {}}  # of the graphs of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register()

    def _worker_of(self, module: Any) -> Any:
        """Return the module whose code is the edge work."""
        return module

    def _sorted(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Tensor, int, Arguments]:
        """Return the edges of a call, their row of destinations, and the sorted arguments.

        Raises:
            CannotBlock: The call cannot run in blocks.
        """
        raise NotImplementedError

    def _in_blocks(self, module: Any, worker: Any, /, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the result of the edge work; None if it cannot run in blocks.

        Args:
            module: The layer.
            worker: The module whose code is the edge work.
            args: The arguments of the method.
            kwargs: The keyword arguments of the method.
        """

        if torch.compiler.is_compiling():
            return in_graph(self, worker, args, kwargs)

        def run(first: bool) -> tuple[Tensor, int]:
            if is_transformed():
                raise CannotBlock("is traced or transformed")
            if first and self._blocks.size == "auto":
                self._check_worthwhile(module, (args, kwargs))
            edge_index, target, arguments = self._sorted(module, *args, **kwargs)
            session = self._blocks.session
            return self._work.run(worker, edge_index, target, arguments, self._blocks, session)

        def report(way: str, blocks: int | None, reason: str | None) -> None:
            self._blocks.report[self._name] = LayerRow(self._name, way, blocks, reason)

        return in_blocks(self._name, run, report)

    def graph_call(
        self,
        constants: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        again: bool,
    ) -> GraphCall | None:
        """See :class:`Layer`."""
        module = self.module
        if module is None:
            return None
        blocks, name, work = self._blocks, self._name, self._work

        def report(count: int) -> None:
            blocks.in_graphs[name] = LayerRow(name, "blocks", count, None, counted=False)

        try:
            if blocks.session is not None:
                raise CannotBlock("is compiled, in a model that is not")
            if blocks.size == "auto" and not again:
                self._check_worthwhile(module, (args, kwargs))
            edge_index, target, arguments = self._sorted(module, *args, **kwargs)
            worker = self._worker_of(module)
            return of_graph(edge_index, target, arguments, constants, worker, work, blocks, report)
        except Exception as error:  # sizes that depend on values compare with nothing
            reason = str(error) if isinstance(error, CannotBlock) else reason_of(error)
            blocks.in_graphs[name] = LayerRow(name, "stock", None, reason)
            return None

    def _check_worthwhile(self, module: nn.Module, arguments: Any) -> None:
        least = self._blocks.min_bytes // _WORTHWHILE
        if least and message_bytes(module, arguments) < least:
            raise CannotBlock("is small (min_bytes=)")
        # torch.utils.checkpoint runs a part of the forward again within backward, where only the
        # arguments show what was decided in forward.
        again = graph_task_id() != -1
        if again or not torch.is_grad_enabled() or not current.are_innermost():
            return
        session, small = self._blocks.session, current.is_uncompressed(self._blocks.owner)
        if session is not None:
            if session.expects_double_backward:
                raise CannotBlock(
                    "may be differentiated twice: an input of the model needs a gradient"
                )
            small = session.is_too_small(0) and session.is_too_small(most_saved(module, arguments))
        if small:
            raise CannotBlock("is small, in a call without compression (min_bytes=)")


class BlockedMethod(Blocked):
    """Replace ``propagate`` or ``edge_updater`` of a message passing layer."""

    def run(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method of ``module``."""
        result = self._in_blocks(module, module, *args, **kwargs)
        if result is not None:
            return result
        out = self.original(module)(*args, **kwargs)
        runs.ended_as_stock()
        return out

    def _sorted(
        self, module: Any, /, edge_index: Any = None, *args: Any, size: Any = None, **kwargs: Any
    ) -> tuple[Tensor, int, Arguments]:
        if not self._is_of_pyg(module):
            raise CannotBlock(f"has its own {self.attribute}")
        if args:
            raise CannotBlock("gets its arguments by position")
        edges = check_layer(module, edge_index)
        if isinstance(edge_index, EdgeIndex):
            size = [edge_index.num_rows, edge_index.num_cols]  # as in PyG, whatever the argument
        arguments = sort_arguments(module, self._work.edge_function.methods, edges, size, kwargs)
        return edges, target_of(module), arguments

    def _is_of_pyg(self, module: Any) -> bool:
        """Return whether the method is PyG's, or that of a template which PyG fills in."""
        name, methods = self.attribute, [getattr(MessagePassing, self.attribute)]
        for kind in type(module).__mro__:
            filled, before = (vars(kind).get(f"_{way}_{name}") for way in ("jinja", "orig"))
            if filled is not before:  # otherwise PyG could not fill in its template
                methods.append(filled)
        # When explanations end, PyG binds the method to the layer.
        bound = getattr(self.previous, "__func__", None)
        replaced = self.previous is not None and not isinstance(self.previous, (Patch, BoundPatch))
        return getattr(type(module), name) in methods and (not replaced or bound in methods)


class BlockedMetaLayer(Blocked):
    """Replace the forward of a MetaLayer, so that its edge model runs in blocks."""

    def _worker_of(self, module: Any) -> Any:
        return module.edge_model

    def run(
        self,
        module: Any,
        /,
        x: Any,
        edge_index: Any,
        edge_attr: Any = None,
        u: Any = None,
        batch: Any = None,
    ) -> Any:
        """Run in place of the forward of ``module``, which this method repeats."""
        if module.edge_model is not None:
            result = self._in_blocks(module, module.edge_model, x, edge_index, edge_attr, u, batch)
            if result is None:
                ends = x[edge_index[0]], x[edge_index[1]]
                of_edges = None if batch is None else batch[edge_index[0]]
                result = module.edge_model(*ends, edge_attr, u, of_edges)
                runs.ended_as_stock()
            edge_attr = result
        if module.node_model is not None:
            x = module.node_model(x, edge_index, edge_attr, u, batch)
        if module.global_model is not None:
            u = module.global_model(x, edge_index, edge_attr, u, batch)
        return x, edge_attr, u

    def _sorted(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Tensor, int, Arguments]:
        edges, arguments = sort_edge_model_arguments(*args)
        return edges, 1, arguments
