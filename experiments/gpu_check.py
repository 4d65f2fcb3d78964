"""Everything that wants a GPU, one part after the other, for a machine that is lent for minutes.

``python -m experiments.gpu_check --call 1 --out DIR``, and so ``--call 2`` and ``--call 3``

There are three calls of at most nine minutes each, what matters most first. Each part is a process
of its own, so that a kernel that breaks the device's context breaks one part alone, and has a limit
of time, at which it is interrupted and, some seconds later, killed. ``DIR/gpu_check.json`` is
written after each; while a part runs, what it has so far lies in ``DIR/PART.json`` or ``DIR/PART``,
and what tests print in ``DIR/PART.log``.
"""

from __future__ import annotations

import argparse
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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from experiments.helpers import command
from experiments.helpers.display import make_console, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.kept import write_json
from experiments.helpers.machine import gpus
from experiments.helpers.results import current_versions
from experiments.helpers.values import parse_path

FILE_NAME = "gpu_check.json"

# Few searches, by the share of time that is lent: the paper's deepest GCN in 16 GB, and a graph.
_SCALING = "--memory 16GB --vary depth --model gcn --dataset synthetic:ogbn-arxiv"
_SCALED = "stock,L1,CB2"

# To write a report after an interrupt.
_GRACE_SECONDS = 10

_MODELS = ("gcn", "gat", "gcnii")
# Compiling may take all the time that is left.
_WAYS = "stock,checkpoint,lossless+blocks,L1-4+blocks,CB2,compiled"

_DATA = "DATA"
"""Stands for the folder of generated graphs in the flags of a part."""

_REDDIT = f"{_DATA}/reddit.npz"


@dataclass(frozen=True)
class Part:
    """A module to run.

    Attributes:
        module: Its full name; a part whose module is not there is left out, which counts
            as a failure.
        flags: Its flags but for that of its output.
        seconds: After which it is ended.
        folder: Whether its output is a folder or a file that stays as it is, or a JSON file whose
            content moves into :data:`FILE_NAME`.
        under: A program, with its flags, that runs it; without that program the part is left out.
        out: The flag of its output; empty where it is among the flags.
        environment: Variables that it gets besides.
    """

    module: str
    flags: tuple[str, ...] = ("--device", "cuda")
    seconds: int = 60
    folder: bool = False
    under: tuple[str, ...] = ()
    out: str = "--out"
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, target: Path, data: Path) -> list[str]:
        """The command line.

        Args:
            target: Where the output goes.
            data: The folder of generated graphs.
        """
        flags = [flag.replace(_DATA, str(data)) for flag in self.flags]
        if self.out:
            flags += [self.out, str(target)]
        return [*self.under, sys.executable, "-m", self.module, *flags]

    def is_there(self) -> bool:
        """Whether its module and the program that it runs under can be found."""
        found = importlib.util.find_spec(self.module) is not None
        return found and (not self.under or shutil.which(self.under[0]) is not None)


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


def _steps(model: str, dataset: str, seconds: int) -> Part:
    """Saved bytes, peak and time of a step, stock's and its peers' beside the library's."""
    flags = f"--device cuda --rounds 1 --model {model} --dataset {dataset} --variants {_WAYS}"
    return Part("experiments.peers", tuple(flags.split()), seconds, folder=True)


CALLS: tuple[dict[str, Part], ...] = (
    {
        "kernels": _tests(120, "tests/ops"),
        "table": Part(
            "experiments.kernels", ("--device", "cuda", "--bits", "1-8,16", "--rounds", "15"), 90
        ),
        **{f"steps-{m}-ogbn-arxiv": _steps(m, "synthetic:ogbn-arxiv", 110) for m in _MODELS},
    },
    {
        "graph": Part(
            "experiments.save_graph",
            ("--dataset", "synthetic:reddit", "--out", _REDDIT),
            seconds=120,
            out="",
        ),
        **{f"steps-{m}-reddit": _steps(m, _REDDIT, 140) for m in _MODELS},
    },
    {
        # The zoo of convs among them, `lossless` beside stock.
        "tests": _tests(180, "--ignore=tests/ops", "tests"),
        "swap": Part(
            "experiments.swap",
            ("--device", "cuda", "--model", "gat", "--dataset", "synthetic:ogbn-arxiv"),
            seconds=70,
            folder=True,
        ),
        "scaling": Part(
            "experiments.scaling",
            ("--device", "cuda", *_SCALING.split(), "--variants", _SCALED),
            seconds=120,
            folder=True,
        ),
        "memcheck": _sanitized("memcheck", 60, "tests/ops/test_on_device.py"),
        "synccheck": _sanitized("synccheck", 60, "tests/ops/test_on_device.py"),
        "memcheck-edges": _sanitized(
            "memcheck", 50, "tests/ops/test_weighted_sum.py", "tests/ops/test_attention.py"
        ),
    },
)
"""What to run in each call."""

