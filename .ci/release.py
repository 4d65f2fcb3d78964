"""Tags a release: ``release.py VERSION``. Refuses if anything that a reader relies on is missing.

A page states the commit at which its numbers were measured. If the library has changed since, the
numbers may be those of another behavior, and the release waits until they are measured again.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = ("README.md", "docs")
BEHAVIOR = ("gact_graph", "csrc", ":!gact_graph/__init__.py")  # without the number of the version
ELSEWHERE = Path("docs/gpu.md")
"""Has the numbers of a GPU, with the commits at which one was there to measure them."""

_UNCHANGED = "Numbers: unchanged"

_COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")


def git(*words: str) -> str:
    """Return the output of a git command; raise CalledProcessError if it fails."""
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def obstacles(version: str) -> Iterator[str]:
    """Yield the reasons against a release of a version."""
    if git("status", "--porcelain"):
        yield "Expected a clean working tree (got changes); commit or discard them"
    if git("rev-parse", "--abbrev-ref", "HEAD") != "main":
        yield "Expected the branch main (got another); check it out"
    if git("tag", "--list", f"v{version}"):
        yield f"Expected a version without a tag (got {version}); choose the next one"
    found = re.search(r'^__version__ = "(.+)"', Path("gact_graph/__init__.py").read_text(), re.M)
    if found is None or found[1] != version:
        got = "none" if found is None else found[1]
        yield f"Expected __version__ to be {version} (got {got}); change gact_graph/__init__.py"
    if not re.search(rf"^## \[{re.escape(version)}\]", Path("CHANGELOG.md").read_text(), re.M):
        yield f"Expected a section [{version}] in CHANGELOG.md (got none); write it"
    for page in ("README.md", "CHANGELOG.md"):
        if re.search(rf"{re.escape(version)}\W+unreleased", Path(page).read_text()):
            yield f"Expected no 'unreleased' beside {version} in {page} (got one); write the date"
    for page in pages():
        for commit in sorted({*_COMMIT.findall(page.read_text())}):
            if is_outdated(commit):
                yield (
                    f"Expected numbers of the present library on {page} (got those of commit "
                    f"{commit}); run the commands beside them again"
                )


def pages() -> list[Path]:
    """Return the pages whose numbers a machine without a GPU can measure."""
    paths = map(Path, PAGES)
    found = [p for path in paths for p in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    return [page for page in found if page != ELSEWHERE]


def is_outdated(commit: str) -> bool:
    """Return whether a commit since then changes the library, or the commit is unknown.

    Comments and docstrings of Python may differ; comments in ``csrc`` may not. A commit that
    changes no number, such as a better message or what happens after Ctrl-C, ends its message with
    the line ``Numbers: unchanged``.
    """
    known = ("--invert-grep", f"--grep=^{_UNCHANGED}$")
    try:
        changes = git("rev-list", *known, f"{commit}...HEAD", "--", *BEHAVIOR)
    except subprocess.CalledProcessError:
        return True
    return any(_changes_library(change) for change in changes.split())


def _changes_library(change: str) -> bool:
    before = f"{change}^"
    paths = git("diff", "--no-renames", "--name-only", before, change, "--", *BEHAVIOR)
    return any(_program(before, path) != _program(change, path) for path in paths.split())


def _program(commit: str, path: str) -> str | None:
    """Return a file of a commit without what Python does not run; None if there is none."""
    try:
        text = git("show", f"{commit}:{path}")
    except subprocess.CalledProcessError:
        return None
    if not path.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def main(version: str) -> int:
    found = [*obstacles(version)]
    for reason in found:
        print(reason, file=sys.stderr)
    if not found:
        git("tag", "--annotate", f"v{version}", "--message", f"gact_graph {version}")
        print(f"tagged v{version}: git push origin v{version}")
    return bool(found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Expected a version, as in release.py 0.8.0")
    raise SystemExit(main(sys.argv[1]))
