"""Slots of states that versions up to 0.7.0 saved.

These versions named a saved tensor by the argument whose memory it shares. Slots now have the names
of PyTorch's derivative formulas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "bilinear.input1": "bilinear.i1",
    "bilinear.input2": "bilinear.i3",
    "bilinear.weight": "bilinear.i2",
    "einsum.operands": "einsum.input",
    "linear.weight": "linear.mat2",
    "matmul.other": "matmul.mat2",
    "mul.result": "mul.input",
    "outer.vec2": "outer.other",
    "rrelu.result": "rrelu.noise",
    "scaled_dot_product_attention.result.2": "scaled_dot_product_attention.output",
}

_SLOT = re.compile(r"(.*/)?([^/.]+\.)?([^/.#]+)(#\d+)?\.(\w+(?:\.\d+)?)(\.source)?")


def with_new_names(state: Any) -> Any:
    """Return a state of any version with the current names of slots.

    A slot that no operation saves any more keeps its name, like those of removed layers. The slot
    that replaces it has the bits of a new slot until it is measured.
    """
    if isinstance(state, Mapping):
        return {_new_name(key): with_new_names(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_new_names(value) for value in state]
    return _new_name(state) if isinstance(state, str) else state


def _new_name(slot: str) -> str:
    match = _SLOT.fullmatch(slot)
    if match is None:
        return slot
    path, helper, operation, count, position, source = (part or "" for part in match.groups())
    name = _RENAMED.get(f"{operation}.{position}", f"{operation}.{position}")
    return f"{path}{helper}{operation}{count}{name.removeprefix(operation)}{source}"
