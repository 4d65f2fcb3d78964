"""Slots, layers and bytes as text."""

from __future__ import annotations

import html
import re

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))

_FACTORS = {
    unit: factor
    for power, prefix in enumerate("kmgt", start=1)
    for unit, factor in ((f"{prefix}b", 1000**power), (f"{prefix}ib", 1024**power))
} | {"b": 1}
"""The bytes of each unit of a text, in lower case."""

# A shortened name starts with a slash, which shows that modules are missing, or after a dot, which
# would look like an ellipsis. PyG joins the parts of a relation with three underscores.
_PARTS = r"/|(?<=\.)\D|(?<=___)[^_]"


def format_bytes(count: int) -> str:
    """Format a number of bytes in the unit that fits; 1 KiB is 1024 bytes."""
    unit, size = unit_for(count)
    digits = {"B": 0, "GiB": 2}.get(unit, 1)
    return f"{count / size:.{digits}f} {unit}"


def format_error(squared: float) -> str:
    """Format a squared error of the gradient, relative to its square, as a share of its length."""
    return f"{100 * squared**0.5:.2g} %" if squared < 1 else "over 100 %"


def unit_for(count: int) -> tuple[str, int]:
    """Return the unit for numbers up to ``count`` bytes, and its size in bytes."""
    return next((unit for unit in _UNITS if count >= unit[1]), _UNITS[-1])


def layer_of(slot: str) -> str:
    """Return the name of the layer that saves a slot; empty for the forward of the model itself.

    The layer is the path of modules up to the first number, as ``convs.1`` or ``encoder/conv2``, or
    the first module of a path without a number.
    """
    path = slot.rpartition("/")[0]
    ends = [part.end() for part in re.finditer(r"[^/.]+", path)]
    numbered = (end for end in ends if path[end - 1].isdigit())
    return path[: next(numbered, ends[0])] if ends else ""


def label_of(layer: str) -> str:
    """Return the displayed name of a layer."""
    return layer or "(model)"


def shorten(name: str, width: int, mark: str = "…") -> str:
    """Cut a name from the left, at the start of one of its parts, to at most ``width`` characters.

    ``convs.1/lin/linear.input`` becomes ``…/lin/linear.input``: the end identifies a slot better
    than the start. A last part that is still too long is cut anywhere. ``mark`` stands for what is
    cut.
    """
    if len(name) <= width:
        return name
    room = width - len(mark)
    starts = [part.start() for part in re.finditer(_PARTS, name)]
    return mark + next(
        (name[s:] for s in starts if len(name) - s <= room), name[len(name) - room :]
    )


def wrap(name: str, width: int = 36) -> str:
    """Escape a name for plotly.js and break it into lines where its parts start.

    Args:
        name: The name.
        width: Characters per line; longer parts are not broken. The default fits a phone.
    """
    lines = [""]
    for part in name.replace("/", "/\n").replace("___", "___\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "<br>".join(map(html.escape, lines))


def counted(number: int, noun: str) -> str:
    """Return a number and a regular noun, as in ``1 block`` and ``2 blocks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_bytes(memory: object) -> int:
    """Return a number of bytes, from a number or from a text such as ``"8 GB"`` or ``"512 MiB"``.

    Raises:
        TypeError: If ``memory`` is neither a number nor a text.
        ValueError: If the number is below 1 or beyond 2^63, or the text has another form.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, float, str)):
        raise TypeError(
            "Expected memory to be a number of bytes or a text such as '8 GB' "
            f"(got {type(memory).__name__})"
        )
    count: float = 0
    if isinstance(memory, (int, float)):
        count = memory
    elif match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", memory):
        count = float(match[1]) * _FACTORS.get(match[2].lower(), 0)
    if not 1 <= count < 1 << 63:
        raise ValueError(
            f"Expected memory as a number of bytes or a text such as '8 GB' (got {memory!r})"
        )
    return int(count)
