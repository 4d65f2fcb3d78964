"""Layers that are computed again in backward from their inputs, which alone are saved."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from gact_graph.layers.recompute.recomputation import Recomputation
from gact_graph.layers.recompute.saved_bytes import most_saved
from gact_graph.layers.recompute.structure import Structure, taken_apart
from gact_graph.support import current
from gact_graph.support.modes import has_other_modes
from gact_graph.support.objects import CONTAINERS, COPIED_BYTES, module_attributes
from gact_graph.support.patch import Patch
from gact_graph.support.reach import Reach, Unknowable
from gact_graph.support.rows import LayerRow
from gact_graph.support.storage import is_plain, tensors_in
from gact_graph.support.watch import Watch


class CannotRecompute(Exception):
    """A layer must run as stock. The message is the reason, after "it", as in the report."""


def attach(
    owner: current.Owner,
    report: dict[str, LayerRow],
    model: nn.Module,
    only: Container[nn.Module] | None,
) -> Iterator[RecomputedLayer]:
    """Patch each outermost message passing layer below the model; yield the patches."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, MessagePassing) and module is not model and not inside:
            outer.append(name)
            if only is None or module in only:
                yield RecomputedLayer(owner, report, module, name)


class RecomputedLayer(Patch):
    """Replace ``forward`` of one layer.

    Args:
        owner: The model that the layer belongs to.
        report: Gets a row under the layer's name.
        module: The layer.
        name: Its full name.
    """

    def __init__(
        self, owner: current.Owner, report: dict[str, LayerRow], module: nn.Module, name: str
    ) -> None:
        super().__init__(module, "forward")
        self._owner = owner
        self._report = report
        self._name = name
        self._has_run = False
        self._reason: str | None = None

    def run(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the forward of ``module``."""
        original = self.original(module)
        session = current.session_of(self._owner)
        if session is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        nbytes = most_saved(module, (args, kwargs))
        if session.is_too_small(nbytes):
            return original(*args, **kwargs)
        tensors, arguments = taken_apart((args, kwargs))
        try:
            state = self._state_of(module, tensors, arguments)
        except (CannotRecompute, Unknowable) as reason:
            self._add_row("stock", str(reason))
            return original(*args, **kwargs)
        session.count_unallocated(nbytes)
        coding = session.coding_of(self._name)
        call = Recomputation(self._name, module, original, arguments, state, coding)
        named = _named(original, args, kwargs)
        with session.trace.standing_for("forward", named), current.capture_disabled():
            result = call.run(args, kwargs, tensors, session, named)
        self._add_row("recomputed", None)
        self._judge(module, state)
        return result

    def _add_row(self, way: str, reason: str | None) -> None:
        self._report[self._name] = LayerRow(
            self._name, way, None, reason, counted=way != "recomputed"
        )

    def _state_of(
        self, module: nn.Module, tensors: Sequence[Tensor], arguments: Structure
    ) -> Watch:
        """Return the state of the layer and of its arguments before a call.

        Raises:
            CannotRecompute: The layer cannot run again in backward.
            Unknowable: The state cannot be restored.
        """
        if self._reason is not None:
            raise CannotRecompute(self._reason)
        if not current.are_innermost():
            raise CannotRecompute(
                "runs inside other saved-tensor hooks, such as those of torch.utils.checkpoint"
            )
        if current.is_transformed():
            raise CannotRecompute("is traced or transformed")
        if has_other_modes():
            raise CannotRecompute("runs in a mode of the user, which is not active in backward")
        if any(t.requires_grad and not is_plain(t) for t in tensors):
            raise CannotRecompute("gets a sparse tensor that requires a gradient")
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            raise CannotRecompute("has parameters that its first forward initializes")
        for argument in arguments.others:
            if any(t.requires_grad for t in tensors_in(argument)):
                raise CannotRecompute(
                    f"gets tensors that require gradients inside a {type(argument).__name__}"
                )
        if not arguments.num_tensors:
            raise CannotRecompute("gets no tensor")
        reach = Reach([module, *arguments.others])
        # In the first call, which shows whether the layer changes large tensors, all are copied.
        return reach.watch(COPIED_BYTES if self._has_run else math.inf)

    def _judge(self, module: nn.Module, state: Watch) -> None:
        """Decide after a call whether the next one can be computed again."""
        changed = None if self._has_run else state.changed_tensor()
        self._has_run = True
        if changed is not None:
            self._reason = f"changes {changed}, which is too large to be copied at every call"
        name = next(chain.from_iterable(map(_attributes_with_graph, module.modules())), None)
        if name is not None:
            # The tensor holds this call, which holds the layer: never collected.
            self._reason = f"leaves a tensor that requires a gradient in its attribute {name}"
        if self._reason is not None:
            self._add_row("stock", self._reason)


def _attributes_with_graph(module: nn.Module) -> Iterator[str]:
    """Yield the attributes and buffers whose tensors an operation made; not parameters of a
    replica."""
    parameters = {*vars(module).get("_former_parameters", {}), "_former_parameters"}
    for name, value in (module_attributes(module) | module._buffers).items():
        if name in parameters or not isinstance(value, Tensor | CONTAINERS):
            continue
        if any(t.grad_fn is not None for t in tensors_in(value)):
            yield name


def _named(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the tensors among the arguments, each by a name."""
    named: dict[str, Tensor] = {}
    for name, value in inspect.signature(original).bind(*args, **kwargs).arguments.items():
        tensors, _ = taken_apart(value)
        named |= {name if len(tensors) == 1 else f"{name}.{i}": t for i, t in enumerate(tensors)}
    return named
