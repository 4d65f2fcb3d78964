"""Everything that wants a GPU, one part after the other, for a machine that is lent for minutes.

``python -m experiments.gpu_check --out DIR``

Each part is a process of its own, so that a kernel that breaks the device's context breaks one part
alone. ``DIR/gpu_check.json`` is written after each; while a part runs, what it has so far lies in
``DIR/PART.json`` or ``DIR/PART``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.helpers.display import make_console, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.machine import gpus
from experiments.helpers.options import Parser
from experiments.helpers.results import current_versions
from experiments.helpers.subjects import choose, exit_code, write_json

FILE_NAME = "gpu_check.json"

# Few searches, by the share of time that is lent: the paper's deepest GCN in 16 GB, and a graph.
_SCALING = "--memory 16GB --vary depth --model gcn --dataset synthetic:ogbn-arxiv"
_SCALED = "stock,L1,CB2"

_GRAPHS = ("ogbn-arxiv", "reddit")
_MODELS = ("gcn", "gat", "gcnii")
_STEPS = "stock,lossless,L1,L1+blocks,CB2"


@dataclass(frozen=True)
class Part:
    """A module to run.

    Attributes:
        module: Its full name; a part whose module is not there is left out, and says so.
        flags: Its flags but for that of its output.
        folder: Whether its output is a folder or a file that stays as it is, or a JSON file whose
            content moves into :data:`FILE_NAME`.
        under: A program, with its flags, that runs it; without that program the part is left out.
        out: The flag of its output.
    """

    module: str
    flags: tuple[str, ...] = ("--device", "cuda")
    folder: bool = False
    under: tuple[str, ...] = ()
    out: str = "--out"

    @property
    def command(self) -> list[str]:
        return [*self.under, sys.executable, "-m", self.module, *self.flags]

    def is_there(self) -> bool:
        """Whether its module and the program that it runs under can be found."""
        found = importlib.util.find_spec(self.module) is not None
        return found and (not self.under or shutil.which(self.under[0]) is not None)


def _tests(*flags: str, under: tuple[str, ...] = ()) -> Part:
    return Part("pytest", ("-q", *flags), folder=True, under=under, out="--junitxml")


def _sanitized(tool: str) -> Part:
    under = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    return _tests("-k", "cuda and not 32_bits", "tests/ops/test_on_device.py", under=under)


def _steps(model: str, graph: str) -> Part:
    """Time and peak of a step, with what the report says and what the allocator holds."""
    flags = f"--device cuda --steps 6 --model {model} --dataset synthetic:{graph}"
    return Part("experiments.memory", (*flags.split(), "--variants", _STEPS), folder=True)


PARTS = {
    "kernels": _tests("-k", "cuda and not source", "tests/ops"),
    "memcheck": _sanitized("memcheck"),
    "racecheck": _sanitized("racecheck"),
    "table": Part(
        "experiments.kernels", ("--device", "cuda", "--bits", "1-8,16", "--rounds", "15")
    ),
    # The zoo of convs among them, `lossless` beside stock.
    "tests": _tests("-k", "cuda and not source", "--ignore=tests/ops", "tests"),
    **{f"steps-{model}-{graph}": _steps(model, graph) for graph in _GRAPHS for model in _MODELS},
    "swap": Part("experiments.swap", folder=True),
    "scaling": Part(
        "experiments.scaling",
        ("--device", "cuda", *_SCALING.split(), "--variants", _SCALED),
        folder=True,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 1 if one failed, 2 where there is no GPU or a flag cannot be served."""
    return exit_code("gpu_check", lambda: _run(argv))


def run_parts(parts: Mapping[str, Part], out: Path) -> dict[str, Any]:
    """Run each part, write :data:`FILE_NAME` after each, and return what it holds of them.

    Of each ``state`` (``done``, ``failed`` or ``not there``), ``seconds``, ``error`` (the last line
    of standard error) where it failed, and ``found``, what the part wrote, also where it failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    about = {"gpus": gpus(), "cuda": torch.version.cuda, "versions": current_versions()}
    found: dict[str, Any] = {}
    console = make_console()
    for name, part in parts.items():
        say(console, f"{name}: {' '.join(part.command)}")
        found[name] = _outcome(part, out / (name if part.folder else f"{name}.json"))
        write_json(out / FILE_NAME, about | {"parts": found})
        if not part.folder:
            # Only now: until then it was the one copy.
            (out / f"{name}.json").unlink(missing_ok=True)
        say(console, f"  {found[name]['state']} {found[name].get('error', '')}")
    return found


def _outcome(part: Part, target: Path) -> dict[str, Any]:
    if not part.is_there():
        return {"state": "not there"}
    start = time.perf_counter()
    done = subprocess.run(
        [*part.command, part.out, str(target)], stderr=subprocess.PIPE, text=True, check=False
    )
    outcome: dict[str, Any] = {
        "state": "failed" if done.returncode else "done",
        "seconds": round(time.perf_counter() - start, 1),
    }
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        outcome["error"] = lines[-1] if lines else f"ended with code {done.returncode}"
    if not part.folder and target.is_file():
        outcome["found"] = json.loads(target.read_text())
    return outcome


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    if not torch.cuda.is_available():
        raise UsageError(
            "Expected a CUDA device that torch sees (got none): run this where there is a GPU; "
            "the commands of its parts take --device cpu"
        )
    found = run_parts({name: PARTS[name] for name in args.parts}, args.out)
    failed = [name for name, outcome in found.items() if outcome["state"] == "failed"]
    if failed:
        raise ExperimentError(f"failed: {', '.join(failed)}; see {args.out / FILE_NAME}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.parts = choose("--parts", args.parts, PARTS)
    return args


if __name__ == "__main__":
    sys.exit(main())
