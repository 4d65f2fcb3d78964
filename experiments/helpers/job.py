"""All seeds of one configuration: train the missing ones, keep the finished ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from experiments.helpers import plot
from experiments.helpers.data import NodeTask
from experiments.helpers.display import SeedProgress, say
from experiments.helpers.kept import Kept
from experiments.helpers.origin import current_versions
from experiments.helpers.paper import VARIANTS
from experiments.helpers.ranks import of_first, world_size
from experiments.helpers.report import RESULT, write_report
from experiments.helpers.train import Setup, train

if TYPE_CHECKING:
    from datasets import Graph


@dataclass(frozen=True)
class Job:
    """One configuration and the seeds asked for.

    Attributes:
        setup: Model, recipe, and how its contexts are kept.
        dataset: As ``--dataset`` names it.
        graph: The loaded graph.
        task: The graph as :func:`experiments.helpers.data.prepare` returns it.
        seeds: Seeds to run.
        out: Where results are kept; ``None`` keeps them in memory only.
    """

    setup: Setup
    dataset: str
    graph: Graph
    task: NodeTask
    seeds: tuple[int, ...]
    out: Path | None


_OF_PARTS = ("partition", "halo_bits")


def configuration(job: Job) -> dict[str, Any]:
    """Return all that changes a run's numbers, flat and JSON-ready, without the seeds."""
    dataset, graph, device = job.dataset, job.graph, job.task.x.device
    setup, own = job.setup, ("model", "level", "bits", "adaptive", "blocks", "memory", "sampler")
    return {
        **{name: getattr(setup, name) for name in own},
        # One file, one name, from whichever folder it is asked for.
        "dataset": str(Path(dataset).resolve()) if dataset.endswith(".npz") else dataset,
        # The file behind the name may have become another graph.
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.x.size(1),
        "classes": graph.num_classes,
        "multi_label": graph.multi_label,
        "processes": None if world_size() == 1 else world_size(),
        # A run without it goes on with results that know nothing of it.
        **({} if setup.partition is None else {n: getattr(setup, n) for n in _OF_PARTS}),
        **asdict(setup.recipe),
        "device": device.type,
        # Sums over threads come in another order with another number of them.
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def run(job: Job, console: Console) -> tuple[dict[str, Any], Any]:
    """Train the seeds that are not there yet, and write everything after each.

    Returns:
        The results: ``config`` and ``versions``, which change a run's numbers, and ``runs``, one
        record a seed (see :func:`experiments.helpers.train.train`), by seed. And the library's
        memory report of the last seed trained (``None`` where every seed was there already).

    Raises:
        ExperimentError: If the folder holds other results, or matplotlib is missing.
    """
    path = None
    if job.out is not None:
        plot.require_matplotlib()
        path = job.out / RESULT
    kept = Kept(path, {"config": configuration(job), "versions": current_versions()})
    results, report = kept.content, None
    runs = results.setdefault("runs", [])
    done = {record["seed"] for record in runs}
    missing = of_first([seed for seed in job.seeds if seed not in done])
    if len(missing) < len(job.seeds):
        there = len(job.seeds) - len(missing)
        say(console, f"{there} of {len(job.seeds)} seeds are in {job.out} already.")
    with SeedProgress(console, job.setup.recipe.epochs) as progress:
        for seed in missing:
            record, report = train(job.task, job.setup, seed, progress.follow(seed))
            kept.once(("runs", {"seed": seed}), dict, record)
            runs.sort(key=lambda record: record["seed"])
            if job.out is not None:
                write_report(results, job.out)
    if not missing and job.out is not None:
        # The last start may have ended between result.json and the report.
        write_report(results, job.out)
    kept.write()
    return results, report


def run_variants(base: Job, console: Console, about: str = "") -> tuple[dict[str, Any], Any]:
    """Run each of :data:`experiments.helpers.paper.VARIANTS`, in a folder of its name.

    Args:
        base: Its setup gives all that the variants share.
        console: Shows which one runs.
        about: Shown before that.

    Returns:
        The results by variant, and the memory report of the last; see :func:`run`.
    """
    results, report = {}, None
    for variant in VARIANTS:
        say(console, f"{about}{variant.label}")
        out = None if base.out is None else base.out / variant.name
        one = replace(base, setup=variant.of(base.setup), out=out)
        results[variant.name], report = run(one, console)
    return results, report
