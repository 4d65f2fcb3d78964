"""Files in place of pinned host memory: contexts of a CPU wait for backward on disk."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from gact_graph.codecs.offload.streams import Streams


class Files(Streams):
    """The operations of :class:`~gact_graph.codecs.offload.streams.Streams` for tensors on a CPU.

    Buffers are temporary files without a name, in the folder of :func:`tempfile.gettempdir`, which
    the environment variable ``TMPDIR`` names. A mapping of no file gives each an address, as a
    tensor; bytes are written to the file and read from it, so that no page of the mapping becomes
    resident, or takes a page fault. Copies are complete when they return, so there is nothing to
    wait for.
    """

    copies_later = False

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # descriptors, by the addresses of buffers

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def buffer(self, nbytes: int) -> Tensor:
        mapped = mmap.mmap(-1, nbytes)
        try:
            with tempfile.TemporaryFile() as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk ends the process
                descriptor = os.dup(file.fileno())
        except OSError as error:
            cure = "set TMPDIR to a folder on a larger disk"
            if error.errno == errno.EMFILE:
                cure = f"{len(self._files):,} of them have one: raise the limit, as with ulimit -n"
            raise OSError(
                error.errno,
                f"Expected a file of {nbytes:,} bytes in {tempfile.gettempdir()} for a saved "
                f"tensor (got {error.strerror}); {cure}",
            ) from error
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        address = memory.untyped_storage().data_ptr()
        self._files[address] = descriptor
        weakref.finalize(mapped, _close, self._files, address)
        return memory

    def copy(self, target: Tensor, source: Tensor, stream: None) -> None:
        if target.untyped_storage().data_ptr() in self._files:
            self._transfer(target, source, os.pwrite)
        else:
            self._transfer(source, target, lambda file, piece, at: os.preadv(file, [piece], at))

    def _transfer(
        self, buffer: Tensor, tensor: Tensor, move: Callable[[int, memoryview, int], int]
    ) -> None:
        """Move the bytes of a tensor between memory and the file of a buffer."""
        file = self._files[buffer.untyped_storage().data_ptr()]
        start = int(buffer.storage_offset()) * buffer.element_size()
        rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while rest:  # the system moves less than 2 GiB at once
            moved = move(file, rest, start)
            rest, start = rest[moved:], start + moved

    def __reduce__(self) -> tuple[type[Files], tuple[()]]:
        """Give a copy, pickled or deep-copied with its model, new files."""
        return Files, ()


def _close(files: dict[int, int], address: int) -> None:
    os.close(files.pop(address))
