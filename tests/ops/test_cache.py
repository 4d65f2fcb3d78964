"""The CPU kernels are built, cached between processes, and replaced without a compiler.

A stand-in for the compiler keeps what the real one made, so that each test does not take as long as
a build. Each session is a process: its folder, its compiler and its loaded libraries are its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gact_graph.ops import cpu
from gact_graph.ops.kernels import cache, compiler

pytestmark = pytest.mark.long

_ROOT = Path(__file__).resolve().parents[2]

_COMPILER = """#!/bin/sh
# Compiles a file once, and copies what it made from then on; the pause is for whoever interrupts.
previous=
for word; do
  [ "$previous" = -o ] && out=$word
  previous=$word
done
sleep "${PAUSE:-0}"
kept=@store@/$(basename "$out")
if [ ! -f "$kept" ]; then
  @compiler@ "$@" || exit 1
  cp "$out" "$kept.$$" && mv "$kept.$$" "$kept"
fi
cp "$kept" "$out"
"""

_SESSION = """
import sys, threading, warnings
import torch
import gact_graph
from gact_graph.ops import quantize as quantizer
from gact_graph.ops import cpu
from gact_graph.ops.allocations import watching_allocations
from gact_graph.ops.reference import quantize as reference
cpu._FLAGS = ["-O0", "-std=c++17", "-ffp-contract=off"]  # the building is tested, not the speed
x = torch.linspace(-1, 1, 1000)
expected = reference.pack(x, 2, 256, 0)
failed = []

