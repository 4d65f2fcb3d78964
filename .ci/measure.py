"""Measures again what an older library gave: ``measure.py DATA [WORD ...]``.

Each file in ``results/`` names the command that made it. The commands of files whose library
differs from the present one run again, one after another, and replace the file if they end well.
With words, only files whose paths contain one of them. ``GACT_GRAPH_PYTHON`` is another Python for
commands that need one, such as ``experiments.peers`` with DGL. Stop at any time: files that are
done are not measured again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from release import is_outdated

RESULTS = Path("results")


def outdated(words: Sequence[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files that one command made with another library, and their content."""
    for path in sorted(RESULTS.rglob("*.json")):
        content = json.loads(path.read_text())
        wanted = not words or any(word in str(path) for word in words)
        if wanted and "command" in content and is_outdated(content["commit"].partition("+")[0]):
            yield path, content


def command_of(content: dict[str, Any], data: str, out: Path) -> list[str]:
    """Return the command with the folders of this machine."""
    _, *flags = shlex.split(content["command"])
    python = os.environ.get("GACT_GRAPH_PYTHON", sys.executable)
    return [python, *(f.replace("DATA", data) if f != "DIR" else str(out) for f in flags)]


def made_in(folder: Path, like: Path) -> Path | None:
    """Return the result in a folder: the only file, or that with the name of the one before."""
    files = sorted(folder.rglob("*.json"))
    same = [file for file in files if file.name == like.name]
    return files[0] if len(files) == 1 else same[0] if len(same) == 1 else None


def measure(path: Path, content: dict[str, Any], data: str) -> str | None:
    """Replace a file by what its command gives now; return the reason if it does not."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        if content["command"].endswith(".json"):
            out = out / path.name
            out.parent.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": str(content.get("threads", 2))}
        code = subprocess.run(command_of(content, data, out), env=environment).returncode
        made = made_in(Path(folder), path)
        if code or made is None:
            return f"exit code {code}" if code else "another number of files"
        shutil.copyfile(made, path)
        return None


def main(data: str, words: Sequence[str]) -> int:
    """Return the exit code: 1 if a file was not replaced."""
    code = 0
    for path, content in outdated(words):
        print(f"{path}: {content['command']}", flush=True)
        reason = measure(path, content, data)
        if reason is not None:
            code = 1
            print(f"{path}: not replaced: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("Expected a folder with the graphs, as in measure.py ../shared/data")
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
