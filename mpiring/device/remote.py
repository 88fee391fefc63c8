"""The host's memory, that of other processes of this machine included.

The kernel copies from the memory of another process into this one's (process_vm_readv(2),
Linux): one pass, whatever lies there, and nobody has to prepare anything. It may be
forbidden: by the system's setting for debuggers, by a container, for another user's process.
And there is memory that it does not copy, such as what a driver has mapped. So both are
tried before they are used: ``Neighbour`` tries a process, ``owns`` an array.

A handle names a process; an array is found in it by its address.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice, HostTask, address_of
from mpiring.errors import TransportError
from mpiring.task import Task

_HANDLE = struct.Struct("<q")

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

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> Remote:
        start, stop, _ = part.indices(self.size)
        return replace(
            self, address=self.address + start * self.dtype.itemsize, size=max(0, stop - start)
        )


class RemoteHostDevice(HostDevice):
    """NumPy arrays; the source of a task may lie in another process.

    It has one block of working memory: its tasks are to be started one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._landing = self.empty(self.block, np.uint8)

    def owns(self, array: np.ndarray) -> bool:
        """Whether other processes can read where the array lies, if they may read this one."""
        octets = array.view(np.uint8)
        ends = [octets[:1], octets[-1:]]
        return all(
            _readable(Remote(os.getpid(), address_of(end), end.size, end.dtype)) for end in ends
        )

    def export(self, array: np.ndarray) -> tuple[bytes, int] | None:
        return _HANDLE.pack(os.getpid()), address_of(array)

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Remote:
        (pid,) = _HANDLE.unpack_from(handle)
        return Remote(pid, start, count, np.dtype(dtype))

    def copy(self, src: Any, dst: np.ndarray) -> Task:
        if not isinstance(src, Remote):
            return super().copy(src, dst)
        return HostTask(partial(_run, list(_readings(src, dst))))

    def reduce(self, src: Any, dst: np.ndarray, op: Reduction) -> Task:
        if not isinstance(src, Remote):
            return super().reduce(src, dst, op)
        # Block by block: what has been read is in the cache when it is reduced.
        block = max(1, self.block // dst.dtype.itemsize)
        calls: list[Callable[[], Any]] = []
        for at in range(0, dst.size, block):
            part = dst[at : at + block]
            came = self._landing[: part.nbytes].view(dst.dtype)
            calls += _readings(src[at : at + block], came)
            calls.append(super().reduce(came, part, op).start)
        return HostTask(partial(_run, calls))


def _run(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _readings(src: Remote, dst: np.ndarray) -> Iterator[Callable[[], None]]:
    """Calls that read ``src`` into ``dst``. They raise TransportError."""
    into = address_of(dst)
    for at in range(0, src.nbytes, _LIMIT):
        length = min(_LIMIT, src.nbytes - at)
        here, there = _Extent(into + at, length), _Extent(src.address + at, length)
        yield partial(_read, src.pid, ctypes.pointer(here), ctypes.pointer(there), length)


def _read(pid: int, here: Any, there: Any, length: int) -> None:
    got = _readv(pid, here, 1, there, 1, 0)
    if got != length:
        number = ctypes.get_errno() if got < 0 else errno.EFAULT
        raise TransportError(f"memory of process {pid} cannot be read: {os.strerror(number)}")


def _readable(src: Remote) -> bool:
    try:
        _run(list(_readings(src, np.empty(src.nbytes, np.uint8))))
    except TransportError:
        return False
    return True


def may_be_read_by(pid: int) -> None:
    """Let process ``pid`` and what it has started read this one, where the system's setting for
    debuggers would forbid it. Does nothing where it has no such setting.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _bound_readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):  # not Linux
        return lambda *_: -1
    call.restype = ctypes.c_ssize_t
    extents = ctypes.POINTER(_Extent)
    count = ctypes.c_ulong
    call.argtypes = [ctypes.c_int, extents, count, extents, count, count]
    return call


_readv = _bound_readv()
