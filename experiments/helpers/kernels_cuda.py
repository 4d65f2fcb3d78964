"""``experiments.kernels --device cuda``: speeds beside the device's own copy, and launch costs.

A job's bytes are counted, read plus written, and divided by its time; the ceiling is what a copy
of 1 GiB from the device to the device reaches in the same rounds. Jobs run in turn, and with the
default of 1 GiB of input none finds its input in the cache.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from experiments.helpers.machine import gpus
from experiments.helpers.results import current_versions
from experiments.helpers.timing import launch_seconds, time_on
from gact_graph.info import facts
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import pack

DEFAULT_BYTES = 1 << 30
"""Of the input, where nothing else is asked for, and of the copy that is the ceiling."""

HEAD = ("bits", "pack, ms", "GB/s", "of copy", "unpack, ms", "GB/s", "of copy")

_WORD = 8  # bytes of one bit plane of a tile
_STATS = 4  # bytes of a group's lo and step
_GROUP_SIZE = 256
_LAUNCH_ELEMENTS = 4096
_LAUNCH_BITS = 4
_LAUNCHES = 200  # fewer than a device queues before the host has to wait


def measure(
    elements: int,
    widths: Sequence[int],
    rounds: int,
    dtype: torch.dtype,
    device: torch.device,
    copied: int = DEFAULT_BYTES,
) -> dict[str, Any]:
    """Time ``copy``, ``pack b`` and ``unpack b`` on the device.

    Args:
        elements: Of the tensor that is packed.
        widths: Bits; each below the bits of an element.
        rounds: Times each job is run, after one warm-up.
        dtype: Of the tensor.
        device: CUDA; on the CPU the same jobs are timed by the host's clock.
        copied: Bytes of the copy.

    Returns:
        What :func:`summary` tells of the jobs, and ``launch_microseconds`` of one ``pack`` of a
        small tensor from Python and of one ``copy`` of it.
    """
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(elements, generator=generator, device=device).to(dtype)
    # Not zeros, which some devices move faster.
    origin = torch.randint(256, (copied,), generator=generator, dtype=torch.uint8, device=device)
    target = torch.empty_like(origin)
    jobs: dict[str, Callable[[], Any]] = {"copy": functools.partial(target.copy_, origin)}
    moved = {"copy": copy_bytes(copied)}
    for bits in widths:
        jobs[f"pack {bits}"] = functools.partial(pack, source, bits, group_size=_GROUP_SIZE)
        jobs[f"unpack {bits}"] = pack(source, bits, group_size=_GROUP_SIZE).unpack
        size = (elements, source.element_size(), bits, _GROUP_SIZE)
        moved[f"pack {bits}"] = pack_bytes(*size)
        moved[f"unpack {bits}"] = unpack_bytes(*size)
    seconds = time_on(device, jobs, rounds)
    milliseconds = {name: [1e3 * second for second in times] for name, times in seconds.items()}
    return summary(milliseconds, moved) | {"launch_microseconds": _launches(device, dtype, rounds)}


def summary(
    milliseconds: Mapping[str, Sequence[float]], moved: Mapping[str, int]
) -> dict[str, Any]:
    """Return ``ceiling_gb_per_s``, the copy's speed, and ``jobs``, with times, bytes and speed.

    Args:
        milliseconds: Of every round, by the job's name; one is ``copy``.
        moved: Bytes read plus written, by the job's name.
    """
    median = {name: statistics.median(times) for name, times in milliseconds.items()}
    speed = {name: gigabytes_per_second(moved[name], median[name]) for name in median}
    return {
        "ceiling_gb_per_s": speed["copy"],
        "jobs": {
            name: {
                "milliseconds": list(times),
                "median_milliseconds": median[name],
                "bytes": moved[name],
                "gb_per_s": speed[name],
                "of_ceiling": speed[name] / speed["copy"],
            }
            for name, times in milliseconds.items()
        },
    }


def table(found: Mapping[str, Any], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`, one a width."""
    rows = []
    for bits in widths:
        row = [str(bits)]
        for name in (f"pack {bits}", f"unpack {bits}"):
            job = found["jobs"][name]
            row += [
                f"{job['median_milliseconds']:.3f}",
                f"{job['gb_per_s']:,.0f}",
                f"{job['of_ceiling']:.2f}",
            ]
        rows.append(tuple(row))
    return rows


def notes(found: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    launch = found["launch_microseconds"]
    return [
        f"copy on the device {found['ceiling_gb_per_s']:,.0f} GB/s; bytes are read plus written",
        f"a small pack from Python takes the host {launch['pack']:.1f} us, "
        f"a small copy {launch['copy']:.1f} us",
    ]


def run_state() -> dict[str, Any]:
    """What the numbers stand on: GPUs, kernels and versions."""
    return {
        "gpus": gpus(),
        "kernels": facts()["CUDA kernels"],
        "versions": current_versions(),
        "group_size": _GROUP_SIZE,
    }


def _launches(device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    small = torch.ones(_LAUNCH_ELEMENTS, dtype=dtype, device=device)
    target = torch.empty_like(small)
    jobs = {
        "pack": lambda: pack(small, _LAUNCH_BITS),
        "copy": lambda: target.copy_(small),
    }
    return {
        name: 1e6 * launch_seconds(device, job, _LAUNCHES, rounds) for name, job in jobs.items()
    }


def packed_bytes(elements: int, bits: int, group_size: int) -> int:
    """Codes and stats of a packed tensor."""
    return -(-elements // TILE) * bits * _WORD + -(-elements // group_size) * _STATS


def pack_bytes(elements: int, itemsize: int, bits: int, group_size: int) -> int:
    """The tensor read once, codes and stats written once."""
    return elements * itemsize + packed_bytes(elements, bits, group_size)


def unpack_bytes(elements: int, itemsize: int, bits: int, group_size: int) -> int:
    """Codes and stats read once, the tensor written once: as many bytes as packing moves."""
    return pack_bytes(elements, itemsize, bits, group_size)


def copy_bytes(nbytes: int) -> int:
    """A copy of ``nbytes`` reads and writes them."""
    return 2 * nbytes


def gigabytes_per_second(nbytes: int, milliseconds: float) -> float:
    """Speed in GB/s, of 10^9 bytes.

    >>> gigabytes_per_second(4_000_000, 2.0)
    2.0
    """
    return nbytes / milliseconds / 1e6