PARTS = {name: part for call in CALLS for name, part in call.items()}


def run_parts(parts: Mapping[str, Part], out: Path, data: Path) -> dict[str, Any]:
    """Run each part, write :data:`FILE_NAME` after each, and return what it holds of them.

    Of each ``state`` (``done``, ``failed``, ``out of time`` or ``not there``), ``seconds``,
    ``error`` (the last line of standard error) where it failed, and ``found``, what the part wrote,
    also where it failed.

    Args:
        parts: By name.
        out: The folder of the results.
        data: The folder of generated graphs, which serves several calls.
    """
    out.mkdir(parents=True, exist_ok=True)
    about = {"gpus": gpus(), "cuda": torch.version.cuda, "versions": current_versions()}
    found: dict[str, Any] = {}
    console = make_console()
    for name, part in parts.items():
        target = out / (name if part.folder else f"{name}.json")
        command = part.command(target, data)
        say(console, f"{name}: {' '.join(command)}")
        with _output(part, out / f"{name}.log") as printed:
            found[name] = _outcome(part, command, target, printed)
        write_json(out / FILE_NAME, about | {"parts": found})
        if not part.folder:
            # Only now: until then it was the one copy.
            (out / f"{name}.json").unlink(missing_ok=True)
        say(console, f"  {found[name]['state']} {found[name].get('error', '')}")
    return found


def _output(part: Part, log: Path) -> AbstractContextManager[IO[str] | None]:
    """Where a part prints: tests into a file, others to the terminal."""
    return log.open("w") if part.module == "pytest" else nullcontext()


def _outcome(
    part: Part, command: list[str], target: Path, printed: IO[str] | None
) -> dict[str, Any]:
    if not part.is_there():
        return {"state": "not there"}
    start = time.perf_counter()
    environment = os.environ | dict(part.environment)
    # A group of its own, so that its children end with it.
    process = subprocess.Popen(
        command,
        stdout=printed,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=part.seconds)
        state = "failed" if process.returncode else "done"
    except subprocess.TimeoutExpired:
        errors = _end(process)
        state = "out of time"
    outcome: dict[str, Any] = {"state": state, "seconds": round(time.perf_counter() - start, 1)}
    if state != "done":
        lines = errors.strip().splitlines()
        outcome["error"] = lines[-1] if lines else f"ended with code {process.returncode}"
    if not part.folder and target.is_file():
        outcome["found"] = _content(target)
    return outcome


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupts a group of processes, kills what is left, and returns the first one's errors."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1]


def _content(target: Path) -> Any:
    """What a part wrote; as text where it is no JSON, or was cut off."""
    text = target.read_text(errors="replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _run(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise UsageError(
            "Expected a CUDA device that torch sees (got none): run this where there is a GPU; "
            "the commands of its parts take --device cpu"
        )
    names = args.parts if args.call is None else [*CALLS[args.call - 1]]
    found = run_parts({name: PARTS[name] for name in names}, args.out, args.data)
    failed = [name for name, outcome in found.items() if outcome["state"] != "done"]
    if failed:
        raise ExperimentError(f"failed or not run: {', '.join(failed)}; see {args.out / FILE_NAME}")


main = command.Command(
    "gpu_check",
    __doc__,
    _run,
    command.flag("--call", int, choices=(1, 2, 3), text="the parts of one call of nine minutes"),
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

if __name__ == "__main__":
    sys.exit(main())
