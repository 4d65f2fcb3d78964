"""All checks that need a GPU, one part after the other, for a machine that is lent for minutes.

``python -m experiments.gpu_check --call 1 --out DIR``, and so ``--call 2`` and ``--call 3``

There are three calls of at most nine minutes each, the most important first. Each part is a process
of its own, so that a kernel that breaks the device's context breaks one part alone, and has a limit
of time, at which it is interrupted and, some seconds later, killed. ``DIR/gpu_check.json`` is
written after each; while a part runs, its output lies in ``DIR/PART.json`` or ``DIR/PART``, and the
lines of tests in ``DIR/PART.log``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.helpers import command
from experiments.helpers.display import make_console, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.kept import write_json
from experiments.helpers.origin import current_versions, gpus
from experiments.helpers.values import parse_path

FILE_NAME = "gpu_check.json"

_GRACE_SECONDS = 10
"""To write a report after an interrupt."""

_DATA = "DATA"
"""Stands for the folder of generated graphs in the flags of a part."""

_REDDIT = f"{_DATA}/reddit.npz"

_ARXIV = "synthetic:ogbn-arxiv"

_MODELS = ("gcn", "gat", "gcnii")

# Compiling may take all the time that is left.
_WAYS = "stock,checkpoint,lossless+blocks,L1-4+blocks,CB2,compiled"


@dataclass(frozen=True)
class Part:
    """A module to run.

    Attributes:
        module: Its full name; without it the part is left out, which counts as a failure.
        flags: Its flags but for that of its output.
        seconds: After which it is ended.
        folder: Whether its output is a folder or a file that stays, or a JSON file whose content
            moves into :data:`FILE_NAME`.
        under: A program, with its flags, that runs it; without it the part is left out.
        out: The flag of its output; empty where it is among the flags.
        environment: Further variables.
    """

    module: str
    flags: tuple[str, ...] = ()
    seconds: int = 60
    folder: bool = False
    under: tuple[str, ...] = ()
    out: str = "--out"
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, target: Path, data: Path) -> list[str]:
        """Return the command line, with its output and the folder of generated graphs."""
        flags = [flag.replace(_DATA, str(data)) for flag in self.flags]
        output = [self.out, str(target)] if self.out else []
        return [*self.under, sys.executable, "-m", self.module, *flags, *output]

    def is_there(self) -> bool:
        """Return whether its module and the program that it runs under can be found."""
        has_module = importlib.util.find_spec(self.module) is not None
        return has_module and (not self.under or shutil.which(self.under[0]) is not None)


def _run(command: str, seconds: int, folder: bool = True, **options: Any) -> Part:
    """A command of the experiments and its flags."""
    name, *flags = command.split()
    return Part(f"experiments.{name}", tuple(flags), seconds, folder, **options)


def _steps(dataset: str, seconds: int) -> dict[str, Part]:
    """Saved bytes, peak and time of a step, stock's and its peers' beside the library's."""
    line = "peers --device cuda --rounds 1 --model {} --dataset {} --variants {}"
    name = Path(dataset.partition(":")[2] or dataset).stem
    return {
        f"steps-{model}-{name}": _run(line.format(model, dataset, _WAYS), seconds)
        for model in _MODELS
    }


def _tests(seconds: int, *flags: str, **options: Any) -> Part:
    # A warning of another version of a package says nothing of a GPU.
    flags = ("-v", "-W", "default", "-m", "gpu and not long", *flags)
    return Part("pytest", flags, seconds, folder=True, out="--junitxml", **options)


def _sanitized(tool: str, seconds: int, *files: str) -> Part:
    """Small tensors. torch's own cache of memory would hide accesses beyond a tensor's end."""
    return _tests(
        seconds,
        *("-k", "not 32_bits and not 100003", *files),
        under=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
    )


_ON_DEVICE = "tests/ops/test_on_device.py"
_EDGES = ("tests/ops/test_weighted_sum.py", "tests/ops/test_attention.py")

