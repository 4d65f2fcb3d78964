"""Which builds of the CPU kernels this processor can run."""

from __future__ import annotations

import torch

CAPABILITY = torch.backends.cpu.get_cpu_capability()
RUNNABLE = {
    "AVX512": ("AVX512", "AVX2", "DEFAULT"),
    "AVX2": ("AVX2", "DEFAULT"),
}.get(CAPABILITY, ("DEFAULT",))
