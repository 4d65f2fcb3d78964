"""Names in the labels of plotly.js, which reads a part of HTML in them."""

from __future__ import annotations

import html

_LINE = 36  # characters that fit on a line of a telephone


def escape(name: str) -> str:
    """The name as it is to be read."""
    return html.escape(name)


def wrapped(name: str, width: int = _LINE) -> str:
    """The name, escaped, on lines that begin where a part of it begins.

    Args:
        name: Any.
        width: Characters of a line; a part that is longer is not broken.
    """
    lines = [""]
    for part in name.replace("/", "/\n").replace("___", "___\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "<br>".join(map(escape, lines))
