"""Edge work that runs in blocks where it can: prepared from its arguments, then run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock
from gact_graph.layers.blocks.call import BlockedCall, OtherSteps
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.findings import Case, Findings
from gact_graph.layers.blocks.function import run_in_blocks
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.outputs import Output
from gact_graph.layers.blocks.probe import Probed
from gact_graph.layers.blocks.stock_saves import StockSaves
from gact_graph.layers.recompute import reuse
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support import current
from gact_graph.support.replica import CannotReplicate, Snapshot
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
        probed: What was found out about it.
        stock: What stock autograd would save in it; None if that cannot be told.
    """

    call: BlockedCall
    edge_index: Tensor
    arguments: Arguments
    probed: Probed
    stock: StockSaves | None


class Ran(NamedTuple):
    """Edge work that has run in blocks.

    Attributes:
        result: What it gave.
        blocks: How many.
        counted: Whether the session was told what stock autograd would have saved.
    """

    result: Tensor
    blocks: int
    counted: bool


class EdgeWork:
    """One function of edges, and what was found out about it.

    Args:
        edge_function: What runs for each block.
    """

    def __init__(self, edge_function: EdgeFunction) -> None:
        self._edge_function = edge_function
        self._findings = Findings(edge_function)

    def prepare(
        self, module: nn.Module, edge_index: Tensor, target: int, arguments: Arguments, cut: Cutting
    ) -> Prepared:
        """Finds out whether and how a call can run in blocks.

        Args:
            module: What the function runs with.
            edge_index: [2, E] of int64, with edges.
            target: The row of edge_index that holds the destinations.
            arguments: The call's.
            cut: How the edges are cut.

        Raises:
            CannotBlock: It cannot.
        """
        try:
            snapshot = Snapshot(module)
            case = Case(snapshot, arguments, target)
            probed = self._findings.probed(case)
        except CannotReplicate as error:
            raise CannotBlock(str(error)) from error
        try:
            order = cut.order(edge_index, target, arguments.num_destinations)
        except IndexError as error:
            raise CannotBlock(str(error)) from error
        if order.num_sources > arguments.num_sources:
            raise CannotBlock(
                f"has an edge from node {order.num_sources - 1}, but only "
                f"{arguments.num_sources} source nodes"
            )
        weighted_sum = self._findings.weighted_sum(case, probed)
        x_j = None if weighted_sum is None else arguments.tensors[weighted_sum.index]
        summed = None
        if weighted_sum is not None and x_j is not None and not makes_messages(x_j.device):
            summed = weighted_sum.index
        size = cut.size_for(arguments, summed)
        blocks = order.cuts.blocks(size, probed.edgeless)
        attention = self._findings.attention(case, probed)
        if attention is not None and not self._findings.computes(
            case, probed, attention, order, blocks[0]
        ):
            attention = None
        learns = attention is not None or (x_j is not None and x_j.requires_grad)
        if learns and case.learning is not None:
            # Now, because in backward there is less memory left to sort them.
            _ = order.by_source
        result = Output(None, self._edge_function.of_edges)
        call = BlockedCall(
            snapshot,
            self._edge_function,
            arguments.without_tensors(),
            order,
            blocks,
            size,
            (result, *(Output(name, True) for name in probed.kept)),
            probed.steps,
            self._findings.never_read(case, probed),
            weighted_sum,
            attention,
            RunState({t.device.type for t in arguments.tensors}),
        )
        stock = self._findings.stock_saves(case, probed)
        return Prepared(call, edge_index, arguments, probed, stock)

    def run(
        self, prepared: Prepared, module: Any, session: current.Capture | None, name: str
    ) -> Ran:
        """Runs a call that was prepared.

        Args:
            prepared: The call.
            module: The user's module, which gets the tensors that the call leaves in attributes.
            session: What captures the call, if something does.
            name: The name of the operation in the slots of what is saved.

        Raises:
            CannotBlock: It cannot run in blocks after all. The random state is what it was.
        """
        call, arguments = prepared.call, prepared.arguments
        try:
            if session is None:
                result = run_in_blocks(call, arguments.tensors, module)
            else:
                result = _captured(prepared, module, session, name)
                messages = result.nbytes * prepared.edge_index.size(1)
                session.stock_makes(messages // max(1, arguments.num_destinations))
        except CannotBlock as reason:
            call.run_state.restore_random_state()
            if isinstance(reason, OtherSteps):
                self._findings.refute(prepared.probed, str(reason))
            raise
        return Ran(result, len(call.blocks), session is not None and prepared.stock is not None)


def _captured(prepared: Prepared, module: Any, session: current.Capture, name: str) -> Tensor:
    """Runs a call whose saved tensors a session captures, and tells it what stock would save."""
    call, edge_index, arguments, _, stock = prepared
    session.sizes.add(edge_index, [arguments.num_sources, arguments.num_destinations])
    named = dict(zip(arguments.names, arguments.tensors, strict=True))
    if stock is None:
        with session.trace.standing_for(name, named), current.unseen():
            return run_in_blocks(call, arguments.tensors, module)
    of_stock = {arguments.names[index]: arguments.tensors[index] for index in stock.arguments}
    only_here = named.keys() - of_stock.keys()
    with session.trace.standing_for(name, named, only_here) as operation:
        with current.unseen():
            result = run_in_blocks(call, arguments.tensors, module)
        if stock.edge_index:
            of_stock["edge_index"] = edge_index
        if stock.result:
            of_stock["result"] = result
        of_stock |= {attribute: getattr(module, attribute) for attribute in stock.attributes}
        nbytes = stock.nbytes(edge_index.size(1), arguments.num_destinations)
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
