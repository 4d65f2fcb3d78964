"""The error that loaders raise."""

from __future__ import annotations

_LONGEST = 200


class DatasetError(ValueError):
    """A graph that cannot be loaded: unknown name, missing file, or content that breaks the schema.

    The message is a single line with the expected value, the actual one and the way out, which a
    command line may print unchanged.
    """


def first_line(error: BaseException) -> str:
    """Return the kind of :obj:`error` and the first line of its message, cut where it is long."""
    text = str(error).strip().partition("\n")[0]
    # Of a broken file some quote whole pieces.
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    # The kind of our own error says nothing that its words do not.
    if isinstance(error, DatasetError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
