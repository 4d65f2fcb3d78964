"""Repeats measurements of ``results/`` that an older library made: ``measure.py DATA [WORD ...]``.

Each file in ``results/`` names the command that made it. The commands of files whose library
differs from the present one run again, one after another, and replace their files if they end well.
A file of several studies is replaced if the library of any of them differs. With words, only
files whose paths contain one of them. ``GACT_GRAPH_PYTHON`` is another Python for commands that
need one, such as ``experiments.peers`` with DGL. Without a driver of NVIDIA, commands for CUDA
devices are left out; other commands see no GPU. Stop at any time: files that are done are not
measured again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release import is_outdated

RESULTS = Path("results")

VARIABLES = ("GACT_GRAPH_KEEP_MEMORY", "LD_PRELOAD", "MALLOC_CONF", "OMP_WAIT_POLICY")
"""Environment variables that a file names where they were set (``experiments.helpers.origin``)."""


@dataclass(frozen=True)
class Run:
    """A command and its environment, as the files that it made name them."""

    command: str
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Run:
        """Return the run that made a file, or one study of a file."""
        threads = content.get("threads") or content.get("config", {}).get("threads") or 2
        variables = content.get("environment", {}) | {"OMP_NUM_THREADS": str(threads)}
        return cls(content["command"], tuple(sorted(variables.items())))

    @property
    def is_on_cuda(self) -> bool:
        """Return whether the command needs a CUDA device."""
        return "--device cuda" in self.command

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        if not self.is_on_cuda:
            kept["CUDA_VISIBLE_DEVICES"] = ""  # ``--device auto`` would take a GPU
        return kept | dict(self.variables)

    def words(self, data: str, out: Path) -> list[str]:
        """Return the command with the paths of this machine; ``out`` has no suffix."""
        _, *flags = shlex.split(self.command)
        python = os.environ.get("GACT_GRAPH_PYTHON", sys.executable)
        written = {"DIR": str(out), "FILE.json": f"{out}.json"}
        return [python, *(written.get(flag) or flag.replace("DATA", data) for flag in flags)]


def outdated(words: Sequence[str]) -> dict[Run, list[Path]]:
    """Return the files that one command made with another library, by that command."""
    found: dict[Run, list[Path]] = {}
    for path in sorted(RESULTS.rglob("*.json")):
        if words and not any(word in str(path) for word in words):
            continue
        content = json.loads(path.read_text())
        studies = [content] if "command" in content else [*content.values()]
        if any(is_outdated(study["commit"].partition("+")[0]) for study in studies):
            [run] = {Run.of(study) for study in studies}
            if not run.is_on_cuda or shutil.which("nvidia-smi"):
                found.setdefault(run, []).append(path)
    return found


def made_in(folder: Path, like: Path) -> Path | None:
    """Return the result in a folder: the only file, or that with the name of the one before."""
    # Deeper folders have parts of a result, such as each search of ``paper table3``.
    files = sorted([*folder.glob("*.json"), *folder.glob("out/*.json")])
    same = [file for file in files if file.name == like.name]
    return files[0] if len(files) == 1 else same[0] if len(same) == 1 else None


def measure(run: Run, paths: Sequence[Path], data: str) -> Iterator[tuple[Path, str]]:
    """Replace files by what their command gives now; yield those that are not, and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        code = subprocess.run(run.words(data, out), env=run.environment()).returncode
        for path in paths:
            made = made_in(Path(folder), path)
            if code or made is None:
                yield path, f"exit code {code}" if code else "another number of files"
            else:
                shutil.copyfile(made, path)


def main(data: str, words: Sequence[str]) -> int:
    """Return the exit code: 1 if a file was not replaced."""
    code = 0
    for run, paths in outdated(words).items():
        print(f"{', '.join(map(str, paths))}: {run.command}", flush=True)
        for path, reason in measure(run, paths, data):
            code = 1
            print(f"{path}: not replaced: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("Expected a folder with the graphs, as in measure.py ../shared/data")
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
