"""The builds of the CPU kernels that this processor can run."""

from __future__ import annotations

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
"""The builds as parameters of a test. ``make test`` runs the one that this processor takes."""


def build(name: str) -> Any:
    """The kernels, built as :data:`gact_graph.ops.cpu.VECTOR_FLAGS` names it.

    The test is skipped where the processor has no such instructions: it would die of the first one.
    """
    if name not in RUNNABLE:
        pytest.skip(f"the processor has {CAPABILITY}, not {name}")
    return cpu.build(cpu.VECTOR_FLAGS[name])
