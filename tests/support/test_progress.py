"""The progress line of slow work: when, how often, where and on which rank. No test waits."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from gact_graph.ops import cpu
from gact_graph.ops.kernels import library
from gact_graph.support import progress as module
from gact_graph.support.progress import later as _later
from gact_graph.support.progress import progress


class Timers:
    """In place of the clock: the test says when time is up."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.seconds: list[float] = []
        self.fire_at_once = False

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
    monkeypatch.setattr(module, "later", found.later)
    monkeypatch.setattr(module, "_logged", set())
    # One without a parent, since pytest has handlers of its own on the root logger.
    monkeypatch.setattr(module, "_logger", logging.Logger("gact_graph"))
    for name in module._RANKS:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def silent(capsys: pytest.CaptureFixture[str]) -> Callable[[], bool]:
    return lambda: capsys.readouterr() == ("", "")


def test_short_work_is_not_reported(timers: Timers, silent: Callable[[], bool]) -> None:
    with progress("counting"):
        (begin,) = timers.waiting
    assert timers.seconds == [1.0] and timers.waiting == []
    begin()  # a timer that could not be canceled any more
    assert silent()


def test_long_work_is_reported_while_it_lasts(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    with progress("counting"):
        timers.waiting[0]()
        assert capsys.readouterr() == ("", "gact_graph: counting\n")
    assert capsys.readouterr() == ("", "")


def test_work_within_work_has_a_line_of_its_own_in_a_log(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    with progress("estimating"), progress("measuring"):
        pass
    said = capsys.readouterr().err.splitlines()
    assert said == ["gact_graph: estimating", "gact_graph: measuring"]


def test_it_is_reported_once(timers: Timers, capsys: pytest.CaptureFixture) -> None:
    timers.fire_at_once = True
    for work in ("counting", "counting", "sorting"):
        with progress(work):
            pass
    assert capsys.readouterr().err == "gact_graph: counting\ngact_graph: sorting\n"


def test_what_was_quick_at_first_may_be_reported_later(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    with progress("counting"):
        pass
    timers.fire_at_once = True
    with progress("counting"):
        pass
    assert "counting" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stderr that someone watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def watched(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    timers.fire_at_once = True
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def open_terminal() -> Terminal:  # in the test, since pytest sets stderr when one begins
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return open_terminal


HIDDEN, SHOWN_AGAIN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


def test_a_terminal_has_one_line_which_disappears(watched: Callable[[], Terminal]) -> None:
    terminal = watched()
    with progress("estimating"):
        assert terminal.getvalue().count("gact_graph: estimating") == 1
        with progress("measuring"):
            assert module._line is not None and module._shown == ["estimating", "measuring"]
            assert terminal.getvalue().rpartition(ERASED)[2].endswith("gact_graph: measuring")
        assert terminal.getvalue().rpartition(ERASED)[2].endswith("gact_graph: estimating")
    assert module._line is None and module._shown == []
    assert terminal.getvalue().count(HIDDEN) == terminal.getvalue().count(SHOWN_AGAIN) == 1
    assert terminal.getvalue().endswith(ERASED)
    with progress("estimating"):  # each time, since nothing remains
        assert module._line is not None


def test_the_line_disappears_where_the_work_fails(watched: Callable[[], Terminal]) -> None:
    terminal = watched()
    with pytest.raises(RuntimeError, match="broken"), progress("counting"):
        raise RuntimeError("broken")
    assert module._line is None and terminal.getvalue().endswith(ERASED)


@pytest.mark.parametrize(
    ("name", "value"), [("TERM", "dumb"), ("TTY_INTERACTIVE", "0"), ("TERM", "unknown")]
)
def test_a_terminal_that_cannot_erase_gets_a_line(
    name: str, value: str, watched: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched()
    monkeypatch.setenv(name, value)
    with progress("counting"):
        assert terminal.getvalue() == "gact_graph: counting\n"
    assert terminal.getvalue() == "gact_graph: counting\n"


def test_colors_in_a_log_do_not_make_it_a_terminal(
    watched: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with progress("counting"):
        pass
    assert terminal.getvalue() == "gact_graph: counting\n"


def test_a_terminal_that_hangs_up_does_not_end_the_work(
    watched: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched()

    def fails(_: str) -> int:
        raise OSError("Input/output error")

    with progress("counting"):
        monkeypatch.setattr(terminal, "write", fails)
    assert module._line is None and module._shown == []


def handled(level: int) -> list[str]:
    """What a handler gets from the library's logger, which has this level."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    module._logger.addHandler(handler)
    module._logger.setLevel(level)
    return found


def test_logging_that_shows_info_gets_records(timers: Timers, silent: Callable[[], bool]) -> None:
    found = handled(logging.INFO)
    with progress("counting"):
        timers.waiting[0]()
    assert found == ["counting"]
    assert silent()


def test_logging_that_was_set_up_for_others_does_not_hide_the_line(
    timers: Timers, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    found = handled(logging.WARNING)
    # The handler and the level are those of the root logger, as after logging.basicConfig().
    root, module._logger = module._logger, logging.Logger("gact_graph")
    module._logger.parent = root
    with progress("counting"):
        pass
    assert "counting" in capsys.readouterr().err
    assert found == []


def test_a_higher_level_silences_it(timers: Timers, silent: Callable[[], bool]) -> None:
    timers.fire_at_once = True
    found = handled(logging.WARNING)
    with progress("counting"):
        pass
    assert found == [] and silent()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_other_ranks_say_nothing(
    name: str, timers: Timers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    timers.fire_at_once = True
    monkeypatch.setenv(name, "1")
    with progress("counting"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(name, "0")
    with progress("counting"):
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
    with progress("counting"):
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
    with progress("counting"):
        done = True
    assert done


def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)


def test_nothing_is_shown_where_memory_is_limited(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, silent: Callable[[], bool]
) -> None:
    """A thread that gets no memory may end before it has started, and start() waits forever."""
    monkeypatch.setattr(module, "has_limit", lambda: True)
    timers.fire_at_once = True
    with progress("counting"):
        done = True
    assert done and silent() and timers.seconds == []


def test_without_a_thread_for_the_timer_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, silent: Callable[[], bool]
) -> None:
    monkeypatch.setattr(module, "later", _later)  # the actual timer
    _without_threads(monkeypatch)
    with progress("counting", patience=0):
        done = True
    assert done and silent()


def test_without_a_thread_for_the_line_work_goes_on(
    watched: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched()
    _without_threads(monkeypatch)
    with progress("counting"):
        done = True
    assert done and terminal.getvalue()
    assert module._line is None and module._shown == []


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
