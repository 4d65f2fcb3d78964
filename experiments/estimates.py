"""What a memory budget predicts beside what is measured, and whether the budget is kept.

``python -m experiments.estimates --models gat,gcn --datasets D/cora.npz,D/flickr_graph.npz --out
DIR`` estimates each model on each graph, then trains it for some steps in each way, a fresh process
each and after a step of a copy, and compares the peaks. ``--budgets`` also has ``wrap(memory=)``
choose under a few budgets, in a process that can get no more memory than that. What was found is
kept under ``--out``: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import gact_graph
from datasets import load
from experiments.helpers.cap import ended_by_memory, set_cap
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ExperimentError
from experiments.helpers.estimate_tables import REFUSED, verdict
from experiments.helpers.folder import hold_folder
from experiments.helpers.kept import read_kept
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.train import seed_everything
from experiments.models.memory import KINDS
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter
from gact_graph.support.storage import tensors_in

FILE_NAME = "estimates.json"

_STEPS = 4
_WAYS = "stock,lossless,lossless + blocks,L1 8,L1 4,L1 2,CB2 4"
HEAD = ("", "way", "predicted, MB", "measured, MB", "off by")


def main(argv: list[str] | None = None) -> int:
    """Compare and show; return the exit code as the main job does."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--child"]:
        print(json.dumps(_child(json.loads(arguments[1]))))
        return 0
    return exit_code("estimates", lambda: _run(arguments))


def _run(argv: list[str]) -> None:
    args = _parse(argv)
    console = make_console()
    settings = {"threads": torch.get_num_threads(), "steps": _STEPS}
    with hold_folder(args.out, lambda text: say(console, text)):
        kept = _Kept(args.out / FILE_NAME, settings, origin("estimates", argv))
        for dataset in args.datasets.split(","):
            for model in args.models:
                say(console, f"{model} on {dataset_name(dataset)}")
                task = {"model": model, "dataset": dataset, "data_root": args.data_root}
                _compare(kept, task, args.ways, args.budgets)
        kept.write()
    _show(console, kept.found["pairs"], kept.found["budgets"])


class _Kept:
    """What was found, in a file that is written after each finding and read by the next run.

    Raises:
        ResultsError: If the file is of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], origin: dict[str, Any]) -> None:
        self._path, self._head = path, settings | origin
        self.found: dict[str, list[dict[str, Any]]] = {"estimates": [], "pairs": [], "budgets": []}
        if (content := read_kept(path, settings)) is not None:
            self.found = {kind: content[kind] for kind in self.found}

    def once(
        self, kind: str, key: dict[str, Any], find: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The finding of this key, which is looked for unless it is there."""
        for one in self.found[kind]:
            if one.items() >= key.items():
                return one
        self.found[kind].append(key | find())
        self.write()
        return self.found[kind][-1]

    def write(self) -> None:
        """Writes all findings, with the command that found the last of them."""
        write_json(self._path, self._head | self.found)


def _compare(kept: _Kept, task: dict[str, Any], ways: list[str], budgets: list[str]) -> None:
    """One model on one graph: its estimate, the peak in each way, and what budgets lead to."""
    key = {"model": task["model"], "dataset": dataset_name(task["dataset"])}

    def estimate() -> dict[str, Any]:
        found = _in_process(task | {"task": "estimate"})
        assert found is not None  # without a cap, memory suffices or the process is killed
        return {"ways": found["ways"]}

    rows = {row["way"]: row for row in kept.once("estimates", key, estimate)["ways"]}

    def measure(way: str) -> dict[str, Any]:
        found = _in_process(task | {"task": "measure", "way": rows[way]})
        measured = None if found is None else found["peak_bytes"]
        return {"predicted": rows[way]["peak_bytes"], "measured": measured}

    def give(memory: int) -> dict[str, Any]:
        found = _in_process(task | {"task": "budget", "memory": memory})
        if found is None:
            return {"chosen": None, "peak": None}
        return {"chosen": found["way"], "peak": found["peak_bytes"]}

    for way in ways:
        kept.once("pairs", key | {"way": way}, functools.partial(measure, way))
    for way in budgets:
        memory = int(rows[way]["peak_bytes"] * 1.05) + (5 << 20)
        kept.once("budgets", key | {"for": way, "memory": memory}, functools.partial(give, memory))


