"""GPUs of this machine, by name and driver."""

from __future__ import annotations

import subprocess

_QUERY = ("name", "driver_version", "memory.total")


def gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU from ``nvidia-smi``; empty without it.

    torch is not asked: it knows no driver, and would hold memory of the device from then on.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]
