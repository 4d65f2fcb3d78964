"""Keeps a wrapped model within a memory budget: it chooses the way to train, and steps down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from gact_graph.adaptive.state_checks import check_keys
from gact_graph.api.budget.advice import smallest_way
from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.trying import estimate_call
from gact_graph.api.budget.ways import STOCK, Way, ways
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.heap import LEAST_RETURNED, return_tensors
from gact_graph.support.progress import telling
from gact_graph.support.storage import tensors_in

_MOST_RETURNED = 4 << 20
_SHARE_RETURNED = 1024


def least_returned(memory: int) -> int:
    """The size in bytes from which freed tensors go back to the system at once, under a budget.

    Some dozen smaller ones may stay with the process, which is a few per cent of the budget.
    """
    return min(max(memory // _SHARE_RETURNED, LEAST_RETURNED), _MOST_RETURNED)


class MemoryBudgetError(RuntimeError):
    """No way to train fits the memory that was given to :func:`gact_graph.wrap`."""


class Budget:
    """Chooses the way at the first training call, and again for a larger graph than all before.

    Args:
        memory: The budget in bytes.
        config: The settings that all ways share.

    Attributes:
        way: The way that was chosen; None before the first training call.
        estimate: What it was chosen by.
    """

    def __init__(self, memory: int, config: Config) -> None:
        self.memory = memory
        self.way: Way | None = None
        self.estimate: Estimate | None = None
        self._config = replace(config, min_bytes=0)
        self._shapes: list[tuple[int, ...]] = []
        self._settled = GraphSize(0, 0)

    def prepare(self, patch: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Sees to it that the model trains in a way that fits, before a call of a method.

        Raises:
            MemoryBudgetError: None does.
            ValueError: The inputs do not tell the size of the graph.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]
        if shapes == self._shapes:
            return
        try:
            size = Miniature(args, kwargs).size
        except CannotShrink as reason:
            raise ValueError(
                f"Expected inputs that hold a graph, for memory= (got {reason}); give bits=, "
                "level= and blocks= instead"
            ) from reason
        if size.nodes > self._settled.nodes or size.edges > self._settled.edges:
            self._settle(patch, module, (args, kwargs), size)
        self._shapes = shapes

    def _settle(
        self, patch: CompressedForward, module: nn.Module, inputs: Any, size: GraphSize
    ) -> None:
        largest = GraphSize(
            max(size.nodes, self._settled.nodes), max(size.edges, self._settled.edges)
        )
        estimate = self.estimate
        if estimate is None:
            estimate = self._estimate(patch, module, inputs, largest)
        elif self.way is not None and not estimate.fits(self.way, largest):
            # What another graph takes tells little of one with more edges a node.
            estimate = self._estimate(patch, module, inputs, largest)
        if self.way is None or not estimate.fits(self.way, largest):
            way = estimate.choose()
            if way is None:
                raise MemoryBudgetError(
                    f"Expected a way to train in {format_bytes(self.memory)} of memory (got "
                    f"{largest.nodes:,} nodes and {largest.edges:,} edges, for which "
                    f"{smallest_way(estimate)}); give that much, a smaller model or "
                    "smaller batches"
                )
            self._take(patch, way)
        self._settled = largest

    def _estimate(
        self, patch: CompressedForward, module: nn.Module, inputs: Any, size: GraphSize
    ) -> Estimate:
        with telling("estimating what a training step takes in memory"):
            self.estimate = estimate_call(
                module, patch.attribute, inputs, self._config, self.memory, size.nodes, size.edges
            )
        return self.estimate

    def _take(self, patch: CompressedForward, way: Way) -> None:
        model = patch.first.module
        assert model is not None
        self.way = way
        device = next(model.parameters()).device
        if device.type == "cpu":
            return_tensors(least_returned(self.memory))
        config = None if way == STOCK else Config(**vars(self._config) | way.options)
        patch.controller.configure(config, model)

    def state_dict(self) -> dict[str, Any] | None:
        """The way, as plain values; None before it is chosen."""
        return None if self.way is None else asdict(self.way)

    def load_state_dict(self, state: Mapping[str, Any] | None, patch: CompressedForward) -> None:
        """Takes the way of another run.

        Raises:
            ValueError: There is no such way.
        """
        if state is None:
            return
        check_keys("state['way']", state, ("level", "bits", "blocks"))
        way = Way(**state)
        model = patch.first.module
        assert model is not None
        if way not in ways(next(model.parameters()).device.type):
            raise ValueError(f"Expected state['way'] to be a way to train here (got {dict(state)})")
        self._take(patch, way)
