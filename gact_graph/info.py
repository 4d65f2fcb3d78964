"""``python -m gact_graph.info``: what was found here, and which kernels serve."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric
from rich.console import Console
from rich.table import Table

import gact_graph
from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.kernels import nvrtc
from gact_graph.support import cpu_memory


def facts() -> dict[str, str]:
    """Versions, devices and kernels by name. Builds the kernels if they are not yet."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gact_graph": gact_graph.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "GPU": gpu,
        "CPU kernels": _cpu_kernels(),
        "CUDA kernels": _cuda_kernels(),
        "freed CPU memory": _kept_memory(),
    }


def _cpu_kernels() -> str:
    kernels, cause = _load(cpu.load)
    return f"not built: {cause}" if kernels is None else f"built: {kernels.name}"


def _cuda_kernels() -> str:
    if not torch.cuda.is_available():
        return "not needed: torch sees no GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    kernels, cause = _load(lambda: cuda_edges.load(device))  # after those of cuda.load
    if kernels is None:
        return f"not made: {cause}"
    return f"made for {nvrtc.architecture_of(device.index)}"


def _kept_memory() -> str:
    cause = cpu_memory.why_not()
    if cause is not None:
        return f"not kept: {cause}"
    return f"kept from a wrapped model's first step on; {cpu_memory.SWITCH}=0 switches that off"


def _load(load: Callable[[], Any]) -> tuple[Any, str]:
    """The kernels, and the cause if they are None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = load()
    return kernels, str(caught[-1].message) if caught else "that failed earlier in this process"


def main() -> int:
    table = Table(show_header=False)
    for name, value in facts().items():
        table.add_row(name, value)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
