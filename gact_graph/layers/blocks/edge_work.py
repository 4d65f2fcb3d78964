"""The edge work of a layer, which runs in blocks where they give the rows of the whole graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gact_graph.layers.blocks.analysis import BaselineSaves, LayerAnalysis, analyze
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, EdgeFunction
from gact_graph.layers.blocks.call import BlockedCall, Output
from gact_graph.layers.blocks.constant_sums import ConstantSums, KeptSums
from gact_graph.layers.blocks.cutting import Cutting
from gact_graph.layers.blocks.function import run_in_blocks
from gact_graph.layers.recompute import runs
from gact_graph.layers.recompute.structure import Structure
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support import current
from gact_graph.support.reach import Reach, Unknowable
from gact_graph.support.run_state import RunState
from gact_graph.support.torch_private import has_global_hooks

_CACHED_ANALYSES = 512

_NEW_STATES = 16
"""New states in a row after which a layer counts as changing its state at each call."""

_known: OrderedDict[Hashable, LayerAnalysis | str] = OrderedDict()


Report = Callable[[str, "int | None", "str | None"], None]
"""Takes the way in which a call ran, its number of blocks, and the reason to run as in PyG."""


class EdgeWork:
    """The edge work of one layer, or of one function of the user.

    Layers of one class with equal settings, and with tensors of equal shapes, share analyses.

    Args:
        edge_function: The function that runs for each block.
    """

    def __init__(self, edge_function: EdgeFunction) -> None:
        self.edge_function = edge_function
        self._new_in_a_row = 0
        self._last: Hashable = None

    def run(
        self,
        module: Any,
        edge_index: Tensor,
        target: int,
        arguments: Arguments,
        cutting: Cutting,
        session: current.Capture | None,
    ) -> tuple[Tensor, int]:
        """Run a call in blocks, and return its result and their number.

        Args:
            module: The layer or function of the user. A layer gets the tensors that the call leaves
                in attributes.
            edge_index: Edges [2, E] of int64, where E > 0.
            target: The row of edge_index that holds the destinations.
            arguments: The arguments of the call.
            cutting: Sorts and cuts the edges.
            session: The session that captures the call; None for no session.

        Raises:
            CannotBlock: The call cannot run in blocks. The random state is restored.
        """
        # Operations of this library are not those of the model.
        with nullcontext() if session is None else session.trace.paused():
            analysis, constants = self.analysis(module, arguments)
            product = _product(analysis, arguments, session)
            try:
                order = cutting.order(
                    edge_index, target, arguments.num_destinations, arguments.num_sources
                )
            except IndexError as error:
                raise CannotBlock(str(error)) from error
            by_source = analysis.attention is not None
            if analysis.weighted_sum is not None:
                x = arguments.tensors[analysis.weighted_sum.index]
                by_source = by_source or x.requires_grad
            size = edges_per_block(analysis, arguments, cutting)
            named = dict(constants) | dict(zip(arguments.names, arguments.tensors, strict=True))
            arguments = arguments.with_constants(constants)
            if arguments.needs_graph and any(t.is_inference() for t in arguments.tensors):
                raise CannotBlock("reads an inference tensor, which autograd does not save")
            if by_source and arguments.needs_graph:
                # Now, because in backward there is less memory left to sort the edges.
                _ = order.by_source
            call = BlockedCall(
                analysis,
                arguments.without_tensors(),
                order,
                order.blocks(size),
                size,
                self.outputs(analysis),
                # An edge function that draws otherwise does not run in blocks.
                RunState({t.device.type for t in arguments.tensors}, of_torch=True),
            )
            try:
                if session is None:
                    out = run_in_blocks(call, arguments.tensors, module)
                else:
                    sums = _constant_sums(call, arguments.tensors, product, session, cutting.sums)
                    out = self._captured(
                        call, product, sums, edge_index, arguments, named, module, session
                    )
                    messages = out.nbytes * edge_index.size(1)
                    session.count_unallocated(messages // max(1, arguments.num_destinations))
            except CannotBlock:
                call.run_state.restore_random_state()
                raise
            return out, len(call.blocks)

    def outputs(self, analysis: LayerAnalysis) -> tuple[Output, ...]:
        """Return the outputs of a call."""
        result = Output(None, self.edge_function.of_edges)
        return result, *(Output(name, True) for name in analysis.kept)

    def analysis(
        self, module: Any, arguments: Arguments
    ) -> tuple[LayerAnalysis, list[tuple[str, Tensor]]]:
        """Return the analysis for a call, and the constants that the layer reads, by path.

        Raises:
            CannotBlock: The call cannot run in blocks.
        """
        if has_global_hooks():  # a trace would run them once
            raise CannotBlock("runs under a hook on all modules")
        try:
            # A structure is compared as text, beside the values inside.
            others = [o for o in arguments.others.values() if not isinstance(o, Structure)]
            reach = Reach([module, *others], self.edge_function.methods)
        except Unknowable as reason:
            raise CannotBlock(str(reason)) from reason
        key = self.edge_function, _properties(arguments), reach.key
        analysis = _known.get(key)
        if analysis is None:
            analysis = self._analyze(key, module, arguments, reach)
        else:
            self._new_in_a_row = 0
        if isinstance(analysis, str):
            raise CannotBlock(analysis)
        return analysis, [reach.tensors[number] for number in analysis.constants]

    def _analyze(
        self, key: Hashable, module: Any, arguments: Arguments, reach: Reach
    ) -> LayerAnalysis | str:
        changes = self._last is not None and self._last != key
        self._new_in_a_row += 1
        self._last = key
        if changes and self._new_in_a_row > _NEW_STATES:
            raise CannotBlock("has another state at each call")
        analysis: LayerAnalysis | str
        try:
            analysis = analyze(self.edge_function, module, arguments, reach)
        except CannotBlock as reason:
            analysis = str(reason)
        _known[key] = analysis
        while len(_known) > _CACHED_ANALYSES:
            _known.popitem(last=False)
        return analysis

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}

    def _captured(
        self,
        call: BlockedCall,
        product: current.Product | None,
        sums: ConstantSums | None,
        edge_index: Tensor,
        arguments: Arguments,
        named: dict[str, Tensor],
        module: Any,
        session: current.Capture,
    ) -> Tensor:
        """Run a call in a session, and count the bytes that stock autograd would save."""
        session.add_sizes(edge_index, [arguments.num_sources, arguments.num_destinations])
        baseline = call.analysis.baseline if arguments.needs_graph else BaselineSaves()
        of_stock = {arguments.names[i]: arguments.tensors[i] for i in baseline.inputs}
        extra = named.keys() - of_stock.keys()
        gathered: set[str] = set()
        if not self.edge_function.of_edges:
            gathered |= {arguments.names[index] for index in arguments.rows_of_nodes}
        name = self.edge_function.name
        with session.trace.standing_for(name, named, extra, gathered) as operation:
            with current.capture_disabled():
                if sums is None:
                    result = run_in_blocks(call, arguments.tensors, module, product)
                else:
                    result = sums.values() if product is None else sums.times(product.weight)
            made = {"edge_index": edge_index, "result": result}
            for other in baseline.others:
                of_stock[other] = made[other] if other in made else getattr(module, other)
            nbytes = baseline.nbytes(edge_index.size(1), arguments.num_destinations)
            session.count_baseline(operation, nbytes, of_stock)
        if len(call.outputs) == 1 and not call.outputs[0].of_edges:
            session.has_summed(
                operation.label, result, lambda: call.again(arguments.tensors, product)
            )
        return result


def edges_per_block(analysis: LayerAnalysis, arguments: Arguments, cutting: Cutting) -> int:
    """Return the number of edges of a block of a call."""
    device, weighted_sum = arguments.tensors[0].device, analysis.weighted_sum
    summed = None if weighted_sum is None or makes_messages(device) else weighted_sum.index
    return cutting.edges_per_block(arguments.row_bytes(summed), device)


def _product(
    analysis: LayerAnalysis, arguments: Arguments, session: current.Capture | None
) -> current.Product | None:
    """Return the product of which a call sums the rows, if the product has no memory yet.

    Where the call needs the product itself, it gets memory.
    """
    if session is None:
        session = current.current()
        if session is not None:
            session.settle()
        return None
    weighted_sum = analysis.weighted_sum
    if weighted_sum is not None and weighted_sum.sums_products(arguments, analysis.never_read):
        product = session.product_of(arguments.tensors[weighted_sum.index])
        if product is not None:
            return product
    session.settle()
    return None


def _constant_sums(
    call: BlockedCall,
    tensors: Sequence[Tensor],
    product: current.Product | None,
    session: current.Capture,
    cache: KeptSums,
) -> ConstantSums | None:
    """Return the constant sums that are the result of a call, or are multiplied in it, if any.

    Args:
        call: The call.
        tensors: Its tensors.
        product: The product of which the call sums the rows, if that has no memory.
        session: The session.
        cache: Sums of earlier calls.
    """
    weighted_sum = call.analysis.weighted_sum
    if weighted_sum is None or weighted_sum.weights.is_random or len(call.outputs) > 1:
        return None
    if runs.current() is not None or not current.are_innermost():
        return None  # a layer that is computed again in backward, by the library or a checkpoint
    if product is None and not cache.is_active:
        return None  # without a gradient, there is nothing else to gain
    x = tensors[weighted_sum.index] if product is None else product.x
    others = (t for i, t in enumerate(tensors) if i != weighted_sum.index)
    if x.requires_grad or any(t.requires_grad for t in others) or not session.is_input(x):
        return None
    weights = call.weights(weighted_sum, tensors)
    sums = cache.find(x, weights, call.order, to_product=product is not None)
    if product is None and sums.kept is None:
        return None
    if sums.kept is not None:
        session.add_owned(sums.kept)
    return sums


def _properties(arguments: Arguments) -> Hashable:
    """Return the properties of arguments on which the behavior of a layer depends."""
    device = arguments.tensors[0].device.type
    whole = arguments.whole
    return (
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.get_default_dtype(), torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        arguments.uses,
        tuple(arguments.others),
        tuple(
            (
                *(t.dtype, t.device, t.requires_grad, t.is_contiguous()),
                (t.shape, t.stride()) if i in whole else t.shape[1:],
            )
            for i, t in enumerate(arguments.tensors)
        ),
    )


def in_blocks(
    name: str, run: Callable[[bool], tuple[Tensor, int]], report: Report
) -> Tensor | None:
    """Run edge work in blocks, if possible; return None where it must run as in PyG.

    Where a layer is computed again in backward, its edge work runs as it did in forward.

    Args:
        name: The name of the edge work.
        run: Returns the result and the number of blocks, or raises CannotBlock. Its argument is
            True in the first run.
        report: Is called unless the edge work runs again as in PyG.

    Raises:
        RuntimeError: The edge work ran in blocks in forward, and cannot in backward.
    """
    layer_run = runs.current()
    before = None if layer_run is None else layer_run.next().in_blocks
    if before is False:
        return None
    try:
        result, blocks = run(before is None)
    except CannotBlock as reason:
        if before:
            raise RuntimeError(
                f"Expected {name} to do in backward what it did in forward (got: it {reason}); "
                "leave the layer as it is until backward has run"
            ) from reason
        report("stock", None, str(reason))
        session = current.current()
        if session is not None:
            session.settle()
        return None
    report("blocks", blocks, None)
    return result
