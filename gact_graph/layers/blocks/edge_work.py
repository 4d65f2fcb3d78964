"""Edge work that runs in blocks where it can: prepared from its arguments, then run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gact_graph.layers.blocks.analyses import Analyses
from gact_graph.layers.blocks.analysis import BaselineSaves, needs_graph
from gact_graph.layers.blocks.arguments import Arguments, CannotBlock
from gact_graph.layers.blocks.call import BlockedCall
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.function import run_in_blocks
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.recompute import reuse
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support import current
from gact_graph.support.run_state import RunState


class Cutting(Protocol):
    """How edges are sorted and cut into blocks."""

    def order(self, edge_index: Tensor, target: int, num_destinations: int) -> Order:
        """The order of these edges; raises an IndexError as :class:`Order` does."""
        ...

    def size_for(self, arguments: Arguments, summed: int | None = None) -> int:
        """Edges of a block; ``summed`` is the index of a tensor of which no edge has a row."""
        ...


class Prepared(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: The call.
        edge_index: Its edges [2, E].
        arguments: Its arguments.
        constants: The tensors that the layer reads beside them, by their paths.
    """

    call: BlockedCall
    edge_index: Tensor
    arguments: Arguments
    constants: list[tuple[str, Tensor]]


class Ran(NamedTuple):
    """Edge work that has run in blocks.

    Attributes:
        result: Its result.
        blocks: The number of blocks.
    """

    result: Tensor
    blocks: int


class EdgeWork:
    """One function of edges, and its analyses.

    Args:
        edge_function: The function that runs for each block.
        methods: The methods of a layer that it calls.
    """

    def __init__(self, edge_function: EdgeFunction, methods: frozenset[str] = frozenset()) -> None:
        self._edge_function = edge_function
        self._analyses = Analyses(edge_function, methods)

    def prepare(
        self, module: Any, edge_index: Tensor, target: int, arguments: Arguments, cut: Cutting
    ) -> Prepared:
        """Find out whether and how a call can run in blocks.

        Args:
            module: The layer or function of the user's.
            edge_index: [2, E] of int64, with edges.
            target: The row of edge_index that holds the destinations.
            arguments: The call's.
            cut: How the edges are cut.

        Raises:
            CannotBlock: It cannot.
        """
        analysis, constants = self._analyses.of(module, arguments)
        try:
            order = cut.order(edge_index, target, arguments.num_destinations)
        except IndexError as error:
            raise CannotBlock(str(error)) from error
        if order.num_sources > arguments.num_sources:
            raise CannotBlock(
                f"has an edge from node {order.num_sources - 1}, but only "
                f"{arguments.num_sources} source nodes"
            )
        weighted_sum, attention = analysis.weighted_sum, analysis.attention
        x_j = None if weighted_sum is None else arguments.tensors[weighted_sum.index]
        summed = None
        if weighted_sum is not None and x_j is not None and not makes_messages(x_j.device):
            summed = weighted_sum.index
        size = cut.size_for(arguments, summed)
        by_source = attention is not None or (x_j is not None and x_j.requires_grad)
        if by_source and needs_graph(arguments, [tensor for _, tensor in constants]):
            # Now, because in backward there is less memory left to sort them.
            _ = order.by_source
        result = Output(None, self._edge_function.of_edges)
        call = BlockedCall(
            analysis,
            arguments.without_tensors(),
            order,
            order.cuts.blocks(size),
            size,
            (result, *(Output(name, True) for name in analysis.kept)),
            RunState({t.device.type for t in arguments.tensors}),
        )
        return Prepared(call, edge_index, arguments, constants)

    def run(
        self, prepared: Prepared, module: Any, session: current.Capture | None, name: str
    ) -> Ran:
        """Run a call that was prepared.

        Args:
            prepared: The call.
            module: The user's module, which gets the tensors that the call leaves in attributes.
            session: The session that captures the call, if there is one.
            name: The name of the operation in the slots of saved tensors.

        Raises:
            CannotBlock: It cannot run in blocks after all. The random state is restored.
        """
        call, arguments = prepared.call, prepared.arguments
        try:
            if session is None:
                constants = [tensor for _, tensor in prepared.constants]
                result = run_in_blocks(call, arguments.tensors, constants, module)
            else:
                result = _captured(prepared, module, session, name)
                messages = result.nbytes * prepared.edge_index.size(1)
                session.stock_makes(messages // max(1, arguments.num_destinations))
        except CannotBlock:
            call.run_state.restore_random_state()
            raise
        return Ran(result, len(call.blocks))


def _captured(prepared: Prepared, module: Any, session: current.Capture, name: str) -> Tensor:
    """Run a call whose saved tensors a session captures, and count the bytes of stock autograd."""
    call, edge_index, arguments, constants = prepared
    session.sizes.add(edge_index, [arguments.num_sources, arguments.num_destinations])
    named = dict(constants) | dict(zip(arguments.names, arguments.tensors, strict=True))
    beside = [tensor for _, tensor in constants]
    differentiates = needs_graph(arguments, beside)
    baseline = call.analysis.baseline if differentiates else BaselineSaves()
    of_stock = {arguments.names[index]: arguments.tensors[index] for index in baseline.arguments}
    of_stock |= dict(constants[number] for number in baseline.constants)
    extra = named.keys() - of_stock.keys()
    with session.trace.standing_for(name, named, extra) as operation:
        with current.capture_disabled():
            result = run_in_blocks(call, arguments.tensors, beside, module)
        if baseline.edge_index:
            of_stock["edge_index"] = edge_index
        if baseline.result:
            of_stock["result"] = result
        of_stock |= {attribute: getattr(module, attribute) for attribute in baseline.attributes}
        nbytes = baseline.nbytes(edge_index.size(1), arguments.num_destinations)
        session.stock_saves(operation, nbytes, of_stock)
    return result


def in_blocks(name: str, run: Callable[[bool], Ran]) -> Ran | str | None:
    """Runs edge work in blocks, if it can.

    Where a layer is computed again in backward, its edge work runs as it did in forward.

    Args:
        name: The name of the edge work.
        run: Runs it, or raises CannotBlock. It is told whether this is the first run.

    Returns:
        What ``run`` gave; or why it cannot, None where it did not run in blocks the first time.

    Raises:
        RuntimeError: It ran in blocks the first time, and cannot now.
    """
    edge_calls = reuse.current()
    before = None if edge_calls is None else edge_calls.next().in_blocks
    if before is False:
        return None
    try:
        return run(before is None)
    except CannotBlock as reason:
        if before:
            raise RuntimeError(
                f"Expected {name} to do in backward what it did in forward (got: it {reason}); "
                "leave the layer as it is until backward has run"
            ) from reason
        # Not the exception: with it, this call's frames and tensors would live until a collection.
        return str(reason)
