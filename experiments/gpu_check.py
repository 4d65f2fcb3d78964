"""All checks that need a GPU, in parts, for a machine that is available for minutes at a time.

``python -m experiments.gpu_check --call 1 --out DIR``, likewise ``--call 2`` and ``--call 3``

There are three calls of at most nine minutes each, the most important first. Each part runs in a
process of its own, so that a kernel that breaks the device's context breaks only one part. A part
that exceeds its time limit is interrupted and, some seconds later, killed. ``DIR/gpu_check.json``
is written after each part, and keeps the parts of other calls; ``DIR/PART`` has the output of a
part (``DIR/PART.json`` if it is one file), and ``DIR/PART.log`` its lines.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.helpers import command
from experiments.helpers.display import make_console, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.kept import Kept
from experiments.helpers.origin import commit, current_versions, gpus
from experiments.helpers.values import parse_path

FILE_NAME = "gpu_check.json"

_GRACE_SECONDS = 10
"""Time to write a report after an interrupt."""

_REDDIT, _ARXIV = "{data}/reddit.npz", "synthetic:ogbn-arxiv"

# Compiling may take all the time that is left.
_WAYS = "stock,checkpoint,lossless+blocks,L1-4+blocks,CB2,compiled"


class Part(NamedTuple):
    """A command to run.

    Attributes:
        line: Its command line; ``{out}`` is its output, ``{data}`` the folder of generated graphs.
        seconds: The time limit, after which the command is ended.
        environment: Further environment variables.
    """

    line: str
    seconds: int = 60
    environment: Mapping[str, str] = {}

    def command(self, out: Path, data: Path) -> list[str]:
        """Return the words of the command line."""
        known = {"python": sys.executable, "out": out, "data": data}
        return [word.format_map(known) for word in shlex.split(self.line)]


def _run(flags: str, seconds: int) -> Part:
    """Return a part that runs a command of the experiments."""
    return Part(f"{{python}} -m experiments.{flags}", seconds)


def _steps(dataset: str, seconds: int) -> dict[str, Part]:
    """Return parts that compare stock, peers and the library by saved bytes, peak and time."""
    name = Path(dataset.partition(":")[2] or dataset).stem
    flags = f"--dataset {dataset} --rounds 1 --variants {_WAYS} --device cuda --out {{out}}"
    return {
        f"steps-{model}-{name}": _run(f"peers --model {model} {flags}", seconds)
        for model in ("gcn", "gat", "gcnii")
    }


# Warnings of another version of a package are unrelated to the GPU.
_TESTS = "{python} -m pytest -v -W default -m 'gpu and not long' --junitxml {out}"

# On an H200 with 16 cores, the tests of the kernels take a minute on four workers.
_WORKERS = "-n 4"


def _sanitized(tool: str, seconds: int, files: str) -> Part:
    """Return a part that runs tests on small tensors under a tool of compute-sanitizer.

    torch's cache of memory is off: it would hide accesses beyond a tensor's end. Errors of API
    calls are not reported: ``cuda.bindings`` looks up functions that an older driver lacks.
    """
    return Part(
        f"compute-sanitizer --tool {tool} --report-api-errors no --error-exitcode 1 {_TESTS} "
        f"-k 'not 32_bits and not 100003' {files}",
        seconds,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


_ON_DEVICE = "tests/ops/test_on_device.py"
_EDGES = "tests/ops/test_weighted_sum.py tests/ops/test_attention.py"

CALLS: tuple[dict[str, Part], ...] = (
    {
        "kernels": Part(f"{_TESTS} {_WORKERS} tests/ops", 120),
        "table": _run("kernels --device cuda --bits 1-8,16 --rounds 15 --out {out}.json", 90),
        **_steps(_ARXIV, 110),
    },
    {
        "graph": _run(f"save_graph --dataset synthetic:reddit --out {_REDDIT}", 120),
        **_steps(_REDDIT, 140),
    },
    {
        # These include the zoo of convs, with `lossless` beside stock.
        "tests": Part(f"{_TESTS} {_WORKERS} --ignore=tests/ops tests", 180),
        "swap": _run(f"swap --device cuda --model gat --dataset {_ARXIV} --out {{out}}", 70),
        # Few searches, because time is short: the paper's deepest GCN in 16 GB.
        "scaling": _run(
            f"scaling --device cuda --memory 16GB --vary depth --model gcn --dataset {_ARXIV} "
            "--variants stock,L1,CB2 --out {out}",
            120,
        ),
        "memcheck": _sanitized("memcheck", 60, _ON_DEVICE),
        "memcheck-edges": _sanitized("memcheck", 60, _EDGES),
        "synccheck": _sanitized("synccheck", 50, _EDGES),
    },
)
"""The parts of each call."""

PARTS = {name: part for call in CALLS for name, part in call.items()}


def run_parts(parts: Mapping[str, Part], out: Path, data: Path) -> dict[str, Any]:
    """Run each part, write :data:`FILE_NAME` after each, and return what became of these parts.

    The file keeps the parts of earlier calls. Each part has its ``state`` (``done``, ``failed``,
    ``out of time``, or ``not there`` if its program is missing), ``seconds``, and, if it is not
    done, ``error``, the last line of standard error.

    Args:
        parts: The parts by name.
        out: The folder of the results.
        data: The folder of generated graphs, which several calls share.

    Raises:
        ResultsError: If the file is of another machine or commit, or of other versions.
    """
    about = {"gpus": gpus(), "cuda": torch.version.cuda}
    kept = Kept(out / FILE_NAME, about | {"commit": commit(), "versions": current_versions()})
    outcomes = kept.content.setdefault("parts", {})
    console = make_console()
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        line = part.command(out / name, data)
        say(console, f"{name}: {' '.join(line)}")
        outcomes[name] = _outcome(line, part, out / f"{name}.log")
        kept.write()
        say(console, f"  {outcomes[name]['state']} {outcomes[name].get('error', '')}")
    return {name: outcomes[name] for name in parts}


def _outcome(line: list[str], part: Part, log: Path) -> dict[str, Any]:
    start = time.perf_counter()
    with log.open("w") as printed:
        try:
            process = subprocess.Popen(
                line,
                stdout=printed,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | dict(part.environment),
                start_new_session=True,  # a group of its own, so that its children end with it
            )
        except FileNotFoundError:
            return {"state": "not there"}
        try:
            _, errors = process.communicate(timeout=part.seconds)
            state = "failed" if process.returncode else "done"
        except subprocess.TimeoutExpired:
            state, errors = "out of time", _end(process)
        except BaseException:  # Ctrl-C does not reach the group of the part
            _end(process)
            raise
    outcome: dict[str, Any] = {"state": state, "seconds": round(time.perf_counter() - start, 1)}
    if state != "done":
        lines = errors.strip().splitlines()
        outcome["error"] = lines[-1] if lines else f"ended with code {process.returncode}"
    return outcome


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupt a group of processes, kill the rest of it, and return the errors of the first."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(_GRACE_SECONDS)
    finally:  # after a second Ctrl-C, too
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
