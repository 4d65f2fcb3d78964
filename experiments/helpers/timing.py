"""Interleaved timing: jobs run in turn, so that other work on the machine slows all of them."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from experiments.helpers.data import NodeTask
from experiments.helpers.train import training_step
from gact_graph.support.clock import synchronize
from gact_graph.support.memory.policy import memory_policy

STOCK = "fp32"
_BUSY = ", busy"

Job = Callable[[], Any]


@contextmanager
def busy_loops(number: int) -> Iterator[Callable[[Job], Job]]:
    """Start processes that run only during a job that was passed to the yielded function.

    ``number`` processes, one for each processor, take half of each from a job of as many threads.
    """
    line = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(line) for _ in range(number)]

    def send(which: signal.Signals) -> None:
        for process in processes:
            process.send_signal(which)

    def beside(job: Job) -> Job:
        def run() -> Any:
            send(signal.SIGCONT)
            try:
                return job()
            finally:
                send(signal.SIGSTOP)

        return run

    try:
        send(signal.SIGSTOP)
        yield beside
    finally:
        send(signal.SIGKILL)
        for process in processes:
            process.wait()


def time_models(
    models: Mapping[str, nn.Module],
    next_task: Callable[[str], NodeTask],
    lr: float,
    rounds: int,
    before: int = 0,
    busy: int = 0,
) -> dict[str, Any]:
    """Time training steps of several models in turn; the second of two steps in a row counts.

    Args:
        models: Models by name; the first, ``fp32``, is stock's.
        next_task: Returns the graph of the next step of a model.
        lr: The learning rate of Adam.
        rounds: Steps of each model that count.
        before: Steps of each model before all others.
        busy: Busy processes, beside which each model takes as many steps once more.

    Returns:
        ``seconds`` of every step and ``median_seconds``, by model (and with ``, busy`` after it);
        ``ratio``, each median over stock's; with ``busy``, ``slowdown``, how many times as long
        each takes beside the processes.
    """

    def runner(name: str, model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)

        def step() -> None:
            if name == STOCK:
                # As in a process without the library. Wrapped models then begin their turn without
                # kept memory, and allocate it again in their first step, which is not timed.
                memory_policy.end()
            task = next_task(name)
            training_step(model, optimizer, task)
            synchronize(task.x.device)

        return step

    runners = {name: runner(name, model) for name, model in models.items()}
    for run in runners.values():
        for _ in range(before):
            run()
    with busy_loops(busy) as beside_them:
        beside = {f"{name}{_BUSY}": beside_them(run) for name, run in runners.items() if busy}
        seconds = time_in_turn(runners | beside, rounds, untimed=1)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    slowdown = {name: medians[f"{name}{_BUSY}"] / medians[name] for name in runners if busy}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": {name: medians[name] / medians[STOCK] for name in runners if name != STOCK},
        **({"slowdown": slowdown} if busy else {}),
    }


def time_in_turn(jobs: Mapping[str, Job], rounds: int, untimed: int = 0) -> dict[str, list[float]]:
    """Run the jobs in turn, ``rounds`` times after one warm-up; return each job's seconds.

    A job ends when it returns, so a job on a device must wait for the device. In each turn, a job
    also runs ``untimed`` times before it is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            for _ in range(untimed):
                job()
            start = time.perf_counter()
            made = job()
            elapsed = time.perf_counter() - start
            del made  # returning the memory is no part of the job
            if turn > 0:  # the first compiles kernels and fills caches
                times[name].append(elapsed)
    return times


def time_on(device: torch.device, jobs: Mapping[str, Job], rounds: int) -> dict[str, list[float]]:
    """Time jobs that only queue their work on the device; else as :func:`time_in_turn`.

    On CUDA the times are the device's own, from events between the jobs: no job waits for the host.
    A job finds the last data of the job before it in the cache, so jobs should touch more memory
    than fits in the cache.
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


def launch_seconds(device: torch.device, job: Job, calls: int, rounds: int) -> float:
    """Return the seconds of the host in one call of ``job``, whose work the device does meanwhile.

    The result is the median over ``rounds`` of ``calls`` calls in a row, after one warm-up. The
    host waits for the device before and after each round, outside the timed part. The work of the
    device should be shorter than the call, else the queue fills up and the time becomes the
    device's.
    """
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            job()
        times.append((time.perf_counter() - start) / calls)
    synchronize(device)
    return statistics.median(times[1:])
