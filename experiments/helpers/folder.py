"""A folder of results: one job at a time works in it, on a disk that takes what it writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from experiments.helpers.atomic import probe, remove_leftovers
from experiments.helpers.errors import LockedError, ResultsError

LOCK_NAME = ".lock"
_PROBE_BYTES = 1 << 20  # more than a seed leaves behind
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def check_folder(out: Path) -> None:
    """Make the folder, and see that the disk takes a file there.

    Raises:
        ResultsError: If it does not.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe(out, _PROBE_BYTES)
    except OSError as error:
        raise ResultsError(
            f"Expected --out to be a folder to read and write (got {error}): give one that "
            "is yours, on a disk with room"
        ) from error


@contextmanager
def hold_folder(out: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep other jobs out of the folder while inside; it is made and checked first.

    The lock belongs to the process, so the system frees it however the process ends.

    Args:
        out: The folder.
        warn: Tells the user that the file system has no locks; the job goes on without.

    Raises:
        LockedError: If another job works there. The message tells which.
        ResultsError: If the folder cannot be used.
    """
    check_folder(out)
    handle = _lock(out / LOCK_NAME, warn)
    try:
        # Of jobs that were killed while they wrote.
        remove_leftovers(out)
        yield
    finally:
        if handle is not None:
            # Before it is free: afterwards it might be someone else's.
            (out / LOCK_NAME).unlink(missing_ok=True)
            os.close(handle)


def _lock(path: Path, warn: Callable[[str], None]) -> int | None:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ResultsError(f"Expected to be able to lock {path} (got {error})") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file between the two calls.
            if _is_at(handle, path):
                os.ftruncate(handle, 0)
                os.write(handle, _describe_this_process())
                return handle
        except BlockingIOError:
            holder = _describe_holder(handle)
            os.close(handle)
            raise LockedError(
                f"Expected no other job in {path.parent} (got {holder}): wait until it has ended, "
                "or give another --out"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise ResultsError(f"Expected to be able to lock {path} (got {error})") from error
            path.unlink(missing_ok=True)
            warn(
                f"The file system of {path.parent} has no locks: see to it that no other job "
                "writes there, or seeds get lost."
            )
            return None
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _describe_this_process() -> bytes:
    started = datetime.now().astimezone().isoformat(" ", "seconds")
    return json.dumps(
        {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    ).encode()


def _describe_holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "one that has not told its name yet"
