"""What is said of work that takes long: when, how often, where and by whom. No test waits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
import torch

from gact_graph.ops import cpu
from gact_graph.ops.kernels import library
from gact_graph.support import progress
from gact_graph.support.progress import log_if_slow


class Timers:
    """In place of the clock: the test says when time is up."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.seconds: list[float] = []
        self.fire_at_once = False
        self.now = 100.0

    def later(self, seconds: float, function: Callable[[], None]) -> Timers:
        self.seconds.append(seconds)
        self.waiting.append(function)
        if self.fire_at_once:
            function()
        return self

    def cancel(self) -> None:
        self.waiting.pop()


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found = Timers()
    monkeypatch.setattr(progress, "later", found.later)
    monkeypatch.setattr(progress, "_reported", set())
    monkeypatch.setattr(progress, "monotonic", lambda: found.now)
    # One without a parent, since pytest has handlers of its own on the root logger.
    monkeypatch.setattr(progress, "_logger", logging.Logger("gact_graph"))
    for name in progress._RANKS:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def silent(capsys: pytest.CaptureFixture[str]) -> Callable[[], bool]:
    return lambda: capsys.readouterr() == ("", "")


def test_short_work_is_not_reported(timers: Timers, silent: Callable[[], bool]) -> None:
    with log_if_slow("counting"):
        (begin,) = timers.waiting
    assert timers.seconds == [2.0] and timers.waiting == []
    begin()  # a timer that could not be canceled any more
    assert silent()


def test_long_work_is_reported_while_it_lasts(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    with log_if_slow("counting"):
        timers.waiting[0]()
        assert capsys.readouterr() == ("", "gact_graph: counting\n")
        timers.now += 14.24
    assert capsys.readouterr() == ("", "gact_graph: counting took 14.2 s\n")


def test_lines_of_work_within_work_do_not_run_into_each_other(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    with log_if_slow("estimating"), log_if_slow("measuring"):
        pass
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "gact_graph: estimating",
        "gact_graph: measuring",
        "gact_graph: measuring took 0.0 s",
        "gact_graph: estimating took 0.0 s",
    ]


def test_it_is_reported_once(timers: Timers, capsys: pytest.CaptureFixture) -> None:
    timers.fire_at_once = True
    for work in ("counting", "counting", "sorting"):
        with log_if_slow(work):
            pass
    said = capsys.readouterr().err
    assert said.count("counting") == said.count("sorting") == 2  # when it begins and when it ends
    assert said.count("\n") == 4


def test_what_was_quick_at_first_may_be_reported_later(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    with log_if_slow("counting"):
        pass
    timers.fire_at_once = True
    with log_if_slow("counting"):
        pass
    assert "counting" in capsys.readouterr().err


def test_the_line_ends_where_the_work_fails(timers: Timers, capsys: pytest.CaptureFixture) -> None:
    timers.fire_at_once = True
    with pytest.raises(RuntimeError, match="broken"), log_if_slow("counting"):
        raise RuntimeError("broken")
    assert capsys.readouterr().err.endswith(" s\n")


def handled(level: int) -> list[str]:
    """What a handler gets from the library's logger, which has this level."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    progress._logger.addHandler(handler)
    progress._logger.setLevel(level)
    return found


def test_logging_that_shows_info_gets_records(timers: Timers, silent: Callable[[], bool]) -> None:
    found = handled(logging.INFO)
    with log_if_slow("counting"):
        timers.waiting[0]()
        timers.now += 3
    assert found == ["counting", "counting took 3.0 s"]
    assert silent()


def test_logging_that_was_set_up_for_others_does_not_hide_the_line(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    found = handled(logging.WARNING)
    # The handler and the level are those of the root logger, as after logging.basicConfig().
    root, progress._logger = progress._logger, logging.Logger("gact_graph")
    progress._logger.parent = root
    with log_if_slow("counting"):
        pass
    assert "counting" in capsys.readouterr().err
    assert found == []


def test_a_higher_level_silences_it(timers: Timers, silent: Callable[[], bool]) -> None:
    timers.fire_at_once = True
    found = handled(logging.WARNING)
    with log_if_slow("counting"):
        pass
    assert found == [] and silent()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_other_ranks_say_nothing(
    name: str, timers: Timers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    monkeypatch.setenv(name, "1")
    with log_if_slow("counting"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(name, "0")
    with log_if_slow("counting"):
        pass
    assert "counting" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_the_group_knows_the_rank_best(
    rank: int, timers: Timers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setenv("RANK", str(1 - rank))
    with log_if_slow("counting"):
        pass
    assert ("counting" in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize("kind", ["none", "closed"])
def test_without_stderr_work_goes_on(
    kind: str, timers: Timers, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    timers.fire_at_once = True
    closed = open(tmp_path / "closed", "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else closed)
    with log_if_slow("counting"):
        done = True
    assert done


def test_building_kernels_is_reported(
    timers: Timers, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    timers.fire_at_once = True
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def fails(*args: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(library, "compile_library", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        cpu.build.__wrapped__(())
    said = capsys.readouterr().err
    assert said.startswith("gact_graph: compiling kernels for the CPU, which are then kept in")
    assert str(tmp_path) in said
