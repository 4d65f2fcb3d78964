"""The seeds of one configuration: training of the missing ones beside finished ones."""

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
        setup: Model, recipe, and form of the saved contexts.
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
    """Return all settings that change a run's numbers, as a flat JSON object, without the seeds."""
    dataset, graph, device = job.dataset, job.graph, job.task.x.device
    setup, own = job.setup, ("model", "level", "bits", "adaptive", "blocks", "memory", "sampler")
    return {
        **{name: getattr(setup, name) for name in own},
        # A file has the same name from every working directory.
        "dataset": str(Path(dataset).resolve()) if dataset.endswith(".npz") else dataset,
        # The file behind the name may have become another graph.
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.x.size(1),
        "classes": graph.num_classes,
        "multi_label": graph.multi_label,
        "processes": None if world_size() == 1 else world_size(),
        # Left out without a partition, so that a run continues results without these entries.
        **({} if setup.partition is None else {n: getattr(setup, n) for n in _OF_PARTS}),
        **asdict(setup.recipe),
        "device": device.type,
        # The order of sums depends on the number of threads.
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def run(job: Job, console: Console) -> tuple[dict[str, Any], Any]:
    """Train the missing seeds, and write everything after each.

    Returns:
        The results: ``config`` and ``versions``, which change a run's numbers, and ``runs``, one
        record per seed (see :func:`experiments.helpers.train.train`), by seed. And the library's
        memory report of the last seed trained (``None`` if no seed was missing).

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
        # The previous run may have ended between result.json and the report.
        write_report(results, job.out)
    kept.write()
    return results, report


def run_variants(base: Job, console: Console, about: str = "") -> tuple[dict[str, Any], Any]:
    """Run each of :data:`experiments.helpers.paper.VARIANTS`, in a folder of its name.

    Args:
        base: The job whose settings the variants share.
        console: Shows the name of each variant.
        about: Text before that name.

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
