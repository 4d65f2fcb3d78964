"""Times of several jobs that meet the same weather of a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def time_in_turn(jobs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Run the jobs in turn, ``rounds`` times after one warm-up; return each job's seconds.

    A job ends when it returns: one that works on a device waits for it.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            made = job()
            elapsed = time.perf_counter() - start
            del made  # giving the memory back is no part of the job
            if turn > 0:  # the first compiles kernels and fills caches
                times[name].append(elapsed)
    return times
