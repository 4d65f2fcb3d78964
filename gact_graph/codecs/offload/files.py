"""Files in place of pinned host memory: contexts of a CPU wait for backward on disk."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

_PIECE = 4 << 20
"""Bytes that are copied at once, a multiple of the size of a page: as many are in memory twice."""


class Files:
    """The operations of :class:`~gact_graph.codecs.offload.streams.Streams` for tensors on a CPU.

    Buffers are temporary files without a name, mapped into memory, in the folder of
    :func:`tempfile.gettempdir`, which the environment variable ``TMPDIR`` names. After a copy, the
    pages of the file leave the resident set; the system writes them to disk when it needs their
    memory. Copies are complete when they return, so there is nothing to wait for.
    """

    copies_later = False

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def buffer(self, nbytes: int) -> Tensor:
        with tempfile.TemporaryFile() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk ends the process
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"Expected {nbytes:,} free bytes in {tempfile.gettempdir()} for saved tensors "
                    f"(got {error.strerror}); set TMPDIR to a folder on a larger disk",
                ) from error
            mapped = mmap.mmap(file.fileno(), nbytes)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._maps[memory.untyped_storage().data_ptr()] = mapped
        return memory

    def empty_like(self, host: Tensor, device: torch.device) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=device)

    def current(self, device: torch.device) -> None:
        return None

    def side(self, device: torch.device, name: str) -> None:
        return None

    def record(self, stream: None) -> None:
        return None

    def wait(self, stream: None, event: None) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor, stream: None) -> None:
        new, old = (t.reshape(-1).view(torch.uint8) for t in (target, source))
        for start in range(0, max(1, new.numel()), _PIECE):
            end = start + _PIECE
            new[start:end].copy_(old[start:end])
            for piece in (new[start:end], old[start:end]):
                self._leave(piece)

    def lend(self, tensor: Tensor, stream: None) -> None:
        pass

    def _leave(self, piece: Tensor) -> None:
        """Take the pages of a part of a file out of the resident set."""
        mapped = self._maps.get(piece.untyped_storage().data_ptr())
        if mapped is not None and piece.numel():
            offset = int(piece.storage_offset())
            first = offset - offset % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, offset + piece.numel() - first)

    def __reduce__(self) -> tuple[type[Files], tuple[()]]:
        """Give a copy, pickled or deep-copied with its model, new files."""
        return Files, ()
