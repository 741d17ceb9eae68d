"""Frees the memory of tensors while another process needs the device, and gives it back; their addresses stay valid.

    release   the contents are lost: weights that a mirror holds, caches that are computed again
    park      the contents go to pinned memory of the host (of a GPU's tensors) or to a file (of the host's), and come back

Views, gradients' owners and sharded tensors keep their storages: of a GPU's storage the memory is freed and allocated
again, of the host's the pages are given to the kernel, which maps new ones when they are written. Pages that a storage
shares with its neighbours stay.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_MADV_DONTNEED = 4
_LIBC = ctypes.CDLL(None, use_errno=True)


class Released:
    """Storages without memory, and without contents, until ``restore``."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = _storages(tensors)
        for storage in self._storages:
            _free(storage.storage)
        _return_to_device(self._storages)

    def restore(self) -> None:
        """Give the storages their memory; its contents are undefined."""
        for storage in self._storages:
            storage.allocate()


class Parked:
    """Storages whose contents are elsewhere until ``restore``; ``directory`` takes the file of those of the host."""

    def __init__(self, tensors: Iterable[torch.Tensor], directory: Path) -> None:
        """Raises ``OSError``: the file cannot be written; then nothing is freed."""
        self._storages = _storages(tensors)
        self._file = tempfile.TemporaryFile(dir=directory, prefix=".parked-", buffering=0)  # noqa: SIM115 (until restored)
        weakref.finalize(self, self._file.close)  # of a process that leaves without its turn, too
        self._on_host: list[torch.Tensor] = []  # of each storage of a GPU, in order
        for storage in self._storages:
            if storage.is_host:
                left = storage.memory()
                while left:
                    left = left[self._file.write(left) :]
            else:
                copy = torch.empty(storage.size, dtype=torch.uint8, pin_memory=True)
                self._on_host.append(copy.copy_(storage.bytes(), non_blocking=True))
        self._synchronize()
        for storage in self._storages:
            _free(storage.storage)
        _return_to_device(self._storages)

    def restore(self) -> None:
        """Bring the contents back. Raises ``OSError``: the file cannot be read."""
        on_host = iter(self._on_host)
        self._file.seek(0)
        for storage in self._storages:
            storage.allocate()
            if storage.is_host:
                left = storage.memory()
                while left:
                    if not (count := self._file.readinto(left)):
                        raise OSError("the file of parked tensors is shorter than they are")
                    left = left[count:]
            else:
                storage.bytes().copy_(next(on_host), non_blocking=True)
        self._synchronize()
        self._on_host.clear()
        self._file.close()

    def _synchronize(self) -> None:
        for device in {storage.storage.device for storage in self._storages if not storage.is_host}:
            torch.cuda.synchronize(device)


class _Storage:
    """A storage and its full size."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.size: int = storage.nbytes()
        self.is_host = storage.device.type == "cpu"

    def allocate(self) -> None:
        if not self.is_host:
            self.storage.resize_(self.size)

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def memory(self) -> memoryview:
        """The bytes of a storage of the host, in place."""
        return memoryview((ctypes.c_char * self.size).from_address(self.storage.data_ptr())).cast("B")


def return_freed_memory() -> None:
    """Give memory that was freed, and kept for the next allocation, back to the kernel and to the GPU."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _storages(tensors: Iterable[torch.Tensor]) -> list[_Storage]:
    """The storages behind the tensors, each once; of a sharded tensor that of its shard."""
    found: dict[tuple[str, int], _Storage] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.nbytes():
            found.setdefault((str(storage.device), storage.data_ptr()), _Storage(storage))
    return list(found.values())


def _free(storage: Any) -> None:
    if storage.device.type != "cpu":
        storage.resize_(0)
        return
    if not sys.platform.startswith("linux"):
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin and _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) of parked memory failed")


def _return_to_device(storages: list[_Storage]) -> None:
    if any(not storage.is_host for storage in storages):
        torch.cuda.empty_cache()
