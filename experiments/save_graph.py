"""Write any graph as one .npz file, so that several runs need not make it again.

``python -m experiments.save_graph --dataset synthetic:reddit --out FILE.npz``
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets import Graph, load
from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.kept import write_atomically
from experiments.helpers.values import parse_path

_KEYS = ("x", "edge_index", "y", "train_idx", "val_idx", "test_idx")


def save(graph: Graph, path: Path) -> None:
    """Write the file whole or not at all; :func:`datasets.npz.load_npz` reads it.

    Raises:
        ResultsError: If the system refuses.
    """
    arrays = {key: getattr(graph, key).numpy() for key in _KEYS}
    write_atomically(path, lambda file: np.savez(file, **arrays))


@command.main(
    command.flag("--dataset", required=True, metavar="D", text="as the main job takes it"),
    command.DATA_ROOT,
    command.flag("--out", parse_path, required=True, metavar="FILE.npz", text="to write"),
)
def main(args: command.Args) -> None:
    if args.out.suffix != ".npz":
        raise UsageError(f"Expected --out to end in .npz (got {args.out})")
    if args.out.exists():
        args.say(f"{args.out} exists already; nothing was written")
        return
    save(load(args.dataset, args.data_root), args.out)
    args.say(f"{args.out}: {args.out.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    raise SystemExit(main())
