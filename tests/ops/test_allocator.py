"""The optional library of the allocator: where it comes from, and who waits for it."""

from __future__ import annotations

import threading

import pytest
import torch

from gact_graph.ops import allocator
from gact_graph.ops.kernels import library, prebuilt
from gact_graph.ops.kernels.once import once


def test_nobody_waits_for_a_build_but_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, threads = threading.Event(), threading.Event(), list[str]()

    def build(*args: object, **options: object) -> None:
        threads.append(threading.current_thread().name)
        begun.set()
        assert may_end.wait(60)
        raise RuntimeError("the compiler fails")

    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(allocator, "built", lambda command: None)
    monkeypatch.setattr(allocator, "load", once(allocator.load.__wrapped__))
    allocator.load_soon()
    assert begun.wait(60)  # and yet it has returned
    may_end.set()
    assert allocator.load() is None
    assert threads == ["gact_graph allocator"]


def test_without_another_thread_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def start(thread: threading.Thread) -> None:
        tried.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(allocator, "_is_there", lambda: False)
    monkeypatch.setattr(allocator, "has_limit", lambda: False)
    allocator.load_soon()
    assert tried == ["gact_graph allocator"]


def test_a_library_of_the_wheel_serves_one_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, *_ = torch.__version__.split(".")
    assert allocator.prebuilt_name() == f"allocator-torch{major}.{minor}"
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git")
    with pytest.raises(FileNotFoundError, match=r"no prebuilt allocator-torch2\.99 \(it has "):
        prebuilt.load(allocator.prebuilt_name())


def test_nothing_is_compiled_under_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(thread.name))
    monkeypatch.setattr(allocator, "_is_there", lambda: False)
    monkeypatch.setattr(allocator, "has_limit", lambda: True)
    allocator.load_soon()
