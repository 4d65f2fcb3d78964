"""The processes that ``torchrun`` starts: each trains on its own batches, or part of a graph."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def world_size() -> int:
    """Return the number of processes of ``torchrun``; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process; 0 writes and prints."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def process_group(device: torch.device, **more: Any) -> Iterator[None]:
    """Join the other processes inside the context; do nothing if there are none.

    ``more`` are arguments of ``init_process_group`` in place of the variables of ``torchrun``.
    """
    if world_size() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **more)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def of_first(value: Value) -> Value:
    """Return the value of rank 0, on all ranks."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def summed(values: Tensor) -> Tensor:
    """Return the sum over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def mean(values: list[float]) -> float:
    """Return the mean over the values of all ranks; a rank may have none."""
    gathered = [values]
    if world_size() > 1:
        gathered = [[] for _ in range(world_size())]
        dist.all_gather_object(gathered, values)
    return statistics.fmean(itertools.chain.from_iterable(gathered))
