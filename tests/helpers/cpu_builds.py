"""The builds of the CPU kernels that this processor can run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from gact_graph.ops import cpu

CAPABILITY = torch.backends.cpu.get_cpu_capability()
RUNNABLE = {
    "AVX512": ("AVX512", "AVX2", "DEFAULT"),
    "AVX2": ("AVX2", "DEFAULT"),
}.get(CAPABILITY, ("DEFAULT",))
BUILDS = [
    pytest.param(name, marks=() if name == RUNNABLE[0] else pytest.mark.long)
    for name in cpu.VECTOR_FLAGS
]
"""The builds as parameters of a test. ``make test`` runs that of this processor."""


def build(name: str) -> Any:
    """Return operators with the kernels of a key of :data:`gact_graph.ops.cpu.VECTOR_FLAGS`.

    Other builds than the library's own register their kernels with copies of the operators. The
    test is skipped if the processor lacks the instructions.
    """
    if name not in RUNNABLE:
        pytest.skip(f"the processor has {CAPABILITY}, not {name}")
    if name == RUNNABLE[0]:
        return cpu.load()
    return cpu.build(cpu.VECTOR_FLAGS[name], _copies(f"{cpu.NAMESPACE}_{name.lower()}"))


@functools.cache
def _copies(namespace: str) -> str:
    """Define every operator once more, in a namespace without implementations."""
    for name, schema in operators().items():
        torch.library.define(f"{namespace}::{name}", schema)
    return namespace


def operators() -> dict[str, str]:
    """Return the names and schemas of all operators on tensors."""
    prefix = f"{cpu.NAMESPACE}::"
    return {
        schema.name.removeprefix(prefix): str(schema).removeprefix(schema.name)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(prefix) and schema.arguments
        if isinstance(schema.arguments[0].type, torch.TensorType)
    }
