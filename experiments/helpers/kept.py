"""Results of a command: a folder of its own, and files from which the command continues."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from experiments.helpers.errors import LockedError, ResultsError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

Place = Sequence["str | int | Mapping[str, Any]"]


class Kept:
    """Numbers in a JSON file, written after each result and read by the next run.

    Args:
        path: The file; None keeps the numbers in memory.
        settings: Settings on which the numbers depend. A file of other settings is refused.
        origin: See :func:`experiments.helpers.origin.origin`. All but the command is a setting.
        derive: Makes further entries from the content, before each writing.

    Raises:
        ResultsError: If the file is of other settings, or cannot be read.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        origin: Mapping[str, Any] | None = None,
        derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: {},
    ) -> None:
        self._path, self._derive = path, derive
        head = jsonable({**settings, **(origin or {})})
        self.content: dict[str, Any] = {} if path is None or not path.exists() else _read(path)
        if self.content:
            fixed = {name: value for name, value in head.items() if name != "command"}
            differing = [*_differing({n: self.content.get(n) for n in fixed}, fixed)]
            if differing:
                raise ResultsError(
                    f"Expected {path} to be of the same settings (got {', '.join(differing)}): "
                    "give another --out, or the settings it was made with"
                )
        # The head first, also if a file is continued.
        self.content = head | {n: v for n, v in self.content.items() if n not in head}

    def once(self, place: Place, find: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result at a place of the content; find it if it is missing.

        A result whose ``reason`` begins with "failed" is not kept: the next run tries again.

        Args:
            place: Keys of dicts; at its end a key, the place in a list (the next one at most), or
                entries by which a dict in a list differs from the others.
            find: Returns the result; in a list of dicts, the further entries of a dict.
            *arguments: Arguments of ``find``.
        """
        here: Any = self.content
        for name, following in itertools.pairwise(place):
            here = here.setdefault(name, {} if isinstance(following, str) else [])
        last = place[-1]
        if isinstance(last, Mapping):
            for row in here:
                if last.items() <= row.items():
                    return row
        elif last in here if isinstance(last, str) else last < len(here):
            return here[last]
        result = jsonable(find(*arguments))
        if isinstance(result, dict) and str(result.get("reason")).startswith("failed"):
            return result
        if isinstance(last, Mapping):
            result = {**last, **result}
        if isinstance(last, str):
            here[last] = result
        else:
            here.append(result)
        self.write()
        return result

    def write(self) -> None:
        """Write all numbers, if there is a file."""
        self.content |= self._derive(self.content)
        if self._path is not None:
            write_json(self._path, self.content)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(
            f"Expected {path} to be a result of this command (got {error}): remove it, or give "
            "another --out"
        ) from None
    return content


def _differing(there: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield the name of each value that differs, and both values."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in sorted(there.keys() | now.keys()):
            below = key if name in ("", "config") else f"{name}.{key}"
            yield from _differing(there.get(key), now.get(key), below)
    elif there != now:
        yield f"{name} {there!r} instead of {now!r}"


def jsonable(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON lacks, and lists for tuples."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all; see :func:`write_atomically`."""
    write_atomically(path, (json.dumps(jsonable(content), indent=1) + "\n").encode())


def write_atomically(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Replace ``path`` by ``content`` in one move: a reader sees the old file or the new one.

    Args:
        path: The file; its folder is created if it is missing.
        content: Its bytes, or a function that writes them.

    Raises:
        ResultsError: If the system refuses, for instance on a full disk; the old file stays.
    """
    # One name for each file: the next write replaces the leftovers of a killed process.
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ResultsError(f"Expected to be able to write {path} (got {error})") from error


@contextmanager
def hold_folder(out: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep other jobs out of a folder, which is created if it is missing.

    The system frees the lock however the process ends.

    Args:
        out: The folder.
        warn: Prints that the file system has no locks; the job continues without a lock.

    Raises:
        LockedError: If another job works there.
        ResultsError: If the folder cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))
        handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"Expected --out to be a folder to read and write (got {error}): give a folder that is "
            "yours, on a disk with room"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise LockedError(
            f"Expected no other job in {out} (got {_holder(out)}): wait until it has ended, or "
            "give another --out"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise ResultsError(f"Expected to be able to lock {out} (got {error})") from error
        warn(f"The file system of {out} has no locks: see to it that no other job writes there.")
    try:
        yield
    finally:
        os.close(handle)


def _holder(folder: Path) -> str:
    """Return the process that has the lock, as Linux lists it."""
    inode = str(folder.stat().st_ino)
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        locks = []
    holders = [words[4] for words in locks if "FLOCK" in words and words[5].endswith(f":{inode}")]
    return f"process {holders[0]}" if holders else "one on another machine"
