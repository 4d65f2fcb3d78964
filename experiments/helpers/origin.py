"""Where a file of numbers comes from: command, commit, machine and versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import gact_graph
from experiments.helpers.machine import gpus
from experiments.helpers.results import current_versions

_MEASURED = ("gact_graph", "csrc", "experiments", "datasets")


def origin(program: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return ``command``, ``commit``, ``machine`` and ``versions``, written beside a run's numbers.

    Args:
        program: The command's name in :mod:`experiments`, as in ``memory``.
        argv: Its flags; ``None`` takes those of this process.
    """
    flags = sys.argv[1:] if argv is None else argv
    return {
        "command": command(program, flags),
        "commit": commit(),
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


def commit() -> str | None:
    """Return the commit of the library that is measured, or ``None`` outside of a checkout.

    ``+changes`` follows where files of the library or of the experiments differ from the commit.
    """
    root = Path(gact_graph.__file__).parent.parent

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)

    try:
        # A virtual environment may lie in a checkout of another project.
        if git("ls-files", "--error-unmatch", "gact_graph/__init__.py").returncode:
            return None
        changed = git("diff", "--quiet", "HEAD", "--", *_MEASURED).returncode
        return git("rev-parse", "--short", "HEAD").stdout.strip() + ("+changes" if changed else "")
    except FileNotFoundError:
        return None


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
