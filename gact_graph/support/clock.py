"""The time at which a device has done its work."""

from __future__ import annotations

from time import perf_counter

import torch


def seconds_on(device: torch.device) -> float:
    """Return the time in seconds since an arbitrary start, once a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
