"""Keeps a wrapped model within a memory budget: it chooses the way to train, and steps down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gact_graph.adaptive.state_checks import check_keys
from gact_graph.api.budget.estimate import STOCK, Estimate, Way, ways
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import resident_bytes
from gact_graph.support.progress import telling
from gact_graph.support.storage import tensors_in


@dataclass
class _Settled:
    """For what calls of one method the way was seen to fit.

    Attributes:
        size: The largest graph.
        shapes: Of the tensors of the last call.
        estimate: What a step takes; None as long as that of another method told enough.
    """

    size: GraphSize = GraphSize(0, 0)  # noqa: RUF009
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    estimate: Estimate | None = None


class MemoryBudgetError(RuntimeError):
    """No way to train fits the memory that was given to ``gact_graph.wrap``."""


class Budget:
    """Chooses the way at the first training call, and again for a larger graph than all before.

    Args:
        memory: The budget in bytes.
        config: The settings that all ways share.

    Attributes:
        way: The way that was chosen; None before the first training call.
    """

    def __init__(self, memory: int, config: Config) -> None:
        self.memory = memory
        self.way: Way | None = None
        self._config = replace(config, min_bytes=0)
        self._methods: dict[str, _Settled] = {}
        self._grown = 0  # what estimates have added to the process for good

    def prepare(self, patch: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Sees to it that the model trains in a way that fits, before a call of a method.

        Raises:
            MemoryBudgetError: None does.
            ValueError: The inputs do not tell the size of the graph.
        """
        patch.controller.owner.followed = True
        settled = self._methods.setdefault(patch.attribute, _Settled())
        shapes = [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]
        if shapes == settled.shapes:
            return
        try:
            size = Miniature(args, kwargs).size
            if size.nodes > settled.size.nodes or size.edges > settled.size.edges:
                self._settle(settled, patch, module, (args, kwargs), size)
        except CannotShrink as reason:
            raise ValueError(
                f"Expected inputs that hold a graph, for memory= (got {reason}); give bits=, "
                "level= and blocks= instead"
            ) from reason
        settled.shapes = shapes

    def _settle(
        self,
        settled: _Settled,
        patch: CompressedForward,
        module: nn.Module,
        inputs: Any,
        size: GraphSize,
    ) -> None:
        largest = GraphSize(
            max(size.nodes, settled.size.nodes), max(size.edges, settled.size.edges)
        )
        # Of several methods, what the first one takes is told for all, as long as that fits.
        estimate = settled.estimate or next(
            (one.estimate for one in self._methods.values() if one.estimate is not None), None
        )
        if estimate is None or (self.way is not None and not estimate.fits(self.way, largest)):
            # What another graph takes says little of one with more edges a node.
            estimate = settled.estimate = self._estimate(patch, module, inputs, largest)
        if self.way is None or not estimate.fits(self.way, largest):
            way = estimate.choose()
            if way is None:
                missing = estimate.budget_for(estimate.smallest()[1]) - (estimate.memory or 0)
                raise MemoryBudgetError(
                    f"Expected a way to train in {format_bytes(self.memory)} of memory (got "
                    f"{largest.nodes:,} nodes and {largest.edges:,} edges, for which "
                    f"{estimate.smallest_as_text()}: {format_bytes(missing)} are missing); give "
                    "that much more, a smaller model or smaller batches"
                )
            self._take(patch, way)
        settled.size = largest

    def _estimate(
        self, patch: CompressedForward, module: nn.Module, inputs: Any, size: GraphSize
    ) -> Estimate:
        before = resident_bytes()
        with telling("estimating what a training step takes in memory"):
            estimate = estimate_call(
                *(module, patch.attribute, inputs, self._config),
                *(max(1, self.memory - self._grown), size.nodes, size.edges),
                first=self.way,
                choosing=True,
            )
        if before is not None and next(module.parameters()).device.type == "cpu":
            self._grown += max(0, (resident_bytes() or 0) - before)
        return estimate

    def _take(self, patch: CompressedForward, way: Way) -> None:
        model = patch.first.module
        assert model is not None
        self.way = way
        device = next(model.parameters()).device
        if device.type == "cpu":
            memory_policy.limit(self.memory)
        config = None if way == STOCK else Config(**vars(self._config) | way.options)
        patch.controller.configure(config, model)

    def state_dict(self) -> dict[str, Any] | None:
        """The way, as plain values; None before it is chosen."""
        return None if self.way is None else self.way._asdict()

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
