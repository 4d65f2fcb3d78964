"""``python -m gact_graph.info``: print the versions, devices and kernels of this machine."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gact_graph
from gact_graph.ops import allocator, cpu
from gact_graph.ops.kernels import compiler, nvrtc, prebuilt
from gact_graph.support.memory.policy import SWITCH, memory_policy
from gact_graph.support.versions import pyg_here, torch_here

_MISSING = "cannot be built"


def facts() -> dict[str, str]:
    """Return versions, devices and kernels by name, without building anything."""
    of_allocator = _allocator()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gact_graph": gact_graph.__version__,
        "python": platform.python_version(),
        "torch": torch_here().described(),
        "torch_geometric": pyg_here().described(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "GPU": gpu,
        "CPU kernels": _cpu_kernels(),
        "CUDA kernels": _cuda_kernels(),
        "CPU allocator": of_allocator,
        "freed CPU memory": _kept_memory(of_allocator),
    }


def _cpu_kernels() -> str:
    status = _library(cpu.prebuilt_name(cpu.variant()), cpu.built, "the first step runs")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in cpu.VECTOR_FLAGS:
        status += f"; plain loops serve, since {capability} is not known"
    return status


def _library(name: str, built: Callable[[list[str]], Path | None], builds: str) -> str:
    """Return which library serves: that of a wheel, or one that was or will be built."""
    remarks: list[str] = []
    try:
        return f"prebuilt: {prebuilt.load(name)}"
    except OSError as error:
        remarks.append(str(error))
    try:
        for command in compiler.commands():
            try:
                path = built(command)
            except OSError as error:
                remarks.append(str(error))
                continue
            if path is None:
                status = f"not built yet: {builds} {shlex.join(command)}"
            else:
                status = f"built: {path}"
            return "; ".join([status, *remarks])
    except FileNotFoundError as error:
        remarks.append(str(error))
    return f"{_MISSING}: " + "; ".join(remarks)


def _cuda_kernels() -> str:
    if not torch.cuda.is_available():
        return "not needed: torch finds no GPU"
    architecture = nvrtc.architecture_of(torch.cuda.current_device())
    try:
        return f"built for {architecture} at first use, by {nvrtc.compiler()}"
    except Exception as error:  # an installation may raise anything
        return f"{_MISSING}: {type(error).__name__}: {error}"


def _allocator() -> str:
    name = allocator.prebuilt_name()
    return _library(name, allocator.built, "in the background, the first step runs")


def _kept_memory(of_allocator: str) -> str:
    cause = memory_policy.why_not()
    if cause is None and of_allocator.startswith(_MISSING):
        cause = "needs the CPU allocator"
    if cause is not None:
        return f"not kept: {cause}"
    return f"kept from the first step of a wrapped model; {SWITCH}=0 disables this"


def main() -> int:
    table = Table(show_header=False)
    for name, value in facts().items():
        table.add_row(name, Text(value))  # no markup: paths may contain brackets
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
