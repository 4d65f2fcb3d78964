"""Processes of ``torch.multiprocessing.spawn`` end by themselves once their work is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
import gact_graph

def work(rank, store, wraps):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    if wraps:
        gact_graph.wrap(net, bits=4, min_bytes=0)
    model = DistributedDataParallel(net)
    for _ in range(4):
        model(torch.randn(4096, 32)).sum().backward()
    # Before its group. A model that outlives the group, wrapped or not, may hang when it is freed:
    # PyTorch joins gloo's thread with the global interpreter lock, which that thread may need.
    del model
    dist.destroy_process_group()

if __name__ == "__main__":
    store, wraps = sys.argv[1:]
    torch.multiprocessing.spawn(work, (store, wraps == "wrapped"), nprocs=2)
    print("ended")
"""


@pytest.mark.long
@pytest.mark.parametrize("net", ["imported", "wrapped"])
def test_two_ranks_end(net: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), net],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,  # of a process that would never end: this takes seconds
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "ended", done.stderr
