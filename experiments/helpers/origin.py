"""Where a file of numbers comes from: the command, the machine and the versions behind it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from experiments.helpers.machine import gpus
from experiments.helpers.results import current_versions


def origin(program: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return ``command``, ``machine`` and ``versions``, to be written beside a run's numbers.

    Args:
        program: The command's name in :mod:`experiments`, as in ``memory``.
        argv: Its flags; ``None`` takes those of this process.
    """
    flags = sys.argv[1:] if argv is None else argv
    return {
        "command": command(program, flags),
        "machine": machine(),
        "versions": current_versions(),
    }


def command(program: str, flags: Sequence[str]) -> str:
    """Return the command line, with names for the folders that differ from machine to machine.

    >>> command("memory", ["--dataset", "/home/me/cora.npz", "--out", "/tmp/x"])
    'python -m experiments.memory --dataset DATA/cora.npz --out DIR'
    >>> command("estimates", ["--datasets", "digits,/home/me/cora.npz"])
    'python -m experiments.estimates --datasets digits,DATA/cora.npz'
    """
    named, before = [], ""
    for flag in flags:
        if before in ("--out", "--data", "--data-root"):
            named.append("DIR" if before == "--out" else "DATA")
        elif flag.endswith(".npz"):
            named.append(",".join(map(_named, flag.split(","))))
        else:
            named.append(flag)
        before = flag
    return " ".join([f"python -m experiments.{program}", *map(shlex.quote, named)])


def _named(dataset: str) -> str:
    return f"DATA/{PurePath(dataset).name}" if dataset.endswith(".npz") else dataset


def machine() -> str:
    """Name the processor, its cores and the GPUs, as in ``AMD EPYC, 2 cores, no GPU``."""
    names = [gpu["name"] for gpu in gpus()] or ["no GPU"]
    return ", ".join([_processor(), f"{os.cpu_count()} cores", *names])


def _processor() -> str:
    """The model's name; the standard library tells it on some systems only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
