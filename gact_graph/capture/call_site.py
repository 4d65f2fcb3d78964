"""The Python code that called an operation, read from the stack.

A softmax over edges is several operations in ``torch_geometric.utils.softmax``: their slots contain
the name of that function, as in ``softmax.exp.result``. Slots name the bits in a saved state and
the patterns of ``pin``, so such a name has to last: it is that of a public function of PyG.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType

import torch_geometric.utils
from torch import nn

_HELPERS = "torch_geometric.utils"
_PUBLIC = frozenset(torch_geometric.utils.__all__)

_TRACKED = "gact_graph.api.forward"  # whose function `run` calls tracked methods

# Frames between a helper and its operation, or between a layer and its helper: those of torch, and
# of PyG's decorators.
_BETWEEN = ("torch.", "torch_geometric.experimental")


def call_site(entry: CodeType) -> tuple[str, str, bool]:
    """Return the call site of the operation that runs.

    Args:
        entry: The code through which operations come in: the caller is the frame above it.

    Returns:
        The function of ``torch_geometric.utils`` that the operation is a step of, or an empty
        string; the Python module that called the operation, or that function; and whether the
        operation computes a loss.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not entry:
        frame = frame.f_back
    functions: list[str] = []
    module = ""
    while frame is not None:
        frame = frame.f_back
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        kind = _kind_of(module)
        if frame is not None and kind == "helper":
            functions.append(frame.f_code.co_name)
        elif kind != "between":
            break
    return helper_of(functions), module, _is_of_loss(frame)


@functools.lru_cache(maxsize=4096)  # libraries may create modules at run time
def _kind_of(module: str) -> str:
    """Return the kind of a Python module on the way from a layer to an operation."""
    if module.startswith(_HELPERS):
        return "helper"
    return "between" if module.startswith(_BETWEEN) else "layer"


def helper_of(functions: list[str]) -> str:
    """Return the name in slots for functions of ``torch_geometric.utils``, the innermost first.

    It is the outermost public name: ``softmax`` where softmax calls scatter. If no function is
    public, the name of the outermost is used, which may change between versions of PyG.
    """
    public = [name for name in functions if name in _PUBLIC]
    return (public or functions or [""])[-1].strip("_")


def _is_of_loss(frame: FrameType | None) -> bool:
    """Return whether a function such as ``loss`` or ``recon_loss`` is nearer than modules.

    Only modules with parameters count: the ``loss`` of a model may run the whole model. Functions
    that call a tracked method do not count.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name == "run" and frame.f_globals.get("__name__") == _TRACKED:
            return False
        if name == "loss" or name.endswith("_loss"):
            return True
        if name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and _has_parameters(module):
                return False
        frame = frame.f_back
    return False


def _has_parameters(module: nn.Module) -> bool:
    # By hand: `module.parameters()` takes several times as long, and this runs for each operation.
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    return any(_has_parameters(child) for child in module._modules.values() if child is not None)
