"""Train and test in an environment for each version of torch and PyG: ``versions.py WHEEL``.

Prints a table, and returns 1 if a combination failed. What the commands print is in build/versions.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "versions"

# The oldest that are accepted, and the newest that gact_graph.support.versions names as tested.
TORCH = ("2.10.0", "2.13.0", "2.15.0")
PYG = ("2.6.1", "2.7.0", "2.8.1")

CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
TOOLS = ("hypothesis", "packaging", "pytest", "scikit-learn")
TESTS = (
    "support/test_torch_private.py",
    "support/test_versions.py",
    "test_zoo.py",
    "layers/blocks/test_zoo.py",
    "capture/test_compiled.py",
    "api/test_wrap.py",
)


def run(log: Path, folder: Path, *words: str | Path) -> str:
    """Run a command in a folder; return what it printed, which is also added to the log.

    Raises:
        CalledProcessError: The command failed.
    """
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder / "kernels"), "PYTHONPATH": ""}
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, words))}\n{done.stdout}\n")
    done.check_returncode()
    return done.stdout


def combination(wheel: Path, torch: str, pyg: str, log: Path) -> dict[str, str]:
    """Return the results of the steps with one version of each, up to the first that fails."""
    results = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        python = folder / "bin" / "python"
        pip = python, "-m", "pip", "install"
        index = os.environ.get("TORCH_INDEX", CPU_INDEX).split()
        for name in ("tests", "experiments", "datasets", "pyproject.toml"):  # not gact_graph
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        steps = {
            "installs": [
                (sys.executable, "-m", "venv", folder),
                (*pip, "--no-deps", "--retries", "1", *index, f"torch=={torch}"),
                (*pip, f"torch=={torch}", f"torch_geometric=={pyg}", wheel, *TOOLS),
            ],
            "trains": [(python, ROOT / ".ci" / "train.py", "CPU kernels")],
            "tests": [(python, "-m", "pytest", "-q", *(f"tests/{name}" for name in TESTS))],
        }
        for step, commands in steps.items():
            try:
                printed = [run(log, folder, *command) for command in commands][-1]
            except subprocess.CalledProcessError as error:
                failures = re.findall(r"^(?:ERROR |FAILED |\w+Error:).*", error.stdout, re.M)
                results[step] = "\n".join(["failed", *failures[:3]])
                break
            lines = printed.strip().splitlines()
            # After pytest's last line, triton may complain about what Python left at its end.
            ends = [line for line in lines if re.search(r"^\d+ passed", line)] or lines
            results[step] = "yes" if step == "installs" else ends[-1]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=TORCH, help="only these versions of torch")
    parser.add_argument("--pyg", nargs="+", default=PYG, help="only these versions of PyG")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    table = Table("torch", "PyG", "installs", "trains", "tests")
    failed = False
    for torch in options.torch:
        for pyg in options.pyg:
            log = LOGS / f"torch-{torch}-pyg-{pyg}.log"
            log.unlink(missing_ok=True)
            results = combination(options.wheel.resolve(), torch, pyg, log)
            table.add_row(torch, pyg, *results.values())
            failed |= any(result.startswith("failed") for result in results.values())
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
