"""The rooms of the library: which there are, what is in them, and that imports run one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gact_graph

PACKAGE = Path(gact_graph.__file__).resolve().parent

# Each room may import those before it.
ROOMS = ("support", "ops", "codecs", "layers", "capture", "adaptive", "api")


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from, wherever in the file it does so."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            rooms.add("a relative import")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("gact_graph.")}
    return rooms


def test_there_are_at_most_ten_entries() -> None:
    others = {"__pycache__", "csrc", "py.typed"}  # the last says that there are annotations
    entries = {path.name for path in PACKAGE.iterdir()} - others
    assert entries == {"__init__.py", "info.py", "lightning.py", *ROOMS}
    assert len(entries) <= 10


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported(path) <= allowed, path


def test_recomputing_knows_nothing_of_blocks() -> None:
    for path in (PACKAGE / "layers" / "recompute").rglob("*.py"):
        assert "gact_graph.layers.blocks" not in path.read_text(), path


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there_and_what_does_not(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring is not None and "Not here:" in docstring


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    if not (PACKAGE.parent / "pyproject.toml").exists():
        pytest.skip("not a source tree")
    folders = (".ci", "datasets", "examples", "experiments", "gact_graph", "tests")
    files = [path for name in folders for path in (PACKAGE.parent / name).rglob("*.py")]
    assert len(files) > 400
    silent = [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_the_wheel_lists_every_folder() -> None:
    project = PACKAGE.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a source tree")
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    for name in (".".join(folder.parts) for folder in folders):
        assert f'"{name}",' in project.read_text(), name
