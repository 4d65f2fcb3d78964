"""Names of slots that are longer than their place."""

from __future__ import annotations

import re

MARK = "…"
"""Stands for what was cut off."""

# A slash is kept, since it shows that modules are missing; a dot would look like an ellipsis. PyG
# joins the parts of a relation with three underscores.
_PARTS = r"/|(?<=\.)\D|(?<=___)[^_]"


def shorten(name: str, width: int) -> str:
    """The name in at most ``width`` characters, cut from the left and where a part of it begins.

    ``convs.1/lin/linear.input`` becomes ``…/lin/linear.input``: the end tells more than the start.
    Where its last part is still too long, that is cut, too.

    Args:
        name: Any.
        width: 1 or more.
    """
    if len(name) <= width:
        return name
    starts = [part.start() for part in re.finditer(_PARTS, name)]
    room = width - len(MARK)
    return MARK + next(
        (name[s:] for s in starts if len(name) - s <= room), name[len(name) - room :]
    )
