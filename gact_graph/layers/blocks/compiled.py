"""Edge work inside compiled graphs: operators for its forward and its backward.

While a compiler traces a model, the edge work of a layer becomes a call of ``edge_forward``, whose
gradient is a call of ``edge_backward``. Compilers do not look into either. Both run the analysis
that was made of the layer during the trace, on the tensors of the step.

The edges stay outside of the graph: ``sort_edges`` returns a number by which the others find them
in order. ``draw_and_sort_edges`` is the same for layers that draw random numbers, from a seed that
is returned beside the number: a compiler merges no two calls.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gact_graph.layers.blocks.analysis import LayerAnalysis
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, Input
from gact_graph.layers.blocks.backward import backward
from gact_graph.layers.blocks.call import BlockedCall, Output
from gact_graph.layers.blocks.cutting import Cutting
from gact_graph.layers.blocks.edge_work import EdgeWork, edges_per_block
from gact_graph.layers.blocks.order import Order
from gact_graph.support.current import capture_disabled_in_backward
from gact_graph.support.run_state import RunState, random_states, set_random_states
from gact_graph.support.storage import storage_id
from gact_graph.support.torch_private import (
    FunctionalTensor,
    compilation,
    is_exporting,
    nonstrict_trace,
    without_modes,
)

_NONE = ""
"""Stands for None among the arguments of a function that a compiler does not look into."""

_NO_SEED = -1


@dataclass(frozen=True)
class GraphWork:
    """The edge work of one layer in a compiled graph, without its tensors.

    Attributes:
        analysis: The analysis of the layer.
        arguments: The arguments without tensors; the numbers of nodes are those of the trace.
        outputs: The result, then the tensors that the layer leaves in attributes.
        target: The row of edge_index that holds the destinations.
        rows: The shape of a row of each tensor, without the first dimension; the whole shape for
            tensors that all blocks read as a whole.
        results: The shape of a row of each output.
        cutting: Sorts and cuts the edges.
        report: Takes the number of blocks of a call.
    """

    analysis: LayerAnalysis
    arguments: Arguments
    outputs: tuple[Output, ...]
    target: int
    rows: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    cutting: Cutting
    report: Callable[[int], None]

    @property
    def is_random(self) -> bool:
        """Whether the layer draws random numbers."""
        attention = self.analysis.attention
        return self.analysis.forward.is_random or (attention is not None and attention.dropout > 0)

    def key(self) -> str:
        """Return a digest of what the operators compute, equal in all processes."""
        analysis = self.analysis
        weights = analysis.weighted_sum
        parts = (
            *(analysis.forward.code, analysis.backward.code, analysis.sums),
            *(sorted(analysis.never_read), analysis.attention),
            None if weights is None else (weights.index, weights.weights.code, weights.of_edges),
            *(self.arguments.uses, self.outputs, self.target, self.rows, self.results),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def shape_of(self, number: int, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of a tensor.

        Args:
            number: The index of the tensor.
            sizes: Numbers of edges, destinations and sources.
        """
        levels = self.arguments.levels_of(number)
        if "whole" in levels:
            return self.rows[number]
        first = sizes[2] if "source" in levels else sizes[0] if "edge" in levels else sizes[1]
        return first, *self.rows[number]

    def sort(self, edge_index: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the state of a call: a number of its sorted edges, and a seed."""
        try:
            order = self.cutting.order(edge_index, self.target, *sizes[1:])
        except IndexError as error:
            raise IndexError(f"Expected valid edges (got a layer that {error})") from error
        seed = int(torch.randint(2**62, (), device="cpu")) if self.is_random else _NO_SEED
        state = torch.tensor([_number_of(order), seed], device="cpu")
        _held[state] = order
        return state

    def forward(
        self, tensors: Sequence[Tensor], state: Tensor, sizes: Sequence[int]
    ) -> list[Tensor]:
        """Return the outputs."""
        order, seed = _order_and_seed(state)
        tensors = [tensor.contiguous() for tensor in tensors]
        with _seeded(seed):
            call = self._call(tensors, order, sizes)
            results = call.forward(tensors)
        self.report(len(call.blocks))
        return results

    def backward(
        self,
        saved: Sequence[Tensor],
        state: Tensor,
        gradients: Sequence[Tensor | None],
        sizes: Sequence[int],
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """Return the gradients of the tensors that need one."""
        given = [gradient for gradient in gradients if gradient is not None]
        order, seed = _order_and_seed(state)
        left = iter(saved)
        tensors = [
            given[0].new_full((), math.nan).expand(self.shape_of(number, sizes))
            if number in self.analysis.never_read
            else next(left).contiguous()
            for number in range(len(self.rows))
        ]
        inputs = [*map(Input, tensors, needed)]
        with _seeded(seed), capture_disabled_in_backward():
            contiguous = [None if g is None else g.contiguous() for g in gradients]
            backward(self._call(tensors, order, sizes), inputs, contiguous)
        results, seen = list[Tensor](), {*map(storage_id, (*given, *saved))}
        for entry in inputs:
            if not entry.requires_grad:
                continue
            own = entry.gradient
            if own is None:
                own = torch.zeros_like(entry.tensor, memory_format=torch.contiguous_format)
            elif storage_id(own) in seen:  # results of an operator share no memory
                own = own.clone()
            seen.add(storage_id(own))
            results.append(own.contiguous())
        return results

    def _call(self, tensors: Sequence[Tensor], order: Order, sizes: Sequence[int]) -> BlockedCall:
        arguments = replace(
            self.arguments,
            tensors=tuple(tensors),
            num_destinations=sizes[1],
            num_sources=sizes[2],
        )
        size = edges_per_block(self.analysis, arguments, self.cutting)
        return BlockedCall(
            self.analysis,
            arguments.without_tensors(),
            order,
            order.blocks(size),
            size,
            self.outputs,
            RunState({tensors[0].device.type}, of_torch=True),
        )

    def of_one_edge(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return outputs of the right shapes for an edge between the first nodes."""
        edge = torch.zeros(2, 1, dtype=torch.int64, device=tensors[0].device)
        call = self._call(tensors, Order(edge, 1, 1), (1, 1, 1))
        try:
            return call.forward(tensors, shape_only=True)
        finally:
            call.run_state.restore_random_state()


class GraphCall(NamedTuple):
    """A call that a compiler traces.

    Attributes:
        work: The edge work.
        edge_index: Edges [2, E], without values, and likewise below.
        tensors: The tensors of the arguments, then the parameters and buffers that the layer reads.
        sizes: Numbers of edges, destinations and sources.
    """

    work: GraphWork
    edge_index: Tensor
    tensors: list[Tensor]
    sizes: list[Any]


class Layer:
    """The interface of the patch of a layer, which a compiler traces.

    Args:
        module: The module whose code is the edge work; None if there is none.

    Attributes:
        key: The name of the patch in compiled graphs.
        settings: The names of the plain attributes of each submodule. A compiler traces the layer
            again when one of them changes.
        works: The edge work that compiled graphs call, by name.
        kept: The attributes in which the last traced call leaves tensors.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.settings: list[list[str]] = [
            [name for name, value in vars(sub).items() if isinstance(value, _GUARDED)]
            for sub in ([] if module is None else module.modules())
        ]
        self.works: dict[str, GraphWork] = {}
        self.kept: tuple[str, ...] = ()
        self.register()

    def register(self) -> None:
        """Give the patch, which may be a copy, a name of its own."""
        self.key: str = f"layer {next(_layer_numbers)}"
        _layers[self.key] = self

    def graph_call(
        self,
        constants: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        again: bool,
    ) -> GraphCall | None:
        """Return a call while a compiler traces it; None if it runs as in PyG.

        Args:
            constants: The parameters and buffers of the module, as the compiler traces them.
            args: The arguments of the method.
            kwargs: The keyword arguments of the method.
            again: Whether the call is known to be worth running in blocks.
        """
        raise NotImplementedError


_GUARDED = bool | int | float | str

_layer_numbers, _order_numbers = itertools.count(), itertools.count()
_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_works: weakref.WeakValueDictionary[str, GraphWork] = weakref.WeakValueDictionary()
_orders: weakref.WeakValueDictionary[int, Order] = weakref.WeakValueDictionary()
_numbers_of: weakref.WeakKeyDictionary[Order, int] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[Any, dict[str, set[bool]]] = weakref.WeakKeyDictionary()
"""Whether the calls of a layer run in blocks, by the graph that is traced and by the layer."""

_held = WeakTensorKeyDictionary()
"""The orders that a backward will need, by the tensors that the graphs save for it."""


def _number_of(order: Order) -> int:
    number = _numbers_of.get(order)
    if number is None:
        number = _numbers_of[order] = next(_order_numbers)
        _orders[number] = order
    return number


def _order_and_seed(state: Tensor) -> tuple[Order, int]:
    number, seed = state.tolist()
    order = _orders.get(number)
    if order is None:
        raise RuntimeError(
            "Expected the sorted edges of the forward in backward (got a forward whose edges "
            "were dropped); call backward before further forwards, or wrap with blocks=False"
        )
    return order, seed


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed inside, if there is one."""
    if seed == _NO_SEED:
        yield
        return
    before = random_states(of_torch=True)
    try:
        torch.manual_seed(seed)
        yield
    finally:
        set_random_states(before)


def in_graph(
    layer: Layer, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the result of edge work while a compiler traces it; None if it runs as in PyG.

    The compiler looks into this function.
    """
    if is_exporting():
        return None
    given = {str(number): value for number, value in enumerate(args)} | {**kwargs}
    if not all(_is_plain(value) for value in given.values()):
        return None
    given = {name: _without_none(value) for name, value in given.items()}
    settings = [
        getattr(sub, name)
        for sub, names in zip(module.modules(), layer.settings, strict=False)
        for name in names
    ]
    constants = [*module.parameters(), *module.buffers()]
    results = _traced(layer.key, given, len(args), constants, settings)
    if not results:
        return None
    for name, tensor in zip(layer.kept, results[1:], strict=True):
        setattr(module, name, tensor)
    return results[0]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    plain = value is None or isinstance(value, (bool, int, float, str))
    return plain or type(value) in (Tensor, nn.Parameter)


def _without_none(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_without_none(item) for item in value)
    return _NONE if value is None else value


def _with_none(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_with_none, value))
    return None if isinstance(value, str) and value == _NONE else value


@nonstrict_trace
def _traced(
    key: str, given: dict[str, Any], positional: int, constants: list[Tensor], settings: list[Any]
) -> list[Tensor]:
    """Return the outputs of edge work, or nothing if it runs as in PyG.

    A compiler runs this function with tensors that have no values, and records the operators. It
    traces again when one of the ``settings`` changes. AOTAutograd runs the function again, perhaps
    with less knowledge of sizes, and must get what the compiler got.
    """
    values = {name: _with_none(value) for name, value in given.items()}
    args = [values.pop(str(number)) for number in range(positional)]
    layer = _layers[key]
    graph = compilation()
    found = set[bool]() if graph is None else _found.setdefault(graph, {}).setdefault(key, set())
    again = any(isinstance(tensor, FunctionalTensor) for tensor in (*constants, *values.values()))
    if again and found == {False}:
        return []
    call = layer.graph_call(constants, args, values, again)
    found.add(call is not None)
    if call is None:
        return []
    name = f"{key}: {call.work.key()}"
    layer.works[name] = _works[name] = call.work
    layer.kept = call.work.analysis.kept
    return [*_EdgeWork.apply(name, call.edge_index, call.sizes, *call.tensors)]


class _EdgeWork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, edge_index: Tensor, sizes: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        work = _works[name]
        never_read = work.analysis.never_read
        sort = _operators.draw_and_sort_edges if work.is_random else _operators.sort_edges
        state = sort(name, edge_index, sizes)
        results = _operators.edge_forward(name, tensors, state, sizes)
        ctx.name, ctx.sizes = name, sizes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state, *(t for i, t in enumerate(tensors) if i not in never_read))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        state, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        results = iter(
            _operators.edge_backward(ctx.name, saved, state, gradients, ctx.sizes, needed)
        )
        return None, None, None, *(next(results) if needs else None for needs in needed)


_library = torch.library.Library("gact_graph_edges", "DEF")
_operators = torch.ops.gact_graph_edges

_library.define("sort_edges(str name, Tensor edge_index, SymInt[] sizes) -> Tensor")
_library.define(
    "draw_and_sort_edges(str name, Tensor edge_index, SymInt[] sizes) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "edge_forward(str name, Tensor[] tensors, Tensor state, SymInt[] sizes) -> Tensor[]"
)
_library.define(
    "edge_backward(str name, Tensor[] saved, Tensor state, Tensor?[] gradients, SymInt[] sizes,"
    " bool[] needed) -> Tensor[]"
)


def _sort_edges(name: str, edge_index: Tensor, sizes: Sequence[int]) -> Tensor:
    return _works[name].sort(edge_index, sizes)


def _edge_forward(
    name: str, tensors: Sequence[Tensor], state: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    return _works[name].forward(tensors, state, sizes)


def _edge_backward(
    name: str,
    saved: Sequence[Tensor],
    state: Tensor,
    gradients: Sequence[Tensor | None],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    return _works[name].backward(saved, state, gradients, sizes, needed)


for _name, _function in {
    "sort_edges": _sort_edges,
    "draw_and_sort_edges": _sort_edges,
    "edge_forward": _edge_forward,
    "edge_backward": _edge_backward,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("gact_graph_edges::sort_edges")
@torch.library.register_fake("gact_graph_edges::draw_and_sort_edges")
def _(name: str, edge_index: Tensor, sizes: Sequence[Any]) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.register_fake("gact_graph_edges::edge_forward")
def _(name: str, tensors: Sequence[Tensor], state: Tensor, sizes: Sequence[Any]) -> list[Tensor]:
    work = _works[name]
    return [
        tensors[0].new_empty(sizes[0] if output.of_edges else sizes[1], *row)
        for output, row in zip(work.outputs, work.results, strict=True)
    ]


@torch.library.register_fake("gact_graph_edges::edge_backward")
def _(
    name: str,
    saved: Sequence[Tensor],
    state: Tensor,
    gradients: Sequence[Tensor | None],
    sizes: Sequence[Any],
    needed: Sequence[bool],
) -> list[Tensor]:
    work = _works[name]
    like = next(gradient for gradient in gradients if gradient is not None)
    return [like.new_empty(work.shape_of(i, sizes)) for i, needs in enumerate(needed) if needs]


def of_graph(
    edge_index: Tensor,
    target: int,
    arguments: Arguments,
    constants: Sequence[Tensor],
    module: nn.Module,
    edge_work: EdgeWork,
    cutting: Cutting,
    report: Callable[[int], None],
) -> GraphCall:
    """Return a call while a compiler traces it.

    Args:
        edge_index: Edges [2, E], without values, as are all tensors here.
        target: The row of edge_index that holds the destinations.
        arguments: The arguments of the call.
        constants: The parameters and buffers of the module.
        module: The module whose code is the edge work.
        edge_work: Analyzes the module.
        cutting: Sorts and cuts the edges.
        report: Takes the number of blocks whenever the call runs.

    Raises:
        CannotBlock: The call cannot run in blocks.
    """
    device = arguments.tensors[0].device
    if torch.is_autocast_enabled(device.type):
        raise CannotBlock("is compiled under autocast")
    described = [*_described(arguments)]
    with without_modes():
        samples = replace(
            arguments,
            tensors=tuple(torch.zeros(shape, **kind) for shape, kind in described),
            num_destinations=1,
            num_sources=1,
        )
        analysis, found = edge_work.analysis(module, samples)
        positions = {id(t): i for i, t in enumerate([*module.parameters(), *module.buffers()])}
        if any(id(tensor) not in positions for _, tensor in found):
            raise CannotBlock("reads a tensor that is neither a parameter nor a buffer")
        samples = samples.with_constants(found)
        whole = {use.index for use in samples.uses if use.level == "whole"}
        shapes = (t.shape if i in whole else t.shape[1:] for i, t in enumerate(samples.tensors))
        work = GraphWork(
            analysis,
            samples.without_tensors(),
            edge_work.outputs(analysis),
            target,
            rows=tuple(map(tuple, shapes)),
            results=(),
            cutting=cutting,
            report=report,
        )
        results = work.of_one_edge(samples.tensors)
        work = replace(work, results=tuple(tuple(result.shape[1:]) for result in results))
    read = [constants[positions[id(tensor)]] for _, tensor in found]
    sizes = [edge_index.size(1), arguments.num_destinations, arguments.num_sources]
    return GraphCall(work, edge_index, [*arguments.tensors, *read], sizes)


def _described(arguments: Arguments) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Yield the shape of one row of each tensor, or of the whole tensor, and its type."""
    whole = {use.index for use in arguments.uses if use.level == "whole"}
    for i, t in enumerate(arguments.tensors):
        shape = tuple(map(int, t.shape if i in whole else (1, *t.shape[1:])))
        yield shape, {"dtype": t.dtype, "device": t.device, "requires_grad": t.requires_grad}
