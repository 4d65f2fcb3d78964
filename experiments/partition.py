"""Training of one graph in several processes: memory, sent bytes and time, measured or counted.

``python -m experiments.partition --model gat --dataset FILE.npz --parts 1,2,4 --out DIR`` trains a
few steps with each number of processes on this machine and prints the peak of a process, the bytes
that it sends, the time of a step, and the loss beside that of one process. For more parts than can
run on this machine, the command counts the rows that would be sent.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from datasets import load
from experiments.helpers import command
from experiments.helpers.data import prepare
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.network_model import modelled
from experiments.helpers.runner import reason_of, run_parts
from experiments.helpers.sampling import PARTITIONS, cut
from experiments.helpers.strategies import Case
from experiments.helpers.subjects import ON_EDGES
from experiments.helpers.tables import Column, Row, Table, table
from experiments.helpers.values import parse_bits, parse_count

MODELS = ON_EDGES | {"gcnii": "gcnii-edge_index"}

WAYS = ("lossless", "L1", "lossless+blocks", "L1+blocks")

_BY_CLOCK = ("step_seconds", "exchange_seconds")
"""Times that depend on the other work of the machine."""

_RUNS: tuple[Column, ...] = (
    ("processes", "{parts}"),
    ("", "{way}"),
    ("halo bits", "{bits}"),
    ("peak, MB", "{peak_bytes:1MB|unknown}"),
    ("sent per step, MB", "{sent_bytes:1MB}"),
    ("s/step", "{step_seconds:.2f|not timed}"),
    ("CPU s/step", "{step_process_seconds:.2f}"),
    ("exchanges", "{exchanges:.1%}"),
    ("loss", "{loss:.4f}"),
    ("difference to one process", "{difference:+.1e}"),
)

_COUNTED: tuple[Column, ...] = (
    ("parts", "{parts}"),
    ("nodes per part", lambda row: f"{min(row['nodes']):,} to {max(row['nodes']):,}"),
    ("largest halo", lambda row: f"{max(row['halo']):,} rows"),
    ("all halos / nodes", lambda row: f"{sum(row['halo']) / sum(row['nodes']):.2f}"),
    ("halo bits", "{bits}"),
    ("sent per step, MB", "{sent_bytes:2MB}"),
    ("network, s/step", "{network_seconds:.4f}"),
    ("s/step", "{step_seconds:.2f|not timed}"),
)


def measured(content: Row) -> Table:
    """Return a row for each run, with the largest number of any process in each column."""
    runs = sorted(
        content["runs"], key=lambda r: (r["parts"], WAYS.index(r["way"]), -r["halo_bits"])
    )
    return table(_RUNS, (_run(content, run) for run in runs))


_GROWN: tuple[Column, ...] = (
    ("model", lambda row: row["model"].upper()),
    ("processes", "{parts}"),
    ("nodes", "{nodes:,}"),
    ("edges", "{edges:,}"),
    *(column for column in _RUNS if column[0] in ("", "halo bits", "peak, MB", "CPU s/step")),
    ("of one process", lambda row: f"{row['relative']:.2f}x"),
    *(column for column in _RUNS if column[0] == "exchanges"),
)


def grown(contents: Sequence[Row]) -> Table:
    """Return a row for each run on graphs that grow with the number of processes, with the CPU time
    of a step relative to that of one process on the smallest graph."""
    rows = []
    for content in contents:
        for run in content["runs"]:
            total = {name: sum(rank[name] for rank in run["ranks"]) for name in ("nodes", "edges")}
            rows.append({"model": content["model"], **_run(content, run), **total})
    rows.sort(key=lambda row: (row["model"], row["way"], row["bits"] or 0, row["parts"]))
    alone = {
        (row["model"], row["way"]): row["step_process_seconds"] for row in rows if row["parts"] == 1
    }
    for row in rows:
        row["relative"] = row["step_process_seconds"] / alone[row["model"], row["way"]]
    return table(_GROWN, rows)


def _run(content: Row, run: Row) -> dict[str, Any]:
    ranks, alone, several = run["ranks"], _alone(content, run["way"]), run["parts"] > 1

    def most(name: str) -> float | None:
        return max((rank[name] for rank in ranks if rank.get(name) is not None), default=None)

    names = ("peak_bytes", "sent_bytes", "step_seconds", "step_process_seconds")
    shares = (r["exchange_process_seconds"] / r["step_process_seconds"] for r in ranks)
    loss = ranks[0]["loss"]
    return {
        **{"parts": run["parts"], "way": run["way"], "loss": loss},
        **{name: most(name) for name in names},
        "bits": run["halo_bits"] if several else None,
        "exchanges": max(shares) if several else None,
        "difference": loss / alone["loss"] - 1 if several and alone else None,
    }


def counted(content: Row) -> Table:
    """Return a row for each number of parts and bits of the halo."""
    several = [run for run in content["runs"] if run["parts"] > 1]
    rows = []
    for size in content["counted"]:
        for bits in content["halo_bits"]:
            runs = [run for run in several if run["halo_bits"] == bits]
            if runs:
                run = max(runs, key=lambda run: run["parts"])
                cost = modelled(size, run["ranks"], _alone(content, run["way"]))
                rows.append({**size, "bits": bits, **cost})
    return table(_COUNTED, rows)


def _alone(content: Row, way: str) -> Any:
    """Return the process of a run with one part; None without such a run."""
    runs = content["runs"]
    return next((r["ranks"][0] for r in runs if r["parts"] == 1 and r["way"] == way), None)


def _train(args: command.Args, parts: int, way: str, bits: int) -> dict[str, Any]:
    case = Case.of(args, model=MODELS[args.model], strategy=way, parts=parts, halo_bits=bits)
    ranks = run_parts(case)
    if reason := reason_of(ranks):
        raise ExperimentError(f"{way} in {parts} processes: {reason}")
    dropped = _BY_CLOCK if args.no_times else ()
    return {"ranks": [{k: v for k, v in rank.items() if k not in dropped} for rank in ranks]}


def count(dataset: str, data_root: Any, way: str, parts: int) -> dict[str, Any]:
    """Return nodes, edges, halo rows and sent rows of each part; nothing is trained."""
    task = _task(dataset, data_root)
    graphs = cut(task.adjacency, len(task.x), way, parts)
    return {
        "parts": parts,
        "nodes": [len(part.nodes) for part in graphs],
        "edges": [part.edge_index.size(1) for part in graphs],
        "halo": [len(part.halo) for part in graphs],
        "sends": [len(part.send) for part in graphs],
    }


@functools.lru_cache(1)
def _task(dataset: str, data_root: Any) -> Any:
    return prepare(load(dataset, data_root), "edge_index")


@command.main(
    command.DATASET,
    command.DATA_ROOT,
    command.choice("--model", MODELS, "gat"),
    command.several("--parts", parse_count, "1,2,4", "processes to run"),
    command.several("--count", parse_count, "8,16,32,64", "parts to count"),
    command.names("--ways", WAYS, "lossless+blocks,L1+blocks"),
    command.several("--halo-bits", parse_bits, "32,8", "of rows that are sent"),
    command.choice("--cut", PARTITIONS, "metis"),
    command.BITS,
    command.number("--steps", 4),
    *command.SIZES,
    command.number("--threads", 1, "of a process"),
    command.switch("--no-times", "leave times by the clock out: the machine does other work"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    most = 4 * (os.cpu_count() or 1)
    if max(args.parts) > most:
        raise UsageError(
            f"Expected --parts of up to {most} processes on this machine (got {max(args.parts)}); "
            "--count counts the rows that more would send"
        )
    settings = ("model", "bits", "steps", "cut", "hidden", "layers", "threads")
    kept = args.keep("partition.json", *settings, times=not args.no_times)
    kept.content |= {"halo_bits": args.halo_bits}
    for parts in args.parts:
        for way in args.ways:
            # One part sends nothing, and needs no bits for it.
            for bits in args.halo_bits if parts > 1 else [32]:
                args.say(f"{parts} processes, {way}, {bits} bits")
                key = {"parts": parts, "way": way, "halo_bits": bits}
                kept.once(("runs", key), _train, args, parts, way, bits)
    for parts in args.count:
        args.say(f"{parts} parts, counted")
        task = args.dataset, args.data_root, args.cut, parts
        kept.once(("counted", {"parts": parts}), count, *task)
    title = f"{args.model} on {kept.content['dataset']}, {args.steps} steps"
    args.show(title, measured(kept.content))
    args.show("more parts: counted bytes, times by a model of the network", counted(kept.content))


if __name__ == "__main__":
    raise SystemExit(main())
