"""A step that breaks off anywhere, by an error or a signal, leaves the model as it was."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from beside import small_storages_count
from small_net import WAYS, Net, parts_of
from torch import Tensor, nn

import gact_graph
from gact_graph.capture.trace import Trace
from gact_graph.support import current
from gact_graph.support.torch_private import function_mode

HERE = str(Path(gact_graph.__file__).parent)
MADE = torch.Generator().manual_seed(0)
X = torch.randn(20, 8, generator=MADE, dtype=torch.float64)
EDGES = torch.randint(20, (2, 70), generator=MADE)


def _model(options: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net().double()
    return (
        model if options is None else gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
    )


def _step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(X, EDGES).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


class Lines:
    """Counts the lines of the library that run, and raises at one of them.

    The line of a ``with`` runs again at its end. An exception of a tracer there skips the exit of
    the context manager, which no exception of a signal handler does, so these lines do not count.
    """

    def __init__(self, at: int | None) -> None:
        self.count, self._at = 0, at
        self._last: dict[int, int] = {}  # by frame

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(HERE):
            return None
        goes_back = line < self._last.get(id(frame), 0)
        self._last[id(frame)] = line
        if event != "line" or (goes_back and linecache.getline(file, line).strip()[:5] == "with "):
            return self
        self._see()
        return self

    def _see(self) -> None:
        self.count += 1
        if self.count == self._at:
            raise KeyboardInterrupt


class Edges(Lines):
    """Counts where context managers of the library have started and are about to end.

    These are outside of the library: in contextlib, after the code before ``yield`` and before the
    code after it.
    """

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code, caller = frame.f_code, frame.f_back
        edge = {"__enter__": "return", "__exit__": "call"}.get(code.co_name)
        if code.co_filename != contextlib.__file__ or edge is None or caller is None:
            return None
        if event == edge and caller.f_code.co_filename.startswith(HERE):
            self._see()
        return self


@contextmanager
def _tracing(lines: Lines) -> Iterator[None]:
    """Without garbage collection: Python drops exceptions raised while an object is finalized."""
    before = sys.gettrace()
    gc.disable()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def _recovers(model: nn.Module, parts: dict[str, Any], expected: list[Tensor]) -> str | None:
    """Return the fault of the model after a step that broke off, or None."""
    # torch's own no_grad stays on if a signal comes as it ends, stock too.
    torch.set_grad_enabled(True)
    if current.current() is not None:
        return "it is still captured"
    mode = function_mode()
    if isinstance(mode, Trace) and not mode.is_closed:
        return "it is still traced"
    if parts_of(model) != parts:
        now = parts_of(model)
        return f"{[key for key in parts if now.get(key) != parts[key]]} changed"
    got = _step(model)
    close = all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(got, expected, strict=True))
    return None if close else "the next step is wrong"


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_an_error_at_any_line(name: str) -> None:
    expected = _step(_model(None))
    choose = random.Random(0)
    with small_storages_count():
        _step(_model(WAYS[name]))  # a process analyzes a layer once
        counts, reached = {}, 0
        for warm in (False, True):
            model, lines = _model(WAYS[name]), Lines(None)
            if warm:
                _step(model)
            with _tracing(lines):
                _step(model)
            counts[warm] = lines.count
        for _ in range(150):
            model = _model(WAYS[name])
            warm = choose.random() < 0.5
            if warm:
                _step(model)
            parts = parts_of(model)
            at = choose.randrange(1, counts[warm] + 1)
            lines = Lines(at)
            with _tracing(lines), suppress(KeyboardInterrupt):
                _step(model)
            reached += lines.count >= at
            problem = _recovers(model, parts, expected)
            assert problem is None, f"{problem} after an error at line {at}, warm={warm}"
        assert reached > 140


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_an_error_at_each_edge_of_a_context_manager(name: str) -> None:
    expected = _step(_model(None))
    with small_storages_count():
        model = _model(WAYS[name])
        _step(model)
        parts = parts_of(model)
        all_edges = Edges(None)
        with _tracing(all_edges):
            _step(model)
        assert all_edges.count > 20
        for at in range(1, all_edges.count + 1):
            with _tracing(Edges(at)), suppress(KeyboardInterrupt):
                _step(model)
            problem = _recovers(model, parts, expected)
            assert problem is None, f"{problem} after an error at edge {at}"


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_a_signal_at_any_time(name: str) -> None:
    """In a process of its own: a signal that comes as a context manager of torch's ends leaves its
    hooks or modes behind, stock too, and later tests would meet them."""
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _interrupt_often(name: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = _step(_model(None))
    choose = random.Random(0)
    signal.signal(signal.SIGALRM, interrupt)
    with small_storages_count():
        model = _model(WAYS[name])
        _step(model)
        parts = parts_of(model)
        for number in range(100):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-4, 3e-2))
                _step(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            problem = _recovers(model, parts, expected)
            assert problem is None, f"{problem} after signal {number}"


if __name__ == "__main__":
    _interrupt_often(sys.argv[1])
