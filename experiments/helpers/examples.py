"""Scripts of examples/, run for a few steps in separate processes, and measured from outside."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import gact_graph
from experiments.helpers import metis
from experiments.helpers.meters import warm_up
from gact_graph.api.budget.miniature import Miniature
from gact_graph.support.peak import PeakMeter

_FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in _FOLDER.glob("*.py"))

_FIRST = 2
"""Steps before the first timed one, in which kernels load, layers are traced and a wrapped model
measures sensitivities."""


class _Ended(BaseException):
    """Raised when the script has taken enough steps; frameworks do not catch it."""


def run(name: str, stock: bool, steps: int, nodes: int | None) -> dict[str, Any]:
    """Run an example in a process of its own; see :func:`measure`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # forks need not import PyG again
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(measure, name, stock, steps, nodes).result()
        except BrokenProcessPool as error:
            return {"reason": f"failed: {error}"}


def measure(name: str, stock: bool, steps: int, nodes: int | None) -> dict[str, Any]:
    """Run an example until it has taken some steps.

    Args:
        name: A script of examples/.
        stock: Whether it trains without the library.
        steps: The number of timed steps.
        nodes: The value of ``--nodes``; None for the script's own.

    Returns:
        ``nodes`` and ``edges`` of the graph in the first step; ``peak_bytes``, the memory that the
        process took since then; ``step_seconds``, the median time from the end of a step to that of
        the next; or the ``reason`` for their absence.
    """
    ends: list[float] = []
    found: dict[str, Any] = {}
    meters: list[PeakMeter] = []

    def begin(module: nn.Module, inputs: Any) -> None:
        first.remove()
        size = Miniature(inputs, {}).size
        found.update(nodes=size.nodes, edges=size.edges)
        meters.append(PeakMeter(next(module.parameters()).device).__enter__())

    def end(*_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) == _FIRST + steps:
            found["peak_bytes"] = meters[0].peak_bytes
            raise _Ended

    metis.provide()
    with _without_the_library() if stock else contextlib.nullcontext():
        warm_up(torch.device("cpu"), compressed=not stock)
        first = register_module_forward_pre_hook(begin)
        register_optimizer_step_post_hook(end)
        arguments = ["--epochs", str(_FIRST + steps)]  # an epoch has a step at least
        try:
            _run(name, *arguments, *([] if nodes is None else ["--nodes", str(nodes)]))
        except _Ended:
            pass
        except SystemExit as error:
            return {"reason": str(error)}
    times = [later - earlier for earlier, later in itertools.pairwise(ends[_FIRST - 1 :])]
    return found | {"step_seconds": statistics.median(times)}


def _run(name: str, *arguments: str) -> None:
    """Run an example as a user does, in a folder for its files."""
    path = str(_FOLDER / f"{name}.py")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sys, "argv", [path, *arguments]),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        os.chdir(folder)
        runpy.run_path(path, run_name="__main__")


@contextlib.contextmanager
def _without_the_library() -> Iterator[None]:
    """Let an example train as stock PyG does."""
    with mock.patch.multiple(
        gact_graph,
        wrap=lambda model, bits=None, **options: model,
        report=lambda model: gact_graph.Report(empty=True),
        state_dict=lambda model: {},
        load_state_dict=lambda model, state: None,
        message_passing=functools.partial(gact_graph.message_passing, blocks=False),
    ):
        yield
