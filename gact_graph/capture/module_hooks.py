"""Hooks on a wrapped model's modules: they report the module and phase that runs."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle
from torch_geometric.nn import MessagePassing

from gact_graph.capture.session import session_of
from gact_graph.support.current import Hook, Owner, is_busy, is_transformed
from gact_graph.support.storage import tensors_in

_PHASES = ("edge_update", "message", "aggregate", "message_and_aggregate")


class EnterModule(Hook):
    """Forward pre-hook on a submodule."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # Python may collect the wrapped model, and so remove this hook, while PyTorch calls the
        # hooks of a module that another model shares: this one is then called without keywords.
        session = session_of(self.owner)
        if session is not None and kwargs is not None:
            session.enter(self.name, module, args, kwargs)


class LeaveModule(Hook):
    """Forward hook on a submodule, called also when its forward raises."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.leave(self.name, module)
        elif not self.owner.tracked and module.training and torch.is_grad_enabled():
            # is_busy: another wrapped model calls this module.
            if is_busy() or torch.compiler.is_compiling() or is_transformed():
                return
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self.owner.warn_unless_tracked)
                    return


class Phase(Hook):
    """Pre-hook on a phase of message passing, and hook after it, which also gets its result."""

    def __call__(self, module: nn.Module, args: Any, *result: Any) -> None:
        session = session_of(self.owner)
        if session is None:
            return
        if result:
            session.trace.leave_phase(self.name)
        else:
            session.trace.enter_phase(self.name)


class Propagated(Hook):
    """Hook after ``propagate``, whose arguments contain the numbers of nodes and edges."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            edge_index, size, _ = args
            session.add_sizes(edge_index, size)


def attach(
    owner: Owner, model: nn.Module, only: Container[nn.Module] | None = None
) -> Iterator[RemovableHandle]:
    """Add hooks to the model and its submodules, and yield the handles that remove them.

    Args:
        owner: The owner that the hooks carry.
        model: The model.
        only: The modules that get hooks; None for all of them.
    """
    for name, module in model.named_modules():
        if only is not None and module not in only:
            continue
        # A scripted module takes no hooks: its saved tensors get the name of the module around it.
        if module is not model and not isinstance(module, ScriptModule):
            enter, leave = EnterModule(owner, name), LeaveModule(owner, name)
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)
        if isinstance(module, MessagePassing):
            yield module.register_propagate_forward_hook(Propagated(owner, "propagate"))
            for phase in _PHASES:
                hook = Phase(owner, phase)
                yield getattr(module, f"register_{phase}_forward_pre_hook")(hook)
                yield getattr(module, f"register_{phase}_forward_hook")(hook)


def without_hooks(owner: Owner, model: nn.Module) -> set[nn.Module]:
    """Return the submodules without hooks of this owner, added after the model was wrapped."""
    return {
        module
        for module in model.modules()
        if module is not model
        and not isinstance(module, ScriptModule)
        and not any(
            isinstance(hook, EnterModule) and hook.owner is owner
            for hook in module._forward_pre_hooks.values()
        )
    }
