"""Which Python code called an operation, told by the stack.

A softmax over edges is several operations in ``torch_geometric.utils.softmax``: their slots carry
that function's name, as ``softmax.exp.result`` does. Slots name the bits in a saved state and the
patterns of ``pin``, so such a name has to last: it is that of a public function of PyG.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch_geometric.utils
from torch import nn

_HELPERS = "torch_geometric.utils"
_PUBLIC = frozenset(torch_geometric.utils.__all__)

# Frames between a helper and its operation, or between a layer and its helper: torch's own, and
# PyG's decorators.
_BETWEEN = ("torch.", "torch_geometric.experimental")


class Caller(NamedTuple):
    """Who called an operation.

    Attributes:
        helper: The function of ``torch_geometric.utils`` that the operation is a step of; empty
            where there is none.
        module: The Python module that called the operation, or called that function.
        of_loss: Whether it was called to compute a loss.
    """

    helper: str
    module: str
    of_loss: bool


def caller_of(entry: CodeType) -> Caller:
    """Who called the operation that runs.

    Args:
        entry: The code through which operations come in: the caller is what stands above it.
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
    helper = helper_of(functions) if functions else ""
    return Caller(helper, module, _is_of_loss(frame))


@functools.lru_cache(maxsize=4096)  # a library may make modules as it goes
def _kind_of(module: str) -> str:
    """What a Python module of this name is on the way from a layer to an operation."""
    if module.startswith(_HELPERS):
        return "helper"
    return "between" if module.startswith(_BETWEEN) else "layer"


def helper_of(functions: list[str]) -> str:
    """The name that slots carry, of functions of ``torch_geometric.utils``, the innermost first.

    It is that of the outermost public one: ``softmax`` where softmax calls scatter. A function that
    PyG does not publish gives its own name only if no public one is on the way; such a name may
    change from one version of PyG to the next.
    """
    public = [name for name in functions if name in _PUBLIC]
    return (public or functions or [""])[-1].strip("_")


def _is_of_loss(frame: FrameType | None) -> bool:
    """Whether a function of this name (``loss``, ``recon_loss``) stands nearer than any module that
    learns: a model's ``loss`` may as well run the whole model."""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "loss" or name.endswith("_loss"):
            return True
        if name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and _learns(module):
                return False
        frame = frame.f_back
    return False


def _learns(module: nn.Module) -> bool:
    """Whether the module or one inside it has a parameter."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    return any(_learns(inside) for inside in module._modules.values() if inside is not None)
