"""Write any graph as one .npz file, so that several runs need not make it again.

``python -m experiments.save_graph --dataset synthetic:reddit --out FILE.npz``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

import numpy as np

from datasets import Graph, load
from experiments.helpers.display import make_console, say
from experiments.helpers.errors import ResultsError, UsageError
from experiments.helpers.options import Parser
from experiments.helpers.subjects import exit_code

_KEYS = ("x", "edge_index", "y", "train_idx", "val_idx", "test_idx")


def main(argv: list[str] | None = None) -> int:
    """Load and write; return the exit code as the main job does."""
    return exit_code("save_graph", lambda: _run(argv))


def save(graph: Graph, path: Path) -> None:
    """Write the file whole or not at all; :func:`datasets.npz.load_npz` reads it.

    Raises:
        ResultsError: If the system refuses.
    """
    part = path.with_name(f".{path.stem}.part.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part, **{key: getattr(graph, key).numpy() for key in _KEYS})
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ResultsError(f"Expected to write {path} (got {error}): give another --out") from error


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    if args.out.exists():
        say(console, f"{args.out} is there")
        return
    save(load(args.dataset, args.data_root), args.out)
    say(console, f"{args.out}: {args.out.stat().st_size / 1e6:,.0f} MB")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.save_graph", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, metavar="D", help="as the main job takes it")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="default: data")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="to write")
    args = parser.parse_args(argv)
    if args.out.suffix != ".npz":
        raise UsageError(f"Expected --out to end in .npz (got {args.out})")
    return args


if __name__ == "__main__":
    sys.exit(main())
