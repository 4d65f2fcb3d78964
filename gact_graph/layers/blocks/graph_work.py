"""The edge work of a layer in a compiled graph, without its tensors: forward and backward.

The edges stay outside of the graph: ``GraphWork.sort`` returns a number, by which forward and
backward find them in order, and a seed for layers that draw random numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from gact_graph.support.torch_private import without_modes

_NO_SEED = -1

_order_numbers = itertools.count()
_orders: weakref.WeakValueDictionary[int, Order] = weakref.WeakValueDictionary()
_numbers_of: weakref.WeakKeyDictionary[Order, int] = weakref.WeakKeyDictionary()

_held = WeakTensorKeyDictionary()
"""The orders and the works that a backward will need, by the tensors that graphs save for it."""


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
        dtypes: The dtype of each tensor.
        results: The shape of a row of each output.
        result_dtypes: The dtype of each output.
        cutting: Sorts and cuts the edges.
        report: Takes the number of blocks of a call.
    """

    analysis: LayerAnalysis
    arguments: Arguments
    outputs: tuple[Output, ...]
    target: int
    rows: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[int, ...], ...]
    result_dtypes: tuple[torch.dtype, ...]
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
            *(self.arguments.uses, self.outputs, self.target),
            *(self.rows, self.dtypes, self.results, self.result_dtypes),
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
        _held[state] = order, self  # graphs find both by name or number only
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
            given[0].new_full((), math.nan, dtype=dtype).expand(self.shape_of(number, sizes))
            if number in self.analysis.never_read
            else next(left).contiguous()
            for number, dtype in enumerate(self.dtypes)
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
        whole = samples.whole
        shapes = (t.shape if i in whole else t.shape[1:] for i, t in enumerate(samples.tensors))
        work = GraphWork(
            analysis,
            samples.without_tensors(),
            edge_work.outputs(analysis),
            target,
            rows=tuple(map(tuple, shapes)),
            dtypes=tuple(tensor.dtype for tensor in samples.tensors),
            results=(),
            result_dtypes=(),
            cutting=cutting,
            report=report,
        )
        results = work.of_one_edge(samples.tensors)
        work = replace(
            work,
            results=tuple(tuple(result.shape[1:]) for result in results),
            result_dtypes=tuple(result.dtype for result in results),
        )
    read = [constants[positions[id(tensor)]] for _, tensor in found]
    sizes = [edge_index.size(1), arguments.num_destinations, arguments.num_sources]
    return GraphCall(work, edge_index, [*arguments.tensors, *read], sizes)


def _described(arguments: Arguments) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """Yield the shape of one row of each tensor, or of the whole tensor, and its type."""
    whole = arguments.whole
    for i, t in enumerate(arguments.tensors):
        shape = tuple(map(int, t.shape if i in whole else (1, *t.shape[1:])))
        yield shape, {"dtype": t.dtype, "device": t.device, "requires_grad": t.requires_grad}


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