def _show(console: Console, pairs: list[dict[str, Any]], budgets: list[dict[str, Any]]) -> None:
    rows = []
    for pair in pairs:
        cells = [f"{pair['model']} on {pair['dataset']}", pair["way"]]
        cells.append(f"{pair['predicted'] / 1e6:,.1f}")
        if pair["measured"] is None:
            rows.append((*cells, "does not fit", ""))
            continue
        off = pair["predicted"] / pair["measured"] - 1
        rows.append((*cells, f"{pair['measured'] / 1e6:,.1f}", f"{off:+.1%}"))
    console.print(make_table("predicted and measured peaks", HEAD, rows))
    say(console, verdict(pairs))
    for one in budgets:
        kept = "no peak" if one["peak"] is None else f"peak {one['peak'] / 1e6:,.1f} MB"
        say(
            console,
            f"{one['model']} on {one['dataset']}, {one['memory'] / 1e6:,.1f} MB for {one['for']}: "
            f"{one['chosen']}, {kept}",
        )


def _in_process(task: dict[str, Any]) -> dict[str, Any] | None:
    """What a task gave in a fresh process; None if the memory did not suffice.

    Raises:
        ExperimentError: If the process failed for another reason.
    """
    command = [sys.executable, "-m", "experiments.estimates", "--child", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    if ended_by_memory(done.returncode, done.stderr):
        return None
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    raise ExperimentError(f"{task['task']} of {task['model']} failed: {last}")


def _child(task: dict[str, Any]) -> dict[str, Any]:
    graph = load(task["dataset"], task["data_root"])
    kind = KINDS[task["model"]]
    seed_everything(0)
    model, inputs = kind.make(graph), kind.inputs(graph)
    with torch.no_grad():
        model.eval()(*inputs)  # gives lazily initialised parameters their values
    model.train()
    if task["task"] == "estimate":
        return gact_graph.estimate(model, *inputs).to_dict()
    if task["task"] == "measure":
        way = task["way"]
        memory_policy.limit(way["peak_bytes"])  # as within a budget of that size
        # What a process has for ever after its first step, whatever trains, is no step's.
        _train(_in_way(copy.deepcopy(model), way), inputs, graph.y, 1)
        _in_way(model, way)
        return {"peak_bytes": max(_train(model, inputs, graph.y, _STEPS))}
    memory = task["memory"]
    gact_graph.wrap(model, memory=memory)
    try:
        _choose(model, inputs)
    except gact_graph.MemoryBudgetError:
        return {"way": REFUSED, "peak_bytes": None}
    set_cap(torch.device("cpu"), memory)
    peaks = _train(model, inputs, graph.y, _STEPS)
    return {"peak_bytes": max(peaks), "way": gact_graph.report(model).way}


def _choose(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The first training call chooses; its graph is dropped."""
    for output in tensors_in(model(*inputs)):
        del output


def _in_way(model: nn.Module, way: dict[str, Any]) -> nn.Module:
    if way["level"] is None:
        return model
    blocks = "auto" if way["blocks"] else False
    options = {"bits": way["bits"], "level": way["level"], "blocks": blocks}
    return gact_graph.wrap(model, **options, min_bytes=0)


def _train(model: nn.Module, inputs: tuple[Any, ...], y: Tensor, steps: int) -> list[int]:
    """The peak of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    peaks = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with PeakMeter(torch.device("cpu")) as meter:
            losses = [
                nn.functional.cross_entropy(output, y) for output in tensors_in(model(*inputs))
            ]
            torch.stack(losses).sum().backward()
            del losses
            optimizer.step()
        assert meter.peak_bytes is not None
        peaks.append(meter.peak_bytes)
    return peaks


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.estimates", description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", default=",".join(KINDS), help="default: all")
    parser.add_argument("--datasets", default="digits", metavar="D,D", help="default: digits")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="default: data")
    parser.add_argument("--ways", default=_WAYS, help=f"default: {_WAYS}")
    parser.add_argument("--budgets", default="", help="ways for each of which a budget is given")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, KINDS)
    args.ways = [*map(_way, args.ways.split(","))]
    args.budgets = [*map(_way, filter(None, args.budgets.split(",")))]
    return args


def _way(text: str) -> str:
    """``L1 4`` on the command line is ``L1, 4 bits`` in the table of an estimate."""
    level, _, bits = text.rpartition(" ")
    return f"{level}, {bits} bits" if bits.isdigit() else text


if __name__ == "__main__":
    sys.exit(main())
