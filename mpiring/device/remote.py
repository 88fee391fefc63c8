"""The host's memory, that of other processes of this machine included.

The kernel copies from the memory of another process into this one's (process_vm_readv(2),
Linux): one pass, whatever lies there, and nobody has to prepare anything. It may be
forbidden: by the system's setting for debuggers, by a container, for another user's process.
And there is memory that it does not copy, such as what a driver has mapped. So whoever reads
is prepared for ``Unread``.

An array of another process is a ``Remote``: the process, and an address in it. It is sent as
a handle, which names the process, and a place, which is the address.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice, HostTask, address_of
from mpiring.errors import TransportError, Unread
from mpiring.task import Task

_HANDLE = struct.Struct("<q")

#: Bytes worked on at once: with what is added to them they fit into a core's own cache.
BLOCK = 256 << 10

#: Bytes for one call: the kernel moves at most 2 GiB.
_LIMIT = 1 << 30

#: prctl(2): who may read this process where debuggers may attach to their children only (Yama).
_PR_SET_PTRACER = 0x59616D61


class _Extent(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@dataclass(frozen=True, slots=True)
class Remote:
    """``size`` elements at an address of process ``pid``."""

    pid: int
    address: int
    size: int
    dtype: np.dtype

    @classmethod
    def of(cls, array: np.ndarray) -> Remote:
        """Where others find an array of this process."""
        return cls(os.getpid(), address_of(array), array.size, array.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def part(self, start: int, stop: int) -> Remote:
        """The elements from ``start`` to ``stop``."""
        address = self.address + start * self.dtype.itemsize
        return replace(self, address=address, size=stop - start)


def reading(src: Remote, dst: np.ndarray) -> Callable[[], None]:
    """The call that reads ``src`` into ``dst``. It raises Unread, having written to ``dst``."""
    into, pieces = address_of(dst), []
    for at in range(0, src.nbytes, _LIMIT):
        length = min(_LIMIT, src.nbytes - at)
        here, there = _Extent(into + at, length), _Extent(src.address + at, length)
        pieces.append((ctypes.pointer(here), ctypes.pointer(there), length))
    pid = src.pid

    def read() -> None:
        for here, there, length in pieces:
            got = _readv(pid, here, 1, there, 1, 0)
            if got != length:
                number = ctypes.get_errno() if got < 0 else errno.EFAULT
                # Of a process that is gone nothing will come as a message either.
                kind = TransportError if number == errno.ESRCH else Unread
                raise kind(f"memory of process {pid} cannot be read: {os.strerror(number)}")

    return read


class RemoteHostDevice(HostDevice):
    """NumPy arrays, and arrays of other processes to copy and to reduce from.

    It has one block of working memory: its tasks are to be started one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._landing = self.empty(BLOCK, np.uint8)

    def export(self, array: np.ndarray) -> tuple[bytes, int] | None:
        return _HANDLE.pack(os.getpid()), address_of(array)

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Remote:
        (pid,) = _HANDLE.unpack_from(handle)
        return Remote(pid, start, count, np.dtype(dtype))

    def copy(self, src: Any, dst: np.ndarray) -> Task:
        return HostTask(reading(src, dst)) if isinstance(src, Remote) else super().copy(src, dst)

    def combine(
        self,
        src: Any,
        own: np.ndarray | None,
        dst: np.ndarray,
        op: Reduction,
        factor: float | None,
    ) -> list[Task]:
        if not isinstance(src, Remote):
            return super().combine(src, own, dst, op, factor)
        # Block by block: what has been read is in the cache when it is reduced.
        count = max(1, BLOCK // dst.dtype.itemsize)
        blocks: list[tuple[int, Callable[[], None], list[Task]]] = []
        for at in range(0, dst.size, count):
            stop = min(at + count, dst.size)
            part = dst[at:stop]
            if own is None:
                came = self._landing[: part.nbytes].view(dst.dtype)
                tasks = self.reduced(came, part, op, factor)
            else:
                came = part
                tasks = self.reduced(own[at:stop], part, op, factor)
            blocks.append((at, reading(src.part(at, stop), came), tasks))

        def work() -> None:
            for at, read, tasks in blocks:
                try:
                    read()
                except Unread as unread:
                    unread.done = at
                    raise
                for task in tasks:
                    task.start()

        return [HostTask(work)]


def may_be_read_by(pid: int) -> None:
    """Let process ``pid`` and what it has started read this one, where the system's setting for
    debuggers would forbid it; 0: nobody but debuggers. Does nothing where there is none.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _no_readv(*arguments: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _bound_readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):  # not Linux
        return _no_readv
    call.restype = ctypes.c_ssize_t
    extents = ctypes.POINTER(_Extent)
    count = ctypes.c_ulong
    call.argtypes = [ctypes.c_int, extents, count, extents, count, count]
    return call


_readv = _bound_readv()
