"""Scripts in processes that no test ran in, forked from a process that has only imported PyG."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FORKS = multiprocessing.get_context("forkserver")
# Imports take three seconds, most scripts less. Nothing else runs in the process that is forked.
_FORKS.set_forkserver_preload(["torch_geometric.nn", "gact_graph"])


class Fresh:
    """A process that runs a script, with the interface of :class:`subprocess.Popen`.

    Args:
        script: Code in Python.
        *arguments: Its ``sys.argv[1:]``.
        environment: In place of that of this process.
    """

    def __init__(
        self, script: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._outputs: tuple[str, str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "errors")]
        variables = dict(os.environ if environment is None else environment)
        options = (script, arguments, variables, [*map(str, self._files)])
        self._process = _FORKS.Process(target=_run, args=options)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what the process printed, and its errors."""
        if self._outputs is None:
            self._process.join(timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired("script", timeout or 0)
            out, errors = (file.read_text() if file.exists() else "" for file in self._files)
            self._outputs = out, errors
            self._folder.cleanup()
        return self._outputs

    def kill(self) -> None:
        self._process.kill()
        self.communicate()


def _run(
    script: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[str]
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
    torch, library = map(importlib.import_module, ("torch", "gact_graph"))
    assert Path(library.__file__ or "").is_relative_to(ROOT), library.__file__
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = ["script", *arguments]
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})


def module(name: str) -> str:
    """Return a script that runs a module, as ``python -m`` does."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__')"


def run(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a script, which must end well, and return what it printed."""
    process = Fresh(script, *arguments, environment=environment)
    try:
        out, errors = process.communicate(600)
    finally:
        process.kill()
    assert process.returncode == 0, f"exit code {process.returncode}\n{errors}"
    return out
