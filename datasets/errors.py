"""The error that loaders raise."""

from __future__ import annotations

_LONGEST = 200


class DatasetError(ValueError):
    """A graph that cannot be loaded: unknown name, missing file, or content that breaks the schema.

    The message is a single line with the expected value, the actual one and a remedy, which a
    command line may print unchanged.
    """


def first_line(error: BaseException) -> str:
    """Return the kind of :obj:`error` and the first line of its message, cut if it is long."""
    text = str(error).strip().partition("\n")[0]
    # Some errors quote whole pieces of a broken file.
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    # The kind DatasetError adds nothing to the message.
    if isinstance(error, DatasetError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
