"""The tables of README.md and of the pages in docs/, filled in from the files in results/.

``python -m experiments.tables`` writes what belongs between ``<!-- table: NAME -->`` and
``<!-- end -->``, and draws the pictures of :mod:`experiments.helpers.pictures`.
``python -m experiments.tables --check`` writes nothing, and fails where a page differs. Both fail
where the numbers of one table stem from several commits and its rows do not name them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.helpers import pictures, result_tables
from experiments.helpers.command import exit_code
from experiments.helpers.errors import ResultsError
from experiments.helpers.table_sources import check_commits

ROOT = Path(__file__).resolve().parent.parent

_MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(text: str, tables: Mapping[str, Callable[[], str]], page: str) -> str:
    """Return the page's text with every marked table in place.

    Raises:
        ResultsError: If the text names a table that does not exist, or one whose numbers stem from
            several commits and whose rows do not name them.
    """

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ResultsError(
                f"Expected the tables of {page} to be among {', '.join(tables)} (got {name!r})"
            )
        table = tables[name]()
        check_commits(name, table)
        return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end -->"

    return _MARKED.sub(filled, text)


def wanted(root: Path) -> dict[Path, str]:
    """Return the text that every page and picture should have, by path."""
    tables = result_tables.tables(root / "results")
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = {
        page: fill(page.read_text(encoding="utf-8"), tables, str(page.relative_to(root)))
        for page in pages
    }
    return found | pictures.pictures(root)


def main(argv: list[str] | None = None) -> int:
    """Fill in or check all pages; return the exit code as the main job does."""
    return exit_code("tables", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a page differs")
    args = parser.parse_args(argv)
    differing = [
        path
        for path, text in wanted(ROOT).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if args.check and differing:
        names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
        raise ResultsError(
            f"Expected the pages to show what results/ holds (got other tables in {names}); "
            "run python -m experiments.tables"
        )
    for path in differing:
        path.write_text(wanted(ROOT)[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
