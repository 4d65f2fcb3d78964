"""The memory budget of a wrapped model: it chooses a strategy, and a smaller one when needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gact_graph.adaptive.state_checks import check_keys
from gact_graph.api.budget.estimate import STOCK, Estimate, Strategy, is_strategy
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import resident_bytes
from gact_graph.support.progress import log_if_slow
from gact_graph.support.storage import tensors_in


@dataclass
class _Accepted:
    """The calls of a method that the strategy is known to fit.

    Attributes:
        size: The largest graph.
        shapes: The shapes of the tensors in the last call.
        estimate: The estimate for this method; None while an estimate for another method suffices.
    """

    size: GraphSize = GraphSize(0, 0)  # noqa: RUF009
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    estimate: Estimate | None = None


class MemoryBudgetError(RuntimeError):
    """No strategy fits the memory that was passed to ``gact_graph.wrap``."""


class Budget:
    """Choose a strategy in the first training call, and again when a larger graph needs it.

    Args:
        memory: The budget in bytes.
        config: The settings that all strategies share.

    Attributes:
        strategy: The chosen strategy; None before the first training call.
    """

    def __init__(self, memory: int, config: Config) -> None:
        self.memory = memory
        self.strategy: Strategy | None = None
        self._config = config
        self._methods: dict[str, _Accepted] = {}
        self._grown = 0  # bytes that estimates have added to the process permanently

    def prepare(self, patch: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Choose a strategy that fits a call of a method, before it runs.

        Raises:
            MemoryBudgetError: If no strategy fits.
            ValueError: If no graph is found in the inputs.
        """
        patch.controller.owner.tracked = True
        accepted = self._methods.setdefault(patch.attribute, _Accepted())
        shapes = [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]
        if shapes == accepted.shapes:
            return
        try:
            size = Miniature(args, kwargs).size
            if size.nodes > accepted.size.nodes or size.edges > accepted.size.edges:
                self._accept(accepted, patch, module, (args, kwargs), size)
        except CannotShrink as reason:
            raise ValueError(
                f"Expected inputs that contain a graph, for memory= (got {reason}); pass bits=, "
                "level= and blocks= in its place"
            ) from reason
        accepted.shapes = shapes

    def _accept(
        self,
        accepted: _Accepted,
        patch: CompressedForward,
        module: nn.Module,
        inputs: Any,
        size: GraphSize,
    ) -> None:
        largest = GraphSize(
            max(size.nodes, accepted.size.nodes), max(size.edges, accepted.size.edges)
        )
        # The estimate for the first method serves the others as long as its strategy fits.
        estimates = (method.estimate for method in self._methods.values())
        estimate = accepted.estimate or next(filter(None, estimates), None)
        if estimate is None or not self._fits(estimate, largest):
            # A graph with more edges per node may need another estimate.
            estimate = accepted.estimate = self._estimate(patch, module, inputs, largest)
        if not self._fits(estimate, largest):
            strategy = estimate.choose()
            if strategy is None:
                needed = estimate.budget_for(estimate.smallest()[1])
                raise MemoryBudgetError(
                    f"Expected a memory budget that some strategy fits (got "
                    f"{format_bytes(self.memory)} for {largest.nodes:,} nodes and "
                    f"{largest.edges:,} edges: {estimate.smallest_as_text()}); pass "
                    f"{format_bytes(needed - (estimate.memory or 0))} more, or use a smaller model "
                    "or smaller batches"
                )
            self._take(patch, strategy)
        accepted.size = largest

    def _fits(self, estimate: Estimate, size: GraphSize) -> bool:
        return self.strategy is not None and estimate.fits(self.strategy, size)

    def _estimate(
        self, patch: CompressedForward, module: nn.Module, inputs: Any, size: GraphSize
    ) -> Estimate:
        before = resident_bytes()
        with log_if_slow("estimating the memory of a training step"):
            estimate = estimate_call(
                *(module, patch.attribute, inputs, self._config),
                *(max(1, self.memory - self._grown), size.nodes, size.edges),
                first=self.strategy,
                choosing=True,
            )
        if before is not None and next(module.parameters()).device.type == "cpu":
            self._grown += max(0, (resident_bytes() or 0) - before)
        return estimate

    def _take(self, patch: CompressedForward, strategy: Strategy) -> None:
        model = patch.first.module
        assert model is not None
        self.strategy = strategy
        if next(model.parameters()).device.type == "cpu":
            memory_policy.limit(self.memory)
        config = None if strategy == STOCK else strategy.config(self._config)
        patch.controller.configure(config, model)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the strategy as plain values; None before the first training call."""
        return None if self.strategy is None else self.strategy._asdict()

    def load_state_dict(self, state: Mapping[str, Any] | None, patch: CompressedForward) -> None:
        """Restore the strategy of another run.

        Raises:
            ValueError: If there is no such strategy on this device.
        """
        if state is None:
            return
        check_keys("state['strategy']", state, ("level", "bits", "blocks"))
        strategy = Strategy(**state)
        model = patch.first.module
        assert model is not None
        if not is_strategy(strategy, next(model.parameters()).device.type):
            raise ValueError(
                f"Expected state['strategy'] to be a strategy on this device (got {dict(state)})"
            )
        self._take(patch, strategy)
