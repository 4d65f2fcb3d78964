"""The main job: train GCN, GAT or GCNII on a graph, with compressed contexts.

``python -m experiments.node_cls --model gat --bits 4`` trains ten seeds on the digits graph;
``--help`` lists the rest.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from datasets import DatasetError, load
from experiments import compare
from experiments.atomic import write_atomically
from experiments.data import layout_of, prepare
from experiments.display import make_console, make_table, say, show_result
from experiments.errors import ExperimentError
from experiments.job import Job, configuration, run
from experiments.markdown import FILE_NAME, markdown_table
from experiments.notes import notes
from experiments.options import Options, parse
from experiments.results import Results
from experiments.summary import dataset_name
from experiments.train import Setup
from experiments.values import FP32_BITS

_INTERRUPTED = 130  # what shells give a process that Ctrl-C ended


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code: 0, 1 (data, files), 2 (flags) or 130 (Ctrl-C)."""
    out: Path | None = None
    try:
        options = parse(argv)
        out = options.out
        console = make_console()
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
    except DatasetError as error:
        print(f"node_cls: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError:
        print("node_cls: the device's memory is full: take fewer --bits", file=sys.stderr)
        return 1
    return 0


def _single(options: Options, console: Console) -> None:
    assert options.bits is not None  # parse() refuses it without --compare
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
            blocks=None if variant.bits == FP32_BITS else options.blocks,
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
    task = prepare(
        graph,
        layout_of(options.model),
        standardize=options.recipe.standardize,
        device=options.device,
    )
    bits = options.bits or FP32_BITS
    adaptive = bits != FP32_BITS and not options.fixed
    setup = Setup(options.model, options.recipe, bits, options.level, adaptive, options.blocks)
    return Job(setup, options.dataset, graph, task, options.seeds, options.out)


if __name__ == "__main__":
    sys.exit(main())
