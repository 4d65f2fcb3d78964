"""Values of scopes, on threads and where their context managers end late."""

from __future__ import annotations

import threading

from gact_graph.support.scopes import Scopes


def test_the_innermost_scope_gives_the_value() -> None:
    scopes = Scopes(0)
    assert scopes.value == 0
    with scopes.entered(1):
        assert scopes.value == 1
        with scopes.entered(2):
            assert scopes.value == 2
        assert scopes.value == 1
    assert scopes.value == 0


def test_a_scope_that_ends_after_the_scopes_around_it_brings_nothing_back() -> None:
    scopes = Scopes(0)
    outer, inner = scopes.entered(1), scopes.entered(2)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert scopes.value == 0
    inner.__exit__(None, None, None)
    assert scopes.value == 0


def test_each_thread_has_its_own_scopes() -> None:
    scopes = Scopes(0)
    seen: list[int] = []
    with scopes.entered(1):
        thread = threading.Thread(target=lambda: seen.append(scopes.value))
        thread.start()
        thread.join()
    assert seen == [0]
