"""One job at a time in a folder of results, on a disk that takes what it writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.helpers import atomic
from experiments.helpers.atomic import write_atomically
from experiments.helpers.errors import LockedError, ResultsError
from experiments.helpers.folder import LOCK_NAME, check_folder, hold_folder

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from experiments.helpers.folder import hold_folder
with hold_folder(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


def no_warning(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_second_job_is_told_who_has_it(tmp_path: Path, holder) -> None:
    words = rf"^Expected no other job in .* \(got process {holder.pid} on .+, since 20.*give"
    with pytest.raises(LockedError, match=words) as caught, hold_folder(tmp_path, no_warning):
        pass
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_killed_job_leaves_no_lock(tmp_path: Path, holder) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with hold_folder(tmp_path, no_warning):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_holds_within_a_process_too(tmp_path: Path) -> None:
    with (
        hold_folder(tmp_path, no_warning),
        pytest.raises(LockedError),
        hold_folder(tmp_path, no_warning),
    ):
        pass
    with hold_folder(tmp_path, no_warning):
        pass


def test_a_holder_that_has_not_written_its_name(tmp_path: Path) -> None:
    with (tmp_path / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="not told its name"), hold_folder(tmp_path, print):
            pass


def test_without_locks_in_the_file_system_the_user_is_told(tmp_path: Path, monkeypatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    told: list[str] = []
    with hold_folder(tmp_path, told.append):
        assert list(tmp_path.iterdir()) == []
    (text,) = told
    assert text.startswith(f"The file system of {tmp_path} has no locks: see to it")


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".result.json.abc.part").write_text('{"half')
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "notes.part").write_text("mine")
    with hold_folder(tmp_path, no_warning):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "notes.part"}


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResultsError, match="Expected --out to be a folder to read and write"):
            check_folder(out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("function", ["fsync", "open"])
def test_a_bad_disk_is_noticed(tmp_path: Path, monkeypatch, number: int, function: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    module = atomic.os if function == "fsync" else atomic.tempfile
    monkeypatch.setattr(module, "fsync" if function == "fsync" else "mkstemp", refuse)
    with pytest.raises(ResultsError, match=os.strerror(number)):
        check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def full_disk(tmp_path: Path):
    """A disk of 64 kB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode
    except OSError:
        done = 1
    if done:
        pytest.skip("mounting a small disk is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_noticed(full_disk: Path) -> None:
    with pytest.raises(ResultsError, match="No space left on device"):
        check_folder(full_disk)
    assert list(full_disk.iterdir()) == []
    write_atomically(full_disk / "small", b"fits")
    with pytest.raises(ResultsError, match="No space left on device"):
        write_atomically(full_disk / "small", bytes(100_000))
    assert (full_disk / "small").read_bytes() == b"fits"
    assert len(list(full_disk.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResultsError, match="Permission denied"):
        check_folder(tmp_path)
