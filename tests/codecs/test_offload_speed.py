"""The time to offload a byte, which plans use."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from gact_graph.codecs.offload.speed import seconds_of_byte

CPU = torch.device("cpu")


def test_a_byte_takes_time_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seconds = seconds_of_byte(CPU, 1000)
    assert seconds is None or 0 < seconds < 1
    assert seconds_of_byte(CPU, 1e18) is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_a_folder_in_memory_takes_nothing_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert seconds_of_byte(CPU, 1000) is None
