"""The main job: train GCN, GAT or GCNII on a graph, with compressed contexts.

``python -m experiments.node_cls --model gat --bits 4`` trains ten seeds on the digits graph;
``--help`` lists the rest. Under ``torchrun --nproc-per-node 2 -m experiments.node_cls --sampler
cluster ...`` several processes train one model on batches of their own, or with ``--partition
metis`` each on a part of the graph; the first process writes and prints.
"""

from __future__ import annotations

from datasets import load
from experiments.helpers import command
from experiments.helpers.data import layout_of, prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.fit import check_fits
from experiments.helpers.job import Job, configuration, run, run_variants
from experiments.helpers.kept import write_atomically
from experiments.helpers.levels import EXACT_LEVELS, LEVELS
from experiments.helpers.paper import compare_notes, compared
from experiments.helpers.ranks import process_group, world_size
from experiments.helpers.recipes import MODELS, recipe_for
from experiments.helpers.report import FILE_NAME
from experiments.helpers.sampling import PARTITIONS, SAMPLERS
from experiments.helpers.summary import dataset_name, notes, table, title
from experiments.helpers.train import Setup
from experiments.helpers.values import (
    FP32_BITS,
    parse_bits,
    parse_blocks,
    parse_memory,
    parse_not_negative,
    parse_positive,
    parse_seeds,
    parse_share,
)

_RECIPE = ("epochs", "hidden", "layers", "heads", "dropout", "lr", "weight_decay")


def complete(args: command.Args) -> command.Args:
    """Check combinations of flags, and fill in ``level`` and ``recipe``.

    Raises:
        UsageError: If some flags do not go together.
    """
    if args.bits is None and args.memory is None and not args.compare:
        raise UsageError("Expected --bits B, or --compare for the paper's widths (got neither)")
    chosen = (args.bits, args.level, args.blocks)
    if args.memory is not None and (args.compare or chosen != (None, None, None)):
        raise UsageError(
            "Expected --memory in place of --bits, --level, --blocks and --compare (got some of "
            "them too)"
        )
    if args.sampler is None and args.partition is None and world_size() > 1:
        raise UsageError(
            f"Expected --sampler or --partition under torchrun (got {world_size()} processes, "
            "which would all train on the whole graph)"
        )
    for flag in ("sampler", "memory") if args.partition is not None else ():
        if getattr(args, flag) is not None:
            raise UsageError(f"Expected --partition or --{flag} (got both)")
    if args.halo_bits is not None and args.partition is None:
        raise UsageError(f"Expected --halo-bits with --partition (got {args.halo_bits} alone)")
    if args.partition is not None and args.level == "CB2":
        raise UsageError(
            "Expected --level L0, lossless, L1 or L2 with --partition (got CB2, which would fetch "
            "the rows of other processes again)"
        )
    if args.heads is not None and args.model != "gat":
        raise UsageError(f"Expected --heads with --model gat only (got --model {args.model})")
    if args.level is None:
        args.level = "L0" if args.bits == FP32_BITS and not args.compare else "L1"
    elif args.level in EXACT_LEVELS and (args.compare or args.bits != FP32_BITS):
        got = "--compare" if args.compare else f"--bits {args.bits}"
        raise UsageError(
            f"Expected --bits 32 with --level {args.level}, which quantizes nothing (got {got})"
        )
    overrides = {name: getattr(args, name) for name in _RECIPE}
    args.recipe = recipe_for(args.model, args.dataset, **overrides)
    return args


def _compare(args: command.Args) -> None:
    if args.bits is not None:
        args.say(f"--compare runs widths of its own: --bits {args.bits} is not used.")
    base = _job(args)
    results, report = run_variants(base, args.console)
    if report is not None:
        args.console.print(report)  # of the last variant: the one with the fewest bits
    beside = compared(args.model, args.dataset, results)
    lines = notes(configuration(base)) + compare_notes(args.model, args.dataset)
    subject = f"{args.model.upper()} on {dataset_name(args.dataset)}, {len(args.seeds)} seeds"
    args.show(subject, beside)
    for line in lines:
        args.say(line)
    if args.out is not None:
        text = f"# {subject}\n\n{beside.markdown()}\n\n" + "".join(f"- {line}\n" for line in lines)
        write_atomically(args.out / FILE_NAME, text.encode())


def _job(args: command.Args) -> Job:
    graph = load(args.dataset, args.data_root)
    bits = args.bits or FP32_BITS
    adaptive = (bits != FP32_BITS or args.memory is not None) and not args.fixed
    setup = Setup(
        *(args.model, args.recipe, bits, args.level, adaptive),
        **{name: getattr(args, name) for name in ("blocks", "memory", "sampler", "partition")},
        halo_bits=args.halo_bits or FP32_BITS,
    )
    if args.sampler is None and args.partition is None:
        check_fits(graph, setup, args.device)
    task = prepare(
        graph,
        layout_of(args.model) if args.partition is None else "edge_index",
        standardize=args.recipe.standardize,
        device=args.device,
    )
    return Job(setup, args.dataset, graph, task, args.seeds, args.out)


@command.main(
    command.needed(command.choice("--model", MODELS)),
    command.flag("--bits", parse_bits, text="bits per saved element: 1 to 16, or 32", metavar="B"),
    command.flag(
        "--memory",
        parse_memory,
        text="in place of --bits: the most that a step may add to memory, as in 4GB",
        metavar="M",
    ),
    *command.GRAPH,
    command.choice(
        "--sampler",
        SAMPLERS,
        text="mini-batches, under torchrun those of each process, in place of the whole graph",
    ),
    command.choice(
        "--partition",
        PARTITIONS,
        text="under torchrun a part of the graph in each process: cut by METIS, or in order",
    ),
    command.flag(
        "--halo-bits", parse_bits, text="with --partition, bits per exchanged element", metavar="B"
    ),
    command.choice("--level", LEVELS, text="default: L1, at 32 bits L0"),
    command.flag(
        "--blocks",
        parse_blocks,
        text="blocks of N edges, auto or off (default: auto; off at L0 and lossless)",
        metavar="N",
    ),
    command.switch("--fixed", "the same bits everywhere, no adaptive allocator"),
    command.flag("--seeds", parse_seeds, "0-9", "also 0,3,5"),
    *(command.number(f"--{name}", text="in place of the recipe's") for name in _RECIPE[:4]),
    command.flag("--dropout", parse_share, metavar="P"),
    command.flag("--lr", parse_positive, metavar="LR"),
    command.flag("--weight-decay", parse_not_negative, metavar="W"),
    command.OUT,
    command.switch(
        "--compare", "run fp32, fixed 4 bit and adaptive 4, 3, 2 bit beside the paper's Table 2"
    ),
)
def main(args: command.Args) -> None:
    complete(args)
    with process_group(args.device):
        if args.compare:
            _compare(args)
            return
        results, report = run(_job(args), args.console)
        args.show(title(results["config"]), table(results))
        if report is None:
            args.say("Nothing was trained now; where the memory went is in report.md.")
        else:
            args.console.print(report)
        for note in notes(results["config"]):
            args.say(note)


if __name__ == "__main__":
    raise SystemExit(main())
