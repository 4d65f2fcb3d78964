"""The kernels for the CPU: a wheel's library, else a build at first use, else pure torch.

The library registers its kernels with the operators of :data:`NAMESPACE` on the CPU. It uses only
LibTorch's stable ABI, so one library serves many versions of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gact_graph.ops import allocator
from gact_graph.ops.kernels import library, notices, prebuilt
from gact_graph.ops.kernels.once import once

NAMESPACE = "gact_graph"
"""The namespace of the operators, ``torch.ops.gact_graph``."""

# Floating-point contraction would round once where the other backends round twice.
# Without errno lrint is one instruction. The last is the oldest torch that a library serves, 2.10.
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd"]
_FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
VECTOR_FLAGS: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mf16c"),
    "DEFAULT": (),
}
"""The compiler's flags for each CPU capability of torch. Other capabilities take plain loops."""


@once
def load() -> Any | None:
    """Load the kernels; return ``torch.ops.gact_graph``, or None with one warning on failure."""
    try:
        prebuilt.load(prebuilt_name(variant()))
    except OSError as error:
        if not _builds_instead_of(error):
            return None
    allocator.load_soon()
    return getattr(torch.ops, NAMESPACE)


@once
def build(vector_flags: tuple[str, ...], namespace: str = NAMESPACE) -> Any:
    """Compile the kernels, or find them in the cache, and load them.

    Args:
        vector_flags: A value of :data:`VECTOR_FLAGS`.
        namespace: The namespace of the operators that the kernels are registered with.

    Returns:
        ``torch.ops``'s namespace.

    Raises:
        FileNotFoundError: If there is no compiler.
        RuntimeError: If the compiler fails.
        OSError: If the library cannot be loaded.
    """
    library.build("cpu", flags(vector_flags, namespace))
    return getattr(torch.ops, namespace)


def built(command: Sequence[str]) -> Path | None:
    """Return the library that a compiler has built for this processor, or None; compile nothing.

    Raises:
        OSError: If the compiler does not start.
    """
    return library.built("cpu", command, flags(VECTOR_FLAGS[variant()]))


def variant() -> str:
    """Return the key of :data:`VECTOR_FLAGS` for this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in VECTOR_FLAGS else "DEFAULT"


def flags(vector_flags: Sequence[str], namespace: str = NAMESPACE) -> list[str]:
    """Return the compiler's options for the kernels."""
    return [*_FLAGS, *vector_flags, f"-DGACT_LIBRARY={namespace}"]


def prebuilt_name(of_variant: str) -> str:
    """Return the name of a wheel's library with the kernels of a variant."""
    return f"cpu-{of_variant}"


def _builds_instead_of(missing: OSError) -> bool:
    """Build the kernels, and warn of whatever is not as expected; return whether they serve."""
    try:
        build(VECTOR_FLAGS[variant()])
    except Exception as error:  # of any type that a toolchain raises: use the reference
        remedy = "a C++ compiler (g++ or clang++)"
        notices.warn("build its CPU kernels", remedy, error, str(missing))
        return False
    if not isinstance(missing, FileNotFoundError):
        notices.warn_of_prebuilt(missing)
    return True
