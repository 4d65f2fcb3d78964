"""Results that a command goes on from, and the folder in which it works alone."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.helpers.errors import LockedError, ResultsError
from experiments.helpers.kept import Kept, hold_folder, write_atomically

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"steps": 3, "config": {"lr": 0.01, "bits": 4}}
ORIGIN = {"command": "python -m it --rounds 1", "versions": {"torch": "2.13.0"}}
HOLDER = """
import sys, time
from pathlib import Path
from experiments.helpers.kept import hold_folder
with hold_folder(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


def never() -> Any:
    raise AssertionError("measured again")


class TestKept:
    @pytest.mark.parametrize(
        ("place", "found", "content"),
        [
            (("variants", "a"), 1, {"variants": {"a": 1}}),
            (("rounds", "a", 0), 1, {"rounds": {"a": [1]}}),
            (("runs", {"bits": 4}), {"rate": 2.0}, {"runs": [{"bits": 4, "rate": 2.0}]}),
            (("models", "a", "b"), (1, math.nan), {"models": {"a": {"b": [1, None]}}}),
        ],
    )
    def test_each_place_is_found_once(
        self, tmp_path: Path, place: Any, found: Any, content: dict[str, Any]
    ) -> None:
        path = tmp_path / "new" / "a.json"
        first = Kept(path, SETTINGS, ORIGIN).once(place, lambda: found)
        assert json.loads(path.read_text()) == SETTINGS | ORIGIN | content
        again = Kept(path, SETTINGS, ORIGIN | {"command": "another"})
        assert again.once(place, never) == first
        assert again.content["command"] == "another"

    def test_a_failure_is_tried_again_and_a_want_of_memory_is_not(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path / "a.json", SETTINGS)
        results = iter([{"reason": "failed: x"}, {"reason": "out of memory"}])
        assert kept.once(("rounds", "a", 0), lambda: next(results)) == {"reason": "failed: x"}
        kept.once(("rounds", "a", 0), lambda: next(results))
        assert kept.once(("rounds", "a", 0), never) == {"reason": "out of memory"}

    def test_numbers_survive_an_error_after_them(self, tmp_path: Path) -> None:
        kept = Kept(tmp_path / "a.json", {}, derive=lambda content: {"sum": sum(content["of"])})
        kept.once(("of", 0), lambda: 4)
        with pytest.raises(AssertionError):
            kept.once(("of", 1), never)
        assert json.loads((tmp_path / "a.json").read_text()) == {"of": [4], "sum": 4}

    @pytest.mark.parametrize(
        ("settings", "origin", "words"),
        [
            ({"steps": 4, "config": SETTINGS["config"]}, {}, "steps 3 instead of 4"),
            ({"steps": 3, "config": {"lr": 0.5}}, {}, "bits 4 instead of None, lr 0.01 instead"),
            (SETTINGS, {"versions": {"torch": "1.0"}}, "versions.torch '2.13.0' instead of '1.0'"),
        ],
    )
    def test_another_setting_is_refused_by_its_name(
        self, tmp_path: Path, settings: Any, origin: Any, words: str
    ) -> None:
        path = tmp_path / "a.json"
        Kept(path, SETTINGS, ORIGIN).write()
        before = path.read_bytes()
        with pytest.raises(ResultsError) as caught:
            Kept(path, settings, ORIGIN | origin)
        assert f"of the same settings (got {words}" in str(caught.value)
        assert "\n" not in str(caught.value) and path.read_bytes() == before

    @pytest.mark.parametrize("content", [b"", b'{"steps": 3, "co', b"[]", b"\xff", b"[" * 10**5])
    def test_a_broken_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ResultsError, match=r"a.json to be a result of this command \(got"):
            Kept(tmp_path / "a.json", SETTINGS)
        assert (tmp_path / "a.json").read_bytes() == content


class TestWriting:
    def test_replaces_the_file_and_leaves_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"a much longer old content")
        (tmp_path / ".file.part").write_text("of a process that was killed")
        write_atomically(path, b"new")
        assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    def test_a_failure_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"old")

        def refuse(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(ResultsError, match=f"able to write .*file.*{os.strerror(number)}"):
            write_atomically(path, b"new")
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


class TestFolder:
    def test_the_second_job_names_the_first(self, tmp_path: Path, holder) -> None:
        words = rf"^Expected no other job in .* \(got process {holder.pid}\): wait.*give"
        with pytest.raises(LockedError, match=words) as caught, hold_folder(tmp_path, print):
            pass
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with hold_folder(tmp_path, print):
            assert list(tmp_path.iterdir()) == []

    def test_the_lock_holds_within_a_process_too(self, tmp_path: Path) -> None:
        out = tmp_path / "new"
        with hold_folder(out, print), pytest.raises(LockedError), hold_folder(out, print):
            pass
        with hold_folder(tmp_path / "new", print):
            pass

    def test_without_locks_in_the_file_system_a_line_says_so(self, tmp_path, monkeypatch) -> None:
        def refuse(handle: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        said: list[str] = []
        with hold_folder(tmp_path, said.append):
            pass
        assert said[0].startswith(f"The file system of {tmp_path} has no locks: see to it")

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            words = "Expected --out to be a folder to read"
            with pytest.raises(ResultsError, match=words), hold_folder(out, print):
                pass

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_may_not_be_written(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(ResultsError, match="Permission denied"), hold_folder(tmp_path, print):
            pass
