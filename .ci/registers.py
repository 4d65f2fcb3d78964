"""Registers and occupancy of every CUDA kernel by architecture, as ptxas counts registers.

Prints a table in Markdown. A cell has the most registers of a kernel's types and widths, and the
warps that a multiprocessor then runs. A kernel that spills registers or has a stack frame is an
error. Needs no GPU.
"""

from __future__ import annotations

import io
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from gact_graph.ops.kernels import nvrtc
from gact_graph.ops.kernels.sources import csrc

ARCHITECTURES = {"sm_75": 32, "sm_80": 64, "sm_90": 64, "sm_100": 64}
"""The most warps of a multiprocessor, by the CUDA C++ Programming Guide, "Compute Capabilities"."""

VARIANTS = {"cuda/quantize.cu": (0, *range(1, 9), 16), "cuda/wide_sum.cu": (1, 2, 3, 4)}
"""What sources are compiled for; others for nothing."""

MOST_SPILLED = 256
"""Bytes of spilled registers: on an H200, more warps gain more than these lose."""

# Of a multiprocessor; registers go to warps by so many, and to four warps at a time.
_REGISTERS, _UNIT, _PARTITIONS = 1 << 16, 256, 4

_KERNEL = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)
_TYPE = re.compile(r"(_float16|_bfloat16|_float32|_float64)?(_\d)?$")


class Use(NamedTuple):
    """What a thread of a kernel takes."""

    registers: int
    memory: int
    """Bytes of a stack frame, or of accesses to spilled registers."""

    def warps(self, most: int) -> int:
        """Return the warps of a multiprocessor at a time, in whole blocks."""
        each = -(-self.registers * 32 // _UNIT) * _UNIT
        warps = _REGISTERS // each // _PARTITIONS * _PARTITIONS
        return min(warps, most) // nvrtc.WARPS * nvrtc.WARPS


def uses(source: str, bits: int, architecture: str) -> dict[str, Use]:
    """Compile a source as the library does, and return what ptxas reports of each kernel."""
    import cuda.core

    path, log = csrc() / source, io.StringIO()
    options = {"name": path.name, "include_path": str(path.parent), "ptxas_options": "-v"}
    options |= nvrtc._options(bits, architecture)
    program = cuda.core.Program(path.read_text(), "c++", cuda.core.ProgramOptions(**options))
    program.compile("cubin", logs=log)
    found = {
        name: Use(int(registers), max(map(int, memory)))
        for name, *memory, registers in _KERNEL.findall(log.getvalue())
    }
    kernels = log.getvalue().count("entry function")
    if not kernels or len(found) != kernels:
        raise ValueError(f"Expected the registers of {kernels} kernels (got {len(found)})")
    return found


def main() -> int:
    sources = [f"cuda/{path.name}" for path in sorted((csrc() / "cuda").glob("*.cu"))]
    jobs = [
        (source, bits, architecture)
        for architecture in ARCHITECTURES
        for source in sources
        for bits in VARIANTS.get(source, (0,))
    ]
    rows: dict[str, dict[str, Use]] = {}
    with ProcessPoolExecutor() as pool:
        compiled = pool.map(uses, *zip(*jobs, strict=True))
        for (source, _, architecture), found in zip(jobs, compiled, strict=True):
            for name, use in found.items():
                row = rows.setdefault(f"{source} | {_TYPE.sub('', name)}", {})
                before = row.get(architecture, use)
                row[architecture] = Use(*map(max, before, use))
    print(
        "| source | kernel |",
        " | ".join(f"{name}: registers, warps" for name in ARCHITECTURES),
        "|",
    )
    print("|---|---|" + "---|" * len(ARCHITECTURES))
    for row_name, row in rows.items():
        cells = (f"{row[a].registers}, {row[a].warps(n)} of {n}" for a, n in ARCHITECTURES.items())
        print(f"| {row_name} |", " | ".join(cells), "|")
    spilled = {
        name: row
        for name, row in rows.items()
        if any(u.memory > MOST_SPILLED for u in row.values())
    }
    for name, row in spilled.items():
        print(f"Expected at most {MOST_SPILLED} bytes of {name} (got {row})", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
