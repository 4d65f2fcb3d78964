"""``python -m gact_graph.info``: what was found here, and which kernels serve."""

from __future__ import annotations

import platform
import sys
import warnings

import torch
import torch_geometric
from rich.console import Console
from rich.table import Table

import gact_graph
from gact_graph.kernels import cpu


def facts() -> dict[str, str]:
    """Versions, devices and kernels by name. Builds the CPU kernels if they are not yet."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gact_graph": gact_graph.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "GPU": cuda,
        "CPU kernels": _cpu_kernels(),
        "CUDA kernels": "not in this version: the pure-torch reference serves CUDA tensors",
    }


def _cpu_kernels() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = cpu.load()
    if kernels is not None:
        return f"built: {kernels.name}"
    cause = str(caught[-1].message) if caught else "the build failed earlier in this process"
    return f"not built: {cause}"


def main() -> int:
    table = Table(show_header=False)
    for name, value in facts().items():
        table.add_row(name, value)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