def use():
    try:
        packed = quantizer.pack(x, 2, seed=0)
        assert torch.equal(packed.codes, expected[0]) and torch.equal(packed.stats, expected[1])
        decoded = reference.unpack(*expected, [1000], 2, 256, x.dtype)
        assert torch.equal(packed.unpack(), decoded)
    except BaseException as error:
        failed.append(error)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    threads = [threading.Thread(target=use) for _ in range(int(sys.argv[1]))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not failed, failed
for warning in caught:
    print(warning.category.__name__, warning.message)
with watching_allocations() as allocations:
    assert (allocations is None) == (cpu.load() is None)
model = gact_graph.wrap(torch.nn.Linear(4, 4), min_bytes=0)
model(torch.ones(1, 4)).sum().backward()
print("built" if cpu.load() else "reference")
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """CXX for a session; the first use runs the real compiler."""
    folder = tmp_path_factory.mktemp("compiler")
    script = folder / "compiler"
    ((real, *_), *_) = compiler.commands()
    text = _COMPILER.replace("@store@", str(folder))
    script.write_text(text.replace("@compiler@", str(shutil.which(real))))
    script.chmod(0o755)
    return str(script)


def _start(
    folder: Path | None, cxx: str, threads: int = 1, **changed: str | None
) -> subprocess.Popen[str]:
    # The plain build runs on every processor.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    environment |= {"CXX": cxx, "PYTHONPATH": str(_ROOT)}
    if folder is not None:
        environment["TORCH_EXTENSIONS_DIR"] = str(folder)
    for name, value in changed.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.Popen(
        [sys.executable, "-c", _SESSION, str(threads)],
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _output(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out.splitlines()


def _library(folder: Path) -> Path:
    """The file with the kernels; nothing lies beside it but that of the allocator."""
    files = [*(folder / "gact_graph").iterdir()]
    (kernels,) = (path for path in files if path.name.startswith("gact_graph_cpu_"))
    others = {path.name.rsplit("_", 1)[0] + path.suffix for path in files if path != kernels}
    assert others <= {"gact_graph_allocator.so"} and kernels.suffix == ".so"
    return kernels


def test_without_a_compiler_the_reference_serves_with_one_warning(tmp_path: Path) -> None:
    session = _start(tmp_path, str(tmp_path / "no-such-compiler"), threads=3, PATH="")
    *warned, last = _output(session)
    assert last == "reference"
    assert len([line for line in warned if line.startswith("RuntimeWarning")]) == 1
    text = "\n".join(warned)
    assert "could not build its CPU kernels" in text
    assert "Install a C++ compiler (g++ or clang++)" in text
    assert "Expected CXX to name a C++ compiler on PATH (got" in text
    assert "python -m gact_graph.info" in text
    assert not [*tmp_path.rglob("*.so")]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    session = _start(tmp_path, _program("false"), PATH="")
    assert _output(session)[-1] == "reference"
    assert [*(tmp_path / "gact_graph").iterdir()] == []


@pytest.mark.parametrize("wrong", ["no-such-compiler -O2", "false"])
def test_another_compiler_builds_where_cxx_names_none(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "g++").symlink_to(_program("true"))
    (tmp_path / "false").symlink_to(_program("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", wrong)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"a library")  # `true` makes none
    words = f"with CXX='{wrong}' and takes 'g\\+\\+' instead. Set CXX to a C\\+\\+ compiler"
    with pytest.warns(RuntimeWarning, match=words) as warned:
        cpu.build.__wrapped__(())
    assert len(warned) == 1 and loaded == [str(_library(tmp_path))]


def _path_of_system(folder: Path) -> str:
    """PATH with nothing but the programs that a compiler needs."""
    only = folder / "bin"
    only.mkdir()
    for program in ("sh", "sleep", "basename", "cp", "mv", "as", "ld"):
        (only / program).symlink_to(_program(program))
    return str(only)


def _program(name: str) -> str:
    actual = shutil.which(name)
    assert actual is not None
    return actual


def test_no_ninja_and_no_activated_venv_is_needed(tmp_path: Path, stand_in: str) -> None:
    """Nothing but the system's own programs is on PATH."""
    path = _path_of_system(tmp_path)
    assert _output(_start(tmp_path, stand_in, PATH=path)) == ["built"]


def test_several_processes_build_at_once_and_another_finds_the_library(
    tmp_path: Path, stand_in: str
) -> None:
    sessions = [_start(tmp_path, stand_in) for _ in range(4)]
    assert [_output(session) for session in sessions] == [["built"]] * 4
    written = _library(tmp_path).stat().st_mtime_ns
    # Without a compiler: the file alone serves. The name depends on CXX, so it is the same script.
    assert _output(_start(tmp_path, stand_in, PATH="")) == ["built"]
    assert _library(tmp_path).stat().st_mtime_ns == written


def test_threads_that_come_first_wait_for_one_build(tmp_path: Path, stand_in: str) -> None:
    for turn in range(3):
        assert _output(_start(tmp_path / str(turn), stand_in, threads=8)) == ["built"]
        _library(tmp_path / str(turn))


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed"])
def test_a_broken_library_is_built_anew(damage: str, tmp_path: Path, stand_in: str) -> None:
    assert _output(_start(tmp_path, stand_in)) == ["built"]
    library = _library(tmp_path)
    whole = library.read_bytes()
    broken = {"truncated": whole[: len(whole) // 3], "empty": b"", "changed": whole[:-1] + b"?"}
    library.write_bytes(broken[damage])
    assert _output(_start(tmp_path, stand_in)) == ["built"]
    assert _library(tmp_path).read_bytes() == whole


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path, stand_in: str) -> None:
    assert _output(_start(tmp_path, stand_in)) == ["built"]
    library = _library(tmp_path)
    library.chmod(0o777)
    before = library.stat().st_ino
    with library.open("rb"):  # while it is open, no other file gets its number
        assert _output(_start(tmp_path, stand_in)) == ["built"]
    assert _library(tmp_path).stat().st_ino != before
    assert not _library(tmp_path).stat().st_mode & 0o022


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another owner")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, stand_in: str) -> None:
    place = tmp_path / "gact_graph"
    place.mkdir()
    place.chmod(0o777)
    os.chown(place, 12345, 12345)
    warned, last = _output(_start(tmp_path, stand_in))
    assert last == "built"
    assert "cannot keep its compiled kernels in" in warned and "another user" in warned
    assert [*place.iterdir()] == []


def test_a_home_that_cannot_be_written(tmp_path: Path, stand_in: str) -> None:
    (tmp_path / "home").write_text("a file")
    home = str(tmp_path / "home")
    session = _start(None, stand_in, HOME=home, TORCH_EXTENSIONS_DIR=None, XDG_CACHE_HOME=None)
    warned, last = _output(session)
    assert last == "built" and "Set TORCH_EXTENSIONS_DIR to a folder that you alone" in warned


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_variable_that_is_no_absolute_path_does_not_count(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library would be loaded from wherever the process runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache.folder() == tmp_path / ".cache" / "gact_graph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache.folder() == tmp_path / "cache" / "gact_graph"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", value)
    assert cache.folder() is None


def test_files_of_a_killed_build_are_removed_later(tmp_path: Path, stand_in: str) -> None:
    killed = _start(tmp_path, stand_in, PAUSE="60")
    place = tmp_path / "gact_graph"
    while not [*place.glob(f"{cache.BUILD}*/*")] and not [*place.glob(f"{cache.BUILD}*")]:
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (left,) = place.glob(f"{cache.BUILD}*")
    assert _output(_start(tmp_path, stand_in)) == ["built"]
    assert left.exists()  # it might be that of a build under way
    os.utime(left, (time.time() - 7200,) * 2)
    assert _output(_start(tmp_path, stand_in)) == ["built"]
    assert not left.exists()
    _library(tmp_path)
