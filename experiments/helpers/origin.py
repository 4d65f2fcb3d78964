"""The origin of a file of numbers: command, commit, machine and versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
import torch_geometric

import gact_graph
from gact_graph.support.memory.policy import SWITCH

_MEASURED = ("gact_graph", "csrc", "experiments", "datasets")
ALLOCATOR = (SWITCH, "LD_PRELOAD", "MALLOC_CONF")
"""Environment variables that choose an allocator."""

VARIABLES = (*ALLOCATOR, "OMP_WAIT_POLICY")
"""Environment variables on which times and peaks depend, besides the number of threads."""

_QUERY = ("name", "driver_version", "memory.total")


def origin(program: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return ``command``, ``environment``, ``commit``, ``machine`` and ``versions`` of a run.

    Args:
        program: The command's name in :mod:`experiments`, as in ``memory``.
        flags: Its flags.
    """
    return {
        "command": command(program, flags),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": commit(),
        "machine": machine(),
        "versions": current_versions(),
    }


def command(program: str, flags: Sequence[str]) -> str:
    """Return the command line, with names for the folders that differ from machine to machine.

    >>> command("memory", ["--dataset", "/home/me/cora.npz", "--out", "/tmp/x"])
    'python -m experiments.memory --dataset DATA/cora.npz --out DIR'
    >>> command("plans", ["--datasets", "digits,/home/me/cora.npz"])
    'python -m experiments.plans --datasets digits,DATA/cora.npz'
    >>> command("overhead", ["--out", "/tmp/times.json"])
    'python -m experiments.overhead --out FILE.json'
    """
    named = map(_named, ["", *flags], flags)
    return " ".join([f"python -m experiments.{program}", *map(shlex.quote, named)])


def _named(before: str, flag: str) -> str:
    """Return a flag, or a name for its path, given the flag before it."""
    if before == "--out":
        return "FILE.json" if flag.endswith(".json") else "DIR"
    if before in ("--data", "--data-root"):
        return "DATA"
    if not flag.endswith(".npz"):
        return flag
    return ",".join(
        f"DATA/{PurePath(file).name}" if file.endswith(".npz") else file for file in flag.split(",")
    )


def commit() -> str | None:
    """Return the commit of the library that is measured, or ``None`` outside of a checkout.

    ``+changes`` follows where files of the library or of the experiments differ from the commit,
    new ones included.
    """
    root = Path(gact_graph.__file__).parent.parent

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)

    try:
        # A virtual environment may lie in a checkout of another project.
        if git("ls-files", "--error-unmatch", "gact_graph/__init__.py").returncode:
            return None
        # Without a lock, and with new files whatever the user's settings are.
        status = ("--no-optional-locks", "status", "--porcelain", "--untracked-files=normal")
        changed = git(*status, "--", *_MEASURED).stdout
        return git("rev-parse", "--short", "HEAD").stdout.strip() + ("+changes" if changed else "")
    except FileNotFoundError:
        return None


def machine() -> str:
    """Return the processor, its cores and the GPUs, as in ``AMD EPYC, 2 cores, no GPU``."""
    names = [gpu["name"] for gpu in gpus()] or ["no GPU"]
    return ", ".join([_processor(), f"{os.cpu_count()} cores", *names])


def _processor() -> str:
    """Return the model's name, which the standard library has on some systems only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU from ``nvidia-smi``; empty without it.

    torch is not used: it does not know the driver, and would hold memory of the device afterwards.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def current_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that may change a run's numbers."""
    libraries = (torch, torch_geometric, numpy, gact_graph)
    versions = {library.__name__: str(library.__version__) for library in libraries}
    return {"python": platform.python_version(), **versions}
