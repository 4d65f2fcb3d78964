"""Puts blocks between the layers of a model and their ``propagate``, and takes them out again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from gact_graph import hooks
from gact_graph.blocks.arguments import Arguments, BlockFailed, CannotBlock, sort_out
from gact_graph.blocks.find_sums import find_summed
from gact_graph.blocks.order import Block, Order, Orders
from gact_graph.blocks.probe import probe
from gact_graph.blocks.run import Run
from gact_graph.blocks.sums import Summed
from gact_graph.blocks.unread import unread
from gact_graph.blocks.work import Work, edge_update, propagate, work_again
from gact_graph.report import LayerRow

_CPU_BYTES = 12 << 20
"""Messages of a block on the CPU: they and what is made of them stay in the cache."""

_CPU_BYTES_THRIFTY = 6 << 20
"""The same where little else is saved, and what a block takes shows beside it; a little slower."""

_CUDA_SHARE = 1 / 256
"""The same as a share of the device's memory; with gradients a block takes several times that."""

_LEAST = 4096
"""Arcs below which a block's overhead shows."""

_CPU_ARCS, _CUDA_ARCS = 1 << 15, 1 << 24
"""Arcs above which narrow messages gain nothing, and indices begin to count."""


class Blocks:
    """What the layers of one wrapped model share.

    Args:
        owner: What the hooks on the model's submodules carry.
        rows: Gets what became of each call, by its name.
        size: Arcs a block, or ``"auto"``.
        thrifty: Whether what is saved is quantized, and so little that free memory counts.
    """

    def __init__(
        self, owner: hooks.Owner, rows: dict[str, LayerRow], size: int | str, thrifty: bool
    ) -> None:
        self.owner = owner
        self.rows = rows
        self.orders = Orders()
        self.thrifty = thrifty
        self._size = size

    def size_for(self, arguments: Arguments) -> int:
        """Arcs a block."""
        if isinstance(self._size, int):
            return self._size
        wide = [use.place for use in arguments.uses if use.level in ("source", "target", "edge")]
        tensors = [arguments.tensors[place] for place in {*wide}] or [*arguments.tensors]
        width = max(t.nbytes / max(1, t.size(0)) for t in tensors)
        device = tensors[0].device
        room = float(_CPU_BYTES_THRIFTY if self.thrifty else _CPU_BYTES)
        most = _CPU_ARCS
        if device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory * _CUDA_SHARE
            most = _CUDA_ARCS
        size = max(_LEAST, int(room / max(1.0, width)))
        return min(size, most)

    def attach(self, model: nn.Module) -> Iterator[Layer]:
        """Puts a stand-in on each layer; yields them."""
        for name, module in model.named_modules():
            if isinstance(module, MessagePassing):
                for function, functions, work in _CALLS:
                    yield Layer(self, module, name, function, functions, work)


