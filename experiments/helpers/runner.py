"""Measurement of a training: a few steps of a case in a process of its own.

:class:`experiments.helpers.strategies.Case` describes the training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from datasets import load
from experiments.helpers.errors import ExperimentError
from experiments.helpers.meters import halo_of, memory_of, train, warm_up
from experiments.helpers.process import CAPPED, OUT_OF_MEMORY, call_together, environment
from experiments.helpers.ranks import process_group
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.values import parse_device


def run(case: Case) -> dict[str, Any]:
    """Return the result of :func:`measure`, or the ``reason`` for its absence."""
    return run_parts(case)[0]


def run_parts(case: Case) -> list[dict[str, Any]]:
    """Return the results as :func:`run`, for each process of a case with several parts."""
    strategy, device = STRATEGIES[case.strategy], parse_device(case.device)
    missing = strategy.missing(device)
    if missing is not None:
        return [{"reason": missing}]
    usual = strategy.allocator if device.type == "cpu" else "kept"
    try:
        variables = environment(case.allocator or usual)
    except ExperimentError as error:
        return [{"reason": f"failed: {error}"}]
    if case.cap_bytes is not None:
        variables = CAPPED | variables
    if case.threads is not None:
        variables["OMP_NUM_THREADS"] = str(case.threads)
    variables["WORLD_SIZE"] = str(max(1, case.parts))
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            (asdict(case) | {"rank": rank}, str(Path(folder) / "store"))
            for rank in range(max(1, case.parts))
        ]
        return call_together("experiments.helpers.runner:measure_apart", calls, variables)


def reason_of(results: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the reason why processes that work together failed; None if all have a result.

    If one runs out of memory, the others fail because they lose the connection to it.
    """
    reasons = [result["reason"] for result in results if "reason" in result]
    return OUT_OF_MEMORY if OUT_OF_MEMORY in reasons else next(iter(reasons), None)


def measure_apart(case: dict[str, Any], store: str) -> dict[str, Any]:
    """Join the processes of the other parts, and measure, in a process of its own."""
    more = {"init_method": f"file://{store}", "rank": case["rank"], "world_size": case["parts"]}
    with process_group(torch.device("cpu"), **more):
        return measure(Case(**case))


def measure(case: Case) -> dict[str, Any]:
    """Train, and return the time, the memory and the losses.

    Returns:
        ``peak_bytes``, ``step_seconds`` and ``step_process_seconds`` (see
        :class:`experiments.helpers.meters.Steps`); ``compile_seconds``, by how much the first step
        was longer than the others (None if nothing compiles); ``first_loss`` and ``loss``, of
        the first and the last step; of a part of a graph the results of
        :func:`experiments.helpers.meters.halo_of`; and without a cap those of
        :func:`experiments.helpers.meters.memory_of`, for which it runs forward once more.
    """
    device = parse_device(case.device)
    strategy = STRATEGIES[case.strategy]
    warm_up(device, compressed=strategy.ours)
    trainee = strategy.start(case, load(case.dataset, case.data_root), device)
    lr = SUBJECTS[case.model].lr
    steps = train(trainee, case.steps, lr, cap_bytes=case.cap_bytes, compiles=strategy.compiles)
    compile_seconds = steps.seconds[0] - steps.medians["step_seconds"]
    return {
        "peak_bytes": steps.peak_bytes,
        **steps.medians,
        "compile_seconds": compile_seconds if strategy.compiles else None,
        "first_loss": steps.losses[0],
        "loss": steps.losses[-1],
        **(halo_of(trainee, steps) if trainee.part is not None else {}),
        **(memory_of(trainee, steps) if case.cap_bytes is None else {}),
    }
