"""The tables of README.md and of the pages in docs/, filled in from the files in results/.

``python -m experiments.tables`` fills in the text between ``<!-- table: NAME -->`` and
``<!-- end -->``, and draws the pictures of :mod:`experiments.helpers.pictures`.
``python -m experiments.tables --check`` writes nothing, and fails if a page differs. Both fail if
the numbers of one table stem from several commits and its rows do not name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.helpers import command, pictures, result_tables
from experiments.helpers.errors import ResultsError

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
        result_tables.check_commits(name, table)
        return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end -->"

    return _MARKED.sub(filled, text)


def wanted(root: Path) -> dict[Path, str]:
    """Return the text that every page and picture should have, by path."""
    tables = result_tables.tables(root / "results")
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {
        page: fill(page.read_text(encoding="utf-8"), tables, str(page.relative_to(root)))
        for page in pages
    }
    return texts | pictures.pictures(root)


@command.main(command.switch("--check", "fail where a page differs"))
def main(args: command.Args) -> None:
    differing = {
        path: text
        for path, text in wanted(ROOT).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if args.check and differing:
        names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
        raise ResultsError(
            f"Expected the pages to show the numbers of results/ (got other tables in {names}); "
            "run python -m experiments.tables"
        )
    for path, text in differing.items():
        path.write_text(text, encoding="utf-8")
        args.say(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    raise SystemExit(main())
