"""The main job: train GCN, GAT or GCNII on a graph, with compressed contexts.

``python -m experiments.node_cls --model gat --bits 4`` trains ten seeds on the digits graph;
``--help`` lists the rest. Under ``torchrun --nproc-per-node 2 -m experiments.node_cls --sampler
cluster ...`` several processes train one model on batches of their own, with ``--partition metis``
on a part of the graph each; the first one writes and prints.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import gact_graph
from datasets import DatasetError, load
from experiments.helpers import compare
from experiments.helpers.atomic import write_atomically
from experiments.helpers.cap import is_want_of_memory
from experiments.helpers.data import layout_of, prepare
from experiments.helpers.display import make_console, make_table, say, show_result
from experiments.helpers.errors import ExperimentError
from experiments.helpers.fit import check_fits
from experiments.helpers.folder import check_folder
from experiments.helpers.job import Job, configuration, run
from experiments.helpers.markdown import FILE_NAME, markdown_table
from experiments.helpers.notes import notes
from experiments.helpers.options import Options, parse
from experiments.helpers.ranks import process_group, rank
from experiments.helpers.results import Results
from experiments.helpers.summary import dataset_name
from experiments.helpers.train import Setup
from experiments.helpers.values import FP32_BITS

_DOES_NOT_FIT = 3
_INTERRUPTED = 130  # what shells give a process that Ctrl-C ended


def main(argv: list[str] | None = None) -> int:
    """Run the job.

    Returns:
        The exit code: 0, 1 (data, files), 2 (flags), 3 (nothing fits --memory) or 130 (Ctrl-C).
    """
    out: Path | None = None
    try:
        options = parse(argv)
        out = options.out
        if rank() > 0:
            out, options = None, replace(options, out=None)
        console = make_console(quiet=rank() > 0)
        if out is not None:
            check_folder(out)  # a large graph takes minutes to load
        with process_group(options.device):
            if options.compare:
                _compare(options, console)
            else:
                _single(options, console)
    except KeyboardInterrupt:
        kept = (
            "nothing is kept without --out DIR"
            if out is None
            else f"every finished seed is in {out}, and the same command goes on from there"
        )
        print(f"Interrupted: {kept}.", file=sys.stderr)
        return _INTERRUPTED
    except ExperimentError as error:
        print(f"node_cls: {error}", file=sys.stderr)
        return error.exit_code
    except gact_graph.MemoryBudgetError as error:
        print(f"node_cls: {error}", file=sys.stderr)
        return _DOES_NOT_FIT
    except DatasetError as error:
        print(f"node_cls: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_want_of_memory(error):
            raise
        print(
            "node_cls: the device's memory is full: take fewer --bits, --level CB2, or smaller "
            "--hidden, --heads or --layers",
            file=sys.stderr,
        )
        return 1
    return 0


def _single(options: Options, console: Console) -> None:
    assert options.bits is not None or options.memory is not None  # parse() refuses it
    job = _job(options)
    results, report = run(job, console)
    show_result(console, results, report)
    for note in notes(results.config):
        say(console, note)


def _compare(options: Options, console: Console) -> None:
    if options.bits is not None:
        say(console, f"--compare runs widths of its own: --bits {options.bits} is not used.")
    base = _job(options)
    found: dict[str, Results] = {}
    report = None
    for variant in compare.VARIANTS:
        setup = replace(
            base.setup,
            bits=variant.bits,
            level="L0" if variant.bits == FP32_BITS else options.level,
            adaptive=variant.adaptive,
            blocks=False if variant.bits == FP32_BITS else options.blocks,
        )
        out = None if options.out is None else options.out / variant.name
        say(console, variant.label)
        found[variant.name], report = run(replace(base, setup=setup, out=out), console)
    if report is not None:
        console.print(report)  # of the last variant: the one with the fewest bits
    rows = compare.compare_rows(options.model, options.dataset, found)
    lines = notes(configuration(base)) + compare.compare_notes(options.model, options.dataset)
    title = (
        f"{options.model.upper()} on {dataset_name(options.dataset)}, {len(options.seeds)} seeds"
    )
    console.print(make_table(title, compare.HEAD, rows))
    for line in lines:
        say(console, line)
    if options.out is not None:
        table = markdown_table(compare.HEAD, rows)
        text = f"# {title}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in lines)
        write_atomically(options.out / FILE_NAME, text.encode())


def _job(options: Options) -> Job:
    graph = load(options.dataset, options.data_root)
    bits = options.bits or FP32_BITS
    adaptive = (bits != FP32_BITS or options.memory is not None) and not options.fixed
    setup = Setup(
        *(options.model, options.recipe, bits, options.level, adaptive),
        blocks=options.blocks,
        memory=options.memory,
        sampler=options.sampler,
        partition=options.partition,
    )
    if options.sampler is None and options.partition is None:
        check_fits(graph, setup, options.device)
    task = prepare(
        graph,
        layout_of(options.model) if options.partition is None else "edge_index",
        standardize=options.recipe.standardize,
        device=options.device,
    )
    return Job(setup, options.dataset, graph, task, options.seeds, options.out)


if __name__ == "__main__":
    sys.exit(main())