class Layer:
    """Stands in for ``propagate`` or ``edge_updater`` as an attribute of one layer."""

    def __init__(
        self,
        blocks: Blocks,
        module: MessagePassing,
        name: str,
        function: str,
        functions: tuple[str, ...],
        work: Work,
    ) -> None:
        self._blocks = blocks
        self._module = weakref.ref(module)
        self._name = f"{name}/{function}" if name else function
        self._function = function
        self._functions = functions
        self._work = work
        self._kept: tuple[str, ...] | None = None
        self._unread: dict[tuple[bool, ...], frozenset[int]] = {}
        self._summed: dict[Hashable, Summed | None] = {}
        self._reason: str | None = None
        self._previous: Callable[..., Any] | None = vars(module).get(function)
        setattr(module, function, self)

    def remove(self) -> None:
        """Puts what was there before in its place."""
        module = self._module()
        if module is not None and vars(module).get(self._function) is self:
            delattr(module, self._function)
            if self._previous is not None:
                setattr(module, self._function, self._previous)

    def __call__(self, edge_index: Any, *args: Any, size: Any = None, **given: Any) -> Any:
        module = self._module()
        assert module is not None  # whoever calls this attribute holds the layer
        try:
            if args or torch.compiler.is_compiling():
                raise CannotBlock("gets its arguments by place, or is being compiled")
            found = self._prepare(module, edge_index, size, given)
        except CannotBlock as reason:
            self._blocks.rows[self._name] = LayerRow(self._name, "stock", None, str(reason))
            inner = self._previous or getattr(type(module), self._function).__get__(module)
            return inner(edge_index, *args, size=size, **given)
        self._blocks.rows[self._name] = LayerRow(self._name, "blocks", len(found.blocks), None)
        session = hooks.session_of(self._blocks.owner)
        if session is None:
            return found()
        session.sizes.add(edge_index, [found.arguments.columns, found.arguments.rows])
        named = dict(zip(found.arguments.names, found.arguments.tensors, strict=True))
        with session.trace.standing_for(self._function, named), hooks.unseen():
            return found()

    def _prepare(
        self, module: MessagePassing, edge_index: Any, size: Any, given: dict[str, Any]
    ) -> Run:
        if self._reason is not None:
            raise CannotBlock(self._reason)
        edges = _plain(module, edge_index)
        _check_module(module)
        arguments = sort_out(module, self._functions, edges, size, given)
        target = 1 if module.flow == "source_to_target" else 0
        try:
            order = self._blocks.orders.get(edges, target, arguments.rows)
        except IndexError as error:
            raise CannotBlock(str(error)) from error
        if order.columns > arguments.columns:
            raise CannotBlock(f"has an arc from none of {arguments.columns} nodes")
        blocks = order.blocks(self._blocks.size_for(arguments))
        of_edges = self._function == "edge_updater"
        block = max(blocks[:8], key=lambda b: b.arc_end - b.arc)
        if self._kept is None:
            try:
                with hooks.unseen():
                    self._kept = probe(module, self._work, arguments, order, block, of_edges)
            except BlockFailed:
                raise
            except CannotBlock as reason:
                self._reason = str(reason)
                raise
        return Run(
            module,
            self._work,
            arguments,
            order,
            self._blocks.size_for(arguments),
            of_edges,
            self._kept,
            self._unread_of(module, arguments, order, block),
            self._summed_of(module, arguments, order, block),
            self._blocks.thrifty,
        )

    def _unread_of(
        self, module: MessagePassing, arguments: Arguments, order: Order, block: Block
    ) -> frozenset[int]:
        """Found out once for each choice of what learns."""
        learn = tuple(t.requires_grad for t in (*arguments.tensors, *module.parameters()))
        if not torch.is_grad_enabled() or not any(learn):
            return frozenset()
        key = (module.training, *learn)
        if key not in self._unread:
            work = work_again(module, self._work)
            with hooks.unseen():
                self._unread[key] = unread(module, work, arguments, order, block)
        return self._unread[key]

    def _summed_of(
        self, module: MessagePassing, arguments: Arguments, order: Order, block: Block
    ) -> Summed | None:
        """Found out once for each choice of arguments."""
        tensors = [(t.dtype, t.dim(), t.is_contiguous()) for t in arguments.tensors]
        key = (module.training, arguments.names, *tensors)
        if key not in self._summed:
            assert self._kept is not None
            with hooks.unseen():
                given = module, arguments, order, block, self._kept
                found = find_summed(*given) if self._work is propagate else None
                self._summed[key] = found
        return self._summed[key]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])


_CALLS: tuple[tuple[str, tuple[str, ...], Work], ...] = (
    ("propagate", ("message", "aggregate", "update"), propagate),
    ("edge_updater", ("edge_update",), edge_update),
)


def _plain(module: MessagePassing, edge_index: Any) -> Tensor:
    if isinstance(edge_index, EdgeIndex):
        if module.fuse and module.SUPPORTS_FUSED_EDGE_INDEX and edge_index.is_sorted_by_col:
            raise CannotBlock("multiplies by a sparse matrix")
        edge_index = edge_index.as_tensor()
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        if module.fuse:
            raise CannotBlock("multiplies by a sparse matrix")
        raise CannotBlock("has its arcs in a sparse matrix; edge_index can be cut into blocks")
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise CannotBlock("has no edge_index [2, E] of int64")
    if edge_index.size(1) == 0:
        raise CannotBlock("has no arcs")
    return edge_index


def _check_module(module: MessagePassing) -> None:
    if module.explain or module.decomposed_layers > 1:
        raise CannotBlock("is explained or decomposed")
    for phase in ("propagate", "message", "aggregate", "edge_update"):
        for when in ("forward_pre", "forward"):
            registered = getattr(module, f"_{phase}_{when}_hooks").values()
            if not all(isinstance(hook, hooks.Hook) for hook in registered):
                raise CannotBlock(f"has other hooks on {phase}")