CALLS: tuple[dict[str, Part], ...] = (
    {
        "kernels": _tests(120, "tests/ops"),
        "table": _run("kernels --device cuda --bits 1-8,16 --rounds 15", 90, folder=False),
        **_steps(_ARXIV, 110),
    },
    {
        "graph": _run(
            f"save_graph --dataset synthetic:reddit --out {_REDDIT}", 120, folder=False, out=""
        ),
        **_steps(_REDDIT, 140),
    },
    {
        # The zoo of convs among them, `lossless` beside stock.
        "tests": _tests(180, "--ignore=tests/ops", "tests"),
        "swap": _run(f"swap --device cuda --model gat --dataset {_ARXIV}", 70),
        # Few searches, by the share of time that is lent: the paper's deepest GCN in 16 GB.
        "scaling": _run(
            f"scaling --device cuda --memory 16GB --vary depth --model gcn --dataset {_ARXIV} "
            "--variants stock,L1,CB2",
            120,
        ),
        "memcheck": _sanitized("memcheck", 60, _ON_DEVICE),
        "synccheck": _sanitized("synccheck", 60, _ON_DEVICE),
        "memcheck-edges": _sanitized("memcheck", 50, *_EDGES),
    },
)
"""The parts of each call."""

PARTS = {name: part for call in CALLS for name, part in call.items()}


def run_parts(parts: Mapping[str, Part], out: Path, data: Path) -> dict[str, Any]:
    """Run each part, write :data:`FILE_NAME` after each, and return its content by part.

    Of each ``state`` (``done``, ``failed``, ``out of time`` or ``not there``), ``seconds``,
    ``error`` (the last line of standard error) where it failed, and ``found``, its output, also
    where it failed.

    Args:
        parts: By name.
        out: The folder of the results.
        data: The folder of generated graphs, which serves several calls.
    """
    about = {"gpus": gpus(), "cuda": torch.version.cuda, "versions": current_versions()}
    outcomes: dict[str, Any] = {}
    console = make_console()
    for name, part in parts.items():
        target = out / (name if part.folder else f"{name}.json")
        say(console, f"{name}: {' '.join(part.command(target, data))}")
        outcomes[name] = _outcome(part, target, data, out / f"{name}.log")
        write_json(out / FILE_NAME, about | {"parts": outcomes})
        if not part.folder:
            # Only now: until then it was the one copy.
            target.unlink(missing_ok=True)
        say(console, f"  {outcomes[name]['state']} {outcomes[name].get('error', '')}")
    return outcomes


def _outcome(part: Part, target: Path, data: Path, log: Path) -> dict[str, Any]:
    if not part.is_there():
        return {"state": "not there"}
    start = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") if part.module == "pytest" else nullcontext() as printed:
        process = subprocess.Popen(
            part.command(target, data),
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(part.environment),
            start_new_session=True,  # a group of its own, so that its children end with it
        )
        try:
            _, errors = process.communicate(timeout=part.seconds)
            state = "failed" if process.returncode else "done"
        except subprocess.TimeoutExpired:
            state, errors = "out of time", _end(process)
    outcome: dict[str, Any] = {"state": state, "seconds": round(time.perf_counter() - start, 1)}
    if state != "done":
        lines = errors.strip().splitlines()
        outcome["error"] = lines[-1] if lines else f"ended with code {process.returncode}"
    if not part.folder and target.is_file():
        text = target.read_text(errors="replace")
        try:
            outcome["found"] = json.loads(text)
        except json.JSONDecodeError:  # cut off
            outcome["found"] = text
    return outcome


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupt a group of processes, kill the rest of it, and return the errors of the first."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1]


@command.main(
    command.flag("--call", int, choices=(1, 2, 3), text="the parts of a call of nine minutes"),
    command.names("--parts", PARTS),
    command.flag(
        "--data",
        parse_path,
        str(Path(tempfile.gettempdir()) / "gact_graph_data"),
        "generated graphs",
        metavar="DIR",
    ),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if not torch.cuda.is_available():
        raise UsageError(
            "Expected a CUDA device that torch sees (got none): run this where there is a GPU; "
            "the commands of its parts take --device cpu"
        )
    names = args.parts if args.call is None else [*CALLS[args.call - 1]]
    outcomes = run_parts({name: PARTS[name] for name in names}, args.out, args.data)
    failed = [name for name, outcome in outcomes.items() if outcome["state"] != "done"]
    if failed:
        raise ExperimentError(f"failed or not run: {', '.join(failed)}; see {args.out / FILE_NAME}")


if __name__ == "__main__":
    raise SystemExit(main())
