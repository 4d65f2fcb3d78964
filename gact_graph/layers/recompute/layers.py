"""Layers that are computed again in backward from their inputs, which alone are saved.

As activation checkpointing does, but the saved inputs pass through the model's hooks, which
compress them, and random numbers are those of forward.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gact_graph.layers.recompute.call import Key, LayerCall
from gact_graph.layers.recompute.function import Recompute, run_first
from gact_graph.layers.recompute.saved_bytes import most_saved
from gact_graph.layers.recompute.structure import Structure, taken_apart
from gact_graph.layers.recompute.try_out import try_out
from gact_graph.support import current
from gact_graph.support.patch import BoundPatch, Patch
from gact_graph.support.replica import CannotReplicate, Snapshot
from gact_graph.support.rows import LayerRow
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import tensors_in


class CannotRecompute(Exception):
    """A layer must run as it is. The message says why, after "it", as in the report."""


def attach(
    owner: current.Owner,
    report: dict[str, LayerRow],
    model: nn.Module,
    blocks: bool,
    only: Container[nn.Module] | None = None,
) -> Iterator[RecomputedLayer]:
    """Patches each outermost message passing layer below the model; yields the patches."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, MessagePassing) and module is not model and not inside:
            outer.append(name)
            if only is None or module in only:
                yield RecomputedLayer(owner, report, module, name, blocks)


class RecomputedLayer(Patch):
    """Replaces ``forward`` of one layer.

    Args:
        owner: The model that the layer belongs to.
        report: Gets an entry under the layer's name: what became of it.
        module: The layer.
        name: Its full name.
        blocks: Whether its edge work is done in blocks, if it can be.
    """

    def __init__(
        self,
        owner: current.Owner,
        report: dict[str, LayerRow],
        module: nn.Module,
        name: str,
        blocks: bool,
    ) -> None:
        super().__init__(module, "forward")
        self._owner = owner
        self._report = report
        self._name = name
        self._blocks = blocks
        self._reasons: dict[Key, str | None] = {}
        self._values_not_needed: dict[Key, frozenset[int]] = {}

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the forward of ``module``."""
        original = self.original(module)
        session = current.session_of(self._owner)
        if session is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        nbytes = most_saved(module, (args, kwargs))
        if session.leaves_alone(nbytes):
            return original(*args, **kwargs)
        session.stock_makes(nbytes)
        try:
            tensors, call = self._call(module, args, kwargs, session.coding_of(self._name))
            self._check(call, tensors)
        except (CannotRecompute, CannotReplicate) as reason:
            self._report[self._name] = LayerRow(self._name, "stock", None, str(reason))
            return original(*args, **kwargs)
        self._report[self._name] = LayerRow(self._name, "recomputed", None, None, counted=False)
        named = _named(original, args, kwargs)
        with session.trace.standing_for("forward", named), current.capture_disabled():
            first = run_first(call, module, tensors)
            named |= {f"edges.{i}": t for i, t in enumerate(first.edge_results.values())}
            parameters = call.snapshot.learning
            results = Recompute.apply(call, first, len(tensors), *tensors, *parameters)
        return first.structure.filled(results)

    def _call(
        self, module: nn.Module, args: Any, kwargs: Any, coding: current.Coding | None
    ) -> tuple[list[Tensor], LayerCall]:
        """The tensor arguments, and the call without them."""
        if not current.are_innermost():
            raise CannotRecompute(
                "runs inside other saved-tensor hooks, such as those of torch.utils.checkpoint"
            )
        if self.previous is not None and not _can_rebind(self.previous, self.module):
            raise CannotRecompute("has a forward that was set as an attribute of the instance")
        snapshot = Snapshot(module)
        tensors, arguments = taken_apart((args, kwargs))
        _check_others(arguments)
        # Autograd cannot save inference tensors.
        tensors = [t.clone() if t.is_inference() else t for t in tensors]
        call = LayerCall(
            snapshot,
            self.original,
            arguments,
            (*(t.requires_grad for t in tensors), *(True for _ in snapshot.learning)),
            RunState({t.device.type for t in tensors}),
            coding,
            self._values_not_needed,
        )
        return tensors, call

    def _check(self, call: LayerCall, tensors: list[Tensor]) -> None:
        """Tries the layer out, once for each kind of call.

        Raises:
            CannotRecompute: The layer must run as it is.
        """
        if call.key not in self._reasons:
            found = try_out(call, tensors, self._blocks)
            self._reasons[call.key] = found.reason
            if found.values_not_needed is not None:
                self._values_not_needed[call.key] = found.values_not_needed
        reason = self._reasons[call.key]
        if reason is not None:
            raise CannotRecompute(reason)


def _check_others(arguments: Structure) -> None:
    for other in arguments.others:
        if any(t.requires_grad for t in tensors_in(other)):
            raise CannotRecompute(f"gets tensors that learn inside a {type(other).__name__}")


def _can_rebind(method: Any, module: nn.Module | None) -> bool:
    if isinstance(method, Patch | BoundPatch):
        return True
    return isinstance(method, types.MethodType) and method.__self__ is module


def _named(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The tensors among the arguments, each by a name."""
    found: dict[str, Tensor] = {}
    for name, value in inspect.signature(original).bind(*args, **kwargs).arguments.items():
        tensors, _ = taken_apart(value)
        found |= {name if len(tensors) == 1 else f"{name}.{i}": t for i, t in enumerate(tensors)}
    return found
