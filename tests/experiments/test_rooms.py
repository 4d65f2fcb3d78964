"""Imports among the modules of the experiments run one way."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(path: Path) -> set[str]:
    """The modules of the experiments that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                is_module = (ROOT / below.replace(".", "/")).with_suffix(".py").exists()
                found.add(below if is_module else str(node.module))
    return found


def test_no_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): imported(path)
        for path in (ROOT / "experiments").rglob("*.py")
    }
    assert "experiments.helpers.comparison" in modules["experiments.peers"]
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError


def test_helpers_start_no_command() -> None:
    """But tables: a page shows what a command prints."""
    for path in (ROOT / "experiments" / "helpers").rglob("*.py"):
        commands = {name for name in imported(path) if name.count(".") == 1}
        assert not commands or path.name.endswith("_tables.py"), path
