"""Plants one fault at a time in a copy of the checkout, and runs the tests that should find it.

``make mutants`` runs all faults of ``faults.py``; ``make mutants ARGS=dropout`` those whose names
have the word. A fault that no test finds, or whose text is no longer in its file, is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS, Fault

from gact_graph.ops.kernels import cache

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900.0
"""Seconds after which tests that hang have found a fault."""

_PASSED, _FAILED = 0, 1  # exit codes of pytest; others say that it could not run the tests


def copy_of_checkout(folder: Path) -> Path:
    """Copy all files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def problem_with(fault: Fault) -> str | None:
    """Return why the fault cannot be planted, or None."""
    times = (ROOT / fault.file).read_text().count(fault.old)
    if times == 1:
        return None
    return (
        f"Expected {fault.old!r} once in {fault.file} (got it {times} times); change the fault "
        f"{fault.name!r} in tests/mutants/faults.py to fit the code as it is now"
    )


def run_tests(copy: Path, tests: Sequence[str], kernels: Path | None) -> tuple[int | None, str]:
    """Return pytest's exit code, None where it ran into the limit, and its output."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    if kernels is not None:
        environment["TORCH_EXTENSIONS_DIR"] = str(kernels)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{name}" for name in tests)],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


@contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """Replace a text of a file within the context."""
    sound = file.read_text()
    file.write_text(sound.replace(old, new))
    try:
        yield
    finally:
        file.write_text(sound)


def outcome_of(fault: Fault, copy: Path) -> str | None:
    """Plant the fault in the copy and run its tests; return an error, or None if they fail."""
    with ExitStack() as stack:
        stack.enter_context(changed(copy / fault.file, fault.old, fault.new))
        own = None
        if fault.file.startswith("csrc/"):
            # Kernels with a fault do not go to the cache of the user; those without come from it.
            own, known = Path(stack.enter_context(tempfile.TemporaryDirectory())), cache.folder()
            if known is not None and known.is_dir():
                shutil.copytree(known, own / known.name)
            if fault.file.startswith("csrc/cpu/"):  # compiled twice as fast
                stack.enter_context(changed(copy / "gact_graph/ops/cpu.py", '"-O3"', '"-O0"'))
        code, output = run_tests(copy, fault.tests, own)
    if code == _PASSED:
        return f"no test of {', '.join(fault.tests)} finds it"
    if code is None or code == _FAILED or code < 0:
        return None
    return f"pytest ended with exit code {code}:\n{output[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="faults whose names have one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    options = parser.parse_args()
    words = options.words or [""]
    faults = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    errors = [problem for problem in map(problem_with, faults) if problem is not None]
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        return 1
    missed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy_of_checkout(Path(folder) / str(number)))

        def run(fault: Fault) -> None:
            copy, begun = copies.get(), time.monotonic()
            try:
                error = outcome_of(fault, copy)
            finally:
                copies.put(copy)
            seconds = f"{time.monotonic() - begun:6.1f} s"
            if error is None:
                print(f"found  {seconds}  {fault.name}", flush=True)
            else:
                missed.append(fault)
                print(f"ERROR  {seconds}  {fault.name}: {error}", flush=True)

        list(pool.map(run, faults))  # raises what a thread raised
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found")
    for fault in missed:  # once more, where the end of a log is all that is kept
        print(f"not found: {fault.name} ({fault.file})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
