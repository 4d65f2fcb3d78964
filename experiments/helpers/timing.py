"""Times of several jobs that meet the same weather of a busy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiments.helpers.train import synchronize
from gact_graph.support.memory.policy import memory_policy


def as_stock(job: Callable[[], Any]) -> Callable[[], Any]:
    """The job as in a process without the library: what wrapped models keep on a CPU is returned.

    Those then begin their own turn with none, so they should take a step that is not timed.
    """

    def run() -> Any:
        memory_policy.end()
        return job()

    return run


def time_in_turn(
    jobs: Mapping[str, Callable[[], Any]], rounds: int, untimed: int = 0
) -> dict[str, list[float]]:
    """Run the jobs in turn, ``rounds`` times after one warm-up; return each job's seconds.

    A job ends when it returns: one that works on a device waits for it. In each turn it runs
    ``untimed`` times more, before it is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            for _ in range(untimed):
                job()
            start = time.perf_counter()
            made = job()
            elapsed = time.perf_counter() - start
            del made  # giving the memory back is no part of the job
            if turn > 0:  # the first compiles kernels and fills caches
                times[name].append(elapsed)
    return times


def time_on(
    device: torch.device, jobs: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """As :func:`time_in_turn`, of jobs that only queue their work on the device.

    On CUDA the device's own clock is read, by events between the jobs: no job waits for the host.
    A job finds in the cache what the one before it left there, so jobs should touch more memory
    than the cache holds.
    """
    if device.type != "cuda":
        return time_in_turn(jobs, rounds)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    first = next(iter(jobs.values()))
    with torch.cuda.device(device):
        for turn in range(rounds + 1):
            events = {
                name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in jobs
            }
            first()  # while this runs, the host queues the others: no event waits for a launch
            for name, job in jobs.items():
                start, end = events[name]
                start.record()
                job()
                end.record()
            torch.cuda.synchronize(device)
            if turn > 0:
                for name, (start, end) in events.items():
                    times[name].append(1e-3 * start.elapsed_time(end))
    return times


def launch_seconds(device: torch.device, job: Callable[[], Any], calls: int, rounds: int) -> float:
    """Seconds of the host that one call of ``job`` takes, whose work the device does meanwhile.

    The median over ``rounds`` of ``calls`` calls in a row, after one warm-up. The device is waited
    for before and after each round, outside the time. Its work should be shorter than the call,
    else the queue fills up and the time becomes the device's.
    """
    found = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            job()
        found.append((time.perf_counter() - start) / calls)
    synchronize(device)
    return statistics.median(found[1:])
