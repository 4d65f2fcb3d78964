"""What is found out about a layer on a small graph, once for each of its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.layers.blocks.arguments import Arguments, BlockFailed, CannotBlock
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction, edge_update, propagate
from gact_graph.layers.blocks.find_attention import computes, find_attention
from gact_graph.layers.blocks.never_read import never_read
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.probe import Probed, probe
from gact_graph.layers.blocks.sample import Sample, sample_of
from gact_graph.layers.blocks.state import Known, state_of
from gact_graph.layers.blocks.stock_saves import StockSaves, stock_saves
from gact_graph.layers.blocks.sums.find import find_weighted_sum
from gact_graph.layers.blocks.sums.weighted_sum import WeightedSum
from gact_graph.support.current import unseen
from gact_graph.support.replica import Snapshot


class Learning(NamedTuple):
    """For each tensor of a call, and for each parameter, whether it needs a gradient."""

    tensors: tuple[bool, ...]
    parameters: tuple[bool, ...]


@dataclass(frozen=True)
class Case:
    """A layer and the arguments of one call.

    Attributes:
        snapshot: The layer.
        arguments: The arguments.
        target: The row of edge_index that holds the destinations.
    """

    snapshot: Snapshot
    arguments: Arguments
    target: int

    @cached_property
    def state(self) -> Any:
        """What the layer's doings depend on."""
        return state_of(self.snapshot.parts[0], self.arguments)

    @cached_property
    def learning(self) -> Learning | None:
        """What needs a gradient; None if nothing does, or if none is asked for."""
        module: Any = self.snapshot.parts[0]
        found = Learning(
            tuple(t.requires_grad for t in self.arguments.tensors),
            tuple(p.requires_grad for p in module.parameters()),
        )
        return found if torch.is_grad_enabled() and any(map(any, found)) else None

    def sample(self) -> Sample:
        """A small graph with rows of the arguments' tensors."""
        return sample_of(self.arguments, self.target)


class Findings:
    """What is known of one layer's ``propagate`` or ``edge_updater``.

    Args:
        edge_function: What runs for each block.
    """

    def __init__(self, edge_function: EdgeFunction) -> None:
        self._edge_function = edge_function
        self._probed = Known[Probed | str]()
        self._never_read = Known[frozenset[int]]()
        self._stock_saves = Known[StockSaves | None]()
        self._weighted_sums = Known[WeightedSum | None]()
        self._attentions = Known[Attention | None]()

    def probed(self, case: Case) -> Probed:
        """What the layer does in blocks.

        Raises:
            CannotBlock: It cannot run in blocks.
        """

        def find() -> Probed | str:
            try:
                with _apart():
                    return probe(case.snapshot, self._edge_function, case.sample())
            except BlockFailed:  # by this call's fault perhaps: not remembered
                raise
            except CannotBlock as reason:
                return str(reason)

        found = self._probed.get(case.state, find)
        if isinstance(found, str):
            raise CannotBlock(found)
        return found

    def refute(self, probed: Probed, reason: str) -> None:
        """What was found turned out to be wrong: the layer runs as PyG has it from now on."""
        self._probed.replace(probed, reason)

    def never_read(self, case: Case, probed: Probed) -> frozenset[int]:
        """Indices of the tensors whose values backward does not read."""
        module, learning = case.snapshot.parts[0], case.learning
        if learning is None:
            return frozenset()

        def find() -> frozenset[int]:
            edge_function = self._edge_function.in_backward(module)
            with _apart():
                learns = [*learning.tensors]
                return never_read(case.snapshot, edge_function, case.sample(), learns, probed.kept)

        return self._never_read.get((case.state, learning), find)

    def stock_saves(self, case: Case, probed: Probed) -> StockSaves | None:
        """What stock autograd would save in the call; None if it cannot be told."""
        learning = case.learning
        if learning is None:
            return StockSaves()

        def find() -> StockSaves | None:
            with _apart():
                sample = case.sample()
                return stock_saves(
                    case.snapshot, self._edge_function, sample, learning.tensors, probed.kept
                )

        return self._stock_saves.get((case.state, learning), find)

    def weighted_sum(self, case: Case, probed: Probed) -> WeightedSum | None:
        """The sum that is the layer's result; None if that is something else."""

        def find() -> WeightedSum | None:
            if self._edge_function != propagate:  # a copy is equal, and not the same
                return None
            with _apart():
                return find_weighted_sum(case.snapshot, case.arguments, case.sample(), probed.kept)

        contiguous = tuple(t.is_contiguous() for t in case.arguments.tensors)
        return self._weighted_sums.get((case.state, contiguous), find)

    def attention(self, case: Case, probed: Probed) -> Attention | None:
        """The attention that is the layer's result; None if that is something else."""

        def find() -> Attention | None:
            if self._edge_function not in (edge_update, propagate):
                return None
            given = case.snapshot, case.arguments, case.sample(), probed
            with _apart():
                return find_attention(self._edge_function, *given)

        contiguous = tuple(t.is_contiguous() for t in case.arguments.tensors)
        module: Any = case.snapshot.parts[0]
        # What learns has a number, which depends on what else does.
        learns = tuple(p.requires_grad for p in module.parameters())
        return self._attentions.get((case.state, contiguous, learns), find)

    def computes(
        self, case: Case, probed: Probed, attention: Attention, order: Order, block: Block
    ) -> bool:
        """Whether the layer computes this attention in this call, too."""
        edge_function, snapshot = self._edge_function, case.snapshot
        with _apart():
            return computes(
                attention, edge_function, snapshot, case.arguments, order, block, probed
            )


@contextmanager
def _apart() -> Iterator[None]:
    """Within: no session and no saved-tensor hook sees what a layer does while it is tried out."""
    with unseen(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        yield
