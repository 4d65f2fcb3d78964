"""Compiled kernels on disk, between processes.

A file is named by a hash of all that it was compiled from and by a hash of its content. So what a
crash or a full disk cut short is never loaded, and one rename puts a file in place together with
what it is checked by. A library is code that runs in the user's process, so a file counts only if
it belongs to this user (or to root) and nobody else may write to it or to its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from gact_graph.ops.kernels import fallback

BUILD = "build-"
"""How folders and files begin that a process works in while it compiles."""

# Seconds after which such a folder is that of a process that was killed: no build takes as long.
_STALE = 3600.0


def folder() -> Path | None:
    """``gact_graph`` in ``TORCH_EXTENSIONS_DIR``, or else in the user's cache; None without a home.

    It need not exist yet. A variable that is empty or no absolute path does not count: a library
    would be loaded from wherever the process happens to run.
    """
    roots = (
        os.environ.get("TORCH_EXTENSIONS_DIR"),
        os.environ.get("XDG_CACHE_HOME"),
        "~/.cache" if os.environ.get("HOME") != "" else None,
    )
    for root in roots:
        path = os.path.expanduser(root or "")
        if os.path.isabs(path):
            return Path(path) / "gact_graph"
    return None


def find(name: str) -> Path | None:
    """The file of this name whose content is what its writer wrote; others of it are removed.

    Args:
        name: With a suffix, as of :func:`keep`.
    """
    place = folder()
    if place is None or not _is_ours(place):
        return None
    _sweep(place)
    stem, suffix = os.path.splitext(name)
    for path in sorted(place.glob(f"{stem}-*{suffix}")):
        content = _read(path)
        if content is not None and path.name == _full_name(name, content):
            return path
        discard(path)
    return None


def keep(name: str, content: bytes) -> Path | None:
    """Writes a file; returns where it is, or None with one warning where that cannot be done.

    Args:
        name: With a suffix. It must tell all that the content was made from.
        content: What a later :func:`find` of the same name leads to.
    """
    place = folder()
    try:
        if place is None:
            raise OSError("there is no home directory")
        _make(place)
        return _write(place / _full_name(name, content), content)
    except OSError as error:
        fallback.warn_of_no_cache(place, error)
        return None


def discard(path: Path) -> None:
    """Removes a file that is of no use, where that can be done."""
    with contextlib.suppress(OSError):
        path.unlink()


def place_to_build() -> Path | None:
    """A folder for temporary ones in which to compile; None where the system's own must serve."""
    place = folder()
    try:
        if place is None:
            return None
        _make(place)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError:
        return None


def _full_name(name: str, content: bytes) -> str:
    stem, suffix = os.path.splitext(name)
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"


def _make(place: Path) -> None:
    """Makes the folder, or raises OSError if it is somebody else's."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o755)
    if not _is_ours(place):
        raise PermissionError(f"{place} belongs to another user, or others may write to it")


def _is_ours(place: Path) -> bool:
    """Whether it is a folder that this user or root has, and that others cannot write to.

    An open one of this user's, made with a lax umask, is closed.
    """
    try:
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_trusted_owner(found):
            return False
        if _is_open(found):
            place.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    except OSError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    """The content of a file that this user or root alone could have written."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not _is_trusted_owner(found) or _is_open(found):
                return None
            return file.read()
    except OSError:
        return None


def _is_trusted_owner(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid in (0, os.geteuid())


def _is_open(found: os.stat_result) -> bool:
    return os.name == "posix" and bool(found.st_mode & 0o022)


def _write(path: Path, content: bytes) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=BUILD)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except BaseException:
        discard(Path(temporary))
        raise
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    return path


def _sweep(place: Path) -> None:
    """Removes what builds that were killed left behind."""
    for path in place.glob(f"{BUILD}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
