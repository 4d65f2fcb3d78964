from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.helpers.atomic import write_atomically
from experiments.helpers.errors import ResultsError


def test_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a much longer old content")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_keeps_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ResultsError, match=r"Expected to be able to write .*file.*No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="Expected to be able to write"):
        write_atomically(tmp_path / "nowhere" / "file", b"new")
