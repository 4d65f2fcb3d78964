"""The folders in which PyG and OGB keep data sets: without partial files, and without lost ones."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets.errors import DatasetError, first_line
from datasets.graph import Graph

NETWORK_TIMEOUT = 30.0  # seconds without an answer


def load_cached(
    name: str, home: Path, raw: Sequence[str], processed: str, read: Callable[[Path], Graph]
) -> Graph:
    r"""Load a data set through a PyG class that downloads and processes by itself.

    If both steps are done, the class reads its folder in place. Otherwise it works in a temporary
    folder, whose files move to the cache after the graph has been read: an error, Ctrl-C or a full
    disk leaves the cache unchanged. Existing files are never overwritten or removed.

    Args:
        name (str): Name of the data set, for messages.
        home (Path): The folder of this data set.
        raw (Sequence[str]): Every file below :obj:`home` that reading needs.
        processed (str): The file below :obj:`home` that the class makes from the raw files.
        read (callable): Builds the class in a given folder, and a graph from it.

    Raises:
        DatasetError: If files are missing and cannot be downloaded, or cannot be read.
    """
    missing = [file for file in raw if not (home / file).is_file()]
    done = not missing and (home / processed).is_file()
    try:
        with _well_behaved():
            return read(home) if done else _read_staged(home, bool(missing), read)
    # OGB calls exit() if the user declines a download.
    except (Exception, SystemExit) as error:
        got = first_line(error)
        instead = f"use FILE.npz, 'synthetic:{name}' or the bundled 'digits'"
        if missing:
            line = (
                f"Expected the files of {name} in {home} (got no {', '.join(missing)}), and "
                f"downloading failed ({got}); put them there, or {instead}"
            )
        elif done:
            line = (
                f"Expected a readable cache of {name} (got {got}); delete {home / processed} "
                f"to have it made again, or {instead}"
            )
        else:
            line = (
                f"Expected whole raw files of {name} in {home} (got {got}); replace them, "
                f"or {instead}"
            )
        raise DatasetError(line) from error


def _read_staged(home: Path, download: bool, read: Callable[[Path], Graph]) -> Graph:
    # On the disk of `home`, which may be a link, so that each move is a rename; not inside `home`,
    # which may not exist.
    anchor = next(folder for folder in home.resolve().parents if folder.is_dir())
    with TemporaryDirectory(prefix=f".partial-{home.name}-", dir=anchor) as stage:
        staged_home = Path(stage) / home.name
        if not download:
            _link(home, staged_home)
        graph = read(staged_home)
        _adopt(staged_home, home)
        return graph


def _link(home: Path, staged_home: Path) -> None:
    staged_home.mkdir()
    for entry in home.iterdir():
        # The class writes into this folder, so the stage needs one of its own.
        if entry.name != "processed":
            (staged_home / entry.name).symlink_to(entry.resolve())


def _adopt(staged_home: Path, home: Path) -> None:
    for folder, _, files in os.walk(staged_home):
        for file in files:
            made = Path(folder) / file
            target = home / made.relative_to(staged_home)
            if not made.is_symlink() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                made.replace(target)


@contextmanager
def _well_behaved() -> Iterator[None]:
    """Limit waits for the network, redirect standard output, and refuse unsafe pickles."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            # Warnings about the libraries' code must not stop a run under -W error. One becomes an
            # error: PyG warns with these words before it loads a refused file without
            # weights_only, and the error prevents that.
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Weights only load failed")
            yield
    finally:
        socket.setdefaulttimeout(timeout)
