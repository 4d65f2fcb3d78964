"""The cache of compiled kernels on disk.

The name of a file holds a hash of everything that it was compiled from and a hash of its content.
So a file that a crash or a full disk truncated is never loaded, and a single rename creates a file
together with its checksum. A library is code that runs in the user's process, so a file is used
only if it belongs to this user (or to root) and nobody else may write to it or to its folder.
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

from gact_graph.ops.kernels import notices

BUILD = "build-"
"""The prefix of temporary files and folders of builds."""

# Seconds after which the process of a temporary folder must be dead: no build takes as long.
_STALE = 3600.0


def folder() -> Path | None:
    """Return the folder ``gact_graph`` in ``TORCH_EXTENSIONS_DIR`` or in the user's cache.

    The folder need not exist. A variable that is empty or not an absolute path is ignored: a
    relative one would load a library from the current directory. None without a home directory.
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
    """Return the intact file of a name, or None; remove damaged ones.

    Args:
        name: The name that was passed to :func:`keep`, with a suffix.
    """
    root = folder()
    if root is None or not _is_ours(root):
        return None
    _sweep(root)
    stem, suffix = os.path.splitext(name)
    for path in sorted(root.glob(f"{stem}-*{suffix}")):
        content = _read(path)
        if content is not None and path.name == _full_name(name, content):
            return path
        discard(path)
    return None


def keep(name: str, content: bytes, *, quiet: bool = False) -> Path | None:
    """Write a file and return its path, or None with one warning on failure.

    Args:
        name: A name with a suffix, which must identify everything that the content depends on.
        content: The content, which a later :func:`find` of the same name returns.
        quiet: Whether to omit the warning.
    """
    root = folder()
    try:
        if root is None:
            raise OSError("there is no home directory")
        _make(root)
        return _write(root / _full_name(name, content), content)
    except OSError as error:
        if not quiet:
            notices.warn_of_no_cache(root, error)
        return None


def discard(path: Path) -> None:
    """Remove a file, if possible."""
    with contextlib.suppress(OSError):
        path.unlink()


def place_to_build() -> Path | None:
    """Return a folder for temporary folders of builds, or None for the system's default."""
    root = folder()
    try:
        if root is None:
            return None
        _make(root)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError:
        return None


def _full_name(name: str, content: bytes) -> str:
    stem, suffix = os.path.splitext(name)
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"


def _make(root: Path) -> None:
    """Create the folder; raise OSError if it belongs to another user."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o755)
    if not _is_ours(root):
        raise PermissionError(f"{root} belongs to another user, or others may write to it")


def _is_ours(root: Path) -> bool:
    """Return whether a folder belongs to this user or root and others cannot write to it.

    If this user's umask left it writable to others, that permission is removed.
    """
    try:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or not _is_trusted_owner(status):
            return False
        if _is_open(status):
            root.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
    except OSError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    """Return the content of a file that only this user or root could have written, or None."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if (
                not stat.S_ISREG(status.st_mode)
                or not _is_trusted_owner(status)
                or _is_open(status)
            ):
                return None
            return file.read()
    except OSError:
        return None


def _is_trusted_owner(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _is_open(status: os.stat_result) -> bool:
    return os.name == "posix" and bool(status.st_mode & 0o022)


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


def _sweep(root: Path) -> None:
    """Remove the temporary files and folders of builds that were killed."""
    for path in root.glob(f"{BUILD}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
