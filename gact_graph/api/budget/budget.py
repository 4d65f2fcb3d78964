"""The memory budget of a wrapped model: it plans a step, and a smaller one when needed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gact_graph.adaptive.state_checks import check_keys
from gact_graph.api.budget.estimate import STOCK, Strategy, is_strategy
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.plan import MemoryBudgetError, Plan
from gact_graph.api.budget.planning import plan_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.messages import warn
from gact_graph.support.peak import StepPeak, resident_bytes
from gact_graph.support.sharded import is_sharded
from gact_graph.support.storage import tensors_in


@dataclass
class _Accepted:
    """The largest graph for which the strategy fits a method, and the last call of the method.

    Attributes:
        size: The largest graph.
        last: The number of nodes and edges in the last call.
        shapes: The shapes of the tensors in the last call.
        plan: The plan for this method; None while the plan for another method suffices.
    """

    size: GraphSize = GraphSize(0, 0)  # noqa: RUF009
    last: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    plan: Plan | None = None


@dataclass(frozen=True)
class _Call:
    """A training call of a method, before it runs.

    Attributes:
        patch: The method.
        module: The module to which it belongs.
        inputs: The positional and the named arguments.
        size: The graph in them.
        accepted: The state of the method.
    """

    patch: CompressedForward
    module: nn.Module
    inputs: tuple[Any, Any]
    size: GraphSize
    accepted: _Accepted

    @property
    def largest(self) -> GraphSize:
        """The least size that covers this call and all earlier calls of the method."""
        return self.accepted.size.joined(self.size)


class Budget:
    """Plan the first training call, and again when a larger graph needs it.

    Args:
        memory: The budget in bytes.
        config: The settings that all strategies share.
        prefer: What counts first among plans that fit: ``"time"`` or ``"accuracy"``.
        plan: The plan of the user; None to make plans.

    Attributes:
        strategy: The chosen strategy; None before the first training call.
    """

    def __init__(self, memory: int, config: Config, prefer: str, plan: Plan | None) -> None:
        self.memory = memory
        self.strategy: Strategy | None = None
        self._followed: Plan | None = None
        self._config = config
        self._prefer = prefer
        self._given = plan
        self._methods: dict[str, _Accepted] = {}  # by the full name
        self._called: set[str] = set()  # the methods that this step has called
        self._grown = 0  # bytes that estimates have added to the process permanently
        self._peak: StepPeak | None = None
        self._most = 0  # bytes of the largest step that was over the budget
        self._tolerated = 0  # bytes of a step for which no smaller plan was found
        self._excess = 1.0  # measured over planned peak, at least 1
        self._pace = 1.0  # time of real steps over that of trials, as the last plan took it

    def prepare(self, patch: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take a strategy that fits a call of a method, before it runs.

        Raises:
            MemoryBudgetError: If no strategy fits.
            ValueError: If no graph is found in the inputs, or it is larger than that of the plan.
        """
        patch.controller.owner.tracked = True
        if self._peak is None:
            self._peak = StepPeak(next(module.parameters()).device)
        accepted = self._methods.setdefault(patch.full_name, _Accepted())
        shapes = [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]
        # A plan for a sharded model is made before its parameters are sharded.
        is_over = self._peak.nbytes > max(self.memory, self._tolerated) and not is_sharded(module)
        if shapes and shapes == accepted.shapes and not is_over:
            self._begin(patch, accepted)
            return
        size: GraphSize | None = None
        try:
            size = Miniature(args, kwargs).size
            call = _Call(patch, module, (args, kwargs), size, accepted)
            if is_over:
                self._step_down(call)
            if call.largest != accepted.size:
                self._accept(call)
        except CannotShrink as reason:
            if patch.part and size is None:  # as a head, which follows the plan for the others
                return
            raise ValueError(
                f"Expected inputs that contain a graph, for memory= (got {reason}); pass bits=, "
                "level= and blocks= in its place"
            ) from reason
        accepted.shapes, accepted.last = shapes, size.nodes + size.edges
        self._begin(patch, accepted)

    def _begin(self, patch: CompressedForward, accepted: _Accepted) -> None:
        """Measure from here on if a step begins; a second call of the same method begins one."""
        assert self._peak is not None
        if patch.full_name in self._called:
            self._called.clear()
        if not self._called:
            self._peak.begin(accepted.last)
        self._called.add(patch.full_name)

    def watch(self, output: Any) -> None:
        """Measure the peak of the step to which an output of forward belongs."""
        if self._peak is not None:
            self._peak.end_after(tensors_in(output))

    @property
    def planned_bytes(self) -> int | None:
        """The planned peak; None before the first training call."""
        return None if self._followed is None else self._followed.peak_bytes

    @property
    def planned_seconds(self) -> float | None:
        """The planned time of a step; None before the first training call."""
        return None if self._followed is None else self._followed.seconds

    @property
    def measured_bytes(self) -> int | None:
        """The largest peak of a step that was measured; None if none was."""
        now = 0 if self._peak is None else self._peak.nbytes
        return max(self._most, now) or None

    @property
    def measured_seconds(self) -> float | None:
        """The least time of a step, for a graph of the planned size; None if none was measured."""
        plan, pace = self._followed, None if self._peak is None else self._peak.pace
        return None if plan is None or pace is None else pace * (plan.nodes + plan.edges)

    def _step_down(self, call: _Call) -> None:
        """Follow a smaller plan after a step that took more than the budget, if there is one."""
        assert self._peak is not None
        taken, before, self._excess = self._peak.nbytes, self._excess, self._measured_excess
        self._forget_peak()
        self._tolerated = taken  # until another strategy is taken
        try:
            plan = call.accepted.plan = self._plan(call)
        except MemoryBudgetError:
            self._excess = before
            warn(
                f"A training step took {format_bytes(taken)}, more than the budget of "
                f"{format_bytes(self.memory)}, and no smaller plan fits. Training continues as "
                "planned; other memory of the process may have grown during the step."
            )
            return
        self._follow(call.patch, plan)

    def _follow(self, patch: CompressedForward, plan: Plan) -> None:
        self._followed = plan
        if plan.strategy != self.strategy:
            self._take(patch, plan.strategy)
            for method in patch.controller.methods.values():
                method.places = copy.deepcopy(plan.places)
        self._limit(patch)

    @property
    def _measured_excess(self) -> float:
        """The measured over the planned peak of the present strategy, at least that of earlier."""
        assert self._peak is not None
        plans = [self._followed, *(method.plan for method in self._methods.values())]
        planned = [p.peak_bytes for p in plans if p is not None and p.strategy == self.strategy]
        return max(self._excess, self._peak.nbytes / max(planned, default=math.inf))

    def _forget_peak(self) -> None:
        assert self._peak is not None
        self._most, self._peak.nbytes = self.measured_bytes or 0, 0

    def _accept(self, call: _Call) -> None:
        accepted, largest = call.accepted, call.largest
        if self._given is not None:
            self._check(self._given, call.size)
        # The plan for the first method serves the others as long as its strategy fits.
        plans = (accepted.plan, self._given, *(method.plan for method in self._methods.values()))
        plan = next(filter(None, plans), None)
        grown = None if plan is None else plan.grown_to(largest.nodes, largest.edges)
        if grown is None or not self._fits(grown):
            self._excess = self._measured_excess
            # A graph with more edges per node may need another plan.
            grown = accepted.plan = self._plan(call)
        elif grown is not plan:
            for method in self._methods.values():
                method.plan = grown if method.plan is plan else method.plan
        self._follow(call.patch, grown)
        accepted.size = largest

    def _check(self, plan: Plan, size: GraphSize) -> None:
        """Raise ValueError if a graph is larger than that of the user's plan."""
        if size.nodes > plan.nodes or size.edges > plan.edges:
            raise ValueError(
                f"Expected a graph of at most {plan.nodes:,} nodes and {plan.edges:,} edges, as in "
                f"the plan (got {size.nodes:,} nodes and {size.edges:,} edges); make a plan for "
                "this graph with gact_graph.plan, or pass memory="
            )

    def _fits(self, plan: Plan) -> bool:
        if self.strategy not in (None, plan.strategy):
            return False
        room = int(self._room * self._excess / self._measured_excess)
        return self._given is plan or plan.fits(room)

    @property
    def _room(self) -> int:
        """The budget of a plan, if its peak exceeds the plan as that of the last did."""
        return max(1, int((self.memory - self._grown) / self._excess))

    def _plan(self, call: _Call) -> Plan:
        """Return a plan for the largest graph of a method."""
        patch, module, size = call.patch, call.module, call.largest
        before, on_cpu = resident_bytes(), next(module.parameters()).device.type == "cpu"
        first = self.strategy  # whose slots have their names in the whole model
        if first is not None and patch.part:
            first = first.renamed(lambda slot: slot.removeprefix(f"{patch.part}/"))
        pace, is_own = self._pace, self._followed is not self._given  # else by another machine
        if is_own and self.planned_seconds and self.measured_seconds:
            pace *= self.measured_seconds / self.planned_seconds
        try:
            found = plan_call(
                *(module, patch.attribute, call.inputs, self._config),
                *(self._room, self._prefer, size.nodes, size.edges),
                first=first,
                pace=pace,
            )
        except MemoryBudgetError as error:
            if self._excess == 1:
                raise
            raise MemoryBudgetError(
                f"{error}. Of the budget of {format_bytes(self.memory)}, a plan may take this part "
                f"only: earlier steps took {self._excess:.2f} times their planned peak"
            ) from error
        plan = found.under(patch.part)
        if self.strategy is not None and found.strategy == first:
            plan = replace(plan, strategy=self.strategy)  # with the slots of other parts
        self._pace = pace  # unless nothing fits: then the last plan stands
        if before is not None and on_cpu:
            self._grown += max(0, (resident_bytes() or 0) - before)
        return plan

    def _take(self, patch: CompressedForward, strategy: Strategy) -> None:
        model = patch.first.module
        assert model is not None
        self.strategy, self._tolerated = strategy, 0
        if self._peak is not None:
            self._peak.pace = None
            self._forget_peak()
        patch.controller.configure(self.settings_of(strategy), model, idle=strategy == STOCK)

    def _limit(self, patch: CompressedForward) -> None:
        model = patch.first.module
        assert model is not None
        if next(model.parameters()).device.type == "cpu":
            memory_policy.limit(self.planned_bytes or self.memory, self)

    def settings_of(self, strategy: Strategy | None) -> Config:
        """Return the settings of a strategy; of None those before the first training call."""
        return self._config if strategy in (None, STOCK) else strategy.config(self._config)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the strategy as plain values; None before the first training call."""
        return None if self.strategy is None else self.strategy.to_dict()

    def strategy_of(self, state: Mapping[str, Any] | None) -> Strategy | None:
        """Return the strategy of :meth:`state_dict`.

        Raises:
            ValueError: If there is no such strategy.
        """
        if state is None:
            return None
        # Version 0.7.0 saved the first three.
        later = "widths", "measures", "keep_results", "offloaded"
        check_keys("state['strategy']", state, ("level", "bits", "blocks"), later)
        try:
            strategy = Strategy.from_dict(state)
            known = is_strategy(strategy)
            strategy.config(self._config)
        except (AttributeError, TypeError, ValueError):
            known = False
        if not known:
            raise ValueError(f"Expected state['strategy'] to be a strategy (got {dict(state)})")
        return strategy

    def restore(self, strategy: Strategy | None, patch: CompressedForward) -> None:
        """Take the strategy of another run; with None, as before the first training call."""
        self.strategy = self._followed = None
        self._methods.clear()
        self._called.clear()
        if strategy is not None:
            self._take(patch, strategy)
            self._limit(patch)
            return
        model = patch.first.module
        assert model is not None
        patch.controller.configure(self._config, model, idle=True)
