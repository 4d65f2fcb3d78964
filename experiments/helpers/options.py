"""The main job's command line: flags in, checked :class:`Options` out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from experiments.helpers.errors import UsageError
from experiments.helpers.ranks import world_size
from experiments.helpers.recipes import MODELS, Recipe, recipe_for
from experiments.helpers.sampling import SAMPLERS
from experiments.helpers.shares import PARTITIONS
from experiments.helpers.values import (
    FP32_BITS,
    parse_bits,
    parse_blocks,
    parse_count,
    parse_device,
    parse_memory,
    parse_not_negative,
    parse_path,
    parse_positive,
    parse_seeds,
    parse_share,
)

EXACT_LEVELS = ("L0", "lossless")
"""Levels that quantize nothing."""

LEVELS = (*EXACT_LEVELS, "L1", "L2", "CB1", "CB2")


@dataclass(frozen=True)
class Options:
    """The command line, checked and completed; see ``--help`` for each field's meaning.

    ``bits`` is ``None`` only with ``compare``, which runs widths of its own, or with ``memory``,
    which chooses them; ``level`` is the level that ``bits`` runs at. ``recipe`` holds the
    overrides already.
    """

    model: str
    dataset: str
    recipe: Recipe
    bits: int | None
    memory: int | None
    sampler: str | None
    partition: str | None
    level: str
    blocks: int | str | None
    fixed: bool
    seeds: tuple[int, ...]
    device: torch.device
    data_root: Path
    out: Path | None
    compare: bool


def parse(argv: list[str] | None = None) -> Options:
    """Read the command line.

    Args:
        argv: Arguments without the program's name; ``None`` takes the process's own.

    Raises:
        UsageError: For whatever is wrong with them, in one line.
        SystemExit: After ``--help``.
    """
    argv = sys.argv[1:] if argv is None else argv
    for text in argv:
        # Reports quote what they were asked for.
        if "\0" in text or not _is_text(text):
            raise UsageError(f"Expected every argument to be UTF-8 text (got {text!a})")
    args = _parser().parse_args(argv)
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
    if args.partition is not None:
        _check_partition(args)
    if args.heads is not None and args.model != "gat":
        raise UsageError(f"Expected --heads with --model gat only (got --model {args.model})")
    recipe = recipe_for(
        args.model,
        args.dataset,
        epochs=args.epochs,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        dropout=args.dropout,
        lr=args.lr,
        weight_decay=args.weight_decay,
    )
    return Options(
        model=args.model,
        dataset=args.dataset,
        recipe=recipe,
        bits=args.bits,
        memory=args.memory,
        sampler=args.sampler,
        partition=args.partition,
        level=_level(args.level, args.bits, args.compare),
        blocks=args.blocks,
        fixed=args.fixed,
        seeds=args.seeds,
        device=parse_device(args.device),
        data_root=args.data_root,
        out=args.out,
        compare=args.compare,
    )


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`~experiments.helpers.errors.UsageError` instead of leaving."""

    def error(self, message: str) -> NoReturn:
        # argparse would print its usage, many lines long, and end the process.
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.node_cls",
        description="Train a graph network with compressed contexts; tell its score and memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument(
        "--bits",
        type=parse_bits,
        metavar="B",
        help="bits of a saved element: 1 to 16, or 32 for fp32",
    )
    parser.add_argument(
        "--memory",
        type=parse_memory,
        metavar="M",
        help="in place of --bits: what a step may add to memory, as in 4GB",
    )
    parser.add_argument(
        "--dataset",
        default="digits",
        metavar="D",
        help="digits, cora, citeseer, pubmed, ogbn-arxiv, flickr, reddit, yelp, FILE.npz or "
        "synthetic:NAME[@SCALE] (default: digits)",
    )
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        help="train on mini-batches, under torchrun on those of each process; default: the whole "
        "graph",
    )
    parser.add_argument(
        "--partition",
        choices=PARTITIONS,
        help="train on the whole graph, under torchrun with a part of it in each process: cut by "
        "METIS, or in the order of nodes",
    )
    parser.add_argument("--level", choices=LEVELS, help="default: L1, at 32 bits L0")
    parser.add_argument(
        "--blocks",
        type=parse_blocks,
        metavar="N",
        help="message passing in blocks of N edges, auto or off (default: auto; off at L0 and "
        "lossless)",
    )
    parser.add_argument(
        "--fixed", action="store_true", help="the same bits everywhere, no adaptive allocator"
    )
    parser.add_argument(
        "--seeds", type=parse_seeds, default=tuple(range(10)), help="default: 0-9; also 0,3,5"
    )
    recipe = parser.add_argument_group("recipe", "default: the data set's, see recipes.py")
    for name in ("epochs", "hidden", "layers", "heads"):
        recipe.add_argument(f"--{name}", type=parse_count, metavar="N")
    recipe.add_argument("--dropout", type=parse_share, metavar="P")
    recipe.add_argument("--lr", type=parse_positive, metavar="LR")
    recipe.add_argument("--weight-decay", type=parse_not_negative, metavar="W")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--data-root", type=parse_path, default=Path("data"), metavar="DIR", help="default: data"
    )
    parser.add_argument(
        "--out",
        type=parse_path,
        metavar="DIR",
        help="keep results here, and go on from what is there",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run fp32, fixed 4 bit and adaptive 4, 3, 2 bit; print the paper's Table 2 row",
    )
    return parser


def _check_partition(args: argparse.Namespace) -> None:
    """Raise UsageError for what does not go with ``--partition``."""
    for flag in ("sampler", "memory"):
        if getattr(args, flag) is not None:
            raise UsageError(f"Expected --partition or --{flag} (got both)")
    if args.level in ("CB1", "CB2"):
        raise UsageError(
            "Expected --level L0, lossless, L1 or L2 with --partition (got "
            f"{args.level}, which would fetch the rows of other processes again)"
        )


def _is_text(text: str) -> bool:
    """Whether it came as UTF-8; the system's other bytes become lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _level(level: str | None, bits: int | None, compare: bool) -> str:
    if level is None:
        return "L0" if bits == FP32_BITS and not compare else "L1"
    if level in EXACT_LEVELS and (compare or bits != FP32_BITS):
        got = "--compare" if compare else f"--bits {bits}"
        raise UsageError(
            f"Expected --bits 32 with --level {level}, which quantizes nothing (got {got})"
        )
    return level
