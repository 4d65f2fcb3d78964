"""Other work on the machine: processes that compute without a rest, for as long as they are let."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class BusyLoops:
    """Processes beside this one, which stand still unless a job of :meth:`beside` runs.

    Args:
        number: How many: one for each processor takes half of each from a job of as many threads.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> BusyLoops:
        for _ in range(self._number):
            self._processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        self._tell(signal.SIGSTOP)
        return self

    def __exit__(self, *raised: object) -> None:
        self._tell(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def beside(self, job: Callable[[], Any]) -> Callable[[], Any]:
        """The job, with all of them running meanwhile."""

        def run() -> Any:
            self._tell(signal.SIGCONT)
            try:
                return job()
            finally:
                self._tell(signal.SIGSTOP)

        return run

    def _tell(self, what: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(what)
