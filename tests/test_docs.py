"""The pages are right: their code runs, their commands exist, and no message is missing."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What a reader has: data, and a model that is not wrapped yet.
READERS = """
import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT
import gact_graph

torch.manual_seed(0)
x, edge_index = torch.randn(500, 16), torch.randint(500, (2, 2000))
y = torch.randint(7, (500,))
model = GAT(16, 16, num_layers=2, out_channels=7, heads=2)
"""

RUN = """
import pathlib, re, sys
for page in map(pathlib.Path, sys.argv[2:]):
    code = re.findall(r"^```python\\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    if code:
        exec(compile(sys.argv[1] + "".join(code), page.name, "exec"), {"__name__": page.name})
        print("ran", page.name)
"""


def text_of(page: Path) -> str:
    """The text in one line, without the marks of quotations and Markdown's escapes."""
    text = re.sub(r"^> ?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return " ".join(text.replace("\\*", "*").split())


def test_the_code_on_the_pages_runs(tmp_path: Path) -> None:
    printed = fresh.run(f"import os; os.chdir({str(tmp_path)!r})" + RUN, READERS, *map(str, PAGES))
    assert {"ran README.md", "ran getting-started.md", "ran codecs.md"} <= {*printed.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_on_the_pages_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:experiments|gact_graph)\.\w+)", text_of(page)):
        assert importlib.util.find_spec(module) is not None, module


def messages() -> Iterator[tuple[str, str]]:
    """Where the library says something to a user, and the longest part of it that never varies."""
    for path in sorted((ROOT / "gact_graph").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            warns = name in ("warn", "warn_user", "_complain", "_fail")
            raises = isinstance(node, ast.Raise) and name not in (
                "AssertionError",
                "PermissionError",
            )
            if warns or raises:
                part = max(_literals(call.args[0]), key=len, default="")
                if len(part) > 12:  # else it hands on what was said elsewhere
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", part


def _literals(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield " ".join(str(node.value).split())
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _literals(value)
    elif isinstance(node, ast.BinOp):
        yield from _literals(node.left)
        yield from _literals(node.right)


def test_every_message_has_its_cause_and_cure_on_the_page() -> None:
    page = text_of(ROOT / "docs" / "troubleshooting.md")
    parts = dict(messages())
    assert len(parts) > 80
    missing = [f"{place}: {part}" for place, part in parts.items() if part not in page]
    assert not missing, "Expected docs/troubleshooting.md to quote\n" + "\n".join(missing)


def test_every_message_on_the_page_exists() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:message|the layer …) \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()[1:]]
    parts = [part.strip(" |") for cell in cells for part in re.split("[…,;.:()'`]", cell)]
    parts = [part.removeprefix("got ") for part in parts if len(part) > 30]  # else it may vary
    assert len(parts) > 80
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "gact_graph").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    said = [part for node in nodes if isinstance(node, ast.expr) for part in _literals(node)]
    missing = [part for part in parts if not any(part in text for text in said)]
    assert not missing, "Expected gact_graph to say\n" + "\n".join(missing)


def test_every_row_of_the_compatibility_page_names_a_test() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| test |" not in line]
    assert len(rows) > 20
    for row in rows:
        file, _, inside = row.rsplit("`", 2)[1].rpartition(".py::")
        (path,) = (ROOT / "tests").rglob(f"{file or 'test_compatibility'}.py")
        scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
        for name in inside.split("::"):
            definitions = [n for n in scope if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
            (scope,) = (node.body for node in definitions if node.name == name)
