"""Waits until a device has finished its work, and reads the time then."""

from __future__ import annotations

from time import perf_counter

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all of its work; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_on(device: torch.device) -> float:
    """Return the time in seconds since an arbitrary start, once a device has done its work."""
    synchronize(device)
    return perf_counter()
