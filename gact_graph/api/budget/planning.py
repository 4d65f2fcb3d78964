"""Plans: which strategy fits a budget, and the form of each saved tensor."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import nn

from gact_graph.api.budget.estimate import STOCK, Strategy
from gact_graph.api.budget.plan import MemoryBudgetError, Plan, shapes_of
from gact_graph.api.budget.steps import undisturbed
from gact_graph.api.budget.trials import Search
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.memory.limits import is_out_of_memory
from gact_graph.support.progress import progress

Preference = Literal["time", "accuracy"]

PREFERENCES: tuple[str, ...] = get_args(Preference)
"""The values of ``prefer``: with ``"accuracy"``, exact gradients come before a shorter step."""

_NAMED = 3
"""The number of tensors that a refusal names."""


def check_preference(prefer: object) -> None:
    """Raise ValueError unless ``prefer`` is one of :data:`PREFERENCES`."""
    if prefer not in PREFERENCES:
        names = " or ".join(map(repr, PREFERENCES))
        raise ValueError(f"Expected prefer to be {names} (got {prefer!r})")


def plan_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int,
    prefer: str,
    nodes: int | None = None,
    edges: int | None = None,
    first: Strategy | None = None,
    pace: float = 1.0,
) -> Plan:
    """Plan a training step within a budget by trials on parts of the graph.

    Args:
        model: The module; see :class:`~gact_graph.api.budget.trials.Search` for it and the next.
        method: The name of the method.
        inputs: Its arguments.
        config: The settings.
        memory: The budget in bytes.
        prefer: One of :data:`PREFERENCES`.
        nodes: The number of nodes to plan for.
        edges: The number of edges to plan for.
        first: The strategy to take if it fits, whatever else does.
        pace: The time of a real step over that of trials.

    Raises:
        CannotShrink: If the inputs have no parts that the model runs on.
        MemoryBudgetError: If nothing fits.
    """
    device = next(model.parameters()).device
    try:
        with progress("planning a training step"), undisturbed(device):
            search = Search(model, method, inputs, config, memory, nodes, edges, prefer, pace)
            strategy = search.choose(first)
            if strategy is None:
                raise MemoryBudgetError(_refusal(search, memory))
            plan = _plan(search, strategy, memory, shapes_of(model))
            del search  # and its copy of the model, before memory is released
            return plan
    except (MemoryError, RuntimeError, SystemError) as error:
        # On CUDA, the error of PyTorch says how much the device has, and who holds it.
        if device.type == "cuda" or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # whose tensors leave no memory for a message
        raise MemoryBudgetError(
            f"Expected the system to give this process the budget of {format_bytes(memory)} (got "
            f"{type(error).__name__} in a trial on a small part of the graph); raise the limit of "
            "the process (ulimit -d, ulimit -v), or pass the memory that is there"
        ) from error


def _plan(search: Search, strategy: Strategy, memory: int, shapes: Mapping[str, list[int]]) -> Plan:
    """Return the plan of a strategy."""
    tensors = search.tensors_of(strategy)
    return Plan(
        strategy=strategy,
        memory=memory,
        nodes=search.size.nodes,
        edges=search.size.edges,
        error=sum(tensor.error for tensor in tensors),
        seconds=search.seconds_of(strategy),
        tensors=tensors,
        peaks=search.peaks_of(strategy),
        stock_peaks=search.peaks_of(STOCK),
        standing=search.standing,
        places=search.largest_trial(strategy).places,
        model=shapes,
    )


def _refusal(search: Search, memory: int) -> str:
    """Return the message of an error: the least that is possible, and what holds it."""
    estimate = search.estimate()
    strategy, peak = estimate.smallest()
    contexts = search.largest_trial(strategy).contexts.contexts
    rows = sorted(contexts, key=lambda row: row.stored_bytes, reverse=True)
    largest = ", ".join(row.slot for row in rows[:_NAMED])
    return (
        f"Expected a memory budget that some strategy fits (got {format_bytes(memory)} for "
        f"{search.size.nodes:,} nodes and {search.size.edges:,} edges: "
        f"{estimate.smallest_as_text()}, for temporary tensors and for saved ones, the largest "
        f"{largest}); pass {format_bytes(estimate.budget_for(peak) - memory)} more, or use a "
        "smaller model or smaller batches"
    )
