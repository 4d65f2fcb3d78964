"""Runs a script in several processes with a gloo group between them."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from fresh import ROOT, Fresh

__all__ = ["ROOT", "run_ranks", "start_ranks"]

BEGIN = """
import datetime, json, os, sys, warnings
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import gact_graph

warnings.simplefilter("error")
rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=60),
)
arguments = sys.argv[4:]

def gathered(value):
    found = [None] * world
    dist.all_gather_object(found, value)
    return found
"""

END = """
dist.barrier()
print("ended", flush=True)
os._exit(0)  # gloo's threads may end a process that leaves them with an abort
"""


def run_ranks(script: str, folder: Path, *arguments: str, world: int = 2) -> list[str]:
    """Run a script in each process and return the output of each; all must end well.

    The script finds ``rank``, ``world``, ``arguments``, and ``gathered(value)``: the values of all
    ranks.
    """
    done = start_ranks(script, folder, *arguments, world=world)
    assert all(code == 0 and "ended" in out for code, out, _ in done), done
    return [out for _, out, _ in done]


def start_ranks(
    script: str, folder: Path, *arguments: str, world: int = 2
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process."""
    code = BEGIN + textwrap.dedent(script) + END
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        Fresh(
            code, str(rank), str(world), str(folder / "store"), *arguments, environment=environment
        )
        for rank in range(world)
    ]
    try:
        outs = [rank.communicate(timeout=400) for rank in ranks]
        return [(rank.returncode or 0, *out) for rank, out in zip(ranks, outs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
