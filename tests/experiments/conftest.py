"""Settings of the tests of experiments."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from fresh import Fresh, module

from experiments.helpers import process


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets trials be forks, which need not import PyG again."""

    def start(command: list[str], env: Any, **_: Any) -> Fresh:
        assert command[1] == "-m"
        return Fresh(module(command[2]), *command[3:], environment=env)

    pipes = {"PIPE": None, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=start, **pipes))
