"""The submodules that run, and the layer of PyG whose own forward calls an operation.

A variable of such a layer can be without memory for a while: no code can reach it that runs without
a call of the function mode, such as scripted functions, extensions, ``vmap`` and hooks.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import torch_geometric.nn
from torch import nn
from torch_geometric.nn import MessagePassing

from gact_graph.support.current import Hook, Owner
from gact_graph.support.objects import HOOKS
from gact_graph.support.patch import BoundPatch, Patch
from gact_graph.support.torch_private import has_global_hooks

_LINEAR = (nn.Linear.forward, torch_geometric.nn.Linear.forward)
_LIBRARY = "gact_graph."
# Frames between the forward of a layer and an operation in it.
_BETWEEN = (_LIBRARY, "torch.", "torch_geometric.nn.dense")
# Frames between PyTorch and the forward of a layer: those of patches, and of PyG's decorators.
_AROUND = (_LIBRARY, "torch_geometric.experimental")


class RunningModules:
    """The submodules that run, as the hooks of their model report them.

    Args:
        owner: The owner that the hooks carry.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._modules: list[nn.Module] = []

    def enter(self, module: nn.Module) -> None:
        """Enter a submodule."""
        self._modules.append(module)

    def leave(self, module: nn.Module) -> None:
        """Leave a submodule, and those in it whose end no hook has reported."""
        # An exception in another hook may have prevented `enter`.
        if any(running is module for running in self._modules):
            while self._modules.pop() is not module:
                pass

    def clear(self) -> None:
        """Leave all submodules."""
        self._modules.clear()

    def layer(self) -> type[MessagePassing] | None:
        """Return the class of the layer whose own forward calls ``propagate``.

        None if other code than that forward may read the result before the layer ends, which a
        hook of the library reports.
        """
        return self._layer(1)

    def layer_of_linear(self) -> type[MessagePassing] | None:
        """Return the class of the layer that runs a linear module; see :meth:`layer`."""
        linear = self._modules[-1] if self._modules else None
        if linear is None or type(linear).forward not in _LINEAR or _has_other_hooks(linear):
            return None
        return self._layer(2)

    def _layer(self, level: int) -> type[MessagePassing] | None:
        layer = self._modules[-level] if len(self._modules) >= level else None
        if (
            isinstance(layer, MessagePassing)
            and _is_in_forward_of(type(layer))
            and isinstance(vars(layer).get("propagate"), (Patch, BoundPatch))
            and self._reports_end(layer)
            and not (_has_other_hooks(layer) or has_global_hooks())
        ):
            return type(layer)
        return None

    def _reports_end(self, module: nn.Module) -> bool:
        hooks = module._forward_hooks.values()
        return any(isinstance(hook, Hook) and hook.owner is self._owner for hook in hooks)


def _is_in_forward_of(kind: type[nn.Module]) -> bool:
    """Return whether the forward in the file of a class of layers calls the operation that runs,
    through code of torch, and PyTorch calls that forward: no subclass has it in its own forward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _module_of(frame).startswith(_BETWEEN):
        frame = frame.f_back
    forward = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if frame is None or frame.f_code is not forward or _module_of(frame) != kind.__module__:
        return False
    frame = frame.f_back
    while frame is not None and _module_of(frame).startswith(_AROUND):
        frame = frame.f_back
    return frame is not None and _module_of(frame) == nn.Module.__module__


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _has_other_hooks(module: nn.Module) -> bool:
    """Return whether hooks of others get results inside of a module, or what it returns."""
    return any(
        not isinstance(hook, Hook)
        for name, hooks in vars(module).items()
        if name.endswith(HOOKS) and name != "_forward_pre_hooks" and isinstance(hooks, dict)
        for hook in hooks.values()
    )
