"""Reading of the arrays of an `.npz` file, with all headers checked first.

numpy's reader reserves the memory that a header declares, and returns the bytes of a member
without a header. Files may come from any source, so this reader checks the names, the dtypes and
the declared sizes of all arrays first, and the checksums last. Nothing is unpickled.
"""

from __future__ import annotations

import math
import stat
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy

from datasets.errors import DatasetError, first_line
from datasets.memory import check_fits

Arrays = dict[str, np.ndarray]
_WIDEST = 8  # bytes of an element once it is a tensor: int64


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_arrays(path: Path, keys: Collection[str]) -> Arrays:
    """Read those of the arrays that are in the file; other members are ignored.

    Args:
        path (Path): The file.
        keys (Collection[str]): Names of arrays.

    Raises:
        DatasetError: If the file is missing, is no complete archive or does not fit in memory, or
            if one of these arrays is broken or holds Python objects.
    """
    file = _open(path)
    with file, _archive(file) as archive:
        members = _members(archive, keys)
        headers = {key: _header(archive, key, member) for key, member in members.items()}
        needed = sum((h.dtype.itemsize + _WIDEST) * h.numel for h in headers.values())
        check_fits("its arrays", needed, "take a smaller graph")
        return {key: _array(archive, key, member) for key, member in members.items()}


def _open(path: Path) -> BinaryIO:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return path.open("rb")
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"Expected an .npz file there (got {first_line(error)}); check the path"
        ) from error
    # Opening a pipe would wait for a writer.
    raise DatasetError("Expected an .npz file there (got a pipe or a device); check the path")


# Damaged bytes raise errors of zipfile, zlib, numpy or Python's tokenizer. There is no complete
# list of them, so the functions below catch Exception.
def _archive(file: BinaryIO) -> ZipFile:
    try:
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise DatasetError("a single array")
        return ZipFile(file)
    except Exception as error:
        raise DatasetError(
            f"Expected a readable .npz file of named arrays (got {first_line(error)}); "
            "write it with numpy.savez"
        ) from error


def _members(archive: ZipFile, keys: Collection[str]) -> dict[str, ZipInfo]:
    names = Counter(member.filename for member in archive.infolist())
    twice = next((key for key in keys if names[f"{key}.npy"] > 1), None)
    if twice is not None:
        raise DatasetError(f"Expected one array {twice} (got {names[f'{twice}.npy']} of that name)")
    return {key: archive.getinfo(f"{key}.npy") for key in keys if f"{key}.npy" in names}


def _header(archive: ZipFile, key: str, member: ZipInfo) -> _Header:
    try:
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise DatasetError("a compression that numpy does not write")
        with archive.open(member) as file:
            header = _read_header(file)
            declared = file.tell() + header.numel * header.dtype.itemsize
    except Exception as error:
        raise _broken(key, first_line(error)) from error
    if header.dtype.hasobject:
        raise _broken(key, "Python objects, which only unpickling could read")
    if declared != member.file_size:
        raise _broken(key, f"{member.file_size} bytes where its header declares {declared}")
    return header


def _read_header(file: IO[bytes]) -> _Header:
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise DatasetError(f"an npy header of version {version[0]}.{version[1]}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a header that numpy can only guess at
        shape, _, dtype = read(file)
    if min(shape, default=0) < 0:
        raise DatasetError(f"the shape {list(shape)}")
    return _Header(shape, dtype)


def _array(archive: ZipFile, key: str, member: ZipInfo) -> np.ndarray:
    try:
        with archive.open(member) as file:
            array = npy.read_array(file, allow_pickle=False)
            file.read()  # zipfile compares the checksum at the end of the member
            return array
    except Exception as error:
        raise _broken(key, first_line(error)) from error


def _broken(key: str, got: str) -> DatasetError:
    return DatasetError(
        f"Expected a plain, whole array in {key} (got {got}); write the file with numpy.savez"
    )
